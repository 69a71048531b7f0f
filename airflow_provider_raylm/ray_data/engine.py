"""Rows in, replies out, in order: one event loop per actor keeps as many rows in flight as the limiter allows.

Every call of the actor hands its rows to the same queue and waits for its own rows only. A row that ends makes room for
the next one at once, whichever call it came from; there is no batch to wait for. Rows are started in the order they
came, at most `Limiter.window` ahead of the oldest unfinished one.

The engine knows flow control and resume only through `contracts.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from airflow_provider_raylm.exceptions import RaylmError, TerminalEndpointError
from airflow_provider_raylm.ray_data.contracts import Begun, Limiter, OnBegun, Sample
from airflow_provider_raylm.ray_data.deadlines import Deadlines
from airflow_provider_raylm.ray_data.errors import OUTCOME, Fault
from airflow_provider_raylm.ray_data.policy import ErrorWatch
from airflow_provider_raylm.ray_data.requests import InvalidInput, Query, most_tokens, texts
from airflow_provider_raylm.ray_data.retries import Attempts, backoff_s
from airflow_provider_raylm.ray_data.rows import Reply, error_reply, with_parsed

log = logging.getLogger(__name__)

OnReply = Callable[[int, Reply], None]
"""Called with a row's position in its call and its reply, as soon as that reply is final."""


class Client(Protocol):
    """What the engine needs of `EndpointClient`."""

    async def complete(
        self,
        body: Any,
        *,
        limit_s: Callable[[], float],
        stream: bool = False,
        prompts: tuple[str, ...] = (),
        on_begun: OnBegun | None = None,
    ) -> tuple[Reply, float | None]: ...

    async def is_reachable(self) -> bool: ...

    async def close(self) -> None: ...


class _Call:
    """One call's rows and what is known of them."""

    __slots__ = ("body", "done", "left", "on_reply", "replies")

    def __init__(
        self, count: int, body: Callable[[int], dict[str, Any]], on_reply: OnReply | None, done: asyncio.Future[None]
    ) -> None:
        self.body = body
        self.on_reply = on_reply
        self.done = done
        self.left = count
        self.replies: list[Reply | None] = [None] * count


class _Row:
    __slots__ = ("call", "ended", "index", "number", "sent")

    def __init__(self, call: _Call, index: int) -> None:
        self.call = call
        self.index = index
        self.number = -1
        self.sent = False
        self.ended = False


class _Request:
    """One row's request, and what is read from it."""

    __slots__ = ("body", "max_tokens", "texts")

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.texts = texts(body)
        self.max_tokens = most_tokens(body)


