"""The law of the limit is arithmetic: windows in, a number out."""

from __future__ import annotations

import itertools

import pytest

from airflow_provider_raylm.ray_data.limit import ALPHA, GAMMA, Limit, Plateau, Window

ALPHA_NORMAL = ALPHA["normal"]


def steady(value: float, **kwargs: object) -> Limit:
    """A limit past its slow start, whose last change was at 0 s."""
    return Limit(value, 0.0, slow_start=False, **kwargs)  # type: ignore[arg-type]


def seen(now_s: float, share: float | None, **kwargs: object) -> Window:
    """A window of a server whose metrics show `share`, and whose ended requests were sent two seconds ago."""
    values: dict[str, object] = {"instant": True, "sent_s": now_s - 2.0, "settled": True, **kwargs}
    return Window(now_s=now_s, share=share, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.02, 0.05, 0.2, 0.5])
def test_one_step_is_the_law(share: float) -> None:
    """One step adds GAMMA x (alpha - share x limit)."""
    limit = steady(200.0)
    assert limit.step(seen(10.0, share)) == pytest.approx(200 + GAMMA * (ALPHA_NORMAL - share * 200))


@pytest.mark.parametrize("capacity", [16, 256, 1024])
def test_it_settles_with_alpha_requests_waiting(capacity: int) -> None:
    """Against a server that runs `capacity` requests and queues the rest, the limit ends at capacity + alpha."""
    limit = Limit(256.0, 0.0)
    for second in range(1, 200):
        limit.step(seen(float(second), max(0.0, limit.value - capacity) / limit.value))
    assert limit.value == pytest.approx(capacity + ALPHA_NORMAL, rel=0.02)


def test_jobs_that_see_the_same_share_get_the_same_limit() -> None:
    """Whatever their limits were, jobs at one endpoint converge."""
    limits = [steady(600.0), steady(20.0), steady(200.0)]
    for second in range(1, 300):
        total = sum(x.value for x in limits)
        for limit in limits:
            limit.step(seen(float(second), max(0.0, total - 256) / total))
    values = [x.value for x in limits]
    assert sum(values) ** 2 / (3 * sum(v * v for v in values)) > 0.99


def test_doubles_while_nothing_waits_and_stops_at_the_queue() -> None:
    """Slow start doubles each window, then takes the number that runs plus alpha."""
    limit = Limit(64.0, 0.0)
    assert [limit.step(seen(float(s), 0.0)) for s in (1, 2, 3)] == [128, 256, 512]
    for second in (4, 5, 6):
        limit.step(seen(float(second), 0.5, sent_s=None))
    assert limit.value == pytest.approx(256 + ALPHA_NORMAL)
    assert limit.reason == "found the queue"


def test_rows_that_have_just_begun_tell_that_there_is_no_queue() -> None:
    """While the rows that tell it for sure still run, and whatever older ones say; but only that there is none."""
    limit = Limit(64.0, 0.0)
    assert [limit.step(seen(float(s), None, early=0.01, sent_s=None)) for s in (1, 2)] == [128, 256]
    assert limit.step(seen(3.0, 0.4, early=0.01, instant=False, sent_s=0.0)) == 512
    assert limit.step(seen(4.0, None, early=0.4)) == 512
    assert limit.step(seen(5.0, None, early=0.01, used=0.7)) == 512
    assert limit.slow_start


def test_what_had_no_queue_is_not_given_up_for_a_first_guess_of_one() -> None:
    """Rows that ended early were short, so the first share is too large: 64 had no queue, so 64 it is at least."""
    limit = Limit(64.0, 0.0)
    assert limit.step(seen(1.0, None, early=0.0)) == 128
    assert limit.step(seen(9.0, 0.9, instant=False, sent_s=4.0)) == 64
    assert not limit.slow_start
    assert limit.step(seen(19.0, 0.9, instant=False, sent_s=12.0)) < 64


def test_a_rush_of_prompts_is_not_taken_for_a_queue() -> None:
    """While more and more requests run, those that wait only await their first step: the limit stays."""
    limit = Limit(256.0, 0.0)
    for second in (1, 2, 3, 4):
        limit.step(seen(float(second), 0.4, settled=False, sent_s=0.0))
    assert limit.value == 256
    assert limit.slow_start


def test_one_decrease_a_flight() -> None:
    """After a decrease the next one needs requests that were sent since."""
    limit = steady(400.0)
    limit.step(seen(10.0, 0.4))
    once = limit.value
    assert once < 400
    assert limit.step(seen(11.0, 0.4, sent_s=9.0)) == once
    assert limit.step(seen(14.0, 0.4, sent_s=12.0)) < once


@pytest.mark.parametrize("used", [0.0, 0.5, 0.79])
def test_no_growth_while_the_limit_is_not_used(used: float) -> None:
    """A limit that rows do not fill says nothing about the server."""
    for limit in (steady(100.0), Limit(100.0, 0.0)):
        assert limit.step(seen(10.0, 0.0, used=used)) == 100


def test_capacity_that_was_added_is_taken_in_growing_steps() -> None:
    """After three windows without a queue the limit grows by a quarter, and by more the longer none shows."""
    limit = steady(100.0)
    values = [limit.step(seen(10.0 + s, 0.0)) for s in range(8)]
    assert values[0] - 100 == pytest.approx(GAMMA * ALPHA_NORMAL)
    assert [b / a for a, b in itertools.pairwise(values[1:])] == pytest.approx([1.25, 1.5, 1.75, 2.0, 2.0, 2.0])
    limit.step(seen(30.0, 1.0))
    values = [limit.step(seen(31.0 + s, 0.0)) for s in range(4)]
    assert values[2] / values[1] == pytest.approx(1.25)


