"""`ds.ai.ai_query` on real Ray Data with several actors, against an endpoint that behaves per row as told."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_provider_raylm.exceptions import PartialFailureError, SpecError, TerminalEndpointError
from demo.ray_head import ray_head
from tests.support.fixed_limiter import FixedLimiter
from tests.support.mock_endpoint import Answer, Ask, MockEndpoint, refusal

pytestmark = pytest.mark.integration

ray = pytest.importorskip("ray")
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_head(num_cpus=4, auth=False) as node:
        before = {name: os.environ.get(name) for name in node.env}
        os.environ.update(node.env)
        ray.init(address=node.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": ROOT}})
        import airflow_provider_raylm.ray_data  # noqa: F401

        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
        ray.shutdown()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@pytest.fixture
def endpoint() -> Iterator[MockEndpoint]:
    with MockEndpoint() as server:
        yield server


def ask(ds: Any, endpoint: MockEndpoint, *, limit: int = 64, **kwargs: Any) -> Any:
    source = {} if {"prompt_template", "messages_col"} & set(kwargs) else {"prompt_col": "text"}
    return ds.ai.ai_query(
        "m", base_url=endpoint.base_url, limiter_factory=functools.partial(FixedLimiter, limit), **source, **kwargs
    )


def rows_of(ds: Any) -> list[dict[str, Any]]:
    return sorted(ds.take_all(), key=lambda row: row["id"])


def texts(count: int, blocks: int) -> Any:
    return ray.data.range(count, override_num_blocks=blocks).map_batches(
        lambda t: {"id": t["id"], "text": [f"row {i}" for i in t["id"]]}
    )


def test_one_row_out_per_row_in_with_the_jobs_own_limit(cluster: None, endpoint: MockEndpoint) -> None:
    """The seed's call, argument for argument: every row answered once, by two actors under one adaptive limit."""
    out = texts(600, 8).ai.ai_query(
        "Qwen3.5-4B",
        prompt_col="text",
        base_url=endpoint.base_url,
        api_key="dummy",
        output_col="generated_text",
        options={
            "temperature": 0.7,
            "max_tokens": 256,
            "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
        },
        concurrency=2,
        batch_size=8,
    )
    rows = rows_of(out)
    assert [row["id"] for row in rows] == list(range(600))
    assert all(row["generated_text"]["content"] == f"re: row {row['id']}" for row in rows)
    assert len(endpoint.asks) == 600
    body = endpoint.asks[0].body
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("Qwen3.5-4B", 0.7, 256)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("blocks", [1, 50])
def test_block_sizes_do_not_limit_what_is_in_flight(cluster: None, endpoint: MockEndpoint, blocks: int) -> None:
    """One huge block or many tiny ones: one actor reaches the limiter's 300."""
    endpoint.script = lambda ask: Answer(delay_s=1.0 if ask.in_flight < 300 else 0.2)
    rows = rows_of(ask(texts(1000, blocks), endpoint, limit=300, concurrency=1))
    assert [row["id"] for row in rows] == list(range(1000))
    assert endpoint.most_in_flight == 300


def test_bad_rows_are_rows_and_every_block_has_one_schema(cluster: None, endpoint: MockEndpoint) -> None:
    """Nulls, refusals and good rows in several blocks, one of them all failed: one Arrow schema, all columns."""

    def script(ask: Ask) -> Answer:
        return refusal(400, "no") if int(ask.text.split()[1]) < 40 else Answer(content="fine")

    endpoint.script = script
    table = pa.table(
        {
            "id": range(200),
            "text": [None if i % 10 == 9 else f"row {i}" for i in range(200)],
            "nested": [{"a": [i], "b": {"c": str(i)}} for i in range(200)],
        }
    )
    ds = ray.data.from_arrow([table.slice(start, 40) for start in range(0, 200, 40)])
    out = ask(ds, endpoint, max_error_rate=1.0).materialize()
    schemas = {ray.get(ref).schema.remove_metadata() for ref in out.to_arrow_refs()}
    assert len(schemas) == 1
    rows = rows_of(out)
    assert [row["nested"]["b"]["c"] for row in rows] == [str(i) for i in range(200)]
    kinds = [(row["generated_text"]["error"] or {}).get("type") for row in rows]
    assert kinds == ["invalid_input" if i % 10 == 9 else ("bad_request" if i < 40 else None) for i in range(200)]


