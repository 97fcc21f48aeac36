"""The base model on one rank: all of it, some of its layers, a tensor-parallel shard of every layer, some of the routed
experts, or a shard of each layer that is gathered from the other ranks when the layer runs.

Each rank in turn loads the complete model on the host, records the outputs and gradients of probe tokens with random
adapters, and shards the model there, so a device never holds more than its shard. Once all ranks have their shards, the
same tokens must give the same results, or the model is refused: a plan that does not suit a family is detected at
start. With context parallelism alone a rank loads the complete model on its device, and the ranks compare their rows of
the probe tokens.

Layers of a sharded model run as modules; fused layers need complete weights.

Shapes: T rows, D hidden size, V vocabulary, P elements of an adapter.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tinsmith.backends import run_to_end
from tinsmith.backends.distributed.collectives import Ranks
from tinsmith.backends.distributed.context_parallel import ContextParallel, RowShard
from tinsmith.backends.distributed.expert_parallel import (
    TokenExchange,
    check_experts,
    shard_experts,
)
from tinsmith.backends.distributed.pipeline_parallel import (
    Schedule,
    Stage,
    StageRows,
    check_stages,
    drop_parameters,
    find_layers,
    find_stage_layers,
    record_boundaries,
)
from tinsmith.backends.distributed.placement import list_regions
from tinsmith.backends.distributed.tensor_parallel import (
    COLUMN,
    GATHERED_COLUMN,
    ROW,
    SPLIT_ROW,
    ColumnLinear,
    GatheredColumnLinear,
    GatheredLinear,
    RowLinear,
    ShardedAdapter,
    Sharding,
    SharedInput,
    SplitRowLinear,
    find_sharding_styles,
    full_gradient,
)
from tinsmith.backends.torch.adapters import Adapter, Layout, Target, select_held
from tinsmith.backends.torch.attention import AttentionPlan, AttentionProbe, PackedCausal
from tinsmith.backends.torch.batch import Example, MicroBatch
from tinsmith.backends.torch.host import upload
from tinsmith.backends.torch.lora import MultiLoRALinear
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.servable import raise_settings_errors
from tinsmith.backends.torch.transformer import Decoder
from tinsmith.backends.torch.vision import ImageRows
from tinsmith.errors import RanksLostError, SettingsError
from tinsmith.plan.architecture import read_config, read_stored_dtype
from tinsmith.plan.memory import choose_dtype
from tinsmith.types import F32, I64, LoraSpec, ModelShape

log = structlog.get_logger()

PROBE_LENGTHS, PROBE_ADAPTER_RANKS = (7, 5), (4, 2)

COLUMN_LINEARS = {COLUMN: ColumnLinear, GATHERED_COLUMN: GatheredColumnLinear}
ROW_LINEARS = {ROW: RowLinear, SPLIT_ROW: SplitRowLinear}


def load_base(shape: ModelShape, ranks: Ranks, *, dtype: str, recompute: str, quantize: str) -> BaseModel:
    """This rank's base model. Raises SettingsError if it cannot be served with these degrees."""
    on_cuda = ranks.device.type == "cuda"
    stored = read_stored_dtype(read_config(Path(shape.path) / "config.json"))
    dtype = choose_dtype(dtype, cuda=on_cuda, stored=stored)
    if not ranks.degrees.sharded and ranks.degrees.context == 1:
        base = BaseModel.load(shape, device=str(ranks.device), dtype=dtype, recompute=recompute, quantize=quantize)
        base.pin_threads()
        return base
    if quantize != "off" and ranks.degrees.shard_base:
        raise SettingsError(
            f"quantize is {quantize!r}, and shard_base gathers whole weights; divide the codes with tensor_parallel, "
            "pipeline_parallel or expert_parallel, or set quantize to 'off'"
        )
    device = "cpu" if ranks.degrees.sharded else str(ranks.device)
    base = ShardedBase.load(shape, device=device, dtype=dtype, recompute=recompute, quantize=quantize)
    assert isinstance(base, ShardedBase)
    with raise_settings_errors(shape):
        base.shard(ranks)
    return base


