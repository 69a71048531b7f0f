"""What the events of a stream say; the client itself is tested with the engine, against a server."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_raylm.ray_data.client import has_token


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"role": "assistant", "content": None}}, False),
        ({"delta": {"content": "a"}}, True),
        ({"delta": {"content": "", "reasoning_content": "hm"}}, True),
        ({"delta": {"reasoning": "hm"}}, True),
        ({"delta": {"tool_calls": [{"index": 0}]}}, True),
        ({"delta": {}, "finish_reason": "stop"}, True),
        ({"text": ""}, False),
        ({"text": "a"}, True),
    ],
)
def test_a_stream_has_begun_with_its_first_token(choice: dict[str, Any], expected: bool) -> None:
    """An event that only opens the stream is not the first token: a queue would stay unseen."""
    assert has_token({"choices": [choice]}) is expected
    assert has_token({"choices": [], "usage": {"prompt_tokens": 1}}) is False
