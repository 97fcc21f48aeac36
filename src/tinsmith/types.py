"""The values that all packages share: requests and their results.

They are frozen dataclasses over numpy arrays, which are views of the request's bytes where possible. This module has no
I/O, SQL, device or HTTP code. Shape letters: N positions of one datum, K targets per position, T tokens of a prompt or
a sampled sequence, k entries of a top-k list.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

LORA_ALPHA = 32.0
"""The default alpha of an adapter of any rank (Tinker's choice): the delta is (alpha / rank) * B @ A."""


def tokens_digest(*parts: I32 | Sequence[int]) -> str:
    """Return the digest of a token sequence: 16-byte blake2b of little-endian int32, in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    for tokens in parts:
        digest.update(np.asarray(tokens, "<i4").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class SparseRows:
    """A 2-D array in CSR form; entries that are not listed are zero."""

    values: F32 | I64
    crow_indices: I64  # [rows + 1]
    col_indices: I64  # [nnz]
    shape: tuple[int, int]


Array = F32 | I64 | SparseRows


@dataclass(frozen=True, slots=True)
class Image:
    """An image chunk of an input: its encoded bytes, and the positions `start` to `stop` that it occupies.

    `path` is the chunk's path in the request, for errors. Width and height come from the file's header.
    """

    path: str
    data: bytes
    format: str  # png or jpeg
    width: int
    height: int
    start: int
    num_tokens: int
    digest: bytes

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Datum:
    """One training sequence. `inputs` are the loss's arrays of shape [N] or [N, K]. At the positions of an image,
    `tokens_N` holds the model's image token.
    """

    tokens_N: I32
    inputs: Mapping[str, Array]
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions of a datum and their claimed origin in a recorded sequence."""

    sampled: bool
    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DatumSpans:
    """The provenance of a datum: spans that tile its model_input and its target_tokens."""

    model_input: tuple[Span, ...]
    loss_fn_inputs: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class NodeRef:
    """The result of an earlier node."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """A torch constant by name: `kind` is dtype, device, layout or memory_format."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class SliceArgument:
    start: LossArgument
    stop: LossArgument
    step: LossArgument


LossArgument: TypeAlias = (
    bool
    | int
    | float
    | str
    | NodeRef
    | TorchConstant
    | SliceArgument
    | EllipsisType
    | list["LossArgument"]
    | tuple["LossArgument", ...]
    | dict[str, "LossArgument"]
    | None
)
"""One encoded argument of a node (SDK: types/custom_loss_graph.py)."""


@dataclass(frozen=True, slots=True)
class LossNode:
    """One node of a traced loss, as torch.fx records it. `target` is a name, never a callable."""

    op: str
    name: str
    target: str
    args: tuple[LossArgument, ...]
    kwargs: Mapping[str, LossArgument]


@dataclass(frozen=True, slots=True)
class LossInput:
    """An array of a datum that a custom loss reads, with its rank; the first is `logprobs`."""

    name: str
    rank: int


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """A loss that a client traced: it runs once per datum, and the losses of all data are summed."""

    name: str
    inputs: tuple[LossInput, ...]
    nodes: tuple[LossNode, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """One `forward` or `forward_backward` request.

    `custom_loss` is the loss that `loss_id` of loss_config names. `replayed` marks a pass that took effect before.
    """

    request_id: str
    model_id: str
    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: Mapping[str, float | str]
    forward_only: bool
    custom_loss: CustomLoss | None = None
    replayed: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens_N) for datum in self.data)


@dataclass(frozen=True, slots=True)
class PassResult:
    """`logprobs[i]` is float32 with the shape of datum i's target_tokens; metric names carry one ':'.

    `elementwise_loss[i]` has the same shape and sums to the loss; the tuple is empty for losses that report none.
    `num_rows`: the tokens that went through the model, of which those that data share count once; None: all of them.
    """

    logprobs: tuple[F32, ...]
    metrics: Mapping[str, float]
    elementwise_loss: tuple[F32, ...] = ()
    num_rows: int | None = None


_MIXES_TOKENS = re.compile(r"attn|attention|\.(mamba|conv)\.|\.mixer\.(in|out|q|k|v|o|gate|x)_proj$")


def mixes_tokens(path: str) -> bool:
    """Whether `train_attn` covers the linear layer at this path: part of attention, or of a layer with a state."""
    return _MIXES_TOKENS.search(path) is not None


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The properties of an adapter, fixed at creation. `seed` None means a seed derived from the model's id."""

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = LORA_ALPHA


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW with decoupled decay; defaults are the SDK's. grad_clip_norm 0 means no clipping."""

    family: ClassVar[str] = "adamw"
    version: ClassVar[int | None] = None
    state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    """Names of the moments, in memory and in a checkpoint."""
    for_lora_only: ClassVar[bool] = False
    is_elementwise: ClassVar[bool] = True
    """Whether an element's step depends on that element alone, beside the norm."""
    wire_field: ClassVar[str] = "adam_params"

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def problem(self) -> str | None:
        """Return the first invalid field, with its value and the valid range; None if all are valid."""
        for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                return f"adam_params.{name} is {value}; it must be finite and at least 0"
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                return f"adam_params.{name} is {value}; it must be at least 0 and below 1"
        # With eps 0 a weight that has never had a gradient becomes 0 / 0.
        if not (math.isfinite(self.eps) and self.eps > 0):
            return f"adam_params.eps is {self.eps}; it must be finite and above 0"
        return None


