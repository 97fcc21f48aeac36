"""JSON bodies as pydantic models: parsing, validation, and messages that name a field by its full path.

A body is a `Body`, in strict mode: JSON's true is not a 1. null and an absent field are equivalent, because the SDK
omits None. `validate` turns a parsed object into its model; an error reads "sampling_params.top_p is 'high'; it must be
a number". `json_schemas` returns the JSON schemas for the OpenAPI document.

A field without effect on the answer may be ignored. `validate` then removes it, at any depth, and puts its name into an
`IgnoredFields`. It knows three kinds: a field that the model does not have, a value that a marker calls neutral, and a
request that the server does not follow (`Advice`). The first and the third kind are refused without an `IgnoredFields`,
and with a strict one.

Times are seconds since the epoch in Python and RFC 3339 with a zone on the wire.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, cast, get_args

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from tinsmith.errors import RequestError, UserError, not_supported

T = TypeVar("T")
B = TypeVar("B", bound="Body")
Schema = dict[str, object]

INT64_MAX = 2**63 - 1
MAX_TEXT = 4096
MAX_METADATA_BYTES = 65536
MAX_DEPTH = 64
"""Most levels of nesting in a JSON body. orjson reads 1024 and writes 254, so every body can be re-serialized."""

MAX_CONTAINERS = 2**18
"""Most objects and lists in a JSON body. An empty one takes 3 bytes there and 60 in memory."""

MAX_SHOWN_CHARS = 80
"""Most characters of a wrong value that a message repeats."""

MAX_IGNORED = 64
"""Most names of ignored fields of a request."""

MAX_VALIDATIONS = 8
"""Most validations of a body. Each one removes ignored fields, and the next one may meet others behind them."""


def show(value: object) -> str:
    """A value for a message: short, on one line, ASCII. Formats only the part of the value that is shown."""
    # One character more than fits, so that the text is marked as truncated.
    text = ascii(value[: MAX_SHOWN_CHARS + 1]) if isinstance(value, str) else reprlib.repr(value)
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


class Body(BaseModel):
    """One JSON object of a request. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", hide_input_in_errors=True)
    ignores_zero: ClassVar[bool] = True
    """Whether an unknown field of a nested `ClosedBody` may be 0 or false."""
    missing_code: ClassVar[str | None] = None
    """The error code for a missing field."""


class Query(Body):
    """The query of a URL. Its values are text, which is read as the types of the fields. Unknown names are ignored."""

    model_config = ConfigDict(strict=False)


class ClosedBody(Body):
    """An object whose unknown fields are ignored by name or refused, as `validate` decides. A refusal spares empty
    values (null, 0, "", []), which have no effect.
    """

    model_config = ConfigDict(extra="forbid")


def validation_error(reason: str) -> PydanticCustomError:
    """An error for validators; the message is the field's path and `reason`."""
    return PydanticCustomError("wrong", "{reason}", {"reason": reason})


def support_error(reason: str) -> PydanticCustomError:
    """An error for validators: the server does not support the field or its value."""
    return PydanticCustomError("unsupported", "{reason}", {"reason": reason})


def advice_error(reason: str, name: str = "") -> PydanticCustomError:
    """An error for validators: the server does not follow the request's wish, and answers without it. `name` replaces
    the last part of the path.
    """
    return PydanticCustomError("advice", "{reason}", {"reason": reason, "name": name})


def _neutral_error() -> PydanticCustomError:
    return PydanticCustomError("neutral", "without effect")


class IgnoredFields:
    """The names of one request's ignored fields, without indices: `messages[].cache_control`. With `strict`, only
    neutral values of known fields are ignored.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def add(self, name: str) -> None:
        if len(self._names) < MAX_IGNORED:
            self._names.setdefault(name)

    def advise(self, advice: Mapping[str, str]) -> None:
        """Add fields that the server does not follow, with the reasons. Raises NotSupportedError if strict."""
        for name, reason in advice.items():
            if self.strict:
                raise not_supported(name, reason)
            self.add(name)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks a field that accepts only these values."""

    values: Sequence[str | int]

    def __get_pydantic_core_schema__(self, _source: object, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self.values))


