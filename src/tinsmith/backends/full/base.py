"""Training of all weights: the model's weights as one flat float32 buffer, and the base, sampler and trainer for them.

`FullWeights` is used where an adapter is (`TrainedModel`, the trainer, the sampler), but adds no matmul: `FullBase`
binds it to the model's parameters before a forward, so `compute` is empty. On disk such a model is a directory that
`transformers` loads: `model.safetensors` holds float32 under the model's own names, tied weights once;
`optimizer.safetensors` and `gradient.safetensors` name each tensor after its parameter.

`FullSampler` is continuous batching where each version is a complete model: it runs requests of one version at a time.
A request waits, in order of arrival, until the versions of earlier requests have been sampled; a request for the
running version joins only if no other waits before it.

`FullTrainer` is the packed step of `backends.torch.trainer` with three differences: a micro-batch belongs to one model,
whose weights are bound for it; backward adds to the gradients of the parameters; and the unembedding, whose logits are
computed in chunks, gets its own gradient chunk by chunk.

Shapes: P elements of the flat buffer, C rows of a chunk, V vocabulary, D hidden size.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tinsmith.backends.torch.adapters import ALIGN, Adapter, TrainedModel
from tinsmith.backends.torch.attention import ATTENTION_NAME, PackedCausal
from tinsmith.backends.torch.batch import Example, MicroBatch
from tinsmith.backends.torch.checkpoint import read_tensors, write_tensors
from tinsmith.backends.torch.lora_batch import AdapterGroup, LoRABatch
from tinsmith.backends.torch.loss import Head, LossSpec
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.packing import pack
from tinsmith.backends.torch.trainer import Trainer
from tinsmith.backends.torch.vision import Vision
from tinsmith.errors import SettingsError, UserError
from tinsmith.plan.architecture import decoder_of
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.samplers.local.request import Sequence as RequestSequence
from tinsmith.types import F32, LoraSpec, ModelShape, SampleResult

FULL_SPEC = LoraSpec(rank=0)
"""The spec of a model whose weights are all trained: adapters never have rank 0."""


@dataclass(frozen=True, eq=False)
class FullLayout:
    """The position of each parameter in the flat buffer. Gaps are always zero. A tied weight is stored once."""

    shapes: dict[str, tuple[int, ...]]
    starts: tuple[int, ...]
    numel: int

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, nn.Parameter]]) -> FullLayout:
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        sizes = (-(-math.prod(shape) // ALIGN) * ALIGN for shape in shapes.values())
        *starts, end = accumulate(sizes, initial=0)
        return cls(shapes, tuple(starts), end)

    def views(self, flat_P: Tensor) -> dict[str, Tensor]:
        return {
            name: flat_P[start : start + math.prod(shape)].view(shape)
            for start, (name, shape) in zip(self.starts, self.shapes.items(), strict=True)
        }

    def fill_buffer(self, tensors: dict[str, Tensor], device: torch.device) -> Tensor:
        """A flat buffer with these tensors, which must be those of the layout."""
        flat_P = torch.zeros(self.numel, device=device)
        for name, view in self.views(flat_P).items():
            view.copy_(tensors[name])
        return flat_P


class FullWeights(Adapter):
    """`weights` and `parameter_gradients` map a parameter's name to a view."""

    weights: dict[str, Tensor]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, layout: FullLayout, flat_P: Tensor) -> None:
        self.spec = FULL_SPEC
        self.layout = layout  # pyright: ignore[reportAttributeAccessIssue, reportIncompatibleVariableOverride]
        self.scale = 1.0
        self.flat_P = flat_P
        self.compute_P = flat_P
        self.version = 0
        self._make_views()
        self.gradients = None
        self.parameter_gradients: dict[str, Tensor] | None = None

    def _make_views(self) -> None:
        self.weights = cast(FullLayout, self.layout).views(self.flat_P)
        self.compute = {}
        self.delta_matrices = {}

    def open_gradients(self) -> Tensor:
        gradient_P = torch.zeros_like(self.flat_P)
        self.parameter_gradients = cast(FullLayout, self.layout).views(gradient_P)
        return gradient_P

    def close_gradients(self) -> None:
        self.parameter_gradients = None

    def snapshot(self) -> FullWeights:
        return self.clone()

    def clone(self) -> FullWeights:
        return FullWeights(self.layout, self.flat_P.clone())  # pyright: ignore[reportArgumentType]


