from __future__ import annotations

import dataclasses
import datetime
import json
import math
import pickle
from typing import Any

import pytest

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.ray_data.requests import InvalidInput, Query, Secret, is_thinking_off, most_tokens

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 8


def query(**kwargs: Any) -> Query:
    source = {"prompt_col", "prompt_template", "messages_col", "body_col"} & set(kwargs)
    return Query(**{"model": "m", "base_url": "http://h/v1", **({} if source else {"prompt_col": "text"}), **kwargs})


def user_text(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        ("hello", "hello"),
        ("  padded ", "  padded "),
        (7, "7"),
        (2.5, "2.5"),
        (True, "True"),
        (datetime.date(2026, 12, 1), "2026-12-01"),
        ("bytes as text é".encode(), "bytes as text é"),
        ("https://example.com/cat.png", "https://example.com/cat.png"),
        ("مرحبا بالعالم", "مرحبا بالعالم"),
        ("解释什么是分布式计算", "解释什么是分布式计算"),
        ("x" * 2**20, "x" * 2**20),
        ("{not a template}", "{not a template}"),
        ("\x00 control \u202e", "\x00 control \u202e"),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_a_prompt_is_sent_as_the_text_it_is(value: Any, sent: str) -> None:
    """Text of any script and length, numbers and dates reach the user message unchanged; a URL stays text."""
    body = query().body({"text": value})
    assert body["messages"] == [{"role": "user", "content": sent}]
    json.dumps(body, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "column 'text' is null"),
        (math.nan, "column 'text' is null"),
        ("", "column 'text' is empty"),
        (" \n\t", "column 'text' is empty"),
        ("\ud83d half", "column 'text' holds half of a surrogate pair, which is not text"),
        (b"\xff\xfe", "column 'text' holds bytes that are not UTF-8 text"),
        (["a", "b"], "column 'text': expected text, got list; a list of messages goes into messages_col"),
        ({"a": 1}, "column 'text': expected text, got dict"),
    ],
)
def test_a_prompt_that_is_no_text_is_refused_without_its_value(value: Any, says: str) -> None:
    """The message names the column and what was expected."""
    with pytest.raises(InvalidInput) as caught:
        query().body({"text": value})
    assert str(caught.value) == says


def test_template_reads_several_columns() -> None:
    """Columns are filled in once each, with format specifications, literal braces doubled."""
    asked = query(prompt_template="{title}: {body} ({price:.2f}) {{json}} {title}")
    assert asked.columns == ("title", "body", "price")
    body = asked.body({"title": "T", "body": "B", "price": 3})
    assert user_text(body) == "T: B (3.00) {json} T"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"a": None, "b": 1}, "column 'a' is null"),
        ({"a": "x", "b": "no number"}, "prompt_template does not fit the row: ValueError"),
        ({"a": [1], "b": 1}, "column 'a': expected text, got list; a list of messages goes into messages_col"),
    ],
)
def test_template_row_that_does_not_fit_is_refused(row: dict[str, Any], says: str) -> None:
    """A null or a wrong type in any column of the template is that row's error."""
    with pytest.raises(InvalidInput) as caught:
        query(prompt_template="{a} {b:d}").body(row)
    assert str(caught.value) == says


@pytest.mark.parametrize("template", ["no column", "{}", "{0}", "{0.__class__}", "{a[0]}", "{a:{b}}", "{open"])
def test_template_with_anything_but_columns_is_refused(template: str) -> None:
    """Only plain column names may stand in braces."""
    with pytest.raises(SpecError, match="prompt_template"):
        query(prompt_template=template)


MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "value",
    [
        MESSAGES,
        json.dumps(MESSAGES),
        [{**m, "name": None, "tool_calls": None} for m in MESSAGES],  # Arrow fills absent fields with null
    ],
)
def test_messages_come_as_structs_or_json(value: Any) -> None:
    """Both forms give the same messages, without the nulls of a shared Arrow type."""
    assert query(messages_col="m").body({"m": value})["messages"] == MESSAGES


@pytest.mark.parametrize(
    "value", [None, [], "text", "{}", [{"content": "no role"}], [1], 5, [{"role": "user", "content": "\ud800"}]]
)
def test_messages_that_are_none_are_refused(value: Any) -> None:
    """Anything but a list of messages is that row's error, and names the column."""
    with pytest.raises(InvalidInput, match="column 'm'"):
        query(messages_col="m").body({"m": value})


def test_system_prompt_goes_first_unless_the_row_has_its_own() -> None:
    """A row's own system message wins."""
    asked = query(messages_col="m", system_prompt="be brief")
    assert asked.body({"m": MESSAGES})["messages"] == MESSAGES
    assert asked.body({"m": MESSAGES[1:]})["messages"] == [{"role": "system", "content": "be brief"}, MESSAGES[1]]
    assert query(system_prompt="be brief").body({"text": "t"})["messages"][0]["content"] == "be brief"


