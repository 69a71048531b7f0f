"""Benchmark 2: the same rows through ai_query and through other clients, one after the other, on the same server.

The server is simulated (`server.py`) and started afresh for each client; the clients are real. ai_query and Ray's HTTP
stage run on this machine's Ray. The other projects run in virtual environments of their own, which are made where they
are missing in the folder `RAYLM_PEERS_DIR`, by default one that goes away at the end. Slow clients get fewer rows:
throughput is taken in the middle of a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray

from airflow_provider_raylm.ray_data.contracts import Begun, Sample
from benchmarks.endpoint import Watch, serve
from benchmarks.server import prompt
from benchmarks.workload import MIXES

WORDS = 40
LONGEST_S = 75.0
"""Longest a client may take."""
PEERS = {
    "curator": ("bespokelabs-curator==0.1.31",),
    # its extra "inference" also asks for vLLM and SGLang, which a client of an endpoint does not use
    "datatrove": ("datatrove[io]==0.10.1", "httpx", "aiofiles", "aiosqlite"),
    "daft": ("daft[openai]==0.7.26",),
}


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

    def begun(self, request: Begun) -> None:
        pass

    def count(self, **_: int) -> None:
        pass

    async def flush(self) -> None:
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
        url=f"{base_url}/chat/completions",
        qps=None,
        concurrency=concurrency,
        batch_size=batch_size,
        http_request_stage={"num_cpus": 0.1} if concurrency > 1 else True,  # else the CPUs bound the actors
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "payload": {"model": "sim", "messages": [{"role": "user", "content": row["text"]}], "temperature": 0.0}
        },
        postprocess=lambda row: {"answer": row["http_response"]["choices"][0]["message"]["content"]},
    )
    ds = ray.data.from_items(rows(count), override_num_blocks=max(8, concurrency))
    return sum("answer" in r for r in processor(ds).iter_rows())


@contextlib.contextmanager
def peers_dir() -> Iterator[Path]:
    """Where the other projects are installed."""
    if given := os.environ.get("RAYLM_PEERS_DIR"):
        yield Path(given)
    else:
        with tempfile.TemporaryDirectory(prefix="raylm-peers-") as made:
            yield Path(made)


def install(folder: Path, peer: str) -> Path:
    """The Python of a virtual environment that has `peer`.

    Raises:
        subprocess.CalledProcessError: It cannot be installed here; `stderr` says why.
    """
    venv = folder / f"peers-venv-{peer}"
    python, done = venv / "bin" / "python", venv / ".installed"
    wanted = "\n".join(PEERS[peer])
    if not done.is_file() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, capture_output=True, text=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PEERS[peer]], check=True, capture_output=True, text=True)
        done.write_text(wanted)
    return python


def other(base_url: str, count: int, *, python: Path, peer: str, concurrency: int = 0) -> int:
    """Rows answered by another project, in a process of its own. `concurrency` 0 leaves its defaults."""
    with tempfile.TemporaryDirectory(prefix="raylm-peer-") as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows(count)))
        script = Path(__file__).with_name(f"peers_{peer}.py")
        done = subprocess.run(
            [python, script, base_url, file, str(concurrency)],
            env={**os.environ, "HOME": folder},
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{script.name} failed: {done.stderr[-500:]}")
        return int(json.loads(done.stdout.splitlines()[-1])["answered"])


def measure(name: str, shape: str, scale: float, count: int, ask: Callable[[str, int], int]) -> dict[str, Any]:
    """Run one client against a fresh server."""
    with serve(shape, scale=scale) as endpoint:
        watch = Watch(endpoint)
        watch.start()
        begin, answered, error = time.monotonic(), 0, {}
        try:
            answered = ask(endpoint.base_url, count)
        except (RuntimeError, subprocess.TimeoutExpired) as exc:  # its throughput was seen all the same
            late = isinstance(exc, subprocess.TimeoutExpired)
            error = {"error": f"did not end within {exc.timeout:.0f} s" if late else str(exc)[-300:]}
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
            **error,
        }
    print(result, flush=True)
    return result


def run(*, shape: str = "256 sequences", scale: float = 1.0, count: int = 2400) -> dict[str, Any]:
    """All clients, one after the other."""
    clients: list[tuple[str, int, Callable[[str, int], int]]] = [
        ("ai_query, defaults", count, ai_query),
        ("ai_query, fixed 512", count, partial(ai_query, concurrency=1, limiter_factory=Fix(512))),
        ("ray.data.llm HTTP stage, defaults (1 actor)", 12, partial(ray_http, concurrency=1)),
        ("ray.data.llm HTTP stage, 16 actors", 96, partial(ray_http, concurrency=16, batch_size=4)),
        ("ray.data.llm HTTP stage, 48 actors", 336, partial(ray_http, concurrency=48, batch_size=4)),
    ]
    missing = {}
    with peers_dir() as folder:
        for peer, tries in {
            "curator": ((0, 30), (512, count)),
            "datatrove": ((0, count),),
            "daft": ((0, 400), (512, count)),
        }.items():
            try:
                python = install(folder, peer)
            except subprocess.CalledProcessError as exc:
                missing[peer] = f"{' '.join(PEERS[peer])}: {(exc.stderr or '').strip()[-300:]}"
                print(missing[peer], flush=True)
                continue
            clients += [
                (
                    f"{PEERS[peer][0]}, {f'{tuned} in flight' if tuned else 'defaults'}",
                    some,
                    partial(other, python=python, peer=peer, concurrency=tuned),
                )
                for tuned, some in tries
            ]
        results = [measure(name, shape, scale, some, ask) for name, some, ask in clients]
    rate = {r["name"]: r["tokens_per_s_mid_run"] for r in results}
    ours = rate["ai_query, defaults"]
    return {
        "shape": shape,
        "scale": scale,
        "results": results,
        "not_installed": missing,
        "ratio": {name: round(ours / of, 2) for name, of in rate.items() if of},
    }