@dataclass(frozen=True, slots=True)
class Supported:
    """Marks a field of which the server supports only these values; others are refused with the reason."""

    values: Sequence[object]
    reason: str

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.values)}

    def _check(self, value: object) -> object:
        if value not in self.values:
            raise support_error(f"{show(value)}; {self.reason}")
        return value


def refuse(reason: str, *, unless: object = None) -> AfterValidator:
    """Marks a known field that the server does not support; empty values are ignored."""

    def check(value: object) -> None:
        if value and value != unless:
            raise support_error(reason)
        if value is not None:
            raise _neutral_error()

    return AfterValidator(check)


def neutral(*values: object, reason: str) -> AfterValidator:
    """Marks a known field that the server does not implement. The given values and empty texts, lists and objects have
    no effect and are ignored; others are refused with the reason.
    """

    def check(value: object) -> None:
        if value is None:
            return
        if value in ("", [], {}) or any(_is_same(value, other) for other in values):
            raise _neutral_error()
        raise support_error(f"{show(value)}; {reason}")

    return AfterValidator(check)


def _is_same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _ignore_value(value: object) -> None:
    if value is not None:
        raise _neutral_error()


NO_EFFECT = AfterValidator(_ignore_value)
"""Marks a known field that never changes an answer: every value is ignored."""


def advisory(reason: str) -> AfterValidator:
    """Marks a known field that asks for something that the server does not do; it answers without it."""

    def check(value: object) -> None:
        if value is None:
            return
        raise _neutral_error() if value in ("", [], {}, False) else advice_error(reason)

    return AfterValidator(check)


@dataclass(frozen=True, slots=True)
class StrOr:
    """Marks a field that is `str | Other`; with `values`, a string must be one of them."""

    values: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        text = handler.generate_schema(Annotated[str, OneOf(self.values)] if self.values else LongText)
        (other,) = (option for option in get_args(source) if option is not str)
        return _union_by_choice(
            [text, handler.generate_schema(other)], lambda value: 0 if isinstance(value, str) else 1
        )


@dataclass(frozen=True, slots=True)
class ListOr:
    """Marks a field that is `Other | list[Other]`."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        single, multiple = map(handler.generate_schema, get_args(source))
        return _union_by_choice([single, multiple], lambda value: isinstance(value, list))


@dataclass(frozen=True, slots=True, eq=False)
class ByType:
    """Marks an object that is one of several models, chosen by its field `type`. Objects of the types in `dropped` are
    ignored, for the reason there; under the key "" is the reason for all other types.
    """

    models: Mapping[str, type[Body]]
    dropped: Mapping[str, str] = field(default_factory=dict)

    def __get_pydantic_core_schema__(self, _source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        literal = core_schema.typed_dict_field(core_schema.literal_schema(list(self.models)))
        other = core_schema.typed_dict_schema({"type": literal})  # refuses every value, with its path
        drop = core_schema.no_info_after_validator_function(self._drop, core_schema.dict_schema())
        distinct = list(dict.fromkeys(self.models.values()))

        def choose(value: object) -> int:
            if isinstance(value, Body):  # to be serialized
                return distinct.index(type(value))
            kind = value.get("type") if isinstance(value, dict) else None
            if not isinstance(kind, str):
                return len(distinct)
            if kind in self.models:
                return distinct.index(self.models[kind])
            return len(distinct) + (kind in self.dropped or "" in self.dropped)

        dropped = [drop] if self.dropped else []
        return _union_by_choice([*map(handler.generate_schema, distinct), other, *dropped], choose)

    def _drop(self, value: Mapping[str, object]) -> object:
        kind = str(value["type"])
        raise advice_error(self.dropped.get(kind) or self.dropped[""], f"[{printable_name(kind)}]")


def _union_by_choice(schemas: list[CoreSchema], choose: Callable[[object], int]) -> CoreSchema:
    """One of several schemas. The choice is in an error's path as a negative number, unlike indices of lists."""
    choices = {-1 - index: schema for index, schema in enumerate(schemas)}
    return core_schema.tagged_union_schema(choices, lambda value: -1 - choose(value))


