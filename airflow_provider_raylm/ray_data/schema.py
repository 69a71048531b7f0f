"""Arrow types of what `ai_query` adds to a row, and the forms a user can ask a reply to have.

The output column's type is fixed by the query alone, before the first row: every block of every file has the same
schema, also when all rows fail or there are none.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from airflow_provider_raylm.exceptions import SpecError

ERROR_TYPE = pa.struct([("type", pa.string()), ("message", pa.string()), ("http_status", pa.int32())])
TOOL_CALL_TYPE = pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string())])
_REPLY_FIELDS = (
    ("content", pa.string()),
    ("reasoning_content", pa.string()),
    ("finish_reason", pa.string()),
    ("tool_calls", pa.list_(TOOL_CALL_TYPE)),
    ("prompt_tokens", pa.int64()),
    ("completion_tokens", pa.int64()),
    ("latency_s", pa.float64()),
    ("attempts", pa.int32()),
    ("status", pa.string()),
    ("error", ERROR_TYPE),
)


def output_type(
    *, embeddings: bool = False, logprobs: bool = False, reply_format: ReplyFormat | None = None
) -> pa.DataType:
    """Type of the output column.

    Args:
        embeddings: Add `embedding`, a list of float32.
        logprobs: Add `logprobs`, the server's object as JSON text.
        reply_format: Add `parsed`, the reply in the form asked for.
    """
    fields = list(_REPLY_FIELDS)
    if embeddings:
        fields.append(("embedding", pa.list_(pa.float32())))
    if logprobs:
        fields.append(("logprobs", pa.string()))
    if reply_format is not None:
        fields.append(("parsed", reply_format.type))
    return pa.struct(fields)


class ReplyMismatch(Exception):
    """A reply does not have the form that was asked for. The message names the place, not the value."""


@dataclass(frozen=True)
class ReplyFormat:
    """A form for replies: what the request asks for and the Arrow type it is parsed to.

    Attributes:
        request: The request's `response_format`.
        schema: JSON schema that replies are checked against.
    """

    request: dict[str, Any]
    schema: dict[str, Any]

    @classmethod
    def of(cls, form: Any) -> ReplyFormat:
        """Read a JSON schema, the API's own `response_format` object, a pydantic model or a DDL string.

        Raises:
            SpecError: It is none of these, or its top level is not an object.
        """
        name = "reply"
        if isinstance(form, str):
            schema = schema_of_type(parse_ddl(form))
        elif isinstance(form, type) and hasattr(form, "model_json_schema"):
            schema, name = form.model_json_schema(), form.__name__
        elif isinstance(form, Mapping):
            given = dict(form)
            if given.get("type") == "json_object" and "properties" not in given:
                return cls({"type": "json_object"}, {"type": "object"})
            if given.get("type") == "json_schema":
                inner = given.get("json_schema") or {}
                schema, name = dict(inner.get("schema") or {}), str(inner.get("name") or name)
            else:
                schema = given
        else:
            raise SpecError(
                f"response_format: expected a JSON schema, a pydantic model or a DDL string, got {type(form).__name__}"
            )
        _check_schema(schema)
        if _resolve(schema, schema).get("type") != "object":
            raise SpecError("response_format: the top level of the schema must be an object with named properties")
        return cls(
            {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}},
            schema,
        )

    @cached_property
    def type(self) -> pa.DataType:
        return type_of_schema(self.schema)

    @cached_property
    def _validator(self) -> Any:
        import jsonschema

        return jsonschema.validators.validator_for(self.schema)(self.schema)

    def parse(self, text: str | None) -> Any:
        """A reply as a value of `type`.

        Raises:
            ReplyMismatch: It is no JSON, or not of this form.
        """
        if text is None:
            raise ReplyMismatch("the reply has no text")
        try:
            value = json.loads(_without_fence(text))
        except (ValueError, RecursionError) as exc:
            raise ReplyMismatch(f"the reply is not JSON: {exc.msg if hasattr(exc, 'msg') else 'unreadable'}") from None
        try:
            error = next(iter(sorted(self._validator.iter_errors(value), key=lambda e: list(map(str, e.path)))), None)
        except Exception as exc:  # the depth, a number beyond every float, a pattern of another regex dialect
            raise ReplyMismatch(f"the reply cannot be checked against the schema: {type(exc).__name__}") from None
        if error is not None:
            raise ReplyMismatch(f"at {error.json_path}: breaks {error.validator!r} of the schema")
        try:
            fitted = _fit(value, self.type)
            pa.scalar(fitted, self.type)
        except Exception:  # Arrow, dates, numbers and depths each refuse with their own
            raise ReplyMismatch(f"the reply does not fit {self.type}") from None
        return fitted

    def __reduce__(self) -> tuple[Any, ...]:
        return (ReplyFormat, (self.request, self.schema))  # validators do not travel


def _without_fence(text: str) -> str:
    """The text inside one Markdown code fence, for servers that do not constrain replies."""
    match = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", text, re.DOTALL)
    return match.group(1) if match else text


def _check_schema(schema: dict[str, Any]) -> None:
    import jsonschema

    try:
        json.dumps(schema)
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as exc:
        raise SpecError(f"response_format: not a JSON schema: at {exc.json_path}: {exc.message}") from exc
    except (TypeError, ValueError) as exc:
        raise SpecError(f"response_format: not JSON: {exc}") from exc


# JSON schema -> Arrow


def type_of_schema(schema: Mapping[str, Any]) -> pa.DataType:
    """Arrow type of a JSON schema. What Arrow cannot say (unions, recursion, free objects) is kept as JSON text."""
    return _type(schema, schema, ())


_SCALARS = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
_FORMATS = {"date": pa.date32(), "date-time": pa.timestamp("us", tz="UTC")}
_ARROW_KEY = "x-arrow-type"
_JSON_TEXT = pa.string()


def _type(schema: Any, root: Mapping[str, Any], seen: tuple[str, ...]) -> pa.DataType:
    if not isinstance(schema, Mapping):
        return _JSON_TEXT
    if (ref := schema.get("$ref")) is not None:
        return _JSON_TEXT if ref in seen else _type(_resolve(schema, root), root, (*seen, ref))
    if exact := _EXACT.get(schema.get(_ARROW_KEY, "")):
        return exact
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            options = [option for option in schema[word] if not _is_null(option)]
            return _type(options[0], root, seen) if len(options) == 1 else _JSON_TEXT
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = [k for k in kind if k != "null"]
        kind = kinds[0] if len(kinds) == 1 else ("number" if set(kinds) == {"integer", "number"} else None)
    if kind is None and (values := schema.get("enum", [schema["const"]] if "const" in schema else None)):
        return _SCALARS["string"] if all(isinstance(v, str) for v in values) else _JSON_TEXT
    if kind == "object":
        properties = schema.get("properties")
        if properties:
            return pa.struct([pa.field(name, _type(sub, root, seen)) for name, sub in properties.items()])
        extra = schema.get("additionalProperties")
        return pa.map_(pa.string(), _type(extra, root, seen)) if isinstance(extra, Mapping) else _JSON_TEXT
    if kind == "array":
        return pa.list_(_type(schema.get("items"), root, seen))
    if kind == "string":
        return _FORMATS.get(schema.get("format", ""), pa.string())
    return _SCALARS.get(str(kind), _JSON_TEXT)


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"


def _resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    seen = set()
    while (ref := schema.get("$ref")) is not None:
        if not ref.startswith("#") or ref in seen:
            raise SpecError(f"response_format: cannot follow the reference {ref!r}")
        seen.add(ref)
        target: Any = root
        for part in ref.lstrip("#").strip("/").split("/") if ref != "#" else ():
            try:
                target = target[part.replace("~1", "/").replace("~0", "~")]
            except (KeyError, TypeError) as exc:
                raise SpecError(f"response_format: the reference {ref!r} leads nowhere") from exc
        schema = target
    return schema


def _fit(value: Any, kind: pa.DataType) -> Any:
    """`value` from JSON in the Python form that Arrow takes for `kind`."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _fit(value.get(field.name), field.type) for field in kind}
    if pa.types.is_map(kind):
        return [(replace_surrogates(key), _fit(item, kind.item_type)) for key, item in value.items()]
    if pa.types.is_list(kind):
        return [_fit(item, kind.value_type) for item in value]
    if pa.types.is_string(kind):
        return replace_surrogates(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    if pa.types.is_date(kind):
        return datetime.date.fromisoformat(value)
    if pa.types.is_timestamp(kind):
        moment = datetime.datetime.fromisoformat(value.replace("Z", "+00:00"))
        return moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc)
    if pa.types.is_floating(kind):
        return float(value)
    if pa.types.is_integer(kind):
        return int(value)
    return value


