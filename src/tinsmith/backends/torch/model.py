"""One frozen base model, shared by training and sampling, whose adaptable linears are replaced by MultiLoRALinear and
whose expert modules by MultiLoRAExperts.

Owns loading, the choice of device and dtype, which linears may carry adapters, and the check that the model can be
served from packed rows: at load a few tokens run under the model's own attention and under ours, alone and next to
other rows; if the results differ, the model is refused. Every later call runs packed rows [1, T] without a cache; the
plan decides what a row attends to. Weights never require gradients. Knows no loss, optimizer, tenant or request.

Shapes: T rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tinsmith.backends.torch.adapters import Target
from tinsmith.backends.torch.attention import (
    PLAN_KEY,
    AttentionPlan,
    AttentionProbe,
    PackedCausal,
    register_attention,
    scale_queries,
    select_all_tokens,
)
from tinsmith.backends.torch.decoder_check import TOLERANCES, measure_difference
from tinsmith.backends.torch.frozen_weights import Quantise, WeightCodes
from tinsmith.backends.torch.host import upload
from tinsmith.backends.torch.loading import (
    choose_attention,
    fix_rotations,
    load_model,
    move_tensors,
    move_unquantised,
)
from tinsmith.backends.torch.lora import DeviceLoRABatch, ForwardContext, MultiLoRALinear
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.module_kernels import SwappedKernels, join_gated_products, swap_kernels
from tinsmith.backends.torch.moe import MultiLoRAExperts, dispatch_chosen_rows, quantise_experts
from tinsmith.backends.torch.quantization import choose_quantiser
from tinsmith.backends.torch.recompute import Recompute
from tinsmith.backends.torch.recurrent import wrap_mixers
from tinsmith.backends.torch.servable import (
    check_layers,
    check_parameters,
    check_stateful_layers,
    raise_settings_errors,
)
from tinsmith.backends.torch.threads import Threads
from tinsmith.backends.torch.transformer import Decoder
from tinsmith.backends.torch.vision import ImageInput, ImageRows, InputSpan, Vision
from tinsmith.errors import SettingsError, UserError
from tinsmith.plan.architecture import (
    UNADAPTED_LINEARS,
    decoder_of,
    is_experts,
    mark_experts,
    read_config,
    read_stored_dtype,
)
from tinsmith.plan.memory import choose_dtype
from tinsmith.plan.mixers import MixerLinears
from tinsmith.plan.versions import list_untested_versions
from tinsmith.runtime import malloc
from tinsmith.runtime.devices import choose_device, kind_of, select_device
from tinsmith.types import I32, I64, Image, ModelShape, mixes_tokens
from tinsmith.wire.adapter_files import EMBED_TOKENS, text_name

log = structlog.get_logger()

EXACT_TOLERANCE = 1e-3
"""How far packed logits in float32 may be from the model's own, relative."""


