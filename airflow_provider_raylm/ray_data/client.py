"""One request to an OpenAI-compatible endpoint: sent once, its reply or its `Fault` handed back.

The SDK says what a request looks like (URL, key, headers, query). Requests go straight over the transport: building
each anew and reading replies into models costs more than the exchange, and the SDK's own retries would multiply ours
and hold a slot while they sleep.

A streamed request gives the same reply as a plain one; it is only there to measure the time to the first token, at
many times the cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import openai

from airflow_provider_raylm.ray_data.contracts import OnBegun
from airflow_provider_raylm.ray_data.errors import Fault, clean_message, fault_of_reply
from airflow_provider_raylm.ray_data.requests import PATHS, InvalidInput, Query, is_thinking_off
from airflow_provider_raylm.ray_data.rows import Reply, reply_of_body
from airflow_provider_raylm.ray_data.transport import AiohttpTransport, httpx

_CONNECT_S = 10.0
_KEEPALIVE_S = 30.0
_FILES_BESIDE_CONNECTIONS = 256
_BEGINNING = 8
"""Tokens of a stream by which its pace is known."""
_T = TypeVar("_T")
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


class EndpointClient:
    """Client of one event loop. Make it, use it and close it on that loop.

    Args:
        query: Whom to ask, and the parameters that all rows share.
        connections: Most connections at once; must be above the requests in flight.
    """

    def __init__(self, query: Query, *, connections: int) -> None:
        self._query = query
        # OpenSSL's own choice of authorities, so that SSL_CERT_FILE names a private one; proxies of the environment and
        # .netrc are not for the cluster's own nodes
        trusted = ssl.create_default_context()
        transport = AiohttpTransport(
            connections=connections, connect_s=_CONNECT_S, trusted=trusted, keepalive_s=_KEEPALIVE_S
        )
        self._http = httpx.AsyncClient(transport=transport, timeout=None, trust_env=False, follow_redirects=False)
        self._sdk = openai.AsyncOpenAI(
            base_url=query.base_url,
            api_key=query.api_key.reveal(),
            max_retries=0,
            timeout=None,
            default_headers=query.headers or None,
            default_query=query.options.get("extra_query") or None,
            http_client=self._http,
        )
        params = self._sdk.qs.stringify(dict(query.options.get("extra_query") or {}))
        self._url = self._sdk.base_url.join(PATHS[query.endpoint].lstrip("/")).copy_with(query=params.encode() or None)
        self._headers = httpx.Headers(self._http.headers)
        for layer in (self._sdk.auth_headers, self._sdk.default_headers, query.headers):
            self._headers.update({k: v for k, v in layer.items() if isinstance(v, str)})
        self._secrets = query.secrets

    async def complete(
        self,
        body: Mapping[str, Any],
        *,
        limit_s: Callable[[], float],
        stream: bool = False,
        prompts: tuple[str, ...] = (),
        on_begun: OnBegun | None = None,
    ) -> tuple[Reply, float | None]:
        """Send one request.

        Args:
            body: The request body.
            limit_s: Says how many seconds the whole exchange may take, queue and generation included. When they have
                passed it is asked again: other rows may have shown meanwhile that the endpoint takes longer.
            stream: Measure the time to the first token. Not for embeddings.
            prompts: Texts that an error message must not repeat.
            on_begun: See `OnBegun`; called at most once, and only for a reply that is longer than its beginning.

        Returns:
            The answer fields of the output struct, and the seconds to the first token (`None` if not streamed).

        Raises:
            Fault: There is no usable reply.
            InvalidInput: The body is no JSON.
        """
        try:
            if stream and self._query.endpoint != "embeddings":
                return await _within(limit_s, self._stream(body, on_begun))
            return await _within(limit_s, self._plain(body)), None
        except Fault as fault:
            fault.message = clean_message(fault.message, prompts, secrets=self._secrets)
            fault.args = (fault.message,)
            raise
        except asyncio.TimeoutError:
            raise Fault("timeout", "the connection timed out") from None
        except (httpx.HTTPError, OSError) as exc:
            if isinstance(refused := _origin(exc), ssl.SSLCertVerificationError):
                raise Fault(
                    "fatal",
                    f"the endpoint's certificate is not trusted on the cluster ({refused.verify_message}); it must "
                    "name the host of base_url, and for a private authority SSL_CERT_FILE must name its file there",
                ) from None
            raise Fault("unreachable", f"the connection failed: {type(refused).__name__}") from None
        except InvalidInput:
            raise
        except Exception as exc:  # a reply can be odd in more ways than anybody can list; it is its row's
            raise Fault("invalid_reply", f"the reply cannot be read: {type(exc).__name__}", http_status=200) from None

    async def _send(self, body: Mapping[str, Any], *, stream: bool = False) -> Any:
        """The response to one request, read unless streamed. It has status 2xx."""
        try:
            content = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as exc:
            raise InvalidInput(f"the request cannot be sent as JSON: {type(exc).__name__}") from None
        request = httpx.Request("POST", self._url, headers=self._headers, content=content)
        response = await self._http.send(request, stream=stream)
        if not response.is_success:
            await response.aread()
            raise fault_of_reply(
                response.status_code,
                response.headers,
                response.text,
                model=self._query.model,
                now_s=time.time(),
                secrets=self._secrets,
            )
        return response

    async def _plain(self, body: Mapping[str, Any]) -> Reply:
        response = await self._send(body)
        return self._reply(_json(response.content), body)

    async def _stream(self, body: Mapping[str, Any], on_begun: OnBegun | None) -> tuple[Reply, float | None]:
        sent_s = time.monotonic()
        ttft_s: float | None = None
        tokens = 0
        joined = _Joined()
        response = await self._send({**body, "stream": True, "stream_options": {"include_usage": True}}, stream=True)
        if "text/event-stream" not in response.headers.get("content-type", ""):  # it ignores `stream`
            async with contextlib.aclosing(response):
                return self._reply(_json(await response.aread()), body), None
        async with contextlib.aclosing(response), contextlib.aclosing(_events(response, self._secrets)) as events:
            async for event in events:
                if tokens < _BEGINNING and has_token(event):
                    tokens += 1
                    since_s = time.monotonic() - sent_s
                    ttft_s = since_s if ttft_s is None else ttft_s
                    if tokens == _BEGINNING and on_begun is not None:
                        on_begun(ttft_s, (since_s - ttft_s) / (_BEGINNING - 1))
                joined.add(event)
        return self._reply(joined.body(), body), ttft_s

    def _reply(self, content: Any, body: Mapping[str, Any]) -> Reply:
        return reply_of_body(content, self._query.endpoint, thinking_off=is_thinking_off(body))

    async def is_reachable(self) -> bool:
        """The endpoint answers a small question, whatever it answers."""
        try:
            await asyncio.wait_for(self._sdk.get("/models", cast_to=httpx.Response), _CONNECT_S)
        except openai.APIStatusError as exc:
            return exc.status_code < 500
        except (openai.APIError, asyncio.TimeoutError, httpx.HTTPError, OSError):
            return False
        return True

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await self._sdk.close()


async def _within(limit_s: Callable[[], float], work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`.

    Raises:
        Fault: It took longer.
    """
    loop = asyncio.get_running_loop()
    begin_s, task = loop.time(), asyncio.ensure_future(work)
    try:
        while not task.done():
            seconds = limit_s()
            if (left_s := begin_s + seconds - loop.time()) <= 0:
                raise Fault("timeout", f"no reply within {seconds:.3g} s")
            await asyncio.wait((task,), timeout=left_s)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _origin(exc: BaseException) -> BaseException:
    """The first error in a chain. The transport calls every lost connection a timeout, its cause does not."""
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return exc


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise Fault("invalid_reply", "the reply is not JSON", http_status=200) from None


