"""A thousand waiting jobs in one triggerer: what they cost, and whether the event loop keeps its pace.

Runs `RayJobTrigger`s on one event loop, as a triggerer does, against a dashboard in a process of its own where every
job is RUNNING. Measures the CPU of this process and how late a 10 ms timer fires. Goal: under half a core and under
100 ms at a poll interval of 10 s.

    python -m benchmarks.trigger_scale [--triggers 1000] [--seconds 60] [--poll-interval 10] [--no-logs] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import platform
import time
from typing import Any

from tests.support.fake_dashboard import connection_env, fake_dashboard


def _serve(count: int, ready: Any, stop: Any) -> None:
    with fake_dashboard() as dashboard:
        dashboard.stream_tick_s = 1.0
        dashboard.requests = dashboard.headers = _Nothing()  # type: ignore[assignment]
        for number in range(count):
            dashboard.add(f"job-{number}", status="RUNNING", log="hello\n")
        ready.put(dashboard.url)
        stop.wait()


class _Nothing(list[Any]):
    def append(self, item: Any) -> None:
        """Keep nothing."""


async def _measure(count: int, seconds: float, poll_interval: float, logs: bool) -> dict[str, Any]:
    from airflow_provider_raylm.triggers.ray import RayJobTrigger

    looks = 0

    class Counted(RayJobTrigger):
        async def _look(self, client: Any) -> Any:
            nonlocal looks
            looks += 1
            return await super()._look(client)

    tasks = []
    for number in range(count):
        trigger = Counted(submission_id=f"job-{number}", poll_interval=poll_interval, stream_logs=logs)
        tasks.append(asyncio.create_task(trigger.watch()))
        await asyncio.sleep(poll_interval / count)  # as a triggerer that takes them up one after the other
    await asyncio.sleep(poll_interval)
    lags: list[float] = []
    looks, cpu, start = 0, time.process_time(), time.monotonic()
    while (now := time.monotonic()) - start < seconds:
        await asyncio.sleep(0.01)
        lags.append(time.monotonic() - now - 0.01)
    wall, used = time.monotonic() - start, time.process_time() - cpu
    ended = sum(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    lags.sort()
    return {
        "triggers": count,
        "poll_interval_s": poll_interval,
        "log_streams": count if logs else 0,
        "seconds": round(wall, 1),
        "looks_per_s": round(looks / wall, 1),
        "cpu_cores": round(used / wall, 3),
        "lag_p50_ms": round(lags[len(lags) // 2] * 1000, 1),
        "lag_p99_ms": round(lags[int(len(lags) * 0.99)] * 1000, 1),
        "lag_max_ms": round(lags[-1] * 1000, 1),
        "ended_early": ended,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }


def main() -> None:
    """Measure once and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triggers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--poll-interval", type=float, default=10)
    parser.add_argument("--no-logs", action="store_true", help="without a log stream for each job")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Queue(), context.Event()
    server = context.Process(target=_serve, args=(arguments.triggers, ready, stop), daemon=True)
    server.start()
    try:
        os.environ.update(connection_env(ready.get(timeout=60)))
        figures = asyncio.run(
            _measure(arguments.triggers, arguments.seconds, arguments.poll_interval, not arguments.no_logs)
        )
    finally:
        stop.set()
        server.join(10)
    if arguments.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:16} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
