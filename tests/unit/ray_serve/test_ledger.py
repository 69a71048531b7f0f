"""Who holds an application and until when."""

from __future__ import annotations

import dataclasses

import pytest

from airflow_provider_raylm.ray_serve.ledger import CLOSING_GRACE_S, DEPLOYER_TTL_S, Ledger

T0 = 1000.0


def deployed(*holders: str, ttl_s: float = 100.0, at: float = T0) -> Ledger:
    """A ledger whose first deploy has finished, with leases of these holders; without any, it is kept."""
    ledger = Ledger("app", at)
    for holder in holders or (None,):
        ledger.begin("f1", "d1", holder, ttl_s, at)
    ledger.finish("d1", "f1", {"app_name": "app"}, {"base_url": "u"}, at)
    return ledger


def test_first_deploy_goes_ahead_and_the_same_again_is_ready() -> None:
    """The answer to `begin` tells a deploy from a no-op."""
    ledger = Ledger("app", T0)
    assert ledger.begin("f1", "d1", "run1", 100, T0) == "deploy"
    ledger.finish("d1", "f1", {}, {}, T0 + 1)
    assert ledger.begin("f1", "d2", "run2", 100, T0 + 2) == "ready"
    ledger.finish("d2", "f1", {}, {}, T0 + 3)
    assert ledger.begin("f2", "d3", "run3", 100, T0 + 4) == "deploy"


def test_deploys_of_one_application_exclude_each_other_until_one_is_dead() -> None:
    """A second deploy waits, and takes over from one that gives no heartbeats."""
    ledger = Ledger("app", T0)
    ledger.begin("f1", "d1", "run1", 100, T0)
    assert ledger.begin("f1", "d2", "run2", 100, T0 + 1) == "wait"
    assert ledger.heartbeat("d1", "run1", T0 + DEPLOYER_TTL_S)
    assert ledger.begin("f1", "d2", "run2", 100, T0 + DEPLOYER_TTL_S + 1) == "wait"
    assert ledger.begin("f1", "d2", "run2", 100, T0 + 3 * DEPLOYER_TTL_S) == "deploy"
    assert not ledger.heartbeat("d1", "run1", T0 + 3 * DEPLOYER_TTL_S)


def test_application_goes_with_its_last_lease() -> None:
    """Releasing one of two leases keeps it, releasing the other begins the removal."""
    ledger = deployed("run1", "run2")
    assert ledger.release("run1", T0 + 1) == ("run2",)
    assert ledger.closing_s is None
    assert ledger.release("run2", T0 + 2) == ()
    assert ledger.closing_s == T0 + 2
    assert ledger.begin("f1", "d9", "run3", 100, T0 + 3) == "closing"
    assert not ledger.renew("run3", 100, T0 + 3)


def test_kept_application_stays_until_a_teardown_names_no_holder() -> None:
    """A deploy without a lease holds on whatever the leases do."""
    ledger = deployed()
    ledger.renew("run1", 100, T0)
    assert ledger.release("run1", T0 + 1) == ()
    assert ledger.closing_s is None
    assert not ledger.overdue(T0 + 1e9)
    ledger.release(None, T0 + 2)
    assert ledger.closing_s == T0 + 2


@pytest.mark.parametrize(
    ("ledger", "at", "overdue"),
    [
        pytest.param(deployed("run1"), T0 + 99, False, id="lease valid"),
        pytest.param(deployed("run1"), T0 + 101, True, id="lease ran out"),
        pytest.param(deployed(), T0 + 1e9, False, id="kept"),
        pytest.param(Ledger("app", T0, leases={"run1": T0 + 1e9}), T0 + 1, True, id="first deploy died"),
        pytest.param(
            Ledger("app", T0, deployer="d1", deployer_until_s=T0 + 60), T0 + 59, False, id="first deploy at work"
        ),
        pytest.param(Ledger("app", T0, closing_s=T0), T0 + CLOSING_GRACE_S - 1, False, id="teardown at work"),
        pytest.param(Ledger("app", T0, closing_s=T0), T0 + CLOSING_GRACE_S, True, id="teardown died"),
    ],
)
def test_keeper_removes_what_nobody_holds(ledger: Ledger, at: float, overdue: bool) -> None:
    """Exactly the cases in which no job will remove the application are overdue."""
    assert ledger.overdue(at) is overdue


