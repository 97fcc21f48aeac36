"""The values that every part shares: what a client asked for, and what came out of it.

Frozen dataclasses over numpy arrays that view the request's bytes wherever they can. No I/O, no SQL, no device,
no HTTP. Letters of shapes: N positions of one datum, K targets per position, T tokens of a prompt or an answer,
k entries of a top-k list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
class Datum:
    """One training sequence. `inputs` are the loss's arrays, each with N rows (or shape [N, K])."""

    tokens_N: I32
    inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Pass:
    """One `forward` or `forward_backward` request."""

    request_id: str
    model_id: str
    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: Mapping[str, float | str]
    forward_only: bool

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens_N) for datum in self.data)


@dataclass(frozen=True, slots=True)
class PassResult:
    """`logprobs[i]` is float32 with the shape of datum i's target_tokens; metric names carry one ':'."""

    logprobs: tuple[F32, ...]
    metrics: Mapping[str, float]


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

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class OptimStep:
    """One `optim_step` request."""

    request_id: str
    model_id: str
    params: AdamParams


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`max_tokens` None runs to the end of the context. `stop_eos` is False only for an explicit `stop=[]`."""

    max_tokens: int | None = None
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    stop_eos: bool = True
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One `asample` request against a frozen weight version; `version_id` None is the base model."""

    request_id: str
    version_id: str | None
    prompt_T: I32
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class TopK:
    """Rows of the k likeliest tokens; an empty cell is token 0 with logprob -99999 (the wire's sentinel)."""

    token_ids_Tk: I32
    logprobs_Tk: F32


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """`stop_reason` is 'stop' or 'length'; tokens include what stopped the sequence and are never empty."""

    tokens_T: I32
    logprobs_T: F32  # at the sampling temperature
    stop_reason: str
    topk: TopK | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """`prompt_logprobs_T` is at temperature 1, with NaN at position 0."""

    request_id: str
    sequences: tuple[SampledSequence, ...]
    prompt_logprobs_T: F32 | None = None
    topk_prompt: TopK | None = None
    prompt_cache_hit_tokens: int = 0


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


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a server must know of a base model to check requests against it."""

    name: str
    path: str
    vocab_size: int
    max_context_length: int
    arch: str
