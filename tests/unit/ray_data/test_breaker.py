"""An endpoint that is away is probed, not hammered."""

from __future__ import annotations

import itertools

from airflow_provider_raylm.ray_data.breaker import FAILURES, Breaker


def away(now_s: float = 0.0, stall_timeout_s: float = 60.0) -> Breaker:
    """A breaker that has just opened."""
    breaker = Breaker(stall_timeout_s)
    breaker.record(now_s, unreachable=FAILURES)
    assert breaker.is_open
    return breaker


def test_opens_after_failures_in_a_row_only() -> None:
    """An endpoint that hangs up now and then, but answers in between, stays in use."""
    breaker = Breaker(60.0)
    for second in range(20):
        breaker.record(float(second), unreachable=FAILURES - 1)
        breaker.record(float(second), answered=1)
    assert not breaker.is_open


def test_probes_come_later_and_later() -> None:
    """Open, it lets one request go at 1, 3, 7, ... seconds, never two at once."""
    breaker = away()
    sent = [t / 10 for t in range(0, 1500) if breaker.take_probe(t / 10)]
    assert sent[:4] == [1.0, 3.0, 7.0, 15.0]
    assert max(b - a for a, b in itertools.pairwise(sent)) <= 30.1


def test_the_first_answer_closes_it() -> None:
    """An error about the row is an answer, too: somebody is there."""
    breaker = away()
    assert breaker.record(5.0, answered=1)
    assert not breaker.is_open
    assert not breaker.record(6.0, answered=1)


def test_being_turned_away_closes_it_and_keeps_the_stall_clock() -> None:
    """Who says 429 is there; but as long as nothing gets through, the stall limit runs."""
    breaker = away(now_s=10.0)
    breaker.record(20.0, dropped=1)
    assert not breaker.is_open
    assert not breaker.stalled(69.9)
    assert breaker.stalled(70.0)


def test_any_answer_resets_the_stall_clock() -> None:
    """Only an unbroken time without answers is a stall."""
    breaker = away(now_s=0.0)
    breaker.record(59.0, answered=1)
    breaker.record(60.0, unreachable=1)
    assert not breaker.stalled(119.0)
    assert breaker.stalled(120.0)
