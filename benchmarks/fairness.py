"""Benchmark 4: jobs that start at different times on one endpoint, and what an interactive user notices of them."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.engine import Shape
from benchmarks.replay import Replay, job
from benchmarks.workload import MIXES

START_EVERY_S = 30.0
SETTLED_S = 120


def jain(values: list[float]) -> float:
    """Jain's fairness index: 1 when all are equal, 1/n when one has everything."""
    return sum(values) ** 2 / (len(values) * sum(v * v for v in values))


def run() -> dict[str, Any]:
    """Two and three jobs, by metrics and by probes, on a large and a small server."""
    rows = []
    alone = {}
    for shape in (Shape(name="256 sequences"), Shape(name="16 sequences", max_num_seqs=16)):
        waits = Replay(shape, [], interactive_per_s=0.5).run(120).waits
        alone[shape.name] = statistics.median(w for _, w in waits)
        for count in (1, 2, 3):
            for signals in ("metrics ttft fit", "ttft fit"):
                jobs = [job(MIXES[1], seed=i, start_s=i * START_EVERY_S, signals=signals) for i in range(count)]
                last_s = (count - 1) * START_EVERY_S
                replay = Replay(shape, jobs, interactive_per_s=0.5).run(last_s + SETTLED_S)
                before = [j.done for j in jobs]
                replay.run(last_s + SETTLED_S + 120)
                got = [float(j.done - b) for j, b in zip(jobs, before, strict=True)]
                late = sorted(w for t, w in replay.waits if t > last_s + SETTLED_S)
                rows.append(
                    {
                        "shape": shape.name,
                        "jobs": count,
                        "signal": jobs[0].trace[-1]["signal"],
                        "jain": round(jain(got), 3),
                        "limits": [j.trace[-1]["limit"] for j in jobs],
                        "ttft_added_median_s": round(statistics.median(late) - alone[shape.name], 3),
                        "ttft_added_p95_s": round(late[int(0.95 * len(late))] - alone[shape.name], 3),
                    }
                )
                print(rows[-1], flush=True)
    return {"rows": rows, "ttft_alone_s": alone}
