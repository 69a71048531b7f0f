"""What is asked of the endpoint: one checked `Query` for the job, one request body per row.

A body is built when the row is about to be sent, not when its block arrives, so that long prompts and images are not
held twice. Whatever is wrong with a row's input raises `InvalidInput`: the row is not sent, the job goes on.
"""

from __future__ import annotations

import base64
import difflib
import json
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.ray_data.schema import ReplyFormat
from airflow_provider_raylm.spec import Endpoint, OnError

PATHS: dict[Endpoint, str] = {"chat": "/chat/completions", "completions": "/completions", "embeddings": "/embeddings"}

_OURS = {
    "model": "is the `model` argument",
    "messages": "come from `messages_col` or `prompt_col`",
    "prompt": "comes from `prompt_col`",
    "input": "comes from `prompt_col`",
    "stream": "is chosen per row to measure the endpoint",
    "stream_options": "is chosen per row to measure the endpoint",
}
_NO_KEY = "EMPTY"
_MOST_TOKENS = 2**31
_REQUIRED: dict[Endpoint, str] = {"chat": "messages", "completions": "prompt", "embeddings": "input"}
_CLIENT_OPTIONS = ("extra_body", "extra_headers", "extra_query", "enable_thinking", "timeout")
# what vLLM takes besides the parameters of OpenAI's API
_VLLM_OPTIONS = (
    "add_generation_prompt",
    "allowed_token_ids",
    "bad_words",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "ignore_eos",
    "include_stop_str_in_output",
    "length_penalty",
    "min_p",
    "min_tokens",
    "mm_processor_kwargs",
    "priority",
    "prompt_logprobs",
    "repetition_penalty",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "structured_outputs",
    "top_k",
    "truncate_prompt_tokens",
    "use_beam_search",
)
_IMAGE_TYPES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)


class InvalidInput(Exception):
    """A row cannot be asked. The message names the column and what was expected, never the value."""