TOLERANCE = 1e-3
"""The largest relative error of gradients under packed attention against those of the model's eager attention."""


class FullBase(BaseModel):
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        shape: ModelShape,
        recompute: str = "auto",
        quantize: str = "off",
        vision: Vision | None = None,
    ) -> None:
        super().__init__(model, tokenizer, shape, recompute, quantize, vision)
        self._fused = None
        if self.experts:
            raise SettingsError(f"{shape.name} is a mixture of experts; backend 'full' trains dense models only")
        self._parameters = dict(model.named_parameters())
        self.layout = FullLayout.of(self._parameters.items())
        tensors = {name: parameter.data for name, parameter in self._parameters.items()}
        self.original = FullWeights(self.layout, self.layout.fill_buffer(tensors, self.device))
        self._bound: FullWeights | None = None
        self.bind(self.original)

    def bind(self, weights: FullWeights) -> None:
        """Make the model compute with these weights."""
        if self._bound is weights:
            return
        for name, parameter in self._parameters.items():
            parameter.data = weights.weights[name]
        self._bound = weights

    def rebind(self) -> None:
        """Bind the original weights, because the buffers of the bound ones have moved."""
        self._bound = None
        self.bind(self.original)

    def frozen_tensors(self) -> list[Tensor]:
        return list(self.model.buffers())

    @contextmanager
    def training(self, gradients: dict[str, Tensor]) -> Iterator[None]:
        """Within the block, backward adds to these buffers."""
        try:
            for name, parameter in self._parameters.items():
                parameter.requires_grad_(True)
                parameter.grad = gradients[name]
            yield
        finally:
            for parameter in self._parameters.values():
                parameter.grad = None
                parameter.requires_grad_(False)

    def _check_training(self) -> None:
        """Raises SettingsError unless packed rows give the gradients of the model's eager attention."""
        buffers = [torch.zeros(self.layout.numel, device=self.device) for _ in range(2)]
        tokens_T = torch.arange(9, device=self.device) * 7 % self.shape.vocab_size
        positions_T = torch.arange(9, device=self.device)
        with self.training(self.layout.views(buffers[0])), torch.enable_grad():
            plan = PackedCausal([9], self.device)
            hidden_TD = self.hidden(tokens_T, positions_T, plan, LoRABatch.of_base(9))
            grad_TD = torch.cos(torch.arange(hidden_TD.numel(), device=self.device)).view_as(hidden_TD)
            hidden_TD.backward(grad_TD)
        self.model.set_attn_implementation("eager")
        with self.training(self.layout.views(buffers[1])), torch.enable_grad():
            decoder_of(self.model)(input_ids=tokens_T[None], use_cache=False).last_hidden_state[0].backward(grad_TD)
        self.model.set_attn_implementation(ATTENTION_NAME)
        error = float((buffers[0] - buffers[1]).norm() / buffers[1].norm().clamp_min(1e-12))
        if not error < TOLERANCE:
            raise SettingsError(
                f"{type(self.model).__name__} cannot be trained in full: gradients under packed attention differ from "
                f"its own by {error:.2g} (relative)"
            )


WEIGHTS_FILE = "model.safetensors"


def save_weights(weights: FullWeights, directory: Path) -> None:
    write_tensors({name: view.cpu() for name, view in weights.weights.items()}, directory / WEIGHTS_FILE)


def save_config_and_tokenizer(base: BaseModel, directory: Path) -> None:
    """Write the configuration and tokenizer, so that other software can load the directory as a model."""
    config = copy.deepcopy(base.model.config)
    config.dtype = torch.float32
    config.save_pretrained(directory)
    base.tokenizer.save_pretrained(directory)


def load_weights(layout: FullLayout, directory: Path, device: torch.device) -> FullWeights:
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(
            f"there is no {WEIGHTS_FILE}: this is an adapter, and this server trains all weights (backend 'full')"
        )
    tensors = read_tensors(path)
    if mismatches := sorted(tensors.keys() ^ layout.shapes.keys()):
        raise UserError(f"{WEIGHTS_FILE} is for another model: {mismatches[0]!r} is in only one of the two")
    _check_shapes(layout, tensors, path)
    return FullWeights(layout, layout.fill_buffer(tensors, device))


