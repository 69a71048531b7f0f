"""The keeper's book-keeping, without Ray: reports in, slots out."""

from __future__ import annotations

import random

import pytest

from airflow_provider_raylm.ray_data.contracts import Begun, Sample
from airflow_provider_raylm.ray_data.flow import Flow, Tally
from airflow_provider_raylm.ray_data.keeper import SILENT_S, Demand, Ledger, allot
from airflow_provider_raylm.ray_data.limiter import Report


def report(member: str, *, held: int = 0, used: int | None = None, waiting: int = 1, **kwargs: object) -> Report:
    total = kwargs.pop("total", None) or Tally()
    return Report(
        member=member,
        held=held,
        used=held if used is None else used,
        waiting=waiting,
        total=total,  # type: ignore[arg-type]
        samples=kwargs.pop("samples", []),  # type: ignore[arg-type]
        **kwargs,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("limit", "demands", "expected"),
    [
        pytest.param(100, {"a": (100, 9)}, {"a": 100}, id="alone"),
        pytest.param(100, {"a": (200, 9), "b": (200, 9)}, {"a": 50, "b": 50}, id="halves"),
        pytest.param(100, {"a": (10, 0), "b": (200, 9)}, {"a": 10, "b": 90}, id="what one does not want"),
        pytest.param(100, {"a": (10, 0), "b": (20, 9)}, {"a": 10, "b": 90}, id="left over to who waits"),
        pytest.param(100, {"a": (10, 0), "b": (20, 0)}, {"a": 45, "b": 55}, id="left over to all"),
        pytest.param(
            2, {"a": (9, 9), "b": (9, 9), "c": (9, 9)}, {"a": 1, "b": 1, "c": 0}, id="fewer slots than actors"
        ),
        pytest.param(5, {}, {}, id="nobody"),
    ],
)
def test_divides_the_limit(limit: int, demands: dict[str, tuple[int, int]], expected: dict[str, int]) -> None:
    """Max-min fair, and nothing stays unlent."""
    wanted = {k: Demand(wanted=w, waiting=bool(n), served=0) for k, (w, n) in demands.items()}
    assert allot(limit, wanted) == expected


def test_who_was_served_least_comes_first() -> None:
    """With fewer slots than actors, nobody starves."""
    demands = {k: Demand(wanted=5, waiting=True, served=s) for k, s in (("a", 10), ("b", 0), ("c", 5))}
    assert allot(1, demands) == {"a": 0, "b": 1, "c": 0}


def test_slots_lent_and_held_never_exceed_the_limit() -> None:
    """Whatever the actors report in whatever order, the sum of what they may hold stays within the limit."""
    rng = random.Random(7)
    ledger = Ledger(Flow(0.0, first_limit=64))
    lent: dict[str, int] = {}
    held: dict[str, int] = {}
    for step in range(2000):
        member = rng.choice("abcdef")
        held[member] = rng.randint(0, lent.get(member, 0))
        lent[member] = ledger.report(step / 1000, report(member, held=held[member], waiting=rng.randint(0, 3))).slots
        assert sum(max(lent[m], held[m]) for m in lent) <= 64


def test_the_slots_of_a_silent_actor_are_lent_to_others() -> None:
    """An actor that died gives its slots back after a few seconds."""
    ledger = Ledger(Flow(0.0, first_limit=64))
    assert ledger.report(0.0, report("dead")).slots == 64
    assert ledger.report(1.0, report("alive")).slots == 0
    ledger.tick(0.5 + SILENT_S + 0.6)
    assert ledger.report(SILENT_S + 1.2, report("alive")).slots == 64


def test_an_actor_that_comes_back_is_not_counted_anew() -> None:
    """One whose process stood still for longer was counted before, and knows no limit better than the keeper's."""
    ledger = Ledger(Flow(0.0, first_limit=64))
    ledger.report(0.0, report("a", total=Tally(success=5, rows=5)))
    ledger.tick(SILENT_S + 1.0)
    ledger.report(SILENT_S + 2.0, report("a", total=Tally(success=7, rows=7), limit=500))
    assert ledger.status(SILENT_S + 2.0)["rows"] == 7
    assert ledger.flow.limit == 64


def test_an_actor_that_leaves_gives_its_slots_back_at_once() -> None:
    """Closing returns everything."""
    ledger = Ledger(Flow(0.0, first_limit=64))
    ledger.report(0.0, report("a"))
    assert ledger.report(1.0, report("a", leaving=True)).slots == 0
    assert ledger.report(1.1, report("b")).slots == 64


def test_a_report_that_comes_twice_counts_once() -> None:
    """Totals are totals."""
    ledger = Ledger(Flow(0.0))
    for _ in range(2):
        ledger.report(1.0, report("a", total=Tally(success=5, rows=5, completion_tokens=50)))
    status = ledger.status(1.0)
    assert (status["rows"], status["completion_tokens"]) == (5, 50)


def test_while_the_endpoint_is_away_one_actor_sends_one_probe() -> None:
    """Nobody else may start anything, and the probe goes to an actor that has a row."""
    ledger = Ledger(Flow(0.0, first_limit=64))
    ledger.report(0.0, report("a"))
    ledger.report(0.1, report("b"))
    ledger.report(0.2, report("a", total=Tally(unreachable=5)))
    grants = [ledger.report(0.3 + i / 10, report("ab"[i % 2], waiting=i % 2)).slots for i in range(20)]
    assert sum(grants) == 1
    assert grants.index(1) % 2 == 1


def test_a_new_keeper_takes_up_where_the_old_one_was() -> None:
    """A keeper started anew by Ray learns the limit from the first report."""
    ledger = Ledger(Flow(100.0, first_limit=64))
    assert ledger.report(100.0, report("a", held=300, limit=500)).limit == 500


def test_times_of_another_process_are_put_on_the_keeper_s_clock() -> None:
    """Samples carry ages, not times: clocks of processes have no common zero."""
    ledger = Ledger(Flow(1000.0))
    samples, begun = [Sample(3.0, 1.0, "success", 10, 10)], [Begun(2.0, 0.1, 0.02)]
    ledger.report(1010.0, report("a", samples=samples, begun=begun, total=Tally(success=1)))
    assert list(ledger.flow._begun) == [Begun(1008.0, 0.1, 0.02)]
    assert [(s.sent_s, s.done_s) for s in ledger.flow._samples] == [(1007.0, 1009.0)]