class ShardedBase(BaseModel):
    """Use `load`, then `shard`, on one rank after the other; then `compare`, on all ranks together."""

    _ranks: Ranks | None = None
    _expected: list[Tensor]
    sharding: Sharding | None = None
    exchange: TokenExchange | None = None
    """None without expert parallelism."""
    stage: Stage | None = None
    _adaptable: list[Target] | None = None
    """Targets of the unsharded model."""
    module_names: list[str]
    """Of the unsharded model."""

    @property
    def can_capture(self) -> bool:
        """False: each call waits for other ranks, or for a layer's weights."""
        return False

    @property
    def num_bytes(self) -> int:
        if self._ranks is not None and not self._ranks.degrees.sharded:
            return super().num_bytes
        return sum(tensor.nbytes for tensor in self.frozen_tensors()) + self.copied_bytes

    def frozen_tensors(self) -> list[Tensor]:
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in super().frozen_tensors()]

    def adaptable_targets(self) -> list[Target]:
        """Those of the unsharded model, in its order, of which this rank holds the matrices of its experts."""
        if self._adaptable is None:
            return super().adaptable_targets()
        if self.exchange is None:
            return self._adaptable
        local_experts = self.local_experts
        return [target.hold(local_experts.get(target.name, range(0))) for target in self._adaptable]

    @property
    def local_experts(self) -> dict[str, range]:
        """This rank's experts by target; empty without expert parallelism."""
        targets = [target for module in self.experts for target in module.targets]
        return {
            target.name: target.experts.local
            for target in targets
            if target.experts is not None and target.experts.local is not None
        }

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        plan: AttentionPlan,
        lora_batch: LoRABatch,
        output_rows: Sequence[int] | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        if self._ranks is not None and torch.is_grad_enabled():
            # A layer that is recomputed in backward repeats its collectives, so either all ranks of a forward
            # recompute or none.
            self.recompute.active = self._ranks.any_of_forward(self.recompute.active)
        if self.stage is None:
            return super().hidden(tokens_T, positions_T, plan, lora_batch, output_rows, images)
        forward = partial(super().hidden, tokens_T, positions_T, plan, lora_batch, output_rows)
        return self.stage.run(forward, len(tokens_T), is_probe=isinstance(plan, AttentionProbe))

    def logits(self, hidden_TD: Tensor, lora_batch: LoRABatch) -> Tensor:
        if self.stage is None or self.stage.is_last:
            return super().logits(hidden_TD, lora_batch)
        return torch.zeros(len(hidden_TD), self.vocab_size, device=self.device)  # the last stage's logits are used

    def idle(self, *, train: bool) -> None:
        """Take part in the collectives of a forward, and backward, without rows."""
        hidden_TD = self.idle_hidden(train=train)
        if train:
            hidden_TD.backward(torch.zeros_like(hidden_TD))

    def idle_hidden(self, *, train: bool) -> Tensor:
        """[1, D] of one token of the base model, in place of rows."""
        token_T = torch.zeros(1, dtype=torch.int64, device=self.device)
        with torch.set_grad_enabled(train):
            return self.hidden(token_T, token_T, PackedCausal([1], self.device), LoRABatch.of_base(1))

    def adapter(self, spec: LoraSpec, layout: Layout, flat_P: Tensor) -> Adapter:
        if self.sharding is None:
            return Adapter(spec, layout, flat_P, self.dtype)
        return ShardedAdapter(spec, layout, flat_P, self.dtype, self.sharding)

    def _check_training(self) -> None:
        """Only modules can be sharded."""
        self._fused = None

    def shard(self, ranks: Ranks) -> None:
        """Drop everything but this rank's shard and move it to the rank's device."""
        self.pin_threads()
        self.module_names = [name for name, _ in self.model.named_modules()]
        self._expected = self._probe(None)
        self._adaptable = self.adaptable_targets()
        if not ranks.degrees.sharded:
            self._fused = Decoder.of(self._decoder, self.unembedding)
            super()._check_training()
        if ranks.degrees.experts > 1:
            check_experts(self.experts, ranks, self.shape.name)
        if ranks.degrees.pipeline > 1:
            self._keep_stage(ranks)
        if ranks.degrees.experts > 1:
            self.exchange = TokenExchange(ranks)
            self.experts[:] = shard_experts(self.experts, self._decoder, self._context, self.exchange)
        if ranks.degrees.tensor > 1:
            self._shard_linears(ranks)
        if ranks.degrees.group_size > 1:
            names = None if self.stage is None else self._stage_target_names()
            self.sharding = Sharding(self.targets, ranks, names)
        if ranks.degrees.shard_base:
            self._shard_layers(ranks)
        cast(nn.Module, self.model).to(ranks.device)
        for codes in self.list_codes():
            codes.move_(ranks.device)
        self.device = ranks.device
        if ranks.degrees.sharded:  # until here it was on the host
            self.swapped = self._swap_kernels()
        self.recompute.count(self._decoder, ranks.degrees.context)
        self._ranks = ranks

    def compare(self) -> None:
        """Raises SettingsError on every rank if the shards do not reproduce the unsharded model on one rank."""
        assert self._ranks is not None
        if self.stage is not None:
            self._check_stages(self._ranks)
        try:
            results = self._probe(self._ranks)
        except (SettingsError, RanksLostError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise SettingsError(
                f"{self.shape.name} ({self.shape.arch}) cannot be sharded: {type(error).__name__}: {error}"
            ) from error
        whole_gradients = zip(PROBE_ADAPTER_RANKS, self._expected, strict=False)
        self._expected[: len(PROBE_ADAPTER_RANKS)] = [
            select_held(Layout.of(rank, self.adaptable_targets()), gradient_P) for rank, gradient_P in whole_gradients
        ]
        error = max(
            self.measure_error(actual.cpu(), expected)
            for actual, expected in zip(results, self._expected, strict=False)
        )
        self._expected = []
        worst = max(cast("list[float]", self._ranks.gather(error)), key=lambda value: value if value == value else 1e9)
        if not worst < self.tolerance:
            raise SettingsError(
                f"{self.shape.name} ({self.shape.arch}) cannot be sharded: its hidden states, logits or gradients "
                f"differ from the whole model's by {worst:.2g} (relative); set tensor_parallel, context_parallel "
                "and pipeline_parallel to 1"
            )
        log.info("the sharded model agrees with the whole one", largest_error=worst, rank=self._ranks.rank)

    def _keep_stage(self, ranks: Ranks) -> None:
        """Drop the layers of other stages; drop the embeddings except on the first stage, the unembedding except on the
        last."""
        name, config = type(self.model).__name__, self.model.config.get_text_config()
        check_stages(name, config, ranks.degrees.pipeline)
        token_T = torch.zeros(2, dtype=torch.int64)
        probe = partial(self.forward_modules, token_T, torch.arange(2), AttentionProbe(), LoRABatch.of_base(2))
        layers, embeddings = find_layers(self._decoder, name), self.model.get_input_embeddings()
        boundaries = record_boundaries(layers, probe, 2, name)
        embedding_elements = cast(Tensor, embeddings.weight).numel()
        stage_layers = find_stage_layers(layers, embedding_elements, self.unembedding.weight.numel(), ranks)
        self.stage = Stage(layers, stage_layers, ranks, boundaries)
        if not self.stage.is_first:
            drop_parameters(embeddings)
            embeddings.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # some families ask for its device
            width = cast(int, embeddings.embedding_dim)
            embeddings.forward = lambda ids: torch.zeros(*ids.shape, width, dtype=self.dtype, device=ids.device)
        if not self.stage.is_last:
            drop_parameters(self.unembedding)
        remaining = set(self.model.modules())
        self.targets = {name: linear for name, linear in self.targets.items() if linear in remaining}
        self.experts = [module for module in self.experts if module in remaining]
        self.mixers = [mixer for mixer in self.mixers if mixer.layer in stage_layers]

    def _check_stages(self, ranks: Ranks) -> None:
        """Run each stage without the others, which would wait for a stage that fails between messages."""
        token_T, local_problem = torch.zeros(1, dtype=torch.int64, device=self.device), None
        try:
            self.hidden(token_T, token_T, AttentionProbe(), LoRABatch.of_base(1))
        except Exception as error:  # noqa: BLE001  raised below, on all ranks
            local_problem = f"{type(error).__name__}: {error}"
        if problem := next((problem for problem in ranks.gather(local_problem) if problem is not None), None):
            raise SettingsError(f"{self.shape.name} ({self.shape.arch}) cannot be split into stages: {problem}")

    def _stage_target_names(self) -> frozenset[str]:
        """The names of the targets in this rank's layers."""
        assert self.stage is not None
        linears = [linear for linear in self.targets.values() if linear is not self.unembedding or self.stage.is_last]
        return frozenset(target.name for module in (*linears, *self.experts) for target in module.targets)

    def _shard_linears(self, ranks: Ranks) -> None:
        degree, decoder = ranks.degrees.tensor, self._decoder
        if self.experts and self.exchange is None:
            raise SettingsError(
                f"tensor_parallel is {degree}, and the experts of {type(self.model).__name__} cannot be split; set "
                f"expert_parallel to {degree} too, which spreads them over the devices"
            )
        if self.mixers:
            raise SettingsError(
                f"tensor_parallel is {degree}, and layers of {type(self.model).__name__} that keep a state cannot "
                "be split; use data_parallel, with shard_base where the model does not fit on one device"
            )
        styles = find_sharding_styles(self.shape.name, self.model.config.get_text_config(), decoder, degree)
        readers: dict[str, list[str]] = {}
        for path, style in styles.items():
            if style in COLUMN_LINEARS:
                readers.setdefault(path.rpartition(".")[0], []).append(path)
        shared_inputs = {parent: SharedInput(len(paths), ranks) for parent, paths in readers.items()}
        for path, style in styles.items():
            parent, _, attribute = path.rpartition(".")
            linear = decoder.get_submodule(path)
            if type(linear) is not MultiLoRALinear:
                raise SettingsError(f"{self.shape.name}: {path} carries no adapters and cannot be sharded")
            if style in COLUMN_LINEARS:
                shard = COLUMN_LINEARS[style](linear, self._context, ranks, shared_inputs[parent])
            else:
                shard = ROW_LINEARS[style](linear, self._context, ranks)
            setattr(decoder.get_submodule(parent), attribute, shard)
            self.targets[linear.name] = shard
        if self.vocab_size % degree == 0 and (self.stage is None or self.stage.is_last):
            linear = self.unembedding
            self.unembedding = self.targets[linear.name] = GatheredLinear(linear, self._context, ranks)
            self.model.set_output_embeddings(self.unembedding)

    def _shard_layers(self, ranks: Ranks) -> None:
        """Shard each layer over the data and context ranks, except for embeddings, last norm and unembedding."""
        layers = [module for module in self._decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise SettingsError(
                f"shard_base is on, and {type(self.model).__name__} does not mark which of its modules are layers"
            )
        # FSDP warns about in-place changes to a layer's output; there are none here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        mesh = ranks.replica_mesh
        expert_parameters = {parameter for module in self.experts if self.exchange for parameter in module.parameters()}
        for layer in layers:
            fully_shard(layer, mesh=mesh, ignored_params=expert_parameters)
        layer_parameter_ids = {id(parameter) for layer in layers for parameter in layer.parameters()}
        other_parameters = {
            parameter for parameter in self._decoder.parameters() if id(parameter) not in layer_parameter_ids
        }
        fully_shard(self._decoder, mesh=mesh, ignored_params=other_parameters | expert_parameters)
        # A layer's weights are gathered for backward when its output's gradient arrives, which must happen on all
        # ranks, with or without adapters.
        self.model.get_input_embeddings().register_forward_hook(_require_gradient)
        sharded = [cast(FSDPModule, module) for module in (*layers, self._decoder)]
        self._decoder.register_forward_hook(lambda *_: _clear_forward_order(sharded))  # runs after FSDP's hook

    def _probe(self, ranks: Ranks | None) -> list[Tensor]:
        """Run a forward and a backward over random tokens of two sequences, each with a random adapter. Returns the
        gradients of what this rank holds of the adapters, and on the last stage hidden states [T, D] and logits [T, V];
        with `ranks`, complete over all of them.
        """
        generator = torch.Generator().manual_seed(0)
        adapters = [self._random_adapter(rank, generator) for rank in PROBE_ADAPTER_RANKS]
        num_rows = sum(PROBE_LENGTHS)
        tokens_T = torch.randint(0, self.shape.vocab_size, (num_rows,), generator=generator).numpy()
        grad_TV = torch.randn(num_rows, self.vocab_size, generator=generator).numpy()
        batch = _probe_batch(tokens_T, adapters)
        plan: AttentionPlan = PackedCausal(batch.lengths, self.device)
        if ranks is not None and ranks.degrees.context > 1:
            batch = RowShard.of(batch, ranks)
            plan, grad_TV = ContextParallel(batch, ranks), batch.slice_rows(grad_TV)
        if self.exchange is not None:
            self.exchange.adapters = adapters
        gradients, results = self._run_probe(batch, plan, adapters, grad_TV)
        if ranks is not None:
            gradients = [
                self._sum_probe_gradient(adapter.layout, gradient_P, ranks)
                for adapter, gradient_P in zip(adapters, gradients, strict=True)
            ]
            if isinstance(batch, RowShard):
                results = [batch.gather_rows(x, ranks) for x in results]
        return [*gradients, *results]

    def _random_adapter(self, rank: int, generator: torch.Generator) -> Adapter:
        layout = Layout.of(rank, self.adaptable_targets())
        whole_P = torch.randn(layout.whole.numel, generator=generator).mul_(0.02)
        return self.adapter(LoraSpec(rank), layout, select_held(layout, whole_P).to(self.device))

    def _run_probe(
        self, batch: MicroBatch, plan: AttentionPlan, adapters: Sequence[Adapter], grad_TV: F32
    ) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's gradients of the adapters, and on the last stage its hidden states and logits, for the gradient
        `grad_TV` of the logits.
        """
        buffers: list[Tensor] = []
        results: list[Tensor] = []

        def forward(_index: int) -> Tensor:
            rows_T, positions_T = (upload(x, self.device) for x in (batch.tokens_T, batch.positions_T))
            with torch.enable_grad():
                return self.hidden(rows_T, positions_T, plan, batch.lora_batch)

        @torch.no_grad()
        def head(_index: int, hidden_TD: Tensor) -> Tensor:
            logits_grad_TV = upload(grad_TV, self.device).to(hidden_TD.dtype)
            adapter_groups = self.unembedding.groups(batch.lora_batch)
            logits_TV, a_outputs = self.unembedding.forward_rows(hidden_TD, adapter_groups, torch.float32)
            results.extend((hidden_TD, logits_TV))
            grad_TD = self.unembedding.backward_rows(
                logits_grad_TV, hidden_TD, adapter_groups, a_outputs, need_input=True
            )
            assert grad_TD is not None
            return grad_TD

        try:
            buffers += [adapter.open_gradients() for adapter in adapters]
            if self.stage is not None:
                run_to_end(Schedule(self.stage, [StageRows(len(batch.tokens_T), True)], forward, head).run())
            else:
                hidden_TD = forward(0)
                hidden_TD.backward(head(0, hidden_TD.detach()))
        finally:
            for adapter in adapters:
                adapter.close_gradients()
        gradients = [full_gradient(adapter, buffer_P) for adapter, buffer_P in zip(adapters, buffers, strict=True)]
        return gradients, results

    def _sum_probe_gradient(self, layout: Layout, gradient_P: Tensor, ranks: Ranks) -> Tensor:
        if self.exchange is not None:
            # With expert parallelism a rank's gradient is of all data ranks' rows, which are equal here.
            for start, stop, holders in list_regions(layout, ranks.degrees, ranks.rank):
                gradient_P[start:stop] = ranks.sum_holders(gradient_P[start:stop], holders)
            return gradient_P.div_(ranks.degrees.data)
        return ranks.sum_context(ranks.sum_sampling(gradient_P))


def _probe_batch(tokens_T: I64, adapters: Sequence[Adapter]) -> MicroBatch:
    examples, start = [], 0
    for index, (length, adapter) in enumerate(zip(PROBE_LENGTHS, adapters, strict=True)):
        tokens_N = tokens_T[start : (start := start + length)]
        examples.append(Example(index, 0, adapter, tokens_N.astype(np.int32), (length,), tokens_N, {}))
    return MicroBatch(tuple(examples))


def _require_gradient(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _clear_forward_order(sharded: Sequence[FSDPModule]) -> None:
    """Clear FSDP's record of the layers of a forward, which the next backward gathers in reverse. Without a backward
    the record would grow with every sampled token, and the next backward would gather layers that it does not need.
    """
    if torch.is_grad_enabled():
        return
    for module in sharded:
        state = module._get_fsdp_state()
        state._comm_ctx.post_forward_order.clear()
        for group in state._fsdp_param_groups:
            group._post_forward_indices.clear()
