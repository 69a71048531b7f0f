"""Benchmark 1: flow control from its defaults against the best of a static sweep, every shape x every mix of lengths.

In virtual time: two minutes of load on each simulated server. Throughput is what they generate from second 30 on.
"""

from __future__ import annotations

from typing import Any

from benchmarks.replay import Replay, fixed, job
from benchmarks.workload import MIXES, SHAPES

STATIC = (16, 64, 256, 512, 1024, 2048, 4096)
SIGNALS = {"metrics": "metrics ttft fit", "ttft": "ttft fit", "fit": "fit", "throughput": ""}
FROM_S, UNTIL_S = 30, 120


def run(only: str = "") -> dict[str, Any]:
    """All combinations whose name contains `only`."""
    rows = []
    for shape in SHAPES:
        for mix in MIXES:
            name = f"{shape.name} / {mix.name}"
            if only not in name:
                continue
            static = {n: Replay(shape, [fixed(mix, n)]).run(UNTIL_S + 1).tokens_per_s(FROM_S, UNTIL_S) for n in STATIC}
            best = max(static.values())
            row: dict[str, Any] = {
                "name": name,
                "best": round(best),
                "best_at": max(static, key=lambda n: static[n]),
                "static": {n: round(v / best, 3) for n, v in static.items()},
            }
            for label, signals in SIGNALS.items():
                one = job(mix, signals=signals)
                replay = Replay(shape, [one]).run(UNTIL_S + 1)
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


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    parts = [f"{row['name']:32} best {row['best']:6d} at {row['best_at']:4d}, 256: {row['static'][256]:.2f}"]
    for label in SIGNALS:
        of = row[label]
        parts.append(f"{label} {of['ratio']:.3f} (90% {of['seconds_to_90']} s, limit {of['limit']})")
    return " | ".join(parts)