@dataclass(frozen=True, slots=True)
class DimuonParams:
    """Momentum, orthogonalized per matrix (docs/optimizers.md). grad_clip_norm 0 or less means no clipping."""

    family: ClassVar[str] = "dimuon"
    version: ClassVar[int | None] = 1
    state: ClassVar[tuple[str, ...]] = ("momentum",)
    for_lora_only: ClassVar[bool] = True
    is_elementwise: ClassVar[bool] = False
    wire_field: ClassVar[str] = "optimizer_params of type 'dimuon'"

    learning_rate: float
    beta1: float = 0.9
    grad_clip_norm: float = 0.0

    def problem(self) -> str | None:
        """Return the first invalid field, with its value and the valid range; None if all are valid."""
        if not (math.isfinite(self.learning_rate) and self.learning_rate >= 0):
            return f"optimizer_params.learning_rate is {self.learning_rate}; it must be finite and at least 0"
        if not math.isfinite(self.grad_clip_norm):
            return f"optimizer_params.grad_clip_norm is {self.grad_clip_norm}; it must be finite"
        if not 0 <= self.beta1 < 1:
            return f"optimizer_params.beta1 is {self.beta1}; it must be at least 0 and below 1"
        return None


OptimParams = AdamParams | DimuonParams

OPTIMIZERS: Mapping[str, type[OptimParams]] = {kind.family: kind for kind in (AdamParams, DimuonParams)}
"""The registry of optimizers: hyperparameters, validation, state. `backends.torch.optim` has the steps."""


@dataclass(frozen=True, slots=True)
class OptimStep:
    """One `optim_step` request; `params` are of the model's optimizer family."""

    request_id: str
    model_id: str
    params: OptimParams


