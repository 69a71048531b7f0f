from __future__ import annotations

import datetime
import json
import pickle
from typing import Any

import pyarrow as pa
import pydantic
import pytest

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.ray_data.schema import (
    ReplyFormat,
    ReplyMismatch,
    parse_ddl,
    replace_surrogates,
    schema_of_type,
    type_of_schema,
)


@pytest.mark.parametrize(
    ("ddl", "kind"),
    [
        ("label STRING, score DOUBLE", pa.struct([("label", pa.string()), ("score", pa.float64())])),
        ("a int not null, `b c` BIGINT", pa.struct([("a", pa.int32()), ("b c", pa.int64())])),
        ("STRUCT<a: BOOLEAN>", pa.struct([("a", pa.bool_())])),
        ("tags ARRAY<STRING>", pa.struct([("tags", pa.list_(pa.string()))])),
        ("m MAP<STRING, FLOAT>", pa.struct([("m", pa.map_(pa.string(), pa.float32()))])),
        (
            "s STRUCT<x: INT, y: ARRAY<STRUCT<z: DATE>>>, 标签 string",
            pa.struct(
                [
                    ("s", pa.struct([("x", pa.int32()), ("y", pa.list_(pa.struct([("z", pa.date32())])))])),
                    ("标签", pa.string()),
                ]
            ),
        ),
    ],
)
def test_ddl_gives_the_type_it_names_and_a_schema_that_leads_back(ddl: str, kind: pa.DataType) -> None:
    """DDL to Arrow, and through the JSON schema that is sent back to the same Arrow type."""
    assert parse_ddl(ddl) == kind
    assert type_of_schema(schema_of_type(kind)) == kind


@pytest.mark.parametrize(
    "ddl",
    ["", "a", "a INT,", "a INT b INT", "a WORD", "a ARRAY<INT", "a MAP<INT, INT>", "a INT, a INT", "a INT;", "<"],
)
def test_ddl_that_cannot_be_read_is_refused(ddl: str) -> None:
    """Each message names the argument and what was found."""
    with pytest.raises(SpecError, match="response_format"):
        parse_ddl(ddl)


class Review(pydantic.BaseModel):
    """A pydantic model with what people use."""

    class Author(pydantic.BaseModel):
        name: str
        age: int | None = None

    label: str
    score: float
    authors: list[Author]
    when: datetime.date | None = None


def test_a_pydantic_model_becomes_a_struct() -> None:
    """References are followed, optional fields keep their type."""
    assert ReplyFormat.of(Review).type == pa.struct(
        [
            ("label", pa.string()),
            ("score", pa.float64()),
            ("authors", pa.list_(pa.struct([("name", pa.string()), ("age", pa.int64())]))),
            ("when", pa.date32()),
        ]
    )


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": ["string", "null"]}, pa.string()),
        ({"enum": ["a", "b"]}, pa.string()),
        ({"type": ["integer", "number"]}, pa.float64()),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, pa.string()),
        ({"type": "object"}, pa.string()),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, pa.map_(pa.string(), pa.int64())),
        (
            {"type": "object", "properties": {"child": {"$ref": "#"}}},
            pa.struct([("child", pa.struct([("child", pa.string())]))]),
        ),
        ({}, pa.string()),
    ],
)
def test_what_arrow_cannot_say_is_kept_as_json_text(schema: dict[str, Any], kind: pa.DataType) -> None:
    """Unions, free objects and recursion have a stable type too."""
    assert type_of_schema(schema) == kind


def test_a_reply_is_parsed_to_python_values_of_the_type() -> None:
    """Also inside one code fence; dates become dates."""
    form = ReplyFormat.of(Review)
    reply = {"label": "good", "score": 1, "authors": [{"name": "A"}], "when": "2026-12-01", "more": 1}
    expected = {
        "label": "good",
        "score": 1.0,
        "authors": [{"name": "A", "age": None}],
        "when": datetime.date(2026, 12, 1),
    }
    assert form.parse(json.dumps(reply)) == expected
    assert form.parse(f"```json\n{json.dumps(reply)}\n```") == expected
    pa.array([expected], form.type)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "the reply has no text"),
        ("", "the reply is not JSON: Expecting value"),
        ("secret words", "the reply is not JSON: Expecting value"),
        ('{"label": "secret", "score": 0', "the reply is not JSON: Expecting ',' delimiter"),
        ('{"label": "secret"}', "at $: breaks 'required' of the schema"),
        ('{"label": "secret", "score": "high"}', "at $.score: breaks 'type' of the schema"),
        ('["secret"]', "at $: breaks 'type' of the schema"),
        ('{"label": "a", "score": 1, "secret": 2}', "at $: breaks 'additionalProperties' of the schema"),
    ],
)
def test_a_reply_of_another_form_is_named_by_its_place(text: str | None, says: str) -> None:
    """The message does not repeat the reply."""
    with pytest.raises(ReplyMismatch) as caught:
        ReplyFormat.of("label STRING, score DOUBLE").parse(text)
    assert str(caught.value) == says


def test_a_number_too_large_for_its_type_does_not_fit() -> None:
    """JSON integers have no bound, Arrow's do."""
    with pytest.raises(ReplyMismatch, match="does not fit"):
        ReplyFormat.of("a TINYINT").parse('{"a": 1000}')


@pytest.mark.parametrize(
    "form", [3, {"type": "array"}, {"type": "nonsense"}, {"type": "object", "properties": 5}, list, "a UNKNOWN"]
)
def test_a_form_that_is_none_is_refused(form: Any) -> None:
    """Before anything is sent."""
    with pytest.raises(SpecError, match="response_format"):
        ReplyFormat.of(form)


def test_the_apis_own_object_is_accepted() -> None:
    """`response_format` as written for the API itself, and plain JSON mode."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    form = ReplyFormat.of(given)
    assert form.request["json_schema"]["name"] == "n"
    assert form.type == pa.struct([("a", pa.int64())])
    free = ReplyFormat.of({"type": "json_object"})
    assert free.request == {"type": "json_object"}
    assert free.type == pa.string()
    assert free.parse('{"b": [1]}') == '{"b": [1]}'


def test_a_form_travels_to_the_actors() -> None:
    """Pickling keeps it working, also after it was used."""
    form = ReplyFormat.of(Review)
    form.parse('{"label": "a", "score": 1, "authors": []}')
    assert pickle.loads(pickle.dumps(form)).type == form.type


def test_half_surrogates_become_replacement_characters() -> None:
    """JSON can carry them, Arrow text cannot; whole pairs are the character they mean."""
    assert replace_surrogates("a\ud83d") == "a\ufffd"
    assert replace_surrogates("\ud83d\ude00") == "😀"
    assert replace_surrogates("plain") == "plain"
