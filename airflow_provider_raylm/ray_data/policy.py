"""What failed rows mean for the job. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from airflow_provider_raylm.exceptions import PartialFailureError
from airflow_provider_raylm.spec import OnError

FIRST_ROWS = 32
"""So many answered rows, all of them failures, are no accident: the job stops early."""


class ErrorWatch:
    """One actor's view of the rows it asked: stops the job as soon as the policy is sure to be broken.

    Args:
        on_error, max_error_rate, max_errors: See `airflow_provider_raylm.spec.QuerySpec`.
    """

    def __init__(self, on_error: OnError, max_error_rate: float | None, max_errors: int | None) -> None:
        self._on_error = on_error
        self._max_errors = max_errors
        self._all_may_fail = max_error_rate == 1.0
        self._asked = 0
        self._errors = 0
        self._kinds: Counter[str] = Counter()

    def observe(self, error_type: str | None, message: str = "", *, sent: bool = True) -> None:
        """Add a finished row.

        Args:
            error_type: `None` for a row that went well.
            sent: The endpoint was asked. Rows that could not be asked say nothing about the endpoint.

        Raises:
            PartialFailureError: The job cannot meet its policy any more.
        """
        self._asked += sent
        if error_type is None:
            return
        self._errors += 1
        self._kinds[error_type] += sent
        if self._on_error == "raise":
            raise PartialFailureError(
                f"a row failed and on_error is 'raise': {error_type}: {message}", rows=self._asked, errors=self._errors
            )
        if self._max_errors is not None and self._errors > self._max_errors:
            raise PartialFailureError(
                f"{self._errors} rows failed, max_errors is {self._max_errors}; the last one: {error_type}: {message}",
                rows=self._asked,
                errors=self._errors,
            )
        all_failed = self._asked == FIRST_ROWS == sum(self._kinds.values())
        if all_failed and self._max_errors is None and not self._all_may_fail:
            raise PartialFailureError(
                f"the first {FIRST_ROWS} rows all failed; the last one: {error_type}: {message}. "
                "Set max_error_rate=1.0 if that is to be expected",
                rows=self._asked,
                errors=self._errors,
            )


def check_totals(
    *,
    rows: int,
    errors: int,
    on_error: OnError,
    max_error_rate: float | None,
    max_errors: int | None,
    errors_by_type: Mapping[str, int] | None = None,
) -> None:
    """Judge a finished job by its counts.

    Without `max_error_rate` and `max_errors` any share of failed rows is accepted, but not all of them.

    Raises:
        PartialFailureError: More rows failed than the policy allows.
    """
    if not errors:
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(errors_by_type or {}).most_common(5))
    found = f"{errors} of {rows} rows failed" + (f" ({kinds})" if kinds else "")
    if on_error == "raise":
        raise PartialFailureError(f"{found} and on_error is 'raise'", rows=rows, errors=errors)
    if max_errors is not None and errors > max_errors:
        raise PartialFailureError(f"{found}, max_errors is {max_errors}", rows=rows, errors=errors)
    if max_error_rate is not None and errors > max_error_rate * rows:
        raise PartialFailureError(f"{found}, max_error_rate is {max_error_rate:g}", rows=rows, errors=errors)
    if max_error_rate is None and max_errors is None and errors == rows:
        raise PartialFailureError(
            f"{found}: every one; set max_error_rate=1.0 if that is to be expected", rows=rows, errors=errors
        )
