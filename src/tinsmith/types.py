"""The values that all packages share: requests and their results.

Frozen dataclasses over numpy arrays, which view the request's bytes where possible. No I/O, no SQL, no device, no HTTP.
Letters of shapes: N positions of one datum, K targets per position, T tokens of a prompt or an answer, k entries of a
top-k list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

LORA_ALPHA = 32.0
"""Every adapter's alpha, whatever its rank (Tinker's choice): the delta is (32 / rank) * B @ A."""


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
    """An image chunk of an input: its encoded bytes, and the positions `start` to `stop` that it takes there.

    `where` is the chunk's path in the request, for errors. Width and height are those of the file's header.
    """

    where: str
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
    """One training sequence. `inputs` are the loss's arrays, each with N rows (or shape [N, K]). Where an image is,
    `tokens_N` has the model's image token.
    """

    tokens_N: I32
    inputs: Mapping[str, Array]
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions of a datum, and where they claim to come from: a recorded sequence's prompt or answer."""

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
    """A constant of torch by name: `kind` is dtype, device, layout or memory_format."""

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
    """One node of a traced loss, as torch.fx records it. `target` is a name and nothing that could be called."""

    op: str
    name: str
    target: str
    args: tuple[LossArgument, ...]
    kwargs: Mapping[str, LossArgument]


@dataclass(frozen=True, slots=True)
class LossInput:
    """What a custom loss reads of a datum, with its rank; the first is `logprobs`."""

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

    `custom_loss` is what its configuration's loss_id names. `replayed` marks a pass that took effect before.
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

    `elementwise_loss[i]` has that shape, too, and sums to the loss. Losses that report none have an empty tuple.
    """

    logprobs: tuple[F32, ...]
    metrics: Mapping[str, float]
    elementwise_loss: tuple[F32, ...] = ()


_MIXES_TOKENS = re.compile(r"attn|attention|\.(mamba|conv)\.|\.mixer\.(in|out|q|k|v|o|gate|x)_proj$")


def mixes_tokens(path: str) -> bool:
    """Whether a linear, by its path, is one of those that `train_attn` trains: attention's, or of a layer that keeps a
    state.
    """
    return _MIXES_TOKENS.search(path) is not None


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """What an adapter is: fixed at creation. `seed` None means a seed derived from the model's id."""

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW with decoupled decay; defaults are the SDK's. grad_clip_norm 0 means no clipping."""

    family: ClassVar[str] = "adamw"
    version: ClassVar[int | None] = None
    state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    """Names of the moments, in memory and in a checkpoint."""
    for_lora_only: ClassVar[bool] = False
    wire_field: ClassVar[str] = "adam_params"

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def problem(self) -> str | None:
        """The first field that AdamW cannot use, with its value and what it must be."""
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
    """Momentum, made orthogonal matrix by matrix (docs/optimizers.md). grad_clip_norm 0 or less means no clipping."""

    family: ClassVar[str] = "dimuon"
    version: ClassVar[int | None] = 1
    state: ClassVar[tuple[str, ...]] = ("momentum",)
    for_lora_only: ClassVar[bool] = True
    wire_field: ClassVar[str] = "optimizer_params of type 'dimuon'"

    learning_rate: float
    beta1: float = 0.9
    grad_clip_norm: float = 0.0

    def problem(self) -> str | None:
        """As `AdamParams.problem`."""
        if not (math.isfinite(self.learning_rate) and self.learning_rate >= 0):
            return f"optimizer_params.learning_rate is {self.learning_rate}; it must be finite and at least 0"
        if not math.isfinite(self.grad_clip_norm):
            return f"optimizer_params.grad_clip_norm is {self.grad_clip_norm}; it must be finite"
        if not 0 <= self.beta1 < 1:
            return f"optimizer_params.beta1 is {self.beta1}; it must be at least 0 and below 1"
        return None


OptimParams = AdamParams | DimuonParams

OPTIMIZERS: Mapping[str, type[OptimParams]] = {each.family: each for each in (AdamParams, DimuonParams)}
"""The registry of optimizers: hyperparameters, their check, the names of the state. `backends.torch.optim` has the step
of each.
"""


