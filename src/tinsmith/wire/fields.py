"""JSON bodies: parsing, typed declarations of their fields, and errors that name a field by its full path.

A body is declared as a `Body`, a pydantic model in strict mode. `validate` makes one of a parsed object, `described`
gives its JSON schema for the OpenAPI document. A message reads "sampling_params.top_p is 'high'; it must be a number".
null and an absent field mean the same, since the SDK leaves out what is None. JSON's true is never taken for a 1.

`Fields` reads an object field by field. It serves bodies whose fields depend on each other: chats, and JSON passes.

Moments: seconds since the epoch here, RFC 3339 with a zone on the wire.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, cast

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, ValidationInfo
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import CoreSchema, core_schema

from tinsmith.errors import UserError

T = TypeVar("T")
B = TypeVar("B", bound="Body")
Schema = dict[str, object]

INT64_MAX = 2**63 - 1
MAX_TEXT = 4096
MAX_METADATA_BYTES = 65536
MAX_DEPTH = 64
"""Nesting of a JSON body. Whatever is read can be written again: orjson itself reads 1024 levels and writes 254."""

MAX_CONTAINERS = 2**18
"""Objects and lists of a JSON body. An empty one takes 3 bytes of it, and 60 of memory."""

SHOWN = 80  # characters of an offending value that a message repeats


def show(value: object) -> str:
    """A value as a message quotes it: short, on one line, ASCII. Never formats more of it than it shows."""
    # One character more than is shown, so that it is shown as cut.
    text = ascii(value[: SHOWN + 1]) if isinstance(value, str) else reprlib.repr(value)
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object. `x(name)` requires the field; `x_or(name, default)` answers the default without it."""

    values: Mapping[str, object]
    where: str = ""

    def path(self, name: str) -> str:
        return self.where + (name if len(name) <= SHOWN else show(name))

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def refuse_unknown(self, known: frozenset[str]) -> None:
        """Refuse unknown fields, except one at its empty value (null, 0, "", []), which asks for nothing."""
        for name in self.values.keys() - known:
            if self.values[name]:
                raise UserError(
                    f"{self.path(name)} is not supported by this server; leave it out (known here: "
                    f"{', '.join(sorted(known))})"
                )

    def integer(self, name: str) -> int:
        return self._required(name, self.integer_or(name, None))

    def integer_or(self, name: str, default: T) -> int | T:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "an integer")
        if not -INT64_MAX <= value <= INT64_MAX:
            raise self._wrong(name, "an integer of at most 64 bits")
        return value

    def number(self, name: str) -> float:
        return self._required(name, self.number_or(name, None))

    def number_or(self, name: str, default: T) -> float | T:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number")
        return float(value)

    def flag_or(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str) -> str:
        return self._required(name, self.text_or(name, None))

    def text_or(self, name: str, default: T, *, max_length: int = MAX_TEXT) -> str | T:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        if len(value) > max_length or "\x00" in value:
            raise self._wrong(name, f"a string of at most {max_length} characters without NUL")
        return value

    def texts_or_empty(self, name: str, *, max_items: int) -> list[str]:
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > max_items:
            raise self._wrong(name, f"a list of at most {max_items} strings")
        return [Fields({name: item}, self.where).text(name) for item in value]

    def fields(self, name: str) -> Fields:
        return self._required(name, self.fields_or(name, None))

    def fields_or(self, name: str, default: T) -> Fields | T:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Fields(value, f"{self.where}{name}.")

    def _required(self, name: str, value: T | None) -> T:
        if value is None:
            raise UserError(f"{self.path(name)} is missing")
        return value

    def _wrong(self, name: str, wanted: str) -> UserError:
        return UserError(f"{self.path(name)} is {show(self.values[name])}; it must be {wanted}")


class Body(BaseModel):
    """One JSON object of a request. Fields that are not declared are ignored, or refused where `closed` is true."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", hide_input_in_errors=True)
    closed: ClassVar[bool] = False


class ClosedBody(Body):
    """An object whose other fields are refused, except at an empty value (null, 0, "", []), which asks for nothing."""

    closed = True


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks a field that takes one of a few values."""

    values: Sequence[str | int]

    def __get_pydantic_core_schema__(self, _source: object, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self.values))


def _check_size(value: dict[str, T], info: ValidationInfo) -> dict[str, T]:
    size = len(orjson.dumps(value))
    if size > MAX_METADATA_BYTES:
        raise UserError(f"{info.field_name} is {size} bytes of JSON; at most {MAX_METADATA_BYTES} are kept")
    return value


