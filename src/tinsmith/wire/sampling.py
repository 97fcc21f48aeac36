"""asample: JSON request -> `types.Sample`; `types.SampleResult` -> SampleResponse bytes.

Unknown fields are refused unless their value is empty, because the SDK always sends its defaults.
`record_stability_info` does not change sampling (docs/losses.md describes stable_reinforce).

A stored request may also have the field `beyond`: parameters that only this server's chat routes write. An asample with
it is refused, as with any unknown field.

Shape letters: T tokens, K targets of a prompt token, k entries of a top-k row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field, WithJsonSchema, model_validator
from pydantic.json_schema import SkipJsonSchema

from tinsmith.errors import UserError
from tinsmith.types import (
    F32,
    I32,
    I64,
    Adjustments,
    Grammar,
    Image,
    ReasoningSpan,
    Sample,
    SampledSequence,
    SampleResult,
    SamplingParams,
    SparseRows,
    TopK,
    VisionShape,
)
from tinsmith.wire import tinker_public_pb2 as pb
from tinsmith.wire.fields import (
    Body,
    ClosedBody,
    GrammarText,
    Ignored,
    Integer,
    Number,
    OneOf,
    Position,
    Schema,
    Text,
    json_schemas,
    read_object,
    refuse,
    show,
    validate,
    validation_error,
)
from tinsmith.wire.images import FORMATS, InputParts, chunks_of, image_chunk, refuse_chunk
from tinsmith.wire.training import check_sizes

INTEGERS: Schema = {"type": "array", "items": {"type": "integer"}}
_DEFAULTS = Adjustments()
_NUMBER_FIELDS = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")


def sample_body(
    prompt: Sequence[int],
    num_samples: int,
    params: SamplingParams,
    logprob_fields: Mapping[str, object],
    *,
    stream: bool = False,
    images: Sequence[Image] = (),
) -> dict[str, object]:
    """The stored body of a sample; `logprob_fields` are the fields that request logprobs."""
    sampling_params = {"max_tokens": params.max_tokens, "seed": params.seed, "temperature": params.temperature}
    sampling_params |= {"top_k": params.top_k, "top_p": params.top_p, "stop": list(params.stop_strings) or None}
    extensions = {"stop_tokens": list(params.stop_tokens), "stop_eos": params.stop_eos, "stream": stream}
    return {
        "prompt": {"chunks": chunks_of(prompt, images)},
        "num_samples": num_samples,
        "sampling_params": sampling_params,
        "beyond": extensions | _adjustment_fields(params.adjustments),
        **logprob_fields,
    }


def _adjustment_fields(adjustments: Adjustments | None) -> dict[str, object]:
    if adjustments is None:
        return {}
    fields: dict[str, object] = {name: getattr(adjustments, name) for name in _NUMBER_FIELDS}
    fields["logit_bias"] = [[token_id, bias] for token_id, bias in adjustments.logit_bias]
    fields["allowed_token_ids"] = list(adjustments.allowed_token_ids)
    fields["bad_words"] = [list(word) for word in adjustments.bad_words]
    if adjustments.grammar:
        fields["grammar"] = {"kind": adjustments.grammar.kind, "text": adjustments.grammar.text}
    if adjustments.reasoning:
        fields["reasoning"] = asdict(adjustments.reasoning)
    return fields


MAX_NUM_SAMPLES = 1024
MAX_TOP_LOGPROBS = 1024
MAX_TEMPERATURE = 1e30  # the sampler computes in float32
INT32_MAX = 2**31 - 1
LAST_N_DESCRIPTION = "at most the prompt's length - 1; with prompt_logprobs only"
TARGETS_DESCRIPTION = (
    "int64 ids [prompt's length - 1, K], dense or CSR; -1 asks for nothing, and at least one id is another"
)
MAX_STOPS = 64
MAX_STOP_LENGTH = 256


class EncodedTextChunkBody(Body):
    tokens: list[Position]
    type: Annotated[str, OneOf(("encoded_text",))] = "encoded_text"


class ImageChunkBody(Body):
    """An image for a vision model, whose image processor determines the number of tokens."""

    data: Annotated[str, WithJsonSchema({"type": "string", "contentEncoding": "base64"})]
    format: Annotated[str, OneOf(FORMATS)]
    expected_tokens: Annotated[int, Field(description="refused unless it is the number counted here")] | None = None
    type: Annotated[str, OneOf(("image",))]


_CHUNKS: Schema = {
    "type": "array",
    "items": {
        "anyOf": [
            json_schemas(EncodedTextChunkBody)["EncodedTextChunk"],
            json_schemas(ImageChunkBody)["ImageChunk"],
        ]
    },
}


class ModelInputBody(Body):
    chunks: Annotated[list[Any], WithJsonSchema(_CHUNKS)]
    """Read chunk by chunk in `_prompt`."""


_STOP_TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STOP: Schema = {
    "description": "[] stops at nothing, not even at the end-of-text token",
    "anyOf": [
        _STOP_TEXT,
        {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOPS},
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
            "maxItems": MAX_STOPS,
        },
    ],
}


def _check_top_k(top_k: int) -> int:
    if top_k == 0:
        raise validation_error(f"is 0; it must lie between 1 and {INT32_MAX}; -1 turns it off")
    return top_k


class SamplingParamsBody(ClosedBody):
    max_tokens: (
        Annotated[int, Field(ge=1, le=INT32_MAX, description="without it, to the end of the context")] | None
    ) = None
    seed: Annotated[Integer, Field(description="without it, each answer is another one")] | None = None
    stop: Annotated[Any, WithJsonSchema(_STOP)] = None
    temperature: Annotated[Number, Field(ge=0, le=MAX_TEMPERATURE, description="0 is greedy")] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX, description="-1 turns it off"), AfterValidator(_check_top_k)] = -1
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    type: Ignored = None


class TensorDataBody(ClosedBody):
    """Ids or numbers, dense or in CSR form. The lists are parsed as arrays, not item by item."""

    data: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "number"}})]
    dtype: Annotated[Text, WithJsonSchema({"enum": ["int64", "float32"]})]
    shape: Annotated[Any, WithJsonSchema(INTEGERS)] = None
    sparse_crow_indices: Annotated[Any, WithJsonSchema(INTEGERS)] = None
    sparse_col_indices: Annotated[Any, WithJsonSchema(INTEGERS)] = None


Count = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS, description="at most the vocabulary")]
SampleNumber = Annotated[int, Field(ge=0, le=2**62)]


class AsampleRequest(ClosedBody):
    """A sample has a sampling session and a number there, or names its weights."""

    prompt: ModelInputBody
    sampling_session_id: Text | None = None
    seq_id: SampleNumber | None = None
    base_model: Text | None = None
    model_path: Text | None = None
    sampling_params: SamplingParamsBody = SamplingParamsBody()
    num_samples: Annotated[int, Field(ge=1, le=MAX_NUM_SAMPLES)] = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    target_prompt_logprobs: Annotated[TensorDataBody, Field(description=TARGETS_DESCRIPTION)] | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, le=INT32_MAX, description=LAST_N_DESCRIPTION)] | None = None
    record_stability_info: bool = False
    type: Ignored = None

    @model_validator(mode="after")
    def _check_weights(self) -> AsampleRequest:
        if self.sampling_session_id is not None and (self.base_model or self.model_path):
            raise UserError(
                "sampling_session_id has weights of its own; send no base_model and no model_path beside it"
            )
        return self


class SampleRequest(AsampleRequest):
    """An `AsampleRequest` whose weights are known; the sampling session and the number are ignored."""

    sampling_session_id: Ignored = None
    seq_id: Ignored = None
    base_model: SkipJsonSchema[Annotated[Any, refuse("the weights are named elsewhere")]] = None
    model_path: SkipJsonSchema[Annotated[Any, refuse("the weights are named elsewhere")]] = None


class GrammarBody(Body):
    kind: Text
    text: GrammarText


class ReasoningBody(Body):
    open_id: Position
    close_id: Position
    is_open: bool = False
    max_tokens: int | None = None
    is_advisory: bool = False
    header_ids: list[Position] = Field(default_factory=list)

    def span(self) -> ReasoningSpan:
        return ReasoningSpan(**self.model_dump(exclude={"header_ids"}), header_ids=tuple(self.header_ids))


class ExtensionsBody(Body):
    min_p: float = _DEFAULTS.min_p
    repetition_penalty: float = _DEFAULTS.repetition_penalty
    presence_penalty: float = _DEFAULTS.presence_penalty
    frequency_penalty: float = _DEFAULTS.frequency_penalty
    logit_bias: list[Any] = Field(default_factory=list)
    grammar: GrammarBody | None = None
    reasoning: ReasoningBody | None = None
    allowed_token_ids: list[int] = Field(default_factory=list)
    bad_words: list[list[int]] = Field(default_factory=list)
    min_tokens: int = _DEFAULTS.min_tokens
    stop_tokens: list[int] = Field(default_factory=list)
    stop_eos: bool = True
    stream: bool = False

    def apply_to(self, sample: Sample) -> Sample:
        """Return the sample with these parameters."""
        adjustments = Adjustments(
            **{name: getattr(self, name) for name in _NUMBER_FIELDS},
            logit_bias=tuple((int(token_id), float(bias)) for token_id, bias in self.logit_bias),
            grammar=self.grammar and Grammar(self.grammar.kind, self.grammar.text),
            allowed_token_ids=tuple(self.allowed_token_ids),
            bad_words=tuple(tuple(word) for word in self.bad_words),
            reasoning=self.reasoning and self.reasoning.span(),
        )
        params = replace(
            sample.params,
            stop_tokens=tuple(self.stop_tokens),
            stop_eos=self.stop_eos,
            adjustments=None if adjustments == _DEFAULTS else adjustments,
        )
        return replace(sample, params=params, stream=self.stream)


class StoredSampleRequest(SampleRequest):
    extensions: Annotated[ExtensionsBody | None, Field(alias="beyond")] = None


_STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


def read_sample(body: bytes, request_id: str, version_id: str | None, vision: VisionShape | None = None) -> Sample:
    """Parse the stored body of a sample."""
    request = validate(StoredSampleRequest, read_object(body))
    sample = sample_of(request, request_id, version_id, vision)
    return sample if request.extensions is None else request.extensions.apply_to(sample)


def sample_of(
    request: AsampleRequest, request_id: str, version_id: str | None, vision: VisionShape | None = None
) -> Sample:
    """The sample of a request. `vision` is that of the base model; without it, images are refused."""
    prompt = _prompt(request.prompt.chunks, vision)
    return Sample(
        request_id=request_id,
        version_id=version_id,
        prompt_T=prompt.tokens,
        images=prompt.images,
        num_samples=request.num_samples,
        params=_params(request.sampling_params),
        record_stability_info=request.record_stability_info,
        prompt_logprobs=request.prompt_logprobs,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        target_prompt_logprobs=_targets(request.target_prompt_logprobs),
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
    )


def _prompt(chunks: Sequence[object], vision: VisionShape | None) -> InputParts:
    parts = InputParts(vision)
    for index, chunk in enumerate(chunks):
        path = f"prompt.chunks[{index}]"
        if not isinstance(chunk, dict):
            raise UserError(f"{path} is {show(chunk)}; it must be an object")
        kind = chunk.get("type", "encoded_text")
        if kind == "encoded_text":
            parts.add_tokens(token_ids(chunk.get("tokens"), f"{path}.tokens"))
        elif kind == "image" and vision is not None:
            parts.add_image(image_chunk(chunk, path), path)
        else:
            raise refuse_chunk(path, kind, vision)
    return parts


def token_ids(value: object, path: str) -> I32:
    """A JSON list of integers as int32; admission checks them against the vocabulary."""
    ids = _integers(value, path)
    if len(ids) and (ids.min() < 0 or ids.max() > INT32_MAX):
        raise UserError(f"{path} holds {ids.min()} .. {ids.max()}; token ids lie between 0 and {INT32_MAX}")
    return ids.astype(np.int32)


def _integers(value: object, path: str) -> I64:
    if not isinstance(value, list):
        raise UserError(f"{path} is {show(value)}; it must be a list of integers")
    if not value:
        return np.empty(0, np.int64)
    try:
        # Without a given dtype, numpy infers it: floats, strings and nested lists do not give 'i'.
        array = np.array(value)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{path} is not a flat list of integers: {error}") from error
    if array.dtype.kind != "i" or array.ndim != 1:
        raise UserError(f"{path} must be a flat list of integers below 2**63, which {show(value)} is not")
    return array


def _targets(body: TensorDataBody | None) -> I64 | SparseRows | None:
    """Ids [T - 1, K], dense or in CSR form; admission checks them against the prompt."""
    if body is None:
        return None
    path = "target_prompt_logprobs"
    if body.dtype != "int64":
        raise UserError(f"{path}.dtype is {show(body.dtype)}; token ids are 'int64'")
    sizes = _integers(body.shape, f"{path}.shape")
    if len(sizes) != 2 or sizes.min() < 0:
        raise UserError(f"{path}.shape is {show(body.shape)}; it must be [len(prompt) - 1, K]")
    num_rows, width = int(sizes[0]), int(sizes[1])
    check_sizes(path, (num_rows, width))
    values = _integers(body.data, f"{path}.data")
    if body.sparse_crow_indices is None and body.sparse_col_indices is None:
        if len(values) != num_rows * width:
            raise UserError(f"{path}.data holds {len(values)} ids, which do not fill the shape {show(body.shape)}")
        return values.reshape(num_rows, width)
    crow = _integers(body.sparse_crow_indices, f"{path}.sparse_crow_indices")
    col = _integers(body.sparse_col_indices, f"{path}.sparse_col_indices")
    return SparseRows(values, crow, col, (num_rows, width))


def _params(body: SamplingParamsBody) -> SamplingParams:
    strings, tokens = _stops(body.stop)
    return SamplingParams(
        max_tokens=body.max_tokens,
        seed=body.seed,
        stop_strings=strings,
        stop_tokens=tokens,
        stop_eos=body.stop != [],
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
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
    message = pb.SampleResponse(
        prompt_cache_hit_tokens=result.prompt_cache_hit_tokens, weight_version=result.weight_version
    )
    for sequence in result.sequences:
        sequence_message = message.sequences.add()
        sequence_message.stop_reason = _STOP_REASONS[sequence.stop_reason]
        sequence_message.tokens = np.ascontiguousarray(sequence.tokens_T, "<i4").tobytes()
        sequence_message.logprobs = np.ascontiguousarray(sequence.logprobs_T, "<f4").tobytes()
        if sequence.topk is not None:
            _write_topk(sequence_message.topk_sampled_logprobs, sequence.topk)
    if result.prompt_logprobs_T is not None:
        message.prompt_logprobs = np.ascontiguousarray(result.prompt_logprobs_T, "<f4").tobytes()
    if result.topk_prompt is not None:
        _write_topk(message.topk_prompt_logprobs, result.topk_prompt)
    if result.target_prompt is not None:
        _write_tensor(message.target_prompt_logprobs, result.target_prompt)
    if result.alt_tokens is not None:
        _write_tensor(message.prompt_alt_tokens.tokens, result.alt_tokens.token_ids_Tk)
        _write_tensor(message.prompt_alt_tokens.logprobs, result.alt_tokens.logprobs_Tk)
    return message.SerializeToString()


def _write_topk(message: pb.TopkLogprobs, topk: TopK) -> None:
    message.token_ids = np.ascontiguousarray(topk.token_ids_Tk, "<i4").tobytes()
    message.logprobs = np.ascontiguousarray(topk.logprobs_Tk, "<f4").tobytes()
    message.length, message.k = topk.token_ids_Tk.shape


def _write_tensor(message: pb.Tensor, array: F32 | I64 | SparseRows) -> None:
    values = array.values if isinstance(array, SparseRows) else array
    message.dtype = pb.DTYPE_FLOAT32 if values.dtype.kind == "f" else pb.DTYPE_INT64
    message.shape.extend(array.shape)
    data = np.ascontiguousarray(values, "<f4" if values.dtype.kind == "f" else "<i8").tobytes()
    if isinstance(array, SparseRows):
        message.sparse_csr.values = data
        message.sparse_csr.crow_indices = np.ascontiguousarray(array.crow_indices, "<i8").tobytes()
        message.sparse_csr.col_indices = np.ascontiguousarray(array.col_indices, "<i8").tobytes()
    else:
        message.dense = data


def read_sample_result(body: bytes, request_id: str) -> SampleResult:
    """Parse the stored result of a sample; alternative tokens and logprobs of targets are left out."""
    message = pb.SampleResponse.FromString(body)
    reasons = {code: name for name, code in _STOP_REASONS.items()}
    return SampleResult(
        request_id=request_id,
        sequences=tuple(
            SampledSequence(
                tokens_T=np.frombuffer(sequence.tokens, "<i4").astype(np.int32, copy=False),
                logprobs_T=np.frombuffer(sequence.logprobs, "<f4").astype(np.float32, copy=False),
                stop_reason=reasons[sequence.stop_reason],
                topk=_read_topk(sequence.topk_sampled_logprobs) if sequence.HasField("topk_sampled_logprobs") else None,
            )
            for sequence in message.sequences
        ),
        prompt_logprobs_T=np.frombuffer(message.prompt_logprobs, "<f4") if message.prompt_logprobs else None,
        topk_prompt=_read_topk(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else None,
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
        weight_version=message.weight_version,
    )


def _read_topk(message: pb.TopkLogprobs) -> TopK:
    shape = (message.length, message.k)
    return TopK(
        np.frombuffer(message.token_ids, "<i4").reshape(shape), np.frombuffer(message.logprobs, "<f4").reshape(shape)
    )
