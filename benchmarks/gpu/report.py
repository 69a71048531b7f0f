"""One JSON, the table and the plot of the `results.jsonl` files of runs, in their order.

A query is compared with the sweep on the same machine: one H200 was a quarter faster than another.

python -m benchmarks.gpu.report OUT1/results.jsonl OUT2/results.jsonl --to benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.run import VARIANTS

Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, required=True, help="folder of gpu.json and gpu.svg")
    args = parser.parse_args()
    lines: list[Line] = []
    machine = 0
    for line in (json.loads(text) for path in args.files for text in path.read_text().splitlines()):
        machine += line["stage"] == "machine"
        lines.append({"machine": machine, **line})
    args.to.mkdir(parents=True, exist_ok=True)
    results = summary(lines)
    (args.to / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    queries = [line for line in lines if line["stage"] == "query" and line.get("trace", {}).get("elapsed_s")]
    if queries:
        draw([q for q in queries if q["machine"] == machine], results["ceiling_tokens_per_s"], args.to / "gpu.svg")


def summary(lines: Sequence[Line]) -> dict[str, Any]:
    """All figures, and each query divided by the ceiling and by the best fixed concurrency of the same deployment."""
    by_stage: dict[str, list[Line]] = {}
    for line in lines:
        by_stage.setdefault(line["stage"], []).append({k: v for k, v in line.items() if k not in ("watch", "log")})
    offline = [line for line in by_stage.get("offline", []) if line.get("tokens_per_s")]
    ceilings = {
        machine: statistics.fmean(line["tokens_per_s"] for line in offline if line["machine"] == machine)
        for machine in {line["machine"] for line in offline}
    }
    queries = []
    for line in by_stage.get("query", []):
        if line.get("status") != "SUCCEEDED":
            continue
        sweep = [
            f
            for f in by_stage.get("fixed", [])
            if (f["machine"], f.get("variant")) == (line["machine"], line["variant"]) and f.get("tokens_per_s")
        ]
        best = max(sweep, key=lambda f: f["tokens_per_s"], default=None)
        asking_s = line["flow"]["asking_s"]
        whole = line["completion_tokens"] / asking_s
        figures: Line = {
            "machine": line["machine"],
            "variant": line["variant"],
            "seed": line["seed"],
            "rows": line["rows"],
            "errors": line["errors"],
            "signal": (line.get("flow") or {}).get("signal"),
            "job_s": line["job_s"],
            "asking_s": asking_s,
            "rows_per_s": round(line["rows"] / asking_s, 1),
            "tokens_per_s": round(whole),
        }
        ceiling = ceilings.get(line["machine"])
        if ceiling and not VARIANTS[line["variant"]].model:
            figures["of_ceiling"] = round(whole / ceiling, 3)
        if best:
            figures["of_best_fixed"] = round(whole / best["tokens_per_s"], 3)
            enough = min(f["concurrency"] for f in sweep if f["tokens_per_s"] >= 0.9 * best["tokens_per_s"])
            figures["s_to_90_percent"] = first_s(line["trace"], enough)
            figures["in_flight_at_90_percent"] = enough
        queries.append(figures)
    rounded = {machine: round(value) for machine, value in ceilings.items()}
    return {"ceiling_tokens_per_s": rounded, "queries": queries, "stages": by_stage}


def first_s(trace: dict[str, list[Any]], in_flight: int) -> float | None:
    """Seconds from the first request until about so many were in flight, or one more: a trace has one row a second."""
    begun = next(i for i, n in enumerate(trace["in_flight"]) if n)
    before = trace["elapsed_s"][begun - 1] if begun else 0.0
    reached = next(
        (t for t, n in zip(trace["elapsed_s"], trace["in_flight"], strict=True) if n >= 0.95 * in_flight), None
    )
    return None if reached is None else round(reached - before, 1)


def generated(query: Line, window_s: float = 4.0) -> tuple[list[float], list[float]]:
    """Times as in the trace, within a second, and tokens/s that the engine generated around them, by its counter.

    The counter's last change is the trace's end: what it shows before the first request is of the run before.
    """
    trace = query["trace"]
    asked = [t for t, n in zip(trace["elapsed_s"], trace["in_flight"], strict=True) if n]
    made: list[tuple[float, float]] = []
    for sample in query["watch"]:
        tokens = sample.get("generation_tokens_total")
        if tokens is not None and (not made or tokens != made[-1][1]):
            made.append((sample["t"], tokens))
    shift_s = asked[-1] - made[-1][0]
    made = [(t + shift_s, tokens) for t, tokens in made if t + shift_s >= asked[0]]
    at, rate = [], []
    for i, (end_s, tokens) in enumerate(made):
        start = next((m for m in reversed(made[:i]) if m[0] <= end_s - window_s), None)
        if start is not None:
            at.append((start[0] + end_s) / 2)
            rate.append((tokens - start[1]) / (end_s - start[0]))
    return at, rate


def table(results: dict[str, Any]) -> str:
    """The README's table."""
    rows = [("stack", "in flight", "rows/s", "tokens/s whole / steady", "failed")]
    stages = results["stages"]
    rows += [
        ("vLLM offline", "all", line["rows_per_s"], f"{line['tokens_per_s']:,}", 0)
        for line in stages.get("offline", [])
        if "tokens_per_s" in line
    ]
    rows += [
        (
            f"fixed, machine {line['machine']}, {line['variant']}",
            line["concurrency"],
            line["rows_per_s"],
            f"{line['tokens_per_s']:,} / {line['steady_tokens_per_s'] or 0:,}",
            line["failed"],
        )
        for line in stages.get("fixed", [])
        if "tokens_per_s" in line
    ]
    rows += [
        (f"Ray HTTP stage, {line['actors']} actors", line["actors"], line["rows_per_s"], f"{line['tokens_per_s']:,}", 0)
        for line in stages.get("http", [])
        if "tokens_per_s" in line
    ]
    rows += [
        (
            f"ai_query, machine {q['machine']}, {q['variant']}",
            "adaptive",
            q["rows_per_s"],
            f"{q['tokens_per_s']:,}",
            q["errors"],
        )
        for q in results["queries"]
    ]
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def draw(queries: Iterable[Line], ceilings: dict[int, int], path: Path) -> None:
    """Limit and requests in flight, and tokens/s against the ceiling, over the time of each query of one machine."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    queries = list(queries)
    figure, axes = plt.subplots(
        2, len(queries), figsize=(5 * len(queries), 6), sharex="col", sharey="row", squeeze=False
    )
    for column, query in enumerate(queries):
        trace = query["trace"]
        above, below = axes[0][column], axes[1][column]
        above.plot(trace["elapsed_s"], trace["limit"], label="limit")
        above.plot(trace["elapsed_s"], trace["in_flight"], label="in flight")
        above.set_title(f"machine {query['machine']}, {query['rows']} rows")
        below.plot(*generated(query), color="tab:green", label="tokens/s generated")
        if ceiling := ceilings.get(query["machine"]):
            below.axhline(ceiling, linestyle="--", color="gray", label="vLLM offline")
        below.set_xlabel("seconds")
    axes[0][0].legend()
    axes[1][0].legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
