from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_provider_raylm.ray_data.errors import MAX_MESSAGE, OUTCOME, clean_message, fault_of_reply, retry_after_s


def api_error(message: str = "no", code: Any = None, kind: str = "SomeError") -> str:
    return json.dumps({"error": {"message": message, "type": kind, "code": code}})


@pytest.mark.parametrize(
    ("status", "text", "kind", "gone"),
    [
        (400, api_error("context length exceeded"), "bad_request", False),
        (404, api_error("image not available"), "bad_request", False),
        (413, api_error(), "bad_request", False),
        (422, api_error(), "bad_request", False),
        (401, api_error(), "fatal", False),
        (403, api_error(), "fatal", False),
        (404, api_error("The model `q` does not exist."), "fatal", True),
        (404, api_error("x", code="model_not_found"), "fatal", True),
        (400, api_error("x", code="model_not_found"), "fatal", True),
        (404, '{"detail":"Not Found"}', "fatal", True),
        (404, "Path '/x' not found. Ping http://h/-/routes for available routes.", "fatal", True),
        (405, '{"detail":"Method Not Allowed"}', "fatal", True),
        (307, "", "fatal", False),
        (408, api_error(), "server_error", False),
        (409, api_error(), "server_error", False),
        (500, api_error(), "server_error", False),
        (529, "", "server_error", False),
        (429, api_error(), "refused", False),
        (503, "<html>busy</html>", "refused", False),
        (502, "<html>bad gateway</html>", "unreachable", False),
        (504, "", "unreachable", False),
    ],
)
def test_each_status_has_one_meaning(status: int, text: str, kind: str, gone: bool) -> None:
    """Terminal for the row, terminal for the job, waited out, or retried: decided by status and body alone."""
    fault = fault_of_reply(status, {}, text, model="q", now_s=0)
    assert (fault.kind, fault.http_status, fault.gone) == (kind, status, gone)
    assert fault.message
    assert fault.kind in OUTCOME


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "300"}, 300.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "Thu, 01 Jan 1970 00:10:00 GMT"}, 500.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
    ],
)
def test_retry_after_is_read_in_all_its_forms(headers: dict[str, str], seconds: float | None) -> None:
    """Seconds, milliseconds or a date; longer than two minutes too."""
    assert retry_after_s(headers, now_s=100.0) == seconds


@pytest.mark.parametrize(
    "text",
    [
        api_error("invalid prompt 'my secret prompt that goes on and on and on for long'"),
        json.dumps({"detail": [{"msg": "Input should be a string", "input": "my secret prompt that goes on"}]}),
        api_error("key sk-planted0123456789 is wrong"),
        api_error("header Bearer planted.0123456789abc"),
        api_error("Input: my secret prompt that goes on"),
    ],
)
def test_messages_repeat_neither_prompts_nor_keys(text: str) -> None:
    """What a server echoes is taken out."""
    fault = fault_of_reply(400, {}, text, model="q", now_s=0)
    message = clean_message(fault.message, ("my secret prompt that goes on",))
    assert "secret" not in message
    assert "planted" not in message
    assert message


def test_long_messages_are_cut() -> None:
    """A page of text becomes one bounded line."""
    message = clean_message("word \n" * 10_000)
    assert len(message) == MAX_MESSAGE
    assert "\n" not in message


def test_the_words_of_an_ordinary_message_are_kept() -> None:
    """What a person needs to act on is not lost."""
    words = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."
    assert clean_message(words) == words
