"""Benchmark 5: ai_query against real vLLM on the CPU, beside vLLM without HTTP on the same prompts.

The same model, engine arguments and rows, one after the other. Both times run from the first request to the last token,
start and tail included; loading the model and starting Ray's actors are not counted. Client, Ray and engine share the
machine's cores; vLLM offline has them to itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Row, chat_body, make_rows
from benchmarks.real_vllm import ENGINE, ENV, MODEL, VllmServer, serve_vllm

ROWS = 320


def rows(count: int, seed: int) -> list[Row]:
    """Prompts of about 48 tokens, answers of 32 in the median and 128 at most."""
    return make_rows(count, seed, prompt_tokens=48, median=32, cap=128)


def alone(model: str, count: int) -> dict[str, Any]:
    """vLLM without HTTP, in this process."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, **ENGINE)
    seconds, tokens = 0.0, 0
    for some, seed in ((16, 1), (count, 2)):  # the first time is to warm up
        asked = rows(some, seed)
        params = [SamplingParams(max_tokens=row.max_tokens, ignore_eos=True, temperature=0.0) for row in asked]
        chats = [[{"role": "user", "content": row.prompt}] for row in asked]
        begin = time.monotonic()
        replies = llm.chat(chats, params, use_tqdm=False)
        seconds = time.monotonic() - begin
        tokens = sum(len(reply.outputs[0].token_ids) for reply in replies)
    return {"seconds": round(seconds, 2), "tokens": tokens, "tokens_per_s": round(tokens / seconds, 1)}


class Meter(threading.Thread):
    """When the first and the last token came."""

    def __init__(self, server: VllmServer) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._over = threading.Event()
        self.seen: list[tuple[float, float]] = []

    def run(self) -> None:
        while not self._over.wait(0.1):
            self.seen.append((time.monotonic(), self._server.generated()))

    def stop(self) -> dict[str, Any]:
        """The figures."""
        self._over.set()
        self.join()
        first, last = self.seen[0][1], self.seen[-1][1]
        begin = max(t for t, tokens in self.seen if tokens == first)
        end = min(t for t, tokens in self.seen if tokens == last)
        return {
            "seconds": round(end - begin, 2),
            "tokens": int(last - first),
            "tokens_per_s": round((last - first) / (end - begin), 1),
        }


def through_ai_query(base_url: str, count: int, seed: int) -> int:
    """Rows answered by ai_query with its defaults."""
    import ray

    from airflow_provider_raylm.ray_data.query import ai_query

    ds = ray.data.from_items([{"body": json.dumps(chat_body(row, MODEL))} for row in rows(count, seed)])
    out = ai_query(ds, MODEL, body_col="body", base_url=base_url)
    return sum(row["generated_text"]["status"] == "ok" for row in out.iter_rows())


def run(count: int = ROWS) -> dict[str, Any]:
    """Both, one after the other. Needs `ray.init`."""
    from demo.model import smollm2_checkpoint

    model = smollm2_checkpoint()
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.offline", str(model), str(count)],
        env={**os.environ, **ENV},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    offline = json.loads(child.stdout.splitlines()[-1])
    print("vLLM offline", offline, flush=True)
    with tempfile.TemporaryDirectory() as folder, serve_vllm(model, Path(folder) / "vllm.log") as server:
        through_ai_query(server.base_url, 16, seed=1)
        meter = Meter(server)
        meter.start()
        answered = through_ai_query(server.base_url, count, seed=2)
        online = {"rows": answered, **meter.stop()}
    print("ai_query", online, flush=True)
    ratio = round(online["tokens_per_s"] / offline["tokens_per_s"], 3)
    return {"model": model.name, "rows": count, "offline": offline, "ai_query": online, "ratio": ratio}


if __name__ == "__main__":
    print(json.dumps(alone(sys.argv[1], int(sys.argv[2]))))
