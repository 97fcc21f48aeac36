"""The base model as one rank holds it: all of it, its tensor rank's share of every layer, or a part of each layer that
is gathered from the other data ranks when the layer runs.

A parted model is loaded whole on the host, by one rank after the other, and every rank records the outputs and
gradients of some probe tokens, with random adapters. It is divided on the host too: a device never holds more than its
share. Once all ranks have their share, the same tokens must give the same, or the model is refused: a plan that does
not suit a family is found at start.

Layers of a parted model run as modules; the decoder that is written out expects whole weights.

Shapes: T rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import cast

import structlog
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tinsmith.backends.distributed.ranks import Ranks
from tinsmith.backends.distributed.tensor_parallel import (
    COLUMN,
    GATHERED_COLUMN,
    ROW,
    SPLIT_ROW,
    ColumnLinear,
    Entrance,
    GatheredColumnLinear,
    GatheredLinear,
    PartedAdapter,
    PartedLinear,
    Parting,
    RowLinear,
    SplitRowLinear,
    divided,
    whole_gradient,
)
from tinsmith.backends.torch.adapters import Adapter, Layout, Target
from tinsmith.backends.torch.attention import AttentionPlan, PackedCausal
from tinsmith.backends.torch.lora import MultiLoRALinear
from tinsmith.backends.torch.lora_ops import Routing
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.servable import refusing
from tinsmith.backends.torch.vision import ImageRows
from tinsmith.errors import RanksLostError, SettingsError
from tinsmith.types import LoraSpec, ModelShape

log = structlog.get_logger()

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far, relatively, the divided model may be from the whole one, which was on another device perhaps."""

PROBE_LENGTHS = (7, 5)

COLUMNS = {COLUMN: ColumnLinear, GATHERED_COLUMN: GatheredColumnLinear}
ROWS = {ROW: RowLinear, SPLIT_ROW: SplitRowLinear}


def load_base(shape: ModelShape, ranks: Ranks, *, dtype: str, recompute: str, quantize: str) -> BaseModel:
    """This rank's base model. Raises SettingsError if it cannot be served by these degrees."""
    on_cuda = ranks.device.type == "cuda"
    if dtype == "auto":
        dtype = "bfloat16" if on_cuda else "float32"
    if not ranks.degrees.parted:
        base = BaseModel.load(shape, device=str(ranks.device), dtype=dtype, recompute=recompute, quantize=quantize)
        base.pin_threads()
        return base
    if quantize != "off":
        raise SettingsError(
            f"quantize is {quantize!r}, and codes cannot be divided: leave tensor_parallel at 1 and shard_base off, or "
            "quantize at 'off'"
        )
    base = PartedBase.load(shape, device="cpu", dtype=dtype, recompute=recompute)
    assert isinstance(base, PartedBase)
    with refusing(shape):
        base.divide(ranks)
    return base


