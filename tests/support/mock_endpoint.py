"""An OpenAI-compatible HTTP server that answers each row as it is told: status, delay, shape.

    with MockEndpoint(lambda ask: Answer(content=ask.text.upper())) as endpoint:
        ... endpoint.base_url ...; endpoint.asks

`python -m tests.support.mock_endpoint --port 8000 --delay-s 0.1` serves plain answers from a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(kw_only=True)
class Ask:
    """One request as the server got it.

    Attributes:
        headers: By lower-case name.
        text: The last user message, or the prompt or input.
        attempt: How often the same text has come, this time included.
        in_flight: Requests in the server now, this one included.
    """

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    text: str
    attempt: int
    in_flight: int
    query: str = ""


@dataclass(kw_only=True)
class Answer:
    """What to send back.

    Attributes:
        raw: Body as it is, instead of the usual JSON.
        message: More fields of the choice's message.
        delay_s: Seconds before the answer begins.
        drop: Close the connection instead of answering.
        truncate: Close a stream after the first token.
    """

    status: int = 200
    content: str | None = "ok"
    reasoning_content: str | None = None
    message: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = "stop"
    prompt_tokens: int = 5
    completion_tokens: int = 2
    headers: dict[str, str] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    raw: str | bytes | None = None
    embedding: list[float] | None = None
    logprobs: Any = None
    delay_s: float = 0.0
    drop: bool = False
    truncate: bool = False


def refusal(status: int, message: str = "no", *, code: str | None = None, **headers: str) -> Answer:
    """An error as the OpenAI API words it."""
    return Answer(
        status=status,
        error={"message": message, "type": "SomeError", "code": code},
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


Script = Callable[[Ask], Answer]


class MockEndpoint:
    """The server on a thread of this process; its own event loop, a free port of loopback.

    Attributes:
        asks: Every request so far, in the order of arrival.
        most_in_flight: Most requests that were in the server at the same time.
    """

    def __init__(self, script: Script | None = None, *, port: int = 0, keep_asks: bool = True) -> None:
        self.script: Script = script or (lambda ask: Answer(content=f"re: {ask.text}"))
        self.asks: list[Ask] = []
        self.most_in_flight = 0
        self.models_status = 200
        self._keep_asks = keep_asks
        self._in_flight = 0
        self._attempts: Counter[str] = Counter()
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def __enter__(self) -> MockEndpoint:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def start(self) -> None:
        """Begin to listen, on the port it had before if any."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def stop(self) -> None:
        """Stop listening and drop every connection, as a killed server does."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)

    async def _start(self) -> None:
        app = web.Application(client_max_size=64 * 2**20)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            app.router.add_post(path, self._handle)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True, backlog=4096)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []}, status=self.models_status)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        text = _text(body)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            self._attempts[text] += 1
            ask = Ask(
                path=request.path,
                body=body,
                headers={k.lower(): v for k, v in request.headers.items()} if self._keep_asks else {},
                text=text,
                attempt=self._attempts[text],
                in_flight=self._in_flight,
                query=request.query_string,
            )
            if self._keep_asks:
                self.asks.append(ask)
            answer = self.script(ask)
            if answer.delay_s:
                await asyncio.sleep(answer.delay_s)
            return await self._reply(request, ask, answer)
        finally:
            self._in_flight -= 1

    async def _reply(self, request: web.Request, ask: Ask, answer: Answer) -> web.StreamResponse:
        if answer.drop:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if answer.raw is not None:
            return web.Response(body=answer.raw, status=answer.status, headers=answer.headers)
        if answer.error is not None:
            return web.json_response({"error": answer.error}, status=answer.status, headers=answer.headers)
        usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
        if ask.path.endswith("/embeddings"):
            data = [{"object": "embedding", "index": 0, "embedding": answer.embedding or [0.5, -0.25]}]
            return web.json_response({"data": data, "usage": usage}, status=answer.status, headers=answer.headers)
        if ask.body.get("stream"):
            return await self._stream(request, ask, answer, usage)
        choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason, "logprobs": answer.logprobs}
        if ask.path.endswith("/chat/completions"):
            choice["message"] = {
                "role": "assistant",
                "content": answer.content,
                "reasoning_content": answer.reasoning_content,
                **answer.message,
            }
        else:
            choice["text"] = answer.content
        payload = {"id": "x", "object": "chat.completion", "model": ask.body.get("model"), "choices": [choice]}
        return web.json_response({**payload, "usage": usage}, status=answer.status, headers=answer.headers)

    async def _stream(
        self, request: web.Request, ask: Ask, answer: Answer, usage: dict[str, int]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(choice: dict[str, Any] | None, **more: Any) -> None:
            event = {"choices": [] if choice is None else [{"index": 0, **choice}], **more}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        chat = ask.path.endswith("/chat/completions")
        if chat:
            await send({"delta": {"role": "assistant", "content": ""}})
        for key in ("reasoning_content", "content"):
            for piece in _pieces(getattr(answer, key)):
                await send({"delta": {key: piece}} if chat else {"text": piece})
                if answer.truncate:
                    assert request.transport is not None
                    request.transport.close()
                    return response
        if calls := answer.message.get("tool_calls"):
            for index, call in enumerate(calls):
                await send({"delta": {"tool_calls": [{"index": index, **call}]}})
        await send(
            {"delta": {}, "finish_reason": answer.finish_reason} if chat else {"text": "", "finish_reason": "stop"}
        )
        await send(None, usage=usage)
        await response.write(b"data: [DONE]\n\n")
        return response


def _pieces(text: str | None) -> list[str]:
    return [text[at : at + 4] for at in range(0, len(text), 4)] if text else []


def _text(body: dict[str, Any]) -> str:
    if "messages" in body:
        content = body["messages"][-1].get("content")
        if isinstance(content, list):
            return "".join(part.get("text", "") for part in content)
        return content or ""
    return str(body.get("prompt", body.get("input", "")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay-s", type=float, default=0.0)
    args = parser.parse_args()
    answer = Answer(delay_s=args.delay_s)
    with MockEndpoint(lambda ask: answer, port=args.port, keep_asks=False) as endpoint:
        print(endpoint.base_url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
