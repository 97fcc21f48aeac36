"""create_custom_loss: the JSON of a traced loss, or its stored definition -> `types.CustomLoss`.

Parses the syntax only: one-key objects become references, constants, slices. `loss_graphs` checks the contents of a
graph. The stored definition is the request's inputs and graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import orjson
from pydantic import Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from tinsmith.errors import UserError
from tinsmith.types import CustomLoss, LossArgument, LossInput, LossNode, NodeRef, SliceArgument, TorchConstant
from tinsmith.wire.fields import NO_NUL, Body, Integer, OneOf, Position, Text, read_object, show, validate

GRAPH_FORMAT = 1
MAX_DEPTH = 8
"""Limit of an argument's nesting: a slice in a tuple in a tuple has depth 3."""

OPS = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")
CONSTANT_KINDS = ("dtype", "device", "layout", "memory_format")
NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@dataclass(frozen=True, slots=True)
class CreateCustomLoss:
    """The request; `definition` is its stored part."""

    loss: CustomLoss
    definition: bytes


class CustomLossInputBody(Body):
    name: Text
    rank: Annotated[Integer, Field(json_schema_extra={"minimum": 0, "maximum": 2})]


class CustomLossNodeBody(Body):
    op: Annotated[Text, WithJsonSchema({"enum": [*OPS]})]
    name: Text
    target: Text
    args: SkipJsonSchema[list[Any]] = Field(default_factory=list)
    kwargs: SkipJsonSchema[dict[str, Any]] = Field(default_factory=dict)


class CustomLossGraphBody(Body):
    nodes: Annotated[
        list[CustomLossNodeBody],
        Field(
            fail_fast=True,
            description="args (a list) and kwargs (an object) hold encoded values; see docs/losses.md",
        ),
    ]
    format: Annotated[int, OneOf((GRAPH_FORMAT,))] = GRAPH_FORMAT


class CustomLossRequest(Body):
    """The stored part of a request to create a custom loss."""

    inputs: Annotated[list[CustomLossInputBody], Field(fail_fast=True)]
    graph: CustomLossGraphBody
    name: Annotated[str, Field(max_length=128, pattern=NO_NUL)] = ""


class NewCustomLossRequest(Body):
    session_id: Text
    custom_loss_seq_id: Position


class CreateCustomLossRequest(NewCustomLossRequest, CustomLossRequest):
    pass


def create_custom_loss_of(values: Mapping[str, object]) -> CreateCustomLoss:
    loss = _custom_loss(validate(CustomLossRequest, values))
    return CreateCustomLoss(loss, orjson.dumps({name: values.get(name) for name in ("name", "inputs", "graph")}))


@lru_cache(maxsize=256)
def read_definition(definition: bytes) -> CustomLoss:
    return _custom_loss(validate(CustomLossRequest, read_object(definition)))


def _custom_loss(request: CustomLossRequest) -> CustomLoss:
    return CustomLoss(
        name=request.name,
        inputs=tuple(LossInput(loss_input.name, loss_input.rank) for loss_input in request.inputs),
        nodes=tuple(_node(node, f"graph.nodes[{index}]") for index, node in enumerate(request.graph.nodes)),
    )


def _node(node: CustomLossNodeBody, path: str) -> LossNode:
    return LossNode(
        op=node.op,
        name=node.name,
        target=node.target,
        args=tuple(_list(node.args, path, 0)),
        kwargs=_dict(node.kwargs, path, 0),
    )


def _argument(value: object, path: str, depth: int) -> LossArgument:
    if depth > MAX_DEPTH:
        raise UserError(f"{path} has an argument nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return _list(value, path, depth)
    if isinstance(value, dict) and len(value) == 1:
        [(kind, inner)] = value.items()
        argument = _decode(kind, inner, path, depth)
        if argument is not None:
            return argument
    raise UserError(f"{path} has the argument {show(value)}, which is not an encoded value")


def _decode(kind: str, inner: object, path: str, depth: int) -> LossArgument:
    """Decode the value of a one-key object; None for unknown kinds."""
    if kind == "ref" and isinstance(inner, str):
        return NodeRef(inner)
    if kind == "tuple" and isinstance(inner, list):
        return tuple(_list(inner, path, depth))
    if kind == "dict" and isinstance(inner, dict):
        return _dict(inner, path, depth)
    if kind == "slice" and isinstance(inner, list) and len(inner) == 3:
        return SliceArgument(*_list(inner, path, depth))
    if kind == "ellipsis" and inner is True:
        return ...
    if kind == "float" and isinstance(inner, str) and inner in NON_FINITE:
        return NON_FINITE[inner]
    if kind in CONSTANT_KINDS and isinstance(inner, str):
        return TorchConstant(kind, inner)
    return None


def _list(values: Sequence[object], path: str, depth: int) -> list[LossArgument]:
    return [_argument(value, path, depth + 1) for value in values]


def _dict(values: Mapping[str, object], path: str, depth: int) -> dict[str, LossArgument]:
    return {key: _argument(value, path, depth + 1) for key, value in values.items()}
