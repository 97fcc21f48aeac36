"""create_custom_loss: the JSON of a traced loss -> `ops.CustomLoss`, and the stored definition -> the same.

Only the form is read here: one-key objects become references, constants, slices. What a graph may contain,
`loss_graphs` says. The definition that is stored is the request's own inputs and graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import orjson

from tinsmith.errors import UserError
from tinsmith.types import CustomLoss, LossArgument, LossInput, LossNode, NodeRef, SliceArgument, TorchConstant
from tinsmith.wire.fields import Fields, read_object, show

GRAPH_FORMAT = 1
MAX_DEPTH = 8
"""Nesting of an argument: a slice in a tuple in a tuple is 3."""

CONSTANT_KINDS = ("dtype", "device", "layout", "memory_format")
NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@dataclass(frozen=True, slots=True)
class CreateCustomLoss:
    """The request; `definition` is what is stored of it."""

    loss: CustomLoss
    definition: bytes


def create_custom_loss_of(fields: Fields) -> CreateCustomLoss:
    definition = {name: fields.values.get(name) for name in ("name", "inputs", "graph")}
    return CreateCustomLoss(_custom_loss(fields), orjson.dumps(definition))


@lru_cache(maxsize=256)
def read_definition(definition: bytes) -> CustomLoss:
    return _custom_loss(read_object(definition))


def _custom_loss(fields: Fields) -> CustomLoss:
    graph = fields.fields("graph")
    if graph.integer_or("format", GRAPH_FORMAT) != GRAPH_FORMAT:
        raise UserError(f"graph.format is {show(graph.values['format'])}; this server reads format {GRAPH_FORMAT}")
    return CustomLoss(
        name=fields.text_or("name", "", max_length=128),
        inputs=tuple(LossInput(each.text("name"), each.integer("rank")) for each in _objects(fields, "inputs")),
        nodes=tuple(_node(each) for each in _objects(graph, "nodes")),
    )


def _objects(fields: Fields, name: str) -> list[Fields]:
    values = fields.values.get(name)
    if not isinstance(values, list):
        raise UserError(f"{fields.path(name)} is {show(values)}; it must be a list of objects")
    found = []
    for index, value in enumerate(values):
        where = f"{fields.path(name)}[{index}]"
        if not isinstance(value, dict):
            raise UserError(f"{where} is {show(value)}; it must be an object")
        found.append(Fields(value, f"{where}."))
    return found


def _node(fields: Fields) -> LossNode:
    where = fields.where.removesuffix(".")
    args = fields.values.get("args", [])
    kwargs = fields.values.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise UserError(f"{where}: args must be a list, and kwargs an object")
    return LossNode(
        op=fields.text("op"),
        name=fields.text("name"),
        target=fields.text("target"),
        args=tuple(_list(args, where, 0)),
        kwargs=_dict(kwargs, where, 0),
    )


def _argument(value: object, where: str, depth: int) -> LossArgument:
    if depth > MAX_DEPTH:
        raise UserError(f"{where} has an argument nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return _list(value, where, depth)
    if isinstance(value, dict) and len(value) == 1:
        [(kind, inner)] = value.items()
        found = _encoded(kind, inner, where, depth)
        if found is not None:
            return found
    raise UserError(f"{where} has the argument {show(value)}, which is no encoded value")


def _encoded(kind: str, inner: object, where: str, depth: int) -> LossArgument:
    """A one-key object; None if it is none that we know."""
    if kind == "ref" and isinstance(inner, str):
        return NodeRef(inner)
    if kind == "tuple" and isinstance(inner, list):
        return tuple(_list(inner, where, depth))
    if kind == "dict" and isinstance(inner, dict):
        return _dict(inner, where, depth)
    if kind == "slice" and isinstance(inner, list) and len(inner) == 3:
        return SliceArgument(*_list(inner, where, depth))
    if kind == "ellipsis" and inner is True:
        return ...
    if kind == "float" and isinstance(inner, str) and inner in NON_FINITE:
        return NON_FINITE[inner]
    if kind in CONSTANT_KINDS and isinstance(inner, str):
        return TorchConstant(kind, inner)
    return None


def _list(values: Sequence[object], where: str, depth: int) -> list[LossArgument]:
    return [_argument(value, where, depth + 1) for value in values]


def _dict(values: Mapping[str, object], where: str, depth: int) -> dict[str, LossArgument]:
    return {key: _argument(value, where, depth + 1) for key, value in values.items()}