class BaseModel:
    """Use `load`. `targets` maps a module's path to its linear."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        shape: ModelShape,
        recompute: str = "auto",
        quantize: str = "off",
        vision: Vision | None = None,
    ) -> None:
        self.vision = vision
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.shape = shape
        self.device = model.device
        self.dtype = model.dtype
        self._context = ForwardContext()
        self._decoder = decoder_of(model)
        self.num_parameters = model.num_parameters()
        self.tied_head = _tied_head(model)
        quantise = choose_quantiser(quantize, self.device)
        self.targets = _swap_linears(model, self._decoder, self._context, quantise)
        mark_experts(model)
        self.experts = _swap_experts(model, self._context, quantise)
        if quantise is not None:
            move_tensors(model, self.device)
        dispatch_chosen_rows(self._decoder, self._context)
        select_all_tokens(self._decoder)
        scale_queries(self._decoder)
        fix_rotations(self._decoder)
        self.mixers = wrap_mixers(self._decoder, self._context)
        self.recompute = Recompute(recompute, self._context)
        self.recompute.wrap(self._decoder)
        self.swapped = self._swap_kernels()
        self._threads = Threads(self.num_parameters, model.device)
        self.unembedding = next(t for t in self.targets.values() if t.group == "unembed")
        self._fused = Decoder.of(self._decoder, self.unembedding)
        self.vocab_size = self.unembedding.out_features
        self.max_context_length = shape.max_context_length
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        text_config = model.config.get_text_config()
        self.softcap: float | None = getattr(text_config, "final_logit_softcapping", None)
        self.multiplier: float = getattr(text_config, "logit_scale", None) or 1.0
        self.multiplier /= getattr(text_config, "logits_scaling", None) or 1.0

    @classmethod
    def load(
        cls,
        shape: ModelShape,
        *,
        device: str = "auto",
        dtype: str = "auto",
        recompute: str = "auto",
        quantize: str = "off",
    ) -> BaseModel:
        """Raises SettingsError if the model cannot be served exactly."""
        device = choose_device(device)
        select_device(device)
        stored = read_stored_dtype(read_config(Path(shape.path) / "config.json"))
        dtype = choose_dtype(dtype, cuda=kind_of(device).prefers_bfloat16, stored=stored)
        if dtype not in ("float32", "bfloat16"):
            raise SettingsError(f"dtype {dtype!r} is not supported; choose 'auto', 'float32' or 'bfloat16'")
        register_attention()
        if not any(Path(shape.path).glob("*.safetensors")):
            raise SettingsError(f"{shape.name}: {shape.path} has no .safetensors file; other formats are not supported")
        # Never load code or pickles from the directory.
        safe = {"trust_remote_code": False, "local_files_only": True}
        with raise_settings_errors(shape):
            model = load_model(shape, getattr(torch, dtype), safe)
            check_stateful_layers(model.config, model)
            tokenizer = AutoTokenizer.from_pretrained(shape.path, **safe)
            if quantize == "off":
                model = cast(PreTrainedModel, cast(nn.Module, model).to(device))
            else:
                model = move_unquantised(model, device)
            vision = Vision.load(model, shape) if shape.vision else None
            base = cls(model, tokenizer, shape, recompute, quantize, vision)
            if shape.vocab_size > base.vocab_size:
                raise SettingsError(
                    f"{shape.name} has {base.vocab_size} logits, fewer than vocab_size {shape.vocab_size}"
                )
            base.check_servable()
            base.check_releases()
            base._check_training()
        return base

    def pin(self) -> None:
        """Compute the same way for any number of rows and any amount of free memory."""
        self._fused = None
        self.pin_threads()

    def pin_threads(self) -> None:
        """Use the same number of threads for any number of rows: the sums of different ranks must be equal."""
        self._threads.pin()

    @property
    def has_fused_layers(self) -> bool:
        """Whether training uses fused layers instead of the modules."""
        return self._fused is not None

    @property
    def num_fused_layers(self) -> int:
        return 0 if self._fused is None else self._fused.num_layers

    @property
    def can_capture(self) -> bool:
        """Whether CUDA graphs can hold the layers of decode steps."""
        return kind_of(self.device).has_kernels and all(module.can_capture for module in self.experts)

    def decode_rows(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan, lora_batch: LoRABatch) -> Tensor:
        """[T, D]: hidden states after the final norm, by operations that a CUDA graph can hold if the plan's are."""
        if self._fused is not None:
            return self._fused.hidden(tokens_T, positions_T, plan, lora_batch)
        return self.forward_modules(tokens_T, positions_T, plan, lora_batch)

    @property
    def num_bytes(self) -> int:
        """Bytes of the frozen weights, including a packed copy for decoding if there is or will be one, and copies that
        products of codes make.
        """
        stores = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
                  for tensor in self._list_weights()}  # fmt: skip
        packed = 0 if self._fused is None else self._fused.packed_bytes
        return sum(stores.values()) + packed + self.copied_bytes

    @property
    def copied_bytes(self) -> int:
        """The most bytes that a product takes for matrices made from codes, which graphs have to themselves."""
        return (1 + self.can_capture) * max((module.copied_bytes for module in self.experts), default=0)

    def frozen_tensors(self) -> list[Tensor]:
        """The weights that never change, as they are stored on the device."""
        return self._list_weights()

    def _list_weights(self) -> list[Tensor]:
        code_tensors = (tensor for codes in self.list_codes() for tensor in codes.tensors())
        return [*self.model.parameters(), *self.model.buffers(), *code_tensors]

    def list_codes(self) -> list[WeightCodes]:
        """What a quantised base stores in place of parameters."""
        return [codes for module in (*self.targets.values(), *self.experts) for codes in module.list_codes()]

    def adaptable_targets(self) -> list[Target]:
        experts = [target for module in self.experts for target in module.targets]
        return [*(target for linear in self.targets.values() for target in linear.targets), *experts]

    def prepare_images(self, tokens_N: I32, images: tuple[Image, ...], scope: str) -> ImageInput | None:
        """The positions of an input with images. Raises UserError if an image cannot be decoded or is not supported.
        Features are cached for inputs of the same `scope`.
        """
        if not images:
            return None
        if self.vision is None:
            raise UserError(f"{images[0].path} is an image, and {self.shape.name} is served for text only")
        return self.vision.prepare_images(len(tokens_N), images, scope)

    def pack_positions(self, input_spans: Sequence[InputSpan]) -> tuple[I64, ImageRows | None]:
        """See `Vision.pack`."""
        assert self.vision is not None
        return self.vision.pack(input_spans)

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        plan: AttentionPlan,
        lora_batch: LoRABatch,
        output_rows: Sequence[int] | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        """[T, D]: hidden states after the final norm; without gradients, only of the `output_rows` rows (ascending) if
        given. With `images`, positions are [3, T] where the model has multimodal RoPE.
        """
        self._threads.fit(len(tokens_T), len(lora_batch.segments))
        decoder = None if images is not None else self._fused
        if decoder is not None and not torch.is_grad_enabled() and decoder.pack():
            decoder = self._fused = self._verify_decoder(decoder)
        if decoder is not None:
            num_recomputed = self.recompute.count_recomputed(decoder.num_layers)
            return decoder.hidden(tokens_T, positions_T, plan, lora_batch, output_rows, num_recomputed=num_recomputed)
        hidden_TD = self.forward_modules(tokens_T, positions_T, plan, lora_batch, images)
        if output_rows is None:
            return hidden_TD
        return hidden_TD.index_select(0, upload(np.array(output_rows), self.device))

    def forward_modules(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        plan: AttentionPlan,
        lora_batch: LoRABatch,
        images: ImageRows | None = None,
    ) -> Tensor:
        """[T, D]: hidden states after the final norm, computed by transformers' modules."""
        inputs: dict[str, object] = {"input_ids": tokens_T[None], "position_ids": positions_T[None]}
        if images is not None:
            embed = cast(nn.Embedding, self._decoder.get_input_embeddings())
            positions = positions_T[:, None] if positions_T.dim() == 2 else positions_T[None]
            inputs = {"position_ids": positions, **images.inputs(embed(tokens_T))}
        with self._bind_context(lora_batch, plan, len(tokens_T)):
            output = self._decoder(**inputs, use_cache=False, **{PLAN_KEY: plan})
        # Where residuals are float32, so is the output of the last norm.
        return output.last_hidden_state[0].to(self.dtype)

    def logits(self, hidden_TD: Tensor, lora_batch: LoRABatch) -> Tensor:
        """[T, V] float32, without a gradient. The LoRA batch covers exactly these rows."""
        assert lora_batch.num_rows == len(hidden_TD)
        if isinstance(lora_batch, DeviceLoRABatch):
            return self.finish_logits_(self.unembedding.forward_device_rows(hidden_TD, lora_batch, torch.float32))
        adapter_groups = self.unembedding.groups(lora_batch)
        return self.finish_logits_(self.unembedding.forward_rows(hidden_TD, adapter_groups, torch.float32)[0])

    def next_logits(self, hidden_TD: Tensor, lora_batch: LoRABatch) -> Tensor:
        """[T, V] float32 logits of rows whose next tokens are sampled, with packed weights if available."""
        raw_TV = None if self._fused is None else self._fused.logits(hidden_TD, lora_batch)
        return self.logits(hidden_TD, lora_batch) if raw_TV is None else self.finish_logits_(raw_TV)

    def finish_logits_(self, raw_TV: Tensor) -> Tensor:
        """Scale and cap the unembedding's output in place, as some families do."""
        if self.multiplier != 1.0:
            raw_TV.mul_(self.multiplier)
        if self.softcap is not None:
            raw_TV.div_(self.softcap).tanh_().mul_(self.softcap)
        return raw_TV

    def unfinish_gradient_(self, grad_TV: Tensor, logits_TV: Tensor) -> Tensor:
        """The gradient of the unembedding's output from that of the finished logits, in place."""
        if self.softcap is not None:
            grad_TV.mul_(1.0 - (logits_TV / self.softcap).square_())
        return grad_TV if self.multiplier == 1.0 else grad_TV.mul_(self.multiplier)

    @contextmanager
    def _bind_context(self, lora_batch: LoRABatch, plan: AttentionPlan, num_rows: int) -> Iterator[None]:
        assert lora_batch.num_rows == num_rows
        self._context.lora_batch, self._context.plan = lora_batch, plan
        try:
            yield
        finally:
            self._context.lora_batch = self._context.plan = None

    def _verify_decoder(self, decoder: Decoder) -> Decoder | None:
        """The decoder if it agrees with the modules in the current gradient mode, by part and as a whole, else None."""
        tokens_T = torch.arange(12, device=self.device) * 7 % self.shape.vocab_size
        positions_T = torch.cat([torch.arange(n, device=self.device) for n in (7, 5)])
        inputs = (tokens_T, positions_T, PackedCausal([7, 5], self.device), LoRABatch.of_base(12))
        sizes = self.shape.vocab_size, self.max_context_length
        part_error = measure_difference(decoder, self._decoder, self.forward_modules, *sizes)
        expected, actual = self.forward_modules(*inputs), decoder.hidden(*inputs)
        error = float((actual - expected).norm() / expected.norm().clamp_min(1e-6))
        if part_error < TOLERANCES[self.dtype] and error < (1e-4 if self.dtype == torch.float32 else 0.05):
            return decoder
        log.warning("layers run as modules: fused ones would differ", of_parts=part_error, of_whole=error)
        return None

    def _check_training(self) -> None:
        """Use fused layers if they agree with the modules."""
        if self._fused is None:
            join_gated_products(self.swapped)
        else:
            self._fused.prepare()
            self._copy_mapped_weights()
            self._fused = self._verify_decoder(self._fused)

    def _swap_kernels(self) -> SwappedKernels:
        return swap_kernels(self._decoder, self._context) if kind_of(self.device).has_kernels else SwappedKernels()

    def _copy_mapped_weights(self) -> None:
        """Copy what is still a view of a mapped file, with which the pages of stacked weights would stay resident. Then
        return to the system what loading has freed.
        """
        if kind_of(self.device).is_host:
            for parameter in self.model.parameters():
                if parameter.untyped_storage().nbytes() == parameter.nbytes:
                    parameter.data = parameter.data.clone()
            malloc.trim()

    def _check_layers(self) -> None:
        probe, token_T = AttentionProbe(), torch.zeros(1, dtype=torch.int64, device=self.device)
        self.forward_modules(token_T, token_T, probe, LoRABatch.of_base(1))
        check_layers(type(self.model).__name__, self.model.config.get_text_config(), probe.windows, probe.states)
        check_parameters(type(self.model).__name__, self._decoder, self.experts)

    @torch.no_grad()
    def check_servable(self) -> None:
        """Compare packed rows under our attention with the model's own forward; raises SettingsError if they differ."""
        self._check_layers()
        if self.vision is not None:
            self._check_images(self.vision)
        first, second = (torch.arange(n, device=self.device) * 7 % self.shape.vocab_size for n in (7, 5))
        logits = []
        for tokens in ([first, second], [second]):
            lengths = [len(t) for t in tokens]
            plan = PackedCausal(lengths, self.device)
            lora_batch = LoRABatch.of_base(sum(lengths))
            positions_T = torch.cat([torch.arange(n, device=self.device) for n in lengths])
            hidden_TD = self.forward_modules(torch.cat(tokens), positions_T, plan, lora_batch)
            logits.append(self.logits(hidden_TD, lora_batch))
        reference = self.reference_logits(input_ids=second[None])
        self._compare(logits[1], reference, "under packed attention")
        self._compare(logits[0][len(first) :], reference, "beside another sequence")

    def check_releases(self) -> None:
        """Check the installed releases (`start_check`) if the model has states, or a release or this kind of device
        was not tested; raises ReleaseError.
        """
        if self.mixers or list_untested_versions() or not kind_of(self.device).is_tested:
            # Here, since it needs a sampler's module, and samplers import this package.
            from tinsmith.backends.torch.start_check import check_mixers, check_sampling

            check_mixers(self.mixers, self._context, self.model.config.get_text_config().hidden_size, self)
            check_sampling(self, self.shape.vocab_size)

    def _check_images(self, vision: Vision) -> None:
        """Compare rows of text and an image with the model's own forward; raises SettingsError if they differ."""
        image = replace(vision.probe(), start=1)
        tokens_T = torch.tensor([1, *[vision.image_token_id] * image.num_tokens, 2, 3], device=self.device)
        length = len(tokens_T)
        image_input = vision.prepare_images(length, (image,))
        assert image_input is not None
        positions, rows = vision.pack([InputSpan(image_input, 0, length)])
        lora_batch = LoRABatch.of_base(length)
        plan = PackedCausal([length], self.device, [image_input.visible_counts(0, length)])
        positions_T = torch.from_numpy(positions).to(self.device)
        hidden_TD = self.forward_modules(tokens_T, positions_T, plan, lora_batch, rows)
        reference = self.reference_logits(input_ids=tokens_T[None], **vision.reference_inputs(image, tokens_T))
        self._compare(self.logits(hidden_TD, lora_batch), reference, "with an image")
        vision.evict_to(0)

    def reference_logits(self, **inputs: Tensor) -> Tensor:
        """[T, V]: the logits of the model's own forward."""
        self.model.set_attn_implementation("eager")
        logits_TV = self.model(**inputs, use_cache=False).logits[0].float()
        self.model.set_attn_implementation(choose_attention(self.model.config))
        return logits_TV

    @property
    def rounds_to_8_bits(self) -> bool:
        """Whether rows are rounded to 8 bits, which turns a last bit into a sixteenth."""
        return any(codes.rounds_rows for codes in self.list_codes())

    @property
    def may_change_rows(self) -> bool:
        """Whether a last bit may send a row to another expert. Then most of this row differs, and a little of later
        ones.
        """
        return bool(self.experts) and (self.dtype != torch.float32 or self.rounds_to_8_bits)

    def measure_error(self, actual: Tensor, expected: Tensor) -> float:
        """The relative error of rows [T, C], or of one [C]: of all together, or of the median row where another expert
        may change some.
        """
        actual, expected = actual.float(), expected.float()
        if not self.may_change_rows:
            return float((actual - expected).norm() / expected.norm().clamp_min(1e-6))
        return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)).median())

    @property
    def tolerance(self) -> float:
        """The largest error of rows that are computed in another way than the model's own."""
        if self.rounds_to_8_bits:
            return 0.3
        return EXACT_TOLERANCE if self.dtype == torch.float32 else 0.1

    def _compare(self, logits: Tensor, reference: Tensor, how: str) -> None:
        error = self.measure_error(logits, reference)
        if not error < self.tolerance:
            raise SettingsError(
                f"{type(self.model).__name__} cannot be served: its logits {how} differ from its own "
                f"by {error:.2g} (relative)"
            )


