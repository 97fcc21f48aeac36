"""asample: JSON request -> `ops.Sample`; `ops.SampleResult` -> SampleResponse bytes.

A field that asks for something this server cannot do is refused by name; one left at its empty value is
accepted, because the SDK always sends its defaults. `record_stability_info` asks nothing of a server that
keeps no such record and is accepted (docs/losses.md says what stable_reinforce does without it).
Shape letters: T tokens, k entries of a top-k row.
"""

from __future__ import annotations

import numpy as np

from tinsmith.errors import UserError
from tinsmith.ops import I32, Sample, SampleResult, SamplingParams, TopK
from tinsmith.wire import tinker_public_pb2 as pb
from tinsmith.wire.fields import Fields, read_object, show
from tinsmith.wire.training import refuse_chunk

REQUEST_FIELDS = frozenset(
    (
        "num_samples",
        "prompt",
        "sampling_params",
        "sampling_session_id",
        "seq_id",
        "prompt_logprobs",
        "topk_prompt_logprobs",
        "topk_sample_logprobs",
        "record_stability_info",
        "type",
    )
)
PARAM_FIELDS = frozenset(("max_tokens", "seed", "stop", "temperature", "top_k", "top_p", "type"))
INT32_MAX = 2**31 - 1

_STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


def read_sample(body: bytes, request_id: str, version_id: str | None) -> Sample:
    """The whole request at once, as the engine reads it from its row."""
    return sample_of(read_object(body), request_id, version_id)


def sample_of(fields: Fields, request_id: str, version_id: str | None) -> Sample:
    fields.refuse_unknown(REQUEST_FIELDS)
    return Sample(
        request_id=request_id,
        version_id=version_id,
        prompt_T=_prompt(fields.fields("prompt")),
        num_samples=fields.integer_or("num_samples", 1),
        params=_params(fields.fields_or("sampling_params", Fields({}))),
        prompt_logprobs=fields.flag_or("prompt_logprobs", False),
        topk_prompt_logprobs=fields.integer_or("topk_prompt_logprobs", 0),
        topk_sample_logprobs=fields.integer_or("topk_sample_logprobs", 0),
    )


def _prompt(prompt: Fields) -> I32:
    chunks = prompt.values.get("chunks")
    if not isinstance(chunks, list):
        raise UserError(f"prompt.chunks is {show(chunks)}; it must be a list of chunks")
    parts = [_chunk(chunk, f"prompt.chunks[{index}]") for index, chunk in enumerate(chunks)]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _chunk(chunk: object, where: str) -> I32:
    if not isinstance(chunk, dict):
        raise UserError(f"{where} is {show(chunk)}; it must be an object")
    kind = chunk.get("type", "encoded_text")
    if kind != "encoded_text":
        raise refuse_chunk(where, kind)
    return token_ids(chunk.get("tokens"), f"{where}.tokens")


def token_ids(value: object, where: str) -> I32:
    """A JSON list of integers as int32; whether the vocabulary has them is for admission to say."""
    if not isinstance(value, list):
        raise UserError(f"{where} is {show(value)}; it must be a list of token ids")
    if not value:
        return np.empty(0, np.int32)
    try:
        # Without a dtype numpy shows what the list holds: floats, strings, nested lists are not 'i'.
        found = np.array(value)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{where} is not a flat list of token ids: {error}") from error
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise UserError(f"{where} must be a flat list of integers, which {show(value)} is not")
    if found.min() < 0 or found.max() > INT32_MAX:
        raise UserError(f"{where} holds {found.min()} .. {found.max()}; token ids lie between 0 and {INT32_MAX}")
    return found.astype(np.int32)


def _params(fields: Fields) -> SamplingParams:
    fields.refuse_unknown(PARAM_FIELDS)
    stop = fields.values.get("stop")
    strings, tokens = _stops(stop)
    return SamplingParams(
        max_tokens=fields.integer_or("max_tokens", None),
        seed=fields.integer_or("seed", None),
        stop_strings=strings,
        stop_tokens=tokens,
        stop_eos=stop != [],
        temperature=fields.number_or("temperature", 1.0),
        top_k=fields.integer_or("top_k", -1),
        top_p=fields.number_or("top_p", 1.0),
    )


def _stops(stop: object) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if stop is None:
        return (), ()
    if isinstance(stop, str):
        return (stop,), ()
    if isinstance(stop, list):
        strings = tuple(item for item in stop if isinstance(item, str))
        tokens = tuple(item for item in stop if isinstance(item, int) and not isinstance(item, bool))
        if len(stop) in (len(strings), len(tokens)):
            return strings, tokens
    raise UserError(f"sampling_params.stop is {show(stop)}; use a string, a list of strings or of token ids")


def write_sample_result(result: SampleResult) -> bytes:
    message = pb.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        written = message.sequences.add()
        written.stop_reason = _STOP_REASONS[sequence.stop_reason]
        written.tokens = np.ascontiguousarray(sequence.tokens_T, "<i4").tobytes()
        written.logprobs = np.ascontiguousarray(sequence.logprobs_T, "<f4").tobytes()
        if sequence.topk is not None:
            _write_topk(written.topk_sampled_logprobs, sequence.topk)
    if result.prompt_logprobs_T is not None:
        message.prompt_logprobs = np.ascontiguousarray(result.prompt_logprobs_T, "<f4").tobytes()
    if result.topk_prompt is not None:
        _write_topk(message.topk_prompt_logprobs, result.topk_prompt)
    return message.SerializeToString()


def _write_topk(message: pb.TopkLogprobs, topk: TopK) -> None:
    message.token_ids = np.ascontiguousarray(topk.token_ids_Tk, "<i4").tobytes()
    message.logprobs = np.ascontiguousarray(topk.logprobs_Tk, "<f4").tobytes()
    message.length, message.k = topk.token_ids_Tk.shape
