"""An engine's records of its work are correct; with a bench engine and the fake backend."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from sqlalchemy.exc import OperationalError
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker.types import LossFnType

from support.engine_bench import BASE, Bench
from support.live import API_KEY, LiveServer
from tinsmith.db.database import now
from tinsmith.db.schema import STORED_SAMPLES
from tinsmith.db.statements import execute
from tinsmith.engine import telemetry
from tinsmith.engine.scheduler import Step
from tinsmith.engine.snapshots import SNAPSHOT_OPTIM_STEPS
from tinsmith.engine.telemetry import BURST_OF_SAMPLES, FULL_BURST_AFTER_S, Recorder, Records, SampleRecorder
from tinsmith.losses import LOSSES, token_weight
from tinsmith.losses.divergence import measure_divergence, summarize_divergence
from tinsmith.store.curves import Curves, Point
from tinsmith.store.recent_steps import RecentSteps
from tinsmith.store.sampling_sessions import SamplingSession
from tinsmith.store.stored_samples import SampleLimits, StoredSamples
from tinsmith.types import (
    AdamParams,
    Array,
    Datum,
    Image,
    OptimStep,
    Pass,
    PassResult,
    Pending,
    Sample,
    SampledSequence,
    SampleResult,
    SamplingParams,
    SparseRows,
)
from tinsmith.wire import tinker_public_pb2 as pb

RUN = "s:train:0"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as sockets:
        new_bench = Bench(tmp_path, Path(sockets))
        yield new_bench
        new_bench.close()


def points(bench: Bench, model_id: str = RUN) -> list[Point]:
    return Curves(bench.db).points(model_id)


def pending(kind: str, model_id: str | None = RUN, tokens: int = 3, tenant: str = "alice", seq_id: int = 1) -> Pending:
    request_id = f"{model_id}:{seq_id}"
    return Pending(seq_id, request_id, tenant, "s", kind, "pending", model_id, None, seq_id, tokens, 0.0)


def optim_step(rate: float = 0.5) -> OptimStep:
    return OptimStep("r", RUN, AdamParams(learning_rate=rate))


def test_each_optimizer_step_has_a_point_with_its_passes_metrics(bench: Bench) -> None:
    model = bench.model()
    bench.train(model, 1)
    bench.train(model, 2, tokens=(4, 5))
    bench.step(model, 3, rate=0.25)
    bench.forward(model, 4)
    bench.train(model, 5)
    bench.step(model, 6)
    bench.run_until_idle()
    first, second = points(bench)
    losses = [loss_of(bench, f"{model}:{seq_id}") for seq_id in (1, 2)]
    assert (first.source, first.step, second.step) == ("server", 1, 2)
    assert first.metrics["loss:sum"] == pytest.approx(sum(losses))
    assert first.metrics["tokens:sum"] == 5
    assert first.metrics["loss_per_token"] == pytest.approx(sum(losses) / 5)
    assert first.metrics["learning_rate"] == 0.25
    assert first.metrics["grad_norm"] == pytest.approx(sum(losses))
    assert "forward/loss:sum" not in first.metrics and "tokens_per_second" not in first.metrics
    assert second.metrics["forward/tokens:sum"] == 3
    assert second.metrics["tokens:sum"] == 3
    seconds = second.metrics["step_seconds"]
    assert seconds and second.metrics["tokens_per_second"] == pytest.approx(3 / seconds)


def loss_of(bench: Bench, request_id: str) -> float:
    outcome = bench.outcome(request_id)
    assert outcome is not None and outcome.body is not None
    return pb.ForwardBackwardOutput.FromString(outcome.body).metrics["loss:sum"]


def test_steps_are_counted_on_after_a_restart(bench: Bench) -> None:
    model = bench.model()
    for seq_id in (1, 3):
        bench.train(model, seq_id)
        bench.step(model, seq_id + 1)
    bench.run_until_idle()
    bench.restart()
    bench.train(model, 5)
    bench.step(model, 6)
    bench.run_until_idle()
    assert [point.step for point in points(bench)] == [1, 2, 3]


def test_a_step_that_was_refused_has_no_point(bench: Bench) -> None:
    model = bench.model()
    bench.submit(model, 1, "optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}})
    bench.run_until_idle()
    assert bench.error(f"{model}:1")
    assert points(bench) == []


def test_metrics_are_put_together_as_the_sdk_does_for_its_chunks() -> None:
    rng = np.random.default_rng(1)
    names = ("loss:sum", "ratio:mean", "high:max", "low:min")
    results = [(int(rng.integers(1, 9)), dict(zip(names, rng.normal(size=4).tolist(), strict=True))) for _ in range(5)]
    gathered = telemetry._PassMetrics()
    outputs = []
    for num_data, metrics in results:
        gathered.add(metrics, num_data, num_data)
        data = [{} for _ in range(num_data)]
        outputs.append(tinker.ForwardBackwardOutput(loss_fn_output_type="x", metrics=metrics, loss_fn_outputs=data))
    expected = combine_fwd_bwd_output_results(outputs).metrics
    gathered_metrics = gathered.metrics()
    assert gathered_metrics.pop("loss_per_token") == pytest.approx(
        expected["loss:sum"] / sum(num_data for num_data, _ in results)
    )
    assert gathered_metrics == pytest.approx({name: expected[name] for name in names})


def test_divergence_is_estimated_from_the_sums_of_all_passes_of_a_step() -> None:
    rng = np.random.default_rng(2)
    sampling = [rng.normal(-2, 1, n).astype(np.float32) for n in (3, 40)]
    logprobs = [(array + rng.normal(0, 0.5, len(array))).astype(np.float32) for array in sampling]
    gathered = telemetry._PassMetrics()
    for trained, sampled in zip(logprobs, sampling, strict=True):
        gathered.add(measure_divergence(trained, sampled), num_data=1, tokens=None)
    together = measure_divergence(np.concatenate(logprobs), np.concatenate(sampling))
    expected = summarize_divergence(together)
    assert set(expected) == {"kl_sample_train_v1", "kl_sample_train_v2", "kl_sample_train_v3", "effective_sample_share"}
    expected |= {name: together[name] for name in ("sample_train_ratio:max", "sample_train_nonfinite:sum")}
    assert gathered.metrics() == pytest.approx(expected)


def pass_of(loss_fn: str, *inputs: dict[str, Array]) -> Pass:
    data = tuple(Datum(np.zeros(arrays["target_tokens"].shape[0], np.int32), arrays) for arrays in inputs)
    return Pass("r", RUN, data, loss_fn, {}, forward_only=False)


def arrays_of(**values: list[float]) -> dict[str, Array]:
    inputs: dict[str, Array] = {name: np.array(array, np.float32) for name, array in values.items()}
    return inputs | {"target_tokens": np.zeros(len(next(iter(values.values()))), np.int64)}


def test_a_prompt_without_weight_is_no_part_of_the_loss_per_token() -> None:
    first = arrays_of(weights=[0, 0, 0, 1, 1])
    second = arrays_of(weights=[0, 0.5, 2, 0.5])
    assert token_weight(pass_of("cross_entropy", first)) == 2
    assert token_weight(pass_of("cross_entropy", first, second)) == 5
    # Two targets at each of three positions, each with its weight.
    two = {"target_tokens": np.zeros((3, 2), np.int64), "weights": np.array([[0, 0], [0.25, 0.75], [1, 0]], np.float32)}
    assert token_weight(pass_of("cross_entropy", two)) == 2
    sparse = SparseRows(np.array([0.5, 1.0], np.float32), np.array([0, 0, 1, 2]), np.array([0, 1]), (3, 2))
    assert token_weight(pass_of("cross_entropy", two | {"weights": sparse})) == 1.5
    without = {"target_tokens": np.zeros(4, np.int64)}
    assert token_weight(pass_of("cross_entropy", without)) == 4, "weights that are left out are 1"
    # As the SDK's forward_backward_custom sends: a gradient with sum 0.
    assert token_weight(pass_of("cross_entropy", arrays_of(weights=[0, 1.5, -1.5]))) == 3


@pytest.mark.parametrize("loss_fn", sorted(set(LOSSES) - {"cross_entropy", "custom"}))
def test_a_policys_loss_is_shared_by_the_tokens_that_have_an_advantage(loss_fn: str) -> None:
    assert "advantages" in LOSSES[loss_fn].required
    data = [arrays_of(advantages=[0, 0, 0.5, 0.5]), arrays_of(advantages=[0, -2, -2, -2]), arrays_of(advantages=[0])]
    assert token_weight(pass_of(loss_fn, *data)) == 5


def test_a_custom_loss_is_shared_by_data() -> None:
    passed = pass_of("custom", arrays_of(weights=[1, 1]), arrays_of(weights=[1, 1]))
    assert token_weight(passed) is None
    gathered = telemetry._PassMetrics()
    gathered.add({"loss:sum": 6.0, "tokens:sum": 4.0}, 2, None)
    assert gathered.metrics() == {"loss:sum": 6.0, "tokens:sum": 4.0, "loss_per_datum": 3.0}
    gathered.add({"loss:sum": 4.0, "tokens:sum": 9.0}, 3, 8.0)
    metrics = gathered.metrics()
    assert (metrics["loss_per_datum"], metrics["loss_per_token"], metrics["loss:sum"]) == (3.0, 0.5, 10.0)


def test_a_pass_without_any_weight_has_no_loss_per_token(bench: Bench) -> None:
    model = bench.model()
    bench.train(model, 1, weights=(0, 0, 0))
    bench.step(model, 2)
    bench.run_until_idle()
    (point,) = points(bench)
    assert point.metrics["tokens:sum"] == 3 and "loss_per_token" not in point.metrics


def test_the_loss_per_token_of_a_run_is_what_its_passes_weigh(bench: Bench) -> None:
    model = bench.model()
    bench.train(model, 1, weights=(0, 0, 1))
    bench.train(model, 2, tokens=(4, 5), weights=(0, 0.5))
    bench.step(model, 3)
    bench.forward(model, 4, weights=(0, 2, 0))
    bench.step(model, 5)
    bench.run_until_idle()
    first, second = points(bench)
    losses = [loss_of(bench, f"{model}:{seq_id}") for seq_id in (1, 2, 4)]
    assert first.metrics["loss_per_token"] == pytest.approx((losses[0] + losses[1]) / 1.5)
    assert second.metrics["forward/loss_per_token"] == pytest.approx(losses[2] / 2)


@pytest.mark.extended
def test_the_loss_per_token_of_a_real_model_is_the_mean_over_the_answer(nano_server: LiveServer) -> None:
    """Compared with the mean of the logprobs that the client received."""
    weights, advantages = np.array([0, 0, 0, 1, 2], np.float32), np.array([0, 0, 1, -1, 0], np.float32)
    tokens, old = [40, 41, 42, 43, 44, 45], np.array([0, 0, -1, -2, -1], np.float32)
    targets = {"target_tokens": np.array(tokens[1:])}
    policy = {"logprobs": old, "advantages": advantages}
    with tinker.ServiceClient(base_url=nano_server.url, api_key=API_KEY) as service:
        model = service.create_lora_training_client("tinsmith/nano", rank=4).result()
        expected = []
        losses: list[tuple[LossFnType, dict[str, np.ndarray]]]
        losses = [("cross_entropy", {"weights": weights}), ("importance_sampling", policy)]
        for loss_fn, inputs in losses:
            model_input = tinker.ModelInput.from_ints(tokens[:-1])
            datum = tinker.Datum(model_input=model_input, loss_fn_inputs=targets | inputs)
            passed = model.forward_backward([datum], loss_fn)
            model.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
            logprobs = np.array(passed.result().loss_fn_outputs[0]["logprobs"].data)
            if loss_fn == "cross_entropy":
                expected.append(-float((weights * logprobs).sum()) / 3)
            else:
                expected.append(-float((np.exp(logprobs - old) * advantages).sum()) / 2)
        points = nano_server.get(f"training_runs/{model.model_id}/metrics").json()["points"]
    assert [point["metrics"]["loss_per_token"] for point in points] == pytest.approx(expected, rel=1e-4)
    assert [point["metrics"]["tokens:sum"] for point in points] == [5, 5]


def policy_pass(*advantages: float) -> Pass:
    """One datum: the prompt 1, 2 and the answer 3, 4, 5, sampled with logprobs of -1, -2 and -3."""
    inputs: dict[str, Array] = {
        "target_tokens": np.array([2, 3, 4, 5]),
        "logprobs": np.array([0, -1, -2, -3], np.float32),
        "advantages": np.array([0, *advantages], np.float32),
    }
    data = (Datum(np.array([1, 2, 3, 4], np.int32), inputs),)
    return Pass("r", RUN, data, "importance_sampling", {}, False)


def test_a_point_has_the_lengths_and_the_entropy_of_what_was_trained_on(bench: Bench) -> None:
    recorder = Recorder(BASE, Records(bench.db, SampleLimits(1, 1)))
    for advantages in ((1.0, 1.0, 1.0), (0.0, -0.5, 0.0), (0.0, 0.0, 0.0)):
        result = PassResult((np.zeros(4, np.float32),), {"loss:sum": 1.0})
        recorder.record_pass(pending("forward_backward"), policy_pass(*advantages), result)
    with bench.db.write() as connection:
        for statement in recorder.record_step(pending("optim_step"), optim_step(), {}):
            execute(connection, statement)
    (point,) = points(bench)
    assert point.metrics["response_tokens"] == 2.0 and point.metrics["advantage"] == 0.25
    assert point.metrics["response_tokens:p10"] == pytest.approx(1.2)
    assert point.metrics["advantage:p90"] == pytest.approx(0.85)
    assert point.metrics["entropy"] == pytest.approx((1 + 2 + 3 + 2) / 4)


def test_an_answer_that_was_sampled_and_trained_on_is_shown_with_both(bench: Bench) -> None:
    records = Records(bench.db, SampleLimits(9, 9))
    keeper, recorder = SampleRecorder(records), Recorder(BASE, records)
    session = SamplingSession("s:sample:0", "s", "alice", BASE, None, None, None, None, 0.0, 0)
    request = Sample("r", None, np.array([1, 2], np.int32), 1, SamplingParams(), images=(SMALL, LARGE))
    recording = keeper.begin(pending("sample", None), session, request)
    assert recording is not None
    answer = SampledSequence(np.array([3, 4, 5], np.int32), np.array([-1, -2, -3], np.float32), "stop")
    with bench.db.write() as connection:
        for statement in keeper.record(recording, SampleResult("r", (answer,))):
            execute(connection, statement)
    logprobs = np.array([-9, -1.5, -2.5, -3.5], np.float32)
    recorder.record_pass(pending("forward"), policy_pass(1, 1, 1), PassResult((logprobs,), {}))
    recorder.flush()
    ((_, before),) = records.samples.notes("alice", ["None:1"]).items()
    assert before.model_id is None, "a forward pass trains nothing"
    recorder.record_pass(pending("forward_backward"), policy_pass(0, 1, 3), PassResult((logprobs,), {}))
    recorder.flush()
    ((_, note),) = records.samples.notes("alice", ["None:1"]).items()
    assert (note.model_id, note.step, note.advantage) == (RUN, 1, 2.0)
    assert note.logprobs is not None and note.logprobs.tolist() == [-2.5, -3.5]
    assert note.advantages is not None and note.advantages.tolist() == [1.0, 3.0]
    _, content = records.samples.get("alice", "None:1")
    assert [(image.start, image.width, image.data) for image in content.images] == [(0, 2, "aW1n"), (1, 3, "")]


SMALL = Image("chunks[0]", b"img", "png", 2, 1, 0, 1, b"")
LARGE = Image("chunks[1]", bytes(2 << 20), "png", 3, 1, 1, 1, b"")


class NoDatabase:
    """A database whose reads fail."""

    def count_steps_and_points(self, _model_id: str) -> tuple[int, int]:
        raise OperationalError("", None, Exception())

    def add(self, *_arguments: object) -> None:
        raise OperationalError("", None, Exception())


def test_a_snapshot_is_recorded_with_its_run_and_its_time(bench: Bench) -> None:
    records = bench.engine._recorder._records = Records(bench.db, SampleLimits(0, 0))
    model, began = bench.model(), now()
    for seq_id in range(1, SNAPSHOT_OPTIM_STEPS + 1):
        bench.step(model, seq_id)
    bench.run_until_idle(200)
    bench.engine.flush()
    bench.engine._recorder.flush()
    ((_, snapshot),) = records.recent_steps.newest(BASE, snapshots=True)
    assert list(snapshot.shares.values()) == [{model: 0}] and snapshot.num_tokens == 0
    assert began <= snapshot.ended_at - snapshot.duration_s < snapshot.ended_at <= now()
    assert all(step.num_optim_steps for _, step in records.recent_steps.newest(BASE) if not step.num_singles)


def test_records_that_cannot_be_had_fail_nothing(bench: Bench) -> None:
    records = Records(bench.db, SampleLimits(1, 1))
    records.curves = records.recent_steps = NoDatabase()  # type: ignore[assignment]
    recorder = Recorder(BASE, records)
    recorder.record_pass(pending("forward_backward"), pass_of("custom"), PassResult((), {"loss:sum": 1.0}))
    assert recorder.record_step(pending("optim_step"), optim_step(), {}) == []
    recorder.record_duration(Step(passes=(pending("forward"),)), 0.1)
    recorder.flush()


def test_a_long_run_keeps_a_bounded_number_of_points(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MAX_POINTS", 20)
    monkeypatch.setattr(telemetry, "THINNED_POINTS", 10)
    monkeypatch.setattr("tinsmith.store.curves.THINNED_POINTS", 10)
    recorder = Recorder(BASE, Records(bench.db, SampleLimits(1, 1)))
    max_points = 0
    for seq_id in range(1, 101):
        metrics = {"loss:sum": float(seq_id), "tokens:sum": 1.0}
        recorder.record_pass(pending("forward_backward"), pass_of("custom"), PassResult((), metrics))
        with bench.db.write() as connection:
            for statement in recorder.record_step(
                pending("optim_step", seq_id=seq_id), optim_step(), {"norm": math.nan}
            ):
                execute(connection, statement)
        max_points = max(max_points, len(points(bench)))
    thinned_points = points(bench)
    assert max_points <= 21
    assert all(point.metrics["loss:sum"] == point.step and point.metrics["norm"] is None for point in thinned_points)
    steps = [point.step for point in thinned_points]
    assert steps[-1] == 100 and steps[0] <= 10
    assert max(after - before for before, after in itertools.pairwise(steps)) <= 20


def test_steps_record_tokens_by_tenant(bench: Bench) -> None:
    alice_model = bench.model("a:train:0", "alice")
    bob_model = bench.model("b:train:0", "bob")
    bench.train(alice_model, 1, tenant="alice")
    bench.train(bob_model, 1, tokens=(1, 2, 3, 4), tenant="bob")
    bench.run_until_idle()
    bench.engine._recorder.flush()
    steps = [step for _, step in RecentSteps(bench.db).newest(BASE)]
    assert len(steps) == 3, "two creations, and the passes together"
    assert steps[0].shares == {"alice": {alice_model: 3}, "bob": {bob_model: 4}}
    assert (steps[0].num_passes, steps[0].num_tokens, steps[0].num_singles) == (2, 7, 0)
    assert steps[1].num_singles == 1 and list(steps[1].shares.values()) == [{}]


def test_of_a_step_of_many_models_some_are_named(bench: Bench) -> None:
    recorder = Recorder(BASE, Records(bench.db, SampleLimits(1, 1)))
    requests = [pending("forward", f"s:train:{index}", seq_id=index) for index in range(telemetry.MAX_NAMED_MODELS + 5)]
    recorder.record_duration(Step(passes=tuple(requests)), 0.1)
    recorder.flush()
    ((_, step),) = RecentSteps(bench.db).newest(BASE)
    (shares,) = step.shares.values()
    assert len(shares) <= telemetry.MAX_NAMED_MODELS + 1
    assert sum(shares.values()) == step.num_tokens == 3 * len(requests)


def test_samples_are_kept_with_prompts_and_answers(bench: Bench) -> None:
    model = bench.model()
    sampler = bench.publish(model, 1, 0)
    bench.run_until_idle()
    for seq_id in range(5):
        bench.sample(sampler, seq_id)
    bench.run_until_idle()
    stored_samples = StoredSamples(bench.db)
    page, total = stored_samples.page("alice", 10, 0)
    assert [stored_sample.request_id for stored_sample, _ in page] == [
        f"{sampler}:{seq_id}" for seq_id in (4, 3, 0)
    ] and total == 3, "the newest two, and of the older ones one of each weights"
    sample, content = stored_samples.get("alice", f"{sampler}:4")
    assert (sample.weights, sample.base_model, sample.prompt_tokens, sample.num_sequences) == (sampler, BASE, 2, 1)
    assert list(content.prompt) == [1, 2] and content.params["max_tokens"] == 3
    (sequence,) = content.sequences
    assert sample.sampled_tokens == len(sequence.tokens) == len(sequence.logprobs) == 3


def test_a_burst_of_samples_is_kept_in_part_and_each_tenant_has_its_own(bench: Bench) -> None:
    keeper = SampleRecorder(Records(bench.db, SampleLimits(1000, 1000)))
    session = SamplingSession("s:sample:0", "s", "alice", BASE, None, None, None, None, 0.0, 0)

    def count_recorded(tenant: str) -> int:
        requests = (pending("sample", None, tenant=tenant, seq_id=seq_id) for seq_id in range(200))
        templates = (Sample("r", None, np.array([seq_id], np.int32), 1, SamplingParams()) for seq_id in range(200))
        pairs = zip(requests, templates, strict=True)
        return sum(keeper.begin(request, session, template) is not None for request, template in pairs)

    assert telemetry.BURST_OF_SAMPLES <= count_recorded("alice") < 150
    assert count_recorded("bob") >= telemetry.BURST_OF_SAMPLES


def test_a_burst_of_single_samples_is_kept_as_whole_groups(bench: Bench) -> None:
    keeper = SampleRecorder(Records(bench.db, SampleLimits(1000, 1000)))
    session = SamplingSession("s:sample:0", "s", "alice", BASE, None, "s:sample:0", RUN, None, 0.0, 0)
    recorded: dict[int, int] = {}
    for seq_id in range(800):  # 100 prompts, each asked 8 times, not one after another
        prompt = seq_id % 100
        template = Sample("r", None, np.array([prompt], np.int32), 1, SamplingParams())
        record = keeper.begin(pending("sample", None, seq_id=seq_id), session, template, "s:sample:0")
        if record is not None:
            recorded[prompt] = recorded.get(prompt, 0) + 1
            assert (record.sample.model_id, record.sample.weights) == (RUN, "s:sample:0")
    assert len(recorded) >= telemetry.BURST_OF_SAMPLES
    assert list(recorded.values())[:32] == [8] * 32, "every request of a group that was begun"
    assert len(recorded) < 60


def test_samples_of_inflight_weights_name_the_publish_that_answered(bench: Bench) -> None:
    keeper = SampleRecorder(Records(bench.db, SampleLimits(9, 9)))
    template = Sample("r", None, np.array([1], np.int32), 1, SamplingParams())
    inflight = SamplingSession("s:sample:0", "s", "alice", BASE, None, f"{RUN}:inflight", RUN, None, 0.0, 0)
    base = SamplingSession("s:sample:1", "s", "alice", BASE, None, None, None, None, 0.0, 0)
    saved = SamplingSession(
        "s:sample:2", "s", "alice", BASE, f"tinker://{RUN}/sampler_weights/a", "v", None, None, 0.0, 0
    )
    records = [
        keeper.begin(pending("sample", None, seq_id=index), session, template, weights)
        for index, (session, weights) in enumerate(
            [(inflight, "s:sample:7"), (base, BASE), (saved, f"tinker://{RUN}/sampler_weights/a")]
        )
    ]
    assert [(record.sample.weights, record.sample.model_id) for record in records if record] == [
        ("s:sample:7", RUN),
        (None, ""),
        (f"tinker://{RUN}/sampler_weights/a", RUN),
    ]


def test_the_digest_of_a_prompt_covers_its_images(bench: Bench) -> None:
    digests = {
        telemetry._digest_images(
            "tokens", Sample("r", None, np.array([1, 2], np.int32), 1, SamplingParams(), images=images)
        )
        for images in ((), (SMALL,), (LARGE,), (SMALL, LARGE))
    }
    assert len(digests) == 4


def test_nothing_is_kept_where_the_setting_says_so(bench: Bench) -> None:
    keeper = SampleRecorder(Records(bench.db, SampleLimits(0, 0)))
    session = SamplingSession("s:sample:0", "s", "alice", BASE, None, None, None, None, 0.0, 0)
    request = Sample("r", None, np.array([1], np.int32), 1, SamplingParams())
    assert keeper.begin(pending("sample", None), session, request) is None
    assert SampleRecorder(None).begin(pending("sample", None), session, request) is None


def test_long_prompts_and_answers_are_cut(bench: Bench) -> None:
    keeper = SampleRecorder(Records(bench.db, SampleLimits(9, 9)))
    session = SamplingSession("s:sample:0", "s", "alice", BASE, "tinker://a/weights/b", None, None, None, 0.0, 0)
    prompt = np.arange(10_000, dtype=np.int32)
    recording = keeper.begin(pending("sample", None), session, Sample("r", None, prompt, 20, SamplingParams()))
    assert recording is not None
    sequence = SampledSequence(np.arange(5000, dtype=np.int32), np.full(5000, -np.inf, np.float32), "length")
    with bench.db.write() as connection:
        for statement in keeper.record(recording, SampleResult("r", (sequence,) * 20)):
            execute(connection, statement)
        size = connection.scalar(STORED_SAMPLES.select().with_only_columns(STORED_SAMPLES.c.content))
    assert size is not None and len(size) < 200_000
    sample, content = StoredSamples(bench.db).get("alice", "None:1")
    assert (sample.prompt_tokens, sample.sampled_tokens, sample.num_sequences) == (10_000, 100_000, 20)
    assert content.prompt_cut == 10_000 - len(content.prompt) and content.prompt[-1] == 9999
    assert len(content.sequences) == 16 and len(content.sequences[0].tokens) == 2048
    assert content.sequences[0].logprobs[0] is None


def test_tenants_with_a_full_allowance_are_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tinsmith.engine.telemetry.time.monotonic", lambda: now[0])
    keeper = SampleRecorder(Records(bench.db, SampleLimits(9, 9)))
    for index in range(1000):
        assert keeper._take_allowance(f"tenant-{index}", (None, "prompt"))
        now[0] += 1.0
    assert len(keeper._allowances) <= FULL_BURST_AFTER_S + 1
    for prompt in range(int(BURST_OF_SAMPLES)):
        assert keeper._take_allowance("tenant-0", (None, f"prompt {prompt}"))
    assert not keeper._take_allowance("tenant-0", (None, "prompt 99")), "one that is used keeps its debt"