def test_renewing_extends_from_now_and_expired_holders_are_not_listed() -> None:
    """A claim is valid for `ttl_s` from its last renewal."""
    ledger = deployed("run1", "run2")
    ledger.renew("run1", 100, T0 + 50)
    assert ledger.holders(T0 + 99) == ("run2", "run1")
    assert ledger.holders(T0 + 101) == ("run1",)


def test_failed_first_deploy_closes_and_failed_update_does_not() -> None:
    """Only an application that never answered goes with its failed deploy."""
    first = Ledger("app", T0)
    first.begin("f1", "d1", "run1", 100, T0)
    first.abandon("d1", "run1", T0 + 1)
    assert first.overdue(T0 + 1)
    update = deployed("run1")
    update.begin("f2", "d2", "run2", 100, T0 + 1)
    update.abandon("d2", "run2", T0 + 2)
    assert update.closing_s is None
    assert update.holders(T0 + 2) == ("run1",)
    assert update.fingerprint == "f1"


def test_gpu_seconds_add_up_what_was_held_between_looks() -> None:
    """Two GPUs for ten seconds and one for five are twenty-five."""
    ledger = Ledger("app", T0)
    for gpus, now in ((2, T0), (1, T0 + 10), (0, T0 + 15), (0, T0 + 99)):
        ledger.sample(gpus, now)
    assert ledger.gpu_seconds == 25


@pytest.mark.parametrize("end", ["abandoned", "died", "waited in vain"])
def test_a_failed_deploy_without_a_lease_does_not_keep_the_application(end: str) -> None:
    """Otherwise the last lease could go, and the GPU would stay with nobody."""
    ledger = deployed("run1", ttl_s=10_000)
    later = T0 + 10
    if end == "waited in vain":
        ledger.begin("f2", "d2", "run1", 10_000, later)
    ledger.begin("f2", "d3", None, 0, later)
    if end == "abandoned":
        ledger.abandon("d3", None, later)
    later += 2 * DEPLOYER_TTL_S
    assert not ledger.overdue(later)
    assert ledger.release("run1", later) == ()
    assert ledger.closing_s is not None or ledger.overdue(later)


def test_a_deploy_that_waits_claims_nothing() -> None:
    """Whoever gives up waiting leaves no lease behind that would hold the application for nobody."""
    ledger = deployed("run1")
    ledger.begin("f2", "d2", "run1", 100, T0)
    assert ledger.begin("f2", "d3", "run2", 100, T0) == "wait"
    assert ledger.holders(T0) == ("run1",)


@pytest.mark.parametrize("lost_to", ["a removal", "another deploy"])
@pytest.mark.parametrize("first", [True, False])
def test_a_deploy_that_lost_its_turn_changes_nothing(lost_to: str, first: bool) -> None:
    """Neither its success nor its failure counts any more: the application is somebody else's now."""
    ledger = Ledger("app", T0) if first else deployed("run1")
    ledger.begin("f2", "late", "run2", 100, T0)
    if lost_to == "a removal":
        ledger.release(None, T0 + 1)
    else:
        ledger.begin("f3", "d3", "run2", 100, T0 + 2 * DEPLOYER_TTL_S)
    before = dataclasses.asdict(ledger)
    assert not ledger.finish("late", "f2", {}, {}, T0 + 130)
    assert not ledger.abandon("late", "run2", T0 + 130)
    assert dataclasses.asdict(ledger) == before