def _swap_linears(
    model: PreTrainedModel, decoder: nn.Module, context: ForwardContext, quantise: Quantise | None
) -> dict[str, MultiLoRALinear]:
    """The unembedding is never quantised."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise SettingsError(f"{type(model).__name__} has no linear unembedding")
    inside = set(decoder.modules())
    mixed = MixerLinears.of(decoder)
    targets = {}
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or (module is not head and module not in inside):
            continue
        parent_name, _, last = name.rpartition(".")
        if not UNADAPTED_LINEARS.isdisjoint(name.split(".")) or module in mixed.excluded:
            continue
        if ".experts." in name:
            # Such a linear gets rows in its own order, to which segments do not apply.
            raise SettingsError(f"{type(model).__name__} keeps experts as linears, which cannot carry adapters here")
        group = "unembed" if module is head else "attn" if module in mixed.all or mixes_tokens(name) else "mlp"
        target_name = text_name(name)
        codes = None if quantise is None or module is head else quantise(module.weight.detach()[None])
        targets[target_name] = MultiLoRALinear(target_name, group, module, context, codes)
        if module in mixed.parts:
            targets[target_name].divide(mixed.parts[module])
        setattr(model.get_submodule(parent_name), last, targets[target_name])
    if not any(target.group == "attn" for target in targets.values()):
        raise SettingsError(f"{type(model).__name__} has no linear attention projections to adapt")
    return targets


def _tied_head(model: PreTrainedModel) -> str | None:
    """Return the name of the unembedding if it shares its weights with embeddings at Tinker's path."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embeddings.weight:
        return None
    names = {module: text_name(name) for name, module in model.named_modules()}
    return names[head] if names[embeddings] == EMBED_TOKENS else None


def _swap_experts(model: PreTrainedModel, context: ForwardContext, quantise: Quantise | None) -> list[MultiLoRAExperts]:
    swapped = []
    for name, module in list(model.named_modules()):
        if is_experts(module):
            codes = () if quantise is None else quantise_experts(module, quantise)
            swapped.append(MultiLoRAExperts(text_name(name), module, context, codes))
            parent_name, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent_name), last, swapped[-1])
    return swapped


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    ids: set[int] = set()
    configs = (model.generation_config, model.config.get_text_config(), tokenizer)
    for token_ids in (getattr(config, "eos_token_id", None) for config in configs):
        ids.update([token_ids] if isinstance(token_ids, int) else token_ids or [])
    return frozenset(ids)
