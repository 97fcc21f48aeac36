"""The stored samples of a run as a file: one row for each answer, oldest first, as JSON lines or Parquet.

Rows are read and written a few at a time, so that a file of any size needs little memory. pyarrow is loaded for Parquet
only, since a server without bulk jobs may lack it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import orjson

from tinsmith.api.dashboard.sample_groups import find_tokenizer, list_placed, spell
from tinsmith.api.request import Call, JsonObject
from tinsmith.errors import NotSupportedError
from tinsmith.store.stored_samples import SAMPLES_OF_READ, AnswerNotes, SampleContent, StoredSample
from tinsmith.types import tokens_digest
from tinsmith.wire.fields import iso

MAX_EXPORTED = 20_000
"""Samples of one file: all that a run can have."""

ROWS_OF_PART = 256
"""Answers that are in memory at once, and in a row group of Parquet."""

COLUMNS: Mapping[str, str] = {
    "request_id": "text",
    "number": "integer",
    "group": "text",
    "run": "text",
    "weights": "text",
    "weights_step": "integer",
    "base_model": "text",
    "session_id": "text",
    "created_at": "text",
    "prompt": "text",
    "prompt_tokens": "integers",
    "prompt_cut": "integer",
    "answer": "text",
    "answer_tokens": "integers",
    "logprobs": "numbers",
    "sampled_tokens": "integer",
    "stop_reason": "text",
    "reward": "number",
    "trained_in": "text",
    "step": "integer",
    "advantage": "number",
    "advantages": "numbers",
    "training_logprobs": "numbers",
}
"""The columns of a file. `group` is the same for answers to the same prompt, `run` that of the weights and `trained_in`
the one that trained on the answer, in optimizer step `step`. Lists of numbers have one entry for each answer token."""


def write_json_lines(call: Call, model_id: str) -> Iterator[bytes]:
    for row in _rows(call, model_id):
        yield orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def write_parquet(call: Call, model_id: str) -> Iterator[bytes]:
    """Return the parts of a Parquet file. Raises NotSupportedError without pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise NotSupportedError(
            "format 'parquet' needs pyarrow, which this server lacks: install tinsmith[batch], or use format=jsonl"
        ) from None
    kinds = {
        "text": pyarrow.string(),
        "integer": pyarrow.int64(),
        "number": pyarrow.float64(),
        "integers": pyarrow.list_(pyarrow.int32()),
        "numbers": pyarrow.list_(pyarrow.float32()),
    }
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])

    def write() -> Iterator[bytes]:
        sink = _Parts()
        rows = _rows(call, model_id)
        with pyarrow.parquet.ParquetWriter(pyarrow.PythonFile(sink, mode="w"), schema, compression="zstd") as writer:
            while part := list(islice(rows, ROWS_OF_PART)):
                writer.write_table(pyarrow.Table.from_pylist(part, schema=schema))
                yield from sink.take()
        yield from sink.take()

    return write()


class _Parts(io.RawIOBase):
    """A file that gives what was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:  # noqa: ANN401  any buffer
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def take(self) -> list[bytes]:
        parts, self._parts = self._parts, []
        return parts


def _rows(call: Call, model_id: str) -> Iterator[JsonObject]:
    store = call.services.stored_samples
    samples = store.read(call.tenant_id, store.list_positions(call.tenant_id, MAX_EXPORTED, model_id))
    while part := list(islice(samples, SAMPLES_OF_READ)):
        notes = store.notes(call.tenant_id, [sample.request_id for sample, _ in part])
        steps = store.weights_steps(call.tenant_id, [sample for sample, _ in part])
        for sample, content in part:
            of_sample = _sample_columns(call, sample, content, steps)
            for index in range(len(content.sequences)):
                of_answer = _answer_columns(call, sample, content, index, notes.get((sample.request_id, index)))
                yield {name: (of_sample | of_answer)[name] for name in COLUMNS}


def _sample_columns(call: Call, sample: StoredSample, content: SampleContent, steps: Mapping[str, int]) -> JsonObject:
    return {
        "request_id": sample.request_id,
        "group": tokens_digest([*f"{sample.base_model} {sample.weights} {sample.prompt_digest}".encode()]),
        "run": sample.model_id or None,
        "weights": sample.weights,
        "weights_step": steps.get(sample.weights or ""),
        "base_model": sample.base_model,
        "session_id": sample.session_id,
        "created_at": iso(sample.created_at),
        "prompt": spell(find_tokenizer(call, sample.base_model), content.prompt, special=True),
        "prompt_tokens": content.prompt,
        "prompt_cut": content.prompt_cut,
    }


def _answer_columns(
    call: Call, sample: StoredSample, content: SampleContent, index: int, notes: AnswerNotes | None
) -> JsonObject:
    sequence = content.sequences[index]
    logprobs = None if notes is None else notes.logprobs
    advantages = None if notes is None else notes.advantages
    return {
        "number": index,
        "answer": spell(find_tokenizer(call, sample.base_model), sequence.tokens, special=True),
        "answer_tokens": sequence.tokens,
        "logprobs": sequence.logprobs,
        "sampled_tokens": sequence.num_sampled,
        "stop_reason": sequence.stop_reason,
        "reward": None if notes is None else notes.reward,
        "trained_in": None if notes is None else notes.model_id,
        "step": None if notes is None else notes.step,
        "advantage": None if notes is None else notes.advantage,
        "advantages": list_placed(advantages, sequence),
        "training_logprobs": list_placed(logprobs, sequence),
    }
