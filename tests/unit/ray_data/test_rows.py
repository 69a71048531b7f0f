from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from airflow_provider_raylm.exceptions import PartialFailureError
from airflow_provider_raylm.ray_data.contracts import BLOCK_COL, ROW_COL
from airflow_provider_raylm.ray_data.policy import ErrorWatch, check_totals
from airflow_provider_raylm.ray_data.requests import Query
from airflow_provider_raylm.ray_data.rows import error_reply, output_schema, reply_column, reply_type, row_keys

GOOD = {"content": "fine", "finish_reason": "stop", "attempts": 1, "latency_s": 0.5, "status": "ok", "error": None}
BAD = error_reply("bad_request", "no", http_status=400, attempts=1)


def query(**kwargs: Any) -> Query:
    return Query(model="m", base_url="http://h/v1", prompt_col="text", **kwargs)


@pytest.mark.parametrize("replies", [[], [GOOD], [BAD], [GOOD, BAD], [BAD, BAD]])
@pytest.mark.parametrize("on_error", ["keep", "null"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"response_format": "a INT, b ARRAY<STRING>"}, {"endpoint": "embeddings"}, {"options": {"logprobs": True}}],
)
def test_every_block_has_the_same_type_whatever_happened(
    replies: list[dict[str, Any]], on_error: Any, arguments: dict[str, Any]
) -> None:
    """All good, all bad, mixed and empty: one Arrow type, known before the first row."""
    asked = query(on_error=on_error, **arguments)
    column = reply_column(replies, asked)
    assert column.type == reply_type(asked)
    assert len(column) == len(replies)
    schema = output_schema(pa.schema([("text", pa.string())]), asked)
    assert schema.field("generated_text").type == column.type
    assert schema.names == ["text", "generated_text"]


def test_keep_and_null_differ_in_failed_rows_only() -> None:
    """`null` makes the whole struct null."""
    kept = reply_column([GOOD, BAD], query(on_error="keep")).to_pylist()
    nulled = reply_column([GOOD, BAD], query(on_error="null")).to_pylist()
    assert kept[0] == nulled[0]
    assert kept[1]["error"] == {"type": "bad_request", "message": "no", "http_status": 400}
    assert nulled[1] is None


def test_rows_are_known_by_block_and_position() -> None:
    """Without both columns rows have no identity."""
    table = pa.table({BLOCK_COL: [1, 1, 2], ROW_COL: [0, 1, 0]})
    assert row_keys(table) == [(1, 0), (1, 1), (2, 0)]
    assert row_keys(table.drop_columns([ROW_COL])) is None


@pytest.mark.parametrize(
    ("rows", "errors", "policy", "says"),
    [
        (10, 0, {"max_errors": 0}, None),
        (0, 0, {}, None),
        (10, 9, {}, None),
        (10, 10, {}, "10 of 10 rows failed .*: every one"),
        (1, 1, {}, "1 of 1 rows failed"),
        (10, 10, {"max_error_rate": 1.0}, None),
        (10, 10, {"max_errors": 10}, None),
        (10, 1, {"on_error": "raise"}, "on_error is 'raise'"),
        (10, 3, {"max_errors": 2}, "3 of 10 rows failed \\(3 bad_request\\), max_errors is 2"),
        (10, 2, {"max_errors": 2}, None),
        (10, 2, {"max_error_rate": 0.2}, None),
        (10, 3, {"max_error_rate": 0.2}, "max_error_rate is 0.2"),
        (10, 1, {"max_error_rate": 0.0}, "max_error_rate is 0"),
    ],
)
def test_a_finished_job_is_judged_by_its_counts(
    rows: int, errors: int, policy: dict[str, Any], says: str | None
) -> None:
    """Nothing green that failed, nothing red that the user allows."""
    arguments: dict[str, Any] = {"on_error": "keep", "max_error_rate": None, "max_errors": None, **policy}
    arguments["errors_by_type"] = {"bad_request": errors}
    if says is None:
        check_totals(rows=rows, errors=errors, **arguments)
        return
    with pytest.raises(PartialFailureError, match=says) as caught:
        check_totals(rows=rows, errors=errors, **arguments)
    assert (caught.value.rows, caught.value.errors) == (rows, errors)


def test_rows_that_were_not_sent_do_not_end_a_job_early() -> None:
    """A thousand empty prompts at the head of a file say nothing about the endpoint."""
    watch = ErrorWatch("keep", None, None)
    for _ in range(1000):
        watch.observe("invalid_input", sent=False)
    for _ in range(31):
        watch.observe("bad_request")
    with pytest.raises(PartialFailureError, match="the first 32 rows all failed"):
        watch.observe("bad_request", "no")


def test_one_good_row_among_the_first_is_enough_to_go_on() -> None:
    """The check is for jobs in which nothing works."""
    watch = ErrorWatch("keep", None, None)
    watch.observe(None)
    for _ in range(1000):
        watch.observe("bad_request")
