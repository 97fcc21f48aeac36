"""`TorchBackend`: the Backend protocol over one base model in this process.

Owns the models in training (`TrainedModel`, by model_id) and the published versions (`Adapter`, by version_id). A
version is immutable; publishing new weights replaces the object, and running samples keep the old one. Called from one
thread. Knows no SQL and no HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from tinsmith.backends import Capture, MicroBatches
from tinsmith.backends.torch import checkpoint, optim
from tinsmith.backends.torch.adapters import Adapter, Layout, TensorCopies, TrainedModel, initialise_weights, layout_for
from tinsmith.backends.torch.host import FrozenStores, SideStream
from tinsmith.backends.torch.matmul import set_precision
from tinsmith.backends.torch.memory import (
    ACTIVATIONS,
    BASE,
    IMAGES,
    MODELS,
    MODELS_SHARE,
    SAMPLING,
    VERSIONS,
    Division,
    Evictable,
    MemoryManager,
    StepMemory,
    divide,
    memory_errors,
    use_expandable_segments,
)
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.profiling import StepTraces, stage
from tinsmith.backends.torch.trainer import TREE_TOKENS, DeterministicTrainer, Trainer
from tinsmith.backends.torch.trial import try_device
from tinsmith.backends.torch.vision import Vision
from tinsmith.errors import SettingsError, UserError
from tinsmith.plan.memory import (
    BLOCKS_SHARE,
    MICRO_BATCH,
    STATES_PER_SEQUENCE,
    AdapterRegion,
    chunk_rows,
    training_bytes,
)
from tinsmith.plan.versions import list_mixer_libraries
from tinsmith.runtime.devices import count_unused_bytes, free_bytes, kind_of, read_memory, return_memory
from tinsmith.runtime.sizes import format_bytes
from tinsmith.types import LoraSpec, ModelShape, OptimParams, OptimStep, Pass
from tinsmith.wire.adapter_files import MAX_RANK

if TYPE_CHECKING:
    from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions

log = structlog.get_logger()

HOST = torch.device("cpu")

FITTING_TOKENS = (16_384, 8192, 4096)
"""Tokens of a micro-batch with CUDA and fused layers, unless chosen: the first whose activations may be kept. Small
models wait for the host, which takes as long for a micro-batch of any size; recomputing lengthens a step.
"""

MIN_RANK, MIN_TOKENS = 8, 256
"""The activations that a memory budget must leave space for, in training or in sampling."""


class TorchBackend:
    """Options come as text from settings.

    `max_tokens_per_microbatch` bounds activations: more packs better and needs more memory. `logits_chunk` bounds the
    rows whose float32 logits exist at once ('auto': suited to the device). `recompute` ('auto', 'on', 'off') saves
    activations for a third more compute. `deterministic` ('on', 'off') makes every bit of a result independent of the
    other requests in a batch. `quantize` (`quantization.KINDS`) stores the base in fewer bits. `memory_budget` is the
    total of device memory in bytes; with 0 each part has a bound of its own. `kv_cache_bytes`, `sampler_sequences` and
    `sampler_step_tokens` limit the sampler; 0 selects a default for the device. `offload` ('auto', 'on'): whether
    `sleep` moves memory, which it does for GPUs only unless this is 'on'. `profile`: the directory of traces, or empty.
    """

    def __init__(  # noqa: PLR0913 - one parameter per option
        self,
        shape: ModelShape,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_tokens_per_microbatch: int | str = "auto",
        logits_chunk: int | str = "auto",
        recompute: str = "auto",
        deterministic: str = "off",
        quantize: str = "off",
        memory_budget: int | str = 0,
        kv_cache_bytes: int | str = 0,
        sampler_sequences: int | str = 0,
        sampler_step_tokens: int | str = 0,
        offload: str = "auto",
        profile: str = "",
    ) -> None:
        if deterministic not in ("on", "off"):
            raise SettingsError(f"backend option deterministic is {deterministic!r}; choose 'on' or 'off'")
        if logits_chunk != "auto":
            logits_chunk = positive("logits_chunk", logits_chunk)
        set_precision()
        if device != "cpu":
            use_expandable_segments()
        self._sampler_limits = int(kv_cache_bytes), int(sampler_sequences), int(sampler_step_tokens)
        self._base = self._load_base(shape, device=device, dtype=dtype, recompute=recompute, quantize=quantize)
        is_auto = max_tokens_per_microbatch == "auto"
        if is_auto:
            max_tokens_per_microbatch = MICRO_BATCH[kind_of(self._base.device).has_kernels]
        max_tokens = positive("max_tokens_per_microbatch", max_tokens_per_microbatch)
        self._module_names = [name for name, _ in self._base.model.named_modules()]
        self._deterministic = deterministic == "on"
        if not isinstance(logits_chunk, int):
            logits_chunk = chunk_rows(self._base.vocab_size, cuda=kind_of(self._base.device).has_kernels)
        self._trainer = self._make_trainer(max_tokens, logits_chunk)
        self._traces = StepTraces(Path(profile) if profile else None)
        self._home = self._base.device
        """Where adapters are: on the host while this backend sleeps."""
        self._frozen: FrozenStores | None = None
        self._is_asleep = False
        self._offloads = offload == "on" or kind_of(self._home).pins_memory
        self._models: dict[str, TrainedModel] = {}
        self._versions: dict[str, Adapter] = {}
        self._sampler: LocalSampler | None = None
        self._model_budget_bytes = int(MODELS_SHARE * free_bytes(self._base.device))
        self._memory = self._open_memory(int(memory_budget), logits_chunk)
        if is_auto and not self._memory.is_limited:
            self._trainer.tree_sizes = TREE_TOKENS
        self._count_fused(is_auto=is_auto)
        self._log_kernels()
        if not kind_of(self._base.device).is_tested:
            try_device(self, str(self._base.device), shape.vocab_size)

    def _log_kernels(self) -> None:
        log.info("kernels", base_model=self._base.shape.name, **self.kernels())

    def _count_fused(self, *, is_auto: bool) -> None:
        """Count what fused layers keep as the plan does, on one device only: ranks keep other numbers of rows."""
        base, recompute = self._base, self._base.recompute
        if type(self._trainer) is not Trainer or not base.has_fused_layers or base.vision is not None:
            return
        recompute.activations, recompute.num_layers = self._step_memory.activations, base.num_fused_layers
        if is_auto and kind_of(base.device).has_kernels and not self._memory.is_limited and recompute.mode == "auto":
            largest, *smaller_sizes = FITTING_TOKENS
            self._trainer.use_fitting(
                [largest, *smaller_sizes] if recompute.fits(largest, base.device) else smaller_sizes
            )

    def _load_base(self, shape: ModelShape, *, device: str, dtype: str, recompute: str, quantize: str) -> BaseModel:
        return BaseModel.load(shape, device=device, dtype=dtype, recompute=recompute, quantize=quantize)

    def _make_trainer(self, max_tokens: int, chunk_rows: int) -> Trainer:
        return (DeterministicTrainer if self._deterministic else Trainer)(self._base, max_tokens, chunk_rows)

    def _sampler_options(self) -> SamplerOptions:
        from tinsmith.samplers.local.engine import SamplerOptions

        kv_cache_bytes, sequences, tokens = (limit or None for limit in self._sampler_limits)
        return SamplerOptions(
            kv_cache_bytes=kv_cache_bytes,
            max_sequences=sequences,
            max_tokens_per_step=tokens,
            deterministic=self._deterministic,
            traces=self._traces,
        )

    def _make_sampler(self) -> LocalSampler:
        from tinsmith.samplers.local.engine import LocalSampler

        options = self._sampler_options()
        if options.kv_cache_bytes is None and (division := self._divide_memory()) is not None:
            options = replace(options, kv_cache_bytes=division.kv_cache)
            self._model_budget_bytes = division.models
            parts = {name: format_bytes(num_bytes) for name, num_bytes in division._asdict().items()}
            log.info("memory of the GPU is divided", base_model=self._base.shape.name, **parts)
        return LocalSampler(self._base, self._versions, options=options, memory=self._memory)

    def _divide_memory(self) -> Division | None:
        """None under a budget, which divides it, and where the KV cache grows."""
        device, step = self._base.device, self._step_memory
        if not kind_of(device).has_kernels or self._memory.is_limited:
            return None
        free, total = read_memory(device)
        sizes, longest = self._trainer.sizes, self._base.max_context_length
        available = free + count_unused_bytes(device) - self._base.copied_bytes
        return divide(available, total, step.activations, sizes, longest, step.sampling_bytes)

    def kernels(self) -> dict[str, str]:
        """The kernels in use on this device, for the log."""
        from tinsmith.samplers.local.paged_attention import describe_kernels

        base = self._base
        kernel_by_part = {
            "device": f"{base.device}, {base.dtype}, no TF32",
            "layers": "fused" if base.has_fused_layers else _describe_modules(base),
            "attention": "SDPA",
            "decode": describe_kernels(base),
            "lora": f"{'Triton, else ' if base.can_capture else ''}batched products of similar segments of one layout",
            "optimizer": "fused AdamW; Dimuon by matrix shape",
        }
        if base.experts:
            kernel_by_part["experts"] = ", ".join(sorted({experts.kernel for experts in base.experts}))
        if base.mixers:
            kernel_by_part["mixers"] = f"transformers with {', '.join(list_mixer_libraries()) or 'plain torch'}"
        return kernel_by_part

    def _open_memory(self, budget_bytes: int, chunk_rows: int) -> MemoryManager:
        """Raises SettingsError if the budget is too small for any work."""
        memory = MemoryManager(budget_bytes)
        step = StepMemory(self._base, memory, chunk_rows, self._sampler_limits[-1])
        self._step_memory = self._trainer.memory = step
        self._base_bytes, self._min_work_bytes = self._base.num_bytes, 0
        memory.register(BASE, lambda: self._base_bytes)
        memory.register(SAMPLING, lambda: step.sampling_bytes)
        if self._base.vision is not None:
            self._share(memory, self._base.vision)
        memory.register(
            MODELS, self._models_bytes, Evictable(self._offloadable_bytes, self._offloadable_bytes, self._offload)
        )
        memory.register(VERSIONS, self._versions_bytes)
        if memory.is_limited:
            self._check_budget(memory, step)
        return memory

    @staticmethod
    def _share(memory: MemoryManager, vision: Vision) -> None:
        """Register image features, which use the memory that other holders leave and are evicted first."""

        def feature_bytes() -> int:
            return vision.feature_bytes

        memory.register(
            IMAGES,
            feature_bytes,
            Evictable(feature_bytes, feature_bytes, lambda missing: vision.evict_to(feature_bytes() - missing)),
        )
        vision.limit_bytes = lambda: memory.limit_of(IMAGES)

    def _check_budget(self, memory: MemoryManager, step: StepMemory) -> None:
        """One small adapter plus a short sequence, in training or in sampling, must fit."""
        from tinsmith.samplers.local.kv_cache import layer_shapes, probe_layers
        from tinsmith.samplers.local.states import state_bytes

        layout = self._layout(LoraSpec(MIN_RANK))
        adapter = training_bytes([AdapterRegion(layout.numel, 1)], dtype=str(self._base.dtype).removeprefix("torch."))
        training = step.activations.num_bytes(MIN_TOKENS, recompute=True)
        cached = sum(shape.num_bytes for shape in layer_shapes(self._base).values())
        sampling = int(MIN_TOKENS * cached / BLOCKS_SHARE) + STATES_PER_SEQUENCE * state_bytes(probe_layers(self._base))
        self._min_work_bytes = max(training, sampling)
        bytes_by_holder = memory.bytes_by_holder()
        needed_bytes = sum(bytes_by_holder.values()) + adapter + self._min_work_bytes
        if needed_bytes > memory.budget_bytes:
            raise SettingsError(
                f"memory_budget is {format_bytes(memory.budget_bytes)}, and {self._base.shape.name} needs "
                f"at least {format_bytes(needed_bytes)}: base {format_bytes(bytes_by_holder[BASE])}, a sampler's step "
                f"{format_bytes(bytes_by_holder[SAMPLING])}, an adapter of rank {MIN_RANK} in training "
                f"{format_bytes(adapter)}, and for {MIN_TOKENS} tokens activations of {format_bytes(training)} or "
                f"keys, values and states of {format_bytes(sampling)}"
            )

    def memory_use(self) -> dict[str, int]:
        budget = {"budget": self._memory.budget_bytes} if self._memory.is_limited else {}
        bytes_by_holder = self._memory.bytes_by_holder() | {ACTIVATIONS: self._memory.take_peak()}
        return (dict.fromkeys(bytes_by_holder, 0) if self._is_asleep else bytes_by_holder) | budget

    def sleep(self) -> None:
        if self._is_asleep or not self._offloads:
            return
        with memory_errors(self._base.device):
            if self._frozen is None:
                self._frozen = FrozenStores(self._base.frozen_tensors())
            trained = [buffer for model in self._models.values() for buffer in model.buffers(moments=True)]
            adapter_buffers = [buffer for adapter in self._adapters_to_move() for buffer in adapter.buffers]
            copies = TensorCopies(HOST, [*trained, *adapter_buffers])
            self._frozen.release()
        # From here on nothing can fail.
        self._is_asleep, self._home = True, HOST
        self._move(copies)
        if self._base.vision is not None:
            self._base.vision.evict_to(0)
        del copies, trained, adapter_buffers
        return_memory(self._base.device)

    def wake_up(self) -> None:
        if not self._is_asleep:
            return
        assert self._frozen is not None
        device = self._base.device
        with memory_errors(device):
            try:
                self._frozen.restore()
                trained = [buffer for model in self._models.values() for buffer in model.buffers(moments=False)]
                copies = TensorCopies(device, trained)
            except BaseException:
                self._frozen.release()
                return_memory(self._base.device)
                raise
        self._is_asleep, self._home = False, device
        self._move(copies)
        if self._sampler is not None:
            self._sampler.forget_weight_addresses()

    def _adapters_to_move(self) -> list[Adapter]:
        """Adapters that leave the device with the models. They stay on the host: files are written from there."""
        return list(self._versions.values())

    def _move(self, copies: TensorCopies) -> None:
        for trained in self._models.values():
            trained.move(copies)
        for adapter in self._adapters_to_move():
            adapter.move(copies)
        self._after_move()

    def _after_move(self) -> None:
        """Adapters have other buffers now."""

    def _models_bytes(self) -> int:
        return sum(trained.num_bytes for trained in self._models.values())

    def _versions_bytes(self) -> int:
        """Weights that a version shares with its model are counted with the model."""
        model_buffers = {id(trained.adapter.flat_P) for trained in self._models.values()}
        counted = {
            id(adapter.flat_P): adapter
            for adapter in self._versions.values()
            if id(adapter.flat_P) not in model_buffers
        }
        return sum(adapter.num_bytes for adapter in counted.values())

    def _offloadable_bytes(self) -> int:
        return sum(trained.offloadable_bytes for trained in self._models.values())

    def _offload(self, num_bytes: int) -> None:
        """Move optimizer state to the host until its next step; a no-op on CPUs."""
        for trained in self._models.values():
            if num_bytes <= 0:
                return
            num_bytes -= trained.offload()

    def _add_model(self, model_id: str, trained: TrainedModel) -> None:
        """Raises UserError if the budget cannot hold the model."""
        memory = self._memory
        if memory.is_limited and not self.has_model(model_id):
            available_bytes = memory.budget_bytes - self._base_bytes - self._min_work_bytes
            if trained.num_bytes > available_bytes:
                raise UserError(
                    f"a model of rank {trained.adapter.spec.rank} takes {format_bytes(trained.num_bytes)} in training, "
                    f"and the engine's memory budget leaves {format_bytes(max(0, available_bytes))} besides the base "
                    "model"
                )
            memory.evict_for(trained.num_bytes, MODELS)
        self._models[model_id] = trained

    @property
    def base(self) -> BaseModel:
        return self._base

    @property
    def sampler(self) -> LocalSampler:
        if self._sampler is None:
            self._sampler = self._make_sampler()
        return self._sampler

    def create_model(self, model_id: str, spec: LoraSpec, optimizer_type: str = "adamw") -> None:
        layout = self._layout(spec)
        seed = spec.seed if spec.seed is not None else _seed_of(model_id)
        adapter = self._adapter(spec, layout, initialise_weights(layout, seed, self._home))
        self._add_model(model_id, self._build_model(adapter, optim.check_optimizer_type(optimizer_type)))

    def unload_model(self, model_id: str) -> None:
        self._models.pop(model_id, None)

    def has_model(self, model_id: str) -> bool:
        return model_id in self._models

    @property
    def model_budget_bytes(self) -> int:
        if not self._memory.is_limited:
            return self._model_budget_bytes
        # If a step did not fit, other models are moved out; they return with their next request.
        share_bytes = MODELS_SHARE * (self._memory.budget_bytes - self._base_bytes)
        return max(1, int(share_bytes) - self._step_memory.shortage_bytes)

    def model_bytes(self, model_id: str) -> int:
        return self._model(model_id).num_bytes

    def run_passes(self, passes: Sequence[Pass]) -> MicroBatches:
        assert not self._is_asleep
        return self._traces.training(self._trainer.run(passes, self._models))

    def start_profile(self, directory: Path) -> StepTraces:
        self._traces.start(directory)
        return self._traces

    def optim_step(self, steps: Sequence[OptimStep]) -> list[dict[str, float] | UserError]:
        assert not self._is_asleep
        results: list[dict[str, float] | UserError] = [UserError()] * len(steps)
        good = []
        for index, step in enumerate(steps):
            try:
                trained = self._model(step.model_id)
                optim.check_params(trained.optimizer_type, step.params)
                good.append((index, (trained, step.params)))
            except UserError as error:
                results[index] = error
        with memory_errors(self._base.device), self._traces.optimizer(), stage("optimizer"):
            outcomes = self._prepare_step([request for _, request in good]).apply() if good else []
        for (index, _), outcome in zip(good, outcomes, strict=True):
            results[index] = outcome
        return results

    def _prepare_step(self, requests: Sequence[tuple[TrainedModel, OptimParams]]) -> optim.PreparedStep:
        return optim.prepare_step(requests)

    def capture(self, model_id: str) -> Capture:
        with memory_errors(self._base.device):
            trained = self._copy_model(model_id)
        return Capture(trained.num_bytes, partial(self._write_copy, trained, SideStream(self._home)))

    def capture_version(self, version_id: str) -> Capture:
        adapter = self._whole_version(version_id)  # a version never changes: there is nothing to copy
        return Capture(adapter.flat_P.nbytes, partial(self._write_version, adapter, SideStream(self._home)))

    def _write_copy(self, trained: TrainedModel, stream: SideStream, directory: Path) -> None:
        """Write a private copy of a model, in the thread of the caller."""
        with stream.use():
            if stream.is_apart:
                trained.move(TensorCopies(HOST, trained.buffers(moments=True)))  # through pinned memory
            self._write(trained, True, directory, stacked=True)

    def _write_version(self, adapter: Adapter, stream: SideStream, directory: Path) -> None:
        with stream.use():
            self._save_adapter(adapter, directory, stacked=True)

    def version_bytes(self, version_id: str) -> int:
        return self._version(version_id).flat_P.nbytes

    def save(self, model_id: str, directory: Path, *, optimizer: bool, stacked: bool = False) -> None:
        trained = self._whole_model(model_id)
        trained = trained if optimizer else replace(trained, gradient_P=None)
        self._write(trained, optimizer, directory, stacked=stacked, exported=stacked)

    def _copy_model(self, model_id: str) -> TrainedModel:
        """A copy of the whole model, for a capture."""
        return self._model(model_id).copy()

    def _whole_model(self, model_id: str) -> TrainedModel:
        """The whole model, for a checkpoint."""
        return self._model(model_id)

    def _whole_version(self, version_id: str) -> Adapter:
        return self._version(version_id)

    def _write(
        self, trained: TrainedModel, optimizer: bool, directory: Path, *, stacked: bool, exported: bool = False
    ) -> None:
        self._save_adapter(trained.adapter, directory, stacked=stacked, exported=exported)
        if optimizer:
            checkpoint.save_optimizer(trained, directory)
        checkpoint.save_gradient(trained, directory)

    def load(
        self, model_id: str, spec: LoraSpec, directory: Path, *, optimizer: bool, optimizer_type: str = "adamw"
    ) -> None:
        if not spec.rank:
            raise UserError(
                "this checkpoint holds all weights of a model; load it where they are trained (backend 'full')"
            )
        layout = self._layout(spec)
        saved = self._read_adapter(directory)
        missing = {target.name for target in layout.targets} - saved.pairs.keys()
        groups = {target.group for target in layout.targets if target.name in saved.pairs}
        if (
            saved.rank != spec.rank
            or len(saved.pairs) + len(missing) != len(layout.targets)
            or groups != {target.group for target in layout.targets}
        ):
            raise UserError(
                f"the saved adapter has rank {saved.rank} on {len(saved.pairs)} linears; lora_config asks for "
                f"rank {spec.rank} on {len(layout.targets)}"
            )
        factor, fresh_P = saved.alpha / spec.alpha, None  # 1 for its own checkpoint
        if missing:
            # The file was written by other software that adapted only some linears of a group: the rest start fresh.
            seed = _seed_of(model_id) if spec.seed is None else spec.seed
            fresh_P = initialise_weights(layout, seed, HOST)
        flat_P = checkpoint.fill_buffer(layout, saved.pairs, self._home, factor, fresh_P)
        adapter = self._adapter(spec, layout, flat_P)
        trained = self._build_model(adapter, optim.check_optimizer_type(optimizer_type))
        if optimizer:
            checkpoint.load_optimizer(trained, directory)
            checkpoint.load_gradient(trained, directory)
        self._add_model(model_id, trained)

    def publish(self, model_id: str, version_id: str) -> None:
        with stage("publish"):
            version = self._model(model_id).publish()
        self._memory.evict_for(version.num_bytes, VERSIONS)
        self._versions[version_id] = version
        self._collect()

    def load_version(self, version_id: str, directory: Path) -> None:
        saved = self._read_adapter(directory)
        targets = [target for target in self._base.adaptable_targets() if target.name in saved.pairs]
        groups = {target.group for target in targets}
        spec = LoraSpec(saved.rank, None, "attn" in groups, "mlp" in groups, "unembed" in groups, saved.alpha)
        layout = Layout.of(saved.rank, targets)
        self._memory.evict_for(4 * layout.numel, VERSIONS)
        self._versions[version_id] = self._adapter(
            spec, layout, checkpoint.fill_buffer(layout, saved.pairs, self._home)
        )

    def has_version(self, version_id: str) -> bool:
        return version_id in self._versions

    def drop_version(self, version_id: str) -> None:
        # Running samples hold the adapter itself, so the entry can be dropped at once.
        self._versions.pop(version_id, None)
        self._collect()

    def _collect(self) -> None:
        """Free the sampler's memory of replaced and dropped versions, mainly cached prefixes."""
        if self._sampler is not None:
            self._sampler.collect()

    def _model(self, model_id: str) -> TrainedModel:
        if model_id not in self._models:
            raise UserError(f"model {model_id!r} is not loaded")
        return self._models[model_id]

    def _version(self, version_id: str) -> Adapter:
        if version_id not in self._versions:
            raise UserError(f"version {version_id!r} is not loaded")
        return self._versions[version_id]

    def _layout(self, spec: LoraSpec) -> Layout:
        if not 1 <= spec.rank <= MAX_RANK:
            raise UserError(f"lora_config.rank is {spec.rank}; it must be from 1 to {MAX_RANK}")
        if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
            raise UserError("lora_config trains nothing; set train_attn, train_mlp or train_unembed")
        layout = layout_for(spec, self._base.adaptable_targets())
        if not layout.targets:
            raise UserError(f"{self._base.shape.name} has no linears of the groups that lora_config trains")
        return layout

    def _adapter(self, spec: LoraSpec, layout: Layout, flat_P: checkpoint.Tensor) -> Adapter:
        return Adapter(spec, layout, flat_P, self._base.dtype)

    def _build_model(self, adapter: Adapter, optimizer_type: str) -> TrainedModel:
        return TrainedModel(adapter, optimizer_type=optimizer_type)

    def _save_adapter(self, adapter: Adapter, directory: Path, *, stacked: bool, exported: bool = False) -> None:
        """`exported`: for tinker_cookbook.weights, not for engines such as vLLM, which read `lm_head`."""
        checkpoint.save_adapter(
            adapter,
            self._base.shape.name,
            self._module_names,
            directory,
            stacked=stacked,
            tied_head=self._base.tied_head if exported else None,
        )

    def _read_adapter(self, directory: Path) -> checkpoint.AdapterFile:
        whole_targets = (target.hold(None) for target in self._base.adaptable_targets())
        return checkpoint.load_adapter(directory, {target.name: target for target in whole_targets})


def _describe_modules(base: BaseModel) -> str:
    return f"transformers' modules{f', with Triton for {swapped}' if (swapped := str(base.swapped)) else ''}"


def _seed_of(model_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(model_id.encode(), digest_size=8).digest(), "little")


def positive(name: str, value: int | str) -> int:
    try:
        parsed = int(value)
    except ValueError:
        parsed = 0
    if parsed < 1:
        raise SettingsError(f"backend option {name} is {value!r}; it must be a whole number of at least 1")
    return parsed
