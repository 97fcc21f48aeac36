"""Admission of samples: what the model can serve, the tenant's quotas, and the process that will compute the sample.

All samples take this path: those of the Tinker API, of clients of OpenAI's protocol, and of bulk jobs. The bodies in
`wire` validate single fields. Values are never guessed, clamped or corrected for the client.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tinsmith.auth.quotas import Quotas
from tinsmith.cluster.executors import Dispatch
from tinsmith.errors import UserError
from tinsmith.losses import check_csr
from tinsmith.store.futures import NewFuture
from tinsmith.store.sampling_sessions import SamplingSession
from tinsmith.types import ModelShape, Sample, SamplingParams, SparseRows
from tinsmith.wire.sampling import MAX_STOP_LENGTH, MAX_STOPS, MAX_TOP_LOGPROBS

MAX_LOGPROBS = 2**23  # of one kind, in one sample; ids and logprobs take 64 MiB


def check_sample(sample: Sample, shape: ModelShape) -> None:
    """Raise UserError unless `shape` can serve the sample."""
    _check_prompt(sample, shape)
    _check_params(sample.params, shape)
    max_top = min(MAX_TOP_LOGPROBS, shape.vocab_size)
    _check_integer("topk_prompt_logprobs", sample.topk_prompt_logprobs, 0, max_top)
    _check_integer("topk_sample_logprobs", sample.topk_sample_logprobs, 0, max_top)
    _check_last_n(sample)
    _check_targets(sample, shape)
    _check_amounts(sample, shape)


def count_max_tokens(sample: Sample, shape: ModelShape) -> int:
    """Return the most tokens that a sample can have: the prompt once, plus every sampled sequence at full length."""
    answer_length = sample.params.max_tokens or sample.max_answer_tokens(shape.max_context_length)
    return min(len(sample.prompt_T) + sample.num_samples * answer_length, 2**31 - 1)


def make_request(session: SamplingSession, request_id: str, seq_id: int | None, body: bytes) -> NewFuture:
    """Make the request for a sample of a sampling session, before its admission."""
    return NewFuture(
        request_id=request_id,
        tenant_id=session.tenant_id,
        session_id=session.session_id,
        base_model=session.base_model,
        kind="sample",
        body=body,
        sampling_session_id=session.sampling_session_id,
        seq_id=seq_id,
        run_id=session.model_id,
    )


@dataclass(frozen=True, slots=True)
class SampleAdmission:
    quotas: Quotas
    dispatch: Dispatch

    def admit(self, request: NewFuture, sample: Sample, shape: ModelShape, *, inflight: bool = False) -> NewFuture:
        """Return the request with its tokens and its executor. `inflight` versions change under their name.

        Raises UserError if `shape` cannot serve the sample, and TooManyRequestsError if a quota is exhausted.
        """
        check_sample(sample, shape)
        request = replace(request, num_tokens=count_max_tokens(sample, shape))
        self.quotas.admit(request)
        return self.dispatch.assign(request, sample, inflight=inflight)


def _check_prompt(sample: Sample, shape: ModelShape) -> None:
    num_prompt, context, max_tokens = len(sample.prompt_T), shape.max_context_length, sample.params.max_tokens
    if num_prompt == 0:
        raise UserError("prompt is empty; it must hold at least one token")
    if sample.prompt_T.max() >= shape.vocab_size:
        position = int(sample.prompt_T.argmax())
        raise UserError(
            f"prompt token {position} is {sample.prompt_T[position]}; token ids of {shape.name!r} lie "
            f"between 0 and {shape.vocab_size - 1}"
        )
    if (max_tokens or 1) > sample.max_answer_tokens(context):
        completion = f"max_tokens {max_tokens}" if max_tokens else "one generated token"
        raise UserError(
            f"the prompt of {num_prompt} tokens and {completion} exceed the context of {context} tokens; "
            "shorten the prompt or lower max_tokens"
        )


def _check_params(params: SamplingParams, shape: ModelShape) -> None:
    if len(params.stop_strings) > MAX_STOPS or len(params.stop_tokens) > MAX_STOPS:
        count = max(len(params.stop_strings), len(params.stop_tokens))
        raise UserError(f"sampling_params.stop has {count} entries; at most {MAX_STOPS} are allowed")
    for text in params.stop_strings:
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            raise UserError(f"sampling_params.stop has a string of {len(text)} characters; use 1 to {MAX_STOP_LENGTH}")
    for token in params.stop_tokens:
        _check_integer("sampling_params.stop token", token, 0, shape.vocab_size - 1)


def _check_last_n(sample: Sample) -> None:
    last_n = sample.prompt_logprobs_last_n
    if last_n is None:
        return
    if not sample.prompt_logprobs:
        raise UserError(f"prompt_logprobs_last_n is {last_n}, but prompt_logprobs is not set; set it or omit both")
    if len(sample.prompt_T) == 1:
        raise UserError(
            f"prompt_logprobs_last_n is {last_n}, but the prompt's only token has no logprob; leave it out or "
            "send a longer prompt"
        )
    _check_integer(
        "prompt_logprobs_last_n", last_n, 1, len(sample.prompt_T) - 1, " (the prompt's tokens but the first)"
    )


def _check_targets(sample: Sample, shape: ModelShape) -> None:
    targets, name = sample.target_prompt_logprobs, "target_prompt_logprobs"
    if targets is None:
        return
    num_rows, width = targets.shape
    if num_rows != len(sample.prompt_T) - 1:
        raise UserError(
            f"{name}.shape is {list(targets.shape)}; a prompt of {len(sample.prompt_T)} tokens needs "
            f"{len(sample.prompt_T) - 1} rows: row i is for prompt token i + 1"
        )
    if num_rows * width > MAX_LOGPROBS:
        raise UserError(
            f"{name}.shape is {list(targets.shape)}; at most {MAX_LOGPROBS} cells are scored in one request: "
            "ask for fewer ids per token"
        )
    if isinstance(targets, SparseRows):
        check_csr(name, targets)
    ids = targets.values if isinstance(targets, SparseRows) else targets
    invalid_ids = ids[(ids < -1) | (ids >= shape.vocab_size)]
    if invalid_ids.size:
        raise UserError(
            f"{name} holds the id {invalid_ids[0]}; token ids of {shape.name!r} lie between 0 and "
            f"{shape.vocab_size - 1}, and -1 is a placeholder"
        )
    if not np.any(ids >= 0):
        raise UserError(f"{name} names no token; name at least one or leave it out")


def _check_amounts(sample: Sample, shape: ModelShape) -> None:
    """Bound the logprobs of one sample, which stay in memory until the sample ends and are sent in one response."""
    num_prompt, num_samples = len(sample.prompt_T), sample.num_samples
    max_tokens = sample.params.max_tokens or sample.max_answer_tokens(shape.max_context_length)
    for name, k, rows, row_description in (
        ("topk_prompt_logprobs", sample.topk_prompt_logprobs, num_prompt, f"{num_prompt} prompt tokens"),
        ("prompt_alt_tokens_k", sample.prompt_alt_tokens_k, num_prompt, f"{num_prompt} prompt tokens"),
        (
            "topk_sample_logprobs",
            sample.topk_sample_logprobs,
            num_samples * max_tokens,
            f"{num_samples} answers of up to {max_tokens} tokens",
        ),
    ):
        if k * rows > MAX_LOGPROBS:
            raise UserError(
                f"{name} is {k}; for {row_description} that is more than {MAX_LOGPROBS} logprobs: "
                f"use at most {MAX_LOGPROBS // rows}, or ask for fewer tokens"
            )


def _check_integer(name: str, value: int, low: int, high: int, hint: str = "") -> None:
    if not low <= value <= high:
        raise UserError(f"{name} is {value}; it must lie between {low} and {high}{hint}")