async def _events(response: Any, secrets: Sequence[str]) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON events of a server-sent stream, until `[DONE]`, which comes as an event without anything in it."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            yield {}
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise Fault("invalid_reply", "the stream holds an event that is not JSON", http_status=200) from None
        if isinstance(event, dict) and event.get("error"):
            error = event["error"]
            text = error.get("message") if isinstance(error, dict) else error
            raise Fault("server_error", clean_message(str(text), secrets=secrets))
        if isinstance(event, dict) and event:
            yield event


def has_token(event: Mapping[str, Any]) -> bool:
    """Whether the model had begun when this event was sent; some servers open a stream before that."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("finish_reason") or choice.get("text") or delta.get("tool_calls"):
            return True
        if any(delta.get(key) for key in _TEXTS):
            return True
    return False


class _Joined:
    """The pieces of a streamed reply, put together to the body that a plain request would have got."""

    def __init__(self) -> None:
        self._message: dict[str, str] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: dict[str, list[Any]] = {}
        self._choice: dict[str, Any] | None = None
        self._usage: Any = None
        self._done = False

    def add(self, event: Mapping[str, Any]) -> None:
        self._done = not event
        if event.get("usage"):
            self._usage = event["usage"]
        for choice in event.get("choices") or ():
            if self._choice is None:
                self._choice = {}
            if choice.get("finish_reason"):
                self._choice["finish_reason"] = choice["finish_reason"]
            for key, values in (choice.get("logprobs") or {}).items():  # one list for chat, several for completions
                if isinstance(values, list):
                    self._logprobs.setdefault(key, []).extend(values)
            delta = choice.get("delta") or {"text": choice.get("text")}
            for key in (*_TEXTS, "text"):
                if isinstance(delta.get(key), str):
                    self._message[key] = self._message.get(key, "") + delta[key]
            for call in delta.get("tool_calls") or ():
                self._add_call(call)

    def _add_call(self, call: Mapping[str, Any]) -> None:
        kept = self._calls.setdefault(call.get("index", 0), {"id": None, "function": {"name": "", "arguments": ""}})
        kept["id"] = call.get("id") or kept["id"]
        function = call.get("function") or {}
        for key in ("name", "arguments"):
            piece = function.get(key) or ""
            kept["function"][key] += piece if isinstance(piece, str) else json.dumps(piece, ensure_ascii=False)

    def body(self) -> dict[str, Any]:
        if self._choice is None or "finish_reason" not in self._choice:
            if self._done:
                raise Fault("invalid_reply", "the stream holds no whole reply", http_status=200)
            # a server that dies in the middle ends the stream without it
            raise Fault("unreachable", "the stream ended before the reply did", http_status=200)
        message: dict[str, Any] = dict(self._message)
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        choice = {**self._choice, "message": message, "text": message.pop("text", None)}
        if self._logprobs:
            choice["logprobs"] = self._logprobs
        return {"choices": [choice], "usage": self._usage}


def most_connections(wanted: int) -> int:
    """Raise this process's limit of open files for `wanted` connections.

    Returns:
        Connections that fit: `wanted`, or fewer where the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _FILES_BESIDE_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _FILES_BESIDE_CONNECTIONS))