@pytest.mark.parametrize(
    ("value", "url"),
    [
        ("https://h/i.png", "https://h/i.png"),
        ("data:image/png;base64,AA==", "data:image/png;base64,AA=="),
        (PNG, "data:image/png;base64,iVBORw0KGgowMDAwMDAwMA=="),
        ({"bytes": b"\xff\xd8\xff\xe0", "path": None}, "data:image/jpeg;base64,/9j/4A=="),
        (b"RIFF0000WEBP", "data:image/webp;base64,UklGRjAwMDBXRUJQ"),
    ],
)
def test_images_join_the_user_message(value: Any, url: str) -> None:
    """URLs are passed on, bytes become a data URL of their kind."""
    content = query(image_cols=("img",)).body({"text": "what?", "img": value})["messages"][0]["content"]
    assert content == [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]


@pytest.mark.parametrize("value", ["cat.png", b"no image", 3])
def test_an_image_that_is_none_is_refused(value: Any) -> None:
    """A local path, unknown bytes or a number is that row's error."""
    with pytest.raises(InvalidInput, match="image column 'img'"):
        query(image_cols=("img",)).body({"text": "what?", "img": value})


def test_a_row_without_an_image_is_plain_text() -> None:
    """A null image leaves a text message."""
    assert query(image_cols=("img",)).body({"text": "what?", "img": None})["messages"][0]["content"] == "what?"


def test_images_join_the_last_user_message_of_messages() -> None:
    """With `messages_col` the images go to the last user message."""
    messages = [*MESSAGES, {"role": "assistant", "content": "yes?"}]
    body = query(messages_col="m", image_cols=("img",)).body({"m": messages, "img": "https://h/i.png"})
    assert [part["type"] for part in body["messages"][1]["content"]] == ["text", "image_url"]


def test_other_endpoints_take_the_text_where_they_expect_it() -> None:
    """Completions take `prompt`, embeddings take `input`."""
    assert query(endpoint="completions").body({"text": "t"}) == {"model": "m", "prompt": "t"}
    assert query(endpoint="embeddings").body({"text": "t"}) == {"model": "m", "input": "t"}


def test_options_reach_the_body_as_the_sdk_would_send_them() -> None:
    """`extra_body` is merged at the top level; `enable_thinking` is put where a self-hosted server reads it."""
    options = {
        "temperature": 0.7,
        "max_tokens": 256,
        "enable_thinking": False,
        "extra_body": {"top_k": 5, "chat_template_kwargs": {"other": 1}},
        "extra_headers": {"X-A": "b"},
        "timeout": 5,
    }
    asked = query(options=options)
    body = asked.body({"text": "t"})
    assert {k: v for k, v in body.items() if k != "messages"} == {
        "model": "m",
        "temperature": 0.7,
        "max_tokens": 256,
        "top_k": 5,
        "chat_template_kwargs": {"other": 1, "enable_thinking": False},
    }
    assert asked.headers == {"X-A": "b"}
    assert is_thinking_off(body)
    assert most_tokens(body) == 256
    same = query(options={"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}})
    assert is_thinking_off(same.body({"text": "t"}))
    assert not is_thinking_off(query().body({"text": "t"}))


def test_what_no_api_knows_is_sent_when_it_cannot_be_a_slip_or_is_meant() -> None:
    """Servers have parameters of their own; only names that look like another are refused, and not in `extra_body`."""
    options = {"cache_salt": "s", "top_n": 3, "min_tokens": 1, "extra_body": {"max_token": 4}}
    body = query(options=options).body({"text": "t"})
    assert {name: body[name] for name in ("cache_salt", "top_n", "min_tokens", "max_token")} == {
        "cache_salt": "s",
        "top_n": 3,
        "min_tokens": 1,
        "max_token": 4,
    }


def test_a_whole_request_keeps_what_it_sets() -> None:
    """A batch-file row wins over options; model and streaming are decided here."""
    line = {"model": "gpt", "stream": True, "temperature": 0, "messages": MESSAGES, "user": None}
    body = query(body_col="body", options={"temperature": 1, "top_p": 0.5}).body({"body": json.dumps(line)})
    assert body == {"model": "m", "temperature": 0, "top_p": 0.5, "messages": MESSAGES}


@pytest.mark.parametrize("value", [None, "x", "[]", '{"prompt": "x"}', '{"messages": [1], "n": 2}'])
def test_a_whole_request_that_is_none_is_refused(value: Any) -> None:
    """No JSON, another endpoint's request, several choices: that row's error."""
    with pytest.raises(InvalidInput, match="column 'body'"):
        query(body_col="body").body({"body": value})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": ""}, "model"),
        ({"base_url": "h:8000/v1"}, "base_url"),
        ({"endpoint": "audio"}, "endpoint"),
        ({"on_error": "ignore"}, "on_error"),
        ({"prompt_col": "a", "messages_col": "b"}, "exactly one of"),
        ({"prompt_col": None}, "exactly one of"),
        ({"endpoint": "embeddings", "system_prompt": "x"}, "system_prompt is for endpoint='chat'"),
        ({"endpoint": "completions", "response_format": "a INT"}, "response_format is for endpoint='chat'"),
        ({"body_col": "b", "system_prompt": "x"}, "system_prompt cannot be added"),
        ({"output_col": ""}, "output_col"),
        ({"max_error_rate": 1.5}, "max_error_rate"),
        ({"max_errors": -1}, "max_errors"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"options": {"stream": True}}, "options\\['stream'\\]"),
        ({"options": {"messages": []}}, "options\\['messages'\\]"),
        ({"options": {"n": 3}}, "options\\['n'\\]"),
        ({"options": {"max_token": 4}}, "options\\['max_token'\\]: did you mean 'max_tokens'.*extra_body"),
        ({"options": {"max_new_tokens": 4}}, "did you mean 'max_tokens'"),
        ({"options": {"top_kk": 4}}, "did you mean 'top_k'"),
        ({"options": {"extra_bdy": {}}}, "did you mean 'extra_body'"),
        ({"options": {"temperature": math.nan}}, "options cannot be sent as JSON"),
        ({"options": {"stop": object()}}, "options cannot be sent as JSON"),
        ({"options": {"extra_body": [1]}}, "extra_body"),
        (
            {"options": {"enable_thinking": True, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}},
            "differs",
        ),
        ({"options": {"response_format": {}}, "response_format": "a INT"}, "given twice"),
    ],
)
def test_arguments_that_contradict_are_refused_before_anything_is_sent(arguments: dict[str, Any], says: str) -> None:
    """Each wrong argument is named."""
    with pytest.raises(SpecError, match=says):
        query(**arguments)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["a", "b"], "the input has no column 'text'; its columns are ['a', 'b']"),
        (["text", "a", "a"], "the input has columns of the same name: ['a']; rename them first"),
        (["text", "generated_text"], "output_col 'generated_text' is an input column already; choose another name"),
    ],
)
def test_columns_that_do_not_fit_are_named(names: list[str], says: str) -> None:
    """A missing column names the columns there are; doubled and existing ones are refused."""
    with pytest.raises(SpecError) as caught:
        query().check_columns(names)
    assert str(caught.value) == says


