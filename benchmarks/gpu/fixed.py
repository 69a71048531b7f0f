"""A fixed number of requests in flight: what a static sweep measures. Prints one JSON line per concurrency.

Bare aiohttp in several processes, so that the client is not what is measured.

python -m benchmarks.gpu.fixed --base-url http://127.0.0.1:8000/v1 --model M --plan 256:1500:200,1024:4000:201
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.pool
import time

from benchmarks.gpu.rows import Row, chat_body, make_rows

Ended = tuple[float, float, int]
"""Sent and done in epoch seconds, and completion tokens (0: failed) of one request."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--plan", required=True, help="CONCURRENCY:ROWS:SEED, comma separated")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--max-s", type=float, default=240.0, help="start no step after this many seconds")
    args = parser.parse_args()
    begun = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        _step(pool, args, 4 * args.processes, 8 * args.processes, 1)  # connections, imports
        for item in args.plan.split(","):
            if time.monotonic() - begun > args.max_s:
                print(json.dumps({"plan": item, "skipped": "time"}), flush=True)
                continue
            concurrency, rows, seed = (int(x) for x in item.split(":"))
            print(json.dumps(_step(pool, args, concurrency, rows, seed)), flush=True)


def _step(
    pool: multiprocessing.pool.Pool, args: argparse.Namespace, concurrency: int, count: int, seed: int
) -> dict[str, object]:
    rows, n = make_rows(count, seed), args.processes
    work = [(args.base_url, args.model, max(1, concurrency // n), rows[i::n]) for i in range(n)]
    begun = time.monotonic()
    parts = pool.starmap(_run, work, chunksize=1)
    seconds = time.monotonic() - begun
    ended = [e for part, _ in parts for e in part]
    done = [e for e in ended if e[2]]
    tokens = sum(e[2] for e in done)
    return {
        "concurrency": concurrency,
        "rows": count,
        "seed": seed,
        "failed": len(ended) - len(done),
        "seconds": round(seconds, 2),
        "rows_per_s": round(len(done) / seconds, 1),
        "tokens_per_s": round(tokens / seconds),
        "steady_tokens_per_s": steady_rate(done),
        "client_cores": round(sum(cpu for _, cpu in parts) / seconds, 2),
    }


def steady_rate(ended: list[Ended]) -> int | None:
    """Tokens/s while the concurrency was full: from the first to the last start, tokens spread over each request."""
    first, last = min(e[0] for e in ended), max(e[0] for e in ended)
    if last - first < 1:
        return None
    inside = sum(n * max(0.0, min(done, last) - sent) / max(1e-9, done - sent) for sent, done, n in ended)
    return round(inside / (last - first))


def _run(base_url: str, model: str, concurrency: int, rows: list[Row]) -> tuple[list[Ended], float]:
    cpu = time.process_time()
    return asyncio.run(_closed_loop(base_url, model, concurrency, rows)), time.process_time() - cpu


async def _closed_loop(base_url: str, model: str, concurrency: int, rows: list[Row]) -> list[Ended]:
    import aiohttp

    waiting, ended = iter(rows), []
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def slot() -> None:
            for row in waiting:
                sent, tokens = time.time(), 0
                try:
                    async with session.post(f"{base_url}/chat/completions", json=chat_body(row, model)) as reply:
                        reply.raise_for_status()
                        tokens = (await reply.json())["usage"]["completion_tokens"]
                except (aiohttp.ClientError, TimeoutError):
                    pass
                ended.append((sent, time.time(), tokens))

        await asyncio.gather(*(slot() for _ in range(concurrency)))
    return ended


if __name__ == "__main__":
    main()