def replace_surrogates(text: str) -> str:
    """`text` with half surrogate pairs, which JSON can carry and UTF-8 cannot, as U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# DDL -> Arrow -> JSON schema

_DDL_SCALARS = {
    "string": pa.string(),
    "varchar": pa.string(),
    "text": pa.string(),
    "boolean": pa.bool_(),
    "bool": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
_EXACT = {str(kind): kind for kind in _DDL_SCALARS.values()}
_TOKEN = re.compile(r"\s*(?:(`[^`]+`|[^\W\d]\w*)|([<>,:]))")


def parse_ddl(text: str) -> pa.DataType:
    """Struct type of a column list such as `label STRING, score DOUBLE, tags ARRAY<STRING>`.

    Types: those of `_DDL_SCALARS`, `ARRAY<t>`, `MAP<STRING, t>`, `STRUCT<name: t, ...>`. `STRUCT<...>` around all
    is fine, and `NOT NULL` after a type is accepted.

    Raises:
        SpecError: It is no such list; the message says where.
    """
    tokens = _tokens(text)
    parser = _DdlParser(tokens, text)
    if len(tokens) > 1 and tokens[0].lower() == "struct" and tokens[1] == "<":
        kind = parser.type()
    else:
        kind = pa.struct(parser.fields(end=None))
    parser.expect_end()
    return kind


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise SpecError(f"response_format: cannot read {text[position : position + 20]!r} in the DDL {text!r}")
        tokens.append(match.group(1) or match.group(2))
        position = match.end()
    return tokens


class _DdlParser:
    def __init__(self, tokens: list[str], text: str) -> None:
        self._tokens = tokens
        self._text = text
        self._at = 0

    def _peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self, expected: str) -> str:
        token = self._peek()
        if token is None:
            raise SpecError(f"response_format: expected {expected} at the end of the DDL {self._text!r}")
        self._at += 1
        return token

    def _symbol(self, symbol: str) -> None:
        if (token := self._next(repr(symbol))) != symbol:
            raise SpecError(f"response_format: expected {symbol!r}, got {token!r} in the DDL {self._text!r}")

    def expect_end(self) -> None:
        if (token := self._peek()) is not None:
            raise SpecError(f"response_format: unexpected {token!r} in the DDL {self._text!r}")

    def fields(self, *, end: str | None) -> list[pa.Field]:
        fields: list[pa.Field] = []
        while True:
            name = self._next("a column name").strip("`")
            if name in "<>,:":
                raise SpecError(f"response_format: expected a column name, got {name!r} in the DDL {self._text!r}")
            if self._peek() == ":":
                self._next(":")
            fields.append(pa.field(name, self.type()))
            if (self._peek() or "").lower() == "not":
                self._next("NOT")
                self._next("NULL")
            if self._peek() != ",":
                break
            self._next(",")
        names = [field.name for field in fields]
        if len(set(names)) != len(names):
            raise SpecError(f"response_format: a name comes twice in the DDL {self._text!r}")
        if end is not None:
            self._symbol(end)
        return fields

    def type(self) -> pa.DataType:
        word = self._next("a type").lower()
        if word == "array":
            self._symbol("<")
            item = self.type()
            self._symbol(">")
            return pa.list_(item)
        if word == "map":
            self._symbol("<")
            key = self.type()
            if key != pa.string():
                raise SpecError("response_format: a MAP's keys are STRING, since JSON has no others")
            self._symbol(",")
            value = self.type()
            self._symbol(">")
            return pa.map_(pa.string(), value)
        if word == "struct":
            self._symbol("<")
            return pa.struct(self.fields(end=">"))
        if word in _DDL_SCALARS:
            return _DDL_SCALARS[word]
        raise SpecError(
            f"response_format: no type {word!r} in the DDL {self._text!r}; types are "
            f"{', '.join(sorted(name.upper() for name in (*_DDL_SCALARS, 'array', 'map', 'struct')))}"
        )


def schema_of_type(kind: pa.DataType) -> dict[str, Any]:
    """JSON schema that asks for a value of an Arrow type. Every field is required, so that the model writes each."""
    if pa.types.is_struct(kind):
        return {
            "type": "object",
            "properties": {field.name: schema_of_type(field.type) for field in kind},
            "required": [field.name for field in kind],
            "additionalProperties": False,
        }
    if pa.types.is_map(kind):
        return {"type": "object", "additionalProperties": schema_of_type(kind.item_type)}
    if pa.types.is_list(kind):
        return {"type": "array", "items": schema_of_type(kind.value_type)}
    if pa.types.is_boolean(kind):
        return {"type": "boolean"}
    if pa.types.is_date(kind):
        return {"type": "string", "format": "date"}
    if pa.types.is_timestamp(kind):
        return {"type": "string", "format": "date-time"}
    if pa.types.is_integer(kind):
        return {"type": "integer"} if kind == pa.int64() else {"type": "integer", _ARROW_KEY: str(kind)}
    if pa.types.is_floating(kind):
        return {"type": "number"} if kind == pa.float64() else {"type": "number", _ARROW_KEY: str(kind)}
    return {"type": "string"}
