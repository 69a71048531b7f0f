"""How a job ended, as the trigger tells it to the operator.

An outcome is plain data: it crosses from the triggerer to the worker through Airflow's database. Every state is either
a success or an error, never silence, and the error's first sentence says why.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from airflow_provider_raylm.exceptions import (
    RayJobError,
    RayJobFailedError,
    RayJobLostError,
    RayJobStoppedError,
    RayJobTimeoutError,
    RayUnreachableError,
)

State = Literal["succeeded", "failed", "stopped", "start_timeout", "timeout", "lost", "unreachable"]

_ERRORS: dict[str, type[RayJobError]] = {
    "failed": RayJobFailedError,
    "stopped": RayJobStoppedError,
    "start_timeout": RayJobTimeoutError,
    "timeout": RayJobTimeoutError,
    "lost": RayJobLostError,
    "unreachable": RayUnreachableError,
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended.

    Attributes:
        submission_id: The job.
        state: One of `State`.
        reason: One sentence for people; for a failure, why.
        exit_code: Of the entrypoint.
        error_type: Ray's word, or the class of the error that the job named.
        result: Content of its `raylm.result` line.
        log_tail: Its last log lines.
    """

    submission_id: str
    state: State
    reason: str = ""
    exit_code: int | None = None
    error_type: str | None = None
    result: dict[str, Any] | None = None
    log_tail: tuple[str, ...] = ()

    def to_event(self) -> dict[str, Any]:
        """Plain JSON for a trigger event."""
        return {**dataclasses.asdict(self), "log_tail": list(self.log_tail)}

    @classmethod
    def from_event(cls, event: dict[str, Any]) -> Outcome:
        """The outcome that `to_event` wrote."""
        return cls(**{**event, "log_tail": tuple(event.get("log_tail") or ())})

    def error(self) -> RayJobError | None:
        """The error to raise, `None` after a success."""
        if self.state == "succeeded":
            return None
        cls = _ERRORS.get(self.state, RayJobError)
        parts = [self.reason]
        if self.exit_code is not None:
            parts.append(f"Exit code {self.exit_code}.")
        if self.log_tail:
            parts.append("Last log lines:\n" + "\n".join(self.log_tail))
        return cls("\n".join(parts), submission_id=self.submission_id)