def test_the_key_shows_itself_to_nobody_who_only_prints() -> None:
    """Neither `repr` nor the dict that Ray exports of a dataclass holds the key; pickling keeps it."""
    asked = query(api_key=Secret("sk-planted"))
    assert "planted" not in repr(asked)
    assert "planted" not in str(dataclasses.asdict(asked))
    assert pickle.loads(pickle.dumps(asked)).api_key.reveal() == "sk-planted"


@pytest.mark.parametrize(("given", "sent"), [("sk-a\n", "sk-a"), ("  sk-a ", "sk-a"), ("", "EMPTY"), (" \n", "EMPTY")])
def test_a_key_is_sent_without_the_space_around_it(given: str, sent: str) -> None:
    """A key from a file ends in a newline; none at all is what local servers expect."""
    assert query(prompt_col="text", api_key=Secret(given)).api_key.reveal() == sent


@pytest.mark.parametrize("timeout", ["30", 0, -1, True, float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    """Rather than every row failing at once."""
    with pytest.raises(SpecError, match=r"options\['timeout'\]: expected seconds above 0"):
        query(prompt_col="text", options={"timeout": timeout})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"base_url": "http://user:pw-secret@h/v1"}, "a key goes into api_key"),
        ({"base_url": "http://[::1/v1"}, "base_url: "),
        ({"api_key": Secret("sk-密钥-secret")}, "api_key: holds a character"),
        ({"api_key": Secret("sk-\nsecret")}, "api_key: holds a character"),
        ({"options": {"extra_headers": {"X-A": "密钥-secret"}}}, "extra_headers'.*'X-A'.*holds a character"),
        ({"options": {"extra_headers": ["secret"]}}, "extra_headers'.*: expected an object, got list"),
        ({"options": {"extra_query": "key=secret"}}, "extra_query'.*: expected an object, got str"),
        ({"options": {"enable_thinking": True, "chat_template_kwargs": "secret"}}, "chat_template_kwargs'.*got str"),
        ({"options": {"max_tokens": "secret"}}, "options: max_tokens: expected a number"),
    ],
)
def test_a_secret_where_it_cannot_be_sent_is_refused_without_it(arguments: dict[str, Any], says: str) -> None:
    """Before anything is sent, with the place and not the value."""
    with pytest.raises(SpecError, match=says) as caught:
        query(prompt_col="text", **arguments)
    assert "secret" not in str(caught.value)