def name_tensors(trained: TrainedModel, flat_P: Tensor, kind: str) -> dict[str, Tensor]:
    """The parts of a flat buffer by parameter name and kind; a `checkpoint.NameTensors`."""
    views = cast(FullWeights, trained.adapter).layout.views(flat_P.cpu())
    return {f"{name}.{kind}": view for name, view in views.items()}


def flatten_tensors(trained: TrainedModel, tensors: Mapping[str, Tensor], kind: str, path: Path) -> Tensor:
    """A flat buffer of tensors by parameter name and kind; a `checkpoint.FlattenTensors`."""
    layout = cast(FullWeights, trained.adapter).layout
    parameters = {name: tensors[f"{name}.{kind}"] for name in layout.shapes if f"{name}.{kind}" in tensors}
    _check_shapes(layout, parameters, path)
    return layout.fill_buffer(parameters, trained.adapter.flat_P.device)


def _check_shapes(layout: FullLayout, tensors: dict[str, Tensor], path: Path) -> None:
    for name, shape in layout.shapes.items():
        actual = tuple(tensors[name].shape) if name in tensors else None
        if actual != shape:
            raise UserError(f"{path.name}: {name} must have {list(shape)}, not {actual and list(actual)}")


class FullSampler(LocalSampler):
    _base: FullBase

    def __init__(self, base: FullBase, versions: Mapping[str, Adapter], options: SamplerOptions) -> None:
        super().__init__(base, versions, options=options)
        self._waiting: deque[RequestSequence] = deque()
        self._active: Adapter | None = None

    def _admit(self, sequence: RequestSequence) -> None:
        self._waiting.append(sequence)

    def cancel(self, request_id: str) -> bool:
        self._waiting = deque(
            sequence for sequence in self._waiting if sequence.request.sample.request_id != request_id
        )
        return super().cancel(request_id)

    def pause(self, request_ids: Collection[str]) -> None:
        """Running requests finish: those of other weights wait for them."""

    def step(self, scopes: Collection[str] | None = None) -> list[tuple[str, SampleResult | UserError]]:
        if self._waiting and len(self._waiting) == len(self._requests):
            self._active = self._waiting[0].request.weights.adapter
        while self._waiting and self._waiting[0].request.weights.adapter is self._active:
            super()._admit(self._waiting.popleft())
        self._base.bind(self._active if isinstance(self._active, FullWeights) else self._base.original)
        return super().step(scopes)


class FullHead(Head):
    def _backward(
        self, grad_CV: Tensor, hidden_CD: Tensor, adapter_groups: Sequence[AdapterGroup], a_outputs: Sequence[Tensor]
    ) -> Tensor:
        unembedding = self._base.unembedding
        assert unembedding.weight.grad is not None
        unembedding.weight.grad.addmm_(grad_CV.t(), hidden_CD)
        if unembedding.bias is not None:
            assert unembedding.bias.grad is not None
            unembedding.bias.grad += grad_CV.sum(0)
        return super()._backward(grad_CV, hidden_CD, adapter_groups, a_outputs)


class FullTrainer(Trainer):
    _base: FullBase

    def __init__(self, base: FullBase, max_tokens: int, chunk_rows: int) -> None:
        super().__init__(base, max_tokens, chunk_rows)
        self._head = FullHead(base, chunk_rows)

    def _pack(self, examples: Sequence[Example]) -> list[MicroBatch]:
        examples_by_adapter: dict[int, list[Example]] = {}
        for example in examples:
            examples_by_adapter.setdefault(id(example.adapter), []).append(example)
        groups = [pack(members, self._limit, self._min_shared_rows) for members in examples_by_adapter.values()]
        return self._count_rows([batch for group in groups for batch in group])

    def _run_micro_batch(self, batch: MicroBatch, specs: Mapping[int, LossSpec], *, train: bool) -> F32:
        weights = batch.examples[0].adapter
        assert isinstance(weights, FullWeights)
        self._base.bind(weights)
        gradients = weights.parameter_gradients if train else None
        with nullcontext() if gradients is None else self._base.training(gradients):
            return super()._run_micro_batch(batch, specs, train=train)