@dataclass(frozen=True, slots=True)
class OptimStep:
    """One `optim_step` request; its parameters are of the family that the model was created with."""

    request_id: str
    model_id: str
    params: OptimParams


JSON_FORM: Mapping[str, bool | str] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's options for JSON: on one line, as json.dumps writes it and chat templates show calls. With free white
space a model may never stop writing it."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match: `kind` is json_schema, regex, lark or json_lark, and `text` is written in that.

    json_lark is lark whose answers are JSON and marks around it, without any quotation mark elsewhere.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Changes to the sampling distribution; the reported logprobs stay the model's own.

    Applied in this order: masks, bias, repetition penalty (tokens of prompt and answer), frequency and presence
    penalty (tokens of the answer), temperature, min_p. The defaults change nothing. The masks are the grammar,
    `allowed_token_ids` (empty: all), `bad_words` (sequences of tokens of which no answer contains one), and
    `min_tokens` (tokens of an answer before one that stops it).
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


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`max_tokens` None runs to the end of the context. `stop_eos` False lets end tokens stop nothing."""

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
    `target_prompt_logprobs` holds ids [T - 1, K], whose row i is for prompt token i + 1; -1 asks for nothing.
    Prompt caches are shared within one `cache_scope` only, since a hit reveals the prompts of others. With `stream`,
    the engine reports tokens as they are drawn. Where an image is, `prompt_T` has the model's image token.
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


EMPTY_LOGPROB = -99999.0
"""The wire's mark, with token 0, of an empty top-k cell."""


@dataclass(frozen=True, slots=True)
class TopK:
    """Rows of the k likeliest tokens; an empty cell is token 0 with logprob EMPTY_LOGPROB."""

    token_ids_Tk: I32
    logprobs_Tk: F32


@dataclass(frozen=True, slots=True)
class AltTokens:
    """Tokens drawn in place of the prompt's own: row i holds k draws for prompt token i + 1, [T - 1, k]."""

    token_ids_Tk: I64
    logprobs_Tk: F32


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """`stop_reason` is 'stop' or 'length'; tokens include what stopped the sequence and are never empty."""

    tokens_T: I32
    logprobs_T: F32  # at the sampling temperature
    stop_reason: str
    topk: TopK | None = None


@dataclass(frozen=True, slots=True)
class Partial:
    """Tokens of an answer that is not complete: those from `start` on of sequence `index`."""

    request_id: str
    index: int
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    topk: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class SampleResult:
    """All logprobs of the prompt are at temperature 1; `prompt_logprobs_T` is NaN where there is none.

    `target_prompt` has the shape and the layout of the request's targets, with 0 where these are -1.
    """

    request_id: str
    sequences: tuple[SampledSequence, ...]
    prompt_logprobs_T: F32 | None = None
    topk_prompt: TopK | None = None
    prompt_cache_hit_tokens: int = 0
    target_prompt: F32 | SparseRows | None = None
    alt_tokens: AltTokens | None = None


@dataclass(frozen=True, slots=True)
class Pending:
    """What the scheduler knows of a request: metadata only."""

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


VISION_TYPES = frozenset({"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
"""Values of config.json's model_type whose images are taken."""

MAX_ASPECT = 200
"""Of an image's longer side to its shorter one: what the Qwen image processors take."""


@dataclass(frozen=True, slots=True)
class VisionShape:
    """How a model counts the tokens of an image: one for each square of `token_pixels` pixels a side, after the image
    has been resized to between `min_pixels` and `max_pixels` with sides that are multiples of `token_pixels`.

    This is the arithmetic of the Qwen image processors (transformers, image_processing_qwen2_vl.smart_resize).
    """

    image_token_id: int
    token_pixels: int
    min_pixels: int
    max_pixels: int

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tokens of an image whose aspect ratio is at most MAX_ASPECT."""
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
    """What a server must know of a base model to check requests against it. Without `vision` it takes text alone."""

    name: str
    path: str
    vocab_size: int
    max_context_length: int
    arch: str
    vision: VisionShape | None = None
