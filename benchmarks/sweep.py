"""Benchmark 1: flow control from its defaults against the best of a static sweep, every shape x every mix of lengths.

In virtual time: two minutes of load on each simulated server. Throughput is what they generate from second 30 on.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.replay import Replay, fixed, job
from benchmarks.workload import MIXES, SHAPES

STATIC = (16, 64, 256, 512, 1024, 2048, 4096)
SIGNALS = {"metrics": "metrics ttft fit", "ttft": "ttft fit", "fit": "fit", "throughput": ""}
FROM_S, UNTIL_S = 30, 120


UNSEEN_SEEDS = (101, 202, 303)
"""Seeds of rows that were not looked at while the controller was developed."""


def run(only: str = "", seed: int = 0) -> dict[str, Any]:
    """All combinations whose name contains `only`."""
    rows = []
    for shape in SHAPES:
        for mix in MIXES:
            name = f"{shape.name} / {mix.name}"
            if only not in name:
                continue
            static = {}
            for n in STATIC:
                replay = Replay(shape, [fixed(mix, n, seed=seed)], seed=seed).run(UNTIL_S + 1)
                static[n] = replay.tokens_per_s(FROM_S, UNTIL_S)
            best = max(static.values())
            row: dict[str, Any] = {
                "name": name,
                "best": round(best),
                "best_at": max(static, key=lambda n: static[n]),
                "static": {n: round(v / best, 3) for n, v in static.items()},
            }
            for label, signals in SIGNALS.items():
                one = job(mix, signals=signals, seed=seed)
                replay = Replay(shape, [one], seed=seed).run(UNTIL_S + 1)
                full = (t for t in range(UNTIL_S - 3) if replay.tokens_per_s(t, t + 3) >= 0.9 * best)
                row[label] = {
                    "ratio": round(replay.tokens_per_s(FROM_S, UNTIL_S) / best, 3),
                    "seconds_to_90": next(full, None),
                    "limit": one.trace[-1]["limit"],
                    "waiting": round(sum(w for w, _ in replay.queue[60:]) / len(replay.queue[60:]), 1),
                    "signal": one.trace[-1]["signal"],
                }
            print(line(row), flush=True)
            rows.append(row)
    return {
        "rows": rows,
        "least": {label: min(r[label]["ratio"] for r in rows) for label in SIGNALS},
    }


def run_unseen() -> dict[str, Any]:
    """The same for seeds not used before: least and median over all combinations, by source of the waiting share."""
    rows = [{"seed": seed, **row} for seed in UNSEEN_SEEDS for row in run(seed=seed)["rows"]]
    ratios = {label: sorted(r[label]["ratio"] for r in rows) for label in SIGNALS}
    summary = {
        label: {
            "least": of[0],
            "median": statistics.median(of),
            "at_least_0.95": sum(r >= 0.95 for r in of),
            "of": len(of),
        }
        for label, of in ratios.items()
    }
    print(summary, flush=True)
    return {
        "seeds": UNSEEN_SEEDS,
        "summary": summary,
        "rows": [{"seed": r["seed"], "name": r["name"], **{k: r[k]["ratio"] for k in SIGNALS}} for r in rows],
    }


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    parts = [f"{row['name']:32} best {row['best']:6d} at {row['best_at']:4d}, 256: {row['static'][256]:.2f}"]
    for label in SIGNALS:
        of = row[label]
        parts.append(f"{label} {of['ratio']:.3f} (90% {of['seconds_to_90']} s, limit {of['limit']})")
    return " | ".join(parts)
