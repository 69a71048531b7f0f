"""Replies as plain dicts, one per row whatever happened, and as the Arrow column they become."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from airflow_provider_raylm.ray_data.contracts import BLOCK_COL, ROW_COL
from airflow_provider_raylm.ray_data.errors import Fault
from airflow_provider_raylm.ray_data.requests import Query
from airflow_provider_raylm.ray_data.schema import ReplyMismatch, output_type, replace_surrogates
from airflow_provider_raylm.spec import Endpoint

Reply = dict[str, Any]


def reply_type(query: Query) -> pa.DataType:
    """Type of the output column of a query."""
    return output_type(
        embeddings=query.endpoint == "embeddings",
        logprobs=query.body_col is not None or bool(query.parameters.get("logprobs")),
        reply_format=query.reply_format,
    )


def output_schema(input_schema: pa.Schema, query: Query) -> pa.Schema:
    """Schema after the query, for an input that has no rows: Ray calls no function for an empty block."""
    return input_schema.append(pa.field(query.output_col, reply_type(query)))


def error_reply(
    error_type: str,
    message: str,
    *,
    http_status: int | None = None,
    attempts: int = 0,
    latency_s: float | None = None,
    answer: Reply | None = None,
) -> Reply:
    """The output struct of a row that failed.

    Args:
        answer: What the server did say, kept beside the error.
    """
    return {
        **(answer or {}),
        "attempts": attempts,
        "latency_s": latency_s if answer is None else answer.get("latency_s"),
        "status": "error",
        "error": {"type": error_type, "message": replace_surrogates(message), "http_status": http_status},
    }


def reply_of_body(body: Any, endpoint: Endpoint, *, thinking_off: bool = False) -> Reply:
    """The output struct's answer fields from the JSON of a 2xx response.

    Args:
        thinking_off: The request turned thinking off, so whatever text there is, is the answer.

    Raises:
        Fault: `invalid_reply`: there is no usable choice in it.
    """
    if not isinstance(body, Mapping):
        raise Fault("invalid_reply", "the reply is no JSON object", http_status=200)
    usage = body.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    reply: Reply = {
        "prompt_tokens": _count(usage.get("prompt_tokens")),
        "completion_tokens": _count(usage.get("completion_tokens")),
    }
    if endpoint == "embeddings":
        item = _first(body.get("data"), "data")
        vector = item.get("embedding")
        if not isinstance(vector, list) or not vector or not all(isinstance(x, (int, float)) for x in vector):
            raise Fault("invalid_reply", "the reply holds no embedding", http_status=200)
        return {**reply, "embedding": [float(x) for x in vector], "completion_tokens": reply["completion_tokens"] or 0}
    choice = _first(body.get("choices"), "choices")
    reply["finish_reason"] = _text(choice.get("finish_reason"))
    if choice.get("logprobs") is not None:
        reply["logprobs"] = _json(choice["logprobs"])
    if endpoint == "completions":
        if not isinstance(choice.get("text"), str):
            raise Fault("invalid_reply", "the reply's choice has no text", http_status=200)
        return {**reply, "content": replace_surrogates(choice["text"])}
    message = choice.get("message")
    if not isinstance(message, Mapping):
        raise Fault("invalid_reply", "the reply's choice has no message", http_status=200)
    return {**reply, **_answer(message, thinking_off=thinking_off, finish_reason=reply["finish_reason"])}


def _answer(message: Mapping[str, Any], *, thinking_off: bool, finish_reason: str | None) -> Reply:
    content = _content_text(message.get("content"))
    reasoning = _text(message.get("reasoning_content")) or _text(message.get("reasoning"))
    refusal = _text(message.get("refusal"))
    tool_calls = _tool_calls(message.get("tool_calls"))
    if not content and reasoning and thinking_off and not tool_calls:
        # a server-side reasoning parser takes an answer without a closing tag for reasoning
        content, reasoning = reasoning, None
    if not content and (reasoning or tool_calls):
        content = None  # a stream opens with an empty text, where the whole reply has none
    if content is None and refusal is not None:
        content = refusal
    if content is None and tool_calls is None and reasoning is None and finish_reason is None:
        raise Fault("invalid_reply", "the reply's message is empty", http_status=200)
    return {"content": content, "reasoning_content": reasoning, "tool_calls": tool_calls}


def _first(items: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(items, Sequence) or not items or not isinstance(items[0], Mapping):
        raise Fault("invalid_reply", f"the reply has no {name}", http_status=200)
    return items[0]


def _content_text(content: Any) -> str | None:
    if isinstance(content, list):  # some servers answer in parts
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return _text(content)


def _text(value: Any) -> str | None:
    return replace_surrogates(value) if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    """A count that fits its column; whatever else a server says is not known."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < 2**63 else None


def _json(value: Any) -> str:
    return replace_surrogates(json.dumps(value, ensure_ascii=False))


def _tool_calls(calls: Any) -> list[dict[str, Any]] | None:
    if not isinstance(calls, list) or not calls:
        return None
    kept = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            arguments = function.get("arguments")
            kept.append(
                {
                    "id": _text(call.get("id")),
                    "name": _text(function.get("name")),
                    "arguments": replace_surrogates(arguments) if isinstance(arguments, str) else _json(arguments),
                }
            )
    return kept or None


def with_parsed(reply: Reply, query: Query) -> Reply:
    """`reply` with its text parsed to the form asked for, or as an error that keeps the text."""
    if query.reply_format is None or reply.get("status") != "ok" or reply.get("tool_calls"):
        return reply
    try:
        return {**reply, "parsed": query.reply_format.parse(reply.get("content"))}
    except ReplyMismatch as exc:
        cut = " (the reply was cut off at max_tokens)" if reply.get("finish_reason") == "length" else ""
        return error_reply("schema_mismatch", f"{exc}{cut}", attempts=reply["attempts"], http_status=200, answer=reply)


def reply_column(replies: Iterable[Reply], query: Query) -> pa.Array:
    """The output column."""
    kind = reply_type(query)
    if query.on_error == "null":
        replies = (reply if reply["status"] == "ok" else None for reply in replies)  # type: ignore[misc]
    return pa.array(list(replies), type=kind)


def row_keys(table: pa.Table) -> list[tuple[int, int]] | None:
    """`(block, row)` of each row; `None` when the source gave the rows no identity."""
    if BLOCK_COL not in table.column_names or ROW_COL not in table.column_names:
        return None
    return list(zip(table.column(BLOCK_COL).to_pylist(), table.column(ROW_COL).to_pylist(), strict=True))
