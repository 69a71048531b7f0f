"""What a failed request means: for its row, for flow control, for the job. Pure; no I/O.

| kind | what happened | flow control | attempt counted | row's error type |
| --- | --- | --- | --- | --- |
| `refused` | 429, 503 | dropped | no | `rate_limited` |
| `unreachable` | no connection, reset, 502, 504 | unreachable | if other rows get answers | `connection` |
| `timeout` | the row's deadline passed | unreachable | if other rows get answers | `timeout` |
| `server_error` | 408, 409, 425, other 5xx | unreachable | yes | `server_error` |
| `invalid_reply` | 2xx without a usable choice | ignore | yes | `invalid_reply` |
| `bad_request` | other 4xx | ignore | not retried | `bad_request` |
| `fatal` | 401, 403, unknown model, wrong URL | ignore | the job fails | |

Besides these, a row's error type can be `invalid_input` (not sent) or `schema_mismatch` (answered, but not as asked).
"""

from __future__ import annotations

import email.utils
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from airflow_provider_raylm.ray_data.contracts import Outcome
from airflow_provider_raylm.ray_data.schema import replace_surrogates

Kind = Literal["refused", "unreachable", "timeout", "server_error", "invalid_reply", "bad_request", "fatal"]

OUTCOME: dict[Kind, Outcome] = {
    "refused": "dropped",
    "unreachable": "unreachable",
    "timeout": "unreachable",
    "server_error": "unreachable",
    "invalid_reply": "ignore",
    "bad_request": "ignore",
    "fatal": "ignore",
}
ERROR_TYPE: dict[Kind, str] = {"refused": "rate_limited", "unreachable": "connection"}
"""Kinds whose row error type has another name than the kind."""

MAX_MESSAGE = 300
_KEY = re.compile(r"\b(?:(?:sk|ak|hf|key|token)[-_]|Bearer )[A-Za-z0-9_\-.]{12,}|\b[A-Za-z0-9+/_\-]{40,}={0,2}")
_QUOTED = re.compile(r"""(['"`]).{40,}\1|\bgot:? .{80,}|input_value=.*?(?=, input_type|\]|$)""", re.DOTALL)


class Fault(Exception):
    """One failed request.

    Attributes:
        kind: See the module's table.
        message: The server's words, trimmed; no prompt, no key.
        http_status: `None` when there was no answer.
        retry_after_s: Seconds the server asked to wait.
        gone: The answer says that there is nothing at this URL, or no such model. `fatal`, but it may be a restart when
            the endpoint has answered before.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        http_status: int | None = None,
        retry_after_s: float | None = None,
        gone: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.message = message
        self.http_status = http_status
        self.retry_after_s = retry_after_s
        self.gone = gone

    @property
    def error_type(self) -> str:
        return ERROR_TYPE.get(self.kind, self.kind)


def fault_of_reply(
    status: int, headers: Mapping[str, str], text: str, *, model: str, now_s: float, secrets: Sequence[str] = ()
) -> Fault:
    """Name what an answer with a status other than 2xx means.

    Args:
        now_s: Wall-clock epoch seconds, for a `Retry-After` that is a date.
        secrets: See `clean_message`.
    """
    error = _error_object(text)
    message = clean_message(_server_message(error, text) or f"HTTP {status} without a message", secrets=secrets)
    if status in (401, 403):
        return Fault("fatal", f"the endpoint refused the key: HTTP {status}: {message}", http_status=status)
    if _is_unknown_model(status, error, message):
        return Fault("fatal", f"the endpoint has no model {model!r}: {message}", http_status=status, gone=True)
    if status == 405 or (status == 404 and not _is_api_error(error)):
        return Fault(
            "fatal",
            f"nothing answers the OpenAI API at this base_url (HTTP {status}); it usually ends in /v1",
            http_status=status,
            gone=True,
        )
    if status in (429, 503):
        return Fault("refused", message, http_status=status, retry_after_s=retry_after_s(headers, now_s=now_s))
    if status in (502, 504):
        return Fault("unreachable", message, http_status=status)
    if status >= 500 or status in (408, 409, 425):
        return Fault("server_error", message, http_status=status)
    if 300 <= status < 400:
        return Fault(
            "fatal", f"the endpoint redirects (HTTP {status}); give the URL it redirects to", http_status=status
        )
    return Fault("bad_request", message, http_status=status)


def retry_after_s(headers: Mapping[str, str], *, now_s: float) -> float | None:
    """Seconds to wait, from `retry-after-ms` or `Retry-After` (seconds or a date, RFC 9110 section 10.2.3)."""
    try:
        if (ms := headers.get("retry-after-ms")) is not None:
            return max(0.0, float(ms) / 1000)
    except ValueError:
        pass
    if (value := headers.get("retry-after")) is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now_s
        except (TypeError, ValueError, OverflowError):
            return None
    return max(0.0, seconds) if seconds < float("inf") else None


def clean_message(text: str, prompts: Sequence[str] = (), *, secrets: Sequence[str] = ()) -> str:
    """A server's message without what it may echo: long quotations, keys, prompts. At most `MAX_MESSAGE` characters.

    Args:
        text: The message, whole: what is cut in the middle is not recognised.
        prompts: Texts that the request sent.
        secrets: What the request was signed with; a longer one before those that are part of it.
    """
    text = replace_surrogates(text)
    for secret in secrets:
        text = text.replace(secret, "***")
    for prompt in prompts:
        if len(prompt) >= 8:
            text = text.replace(prompt, "…")
    text = _QUOTED.sub("…", text[:20_000])
    text = _KEY.sub("***", text)
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


def _error_object(text: str) -> Any:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(body, dict):
        return body.get("error", body)
    return body


def _is_api_error(error: Any) -> bool:
    """An error that the OpenAI API's handlers wrote, not a router that knows no such path."""
    return isinstance(error, dict) and isinstance(error.get("message"), str)


def _server_message(error: Any, text: str) -> str:
    if isinstance(error, dict):
        for key in ("message", "detail"):
            value = error.get(key)
            if isinstance(value, str):
                return value
            if isinstance(value, list):  # FastAPI's validation errors; their `input` echoes the request
                return "; ".join(str(item.get("msg", "")) for item in value if isinstance(item, dict))
        return ""
    if isinstance(error, str):
        return error
    return "" if text.lstrip().startswith("<") else text


def _is_unknown_model(status: int, error: Any, message: str) -> bool:
    if not isinstance(error, dict) or status not in (400, 404):
        return False
    if error.get("code") == "model_not_found":
        return True
    lowered = message.lower()
    return (
        status == 404
        and "model" in lowered
        and any(words in lowered for words in ("does not exist", "not found", "not exist", "could not find"))
    )
