"""The JSON Lines format of hosted batch APIs, so that a file made for one runs here unchanged.

A line of the input is one whole request; `Query.body_col` asks it. A line of the output carries its `custom_id` and the
response as the API would have sent it (https://platform.openai.com/docs/guides/batch).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.ray_data.requests import PATHS
from airflow_provider_raylm.spec import Endpoint

INPUT_SCHEMA = pa.schema([(name, pa.string()) for name in ("custom_id", "method", "url", "body")])
"""Columns of a batch file that was read; `body` is JSON text."""


def read_line(text: str | bytes) -> dict[str, str | None]:
    """One line of a batch file as a row of `INPUT_SCHEMA`.

    Raises:
        SpecError: It is no JSON object with a `custom_id` and a `body`.
    """
    try:
        line = json.loads(text)
    except ValueError as exc:
        raise SpecError(f"a line of the batch file is not JSON: {exc}") from exc
    if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str) or "body" not in line:
        raise SpecError("a line of the batch file has no custom_id or no body")
    return {
        "custom_id": line["custom_id"],
        "method": line.get("method"),
        "url": line.get("url"),
        "body": json.dumps(line["body"], ensure_ascii=False),
    }


def endpoint_of(url: str) -> Endpoint:
    """The endpoint that a line's `url` means, such as `/v1/chat/completions`.

    Raises:
        SpecError: It is none that is served here.
    """
    for endpoint, path in PATHS.items():
        if url.rstrip("/").endswith(path):
            if endpoint == "completions" and url.rstrip("/").endswith(PATHS["chat"]):
                continue
            return endpoint
    raise SpecError(f"url {url!r} of the batch file: expected one that ends in {', '.join(sorted(PATHS.values()))}")


def result_lines(table: pa.Table, *, output_col: str, model: str, endpoint: Endpoint = "chat") -> Iterator[str]:
    """Results in the batch format, one JSON line per row, in the order of the rows.

    Args:
        table: Rows with `custom_id` and the output column.
        output_col: Its name.
        model: Model id that answered.
        endpoint: What was asked.
    """
    ids = table.column("custom_id").to_pylist()
    for custom_id, reply in zip(ids, table.column(output_col).to_pylist(), strict=True):
        yield json.dumps(_result(custom_id, reply or {}, model, endpoint), ensure_ascii=False)


def _result(custom_id: str | None, reply: Mapping[str, Any], model: str, endpoint: Endpoint) -> dict[str, Any]:
    line: dict[str, Any] = {"id": f"batch_req_{custom_id}", "custom_id": custom_id, "response": None, "error": None}
    error = reply.get("error")
    status = error["http_status"] if error else 200
    if error is not None or not reply:
        error = error or {"type": "unknown", "message": "the row has no reply", "http_status": None}
        if status is None:
            line["error"] = {"code": error["type"], "message": error["message"]}
            return line
        if status >= 400:
            body: dict[str, Any] = {"error": {"code": error["type"], "message": error["message"]}}
            line["response"] = {"status_code": status, "request_id": line["id"], "body": body}
            return line
        line["error"] = {"code": error["type"], "message": error["message"]}
    line["response"] = {"status_code": 200, "request_id": line["id"], "body": _body(reply, model, endpoint)}
    return line


def _body(reply: Mapping[str, Any], model: str, endpoint: Endpoint) -> dict[str, Any]:
    prompt_tokens, completion_tokens = reply.get("prompt_tokens") or 0, reply.get("completion_tokens") or 0
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if endpoint == "embeddings":
        data = [{"object": "embedding", "index": 0, "embedding": reply.get("embedding")}]
        return {"object": "list", "model": model, "data": data, "usage": usage}
    logprobs = json.loads(reply["logprobs"]) if reply.get("logprobs") else None
    choice: dict[str, Any] = {"index": 0, "finish_reason": reply.get("finish_reason"), "logprobs": logprobs}
    if endpoint == "completions":
        choice["text"] = reply.get("content")
        return {"object": "text_completion", "model": model, "choices": [choice], "usage": usage}
    message: dict[str, Any] = {"role": "assistant", "content": reply.get("content")}
    if reply.get("reasoning_content"):
        message["reasoning_content"] = reply["reasoning_content"]
    if reply.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in reply["tool_calls"]
        ]
    choice["message"] = message
    return {"object": "chat.completion", "model": model, "choices": [choice], "usage": usage}
