"""Custom losses, traced by the SDK itself, and random inputs for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson
import tinker
import torch
import torch.nn.functional as F
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, trace_loss

from tinsmith.types import CustomLoss
from tinsmith.wire.custom_loss import create_custom_loss_of
from tinsmith.wire.fields import read_object

Loss = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]


def weighted(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/loss:sum": loss, "custom/length:mean": weights.sum()}


def preference(logprobs, chosen, reference, beta):
    """DPO on one datum with both answers; the sign of `chosen` distinguishes them."""
    ratio = logprobs - reference
    margin = beta * ((ratio * (chosen > 0)).sum() - (ratio * (chosen < 0)).sum())
    return -F.logsigmoid(margin), {"custom/margin:mean": margin, "custom/accuracy:mean": (margin > 0).float()}


def divergence(logprobs, reference, weights):
    away = reference - logprobs
    k3 = away.exp() - 1 - away
    mask = weights != 0
    mean = (k3 * mask).sum() / mask.sum().clamp(min=1)
    return mean, {"custom/kl:mean": mean.detach()}


def entropy_weighted(logprobs, weights):
    p = logprobs.exp()
    entropy = -(p * logprobs)
    loss = -(torch.where(weights > 0, logprobs * entropy.detach(), 0.1 * entropy)).mean()
    return loss, {"custom/entropy:sum": entropy.sum()}


def clipped(logprobs, reference, weights):
    ratio = torch.exp(logprobs - reference)
    bounded = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * weights, bounded * weights).sum()
    clips = ((ratio - 1).abs() > 0.2).float().mean()
    return loss, {"custom/clips:mean": clips}


def sequence_ratio(logprobs, reference, weights):
    count = logprobs.shape[0]
    mean = (logprobs - reference).sum() / count
    loss = -(mean.exp() * weights).sum() / math.sqrt(count)
    loss += 0.01 * logprobs.pow(2).mean()
    return loss, {"custom/length:mean": weights.new_ones(count).sum()}


def pairwise(logprobs, weights):
    differences = logprobs.unsqueeze(1) - logprobs[None, :]
    better = (weights.unsqueeze(1) > weights.unsqueeze(0)).to(torch.float32)
    loss = (F.softplus(-differences) * better).sum() / (better.sum() + 1)
    return loss, {}


def smooth(logprobs, weights):
    steps = logprobs[1:] - logprobs[:-1]
    ordered, indices = torch.sort(logprobs * weights, descending=True)
    tail = torch.cumsum(ordered, dim=0)[-1]
    best = logprobs.max(dim=0)
    loss = steps.square().sum() + 0.1 * tail - best.values + indices[0] * 0.0
    return loss, {"custom/deep/name.x-1:sum": steps.abs().max()}


def grouped(logprobs, groups, weights):
    sums = weights.new_zeros(4).scatter_add(0, groups, logprobs)
    weighted_logprobs = logprobs[weights > 0]
    chosen = logprobs.gather(0, groups)
    return sums.logsumexp(0) - weighted_logprobs.sum() + chosen.std(), {"custom/num_weighted:sum": (weights > 0).sum()}


def top_k(logprobs, teacher):
    q = torch.softmax(teacher, dim=-1)
    student = torch.log_softmax(logprobs, dim=-1)
    loss = F.kl_div(student, q, reduction="sum") + 0.1 * (q * (q.log() - logprobs)).sum(dim=1).mean()
    best = logprobs.topk(1, dim=-1)
    return loss, {"custom/best:mean": best[0].mean(), "custom/rows:sum": logprobs.sum(-1).norm()}


LOSSES: dict[str, tuple[Loss, dict[str, int]]] = {
    "weighted": (weighted, {"logprobs": 1, "weights": 1}),
    "preference": (preference, {"logprobs": 1, "chosen": 1, "reference": 1, "beta": 0}),
    "divergence": (divergence, {"logprobs": 1, "reference": 1, "weights": 1}),
    "entropy_weighted": (entropy_weighted, {"logprobs": 1, "weights": 1}),
    "clipped": (clipped, {"logprobs": 1, "reference": 1, "weights": 1}),
    "sequence_ratio": (sequence_ratio, {"logprobs": 1, "reference": 1, "weights": 1}),
    "pairwise": (pairwise, {"logprobs": 1, "weights": 1}),
    "smooth": (smooth, {"logprobs": 1, "weights": 1}),
    "grouped": (grouped, {"logprobs": 1, "groups": 1, "weights": 1}),
    "top_k": (top_k, {"logprobs": 2, "teacher": 2}),
}


def trace(fn: Loss, ranks: Mapping[str, int]) -> LossHandle:
    return trace_loss(fn, ranks, "s")  # type: ignore[arg-type]


def parse_as_server(handle: LossHandle) -> CustomLoss:
    """The loss as the server receives it."""
    return create_custom_loss_of(read_object(orjson.dumps(request(handle)))).loss


def request(handle: LossHandle, **changes: object) -> dict[str, Any]:
    graph = encode_graph(handle).model_dump()
    inputs = [{"name": loss_input.name, "rank": loss_input.rank} for loss_input in handle.inputs]
    return {"name": handle.name, "inputs": inputs, "graph": graph, **changes}


def in_client(handle: LossHandle) -> LossHandle:
    """The same loss, computed by the SDK in the client."""
    return dataclasses.replace(handle, loss_id=None)


def datum(
    rng: np.random.Generator, length: int, vocab_size: int, ranks: Mapping[str, int], width: int = 3
) -> tinker.Datum:
    """Random tokens with every input that the loss reads."""
    tokens = rng.integers(0, vocab_size, length)
    shape = (length, width) if ranks["logprobs"] == 2 else (length,)
    inputs: dict[str, Any] = {"target_tokens": torch.from_numpy(rng.integers(1, vocab_size, shape))}
    for name, rank in ranks.items():
        if name == "groups":
            inputs[name] = torch.from_numpy(rng.integers(0, min(4, length), length))
        elif name == "reference":
            inputs[name] = torch.from_numpy(rng.normal(-5, 1, length).astype(np.float32))
        elif name != "logprobs":
            size = ((), (length,), (length, width))[rank]
            inputs[name] = torch.from_numpy(np.asarray(rng.normal(size=size), np.float32))
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=inputs)
