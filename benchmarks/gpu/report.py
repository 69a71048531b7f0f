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
        draw(queries, results["ceiling_tokens_per_s"], args.to / "gpu.svg")


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
        asking_s, steady = line["flow"]["asking_s"], steady_rate(line["trace"])
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
            "steady_tokens_per_s": steady,
        }
        if ceiling := ceilings.get(line["machine"]):
            figures["of_ceiling"] = round(whole / ceiling, 3)
        if best:
            figures["of_best_fixed"] = round(whole / best["tokens_per_s"], 3)
            if steady and best.get("steady_tokens_per_s"):
                figures["steady_of_best_fixed"] = round(steady / best["steady_tokens_per_s"], 3)
            enough = min(f["concurrency"] for f in sweep if f["tokens_per_s"] >= 0.9 * best["tokens_per_s"])
            figures["s_to_90_percent"] = first_s(line["trace"], enough)
            figures["in_flight_at_90_percent"] = enough
        queries.append(figures)
    rounded = {machine: round(value) for machine, value in ceilings.items()}
    return {"ceiling_tokens_per_s": rounded, "queries": queries, "stages": by_stage}


def steady_rate(trace: dict[str, list[Any]]) -> int | None:
    """Tokens/s finished while at least 90 % of the most requests were in flight."""
    in_flight, at, tokens = trace["in_flight"], trace["elapsed_s"], trace["completion_tokens"]
    if not in_flight:
        return None
    full = [i for i, n in enumerate(in_flight) if n >= 0.9 * max(in_flight)]
    seconds = at[full[-1]] - at[full[0]]
    return round((tokens[full[-1]] - tokens[full[0]]) / seconds) if seconds >= 5 else None


def first_s(trace: dict[str, list[Any]], in_flight: int) -> float | None:
    """Seconds from the first request until so many were in flight, or up to one more: a trace has one row a second."""
    begun = next(i for i, n in enumerate(trace["in_flight"]) if n)
    before = trace["elapsed_s"][begun - 1] if begun else 0.0
    reached = next((t for t, n in zip(trace["elapsed_s"], trace["in_flight"], strict=True) if n >= in_flight), None)
    return None if reached is None else round(reached - before, 1)


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
            f"{q['tokens_per_s']:,} / {q['steady_tokens_per_s'] or 0:,}",
            q["errors"],
        )
        for q in results["queries"]
    ]
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def draw(queries: Iterable[Line], ceilings: dict[int, int], path: Path) -> None:
    """Limit and requests in flight, and tokens/s against the ceiling, over the time of each query."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    queries = list(queries)
    figure, axes = plt.subplots(
        2, len(queries), figsize=(5 * len(queries), 6), sharex="col", sharey="row", squeeze=False
    )
    for column, query in enumerate(queries):
        trace = query["trace"]
        at, tokens = trace["elapsed_s"], trace["completion_tokens"]
        above, below = axes[0][column], axes[1][column]
        above.plot(at, trace["limit"], label="limit")
        above.plot(at, trace["in_flight"], label="in flight")
        above.set_title(f"machine {query['machine']}, {query['rows']} rows")
        span = 5
        rate = [(tokens[i] - tokens[i - span]) / (at[i] - at[i - span]) for i in range(span, len(at))]
        below.plot(at[span:], rate, color="tab:green", label="tokens/s finished (5 s mean)")
        if ceiling := ceilings.get(query["machine"]):
            below.axhline(ceiling, linestyle="--", color="gray", label="vLLM offline")
        below.set_xlabel("seconds")
    axes[0][0].legend()
    axes[1][0].legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
