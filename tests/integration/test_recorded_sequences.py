"""Recorded sequences: the record of a sample, the spans that may refer to it, and their expiry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import sqlalchemy as sa
import tinker

from support.live import LiveServer
from tinsmith.db.database import Database, now
from tinsmith.db.schema import SEQUENCES
from tinsmith.errors import UserError
from tinsmith.store import recorded_sequences
from tinsmith.store.recorded_sequences import SLACK_S, VALID_S, Sequences
from tinsmith.types import Datum, DatumSpans, Pass, Span

DAY_S = 86400


@pytest.fixture
def db(db: Database) -> Database:
    with db.write() as connection:
        # The prompt has 4 tokens; the two answers have 3 and 2.
        connection.execute(recorded_sequences.insertion("s", "s:sample:0:0", 4, [3, 2]))
        connection.execute(recorded_sequences.insertion("other", "other:sample:0:0", 4, [3]))
    return db


ONE, TWO = "s:sample:0:0:0", "s:sample:0:0:1"


def prompt(length: int, offset: int = 0, sequence_id: str = ONE) -> Span:
    return Span(False, sequence_id, offset, length)


def output(length: int, offset: int = 0, sequence_id: str = ONE) -> Span:
    return Span(True, sequence_id, offset, length)


# The input has four prompt tokens and two of the three sampled ones; the targets are three prompt tokens and three
# sampled.
SPANS = DatumSpans((prompt(4), output(2)), (prompt(3, 1), output(3)))
ADVANTAGES = (0.0, 0.0, 0.0, 1.0, -1.0, 1.0)


def pass_of(advantages: tuple[float, ...] = ADVANTAGES, *, forward_only: bool = False) -> Pass:
    inputs = {
        "target_tokens": np.zeros(6, np.int64),
        "logprobs": np.zeros(6, np.float32),
        "advantages": np.array(advantages, np.float32),
    }
    datum = Datum(np.zeros(6, np.int32), inputs)
    return Pass("r", "m", (datum, datum), "stable_reinforce", {}, forward_only)


def admit(db: Database, spans: DatumSpans, advantages: tuple[float, ...] = ADVANTAGES, **changes: bool) -> None:
    """Admit a pass whose second datum has these spans."""
    Sequences(db).admit("s", pass_of(advantages, **changes), [SPANS, spans])


def valid_until(db: Database, sequence_id: str = ONE) -> float:
    with db.read() as connection:
        query = sa.select(SEQUENCES.c.valid_until).where(SEQUENCES.c.sequence_id == sequence_id)
        return connection.execute(query).scalar_one()


def age(db: Database, seconds: float) -> None:
    with db.write() as connection:
        connection.execute(SEQUENCES.update().values(valid_until=SEQUENCES.c.valid_until - seconds))


def test_true_spans_are_admitted_in_any_pieces(db: Database) -> None:
    admit(db, SPANS)
    admit(
        db,
        DatumSpans(
            (prompt(1), prompt(3, 1), output(0), output(2)),
            (prompt(3, 1), output(1), output(2, 1)),
        ),
    )
    admit(db, DatumSpans((prompt(4), output(2, 0, TWO)), SPANS.loss_fn_inputs))


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        (DatumSpans((), ()), "data[1].model_input_spans is empty"),
        (DatumSpans(SPANS.model_input, ()), "data[1].loss_fn_input_spans is empty"),
        (DatumSpans((prompt(4),), SPANS.loss_fn_inputs), "model_input_spans cover 4 positions, and model_input"),
        (DatumSpans(SPANS.model_input, (output(3),)), "loss_fn_input_spans cover 3 positions, and target"),
        (DatumSpans((prompt(7), output(-1)), SPANS.loss_fn_inputs), "model_input_spans[1] has offset 0 and length -1"),
        (DatumSpans((prompt(4, -1), output(2)), SPANS.loss_fn_inputs), "model_input_spans[0] has offset -1"),
        (DatumSpans((prompt(4, 1), output(2)), SPANS.loss_fn_inputs),
         "data[1].model_input_spans[0] claims prompt tokens 1 to 5 of sequence 's:sample:0:0:0', which has 4 of them"),
        (DatumSpans(SPANS.model_input, (prompt(3), output(3, 0, TWO))),
         "data[1].loss_fn_input_spans[1] claims sampled tokens 0 to 3 of sequence 's:sample:0:0:1', which has 2"),
        (DatumSpans((prompt(4, 0, "nobody's"), output(2)), SPANS.loss_fn_inputs),
         "data[1].model_input_spans[0] names sequence \"nobody's\", which is not recorded in session 's'"),
        (DatumSpans((prompt(4, 0, "other:sample:0:0:0"), output(2)), SPANS.loss_fn_inputs), "not recorded in session"),
        (DatumSpans(SPANS.model_input, (prompt(4), output(2))),
         "data[1].loss_fn_inputs['advantages'] is 1.0 at position 3, which loss_fn_input_spans says was not sampled"),
    ],
)  # fmt: skip
def test_false_spans_are_refused_with_datum_span_and_rule(db: Database, spans: DatumSpans, words: str) -> None:
    with pytest.raises(UserError) as refusal:
        admit(db, spans)
    assert words in str(refusal.value)


def test_a_day_without_use_ends_it_and_each_use_begins_it_again(db: Database) -> None:
    assert valid_until(db) - now() >= VALID_S
    age(db, DAY_S - 60)
    admit(db, SPANS, forward_only=True)
    assert valid_until(db) - now() <= 60 + SLACK_S, "scoring is no training"
    admit(db, SPANS)
    assert valid_until(db) - now() >= VALID_S
    assert valid_until(db, TWO) - now() <= 60 + SLACK_S, "only what was used"
    age(db, DAY_S + SLACK_S)
    with pytest.raises(UserError, match="more than a day ago"):
        admit(db, SPANS)
    assert Sequences(db).sweep() == 3
    with pytest.raises(UserError, match="is not recorded"):
        admit(db, SPANS)


def test_a_refused_pass_renews_nothing(db: Database) -> None:
    age(db, DAY_S / 2)
    before = valid_until(db)
    with pytest.raises(UserError):
        admit(db, replace(SPANS, model_input=(prompt(6),)))
    assert valid_until(db) == before


def test_a_pass_costs_one_query_and_writes_once_an_hour(db: Database) -> None:
    statements: list[str] = []
    listener = lambda _c, _cursor, statement, *_: statements.append(statement.split()[0])  # noqa: E731
    sa.event.listen(db.engine, "before_cursor_execute", listener)
    admit(db, SPANS)
    assert [word for word in statements if word not in ("BEGIN", "COMMIT")] == ["SELECT"]


# Through the SDK.


def rollout(service: tinker.ServiceClient, *, record: bool) -> tuple[tinker.TrainingClient, tinker.Datum]:
    """A model, and a datum of its sampler's answer."""
    model = service.create_lora_training_client("tinsmith/nano", rank=4).result()
    path = model.save_weights_for_sampler("one").result().path
    sampler = service.create_sampling_client(model_path=path, record_stability_info=record).result()
    tokens = [5, 6, 7]
    params = tinker.SamplingParams(max_tokens=4)
    (sequence,) = sampler.sample(tinker.ModelInput.from_ints(tokens), 1, params).result().sequences
    assert sequence.logprobs is not None and sequence.sequence_id
    n = len(sequence.tokens)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([*tokens, *sequence.tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": np.array([*tokens[1:], *sequence.tokens]),
            "logprobs": np.array([0.0, 0.0, *sequence.logprobs], np.float32),
            "advantages": np.array([0.0, 0.0, *[1.0] * n], np.float32),
        },
    )
    name = sequence.sequence_id
    return model, datum.with_provenance(
        model_input=[
            tinker.PromptProvenanceSpan(sequence_id=name, length=3),
            tinker.SampledProvenanceSpan(sequence_id=name, length=n - 1),
        ],
        loss_fn_inputs=[
            tinker.PromptProvenanceSpan(sequence_id=name, offset=1, length=2),
            tinker.SampledProvenanceSpan(sequence_id=name, length=n),
        ],
    )


