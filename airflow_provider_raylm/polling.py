"""What to do after one look at a Ray job. Pure: no I/O, no clock of its own.

The same decision drives the trigger, the synchronous operator and the sensor, so all of them agree. Two things must
stay true: every job status ends in exactly one step, and "could not find out" is never taken for "not there".
All times are wall-clock epoch seconds, because deadlines travel from the worker to a triggerer and outlive both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

JobStatus = Literal["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
"""Ray's own words (`ray.job_submission.JobStatus`)."""
STATUSES: tuple[str, ...] = get_args(JobStatus)
TERMINAL: frozenset[str] = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})

MISSING_LOOKS = 3
MISSING_S = 30.0
"""A job is lost only after this many 404 over this many seconds: a head that restores its state needs a moment."""
MAX_BACKOFF_S = 60.0


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """One Ray job as the Jobs API describes it.

    Attributes:
        submission_id: The id it was submitted under.
        status: One of `STATUSES`.
        message: Ray's own explanation; holds the last log lines of a failed job.
        error_type: Ray's word for the kind of failure, `None` unless it failed.
        exit_code: Of the entrypoint; `None` if it never ended by itself.
        metadata: What was given at submission; strings only.
        start_time_s, end_time_s: Epoch seconds of the head's clock.
    """

    submission_id: str
    status: JobStatus
    message: str = ""
    error_type: str | None = None
    exit_code: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    start_time_s: float | None = None
    end_time_s: float | None = None

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL

    @classmethod
    def from_api(cls, raw: Mapping[str, Any]) -> JobInfo:
        """Read a reply of `GET /api/jobs/<id>`.

        Raises:
            ValueError: It has no status, or one that this version does not know.
        """
        status = raw.get("status")
        if status not in STATUSES:
            raise ValueError(f"job status {status!r} is none of {', '.join(STATUSES)}")
        return cls(
            submission_id=str(raw.get("submission_id") or ""),
            status=status,
            message=str(raw.get("message") or ""),
            error_type=raw.get("error_type"),
            exit_code=raw.get("driver_exit_code"),
            metadata={str(k): str(v) for k, v in (raw.get("metadata") or {}).items()},
            start_time_s=_seconds(raw.get("start_time")),
            end_time_s=_seconds(raw.get("end_time")),
        )


def _seconds(milliseconds: Any) -> float | None:
    return milliseconds / 1000 if isinstance(milliseconds, (int, float)) else None


@dataclass(frozen=True)
class Missing:
    """The cluster answered that it does not know the job."""


@dataclass(frozen=True)
class Unanswered:
    """The cluster could not be asked. Says nothing about the job."""

    reason: str


Seen = JobInfo | Missing | Unanswered


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How long we wait for what.

    Attributes:
        poll_interval_s: Seconds between two looks.
        start_deadline: Epoch seconds by which the job must have left PENDING.
        deadline: Epoch seconds by which it must have ended.
        patience_s: Seconds without an answer that are tolerated.
    """

    poll_interval_s: float = 10.0
    start_deadline: float | None = None
    deadline: float | None = None
    patience_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What the looks so far have left behind.

    Attributes:
        unanswered_since: Epoch seconds of the first look of an unbroken row without an answer.
        unanswered: Length of that row.
        missing_since: Epoch seconds of the first 404 since the job was last seen.
        missing: Number of 404 since.
        pending: Whether the job was PENDING when it was last seen.
    """

    unanswered_since: float | None = None
    unanswered: int = 0
    missing_since: float | None = None
    missing: int = 0
    pending: bool = True


@dataclass(frozen=True)
class Wait:
    """Look again after `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True)
class Ended:
    """The job is terminal."""

    job: JobInfo


@dataclass(frozen=True)
class Expired:
    """A deadline passed: cancel, then fail."""

    which: Literal["start_timeout", "timeout"]


@dataclass(frozen=True)
class Lost:
    """The cluster answers, but does not know the job any more."""


@dataclass(frozen=True)
class Unreachable:
    """Patience is over. The job may still run."""

    reason: str


Step = Wait | Ended | Expired | Lost | Unreachable


def next_step(terms: Terms, memory: Memory, seen: Seen, now: float) -> tuple[Memory, Step]:
    """Decide what follows from one look at the job.

    Args:
        terms: Deadlines and patience.
        memory: What this function returned last time; `Memory()` at first.
        seen: What the look showed.
        now: Epoch seconds.

    Returns:
        The memory for the next call, and the step to take.
    """
    if isinstance(seen, JobInfo):
        memory = Memory(pending=seen.status == "PENDING")
        if seen.ended:
            return memory, Ended(seen)  # also past a deadline: it did end
    elif isinstance(seen, Missing):
        memory = replace(
            memory,
            unanswered_since=None,
            unanswered=0,
            missing_since=now if memory.missing_since is None else memory.missing_since,
            missing=memory.missing + 1,
        )
    else:
        memory = replace(
            memory,
            unanswered_since=now if memory.unanswered_since is None else memory.unanswered_since,
            unanswered=memory.unanswered + 1,
        )
    return memory, _step(terms, memory, seen, now)


def _step(terms: Terms, memory: Memory, seen: Seen, now: float) -> Step:
    if isinstance(seen, Missing):
        if memory.missing >= MISSING_LOOKS and now - (memory.missing_since or now) >= MISSING_S:
            return Lost()
        return Wait(min(terms.poll_interval_s, MISSING_S / MISSING_LOOKS))
    if terms.deadline is not None and now >= terms.deadline:
        return Expired("timeout")
    if memory.pending and terms.start_deadline is not None and now >= terms.start_deadline:
        return Expired("start_timeout")
    delay = terms.poll_interval_s
    if isinstance(seen, Unanswered):
        if now - (memory.unanswered_since or now) >= terms.patience_s:
            return Unreachable(seen.reason)
        delay = min(delay * 2.0 ** min(memory.unanswered - 1, 10), max(MAX_BACKOFF_S, delay))
    limits = [terms.deadline, terms.start_deadline if memory.pending else None]
    if isinstance(seen, Unanswered):
        limits.append((memory.unanswered_since or now) + terms.patience_s)
    return Wait(min([delay, *(limit - now for limit in limits if limit is not None)]))
