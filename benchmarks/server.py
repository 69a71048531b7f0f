"""A simulated continuous-batching server over HTTP: chat completions, plain and streamed, `/v1/models` and `/metrics`.

    python -m benchmarks.server --shape "256 sequences" --port 8300 --scale 4

`engine.py` says how long each step takes; `--scale 4` makes every step and delay four times shorter. How long a prompt
and its answer are is told by the client: the prompt is `<words> <answer tokens> ...`, see `prompt`. What is asked for
stays the same however it is asked, so the same rows can go through different clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from dataclasses import replace
from typing import Any

from aiohttp import web

from benchmarks.engine import Engine, Request, Shape
from benchmarks.workload import SHAPES

BEGINNING = 8
"""Tokens of a stream that come one by one; the rest comes at its end, to save this machine the work."""
INSTANT = Shape(name="instant", max_num_seqs=100_000, base_ms=0.0, per_seq_ms=0.0, per_prefill_ms=0.0)


def prompt(prompt_tokens: int, completion_tokens: int) -> str:
    """A prompt that says how long it is and how long its answer will be."""
    return f"{prompt_tokens} {completion_tokens} " + "word " * min(prompt_tokens, 400)


def _lengths(content: str | list[dict[str, str]]) -> tuple[int, int]:
    """What a prompt says of its length and its answer's; `content` may come in parts."""
    text = content if isinstance(content, str) else content[0]["text"]
    prompt_tokens, completion_tokens = text.split(" ", 2)[:2]
    return int(prompt_tokens), int(completion_tokens)


