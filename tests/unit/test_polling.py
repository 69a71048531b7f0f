"""What follows from one look at a job, for every status and every kind of silence."""

from __future__ import annotations

from typing import get_args

import pytest

from airflow_provider_raylm.polling import (
    MAX_BACKOFF_S,
    MISSING_LOOKS,
    MISSING_S,
    STATUSES,
    TERMINAL,
    Ended,
    Expired,
    JobInfo,
    JobStatus,
    Lost,
    Memory,
    Missing,
    Terms,
    Unanswered,
    Unreachable,
    Wait,
    next_step,
)

NOW = 1_000_000.0
TERMS = Terms(poll_interval_s=10, start_deadline=NOW + 100, deadline=NOW + 1000, patience_s=600)


def job(status: JobStatus) -> JobInfo:
    return JobInfo(submission_id="j-1", status=status)


def test_the_status_words_are_rays() -> None:
    """A status that Ray adds, or renames, shows here and not in production."""
    from ray.job_submission import JobStatus as RayJobStatus

    assert {s.value for s in RayJobStatus} == set(STATUSES) == set(get_args(JobStatus))
    assert {s.value for s in RayJobStatus if s.is_terminal()} == TERMINAL


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_ends_or_waits(status: JobStatus) -> None:
    """Terminal statuses end the wait, the others look again after one poll interval."""
    _, step = next_step(TERMS, Memory(), job(status), NOW)
    assert step == (Ended(job(status)) if status in TERMINAL else Wait(10))


@pytest.mark.parametrize(
    ("status", "at", "expected"),
    [
        ("PENDING", NOW + 99, Wait(1)),
        ("PENDING", NOW + 100, Expired("start_timeout")),
        ("PENDING", NOW + 1000, Expired("timeout")),
        ("RUNNING", NOW + 100, Wait(10)),
        ("RUNNING", NOW + 995, Wait(5)),
        ("RUNNING", NOW + 1000, Expired("timeout")),
        ("SUCCEEDED", NOW + 5000, Ended(job("SUCCEEDED"))),
        ("FAILED", NOW + 5000, Ended(job("FAILED"))),
        ("STOPPED", NOW + 5000, Ended(job("STOPPED"))),
    ],
)
def test_deadlines(status: JobStatus, at: float, expected: object) -> None:
    """A wait never sleeps past a deadline, and a job that ended is never called late."""
    assert next_step(TERMS, Memory(), job(status), at)[1] == expected


def test_without_deadlines_it_waits_for_ever() -> None:
    """`None` is no deadline."""
    assert next_step(Terms(), Memory(), job("PENDING"), NOW + 1e9)[1] == Wait(10)


def test_silence_is_tolerated_with_growing_pauses_until_patience_ends() -> None:
    """10, 20, 40, then 60 s; after `patience_s` the job is called unreachable, not lost and not failed."""
    terms, memory, now, waits = Terms(poll_interval_s=10, patience_s=600), Memory(pending=False), NOW, []
    while True:
        memory, step = next_step(terms, memory, Unanswered("HTTP 503"), now)
        if not isinstance(step, Wait):
            break
        waits.append(step.delay_s)
        now += step.delay_s
    assert step == Unreachable("HTTP 503")
    assert waits[:4] == [10, 20, 40, MAX_BACKOFF_S]
    assert sum(waits) == 600


def test_an_answer_ends_the_silence() -> None:
    """Patience counts an unbroken row of failures only."""
    memory, _ = next_step(TERMS, Memory(), Unanswered("reset"), NOW)
    memory, _ = next_step(TERMS, memory, job("RUNNING"), NOW + 10)
    assert memory == Memory(pending=False)


def test_deadlines_hold_while_the_cluster_is_silent() -> None:
    """The run deadline does not wait for patience."""
    assert next_step(TERMS, Memory(pending=False), Unanswered("x"), NOW + 1000)[1] == Expired("timeout")


def test_silence_says_nothing_about_pending() -> None:
    """A job that was RUNNING when last seen does not miss its start deadline because nobody answers."""
    memory, _ = next_step(TERMS, Memory(), job("RUNNING"), NOW)
    assert isinstance(next_step(TERMS, memory, Unanswered("x"), NOW + 100)[1], Wait)


def test_one_404_is_not_a_lost_job() -> None:
    """Only so many 404 over so many seconds are: a head that restores its state answers 404 for a moment."""
    memory, step = Memory(), None
    for look in range(MISSING_LOOKS + 1):
        memory, step = next_step(TERMS, memory, Missing(), NOW + look * MISSING_S / MISSING_LOOKS)
        assert (step == Lost()) == (look == MISSING_LOOKS)
    memory, step = next_step(TERMS, Memory(), Missing(), NOW)
    memory, step = next_step(TERMS, memory, job("RUNNING"), NOW + 20)
    memory, step = next_step(TERMS, memory, Missing(), NOW + 40)
    assert isinstance(step, Wait)


def test_a_hanging_cluster_does_not_lose_a_job() -> None:
    """Silence between two 404 keeps what is known and adds nothing."""
    memory, _ = next_step(TERMS, Memory(), Missing(), NOW)
    memory, step = next_step(TERMS, memory, Unanswered("x"), NOW + 60)
    assert isinstance(step, Wait)
    assert memory.missing == 1


@pytest.mark.parametrize("status", [None, "", "QUEUED", "succeeded"])
def test_an_unknown_status_is_not_guessed(status: object) -> None:
    """What is none of Ray's words is an error of the answer, so the wait treats it as no answer."""
    with pytest.raises(ValueError, match="none of PENDING"):
        JobInfo.from_api({"status": status})


def test_reads_an_api_reply() -> None:
    """Milliseconds become seconds, absent fields stay absent."""
    raw = {"status": "FAILED", "submission_id": "a", "driver_exit_code": 3, "start_time": 1500, "message": None}
    info = JobInfo.from_api(raw)
    assert (info.exit_code, info.start_time_s, info.end_time_s, info.message) == (3, 1.5, None, "")