def test_values_that_are_no_text_and_one_single_row(cluster: None, endpoint: MockEndpoint) -> None:
    """A column of lists, of numbers, of lone surrogates: each row has its answer or its error."""
    lists = ask(ray.data.from_items([{"id": 0, "text": ["a"]}]), endpoint, max_error_rate=1.0)
    assert rows_of(lists)[0]["generated_text"]["error"]["type"] == "invalid_input"
    numbers = ask(ray.data.from_items([{"id": 0, "text": 7}]), endpoint)
    assert rows_of(numbers)[0]["generated_text"]["content"] == "re: 7"
    messages = [{"role": "user", "content": "hi"}]
    chat = ask(ray.data.from_items([{"id": 0, "messages": messages}]), endpoint, messages_col="messages")
    assert rows_of(chat)[0]["generated_text"]["content"] == "re: hi"


def test_no_rows_is_no_request(cluster: None, endpoint: MockEndpoint) -> None:
    """An empty dataset gives an empty result."""
    assert ask(ray.data.from_arrow(pa.table({"text": pa.array([], pa.string())})), endpoint).take_all() == []
    assert endpoint.asks == []


def test_structured_replies_are_typed_columns(cluster: None, endpoint: MockEndpoint) -> None:
    """`parsed` has the type asked for, also in rows that do not fit."""
    endpoint.script = lambda ask: Answer(content='{"n": 1}' if ask.text != "row 3" else "nonsense")
    out = ask(texts(6, 2), endpoint, response_format="n BIGINT").materialize()
    kind = dict(zip(out.schema().names, out.schema().types, strict=True))["generated_text"]
    assert kind.field("parsed").type == pa.struct([("n", pa.int64())])
    rows = rows_of(out)
    assert [(row["generated_text"]["parsed"] or {}).get("n") for row in rows] == [1, 1, 1, None, 1, 1]
    assert rows[3]["generated_text"]["content"] == "nonsense"
    assert rows[3]["generated_text"]["error"]["type"] == "schema_mismatch"


def test_rows_with_a_common_beginning_go_together_and_come_back_in_order(cluster: None, endpoint: MockEndpoint) -> None:
    """Sent sorted, returned as they stood."""
    items = [{"id": i, "text": f"{'ab'[i % 2]} {i:03d}"} for i in range(100)]
    out = ask(ray.data.from_items(items, override_num_blocks=1), endpoint, limit=1, group_by_prefix=True)
    assert [row["id"] for row in out.take_all()] == list(range(100))
    assert [ask.text[0] for ask in endpoint.asks] == ["a"] * 50 + ["b"] * 50


@pytest.mark.parametrize(
    ("answer", "arguments", "error"),
    [
        (refusal(401, "bad key"), {}, TerminalEndpointError),
        (refusal(400, "no"), {"on_error": "raise"}, PartialFailureError),
        (refusal(400, "no"), {"max_errors": 3}, PartialFailureError),
    ],
)
def test_what_must_end_the_job_ends_it_with_our_error(
    cluster: None, endpoint: MockEndpoint, answer: Answer, arguments: dict[str, Any], error: type[Exception]
) -> None:
    """The error inside Ray's is found, with its sentence."""
    from airflow_provider_raylm.ray_data.query import root_error

    endpoint.script = lambda ask: answer
    with pytest.raises(Exception) as caught:  # noqa: PT011
        ask(texts(200, 2), endpoint, **arguments).take_all()
    assert isinstance(root_error(caught.value), error)


def test_a_wrong_column_is_refused_before_anything_is_sent(cluster: None, endpoint: MockEndpoint) -> None:
    """It names the columns there are."""
    ds = ray.data.from_arrow(pa.table({"id": [1], "body": ["x"]}))
    with pytest.raises(SpecError, match=r"no column 'text'; its columns are \['body', 'id'\]"):
        ask(ds, endpoint)
    assert endpoint.asks == []
