"""Passes of many tenants as packed batches: every array that a micro-batch needs.

An `Example` is one datum with its adapter. A `MicroBatch` has the pairs of its examples, one example after the other,
and the rows of their tokens, of which examples that begin alike may share some. Uses numpy up to the tensors that a
device needs; knows no model and no formula.

Shapes: T rows (tokens) of a micro-batch, P pairs of (row, target): one per row, or K where a datum has K targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tinsmith import losses
from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.vision import ImageInput, InputSpan
from tinsmith.losses.formulas import SEQUENCE_COUNT
from tinsmith.plan.prefix_tree import Node, PrefixTree
from tinsmith.types import F32, I32, I64, Datum, Pass

Columns32 = Mapping[str, F32]

COLUMNS = ("weight", "old_logprob", "low", "high", "ratio_mask")
"""The columns that a loss may read of a pair, one float32 each; a loss ignores columns that it does not use."""

ADVANTAGE, SAMPLING_LOGPROB = "advantage", "sampling_logprob"
"""Columns of policy losses that only metrics read: advantages as sent, and logprobs of the policy that sampled."""


def extra_column(name: str) -> str:
    """The column of a plug-in's input."""
    return f"input {name}"


@dataclass(frozen=True)
class Example:
    """One datum, prepared for the device. `columns` hold one value per pair."""

    pass_index: int
    datum_index: int
    adapter: Adapter
    tokens_N: I32
    target_shape: tuple[int, ...]
    targets_P: I64
    columns: Columns32
    image_input: ImageInput | None = None  # of a datum with images

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_N)

    def column_P(self, name: str) -> F32:
        """Zeros if its loss does not have this column."""
        column_P = self.columns.get(name)
        return np.zeros(len(self.targets_P), np.float32) if column_P is None else column_P

    @cached_property
    def has_weight(self) -> bool:
        return bool(self.columns["weight"].any())


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one packed forward. Rows of one adapter are contiguous.

    The rows are those of the nodes of `tree`, whose sequences are the examples; None: nothing is shared.
    """

    examples: tuple[Example, ...]
    tree: PrefixTree | None = field(default=None, kw_only=True)

    @property
    def full_batch(self) -> MicroBatch:
        """The micro-batch that this is a part of, if its rows are split over ranks."""
        return self

    @cached_property
    def pairs(self) -> slice:
        """Which pairs of the full micro-batch these are."""
        return slice(None)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        tree = self.tree or PrefixTree.separate(example.num_tokens for example in self.examples)
        return tree.nodes

    @property
    def is_path(self) -> bool:
        """Whether the rows are those of one sequence, so that a smaller micro-batch is not possible."""
        return len(self.examples) == 1 or (self.tree is not None and self.tree.is_path)

    @property
    def single_pass(self) -> int | None:
        """The pass of the sequence that has all rows, if there is one: it cannot run where these rows do not fit."""
        return max(self.examples, key=lambda example: example.num_tokens).pass_index if self.is_path else None

    @cached_property
    def lengths(self) -> list[int]:
        """Rows of each node."""
        return [node.num_tokens for node in self.nodes]

    @cached_property
    def num_rows(self) -> int:
        return sum(self.lengths)

    @cached_property
    def tokens_T(self) -> I64:
        parts = [self.examples[node.sequence].tokens_N[node.start : node.stop] for node in self.nodes]
        return np.concatenate(parts).astype(np.int64)

    @cached_property
    def positions_T(self) -> I64:
        return np.concatenate([np.arange(node.start, node.stop) for node in self.nodes])

    @cached_property
    def input_spans(self) -> list[InputSpan]:
        examples = self.examples
        return [InputSpan(examples[node.sequence].image_input, node.start, node.stop) for node in self.nodes]

    @cached_property
    def visible_counts(self) -> list[I64 | None]:
        """The `visible_counts` argument of `PackedCausal`."""
        return [
            example.image_input.visible_counts(0, example.num_tokens) if example.image_input else None
            for example in self.examples
        ]

    @cached_property
    def has_images(self) -> bool:
        return any(example.image_input for example in self.examples)

    @cached_property
    def largest_image(self) -> int:
        """Tokens of the largest image; 0 without one."""
        image_inputs = (example.image_input for example in self.examples if example.image_input)
        return max((image.num_tokens for image_input in image_inputs for image in image_input.images), default=0)

    @cached_property
    def lora_batch(self) -> LoRABatch:
        return LoRABatch.of([self.examples[node.sequence].adapter for node in self.nodes], self.lengths)

    @cached_property
    def targets_P(self) -> I64:
        return np.concatenate([example.targets_P for example in self.examples])

    @cached_property
    def example_starts(self) -> I64:
        """First pair of each example, and the number of pairs."""
        return np.cumsum([0, *(len(example.targets_P) for example in self.examples)])

    @cached_property
    def row_P(self) -> I64:
        """The row of each pair; ascending unless examples share rows."""
        rows_C = np.arange(self.num_rows) if self.tree is None else self.tree.token_rows
        lengths = [example.num_tokens for example in self.examples]
        counts = [len(example.targets_P) // length for example, length in zip(self.examples, lengths, strict=True)]
        return np.repeat(rows_C, np.repeat(counts, lengths))

    @cached_property
    def example_P(self) -> I64:
        return np.repeat(np.arange(len(self.examples)), np.diff(self.example_starts))

    @cached_property
    def pass_P(self) -> I64:
        return np.array([example.pass_index for example in self.examples])[self.example_P]

    def expand_to_pairs(self, flags: Sequence[bool]) -> npt.NDArray[np.bool_]:
        """[P] The flag of each pair's example."""
        return np.array(flags, np.bool_)[self.example_P]

    def column_P(self, name: str) -> F32:
        return np.concatenate([example.column_P(name) for example in self.examples])

    def rows_of_pairs(self, chosen_P: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """[T] Whether a row has a chosen pair."""
        rows_T = np.zeros(len(self.tokens_T), np.bool_)
        rows_T[self.row_P[chosen_P]] = True
        return rows_T


def build_examples(
    request: Pass, pass_index: int, adapter: Adapter, image_inputs: Sequence[ImageInput | None] | None = None
) -> list[Example]:
    """The examples of a checked pass. Raises the errors of `losses.check_pass`. `image_inputs`: one entry per datum."""
    config = losses.resolve_config(request)
    examples = []
    for datum_index, datum in enumerate(request.data):
        targets = losses.dense(datum.inputs["target_tokens"])
        examples.append(
            Example(
                pass_index,
                datum_index,
                adapter,
                datum.tokens_N,
                targets.shape,
                np.asarray(targets, np.int64).reshape(-1),
                _columns(request, datum, config, targets.size),
                image_inputs[datum_index] if image_inputs else None,
            )
        )
    return examples


def _columns(request: Pass, datum: Datum, config: Mapping[str, float], num_pairs: int) -> Columns32:
    loss = losses.loss_registry()[request.loss_fn]
    columns = {
        # 1 where cross_entropy has no weights. A custom loss's weights are known only after its log probabilities:
        # until then every position may count.
        "weight": losses.input_weights(datum, loss).reshape(-1),
    }
    sources = {
        "old_logprob": ("logprobs", 0.0),
        "low": (losses.CLIP_LOW, config.get(losses.CLIP_LOW, 0.0)),
        "high": (losses.CLIP_HIGH, config.get(losses.CLIP_HIGH, 0.0)),
        "ratio_mask": (losses.RATIO_MASK, 1.0),
        **{extra_column(name): (name, loss.defaults.get(name, 0.0)) for name in loss.extra_inputs},
    }
    for column, (name, default) in sources.items():
        if name in datum.inputs and name in loss.inputs:
            columns[column] = losses.floats(datum.inputs[name]).reshape(-1)
        else:
            columns[column] = np.full(num_pairs, default, np.float32)
    if loss.is_policy:
        columns |= {ADVANTAGE: columns["weight"], SAMPLING_LOGPROB: columns["old_logprob"]}
    if loss.distribution and loss.sequence_ratio:
        count = np.count_nonzero(columns["ratio_mask"])
        columns[extra_column(SEQUENCE_COUNT)] = np.full(num_pairs, count, np.float32)
    if losses.ROLLOUT_LOGPROBS in loss.inputs and losses.ROLLOUT_LOGPROBS in datum.inputs:
        columns[SAMPLING_LOGPROB] = losses.floats(datum.inputs[losses.ROLLOUT_LOGPROBS]).reshape(-1)
        columns["weight"] = columns["weight"] * losses.rollout_weights(datum, config)
    return columns