JSON_FORM: Mapping[str, bool | str] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's options for JSON on one line, as json.dumps writes it and chat templates show calls. With flexible
whitespace, a model may write whitespace without end."""

GRAMMAR_LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Limits of llguidance, which bound the time of a compilation and of a step, whatever the grammar."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that a sampled sequence must match. `kind`, the language of `text`, is json_schema, regex, lark or
    json_lark.

    json_lark is lark for JSON with markers around it, and no quotation marks outside the JSON.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """Reasoning that a completion may begin with, between two tokens. A grammar holds from its end on.

    `is_open`: the prompt has opened it, so that the completion begins inside. `max_tokens` is the most tokens between
    the two; None: any number. `is_advisory`: a sampler that cannot close the reasoning there may ignore it.
    `header_ids` are tokens that follow `open_id`, in a format of messages, of which any number may be reasoning. A
    grammar then covers these messages, too, and `max_tokens` counts all of them.
    """

    open_id: int
    close_id: int
    is_open: bool = False
    max_tokens: int | None = None
    is_advisory: bool = False
    header_ids: tuple[int, ...] = ()

    @property
    def max_id(self) -> int:
        return max(self.open_id, self.close_id, *self.header_ids)


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Changes to the sampling distribution; the reported logprobs stay the model's own.

    They are applied in this order: masks, bias, repetition penalty (over prompt and sampled tokens), frequency and
    presence penalty (over sampled tokens), temperature, min_p. The defaults have no effect. The masks are the grammar,
    from the end of the `reasoning` on, `allowed_token_ids` (empty: all), `bad_words` (forbidden token sequences), and
    `min_tokens` (sampled tokens before a stop token is allowed).
    """

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    reasoning: ReasoningSpan | None = None

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1.0 or bool(self.frequency_penalty or self.presence_penalty)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`max_tokens` None means up to the end of the context. `stop_eos` False ignores end tokens."""

    max_tokens: int | None = None
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    stop_eos: bool = True
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    adjustments: Adjustments | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One `asample` request against a frozen weight version; `version_id` None is the base model.

    `prompt_logprobs_last_n` bounds `prompt_logprobs` and `topk_prompt_logprobs`; None scores the whole prompt.
    `target_prompt_logprobs` holds ids [T - 1, K], whose row i is for prompt token i + 1; -1 marks an unused cell.
    Prompt caches are shared only within one `cache_scope`, since a hit reveals the prompts of others. With `stream`,
    the engine reports tokens as they are sampled. At the positions of an image, `prompt_T` has the model's image token.
    """

    request_id: str
    version_id: str | None
    prompt_T: I32
    num_samples: int
    params: SamplingParams
    cache_scope: str = ""
    record_stability_info: bool = False
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: I64 | SparseRows | None = None
    prompt_alt_tokens_k: int = 0
    stream: bool = False
    images: tuple[Image, ...] = ()

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of prompt tokens are part of the result."""
        has_targets = self.target_prompt_logprobs is not None
        return bool(self.prompt_logprobs or self.topk_prompt_logprobs or self.prompt_alt_tokens_k) or has_targets

    def max_answer_tokens(self, context: int) -> int:
        """The most tokens that an answer may have in a context of `context` tokens; below 1 if the prompt is too long.

        A scored prompt may fill the context: the one token that is drawn after it is returned and never processed.
        """
        room = context - len(self.prompt_T)
        return 1 if room == 0 and self.scores_prompt else room


EMPTY_LOGPROB = -99999.0
"""The logprob, with token 0, of an empty top-k cell on the wire."""


@dataclass(frozen=True, slots=True)
class TopK:
    """The k most likely tokens per row; an empty cell is token 0 with logprob EMPTY_LOGPROB."""

    token_ids_Tk: I32
    logprobs_Tk: F32


@dataclass(frozen=True, slots=True)
class AltTokens:
    """Alternatives drawn for prompt tokens, [T - 1, k]: row i holds k draws for prompt token i + 1."""

    token_ids_Tk: I64
    logprobs_Tk: F32


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """`stop_reason` is 'stop' or 'length'; tokens include the stop tokens and are never empty."""

    tokens_T: I32
    logprobs_T: F32  # at the sampling temperature
    stop_reason: str
    topk: TopK | None = None


@dataclass(frozen=True, slots=True)
class Partial:
    """Tokens of an unfinished sample: those of sequence `index` from `start` on."""

    request_id: str
    index: int
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    topk: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class SampleResult:
    """All prompt logprobs are at temperature 1; a missing value of `prompt_logprobs_T` is NaN.

    `target_prompt` has the shape and the layout of the request's targets, with 0 where a target is -1.
    `weight_version` names the weights that sampled: the base model, a checkpoint's path, or the sampling session that
    published them; a sampler leaves it empty.
    """

    request_id: str
    sequences: tuple[SampledSequence, ...]
    prompt_logprobs_T: F32 | None = None
    topk_prompt: TopK | None = None
    prompt_cache_hit_tokens: int = 0
    target_prompt: F32 | SparseRows | None = None
    alt_tokens: AltTokens | None = None
    weight_version: str = ""


@dataclass(frozen=True, slots=True)
class Pending:
    """The metadata for scheduling a request."""

    arrival: int
    request_id: str
    tenant_id: str
    session_id: str
    kind: str
    state: str
    model_id: str | None
    sampling_session_id: str | None
    seq_id: int | None
    num_tokens: int
    created_at: float
    traceparent: str | None = None
    shared_tokens: int = 0

    @property
    def cost_tokens(self) -> int:
        """The tokens that the request is expected to send through the model: of those that data of a pass share, each
        one once.
        """
        return self.num_tokens - self.shared_tokens


VISION_TYPES = frozenset({"gemma3", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
"""Values of model_type in config.json of models that accept images."""

CONFIG_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {"vocab_size": 262_208, "max_position_embeddings": 131_072, "num_attention_heads": 8}
}
"""By the model_type of a text model: values that published config.json files omit, since they are the defaults of
transformers' configuration class.
"""

MAX_ASPECT = 200
"""The largest ratio of an image's longer to its shorter side, as in the Qwen image processors."""


@dataclass(frozen=True, slots=True)
class VisionShape:
    """How a model counts the tokens of an image. The image is resized to between `min_pixels` and `max_pixels` with
    sides that are multiples of `token_pixels`, and each square of `token_pixels` pixels a side is one token.

    This is the arithmetic of the Qwen image processors (transformers, image_processing_qwen2_vl.smart_resize). With
    `side_tokens`, as in Gemma 3, every image is resized to a square of `side_tokens` tokens a side.
    """

    image_token_id: int
    token_pixels: int
    min_pixels: int
    max_pixels: int
    side_tokens: int | None = None
    begin_token_id: int | None = None
    """The token that a chat template writes before the image's tokens, if it is not the image token."""

    end_token_id: int | None = None
    """The token after the image's tokens."""

    @property
    def most_tokens(self) -> int:
        """The most tokens of one image."""
        return self.max_pixels // self.token_pixels**2 if self.side_tokens is None else self.side_tokens**2

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tokens of an image whose aspect ratio is at most MAX_ASPECT."""
        if self.side_tokens is not None:
            return self.side_tokens, self.side_tokens
        side = self.token_pixels
        rows, columns = round(height / side), round(width / side)
        pixels = rows * columns * side**2
        if pixels > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            return max(1, math.floor(height / shrink / side)), max(1, math.floor(width / shrink / side))
        if pixels < self.min_pixels:
            stretch = math.sqrt(self.min_pixels / (width * height))
            return math.ceil(height * stretch / side), math.ceil(width * stretch / side)
        return rows, columns


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a base model with which a server validates requests. Without `vision` it accepts only text."""

    name: str
    path: str
    vocab_size: int
    max_context_length: int
    arch: str
    vision: VisionShape | None = None