def _check_size(value: dict[str, T]) -> dict[str, T]:
    size = len(orjson.dumps(value))
    if size > MAX_METADATA_BYTES:
        raise validation_error(f"is {size} bytes of JSON; at most {MAX_METADATA_BYTES} are kept")
    return value


NO_NUL = r"^[^\x00]*$"
Text = Annotated[str, Field(max_length=MAX_TEXT, pattern=NO_NUL)]
LongText = Annotated[str, Field(max_length=2**31)]
"""Text of a conversation. A model may write NUL, and clients return its text with the next request."""
GrammarText = Annotated[str, Field(max_length=2**31, pattern=NO_NUL)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Integer = Annotated[int, Field(ge=-INT64_MAX, le=INT64_MAX)]
Position = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""A number that is part of an id."""
SequenceNumber = Annotated[int, Field(ge=1, le=2**62)]
"""The number of a training request: 0 is the creation of its model."""
Metadata = Annotated[dict[str, Any], AfterValidator(_check_size), Field(description="at most 64 KiB of JSON")]
"""An object of the user."""
_MetadataText = Annotated[str, Field(max_length=MAX_METADATA_BYTES, pattern=NO_NUL)]
_NullAsEmpty = BeforeValidator(lambda value: "" if value is None else value)
TextMetadata = Annotated[
    dict[str, Annotated[_MetadataText, _NullAsEmpty]],
    AfterValidator(_check_size),
    Field(description="at most 64 KiB of JSON"),
]
"""An object of the user with strings only, because the SDK reads strings from a checkpoint. null becomes ""."""
Ignored = SkipJsonSchema[Any]
"""A known field without effect, like the SDK's `type`. The OpenAPI document omits it."""


def validate(model: type[B], values: Mapping[str, object], ignored: IgnoredFields | None = None) -> B:
    """The object as a typed body. Ignored fields are added to `ignored`. Raises a RequestError that names the field,
    its value and the valid values.
    """
    ignored = IgnoredFields(strict=True) if ignored is None else ignored
    errors: list[ErrorDetails] = []
    for _ in range(MAX_VALIDATIONS):
        try:
            return model.__pydantic_validator__.validate_python(values)
        except ValidationError as error:
            errors = error.errors(include_url=False)
        ignorable = [detail for detail in errors if _is_ignorable(model, detail, strict=ignored.strict)]
        if not ignorable:
            break
        for detail in ignorable:
            if detail["input"] is not None:
                ignored.add(_path_without_indices(detail))
        values = cast("dict[str, object]", _remove_fields(values, _build_tree([detail["loc"] for detail in ignorable])))
    raise _request_error(model, errors[0])


def _is_ignorable(model: type[Body], error: ErrorDetails, *, strict: bool) -> bool:
    """Whether the field that caused an error can be treated as absent."""
    value, kind = error["input"], error["type"]
    if kind == "neutral":
        return True
    if kind == "advice":
        return not strict
    if kind == "extra_forbidden":
        return not strict or (not value and (model.ignores_zero or not isinstance(value, int | float)))
    return value is None and kind != "missing" and "properties" in _schema_at(model, error["loc"][:-1])


def _path_without_indices(error: ErrorDetails) -> str:
    """The path of an ignored field without indices, as printable ASCII."""
    path = ""
    for part in error["loc"]:
        if isinstance(part, str):
            path += ("." if path else "") + printable_name(part)
        elif part >= 0:
            path += "[]"
    name = str(error.get("ctx", {}).get("name", ""))
    return path.removesuffix("[]") + name if name else path


def printable_name(name: str) -> str:
    """A name from a client as printable ASCII without commas."""
    return name if _NAME.fullmatch(name) else show(name).replace(",", " ")


_NAME = re.compile(rf"[A-Za-z0-9_.:$-]{{1,{MAX_SHOWN_CHARS}}}")
Tree = dict[int | str, "Tree"]


def _build_tree(paths: Iterable[Sequence[int | str]]) -> Tree:
    """The paths as nested dicts; a leaf is empty."""
    tree: Tree = {}
    for path in paths:
        node = tree
        for part in path:
            if not _is_choice(part):
                node = node.setdefault(part, {})
    return tree


def _remove_fields(values: object, removed: Tree) -> object:
    """The object without the fields at the tree's leaves. Only containers on their paths are copied."""
    if isinstance(values, Mapping):
        return {
            name: _remove_fields(value, removed[name]) if name in removed else value
            for name, value in values.items()
            if removed.get(name) != {}
        }
    if isinstance(values, list):
        return [
            _remove_fields(value, removed[index]) if index in removed else value
            for index, value in enumerate(values)
            if removed.get(index) != {}
        ]
    return values


def _is_choice(part: int | str) -> bool:
    return isinstance(part, int) and part < 0


def _request_error(model: type[Body], error: ErrorDetails) -> RequestError:
    location, kind = error["loc"], error["type"]
    if location and location[-1] == "[key]":
        location = location[:-1]
    path = ""
    for part in location:
        if isinstance(part, str):
            path += ("." if path else "") + (part if len(part) <= MAX_SHOWN_CHARS else show(part))
        elif part >= 0:
            path += f"[{part}]"
    if kind == "wrong":
        return RequestError(path, f"{path} {error['msg']}")
    if kind in ("unsupported", "advice"):
        return not_supported(path, error["msg"])
    if kind == "extra_forbidden":
        known_names = sorted(_properties(_schema_at(model, location[:-1])))
        return not_supported(path, f"leave it out (known here: {', '.join(known_names)})")
    schema = _schema_at(model, location) or {
        "type": _TYPES.get(kind),
        "maxLength": error.get("ctx", {}).get("max_length"),
    }
    if kind == "missing":
        description = schema.get("description")
        return RequestError(
            path, f"{path} is missing" + (f": {description}" if description else ""), model.missing_code
        )
    if kind.endswith("_type") and location and _is_choice(location[-1]):
        schema = _schema_at(model, location[:-1])
    return RequestError(path, f"{path} is {show(error['input'])}; it must {_describe_valid_values(schema, kind)}")


_TYPES = {"int_type": "integer", "float_type": "number", "bool_type": "boolean", "string_type": "string"}
"""For fields that are not in the JSON schema."""


def _describe_valid_values(schema: Schema, kind: str) -> str:
    """The end of a message "it must ..."; `kind` is pydantic's name of the error."""
    values = cast("list[object]", schema.get("enum", [schema["const"]] if "const" in schema else []))
    if values:
        return f"be {values[0]!r}" if len(values) == 1 else f"be one of {', '.join(map(str, values))}"
    if kind == "finite_number":
        return "be finite"
    if kind.startswith(("greater_than", "less_than")):
        return _describe_range(schema)
    if kind == "string_unicode":
        return "be a string without halves of surrogate pairs"
    if kind.startswith("string_") and kind != "string_type" and "maxLength" in schema:
        least = f"{schema['minLength']} to" if "minLength" in schema else "at most"
        return f"be a string of {least} {schema['maxLength']} characters without NUL"
    return "be " + " or ".join(dict.fromkeys(_describe_type(option) for option in _options(schema)))


def _describe_range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low == -INT64_MAX:
        return "be an integer of at most 64 bits"
    if low is not None and high is not None:
        return f"lie between {low} and {high}"
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    return "be " + " and ".join(f"{word} {schema[name]}" for name, word in words.items() if name in schema)


def _describe_type(schema: Schema) -> str:
    if schema.get("type") != "array":
        words = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "a string"}
        return words.get(str(schema.get("type")), "an object")
    items = cast("Schema", schema.get("items", {}))
    noun = {"string": "strings", "integer": "integers", "number": "numbers"}.get(str(items.get("type")), "objects")
    low, high = schema.get("minItems"), schema.get("maxItems")
    if high is None:
        return f"a list of {noun}{', at least one' if low else ''}"
    return f"a list of {low} to {high} {noun}" if low else f"a list of at most {high} {noun}"


