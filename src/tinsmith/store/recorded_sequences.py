"""Recorded sequences: samples with record_stability_info, to which passes of stable_reinforce may refer.

The transaction that settles a sample writes its rows, which are valid for a day after that and after each training use.
`Sequences.admit` checks the provenance spans of a pass (the SDK's types/provenance_spans.py) with one query. Tokens are
not stored, so they are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import sqlalchemy as sa

from tinsmith.db.database import Database, chunks, now
from tinsmith.db.schema import SEQUENCES
from tinsmith.errors import UserError
from tinsmith.types import DatumSpans, Pass, Span, SparseRows

VALID_S = 86400.0
"""How long a recorded sequence may be trained on, after its sampling and after each use."""

SLACK_S = 3600.0
"""Added at each write, so that a use within an hour of the previous one writes nothing."""

_MAX_VARIABLES = 10_000  # of one IN (...) clause; SQLite's limit is 32,766


@dataclass(frozen=True, slots=True)
class RecordedSequence:
    session_id: str
    prompt_tokens: int
    sampled_tokens: int
    valid_until: float


_FIND = sa.select(SEQUENCES).where(SEQUENCES.c.sequence_id.in_(sa.bindparam("sequence_ids", expanding=True)))
_RENEW = (
    SEQUENCES.update()
    .where(SEQUENCES.c.sequence_id.in_(sa.bindparam("sequence_ids", expanding=True)))
    .values(valid_until=sa.bindparam("until"))
)


class Sequences:
    def __init__(self, db: Database) -> None:
        self._db = db

    def admit(self, session_id: str, pass_: Pass, spans: Sequence[DatumSpans]) -> None:
        """Raise UserError unless the spans of every datum are valid; a pass that trains renews their sequences."""
        sequence_ids = sorted({span.sequence_id for datum in spans for _, _, span in _all_spans(datum)})
        sequences = self._find(sequence_ids)
        check_spans(session_id, pass_, spans, sequences, now())
        soon = now() + VALID_S
        ageing = [sequence_id for sequence_id in sequence_ids if sequences[sequence_id].valid_until < soon]
        if ageing and not pass_.forward_only:
            with self._db.write() as connection:
                for chunk in chunks(ageing, _MAX_VARIABLES):
                    connection.execute(_RENEW, {"sequence_ids": chunk, "until": soon + SLACK_S})

    def sweep(self) -> int:
        """Delete sequences that are no longer valid; returns how many."""
        return self._db.execute(SEQUENCES.delete().where(SEQUENCES.c.valid_until < now()))

    def _find(self, sequence_ids: Sequence[str]) -> dict[str, RecordedSequence]:
        sequences: dict[str, RecordedSequence] = {}
        with self._db.read() as connection:
            for chunk in chunks(sequence_ids, _MAX_VARIABLES):
                for row in connection.execute(_FIND, {"sequence_ids": chunk}):
                    sequences[row.sequence_id] = RecordedSequence(
                        row.session_id, row.prompt_tokens, row.sampled_tokens, row.valid_until
                    )
        return sequences


def insertion(session_id: str, request_id: str, prompt_tokens: int, sampled_tokens: Sequence[int]) -> sa.Executable:
    """A statement for the transaction that settles a sample; `sampled_tokens` are the lengths of its sequences."""
    valid_until = now() + VALID_S + SLACK_S
    return SEQUENCES.insert().values(
        [
            {
                "sequence_id": f"{request_id}:{index}",
                "session_id": session_id,
                "prompt_tokens": prompt_tokens,
                "sampled_tokens": length,
                "valid_until": valid_until,
            }
            for index, length in enumerate(sampled_tokens)
        ]
    )


def check_spans(
    session_id: str,
    pass_: Pass,
    spans: Sequence[DatumSpans],
    recorded: Mapping[str, RecordedSequence],
    at: float,
) -> None:
    """Raise a UserError that names datum, span, value and rule."""
    for index, (datum, origin) in enumerate(zip(pass_.data, spans, strict=True)):
        path = f"data[{index}]"
        if not origin.model_input or not origin.loss_fn_inputs:
            missing = "model_input_spans" if not origin.model_input else "loss_fn_input_spans"
            raise UserError(
                f"{path}.{missing} is empty; stable_reinforce needs both lists of spans (Datum.with_provenance)"
            )
        targets = datum.inputs["target_tokens"]
        _check_tiling(f"{path}.model_input_spans", origin.model_input, len(datum.tokens_N), "model_input")
        _check_tiling(f"{path}.loss_fn_input_spans", origin.loss_fn_inputs, targets.shape[0], "target_tokens")
        for name, span_index, span in _all_spans(origin):
            _check_span(f"{path}.{name}[{span_index}]", span, session_id, recorded.get(span.sequence_id), at)
        advantages = datum.inputs["advantages"]
        assert not isinstance(advantages, SparseRows)  # of rank 1, so dense
        sampled_N = np.repeat([s.sampled for s in origin.loss_fn_inputs], [s.length for s in origin.loss_fn_inputs])
        wrong_N = np.flatnonzero((advantages != 0) & ~sampled_N)
        if len(wrong_N):
            position = int(wrong_N[0])
            raise UserError(
                f"{path}.loss_fn_inputs['advantages'] is {advantages[position]} at position {position}, which "
                "loss_fn_input_spans says was not sampled; stable_reinforce takes advantages on sampled tokens only"
            )


def _check_tiling(path: str, spans: Sequence[Span], length: int, field: str) -> None:
    for index, span in enumerate(spans):
        if span.length < 0 or span.offset < 0:
            raise UserError(
                f"{path}[{index}] has offset {span.offset} and length {span.length}; neither may be negative"
            )
    covered = sum(span.length for span in spans)
    if covered != length:
        raise UserError(f"{path} cover {covered} positions, and {field} has {length}; they must tile it exactly")


def _check_span(path: str, span: Span, session_id: str, recorded: RecordedSequence | None, at: float) -> None:
    name = ascii(span.sequence_id[:128])
    if recorded is None or recorded.session_id != session_id:
        raise UserError(
            f"{path} names sequence {name}, which is not recorded in session {session_id!r}: sample it there with "
            "record_stability_info, and train on it within a day"
        )
    if recorded.valid_until < at:
        raise UserError(
            f"{path} names sequence {name}, which was recorded, or last trained on, more than a day ago; sample again"
        )
    length, noun = (recorded.sampled_tokens, "sampled") if span.sampled else (recorded.prompt_tokens, "prompt")
    if span.offset + span.length > length:
        raise UserError(
            f"{path} claims {noun} tokens {span.offset} to {span.offset + span.length} of sequence {name}, which "
            f"has {length} of them"
        )


def _all_spans(datum: DatumSpans) -> Iterator[tuple[str, int, Span]]:
    for name, spans in (("model_input_spans", datum.model_input), ("loss_fn_input_spans", datum.loss_fn_inputs)):
        for index, span in enumerate(spans):
            yield name, index, span
