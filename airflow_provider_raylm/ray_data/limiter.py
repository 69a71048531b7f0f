"""Slots for requests in flight, on the event loop of the process that sends them.

`LocalLimiter` decides by itself; `KeeperLimiter` has slots lent by the job's keeper, so that all query actors together
stay within one limit. A row costs no call to the keeper: what happened is reported a few times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from airflow_provider_raylm.exceptions import RaylmError, TransientEndpointError
from airflow_provider_raylm.ray_data.contracts import Begun, Limiter, Sample
from airflow_provider_raylm.ray_data.flow import TICK_S, Flow, Tally
from airflow_provider_raylm.ray_data.limit import FIRST_LIMIT
from airflow_provider_raylm.ray_data.load import LoadReader
from airflow_provider_raylm.spec import Priority

REPORT_S = 0.2
URGENT_S = 0.05
HEARTBEAT_S = 0.1
SAMPLES_PER_REPORT = 32
WINDOW_FACTOR = 16
LEAST_WINDOW = 128
NETWORK_EVERY_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Report:
    """What a query actor tells the keeper.

    Attributes:
        member: Which actor.
        held: Requests it has in flight.
        used: Most it had in flight since the last report.
        waiting: Requests that wait for a slot.
        total: Its running totals.
        samples: Some of the requests that ended since the last report; times are seconds before this report.
        begun: Streamed requests whose first tokens have come since; `sent_s` is seconds before this report.
        retry_after_s: Longest pause the endpoint asked for since the last report.
        loop_lag_s: How late its event loop is.
        limit: The job's limit as last heard, from which a restarted keeper takes up.
        leaving: It is closing.
    """

    member: str
    held: int
    used: int
    waiting: int
    total: Tally
    samples: list[Sample]
    begun: list[Begun] = field(default_factory=list)
    retry_after_s: float = 0.0
    loop_lag_s: float = 0.0
    limit: int = 0
    leaving: bool = False


@dataclass(slots=True, kw_only=True)
class Grant:
    """What the keeper answers.

    Attributes:
        slots: Requests the actor may have in flight, those under way included.
        stream_every: Every so manieth request should be streamed; 0 for none.
        pause_s: Seconds in which nothing may start.
        limit: The job's limit.
        stalled: The endpoint has let nothing through for the whole stall limit.
    """

    slots: int
    stream_every: int = 0
    pause_s: float = 0.0
    limit: int = 0
    stalled: bool = False


class _Slots:
    """What both limiters share: who waits, what is in flight, what happened since it was last passed on."""

    def __init__(self, *, base_url: str, stall_timeout_s: float) -> None:
        self.loop_lag_s = 0.0
        self._base_url = base_url
        self._stall_timeout_s = stall_timeout_s
        self._in_flight = 0
        self._peak = 0
        self._waiters: deque[asyncio.Future[bool]] = deque()
        self._total = Tally()
        self._samples: list[Sample] = []
        self._begun: list[Begun] = []
        self._seen = 0
        self._retry_after_s = 0.0
        self._random = random.Random(0)  # noqa: S311
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None
        self._soon = asyncio.Event()

    async def acquire(self) -> bool:
        """See `Limiter.acquire`."""
        if not self._tasks:
            self._start()
        if self._failure is not None:
            raise self._failure
        if not self._waiters and self._may_start():
            self._begin()
            return self._stream()
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._demand()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._in_flight -= 1  # the slot had just been given
                self._wake()
            raise

    def release(self, sample: Sample) -> None:
        """See `Limiter.release`."""
        self._in_flight -= 1
        self._total.add(sample)
        self._keep(sample)
        if sample.outcome in ("success", "ignore"):
            self._wake()
        else:
            self._retry_after_s = max(self._retry_after_s, sample.retry_after_s or 0.0)
            self._trouble(sample)

    def begun(self, request: Begun) -> None:
        """See `Limiter.begun`."""
        self._begun.append(request)

    def count(self, *, rows: int = 0, errors: int = 0, resumed: int = 0) -> None:
        """See `Limiter.count`."""
        self._total.rows += rows
        self._total.errors += errors
        self._total.resumed += resumed

    @property
    def window(self) -> int:
        """See `Limiter.window`. By the job's limit: an actor held up by its window asks for few slots, gets few, and
        would be held up all the more if the window followed those."""
        return max(LEAST_WINDOW, WINDOW_FACTOR * self._job_limit())

    async def close(self) -> None:
        """See `Limiter.close`."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self) -> None:
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._heartbeat())]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._fail(exc)

    def _fail(self, exc: BaseException) -> None:
        self._failure = exc
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(exc)

    def _stall(self) -> None:
        error = TransientEndpointError(
            f"the endpoint {self._base_url} has answered no request for {self._stall_timeout_s:.0f} s: every one was "
            "refused, cut off or timed out. Nothing more is sent"
        )
        self._fail(error)
        self._failure = None  # a later attempt of a row may find the endpoint back

    def _begin(self) -> None:
        self._in_flight += 1
        self._peak = max(self._peak, self._in_flight)

    def _wake(self) -> None:
        while self._waiters:
            if self._waiters[0].done():
                self._waiters.popleft()
            elif self._may_start():
                self._begin()
                self._waiters.popleft().set_result(self._stream())
            else:
                return

    def _keep(self, sample: Sample) -> None:
        """Keep all of few samples, and a fair draw of many; probes are few and always kept."""
        self._seen += 1
        if len(self._samples) < SAMPLES_PER_REPORT or sample.ttft_s is not None:
            self._samples.append(sample)
            return
        place = self._random.randrange(self._seen)
        if place < SAMPLES_PER_REPORT and self._samples[place].ttft_s is None:
            self._samples[place] = sample

    def _take(self) -> tuple[list[Sample], list[Begun], float]:
        samples, self._samples = self._samples, []
        begun, self._begun = self._begun, []
        retry_after_s, self._retry_after_s = self._retry_after_s, 0.0
        self._seen = 0
        samples.sort(key=lambda s: s.done_s)
        return samples, begun, retry_after_s

    async def _heartbeat(self) -> None:
        while True:
            begin = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)
            late = max(0.0, time.monotonic() - begin - HEARTBEAT_S)
            self.loop_lag_s += 0.1 * (late - self.loop_lag_s)

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds`, or less when something is urgent; two calls are never closer than `URGENT_S`."""
        await asyncio.sleep(min(URGENT_S, seconds))
        if seconds > URGENT_S:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._soon.wait(), seconds - URGENT_S)
        self._soon.clear()

    async def _run(self) -> None:
        raise NotImplementedError

    def _may_start(self) -> bool:
        raise NotImplementedError

    def _job_limit(self) -> int:
        raise NotImplementedError

    def _stream(self) -> bool:
        raise NotImplementedError

    def _trouble(self, sample: Sample) -> None:
        raise NotImplementedError

    def _demand(self) -> None:
        """A request has begun to wait."""


class LocalLimiter(_Slots):
    """The whole of flow control in one process: for scripts, tests, and a query actor that has no keeper.

    Args:
        base_url, model, api_key: The endpoint, whose metrics are read where it has any.
        first_limit: Where the limit starts.
        priority: Requests kept waiting at the server.
        members: Processes that each have such a limiter for the same job; they keep that many in all waiting.
        stall_timeout_s: See `Limiter.acquire`.
        read_metrics: `False` leaves the endpoint's metrics alone.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api_key: str = "",
        first_limit: int = FIRST_LIMIT,
        priority: Priority = "normal",
        members: int = 1,
        stall_timeout_s: float = 900.0,
        read_metrics: bool = True,
    ) -> None:
        super().__init__(base_url=base_url, stall_timeout_s=stall_timeout_s)
        self.flow = Flow(
            time.monotonic(),
            first_limit=first_limit,
            priority=priority,
            members=members,
            stall_timeout_s=stall_timeout_s,
        )
        self.trace: list[dict[str, Any]] = []
        self._reader = LoadReader(base_url, model, api_key) if read_metrics else None
        self._passed_on = Tally()

    async def flush(self) -> None:
        """See `Limiter.flush`."""
        self._pass_on()

    def status(self) -> dict[str, Any]:
        """Limit, signal, rates and totals at this moment."""
        self._pass_on()
        return self.flow.status(time.monotonic())

    async def close(self) -> None:
        """Stop adjusting the limit."""
        await super().close()
        if self._reader is not None:
            await self._reader.close()

    def _start(self) -> None:
        super()._start()
        if self._reader is not None:
            self._tasks.append(asyncio.create_task(watch(self._reader, self.flow)))
            self._tasks[-1].add_done_callback(self._ended)

    async def _run(self) -> None:
        next_tick_s = time.monotonic() + TICK_S
        while True:
            await self._pause(REPORT_S)
            self._pass_on()
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = max(next_tick_s + TICK_S, now_s)
                self.flow.loop_lag_s = self.loop_lag_s
                self.trace.append(self.flow.tick(now_s))
            self._wake()
            if self._waiters and self.flow.stalled(now_s):
                self._stall()

    def _pass_on(self) -> None:
        samples, begun, retry_after_s = self._take()
        now = self._total.plus(Tally())
        self.flow.begun(begun)
        self.flow.add(time.monotonic(), now.minus(self._passed_on), samples, retry_after_s)
        self.flow.holds(self._in_flight)
        self._passed_on = now

    def _may_start(self) -> bool:
        self.flow.holds(self._in_flight)
        return self.flow.free(time.monotonic()) > 0

    def _job_limit(self) -> int:
        return self.flow.limit

    def _stream(self) -> bool:
        return self.flow.wants_stream(time.monotonic())

    def _trouble(self, sample: Sample) -> None:
        self._pass_on()


async def watch(reader: LoadReader, flow: Flow) -> None:
    """Tell `flow` about the server's metrics and the network, for ever."""
    network_s = 0.0
    while True:
        now_s = time.monotonic()
        if now_s >= network_s:
            network_s = now_s + NETWORK_EVERY_S
            measured = await reader.network_s()
            if measured is not None:
                flow.network_s = measured
        load = await reader.read()
        if reader.every_s is not None:
            flow.expect(time.monotonic(), reader.every_s)
        if load is not None:
            flow.see(time.monotonic() - reader.late_s, load)
        await asyncio.sleep(TICK_S / 2)


class KeeperLimiter(_Slots):
    """Slots lent by the job's keeper.

    If the keeper cannot be reached the actor goes on with what it has: a keeper that Ray starts anew takes up where
    the reports of its actors say the limit was.

    Args:
        keeper: Handle of the keeper actor.
        base_url: Named in messages.
        stall_timeout_s: Named in messages; the keeper decides.
    """

    def __init__(self, keeper: Any, *, base_url: str, stall_timeout_s: float = 900.0) -> None:
        super().__init__(base_url=base_url, stall_timeout_s=stall_timeout_s)
        self._keeper = keeper
        self._member = uuid.uuid4().hex
        self._grant = Grant(slots=0)
        self._paused_until_s = 0.0
        self._sent = 0
        self._reached_s = time.monotonic()
        self._reachable = True

    async def close(self) -> None:
        """Give everything back."""
        started = bool(self._tasks)
        await super().close()
        if started:
            await self._report(leaving=True)

    async def _run(self) -> None:
        while True:
            await self._report()
            self._wake()
            if self._waiters and self._grant.stalled:
                self._stall()
            if time.monotonic() - self._reached_s > self._stall_timeout_s and not self._in_flight:
                raise RaylmError(
                    f"the flow control actor of this job has not answered for {self._stall_timeout_s:.0f} s, so "
                    "nothing can be asked"
                )
            await self._pause(REPORT_S if self._reachable else 1.0)

    async def _report(self, *, leaving: bool = False) -> None:
        samples, begun, retry_after_s = self._take()
        now_s = time.monotonic()
        report = Report(
            member=self._member,
            held=self._in_flight,
            used=max(self._peak, self._in_flight),
            waiting=len(self._waiters),
            total=self._total,
            samples=[replace(s, sent_s=now_s - s.sent_s, done_s=now_s - s.done_s) for s in samples],
            begun=[replace(b, sent_s=now_s - b.sent_s) for b in begun],
            retry_after_s=retry_after_s,
            loop_lag_s=self.loop_lag_s,
            limit=self._grant.limit,
            leaving=leaving,
        )
        self._peak = self._in_flight
        import ray

        try:
            self._grant = await asyncio.wait_for(_answer(self._keeper.report.remote(report)), 10.0)
        except (ray.exceptions.RayError, asyncio.TimeoutError) as exc:
            if self._reachable and not leaving:
                _log.warning("the flow control actor does not answer (%s); going on with what it lent", exc)
            self._reachable = False
            return
        self._reachable, self._reached_s = True, time.monotonic()
        if self._grant.pause_s > 0:
            self._paused_until_s = max(self._paused_until_s, time.monotonic() + self._grant.pause_s)

    async def flush(self) -> None:
        """See `Limiter.flush`."""
        await self._report()

    def _may_start(self) -> bool:
        return self._in_flight < self._grant.slots and time.monotonic() >= self._paused_until_s

    def _job_limit(self) -> int:
        return self._grant.limit

    def _stream(self) -> bool:
        if not self._grant.stream_every:
            return False
        self._sent += 1
        return self._sent % self._grant.stream_every == 0

    def _trouble(self, sample: Sample) -> None:
        if sample.retry_after_s:
            self._paused_until_s = max(self._paused_until_s, time.monotonic() + sample.retry_after_s)
        self._soon.set()

    def _demand(self) -> None:
        if self._in_flight >= self._grant.slots:
            self._soon.set()


async def _answer(ref: Any) -> Any:
    return await ref


def connect_limiter(
    *,
    base_url: str,
    model: str,
    api_key: str = "EMPTY",
    concurrency: int = 1,
    batch_size: int = 8,
    priority: Priority = "normal",
    stall_timeout_s: float = 900.0,
    keeper_name: str | None = None,
) -> Limiter:
    """The limiter of one query actor. Call it on the actor's event loop.

    Args:
        base_url, model, api_key: The endpoint.
        concurrency: Query actors of the job.
        batch_size: With `concurrency`, where the limit starts.
        priority: Share of a contended endpoint.
        stall_timeout_s: See `Limiter.acquire`.
        keeper_name: What `start_keeper` named. Without one, each actor decides for itself, as one of `concurrency`.
    """
    if keeper_name is not None:
        import ray

        try:
            keeper = ray.get_actor(keeper_name)
        except ValueError:
            _log.warning("the flow control actor %s is gone; this actor decides for itself", keeper_name)
        else:
            return KeeperLimiter(keeper, base_url=base_url, stall_timeout_s=stall_timeout_s)
    return LocalLimiter(
        base_url=base_url,
        model=model,
        api_key=api_key,
        first_limit=max(1, min(concurrency * batch_size, FIRST_LIMIT) // concurrency),
        priority=priority,
        members=concurrency,
        stall_timeout_s=stall_timeout_s,
    )