class PartedBase(BaseModel):
    """Use `load`, then `divide`, each rank by itself; then `compare`, all together."""

    _ranks: Ranks | None = None
    _expected: list[Tensor]
    parting: Parting | None = None

    @property
    def num_bytes(self) -> int:
        tensors = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors.values())

    def adaptable(self) -> list[Target]:
        owned = ((own.whole,) if isinstance(own, PartedLinear) else own.adapted for own in self.targets.values())
        return [
            *(target for targets in owned for target in targets),
            *(target for module in self.experts for target in module.targets),
        ]

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        plan: AttentionPlan,
        routing: Routing,
        wanted: Sequence[int] | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        if self._ranks is not None and torch.is_grad_enabled():
            # A layer that runs again in backward sums over ranks again: all of a tensor group, or none.
            self.recompute.active = self._ranks.any_of_tensor(self.recompute.active)
        return super().hidden(tokens_T, positions_T, plan, routing, wanted, images)

    def idle(self, *, train: bool) -> None:
        """Take part in everyone's forward, and backward, without rows of one's own."""
        token_T = torch.zeros(1, dtype=torch.int64, device=self.device)
        with torch.set_grad_enabled(train):
            hidden_TD = self.hidden(token_T, token_T, PackedCausal([1], self.device), Routing.of([None], [1]))
        if train:
            hidden_TD.backward(torch.zeros_like(hidden_TD))

    def adapter(self, spec: LoraSpec, layout: Layout, flat_P: Tensor) -> Adapter:
        if self.parting is None:
            return Adapter(spec, layout, flat_P, self.dtype)
        return PartedAdapter(spec, layout, flat_P, self.dtype, self.parting)

    def _check_training(self) -> None:
        """Only modules can be divided."""
        self._written_out = None

    def divide(self, ranks: Ranks) -> None:
        """Keep this rank's share, on its device."""
        self.pin_threads()
        self._expected = self._probe(None)
        if ranks.degrees.tensor > 1:
            self._divide_linears(ranks)
            self.parting = Parting(self.targets, ranks)
        if ranks.degrees.shard_base:
            self._shard_layers(ranks)
        cast(nn.Module, self.model).to(ranks.device)
        self.device = ranks.device
        self.recompute.count(self._decoder)
        self._ranks = ranks

    def compare(self) -> None:
        """Raises SettingsError on every rank if the shares do not make up the whole on one of them."""
        assert self._ranks is not None
        try:
            found = self._probe(self._ranks)
        except (SettingsError, RanksLostError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise SettingsError(
                f"{self.shape.name} ({self.shape.arch}) cannot be divided: {type(error).__name__}: {error}"
            ) from error
        error = max(
            float((ours.cpu().float() - whole.float()).norm() / whole.float().norm().clamp_min(1e-6))
            for ours, whole in zip(found, self._expected, strict=True)
        )
        self._expected = []
        worst = max(cast("list[float]", self._ranks.gather(error)), key=lambda each: each if each == each else 1e9)
        if not worst < TOLERANCE[self.dtype]:
            raise SettingsError(
                f"{self.shape.name} ({self.shape.arch}) cannot be divided: its hidden states, logits or gradients "
                f"differ from the whole model's by {worst:.2g} (relative); set tensor_parallel to 1"
            )
        log.info("the divided model agrees with the whole one", largest_error=worst, rank=self._ranks.rank)

    def _divide_linears(self, ranks: Ranks) -> None:
        degree, decoder = ranks.degrees.tensor, self._decoder
        if self.experts:
            raise SettingsError(
                f"tensor_parallel is {degree}, and the experts of {type(self.model).__name__} are not divided; use "
                "data_parallel with shard_base, which keeps a part of them on each device"
            )
        if self.mixers:
            raise SettingsError(
                f"tensor_parallel is {degree}, and layers of {type(self.model).__name__} that keep a state are not "
                "divided; use data_parallel, with shard_base where the model does not fit on one device"
            )
        kinds = divided(self.shape.name, self.model.config.get_text_config(), decoder, degree)
        readers: dict[str, list[str]] = {}
        for path, kind in kinds.items():
            if kind in COLUMNS:
                readers.setdefault(path.rpartition(".")[0], []).append(path)
        entrances = {parent: Entrance(len(paths), ranks) for parent, paths in readers.items()}
        for path, kind in kinds.items():
            parent, _, last = path.rpartition(".")
            own = decoder.get_submodule(path)
            if type(own) is not MultiLoRALinear:
                raise SettingsError(f"{self.shape.name}: {path} carries no adapters, and cannot be divided here")
            if kind in COLUMNS:
                part = COLUMNS[kind](own, self._switchboard, ranks, entrances[parent])
            else:
                part = ROWS[kind](own, self._switchboard, ranks)
            setattr(decoder.get_submodule(parent), last, part)
            self.targets[own.name] = part
        if self.vocab_size % degree == 0:
            own = self.unembedding
            self.unembedding = self.targets[own.name] = GatheredLinear(own, self._switchboard, ranks)
            self.model.set_output_embeddings(self.unembedding)

    def _shard_layers(self, ranks: Ranks) -> None:
        """A part of each layer on each data rank. Embeddings, the last norm and the unembedding stay whole."""
        layers = [module for module in self._decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise SettingsError(
                f"shard_base is on, and {type(self.model).__name__} does not say which of its modules are layers"
            )
        # It warns of changes in place to what a layer returns; nothing here makes any.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        mesh = ranks.data_mesh
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
        outside = {parameter for parameter in self._decoder.parameters() if id(parameter) not in inside}
        fully_shard(self._decoder, mesh=mesh, ignored_params=outside)
        # A layer's weights are gathered for backward when its output's gradient comes. It must come on all ranks alike,
        # whichever adapters their rows have, and none.
        self.model.get_input_embeddings().register_forward_hook(_ask_for_gradient)

    def _probe(self, ranks: Ranks | None) -> list[Tensor]:
        """What some tokens give with two adapters at random: hidden states, logits, the gradients of these."""
        generator = torch.Generator().manual_seed(0)
        adapters, buffers = [], []
        for rank in (4, 2):
            layout = Layout.of(rank, self.adaptable())
            flat_P = torch.randn(layout.numel, generator=generator).mul_(0.02).to(self.device)
            adapters.append(self.adapter(LoraSpec(rank), layout, flat_P))
        num_rows = sum(PROBE_LENGTHS)
        tokens_T = torch.randint(0, self.shape.vocab_size, (num_rows,), generator=generator).to(self.device)
        positions_T = torch.cat([torch.arange(n, device=self.device) for n in PROBE_LENGTHS])
        routing = Routing.of(adapters, PROBE_LENGTHS)
        try:
            buffers += [adapter.open_gradients() for adapter in adapters]
            with torch.enable_grad():
                hidden_TD = self.hidden(tokens_T, positions_T, PackedCausal(PROBE_LENGTHS, self.device), routing)
            grad_TV = torch.randn(num_rows, self.vocab_size, generator=generator).to(hidden_TD)
            with torch.no_grad():
                work = self.unembedding.work(routing)
                states_TD = hidden_TD.detach()
                logits_TV, inner = self.unembedding.forward_rows(states_TD, work, torch.float32)
                grad_TD = self.unembedding.backward_rows(grad_TV, states_TD, work, inner, need_input=True)
            hidden_TD.backward(grad_TD)
        finally:
            for adapter in adapters:
                adapter.gradients = None
        gradients = [whole_gradient(adapter, buffer_P) for adapter, buffer_P in zip(adapters, buffers, strict=True)]
        if ranks is not None:
            gradients = [ranks.sum_tensor(gradient_P) for gradient_P in gradients]
        return [states_TD, logits_TV, *gradients]


def _ask_for_gradient(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
