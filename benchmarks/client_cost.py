"""Benchmark 3: what a row costs the client, against a server that answers at once, on the same machine.

The engine and the client of ai_query run in this process, with the local limiter; the server has its own. CPU is this
process's own, so a busy machine lengthens the seconds, not the cost.
"""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Any

import uvloop

from airflow_provider_raylm.ray_data.client import EndpointClient, most_connections
from airflow_provider_raylm.ray_data.engine import Engine
from airflow_provider_raylm.ray_data.limiter import LocalLimiter
from airflow_provider_raylm.ray_data.requests import Query, Secret
from benchmarks.endpoint import serve
from benchmarks.server import prompt

ROWS = 10_000


async def _ask(base_url: str, count: int) -> dict[str, Any]:
    query = Query(model="sim", base_url=base_url, api_key=Secret("EMPTY"), prompt_col="text")
    limiter = LocalLimiter(base_url=base_url, model="sim", first_limit=256)
    engine = Engine(query, EndpointClient(query, connections=most_connections(8192)), limiter)
    text = prompt(30, 30)[:240]
    body = query.body({"text": text})
    await engine.answer(500, lambda _: dict(body))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu_s, begin = time.process_time(), time.monotonic()
    replies = await engine.answer(count, lambda _: dict(body))
    cpu_s, seconds = time.process_time() - cpu_s, time.monotonic() - begin
    result = {
        "rows": sum(r["status"] == "ok" for r in replies),
        "cpu_ms_per_row": round(1000 * cpu_s / count, 3),
        "rows_per_s": round(count / seconds, 1),
        "rows_per_s_per_core": round(count / cpu_s, 1),
        "peak_memory_growth_mib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024, 1),
        "loop_lag_s": limiter.status()["loop_lag_s"],
        "limit": limiter.status()["limit"],
        "signal": limiter.status()["signal"],
    }
    await engine.close()
    return result


def run(count: int = ROWS) -> dict[str, Any]:
    """Ask `count` rows of a server that answers at once."""
    with serve("instant") as endpoint, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(_ask(endpoint.base_url, count))
    print(result, flush=True)
    return result