class SimulatedServer:
    """One endpoint of one shape. `app` is its aiohttp application."""

    def __init__(self, shape: Shape, *, scale: float = 1.0, seed: int = 0) -> None:
        self.shape = shape
        self.scale = scale
        self._rng = random.Random(seed)
        most = max([shape.replicas, *(n for _, n in shape.changes)])
        self._engines = [Engine(shape) for _ in range(most)]
        self._wake = [asyncio.Event() for _ in self._engines]
        self._started_s = time.monotonic()
        self._refused_s = -math.inf
        self._step_s = 0.0
        self.highest = 0
        self.refused = 0
        self.too_soon = 0
        self.app = web.Application(client_max_size=2**24)
        self.app.router.add_post("/v1/chat/completions", self._chat)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_get("/counters", self._counters)
        self.app.router.add_post("/replicas/{count}", self._replicas)
        self.app.cleanup_ctx.append(self._background)

    async def _background(self, app: web.Application) -> Any:
        self._started_s = time.monotonic()
        tasks = [asyncio.create_task(self._run(i)) for i in range(len(self._engines))]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, index: int) -> None:
        engine, wake = self._engines[index], self._wake[index]
        due_s = time.monotonic()
        while True:
            if not engine.load:
                engine.gauge = (0, 0)
                wake.clear()
                await wake.wait()
                due_s = time.monotonic()
            seconds, first, done = engine.step()
            self._step_s = seconds / self.scale
            due_s += seconds / self.scale
            wait_s = due_s - time.monotonic()
            await asyncio.sleep(max(0.0, wait_s))
            due_s = max(due_s, time.monotonic() - 0.05)  # a machine that is late does not catch up more than this
            for request in first:
                request.owner[0].set()
            for request in done:
                request.owner[1].set()

    def _in_service(self) -> int:
        elapsed = (time.monotonic() - self._started_s) * self.scale
        return next((n for at, n in reversed(self.shape.changes) if elapsed >= at), self.shape.replicas)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        try:
            prompt_tokens, completion_tokens = _lengths(body["messages"][-1]["content"])
        except (IndexError, ValueError):  # some clients say hello first
            return web.json_response({"error": {"message": "the prompt does not say how long it is"}}, status=400)
        if self.shape.network_s > 0.004:
            await asyncio.sleep(self.shape.network_s / 2 / self.scale)
        index = min(range(self._in_service()), key=lambda i: self._engines[i].load)
        engine = self._engines[index]
        self._count_too_soon()
        if self.shape.reject_above is not None and len(engine.waiting) >= self.shape.reject_above:
            self.refused, self._refused_s = self.refused + 1, time.monotonic()
            after = {} if self.shape.retry_after_s is None else {"Retry-After": f"{self.shape.retry_after_s:.0f}"}
            return web.json_response({"error": {"message": "queue full"}}, status=429, headers=after)
        events = asyncio.Event(), asyncio.Event()
        request = Request(prompt_tokens, min(completion_tokens, body.get("max_tokens") or 10**9), owner=events)
        engine.submit(request)
        self._wake[index].set()
        self.highest = max(self.highest, sum(e.load for e in self._engines))
        try:
            await events[0].wait()
            if self._rng.random() < self.shape.hangup:
                engine.cancel(request)
                if http.transport is not None:
                    http.transport.abort()
                raise ConnectionResetError
            if body.get("stream"):
                return await self._stream(http, request, events[1])
            await events[1].wait()
        except asyncio.CancelledError:
            engine.cancel(request)
            raise
        if self.shape.network_s > 0.004:
            await asyncio.sleep(self.shape.network_s / 2 / self.scale)
        return web.Response(body=json.dumps(self._reply(request)).encode(), content_type="application/json")

    def _count_too_soon(self) -> None:
        """A request that comes while `Retry-After` runs, and so late in it that every actor must have heard."""
        since_s = time.monotonic() - self._refused_s
        if (self.shape.retry_after_s or 0.0) / 2 < since_s < (self.shape.retry_after_s or 0.0):
            self.too_soon += 1

    async def _stream(self, http: web.Request, request: Request, done: asyncio.Event) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        delta = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "sim"}
        chunk = {**delta, "choices": [{"index": 0, "delta": {"role": "assistant", "content": "w"}}]}
        for _ in range(min(BEGINNING, request.completion_tokens - 1)):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(self._step_s)
        await done.wait()
        end = {**delta, "choices": [{"index": 0, "delta": {"content": " w"}, "finish_reason": "stop"}]}
        usage = {**delta, "choices": [], "usage": self._reply(request)["usage"]}
        for event in (end, usage):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    def _reply(request: Request) -> dict[str, Any]:
        return {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "sim",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "w"}, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": request.prompt_tokens,
                "completion_tokens": request.completion_tokens,
                "total_tokens": request.prompt_tokens + request.completion_tokens,
            },
        }

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "sim", "object": "model"}]})

    async def _metrics(self, http: web.Request) -> web.Response:
        engines = self._engines[:1] if self.shape.metrics == "one" else self._engines[: self._in_service()]
        if self.shape.metrics == "none":
            raise web.HTTPNotFound
        waiting, running = (sum(e.gauge[i] for e in engines) for i in (0, 1))
        return web.Response(
            text=f'vllm:num_requests_waiting{{engine="0",model_name="sim"}} {waiting}.0\n'
            f'vllm:num_requests_running{{engine="0",model_name="sim"}} {running}.0\n'
        )

    async def _counters(self, http: web.Request) -> web.Response:
        """Tokens generated so far and the most requests there ever were: what the benchmarks go by."""
        return web.json_response(
            {
                "time": time.monotonic(),
                "tokens": sum(e.tokens for e in self._engines),
                "load": sum(e.load for e in self._engines),
                "highest": self.highest,
                "refused": self.refused,
                "too_soon": self.too_soon,
                "waiting": sum(e.gauge[0] for e in self._engines),
                "running": sum(e.gauge[1] for e in self._engines),
            }
        )

    async def _replicas(self, http: web.Request) -> web.Response:
        """From now on requests go to so many replicas; what the others have they finish."""
        self.shape = replace(self.shape, replicas=int(http.match_info["count"]), changes=())
        return web.json_response({})


def main() -> None:
    """Serve one shape on loopback until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="256 sequences", help="name of a shape, or its fields as JSON")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args()
    named = {s.name: s for s in (*SHAPES, INSTANT)}
    shape = named[args.shape] if args.shape in named else Shape(**json.loads(args.shape))

    async def app() -> web.Application:
        return SimulatedServer(shape, scale=args.scale).app

    import uvloop

    uvloop.install()
    web.run_app(app(), host="127.0.0.1", port=args.port, print=None, access_log=None, backlog=8192)


if __name__ == "__main__":
    main()
