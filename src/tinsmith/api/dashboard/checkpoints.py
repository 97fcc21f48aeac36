"""The dashboard's checkpoints, searched or one: with the metrics that their runs had when they were saved.

A checkpoint has the number of optimizer steps before it. Its metrics are the newest of the server and of the client at
that step or before it. A checkpoint without that number, of an earlier release, has those that were recorded before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from tinsmith.api.declaration import operation
from tinsmith.api.openapi import LIST, fields, listing, ref
from tinsmith.api.queries import Limit, PageQuery
from tinsmith.api.request import Call, JsonObject
from tinsmith.api.routes.checkpoints import describe_checkpoint, ref_of
from tinsmith.errors import NotFoundError
from tinsmith.store.checkpoints import Checkpoint
from tinsmith.store.curves import SERVER, Point
from tinsmith.store.run_health import REWARDS
from tinsmith.wire.fields import NO_NUL

MAX_SEARCH = 200
METRIC_CHOICES = (
    REWARDS,
    ("loss_per_token", "loss_per_datum", "train_mean_nll", "loss"),
    ("test/nll", "eval/loss", "val_loss", "forward/loss_per_token"),
    ("entropy", "optim/entropy"),
    ("ppo_kl:mean", "kl_sample_train_v2", "optim/kl_sample_train_v2"),
    ("grad_norm",),
)
"""A list has one metric of each group: the first name that the run has."""


class CheckpointListQuery(PageQuery):
    """`search` has words, `run_id` a run."""

    limit: Limit = 50
    search: Annotated[str, Field(max_length=MAX_SEARCH, pattern=NO_NUL)] = ""
    run_id: Annotated[str, Field(max_length=MAX_SEARCH, pattern=NO_NUL)] | None = None


@listing(
    "/dashboard/checkpoints",
    "Search checkpoints, with their metrics",
    answer=fields({"checkpoints": LIST, "cursor": ref("Cursor")}),
    query=CheckpointListQuery,
    filters=("?run_id={model_id}", "?search={model_id}"),
)
def list_checkpoints(call: Call, query: CheckpointListQuery) -> JsonObject:
    words = query.search.split()
    checkpoints, total = call.services.checkpoints.page_of_words(
        call.tenant_id, words, query.run_id, query.limit, query.offset
    )
    return {
        "checkpoints": _describe_all(call, checkpoints),
        "cursor": {"offset": query.offset, "limit": query.limit, "total_count": total},
    }


@operation(
    "GET",
    "/dashboard/checkpoints/{run_id}/{kind}/{name}",
    "Read a checkpoint",
    answer=ref("Checkpoint"),
    errors=(404, 410),
)
def read_checkpoint(call: Call) -> JsonObject:
    """Only the tenant's own, since its page changes it."""
    checkpoint = call.services.checkpoints.get(call.tenant_id, ref_of(call))
    if checkpoint.tenant_id != call.tenant_id:
        raise NotFoundError(f"checkpoint {checkpoint.ref.path!r} does not exist")
    return _describe_all(call, [checkpoint])[0]


def _describe_all(call: Call, checkpoints: Sequence[Checkpoint]) -> list[JsonObject]:
    saves = [(checkpoint.training_run_id, checkpoint.step, checkpoint.created_at) for checkpoint in checkpoints]
    points_by_save = call.services.curves.points_of_saves(saves)
    return [_describe(checkpoint, points) for checkpoint, points in zip(checkpoints, points_by_save, strict=True)]


def _describe(checkpoint: Checkpoint, points: Sequence[Point]) -> JsonObject:
    """A checkpoint with its step and metrics. Client and server may use one name; the client's value counts."""
    step = checkpoint.step
    if step is None:
        step = next((point.step for point in points if point.source == SERVER), None)
    values = {name: value for point in reversed(points) for name, value in point.metrics.items()}
    names = [next((name for name in names if name in values), None) for names in METRIC_CHOICES]
    metrics = {name: values[name] for name in names if name is not None}
    return describe_checkpoint(checkpoint) | {"step": step, "metrics": metrics}