def _schema_at(model: type[Body], path: Sequence[int | str]) -> Schema:
    """The JSON schema of the field at this path of a body; negative numbers choose among alternatives."""
    schemas = json_schemas(model)
    schema = schemas[model.__name__.removesuffix("Body")]
    for part in path:
        options = _options(schema)
        if isinstance(part, str):
            inside = _properties(options[0]).get(part, options[0].get("additionalProperties"))
        else:
            inside = options[-1 - part] if part < 0 else options[0].get("items")
        schema = cast("Schema", inside if isinstance(inside, dict) else {})
        if len(options := _options(schema)) == 1:
            ref_name = str(options[0].get("$ref", "")).rpartition("/")[2]
            schema = options[0] | schemas.get(ref_name, {})
    return schema


def _options(schema: Schema) -> list[Schema]:
    """The alternatives of a schema, without null."""
    options = cast("list[Schema]", schema.get("anyOf") or schema.get("oneOf") or [schema])
    non_null = [option for option in options if option.get("type") != "null"]
    return _options(non_null[0]) if len(non_null) == 1 and non_null[0] is not schema else non_null


@cache
def json_schemas(model: type[Body]) -> dict[str, Schema]:
    """The JSON schemas of a body and of its nested objects, by name."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas: dict[str, Schema] = {**schema.pop("$defs", {}), model.__name__: schema}
    return {name.removesuffix("Body"): cast("Schema", _clean_schema(schema)) for name, schema in schemas.items()}


def _clean_schema(schema: object) -> object:
    """The schema without pydantic's additions, and with null allowed in optional fields."""
    if isinstance(schema, list):
        return [_clean_schema(inner_schema) for inner_schema in schema]
    if not isinstance(schema, dict):
        return schema.removesuffix("Body") if isinstance(schema, str) else schema
    cleaned = {
        name: _clean_schema(inner_schema)
        for name, inner_schema in schema.items()
        if name not in ("title", "pattern", "default")
    }
    if isinstance(properties := schema.get("properties"), dict):
        required = schema.get("required", [])
        inner = {name: cast("Schema", _clean_schema(inner_schema)) for name, inner_schema in properties.items()}
        cleaned["properties"] = {
            name: inner_schema
            if name in required or {"type": "null"} in cast("list[Schema]", inner_schema.get("anyOf", []))
            else {"anyOf": [inner_schema, {"type": "null"}]}
            for name, inner_schema in inner.items()
        }
        cleaned["required"] = required
        cleaned.pop("description", None)
        cleaned.pop("additionalProperties", None)
    return cleaned