def test_what_was_sampled_and_recorded_can_be_trained_on(
    fake_service: tinker.ServiceClient, fake_server: LiveServer
) -> None:
    model, datum = rollout(fake_service, record=True)
    model.forward_backward([datum], "stable_reinforce").result()
    bare = tinker.Datum(datum.model_input, datum.loss_fn_inputs)
    with pytest.raises(tinker.RequestFailedError, match="needs both lists of spans"):
        model.forward_backward([bare], "stable_reinforce").result()
    with tinker.ServiceClient(base_url=fake_server.url, api_key="tml-test") as other:
        stranger = other.create_lora_training_client("tinsmith/nano", rank=4).result()
        with pytest.raises(tinker.RequestFailedError, match="is not recorded in session"):
            stranger.forward_backward([datum], "stable_reinforce").result()


def test_unrecorded_tokens_are_refused_only_by_losses_that_need_them(fake_service: tinker.ServiceClient) -> None:
    model, datum = rollout(fake_service, record=False)
    with pytest.raises(tinker.RequestFailedError, match="sample it there with record_stability_info"):
        model.forward_backward([datum], "stable_reinforce").result()
    model.forward_backward([datum], "importance_sampling").result()
    nonsense = [tinker.SampledProvenanceSpan(sequence_id="nobody's", offset=9, length=10**6)]
    false = replace(datum, model_input_spans=nonsense, loss_fn_input_spans=nonsense)
    for loss_fn in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
        model.forward_backward([false], loss_fn).result()