class Engine:
    """The rows of one actor. All methods run on the loop that it is made on.

    Args:
        query: What is asked.
        client: Sends one request.
        limiter: Grants slots.
        clock: Monotonic seconds.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        query: Query,
        client: Client,
        limiter: Limiter,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self._query = query
        self._client = client
        self._limiter = limiter
        self._clock = clock
        self._sleep = sleep
        self._deadlines = Deadlines(fixed_s=query.options.get("timeout"))
        self._watch = ErrorWatch(query.on_error, query.max_error_rate, query.max_errors)
        self._waiting: deque[_Row] = deque()
        self._started: deque[_Row] = deque()
        self._calls: set[_Call] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_number = 0
        self._last_answer_s = -1.0
        self._streams = True
        self._wake = asyncio.Event()
        self._failure: BaseException | None = None
        self._pump_task = asyncio.get_running_loop().create_task(self._pump())

    async def answer(
        self,
        count: int,
        body: Callable[[int], dict[str, Any]],
        *,
        order: Sequence[int] | None = None,
        on_reply: OnReply | None = None,
    ) -> list[Reply]:
        """Ask `count` rows and return their replies, in the order of the rows.

        Args:
            count: Number of rows.
            body: Builds the request body of row `i`; raises `InvalidInput` for one that cannot be asked.
            order: Order to send them in; as they come if `None`.
            on_reply: See `OnReply`.

        Raises:
            TerminalEndpointError: No row can succeed at this endpoint.
            TransientEndpointError: The endpoint was away for the whole stall limit.
            PartialFailureError: More rows failed than the policy allows.
        """
        if self._failure is not None:
            raise self._failure
        if not count:
            return []
        call = _Call(count, body, on_reply, asyncio.get_running_loop().create_future())
        self._calls.add(call)
        self._waiting.extend(_Row(call, index) for index in (order if order is not None else range(count)))
        self._wake.set()
        try:
            await call.done
        finally:
            self._calls.discard(call)
        return call.replies  # type: ignore[return-value]

    async def close(self) -> None:
        """End what still runs, and give every slot back."""
        self._pump_task.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(self._pump_task, *self._tasks, return_exceptions=True)
        await self._limiter.close()
        await self._client.close()

    async def _pump(self) -> None:
        """Start rows, one after the other, as slots come free."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                row = await self._next_row()
                try:
                    request = _Request(row.call.body(row.index))
                except RaylmError:
                    raise
                except Exception as exc:  # a value that Python cannot hold, a depth, half a character: the row's matter
                    self._end(row, _not_asked(exc), sent=False)
                    continue
                probe = await self._limiter.acquire()
                task = loop.create_task(self._settle(row, request, probe))
                self._tasks.add(task)
                task.add_done_callback(partial(self._settled, row))
        except Exception as exc:
            self._fail(exc)

    async def _next_row(self) -> _Row:
        while True:
            if self._waiting:
                while self._started and self._started[0].ended:
                    self._started.popleft()
                oldest = self._started[0].number if self._started else self._next_number
                if self._next_number - oldest < max(1, self._limiter.window):
                    row = self._waiting.popleft()
                    row.number = self._next_number
                    self._next_number += 1
                    self._started.append(row)
                    return row
            self._wake.clear()
            await self._wake.wait()

    def _settled(self, row: _Row, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not row.sent:  # cancelled before its first step, which would have taken over the slot
            now_s = self._clock()
            self._limiter.release(Sample(now_s, now_s, "ignore"))
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._fail(exc)

    async def _settle(self, row: _Row, request: _Request, probe: bool) -> None:
        """Send one row until it has a reply or has failed. Holds a slot on entry, none on return."""
        row.sent = True
        attempts = Attempts()
        failed_probe = False
        while True:
            sent_s = self._clock()
            stream = probe and self._streams and not failed_probe
            attempts.sent += 1
            limit_s = partial(self._deadlines.limit_s, request.max_tokens, timeouts=attempts.timeouts)
            sample: Sample | None = None
            try:
                answer, ttft_s = await self._client.complete(
                    request.body,
                    limit_s=limit_s,
                    stream=stream,
                    prompts=request.texts,
                    on_begun=partial(self._begun, sent_s) if stream else None,
                )
                done_s = self._clock()
                sample = Sample(
                    sent_s,
                    done_s,
                    "success",
                    answer.get("prompt_tokens") or 0,
                    answer.get("completion_tokens") or 0,
                    ttft_s,
                )
            except InvalidInput as exc:
                self._end(row, _not_asked(exc), sent=False)
                return
            except Fault as exc:
                done_s = self._clock()
                fault = self._of_restart(exc)
                sample = Sample(sent_s, done_s, OUTCOME[fault.kind], retry_after_s=self._bounded(fault.retry_after_s))
            finally:
                # before any back-off, and whatever happened
                self._limiter.release(sample or Sample(sent_s, self._clock(), "ignore"))
            if sample.outcome == "success":
                self._last_answer_s = done_s
                self._deadlines.observe(done_s - sent_s, sample.completion_tokens)
                reply = {
                    **answer,
                    "latency_s": done_s - sent_s,
                    "attempts": attempts.sent,
                    "status": "ok",
                    "error": None,
                }
                self._end(row, with_parsed(reply, self._query))
                return
            if fault.kind == "fatal":
                raise TerminalEndpointError(fault.message, http_status=fault.http_status)
            if stream and fault.kind in ("bad_request", "invalid_reply"):
                # we streamed it, nobody asked for that: once more without, not counted, and no more of them
                failed_probe, self._streams = True, False
                attempts.sent -= 1
                probe = await self._limiter.acquire()
                continue
            if await self._has_failed(fault, attempts, sent_s):
                self._streams = self._streams or failed_probe  # it was the row, not the streaming
                self._end(
                    row,
                    error_reply(
                        fault.error_type,
                        fault.message,
                        http_status=fault.http_status,
                        attempts=attempts.sent,
                        latency_s=done_s - sent_s,
                    ),
                )
                return
            # the limiter waits out `Retry-After`: it is for all rows, and who waits there hears of a stall
            await self._sleep(min(backoff_s(attempts.failures), self._query.stall_timeout_s))
            probe = await self._limiter.acquire()

    def _begun(self, sent_s: float, ttft_s: float, step_s: float) -> None:
        self._limiter.begun(Begun(sent_s, ttft_s, step_s))

    def _bounded(self, retry_after_s: float | None) -> float | None:
        """Seconds to leave the endpoint alone: what it asked for, however long, but no longer than the stall limit."""
        return None if retry_after_s is None else min(retry_after_s, self._query.stall_timeout_s)

    def _of_restart(self, fault: Fault) -> Fault:
        """A URL or a model that has answered before and is gone now is being restarted; the limiter waits for it."""
        if fault.gone and self._last_answer_s >= 0:
            return Fault("unreachable", fault.message, http_status=fault.http_status)
        return fault

    async def _has_failed(self, fault: Fault, attempts: Attempts, sent_s: float) -> bool:
        verdict = attempts.judge(
            fault,
            now_s=self._clock(),
            others_answered=self._last_answer_s >= sent_s,
            max_attempts=self._query.max_attempts,
            stall_timeout_s=self._query.stall_timeout_s,
        )
        if verdict == "ask_endpoint":
            if not await self._client.is_reachable():
                return False
            verdict = attempts.blame_row(fault, max_attempts=self._query.max_attempts)
        return verdict == "fail"

    def _end(self, row: _Row, reply: Reply, *, sent: bool = True) -> None:
        """Settle one row for good."""
        row.ended = True
        self._wake.set()
        call = row.call
        call.replies[row.index] = reply
        error = reply.get("error")
        self._limiter.count(rows=1, errors=0 if error is None else 1)
        if call.on_reply is not None and sent:
            call.on_reply(row.index, reply)
        call.left -= 1
        if not call.left and not call.done.done():
            call.done.set_result(None)
        if error is None:
            self._watch.observe(None)
        else:
            self._watch.observe(error["type"], error["message"], sent=sent)

    def _fail(self, exc: BaseException) -> None:
        """Stop the actor's work: what failed would fail every row."""
        if self._failure is None:
            self._failure = exc
            if not isinstance(exc, RaylmError):
                log.error("the query engine stopped: %s", type(exc).__name__)
            self._pump_task.cancel()
            for task in list(self._tasks):
                task.cancel()
        for call in self._calls:
            if not call.done.done():
                call.done.set_exception(self._failure)


def _not_asked(exc: Exception) -> Reply:
    """The reply of a row that cannot be made into a request."""
    says = str(exc) if isinstance(exc, InvalidInput) else f"the row cannot be made into a request: {type(exc).__name__}"
    return error_reply("invalid_input", says)


class EngineThread:
    """An engine on a thread of its own, for callers that block.

    Args:
        make: Makes the engine; runs on the thread's loop. May be a coroutine function.
    """

    def __init__(self, make: Callable[[], Engine | Awaitable[Engine]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="raylm-engine", daemon=True)
        self._thread.start()

        async def start() -> Engine:
            made = make()
            return await made if inspect.isawaitable(made) else made

        self._engine = asyncio.run_coroutine_threadsafe(start(), self._loop).result()

    def ask(self, *args: Any, **kwargs: Any) -> Callable[[], list[Reply]]:
        """Start `Engine.answer` from any thread. The result waits for the replies and returns them."""
        return asyncio.run_coroutine_threadsafe(self._engine.answer(*args, **kwargs), self._loop).result

    def run(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine function on the engine's loop and wait for its end."""
        asyncio.run_coroutine_threadsafe(function(), self._loop).result()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a function on the engine's loop, some time soon."""
        self._loop.call_soon_threadsafe(lambda: function(*args, **kwargs))

    def close(self) -> None:
        """End the engine and its thread."""
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._engine.close(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()