def test_a_refusal_takes_a_tenth_once_a_flight() -> None:
    """429 and 503 cut to nine tenths; those of the same flight cut no more."""
    limit = steady(100.0)
    assert limit.step(seen(10.0, 0.0, dropped=5)) == pytest.approx(90)
    assert limit.step(seen(11.0, 0.0, dropped=5, sent_s=9.0)) == pytest.approx(90)
    assert limit.step(seen(20.0, 0.0, dropped=1, sent_s=18.0)) == pytest.approx(81)


def test_growth_is_small_near_the_last_refusal() -> None:
    """Close to where the server last refused, half a request a window is added, 2 % where nothing waits for long."""
    limit = steady(100.0)
    limit.step(seen(10.0, 0.0, dropped=1))
    assert [limit.step(seen(20.0 + s, 0.0)) for s in range(3)] == pytest.approx([90.5, 91.0, 91.0 * 1.02])


def test_a_refusal_is_forgotten_when_no_queue_shows_for_long() -> None:
    """What was refused was a burst: the limit leaves it behind, slowly at first and then in growing steps."""
    limit = steady(100.0)
    limit.step(seen(10.0, 0.0, dropped=1))
    values = [limit.step(seen(10.0 + s, 0.0)) for s in range(1, 21)]
    assert values[5] < 100.0
    assert values[-1] > 200.0
    for second in range(2000):  # hours in which the input is slow
        limit.step(seen(31.0 + second, 0.0, used=0.1))
    assert limit.step(seen(3000.0, 0.0)) > values[-1]


def test_a_ceiling_that_stands_is_looked_for_ever_more_slowly() -> None:
    """Each refusal at about the same limit halves the growth near it, until one comes at another limit."""
    limit = steady(100.0)
    for second in (10.0, 20.0, 30.0):  # 100, 99 and 98
        limit.step(seen(second, 0.0, dropped=1))
        limit.value /= 0.9 / 0.99
    before = limit.value
    assert limit.step(seen(40.0, 0.0)) - before == pytest.approx(0.5 / 4)
    limit.value = 50.0
    limit.step(seen(50.0, 0.0, dropped=1))
    assert limit.step(seen(60.0, 0.0)) - 45.0 == pytest.approx(0.5)


def test_a_ceiling_that_is_left_behind_slows_nothing() -> None:
    """The server takes more than it did: growth is as after a first refusal."""
    limit = steady(100.0)
    for second in (10.0, 20.0):
        limit.step(seen(second, 0.0, dropped=1))
        limit.value = 100.0
    limit.value = 130.0
    limit.step(seen(30.0, 0.0))
    before = limit.value
    assert limit.step(seen(31.0, 0.0)) - before == pytest.approx(0.5)


def test_a_late_signal_waits_for_a_flight() -> None:
    """A share taken from ended requests changes nothing until requests sent since the last change have ended."""
    limit = steady(200.0)
    limit.step(seen(10.0, 0.0, instant=False))
    grown = limit.value
    assert grown > 200
    assert limit.step(seen(11.0, 0.0, instant=False, sent_s=10.5)) == grown
    assert limit.step(seen(14.0, 0.0, instant=False, sent_s=12.0)) > grown


@pytest.mark.parametrize(("instant", "part"), [(True, 16), (False, 8)])
def test_fewer_wait_where_each_of_them_waits_long(instant: bool, part: int) -> None:
    """With 10 s of queue a job keeps a small part of alpha waiting, less if it sees the queue itself."""
    slow, fast = steady(32.0), steady(32.0)
    slow.step(seen(10.0, 0.5, latency_s=20.0, instant=instant))
    fast.step(seen(10.0, 0.5, latency_s=0.2, instant=instant))
    assert fast.value == pytest.approx(32.0)
    assert slow.value == pytest.approx(32 + GAMMA * (ALPHA_NORMAL / part - 16))


def test_nothing_known_changes_nothing() -> None:
    """No new signal, and none missing for long: the limit stays."""
    limit = steady(64.0)
    assert limit.step(seen(10.0, None)) == 64


@pytest.mark.parametrize("capacity", [50, 300, 2000])
def test_the_plateau_search_finds_the_least_limit_that_is_enough(capacity: int) -> None:
    """With throughput alone, the search ends within one step above the capacity, and near its throughput."""
    plateau, limit = Plateau(), 64.0
    for _ in range(20):
        limit = plateau.step(limit, min(limit, capacity))
        if plateau.resting:
            break
    assert min(limit, capacity) >= 0.95 * capacity
    assert limit <= Plateau.STEP * capacity


DIP = ((100, 8_300), (200, 12_000), (420, 14_635), (600, 13_466), (900, 14_700), (10_000, 17_299))
"""Tokens per second up to a number in flight, after `vllm serve` on one H200, where CUDA graphs end at 512."""


def test_the_plateau_search_looks_past_a_dip() -> None:
    """A dip behind 256 does not hide the higher plateau behind it."""
    plateau, limit = Plateau(), 64.0
    for _ in range(20):
        work = next(work for most, work in DIP if limit <= most)
        limit = plateau.step(limit, work)
        if plateau.resting:
            break
    assert limit >= 900


def test_after_an_outage_it_starts_again_no_higher_than_the_first_limit() -> None:
    """The endpoint may have come back smaller."""
    limit = steady(2000.0)
    limit.restart(50.0)
    assert limit.value == 256
    assert limit.slow_start
