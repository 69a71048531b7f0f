"""The error tree, shared by the Airflow side and the cluster side. Standard library only.

    RaylmError
    ├── SpecError (ValueError)        what was asked for is wrong; nothing was sent
    ├── RayJobError                   the Ray job; has `submission_id`
    │   ├── RaySubmitError            the cluster did not take the job
    │   ├── RayJobFailedError         the job ended FAILED
    │   ├── RayJobStoppedError        the job ended STOPPED
    │   ├── RayJobTimeoutError        a deadline passed
    │   ├── RayJobLostError           the cluster no longer knows the job
    │   ├── RayAccessError            the cluster or its gateway refused the credentials
    │   └── RayUnreachableError       the dashboard did not answer for longer than we wait
    ├── EndpointError                 the model endpoint; has `http_status`
    │   ├── TransientEndpointError    a retry can help; has `retry_after_s`
    │   └── TerminalEndpointError     no retry can help
    ├── ServeError                    an application could not be deployed or removed
    ├── StorageError                  the object store refused or could not be reached; has `refused`, `expired`
    ├── OutputError                   the output folder cannot be used as asked
    └── PartialFailureError           more rows failed than the policy allows; has `rows`, `errors`

Every error is rebuilt from its message and its keyword attributes, so it survives pickling between processes.
"""

from __future__ import annotations

from typing import Any


class RaylmError(Exception):
    """Base of all errors of this package.

    Args:
        message: What was wrong, what was expected, what happens next. No prompts, keys or rows.
        **details: Attributes of the error; kept by pickling.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self._details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self._details))


def _rebuild(cls: type[RaylmError], message: str, details: dict[str, Any]) -> RaylmError:
    return cls(message, **details)


class SpecError(RaylmError, ValueError):
    """What was asked for is wrong. Raised before anything is sent; a retry does not help."""


class RayJobError(RaylmError):
    """Something about a Ray job.

    Args:
        message: See `RaylmError`.
        submission_id: The job in question, `None` if it has none yet.
    """

    def __init__(self, message: str, *, submission_id: str | None = None, **details: Any) -> None:
        super().__init__(message, submission_id=submission_id, **details)
        self.submission_id = submission_id


class RaySubmitError(RayJobError):
    """The cluster did not take the job."""


class RayJobFailedError(RayJobError):
    """The job ended FAILED. The message carries Ray's message, the exit code and the last log lines."""


class RayJobStoppedError(RayJobError):
    """The job ended STOPPED: someone or something cancelled it."""


class RayJobTimeoutError(RayJobError):
    """`start_timeout` or `timeout` passed. The message says what became of the job."""


class RayJobLostError(RayJobError):
    """The cluster answers, but does not know the job any more (its head was replaced)."""


class RayAccessError(RayJobError):
    """The cluster or its gateway refused the credentials (HTTP 401, 403)."""


class RayUnreachableError(RayJobError):
    """The dashboard or gateway did not answer for longer than we wait. The job may still run."""


class EndpointError(RaylmError):
    """The model endpoint refused or failed.

    Args:
        message: See `RaylmError`.
        http_status: The HTTP status, `None` when there was no answer.
    """

    def __init__(self, message: str, *, http_status: int | None = None, **details: Any) -> None:
        super().__init__(message, http_status=http_status, **details)
        self.http_status = http_status


class TransientEndpointError(EndpointError):
    """A retry can help.

    Args:
        message: See `RaylmError`.
        http_status: See `EndpointError`.
        retry_after_s: Seconds the server asked to wait, `None` when it did not say.
    """

    def __init__(
        self, message: str, *, http_status: int | None = None, retry_after_s: float | None = None, **details: Any
    ) -> None:
        super().__init__(message, http_status=http_status, retry_after_s=retry_after_s, **details)
        self.retry_after_s = retry_after_s


class TerminalEndpointError(EndpointError):
    """No retry can help: wrong key, unknown model, wrong URL."""


class ServeError(RaylmError):
    """A Serve application could not be deployed, or could not be shown to be gone."""


class StorageError(RaylmError):
    """The object store refused or failed: wrong key, no such bucket, a wrong clock, an expired token.

    Args:
        message: See `RaylmError`.
        refused: The store does not accept these credentials for this; no retry with them helps.
        expired: They were temporary and have run out.
    """

    def __init__(self, message: str, *, refused: bool = False, expired: bool = False, **details: Any) -> None:
        super().__init__(message, refused=refused, expired=expired, **details)
        self.refused = refused
        self.expired = expired


class OutputError(RaylmError):
    """The output folder cannot be used as asked: it holds another run, or another run is writing to it."""


class PartialFailureError(RaylmError):
    """More rows failed than the policy allows.

    Args:
        message: See `RaylmError`.
        rows: Rows asked for.
        errors: Rows that failed.
    """

    def __init__(self, message: str, *, rows: int = 0, errors: int = 0, **details: Any) -> None:
        super().__init__(message, rows=rows, errors=errors, **details)
        self.rows = rows
        self.errors = errors