class Secret:
    """A string that shows itself to nobody who only prints, logs or exports it.

    Ray exports the arguments of a dataset's operators, and turns dataclasses into plain dicts on the way.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "'***'"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Secret, (self._value,))


@dataclass(frozen=True, kw_only=True)
class Query:
    """Everything about a query that its actors need. Argument meanings: `airflow_provider_raylm.spec.QuerySpec`.

    Attributes:
        body_col: Column with a whole request as JSON, as in a batch file; what it sets wins over `options`.

    Raises:
        SpecError: The arguments contradict each other or cannot be sent.
    """

    model: str
    base_url: str
    api_key: Secret = field(default_factory=lambda: Secret(_NO_KEY))
    endpoint: Endpoint = "chat"
    prompt_col: str | None = None
    prompt_template: str | None = None
    messages_col: str | None = None
    body_col: str | None = None
    image_cols: tuple[str, ...] = ()
    system_prompt: str | None = None
    output_col: str = "generated_text"
    options: Mapping[str, Any] = field(default_factory=dict)
    response_format: Any = None
    on_error: OnError = "keep"
    max_error_rate: float | None = None
    max_errors: int | None = None
    max_attempts: int = 5
    stall_timeout_s: float = 900.0
    group_by_prefix: bool = False

    def __post_init__(self) -> None:
        if not self.model or not isinstance(self.model, str):
            raise SpecError(f"model: expected the id the endpoint serves, got {self.model!r}")
        if not str(self.base_url).startswith(("http://", "https://")):
            raise SpecError(f"base_url: expected http:// or https://, got {_no_userinfo(self.base_url)!r}")
        try:
            named = urlsplit(self.base_url).username is not None
        except ValueError as exc:
            raise SpecError(f"base_url: {exc}") from None
        if named:
            raise SpecError(f"base_url: names a user before {_no_userinfo(self.base_url)!r}; a key goes into api_key")
        object.__setattr__(self, "api_key", Secret(self.api_key.reveal().strip() or _NO_KEY))
        if not (self.api_key.reveal().isascii() and self.api_key.reveal().isprintable()):
            raise SpecError("api_key: holds a character that no HTTP header can carry")
        if self.endpoint not in PATHS:
            raise SpecError(f"endpoint: expected one of {sorted(PATHS)}, got {self.endpoint!r}")
        if self.on_error not in ("raise", "keep", "null"):
            raise SpecError(f"on_error: expected 'raise', 'keep' or 'null', got {self.on_error!r}")
        sources = {
            name: value
            for name in ("prompt_col", "prompt_template", "messages_col", "body_col")
            if (value := getattr(self, name)) is not None
        }
        if len(sources) != 1:
            raise SpecError(
                "exactly one of prompt_col, prompt_template, messages_col says where the prompt is; "
                f"got {sorted(sources) or 'none'}"
            )
        if self.body_col is not None:
            for name in ("system_prompt", "image_cols", "response_format"):
                if getattr(self, name):
                    raise SpecError(f"{name} cannot be added to the whole requests of a batch file")
        if self.endpoint != "chat":
            for name in ("messages_col", "system_prompt", "image_cols", "response_format"):
                if getattr(self, name):
                    raise SpecError(f"{name} is for endpoint='chat', this query uses {self.endpoint!r}")
        if not self.output_col:
            raise SpecError("output_col: expected a column name, got an empty string")
        if self.max_error_rate is not None and not 0 <= self.max_error_rate <= 1:
            raise SpecError(f"max_error_rate: expected 0 to 1, got {self.max_error_rate!r}")
        if self.max_errors is not None and self.max_errors < 0:
            raise SpecError(f"max_errors: expected 0 or more, got {self.max_errors!r}")
        if self.max_attempts < 1:
            raise SpecError(f"max_attempts: expected 1 or more, got {self.max_attempts!r}")
        _ = self.template_columns, self.parameters, self.headers, self.reply_format  # each checks its part

    @cached_property
    def reply_format(self) -> ReplyFormat | None:
        """How replies are parsed; `None` when they are plain text."""
        return None if self.response_format is None else ReplyFormat.of(self.response_format)

    @cached_property
    def template_columns(self) -> tuple[str, ...]:
        """Columns that `prompt_template` names, each once."""
        if self.prompt_template is None:
            return ()
        try:
            fields = [field for field in string.Formatter().parse(self.prompt_template) if field[1] is not None]
        except ValueError as exc:
            raise SpecError(f"prompt_template: {exc}; write a literal brace as {{{{ or }}}}") from exc
        names = [str(name) for _, name, _, _ in fields]
        for name in names:
            if not name or name.isdigit() or set(name) & set(".[]\"'\n"):
                raise SpecError(
                    f"prompt_template: {{{name}}} is not a column name; use {{column}}, and write a literal brace as "
                    "{{ or }}"
                )
        if any("{" in (spec or "") for _, _, spec, _ in fields):
            raise SpecError("prompt_template: a column inside the format of another one; use {column} or {column:.2f}")
        if not names:
            raise SpecError("prompt_template names no column; write {column} where its text belongs")
        return tuple(dict.fromkeys(names))

    @property
    def columns(self) -> tuple[str, ...]:
        """Input columns that are read."""
        source = self.prompt_col or self.messages_col or self.body_col
        return (*((source,) if source else self.template_columns), *self.image_cols)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The part of the request body that is the same for every row."""
        options = dict(self.options)
        for name, why in _OURS.items():
            if name in options:
                raise SpecError(f"options[{name!r}] cannot be set: it {why}")
        _check_spelling(options, self.endpoint)
        if options.get("n", 1) != 1:
            raise SpecError(f"options['n']: one reply per row is kept, got {options['n']!r}")
        body: dict[str, Any] = {"model": self.model}
        body.update({key: value for key, value in options.items() if key not in _CLIENT_OPTIONS})
        for name in ("extra_body", "extra_headers", "extra_query", "chat_template_kwargs"):
            if not isinstance(options.get(name) or {}, Mapping):
                raise SpecError(f"options[{name!r}]: expected an object, got {type(options[name]).__name__}")
        timeout = options.get("timeout")
        if timeout is not None and not (type(timeout) in (int, float) and timeout > 0):
            raise SpecError(f"options['timeout']: expected seconds above 0, got {timeout!r}")
        body.update(options.get("extra_body") or {})
        if (thinking := options.get("enable_thinking")) is not None:
            template = dict(body.get("chat_template_kwargs") or {})
            if template.get("enable_thinking", thinking) != thinking:
                raise SpecError("enable_thinking differs between options and options['extra_body']")
            body["chat_template_kwargs"] = {**template, "enable_thinking": thinking}
        if self.reply_format is not None:
            if "response_format" in body:
                raise SpecError("response_format is given twice: as an argument and in options")
            body["response_format"] = self.reply_format.request
        try:
            json.dumps(body, allow_nan=False)
        except (TypeError, ValueError) as exc:
            raise SpecError(f"options cannot be sent as JSON: {exc}") from exc
        try:
            most_tokens(body)
        except InvalidInput as exc:
            raise SpecError(f"options: {exc}") from exc
        return body

    @cached_property
    def headers(self) -> dict[str, str]:
        """Headers of every request, besides the key."""
        headers = {str(k): str(v).strip() for k, v in (self.options.get("extra_headers") or {}).items()}
        for name, value in headers.items():
            if not (value.isascii() and value.isprintable()):
                raise SpecError(f"options['extra_headers'][{name!r}]: holds a character that no HTTP header can carry")
        return headers

    @cached_property
    def secrets(self) -> tuple[str, ...]:
        """What requests are signed with, longest first: the key, and the headers' values with and without their scheme.
        Values of fewer than four characters are words, not secrets."""
        values = [] if self.api_key.reveal() == _NO_KEY else [self.api_key.reveal()]
        for value in self.headers.values():
            values += [value.strip(), value.strip().partition(" ")[2].strip()]
        return tuple(sorted({value for value in values if len(value) >= 4}, key=len, reverse=True))

    def check_columns(self, names: Sequence[str]) -> None:
        """Check that an input with columns `names` can be asked.

        Raises:
            SpecError: A column is missing or doubled, or the output column exists.
        """
        doubled = sorted({name for name in names if list(names).count(name) > 1})
        if doubled:
            raise SpecError(f"the input has columns of the same name: {doubled}; rename them first")
        missing = [name for name in self.columns if name not in names]
        if missing:
            raise SpecError(f"the input has no column {missing[0]!r}; its columns are {sorted(names)}")
        if self.output_col in names:
            raise SpecError(f"output_col {self.output_col!r} is an input column already; choose another name")

    def body(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The request body for one row, given the values of `columns`.

        Raises:
            InvalidInput: The row cannot be asked.
        """
        if self.body_col is not None:
            return {**self.parameters, **_whole_request(row[self.body_col], self.body_col, self.endpoint)}
        if self.messages_col is not None:
            messages = self._with_system(_messages(row[self.messages_col], self.messages_col))
            if self.image_cols:
                messages = _with_images(messages, self._images(row))
            return {**self.parameters, "messages": messages}
        text = self.prompt(row)
        if self.endpoint == "completions":
            return {**self.parameters, "prompt": text}
        if self.endpoint == "embeddings":
            return {**self.parameters, "input": text}
        content: Any = text
        if self.image_cols and (images := self._images(row)):
            content = [{"type": "text", "text": text}, *images]
        return {**self.parameters, "messages": self._with_system([{"role": "user", "content": content}])}

    def prompt(self, row: Mapping[str, Any]) -> str:
        """The prompt text of one row.

        Raises:
            InvalidInput: It is null, empty or not text.
        """
        if self.prompt_template is not None:
            values = {name: _plain(row[name], name) for name in self.template_columns}
            try:
                text = self.prompt_template.format(**values)
            except (ValueError, TypeError) as exc:
                raise InvalidInput(f"prompt_template does not fit the row: {type(exc).__name__}") from exc
            return _sendable(text, "prompt_template")
        name = str(self.prompt_col)
        return _sendable(str(_plain(row[name], name)), name)

    def _with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.system_prompt is None or messages[0].get("role") in ("system", "developer"):
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _images(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [
            {"type": "image_url", "image_url": {"url": _image_url(row[name], name)}}
            for name in self.image_cols
            if row[name] is not None
        ]


def _check_spelling(options: Mapping[str, Any], endpoint: Endpoint) -> None:
    """Refuse a name that is nearly one of the API's: servers ignore what they do not know, without a word.

    Raises:
        SpecError: It says which name is meant.
    """
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    params: Any = {
        "chat": chat_create_params.CompletionCreateParamsBase,
        "completions": completion_create_params.CompletionCreateParamsBase,
        "embeddings": embedding_create_params.EmbeddingCreateParams,
    }[endpoint]
    known = {*params.__annotations__, *_VLLM_OPTIONS, *_CLIENT_OPTIONS}
    for name in options:
        if name not in known and (near := difflib.get_close_matches(str(name), known, 1, 0.82)):
            raise SpecError(
                f"options[{name!r}]: did you mean {near[0]!r}? What shall be sent as it is goes into "
                "options['extra_body']"
            )


def _whole_request(value: Any, column: str, endpoint: Endpoint) -> dict[str, Any]:
    """A request body from the JSON of a batch line, without what is decided here (model, streaming).

    Raises:
        InvalidInput: It is no request for this endpoint.
    """
    if value is None:
        raise InvalidInput(f"column {column!r} is null")
    try:
        body = json.loads(value) if isinstance(value, (str, bytes)) else value
    except (ValueError, RecursionError):
        raise InvalidInput(f"column {column!r}: expected a request body as JSON") from None
    if not isinstance(body, Mapping):
        raise InvalidInput(f"column {column!r}: expected a request body, got {type(body).__name__}")
    if not body.get(_REQUIRED[endpoint]):
        raise InvalidInput(f"column {column!r}: a request of {endpoint!r} needs {_REQUIRED[endpoint]!r}")
    if endpoint == "chat" and not _are_objects(body["messages"]):
        raise InvalidInput(f"column {column!r}: 'messages' is no list of messages")
    if (body.get("n") or 1) != 1:
        raise InvalidInput(f"column {column!r}: one reply per row is kept, the request asks for n={body['n']!r}")
    return {
        key: item for key, item in body.items() if key not in ("model", "stream", "stream_options") and item is not None
    }


def is_thinking_off(body: Mapping[str, Any]) -> bool:
    """The request turns thinking off, in the server's way or in the hosted API's."""
    template = body.get("chat_template_kwargs")
    template = template if isinstance(template, Mapping) else {}
    return template.get("enable_thinking", body.get("enable_thinking")) is False


def most_tokens(body: Mapping[str, Any]) -> int | None:
    """Most tokens that the reply to a request can have; `None` when the server decides.

    Raises:
        InvalidInput: It is no number.
    """
    if "input" in body:
        return 1
    value = body.get("max_completion_tokens") or body.get("max_tokens")
    try:
        return min(int(value), _MOST_TOKENS) if value else None
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput("max_tokens: expected a number") from None


def texts(body: Mapping[str, Any]) -> tuple[str, ...]:
    """What a request says, which an error message may echo."""
    if isinstance(text := body.get("prompt", body.get("input")), str):
        return (text,)
    found: list[Any] = []
    for message in body.get("messages") or ():
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        found += [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return tuple(text for text in found if isinstance(text, str))


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _no_userinfo(url: Any) -> str:
    return str(url).rsplit("@", 1)[-1]


def _plain(value: Any, column: str) -> Any:
    """A value that has an obvious text form: text, a number, a date; bytes if they are UTF-8."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise InvalidInput(f"column {column!r} is null")
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidInput(f"column {column!r} holds bytes that are not UTF-8 text") from None
    if isinstance(value, (list, tuple, dict)) or hasattr(value, "__array__"):
        hint = "; a list of messages goes into messages_col" if isinstance(value, (list, tuple)) else ""
        raise InvalidInput(f"column {column!r}: expected text, got {type(value).__name__}{hint}")
    return value


def _sendable(text: str, column: str) -> str:
    if not text.strip():
        raise InvalidInput(f"column {column!r} is empty")
    if not _is_utf8(text):
        raise InvalidInput(f"column {column!r} holds half of a surrogate pair, which is not text")
    return text


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _messages(value: Any, column: str) -> list[dict[str, Any]]:
    """Chat messages from a list of structs, or the JSON text of one."""
    if value is None:
        raise InvalidInput(f"column {column!r} is null")
    if isinstance(value, (str, bytes)):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidInput(f"column {column!r}: expected a list of messages or its JSON, got other text") from None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list) or not value:
        raise InvalidInput(f"column {column!r}: expected a list of messages, got {type(value).__name__} or none")
    messages = []
    for message in value:
        if not isinstance(message, Mapping) or not message.get("role"):
            raise InvalidInput(f"column {column!r}: a message needs a role and content")
        # rows of one Arrow column share their fields: absent ones come as null
        kept = _without_nulls(message)
        kept.setdefault("content", None if kept.get("tool_calls") else "")
        messages.append(kept)
    try:
        json.dumps(messages, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError):
        raise InvalidInput(f"column {column!r}: its messages hold a value that JSON cannot carry") from None
    return messages


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nulls(item) for item in value]
    return value


def _with_images(messages: list[dict[str, Any]], images: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with the images added to the last user message."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "user":
            content = messages[index]["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
            return [*messages[:index], {**messages[index], "content": [*parts, *images]}, *messages[index + 1 :]]
    raise InvalidInput("the messages have no user message that the images could be added to")


def _image_url(value: Any, column: str) -> str:
    """An image as a URL: one that is given, or a `data:` URL of its bytes."""
    if isinstance(value, Mapping):  # the struct that Hugging Face datasets use
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        if value.startswith(("http://", "https://", "data:image/")):
            return value
        raise InvalidInput(f"image column {column!r}: expected a http(s) or data:image URL, or the image's bytes")
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        kind = next((kind for magic, kind in _IMAGE_TYPES if data.startswith(magic)), None)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            kind = "image/webp"
        if kind is None:
            raise InvalidInput(f"image column {column!r}: bytes that are no PNG, JPEG, GIF, WebP or BMP")
        return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
    raise InvalidInput(f"image column {column!r}: expected a URL or bytes, got {type(value).__name__}")
