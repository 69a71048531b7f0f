"""When a failed request is sent again, and when its row has failed. Pure: the clock is an argument."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from airflow_provider_raylm.ray_data.errors import Fault

_BASE_S = 0.5
_CAP_S = 30.0
_QUARANTINE_TIMEOUTS = 2


def backoff_s(failures: int, uniform: float | None = None) -> float:
    """Seconds before the next attempt after `failures` of them: full jitter, so that rows do not come back together.

    Source: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """
    share = random.random() if uniform is None else uniform  # noqa: S311
    return float(share * min(_CAP_S, _BASE_S * 2 ** min(failures, 10)))


@dataclass(slots=True)
class Attempts:
    """One row's history.

    Attributes:
        sent: Requests sent.
        counted: Failures that count against `max_attempts`.
        timeouts: Timeouts that count; the second puts the row in quarantine.
        uncounted: Failures of an endpoint that answered nobody in the meantime.
        failures: Failures in a row, for the back-off.
        refused_since_s: When the endpoint began to refuse this row; `None` while it does not.
    """

    sent: int = 0
    counted: int = 0
    timeouts: int = 0
    uncounted: int = 0
    failures: int = 0
    refused_since_s: float | None = None

    def judge(
        self,
        fault: Fault,
        *,
        now_s: float,
        others_answered: bool,
        max_attempts: int,
        stall_timeout_s: float,
    ) -> Literal["retry", "fail", "ask_endpoint"]:
        """What a failure means for its row.

        Args:
            others_answered: The endpoint answered another row since this request was sent. If it did not, it may be the
                endpoint that failed rather than the row, and waiting for it is the limiter's business.

        Returns:
            `ask_endpoint` when only the endpoint's health can tell: see `blame_row`.
        """
        self.failures += 1
        if fault.kind == "bad_request":
            return "fail"
        if fault.kind == "refused":
            if self.refused_since_s is None:
                self.refused_since_s = now_s
            waited_s = now_s - self.refused_since_s
            return "fail" if others_answered and waited_s > stall_timeout_s else "retry"
        self.refused_since_s = None
        if fault.kind in ("unreachable", "timeout") and not others_answered:
            self.uncounted += 1
            return "ask_endpoint" if self.uncounted >= max_attempts else "retry"
        return self.blame_row(fault, max_attempts=max_attempts)

    def blame_row(self, fault: Fault, *, max_attempts: int) -> Literal["retry", "fail"]:
        """Count the failure against the row."""
        self.counted += 1
        self.timeouts += fault.kind == "timeout"
        return "fail" if self.counted >= max_attempts or self.timeouts >= _QUARANTINE_TIMEOUTS else "retry"