def _properties(schema: Schema) -> Mapping[str, Schema]:
    return cast("Mapping[str, Schema]", schema.get("properties", {}))


def read_object(body: bytes) -> dict[str, Any]:
    """The body as one JSON object."""
    containers = body.count(b"{") + body.count(b"[")  # an upper bound: some may be in strings
    if containers > MAX_CONTAINERS:
        raise UserError(f"the body holds more than {MAX_CONTAINERS} lists and objects; send less data per request")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UserError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"the body must be a JSON object, not {show(value)}")
    if containers > MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: dict[str, object]) -> None:
    """Iterates level by level, since recursion could be too deep."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for container in level for child in _children(container) if isinstance(child, dict | list)]
        if not level:
            return
    raise UserError(f"the body is nested more than {MAX_DEPTH} levels deep")


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def text_values(metadata: Mapping[str, object] | None) -> dict[str, str] | None:
    """Metadata as the SDK reads it, with values other than strings as JSON."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else orjson.dumps(value).decode() for key, value in metadata.items()}


def iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")


def parse_time(name: str, text: str) -> float:
    """Seconds since the epoch of a time with a zone. Raises a UserError that names the field."""
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is not None:
            return time.timestamp()
    except (ValueError, OverflowError):
        pass
    raise UserError(f"{name} is {show(text)}; it must be a time with a zone, like 2026-07-13T00:00:00Z")
