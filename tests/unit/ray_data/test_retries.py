from __future__ import annotations

import pytest

from airflow_provider_raylm.ray_data.deadlines import Deadlines
from airflow_provider_raylm.ray_data.errors import Fault, Kind
from airflow_provider_raylm.ray_data.retries import Attempts, backoff_s


def judge(attempts: Attempts, kind: Kind, *, others: bool = True, now_s: float = 0.0) -> str:
    return attempts.judge(Fault(kind, "x"), now_s=now_s, others_answered=others, max_attempts=3, stall_timeout_s=100.0)


@pytest.mark.parametrize(
    ("kind", "others", "verdicts"),
    [
        ("bad_request", True, ["fail"]),
        ("server_error", True, ["retry", "retry", "fail"]),
        ("server_error", False, ["retry", "retry", "fail"]),
        ("invalid_reply", True, ["retry", "retry", "fail"]),
        ("unreachable", True, ["retry", "retry", "fail"]),
        ("timeout", True, ["retry", "fail"]),
        ("refused", True, ["retry"] * 20),
        ("unreachable", False, ["retry", "retry", "ask_endpoint", "ask_endpoint"]),
        ("timeout", False, ["retry", "retry", "ask_endpoint"]),
    ],
)
def test_each_kind_has_its_number_of_attempts(kind: Kind, others: bool, verdicts: list[str]) -> None:
    """Three attempts here; a timeout twice; refusals never; nothing while the endpoint answers nobody."""
    attempts = Attempts()
    assert [judge(attempts, kind, others=others) for _ in verdicts] == verdicts


def test_a_row_that_alone_is_refused_fails_after_the_stall_limit() -> None:
    """While others are answered, a row that is refused for ever is that row's error."""
    attempts = Attempts()
    assert judge(attempts, "refused", now_s=0) == "retry"
    assert judge(attempts, "refused", now_s=101, others=False) == "retry"
    assert judge(attempts, "refused", now_s=101) == "fail"


def test_another_kind_of_failure_ends_a_time_of_refusals() -> None:
    """The stall limit is for refusals without a break."""
    attempts = Attempts()
    judge(attempts, "refused", now_s=0)
    judge(attempts, "server_error", now_s=90)
    assert judge(attempts, "refused", now_s=150) == "retry"


@pytest.mark.parametrize(("failures", "most_s"), [(1, 1.0), (2, 2.0), (5, 16.0), (6, 30.0), (1000, 30.0)])
def test_backoff_doubles_to_a_cap_with_full_jitter(failures: int, most_s: float) -> None:
    """Anything from nothing to the whole."""
    assert backoff_s(failures, 1.0) == most_s
    assert backoff_s(failures, 0.0) == 0.0
    assert 0 <= backoff_s(failures) <= most_s


def test_before_anything_is_seen_a_row_gets_time_for_a_cold_start() -> None:
    """Five minutes and a quarter of a second for each token it may have."""
    assert Deadlines().limit_s(400) == 400.0
    assert Deadlines().limit_s(None) == 300 + 4096 / 4


def test_the_deadline_follows_what_is_seen_and_what_may_still_come() -> None:
    """Four times the slowest row, and the usual pace for tokens beyond the longest reply."""
    deadlines = Deadlines()
    for _ in range(16):
        deadlines.observe(20.0, 100)
    assert deadlines.limit_s(100) == 80.0
    assert deadlines.limit_s(200) == 4 * (20 + 100 * 0.2)
    assert deadlines.limit_s(100, timeouts=1) == 160.0


def test_the_deadline_has_a_floor_and_a_ceiling() -> None:
    """A quick endpoint may hiccup; no row waits for ever."""
    deadlines = Deadlines()
    for _ in range(16):
        deadlines.observe(0.01, 5)
    assert deadlines.limit_s(5) == 60.0
    for _ in range(16):
        deadlines.observe(5000.0, 5)
    assert deadlines.limit_s(5, timeouts=3) == 7200.0


def test_a_limit_of_the_users_own_is_the_limit() -> None:
    """However often the row has timed out."""
    assert Deadlines(fixed_s=5.0).limit_s(10_000, timeouts=3) == 5.0