def _check_texts(value: dict[str, Any], info: ValidationInfo) -> dict[str, str]:
    """Raises UserError unless all values are strings; null becomes the empty string."""
    inner = Fields(_check_size(value, info), f"{info.field_name}.")
    return {key: inner.text_or(key, "", max_length=MAX_METADATA_BYTES) for key in value}


def bounds(low: float, high: float) -> object:
    """The bounds of a number, for its schema: `admission` checks them, with what they depend on."""
    return Field(json_schema_extra={"minimum": low, "maximum": high})


NO_NUL = r"^[^\x00]*$"
Text = Annotated[str, Field(max_length=MAX_TEXT, pattern=NO_NUL)]
Integer = Annotated[int, Field(ge=-INT64_MAX, le=INT64_MAX)]
Position = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""A number that becomes part of an id."""
SequenceNumber = Annotated[int, Field(ge=1, le=2**62)]
"""Of a training request: 0 is the creation of its model."""
Metadata = Annotated[dict[str, Any], AfterValidator(_check_size), Field(description="at most 64 KiB of JSON")]
"""An object of the user's own."""
TextMetadata = Annotated[
    dict[str, Any],
    AfterValidator(_check_texts),
    Field(
        description="at most 64 KiB of JSON",
        json_schema_extra={"additionalProperties": cast("Any", {"type": "string"})},
    ),
]
"""The same with string values only, which is what the SDK can read back from a checkpoint."""
Unread = SkipJsonSchema[Any]
"""A field that is known and has no meaning, like the SDK's `type`. The OpenAPI document leaves it out."""


def validate(model: type[B], values: Mapping[str, object], where: str = "", *, closed: bool | None = None) -> B:
    """The object as a typed body; `where` is its path, with a dot at the end. `closed` replaces the model's own.

    Raises UserError that names the field, its value and what it must be.
    """
    _refuse_unknown(values, model, where, closed=model.closed if closed is None else closed)
    try:
        return model.__pydantic_validator__.validate_python(values)
    except ValidationError as error:
        nulls = [each["loc"] for each in _errors(error) if each["input"] is None and each["type"] != "missing"]
        if not nulls:
            raise _refusal(model, error, where) from None
    try:
        return model.__pydantic_validator__.validate_python(_without(values, nulls))
    except ValidationError as error:
        raise _refusal(model, error, where) from None


def _refuse_unknown(values: Mapping[str, object], model: type[Body], where: str, *, closed: bool) -> None:
    """Raises UserError for a field that the model, or a closed object inside it, does not have."""
    if closed:
        Fields(values, where).refuse_unknown(frozenset(model.__pydantic_fields__))
    for name, inner in _closed_objects(model):
        if isinstance(found := values.get(name), dict):
            _refuse_unknown(found, inner, f"{where}{name}.", closed=True)


@cache
def _closed_objects(model: type[Body]) -> list[tuple[str, type[Body]]]:
    """The fields whose objects are closed, too."""
    found: list[tuple[str, type[Body]]] = []
    for name, field in model.__pydantic_fields__.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        found += [(name, kind) for kind in kinds if isinstance(kind, type) and issubclass(kind, ClosedBody)]
    return found


def _errors(error: ValidationError) -> list[Any]:
    return error.errors(include_url=False, include_context=False)


def _without(values: Mapping[str, object], nulls: Sequence[tuple[int | str, ...]]) -> dict[str, object]:
    """The object without fields that are null, by their paths."""
    changed = dict(values)
    for path in nulls:
        at: Any = changed
        for part in path[:-1]:
            at[part] = at[part].copy()
            at = at[part]
        at.pop(path[-1], None) if isinstance(at, dict) else None
    return changed


def _refusal(model: type[Body], error: ValidationError, where: str) -> UserError:
    first = _errors(error)[0]
    path = where
    for part in first["loc"]:
        name = f"[{part}]" if isinstance(part, int) else part if len(part) <= SHOWN else show(part)
        path += name if isinstance(part, int) or not path or path.endswith(".") else f".{name}"
    if first["type"] == "missing":
        return UserError(f"{path} is missing")
    schema = _at(model, first["loc"])
    wanted = _wanted(schema, first["type"]) if schema else first["msg"].removeprefix("Input should ")
    return UserError(f"{path} is {show(first['input'])}; it must {wanted}")


