"""The actor that keeps one job's limit on one model of one endpoint, and the job's progress.

It belongs to the driver's job and dies with it. Query actors report a few times a second and are lent slots; the slots
of one that falls silent are lent to others. Slots lent and requests in flight together never exceed the limit.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from airflow_provider_raylm.ray_data.contracts import Limiter
from airflow_provider_raylm.ray_data.flow import TICK_S, Flow, Tally
from airflow_provider_raylm.ray_data.limit import FIRST_LIMIT
from airflow_provider_raylm.ray_data.limiter import Grant, KeeperLimiter, Report, watch
from airflow_provider_raylm.ray_data.load import LoadReader, ray_metrics_urls
from airflow_provider_raylm.spec import Priority

SILENT_S = 10.0
TRACE_ROWS = 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one query actor wants.

    Attributes:
        wanted: Slots it is known to use.
        waiting: Requests wait there for a slot.
        served: Requests it has had answered.
    """

    wanted: int
    waiting: bool
    served: int


def allot(limit: int, demands: Mapping[str, Demand]) -> dict[str, int]:
    """Divide `limit` slots: nobody gets less than another who wants no more, and all of them are lent.

    What is left over goes to those who have requests waiting, since they may want more than they could say; to all if
    nobody has. Where slots do not come out even, who has been served least comes first.
    """
    order = sorted(demands, key=lambda m: (demands[m].served, m))
    slots = dict.fromkeys(order, 0)
    left = limit
    short = order
    while left > 0 and short:
        each, extra = divmod(left, len(short))
        for place, member in enumerate(short):
            more = min(each + (place < extra), demands[member].wanted - slots[member])
            slots[member] += more
            left -= more
        short = [m for m in short if slots[m] < demands[m].wanted]
    takers = [m for m in order if demands[m].waiting] or order
    if takers:
        each, extra = divmod(left, len(takers))
        for place, member in enumerate(takers):
            slots[member] += each + (place < extra)
    return slots


@dataclass(slots=True)
class _Member:
    """A query actor, as it last reported."""

    heard_s: float = 0.0
    held: int = 0
    used: int = 0
    waiting: int = 0
    lent: int = 0
    total: Tally = field(default_factory=Tally)
    loop_lag_s: float = 0.0


class Ledger:
    """Who holds how many slots. Pure: reports and the clock in, grants out."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._members: dict[str, _Member] = {}
        self._silent: dict[str, Tally] = {}

    def report(self, now_s: float, report: Report) -> Grant:
        """Take in a report and answer what its sender may hold."""
        member = self._members.get(report.member)
        if member is None:
            back = self._silent.pop(report.member, None)  # counted before it fell silent
            member = self._members[report.member] = _Member(total=back or Tally())
            if back is None and report.limit > self.flow.limit:
                self.flow.take_up(now_s, report.limit)
        new = report.total.minus(member.total)
        member.heard_s, member.loop_lag_s = now_s, report.loop_lag_s
        member.held, member.used, member.waiting = report.held, report.used, report.waiting
        member.total = report.total
        self.flow.begun([replace(b, sent_s=now_s - b.sent_s) for b in report.begun])
        self.flow.add(
            now_s,
            new,
            [replace(s, sent_s=now_s - s.sent_s, done_s=now_s - s.done_s) for s in report.samples],
            report.retry_after_s,
        )
        if report.leaving:
            del self._members[report.member]
            self._tell()
            return Grant(slots=0)
        self._tell()
        return self._grant(now_s, report.member, member)

    def tick(self, now_s: float) -> dict[str, Any]:
        """Forget who has fallen silent, and adjust the limit."""
        for name in [k for k, m in self._members.items() if now_s - m.heard_s > SILENT_S]:
            self._silent[name] = self._members.pop(name).total
        self._tell()
        return {**self.flow.tick(now_s), "members": len(self._members)}

    def status(self, now_s: float) -> dict[str, Any]:
        """The job's progress and limit."""
        return {**self.flow.status(now_s), "members": len(self._members)}

    def _tell(self) -> None:
        self.flow.holds(sum(m.held for m in self._members.values()))
        self.flow.loop_lag_s = max((m.loop_lag_s for m in self._members.values()), default=0.0)

    def _grant(self, now_s: float, name: str, member: _Member) -> Grant:
        pause_s = self.flow.paused_s(now_s)
        if self.flow.away:  # one request, now and then, by whoever has one
            member.lent = member.held + (self.flow.free(now_s) if member.waiting else 0)
        else:
            demands = {
                k: Demand(wanted=m.used + m.waiting, waiting=m.waiting > 0, served=m.total.success)
                for k, m in self._members.items()
            }
            target = allot(self.flow.limit, demands)[name]
            others = sum(max(m.held, m.lent) for k, m in self._members.items() if k != name)
            member.lent = max(0, min(target, self.flow.limit - others))
        return Grant(
            slots=member.lent,
            stream_every=self.flow.stream_every(now_s),
            pause_s=pause_s,
            limit=self.flow.limit,
            stalled=self.flow.stalled(now_s),
        )


