"""Slots on an event loop: who waits, who is woken, what is told when the endpoint is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
import ray

from airflow_provider_raylm.exceptions import RaylmError, TransientEndpointError
from airflow_provider_raylm.ray_data import limiter as limiter_module
from airflow_provider_raylm.ray_data.contracts import Begun, Outcome, Sample
from airflow_provider_raylm.ray_data.limiter import (
    SAMPLES_PER_REPORT,
    Grant,
    KeeperLimiter,
    LocalLimiter,
    Report,
    connect_limiter,
)


def ended(outcome: Outcome = "success", **kwargs: float) -> Sample:
    return Sample(0.0, 1.0, outcome, **kwargs)  # type: ignore[arg-type]


@pytest.fixture
async def limiter() -> AsyncIterator[LocalLimiter]:
    """A limit of two on an endpoint nobody asks for metrics."""
    made = LocalLimiter(base_url="http://127.0.0.1:9/v1", model="m", first_limit=2, read_metrics=False)
    yield made
    await made.close()


async def waiting(limiter: LocalLimiter) -> asyncio.Task[bool]:
    """A request that has begun to wait."""
    task = asyncio.create_task(limiter.acquire())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_the_next_row_starts_when_one_ends(limiter: LocalLimiter) -> None:
    """No more than the limit are in flight; a slot that is given back goes to who waits, at once."""
    await limiter.acquire()
    await limiter.acquire()
    third = await waiting(limiter)
    limiter.release(ended())
    await asyncio.sleep(0)
    assert third.done()
    assert limiter.status()["in_flight"] == 2


async def test_who_gives_up_waiting_takes_no_slot(limiter: LocalLimiter) -> None:
    """A cancelled wait leaves the slot to the next one."""
    await limiter.acquire()
    await limiter.acquire()
    gone, next_one = await waiting(limiter), await waiting(limiter)
    gone.cancel()
    limiter.release(ended())
    await asyncio.wait_for(next_one, 5)
    assert limiter.status()["in_flight"] == 2


async def test_a_slot_given_to_one_that_was_just_cancelled_is_not_lost(limiter: LocalLimiter) -> None:
    """Cancelled in the very moment it was given a slot: the slot goes on."""
    await limiter.acquire()
    await limiter.acquire()
    gone, next_one = await waiting(limiter), await waiting(limiter)
    limiter.release(ended())
    gone.cancel()
    await asyncio.wait_for(next_one, 5)
    assert limiter.status()["in_flight"] == 2


async def test_a_refusal_stops_everything_at_once(limiter: LocalLimiter) -> None:
    """With Retry-After, not even a free slot is given."""
    await limiter.acquire()
    limiter.release(ended("dropped", retry_after_s=60.0))
    await waiting(limiter)
    assert limiter.status()["state"] == "paused"


async def test_waiting_ends_when_the_endpoint_stays_away() -> None:
    """After the stall limit, whoever waits is told so; no row is blamed."""
    limiter = LocalLimiter(
        base_url="http://127.0.0.1:9/v1", model="m", first_limit=8, stall_timeout_s=0.0, read_metrics=False
    )
    for _ in range(5):
        await limiter.acquire()
    for _ in range(5):
        limiter.release(ended("unreachable"))
    with pytest.raises(TransientEndpointError, match="has answered no request for 0 s"):
        await asyncio.wait_for(limiter.acquire(), 5)
    await limiter.close()


async def test_progress_is_counted(limiter: LocalLimiter) -> None:
    """Rows, errors, resumed rows and tokens add up."""
    await limiter.acquire()
    limiter.release(ended(prompt_tokens=7, completion_tokens=3))
    limiter.count(rows=3, errors=1, resumed=1)
    status = limiter.status()
    assert (status["rows"], status["errors"], status["resumed"], status["completion_tokens"]) == (3, 1, 1, 3)


async def test_few_samples_stand_for_many(limiter: LocalLimiter) -> None:
    """Thousands of rows make one small report, and every probe is in it."""
    for i in range(5000):
        limiter._keep(ended(ttft_s=0.5) if i % 1000 == 999 else ended())
    samples, _, _ = limiter._take()
    assert SAMPLES_PER_REPORT <= len(samples) <= SAMPLES_PER_REPORT + 5
    assert sum(s.ttft_s is not None for s in samples) == 5


async def test_the_window_follows_the_limit_of_the_job_not_the_slots_of_the_actor() -> None:
    """One long row must not starve an actor that was lent few slots; nobody else can ask its rows."""
    limiter = KeeperLimiter(None, base_url="http://127.0.0.1:9/v1")
    limiter._grant = Grant(slots=8, limit=256)
    assert limiter.window == 16 * 256


async def test_a_keeper_that_never_answers_ends_the_job() -> None:
    """An actor that was lent nothing must not wait for ever, nor hold the endpoint meanwhile."""

    class Dead:
        class report:
            @staticmethod
            async def remote(_: object) -> None:
                raise ray.exceptions.RayActorError

    limiter = KeeperLimiter(Dead, base_url="http://127.0.0.1:9/v1", stall_timeout_s=0.0)
    with pytest.raises(RaylmError, match="flow control actor of this job has not answered for 0 s"):
        await asyncio.wait_for(limiter.acquire(), 5)
    with contextlib.suppress(RaylmError):
        await limiter.close()


async def test_what_was_counted_can_be_passed_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends an actor that has no more to do; what it would have said later is never said."""
    monkeypatch.setattr(limiter_module, "REPORT_S", 3600.0)
    reported: asyncio.Queue[int] = asyncio.Queue()

    class Keeper:
        class report:
            @staticmethod
            async def remote(report: Report) -> Grant:
                reported.put_nowait(report.total.rows)
                return Grant(slots=1)

    limiter = KeeperLimiter(Keeper, base_url="http://127.0.0.1:9/v1")
    await limiter.acquire()
    assert [await reported.get() for _ in range(2)] == [0, 0]  # the second because a slot was wanted
    limiter.release(ended())
    limiter.count(rows=1)
    await limiter.flush()
    assert reported.get_nowait() == 1
    await limiter.close()


async def test_the_keeper_hears_when_streams_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when they end, which may be minutes later; the time is told as an age, since clocks differ."""
    monkeypatch.setattr(limiter_module, "REPORT_S", 0.01)
    heard: asyncio.Queue[list[Begun]] = asyncio.Queue()

    class Keeper:
        class report:
            @staticmethod
            async def remote(report: Report) -> Grant:
                if report.begun:
                    heard.put_nowait(report.begun)
                return Grant(slots=1)

    limiter = KeeperLimiter(Keeper, base_url="http://127.0.0.1:9/v1")
    await limiter.acquire()
    limiter.begun(Begun(time.monotonic() - 3.0, 0.2, 0.01))
    (begun,) = await asyncio.wait_for(heard.get(), 10)
    assert (begun.sent_s, begun.ttft_s, begun.step_s) == (pytest.approx(3.0, abs=1.0), 0.2, 0.01)
    limiter.release(ended())
    await asyncio.sleep(0.05)
    assert heard.empty()
    await limiter.close()


async def test_without_a_keeper_each_actor_is_one_of_many() -> None:
    """Actors that decide alone start with their part of the limit, and keep their part of alpha waiting."""
    limiter = connect_limiter(base_url="http://127.0.0.1:9/v1", model="m", concurrency=32, batch_size=8)
    assert isinstance(limiter, LocalLimiter)
    assert limiter.flow.limit == 8
    assert limiter.window >= 128
    await limiter.close()
