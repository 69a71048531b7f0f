from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.ray_data.batch_files import endpoint_of, read_line, result_lines
from airflow_provider_raylm.ray_data.requests import Query
from airflow_provider_raylm.ray_data.rows import error_reply, reply_column

LINE = {
    "custom_id": "r-1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "你好"}], "max_tokens": 5},
}


def test_a_line_of_a_batch_file_becomes_the_request_it_holds() -> None:
    """Read and asked: only the model is another."""
    row = read_line(json.dumps(LINE))
    assert (row["custom_id"], endpoint_of(str(row["url"]))) == ("r-1", "chat")
    query = Query(model="qwen", base_url="http://h/v1", body_col="body")
    assert query.body(row) == {**LINE["body"], "model": "qwen"}  # type: ignore[dict-item]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"custom_id": 1, "body": {}}', '{"custom_id": "a"}'])
def test_a_line_that_is_none_is_refused(text: str) -> None:
    """Before anything is sent."""
    with pytest.raises(SpecError, match="batch file"):
        read_line(text)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [("/v1/chat/completions", "chat"), ("/v1/completions", "completions"), ("/v1/embeddings", "embeddings")],
)
def test_the_url_says_which_endpoint(url: str, endpoint: str) -> None:
    """Those that are served here."""
    assert endpoint_of(url) == endpoint


def test_another_url_is_refused() -> None:
    """It names what is possible."""
    with pytest.raises(SpecError, match="/embeddings"):
        endpoint_of("/v1/responses")


def test_results_read_like_those_of_the_hosted_api() -> None:
    """An answer, a refusal and a request that got no answer, each as the API writes it."""
    query = Query(model="qwen", base_url="http://h/v1", body_col="body")
    good: dict[str, Any] = {
        "content": "hi",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "tool_calls": [{"id": "c", "name": "f", "arguments": "{}"}],
        "logprobs": '{"content": []}',
        "status": "ok",
        "error": None,
    }
    replies = [
        good,
        error_reply("bad_request", "too long", http_status=400, attempts=1),
        error_reply("timeout", "no reply", attempts=2),
    ]
    table = pa.table({"custom_id": ["a", "b", "c"], "out": reply_column(replies, query)})
    lines = [json.loads(line) for line in result_lines(table, output_col="out", model="qwen")]
    assert [line["custom_id"] for line in lines] == ["a", "b", "c"]
    body = lines[0]["response"]["body"]
    assert lines[0]["response"]["status_code"] == 200
    assert body["choices"] == [
        {
            "index": 0,
            "finish_reason": "stop",
            "logprobs": {"content": []},
            "message": {
                "role": "assistant",
                "content": "hi",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
        }
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    assert lines[1]["response"] == {
        "status_code": 400,
        "request_id": "batch_req_b",
        "body": {"error": {"code": "bad_request", "message": "too long"}},
    }
    assert (lines[2]["response"], lines[2]["error"]) == (None, {"code": "timeout", "message": "no reply"})