class Keeper:
    """The actor. See the module; `start_keeper` makes one."""

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api_key: str,
        first_limit: int,
        priority: Priority,
        stall_timeout_s: float,
    ) -> None:
        self._ledger = Ledger(
            Flow(time.monotonic(), first_limit=first_limit, priority=priority, stall_timeout_s=stall_timeout_s)
        )
        self._reader = LoadReader(base_url, model, api_key, ray_metrics_urls)
        self._trace: list[dict[str, Any]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def report(self, report: Report) -> Grant:
        """One query actor's report."""
        self._begin()
        return self._ledger.report(time.monotonic(), report)

    async def status(self) -> dict[str, Any]:
        """Limit, signal, waiting share, rates and totals."""
        self._begin()
        return self._ledger.status(time.monotonic())

    async def trace(self) -> list[dict[str, Any]]:
        """One `status` a second since the job began."""
        return self._trace

    def _begin(self) -> None:
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._run()),
                asyncio.create_task(watch(self._reader, self._ledger.flow)),
            ]

    async def _run(self) -> None:
        next_s = time.monotonic()
        while True:
            next_s = max(next_s + TICK_S, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())
            self._trace.append(self._ledger.tick(time.monotonic()))
            del self._trace[:-TRACE_ROWS]


class RunningKeeper:
    """A keeper that runs. It can be pickled; the actor ends when nobody holds one any more.

    Attributes:
        name: What query actors find it by.
    """

    def __init__(self, name: str, handle: Any, *, base_url: str, stall_timeout_s: float) -> None:
        self.name = name
        self._handle = handle
        self._base_url = base_url
        self._stall_timeout_s = stall_timeout_s

    def connect(self) -> Limiter:
        """The limiter of one query actor. Call it on that actor's event loop."""
        return KeeperLimiter(self._handle, base_url=self._base_url, stall_timeout_s=self._stall_timeout_s)

    def status(self, *, timeout_s: float = 30.0) -> dict[str, Any]:
        """Limit, signal, waiting share, rates and totals."""
        return dict(self._ask("status", timeout_s))

    def trace(self, *, timeout_s: float = 30.0) -> list[dict[str, Any]]:
        """One `status` a second since the job began."""
        return list(self._ask("trace", timeout_s))

    def stop(self) -> None:
        """End the actor."""
        import ray

        ray.kill(self._handle)

    def _ask(self, method: str, timeout_s: float) -> Any:
        import ray

        return ray.get(getattr(self._handle, method).remote(), timeout=timeout_s)


def start_keeper(
    *,
    base_url: str,
    model: str,
    api_key: str = "EMPTY",
    concurrency: int = 32,
    batch_size: int = 8,
    priority: Priority = "normal",
    stall_timeout_s: float = 900.0,
) -> RunningKeeper:
    """Start the keeper of a job. Call it in the job's driver; query actors connect by its name.

    Args:
        base_url, model, api_key: The endpoint.
        concurrency, batch_size: The limit starts at their product, at most `FIRST_LIMIT`.
        priority: Share of a contended endpoint.
        stall_timeout_s: See `Limiter.acquire`.
    """
    import ray

    name = f"raylm-keeper-{uuid.uuid4().hex[:12]}"
    handle = (
        ray.remote(Keeper)
        .options(name=name, num_cpus=0, max_restarts=-1, max_concurrency=1000)
        .remote(
            base_url=base_url,
            model=model,
            api_key=api_key,
            first_limit=min(concurrency * batch_size, FIRST_LIMIT),
            priority=priority,
            stall_timeout_s=stall_timeout_s,
        )
    )
    return RunningKeeper(name, handle, base_url=base_url, stall_timeout_s=stall_timeout_s)