def _wanted(schema: Schema, kind: str) -> str:
    """What the value of a field must be, in words; `kind` is pydantic's name of the error."""
    if "enum" in schema or "const" in schema:
        values = cast("list[object]", schema.get("enum", [schema.get("const")]))
        return f"be {values[0]!r}" if len(values) == 1 else f"be one of {', '.join(map(str, values))}"
    if kind in ("greater_than_equal", "less_than_equal") and schema.get("type") == "integer":
        if schema["minimum"] == -INT64_MAX:
            return "be an integer of at most 64 bits"
        return f"lie between {schema['minimum']} and {schema['maximum']}"
    if kind in ("greater_than_equal", "less_than_equal"):
        return f"be at least {schema['minimum']}" if kind.startswith("greater") else f"be at most {schema['maximum']}"
    if kind.startswith("string_") and kind != "string_type" and "maxLength" in schema:
        least = f"{schema['minLength']} to" if "minLength" in schema else "at most"
        return f"be a string of {least} {schema['maxLength']} characters without NUL"
    if schema.get("type") == "array":
        items = cast("Schema", schema.get("items", {}))
        of = {"string": "strings", "integer": "integers", "number": "numbers"}.get(str(items.get("type")), "objects")
        least = "at least one and " if schema.get("minItems") else ""
        return (
            f"be a list of {least}at most {schema['maxItems']} {of}" if "maxItems" in schema else f"be a list of {of}"
        )
    words = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "a string"}
    return "be " + words.get(str(schema.get("type")), "an object")


def _at(model: type[Body], path: Sequence[int | str]) -> Schema:
    """The schema of a field of a body."""
    shared = described(model)
    found = shared[model.__name__]
    for part in (None, *path):
        if part is not None:
            inside = found.get("items") if isinstance(part, int) else _properties(found).get(part)
            found = cast("Schema", inside or found.get("additionalProperties") or {})
        options = cast("list[Schema]", found.get("anyOf", []))
        found = next((each for each in options if each.get("type") != "null"), found)
        if isinstance(name := found.get("$ref"), str):
            found = shared[name.rpartition("/")[2]]
    return found


@cache
def described(model: type[Body]) -> dict[str, Schema]:
    """JSON schemas by name, of a body and of the objects inside it."""
    made = model.model_json_schema(ref_template="#/components/schemas/{model}")
    found: dict[str, Schema] = {**made.pop("$defs", {}), model.__name__: made}
    return {name.removesuffix("Body"): cast("Schema", _cleaned(schema)) for name, schema in found.items()}


def _cleaned(schema: object) -> object:
    """A schema without what pydantic adds; an optional field may also be null."""
    if isinstance(schema, list):
        return [_cleaned(each) for each in schema]
    if not isinstance(schema, dict):
        return schema.removesuffix("Body") if isinstance(schema, str) else schema
    cleaned = {name: _cleaned(each) for name, each in schema.items() if name not in ("title", "pattern", "default")}
    if isinstance(properties := schema.get("properties"), dict):
        required = schema.get("required", [])
        inner = {name: cast("Schema", _cleaned(each)) for name, each in properties.items()}
        cleaned["properties"] = {
            name: each
            if name in required or {"type": "null"} in cast("list[Schema]", each.get("anyOf", []))
            else _nullable(each)
            for name, each in inner.items()
        }
        cleaned["required"] = required
        cleaned.pop("description", None)
    return cleaned


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _properties(schema: Schema) -> Mapping[str, Schema]:
    return cast("Mapping[str, Schema]", schema.get("properties", {}))


def json_bytes(value: object) -> bytes:
    """A body as it is stored."""
    return orjson.dumps(value)


def read_object(body: bytes) -> Fields:
    """The body as one JSON object."""
    containers = body.count(b"{") + body.count(b"[")  # at most so many: some may be in strings
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
    return Fields(value)


def _check_depth(value: dict[str, object]) -> None:
    """Level by level, so that no depth is too much for this function itself."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for each in level for child in _children(each) if isinstance(child, dict | list)]
        if not level:
            return
    raise UserError(f"the body is nested more than {MAX_DEPTH} levels deep")


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def text_values(metadata: Mapping[str, object] | None) -> dict[str, str] | None:
    """Metadata as the SDK reads it back: whatever is not a string becomes its JSON text."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else orjson.dumps(value).decode() for key, value in metadata.items()}


def iso(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).isoformat().replace("+00:00", "Z")


def moment_of(name: str, text: str) -> float:
    """Seconds since the epoch of a moment with a zone. Raises UserError that names the field."""
    try:
        found = datetime.fromisoformat(text)
        if found.tzinfo is not None:
            return found.timestamp()
    except (ValueError, OverflowError):
        pass
    raise UserError(f"{name} is {show(text)}; it must be a moment with a zone, like 2026-07-13T00:00:00Z")
