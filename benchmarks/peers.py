"""Benchmark 2: the same rows through ai_query and through other clients, one after the other, on the same server.

The server is simulated (`server.py`), the clients are real and run on this machine's Ray. ai_query and the static
sweep go through the same code, the sweep with a fixed limit instead of the adaptive one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray

from airflow_provider_raylm.ray_data.contracts import Sample
from benchmarks.endpoint import Watch, serve
from benchmarks.server import prompt
from benchmarks.workload import MIXES

WORDS = 40


class FixedLimiter:
    """A limit set by hand, for the static sweep."""

    def __init__(self, limit: int) -> None:
        self._slots = asyncio.Semaphore(limit)
        self.window = 16 * limit

    async def acquire(self) -> bool:
        await self._slots.acquire()
        return False

    def release(self, sample: Sample) -> None:
        self._slots.release()

    def count(self, **_: int) -> None:
        pass

    async def close(self) -> None:
        pass


class Fix:
    """Makes a `FixedLimiter` in the query actor."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self) -> FixedLimiter:
        return FixedLimiter(self.limit)


def rows(count: int, seed: int = 1) -> list[dict[str, str]]:
    """Prompts that tell the simulated server how long they and their answers are."""
    some = itertools.islice(MIXES[1].rows(seed), count)
    return [{"text": prompt(p, c)[: 6 * WORDS]} for p, c in some]


def ai_query(base_url: str, count: int, **kwargs: Any) -> int:
    """Rows answered by ai_query, with defaults unless `kwargs` say otherwise."""
    import airflow_provider_raylm.ray_data.query as query

    ds = ray.data.from_items(rows(count), override_num_blocks=8)
    out = query.ai_query(ds, model="sim", prompt_col="text", base_url=base_url, api_key="EMPTY", **kwargs)
    return sum(r["generated_text"]["status"] == "ok" for r in out.iter_rows())


def ray_http(base_url: str, count: int, *, concurrency: int, batch_size: int = 64) -> int:
    """Rows answered by `ray.data.llm`'s HTTP stage."""
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    config = HttpRequestProcessorConfig(
        url=f"{base_url}/chat/completions", qps=None, concurrency=concurrency, batch_size=batch_size
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "payload": {"model": "sim", "messages": [{"role": "user", "content": row["text"]}], "temperature": 0.0}
        },
        postprocess=lambda row: {"answer": row["http_response"]["choices"][0]["message"]["content"]},
    )
    ds = ray.data.from_items(rows(count), override_num_blocks=8)
    return sum("answer" in r for r in processor(ds).iter_rows())


def measure(name: str, shape: str, scale: float, count: int, ask: Callable[[str, int], int]) -> dict[str, Any]:
    """Run one client against a fresh server."""
    with serve(shape, scale=scale) as endpoint:
        watch = Watch(endpoint)
        watch.start()
        begin = time.monotonic()
        try:
            answered = ask(endpoint.base_url, count)
        finally:
            watch.stop()
        seconds = time.monotonic() - begin
        result = {
            "name": name,
            "rows": answered,
            "seconds": round(seconds, 1),
            "rows_per_s": round(answered / seconds, 1),
            "tokens_per_s_mid_run": round(watch.rate(), 1),
            "most_in_flight": endpoint.counters()["highest"],
        }
    print(result, flush=True)
    return result


def run(*, shape: str = "256 sequences", scale: float = 1.0, count: int = 6000) -> dict[str, Any]:
    """All clients, one after the other."""
    results = [measure("ai_query, defaults", shape, scale, count, ai_query)]
    clients: list[tuple[str, int, Callable[[str, int], int]]] = [
        (
            f"ai_query, fixed {n}",
            count if n > 64 else count // 2,
            partial(ai_query, concurrency=1, limiter_factory=Fix(n)),
        )
        for n in (64, 256, 512, 1024)
    ]
    clients += [
        (f"ray.data.llm HTTP stage, {n} actors", some, partial(ray_http, concurrency=n))
        for n, some in ((1, 40), (16, 400))
    ]
    results += [measure(name, shape, scale, some, ask) for name, some, ask in clients]
    best = max(r["tokens_per_s_mid_run"] for r in results if "fixed" in r["name"])
    return {"shape": shape, "scale": scale, "results": results, "ratio": results[0]["tokens_per_s_mid_run"] / best}
