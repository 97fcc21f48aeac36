"""A base model on two ranks against one process: every loss, every degree, and the agreement of the ranks.

One group of two processes serves the whole module. Four ranks, families and deaths: test_rank_matrix.py.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from support import families, tiny_models, traced_losses
from support.ranked import (
    SPECS,
    agree_on,
    create,
    finish,
    gradient,
    load,
    local_backend,
    pass_of,
    publish,
    relative_error,
    sample_both,
    samples,
    step,
    step_both,
    train_both,
    weights,
)
from tinsmith.backends import distributed, run_to_end
from tinsmith.backends.distributed import Degrees, Group, ShardedBackend, read_degrees
from tinsmith.backends.distributed import rank as rank_module
from tinsmith.backends.distributed.rank import execute
from tinsmith.backends.distributed.sampler import RankSampler
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.adapters import Adapter, TrainedModel
from tinsmith.engine import __main__ as engine_main
from tinsmith.errors import NotFoundError, RanksLostError, SettingsError, UserError
from tinsmith.plan import memory
from tinsmith.plan.architecture import read_directory
from tinsmith.plan.degrees import Workload, adapter_regions, estimate_needs
from tinsmith.plan.memory import base_bytes
from tinsmith.plan.speed import StepShare, all_gather_bytes, all_reduce_bytes, calls, traffic
from tinsmith.settings import Settings
from tinsmith.types import AdamParams, Datum, DimuonParams, LoraSpec, ModelShape, OptimStep, Pass, PassResult

pytestmark = pytest.mark.smoke

torch.set_num_threads(1)

DEGREES = {
    "dp2": Degrees(2),
    "tp2": Degrees(1, 2),
    "fsdp2": Degrees(2, 1, shard_base=True),
    "cp2": Degrees(context=2),
    "ep2": Degrees(2, experts=2),
    "pp2": Degrees(pipeline=2),
}


class LostRanks:
    """Return the group's message about lost ranks."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture(scope="module")
def lost_ranks() -> LostRanks:
    return LostRanks()


@pytest.fixture(scope="module")
def group(lost_ranks: LostRanks) -> Iterator[Group]:
    group = Group(2, device="cpu", timeout_s=240.0, on_lost=lost_ranks)
    yield group
    group.close()
    assert not lost_ranks.reasons


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("qwen"), "qwen3")


@pytest.fixture(scope="module")
def oracle(shape: ModelShape) -> TorchBackend:
    return TorchBackend(shape, device="cpu", max_tokens_per_microbatch=64)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    family = next(family for family in families.FAMILIES if family.model_type == "qwen3_moe")
    return families.make(tmp_path_factory.mktemp("mixture"), family)


@pytest.fixture(scope="module")
def mixture_oracle(mixture: ModelShape) -> TorchBackend:
    return TorchBackend(mixture, device="cpu", max_tokens_per_microbatch=64)


@pytest.fixture(scope="module", params=DEGREES)
def sharded(request: pytest.FixtureRequest, shape: ModelShape, mixture: ModelShape, group: Group) -> ShardedBackend:
    degrees = DEGREES[request.param]
    return load(mixture if degrees.experts > 1 else shape, group, degrees, offload="on")  # of a CPU, too


@pytest.fixture
def single(oracle: TorchBackend, mixture_oracle: TorchBackend, sharded: ShardedBackend) -> TorchBackend:
    """Both begin with fresh adapters."""
    single = mixture_oracle if sharded.local.ranks.degrees.experts > 1 else oracle
    create(single)
    create(sharded)
    return single


@pytest.mark.extended
def test_ten_steps_of_every_loss_are_those_of_one_process(single: TorchBackend, sharded: ShardedBackend) -> None:
    train_both(single, sharded, 10)


@pytest.mark.extended
@pytest.mark.matrix(3)
@pytest.mark.parametrize("broken", [0, 1])
def test_numbers_of_a_broken_adapter_stay_its_own(single: TorchBackend, sharded: ShardedBackend, broken: int) -> None:
    """Its rows, the first or not of the micro-batch, have no finite logits; the other adapters' are unchanged."""
    rng = np.random.default_rng(5)
    passes = [pass_of(rng, model, (5, 9), "importance_sampling") for model in range(len(SPECS))]
    logprobs_by_backend = []
    for backend in (single, sharded):
        run_to_end(backend.run_passes(passes[broken : broken + 1]))
        backend.optim_step([OptimStep("o", f"m{broken}", AdamParams(1e38))])
        outcomes = run_to_end(backend.run_passes(passes))
        assert all(isinstance(outcome, PassResult) for outcome in outcomes)
        logprobs_by_backend.append([outcome.logprobs for outcome in outcomes if isinstance(outcome, PassResult)])
    for model, (expected, actual) in enumerate(zip(*logprobs_by_backend, strict=True)):
        if model == broken:
            assert not np.isfinite(np.concatenate([*expected, *actual])).any()
            continue
        np.testing.assert_allclose(np.concatenate(actual), np.concatenate(expected), atol=1e-4)
        theirs, ours = gradient(single, model), gradient(sharded, model)
        assert theirs is not None and ours is not None and relative_error(ours, theirs) < 1e-4


def count_bytes(monkeypatch: pytest.MonkeyPatch, own_pairs: int) -> list[float]:
    """Those that collectives of this process send from now on; see the next test."""
    sizes: list[float] = []

    def count(name: str, num_bytes: Callable[..., float]) -> None:
        collective = getattr(dist, name)

        def collect_and_count(*tensors: Any, group: dist.ProcessGroup, **options: Any) -> object:  # noqa: ANN401
            tensor_args = [value for value in (*tensors, *options.values()) if isinstance(value, torch.Tensor)]
            if tensor_args[-1].is_floating_point():
                sizes.append(num_bytes(*tensor_args, dist.get_world_size(group)))
            return collective(*tensors, group=group, **options)

        monkeypatch.setattr(dist, name, collect_and_count)

    count("isend", lambda x, _ranks: x.nbytes)
    count("reduce", lambda x, ranks: all_gather_bytes(x.nbytes, ranks))
    count("broadcast", lambda x, ranks: all_gather_bytes(x.nbytes, ranks))
    count("all_reduce", lambda x, ranks: all_reduce_bytes(x.nbytes, ranks))
    count("all_gather", lambda parts, _, ranks: all_gather_bytes(sum(part.nbytes for part in parts), ranks))
    count("all_to_all_single", lambda x, y, ranks: all_gather_bytes((x if len(x) == own_pairs else y).nbytes, ranks))
    count("all_gather_single", lambda output, _, ranks: all_gather_bytes(output.nbytes, ranks))  # FSDP's
    return sizes


def test_the_plan_counts_the_bytes_that_a_step_sends(sharded: ShardedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is in this process: the bytes given to its collectives, but for the agreements about plain values. Of an
    exchange with experts, a rank's own tokens count, on their way there or back: how many of others it gets is chance.
    """
    sizes = count_bytes(monkeypatch, own_pairs=2 * 24)
    sharded.create_model("counted", LoraSpec(4))
    tokens = np.arange(24, dtype=np.int32)
    inputs = {"target_tokens": tokens.astype(np.int64), "weights": np.ones(24, np.float32)}
    data = (Datum(tokens, inputs), Datum(tokens[::-1].copy(), inputs))
    (result,) = run_to_end(sharded.run_passes([Pass("r", "counted", data, "cross_entropy", {}, False)]))
    sharded.optim_step([OptimStep("s", "counted", AdamParams())])
    sharded.unload_model("counted")
    assert isinstance(result, PassResult)
    degrees = sharded.local.ranks.degrees
    workload = Workload(2, 2**34, rank=4, dtype="float32", cuda=False)
    step_share = StepShare(rows=48 // degrees.groups, recompute=False)
    model = read_directory(Path(sharded.local._base.shape.path))
    expected = traffic(model, workload, degrees, step_share)
    assert sum(sizes) == pytest.approx(sum(expected), rel=0.01)
    # The number of collectives matters where each is slow: the estimate leaves out some of the smallest.
    assert 0.5 < sum(calls(model, degrees, step_share)) / len(sizes) <= 1.5


def test_ranks_start_with_the_degrees_that_an_engine_has_chosen(
    shape: ModelShape, group: Group, oracle: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test simulates two devices: the planner chooses degrees, and ranks started through the settings train."""
    worlds: list[int] = []

    def record_world(world: int, **_options: object) -> Group:
        worlds.append(world)
        return group

    monkeypatch.setattr(distributed, "Group", record_world)
    monkeypatch.setattr(engine_main, "_free_bytes", lambda _settings: [8 * 2**30] * 2)
    settings = engine_main.choose_degrees(Settings(device="cpu", dtype="float32"), shape, "engine")
    engine_main.check_fit(settings, shape)
    backend = engine_main.open_backend(settings, shape, "here", engine_main._options(settings))
    atexit.unregister(group.close)  # the fixture closes it
    assert isinstance(backend, ShardedBackend) and worlds == [2]
    create(oracle)
    create(backend)
    agree_on(oracle, backend, [pass_of(np.random.default_rng(1), model, [7, 30, 5]) for model in (0, 1)])


def test_an_engine_spreads_experts_by_its_settings(
    mixture: ModelShape, group: Group, mixture_oracle: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "Group", lambda *_arguments, **_options: group)
    requested = Settings(device="cpu", dtype="float32", data_parallel=2, expert_parallel=2)
    settings = engine_main.choose_degrees(requested, mixture, "engine")
    engine_main.check_fit(settings, mixture)
    backend = engine_main.open_backend(settings, mixture, "here", engine_main._options(settings))
    atexit.unregister(group.close)
    assert isinstance(backend, ShardedBackend) and backend.local.ranks.degrees == DEGREES["ep2"]
    create(mixture_oracle)
    create(backend)
    agree_on(mixture_oracle, backend, [pass_of(np.random.default_rng(1), model, [7, 30, 5]) for model in (0, 1)])
    with pytest.raises(SettingsError, match="expert parallel 4 does not divide the 2 devices"):
        engine_main.check_fit(requested.model_copy(update={"expert_parallel": 4}), mixture)


def test_fewer_sequences_than_ranks(single: TorchBackend, sharded: ShardedBackend) -> None:
    """No rank waits for another if one has no sequences, or if ranks have adapters of different layers."""
    rng = np.random.default_rng(1)
    for model in range(len(SPECS)):
        agree_on(single, sharded, [pass_of(rng, model, [7])])
    agree_on(single, sharded, [pass_of(rng, 3, [30]), pass_of(rng, 0, [31])])
    agree_on(single, sharded, [pass_of(rng, 1, [5, 6, 7], forward_only=True)])
    step_both(single, sharded)
    assert relative_error(weights(sharded, 0), weights(single, 0)) < 1e-4


@pytest.mark.matrix(3)
def test_answers_are_those_of_one_process(single: TorchBackend, sharded: ShardedBackend) -> None:
    train_both(single, sharded, 1, seed=5)
    sample_both(single, sharded)


def test_samples_are_drawn_between_micro_batches(single: TorchBackend, sharded: ShardedBackend) -> None:
    rng = np.random.default_rng(2)
    passes = [pass_of(rng, 0, [40] * 6)]
    for backend in (single, sharded):
        publish(backend)
        for sample in samples():
            backend.sampler.submit(sample)
    steps: list[int] = []

    def between() -> None:
        steps.append(len(sharded.sampler.step()))

    (expected,), (actual,) = run_to_end(single.run_passes(passes)), run_to_end(sharded.run_passes(passes), between)
    assert steps and isinstance(expected, PassResult) and isinstance(actual, PassResult)
    assert abs(actual.metrics["loss:sum"] - expected.metrics["loss:sum"]) < 1e-3
    answers = finish(single)
    for request_id, result in finish(sharded).items():
        assert [s.tokens_T.tolist() for s in result.sequences] == [
            s.tokens_T.tolist() for s in answers[request_id].sequences
        ]


def test_a_step_that_is_dropped_between_micro_batches_changes_nothing(
    single: TorchBackend, sharded: ShardedBackend
) -> None:
    rng = np.random.default_rng(6)
    passes = [pass_of(rng, 0, [40] * 6)]

    def between() -> None:
        raise LookupError("the engine has to stop")

    with pytest.raises(LookupError, match="has to stop"):
        run_to_end(sharded.run_passes(passes), between)
    assert gradient(sharded, 0) is None
    agree_on(single, sharded, passes)


def test_tokens_are_streamed_as_they_are_drawn(single: TorchBackend, sharded: ShardedBackend) -> None:
    (sample,) = (sample for sample in samples() if sample.stream)
    publish(sharded)
    sharded.sampler.partials()
    sharded.sampler.submit(sample)
    streamed: dict[int, list[int]] = {}
    result = None
    while sharded.sampler.has_work:
        for _, outcome in sharded.sampler.step():
            result = outcome
        for partial in sharded.sampler.partials():
            streamed.setdefault(partial.index, []).extend(partial.tokens)
        assert sharded.sampler.cache_use().max_blocks > 0
    assert result is not None and not isinstance(result, UserError)
    assert streamed == {index: sequence.tokens_T.tolist() for index, sequence in enumerate(result.sequences)}


def test_a_cancelled_sample_is_gone_from_its_ranks(single: TorchBackend, sharded: ShardedBackend) -> None:
    base_only = [sample for sample in samples() if sample.version_id is None]
    for sample in base_only:
        sharded.sampler.submit(sample)
    sharded.sampler.step()
    assert sharded.sampler.cancel(base_only[0].request_id)
    assert not sharded.sampler.cancel(base_only[0].request_id) and not sharded.sampler.cancel("unknown")
    assert finish(sharded).keys() == {sample.request_id for sample in base_only[1:]}


def test_a_paused_sample_waits_on_its_ranks(single: TorchBackend, sharded: ShardedBackend) -> None:
    base_only = [sample for sample in samples() if sample.version_id is None]
    for sample in base_only:
        sharded.sampler.submit(sample)
    sharded.sampler.step()
    sharded.sampler.pause([base_only[0].request_id])
    assert finish(sharded).keys() == {sample.request_id for sample in base_only[1:]}
    sharded.sampler.pause([])
    assert sharded.sampler.has_work and finish(sharded).keys() == {base_only[0].request_id}


def test_refusals_equal_those_of_one_process(single: TorchBackend, sharded: ShardedBackend) -> None:
    rng = np.random.default_rng(3)
    for backend in (single, sharded):
        with pytest.raises(UserError, match="rank is 0"):
            backend.create_model("bad", LoraSpec(0))
        unknown = [sample for sample in samples() if sample.version_id]
        for version in ("v0", "v1"):
            backend.drop_version(version)
        with pytest.raises(NotFoundError, match="do not exist"):
            backend.sampler.submit(unknown[0])
        assert not backend.sampler.has_work
        strange = Pass("r9", "m9", (), "cross_entropy", {}, False)
        outcomes = run_to_end(backend.run_passes([strange, pass_of(rng, 0, [5])]))
        assert isinstance(outcomes[0], UserError) and isinstance(outcomes[1], PassResult)


@pytest.mark.matrix(2)
def test_a_checkpoint_has_the_same_bytes_and_loads_on_any_degrees(
    single: TorchBackend, sharded: ShardedBackend, tmp_path: Path
) -> None:
    train_both(single, sharded, 2, seed=7)
    rng = np.random.default_rng(8)
    agree_on(single, sharded, [pass_of(rng, 1, [9, 11])])
    sharded.capture("m1").write(tmp_path / "many")
    single.load("m1", SPECS[1], tmp_path / "many", optimizer=True)
    single.capture("m1").write(tmp_path / "one")
    names = sorted(path.name for path in (tmp_path / "many").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "one").iterdir()) and "gradient.safetensors" in names
    for name in names:
        assert (tmp_path / "many" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
    sharded.load("m1", SPECS[1], tmp_path / "one", optimizer=True)
    single.load("m1", SPECS[1], tmp_path / "one", optimizer=True)
    agree_on(single, sharded, [pass_of(rng, 1, [4, 8, 15])])
    step_both(single, sharded)
    assert relative_error(weights(sharded, 1), weights(single, 1)) < 1e-5
    publish(sharded)
    sharded.capture_version("v1").write(tmp_path / "version")
    sharded.load_version("again", tmp_path / "version")
    assert sharded.has_version("again") and local_backend(sharded)._versions["again"].flat_P.equal(
        local_backend(sharded)._versions["v1"].flat_P
    )


def test_a_rank_holds_what_it_steps_and_the_adapters_of_its_experts(
    single: TorchBackend, sharded: ShardedBackend
) -> None:
    """The storage of rank 0, and what every rank counts; both are those of the plan."""
    train_both(single, sharded, 1)
    rng = np.random.default_rng(3)
    agree_on(single, sharded, [pass_of(rng, 0, [5, 30]), pass_of(rng, 3, [8, 9])])
    degrees, local = sharded.local.ranks.degrees, local_backend(sharded)
    model = read_directory(Path(local._base.shape.path))
    for index, num_states in ((0, 2), (3, 1)):
        trained, whole = local._models[f"m{index}"], single._models[f"m{index}"]
        assert trained.gradient_P is not None and trained.moments is not None and whole.gradient_P is not None
        stepped = [trained.gradient_P, *trained.moments]
        assert len(stepped) == 1 + num_states
        stores = {id(x.untyped_storage()): x.untyped_storage().nbytes() for x in (*stepped, *trained.adapter.buffers)}
        counted = sharded._call("model_bytes", f"m{index}")
        assert counted[0] == sum(stores.values()), "nothing keeps a larger buffer"
        shares = [cast(int, num_bytes) - trained.adapter.num_bytes for num_bytes in counted.values()]
        if degrees.pipeline == 1:  # stages have other copies of the weights to multiply with
            assert sum(shares) == pytest.approx(4 * (1 + num_states) * len(whole.adapter.flat_P), rel=0.01)
        if index == 0:  # the other has two matrices, of which one is larger
            regions = adapter_regions(model, 4, degrees)
            assert len(trained.adapter.flat_P) == pytest.approx(sum(n for n, _ in regions), rel=0.01)
            assert [len(x) for x in stepped] == pytest.approx([sum(r.num_stepped for r in regions)] * 3, rel=0.1)
            assert (len(trained.adapter.flat_P) < len(whole.adapter.flat_P)) == (degrees.experts > 1)


@pytest.mark.matrix(2)
def test_dimuon_steps_whole_matrices_on_one_rank_each(
    single: TorchBackend, sharded: ShardedBackend, tmp_path: Path
) -> None:
    rng, spec = np.random.default_rng(11), LoraSpec(3, seed=5)
    for backend in (single, sharded):
        backend.unload_model("m0")
        backend.create_model("m0", spec, "dimuon")
    for _ in range(2):
        agree_on(single, sharded, [pass_of(rng, 0, [9, 17, 30])])
        for backend in (single, sharded):
            (metrics,) = backend.optim_step([OptimStep("s", "m0", DimuonParams(1e-3, grad_clip_norm=0.5))])
            assert isinstance(metrics, dict)
    assert relative_error(weights(sharded, 0), weights(single, 0)) < 1e-4
    sharded._call("digest", "m0")
    agree_on(single, sharded, [pass_of(rng, 0, [4])])
    sharded.capture("m0").write(tmp_path / "many")
    for backend in (single, sharded):
        backend.load("m0", spec, tmp_path / "many", optimizer=True, optimizer_type="dimuon")
    single.capture("m0").write(tmp_path / "one")
    sharded.capture("m0").write(tmp_path / "again")
    for name in ("adapter_model.safetensors", "optimizer.safetensors", "gradient.safetensors"):
        contents = {(tmp_path / directory / name).read_bytes() for directory in ("many", "one", "again")}
        assert len(contents) == 1, name


def test_an_adapter_of_experts_is_exported_and_merged_from_all_ranks(
    single: TorchBackend, sharded: ShardedBackend, tmp_path: Path
) -> None:
    """In PEFT's format, in Tinker's, and as a version; the file of one process is the same, byte by byte."""
    for index, backend in enumerate((single, sharded)):
        for stacked in (False, True):
            backend.save("m0", tmp_path / f"{index}-{stacked}", optimizer=False, stacked=stacked)
        backend.publish("m0", "v0")
        backend.capture_version("v0").write(tmp_path / f"{index}-version")
        assert backend.version_bytes("v0") > 0
    for name in ("False", "True", "version"):
        paths = sorted((tmp_path / f"0-{name}").iterdir())
        assert [path.name for path in paths] == sorted(path.name for path in (tmp_path / f"1-{name}").iterdir())
        for path in paths:
            assert path.read_bytes() == (tmp_path / f"1-{name}" / path.name).read_bytes(), (name, path.name)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("part", ["measure_gradients", "prepare_measured_step"])
def test_memory_that_runs_out_on_one_rank_before_a_step_changes_no_weight(
    single: TorchBackend, sharded: ShardedBackend, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    agree_on(single, sharded, [pass_of(np.random.default_rng(1), model, [7, 30, 5]) for model in range(len(SPECS))])
    before = weights(sharded, 0)

    def run_out(*_arguments: object) -> None:
        raise MemoryError("no room on rank 0")

    with monkeypatch.context() as patched, pytest.raises(MemoryError, match="no room on rank 0"):
        patched.setattr(rank_module, part, run_out)
        step(sharded)
    assert weights(sharded, 0).equal(before)
    step_both(single, sharded)
    assert relative_error(weights(sharded, 0), weights(single, 0)) < 1e-4


def test_memory_that_runs_out_for_a_gradient_leaves_none_on_any_rank(
    single: TorchBackend, sharded: ShardedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = [pass_of(np.random.default_rng(1), 0, [7, 30, 5])]

    def run_out(*_arguments: object) -> None:
        raise MemoryError("no room on rank 0")

    with monkeypatch.context() as patched, pytest.raises(MemoryError, match="no room on rank 0"):
        patched.setattr(TrainedModel, "select", run_out)
        run_to_end(sharded.run_passes(passes))
    assert gradient(sharded, 0) is None
    agree_on(single, sharded, passes)


def test_memory_that_runs_out_for_a_capture_fails_it_alone(
    single: TorchBackend, sharded: ShardedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_both(single, sharded, 1)

    def run_out(*_arguments: object) -> None:
        raise MemoryError("the host is full")

    with monkeypatch.context() as patched, pytest.raises(MemoryError, match="the host is full"):
        patched.setattr(rank_module, "allocate_host", run_out)
        sharded.capture("m0")
    if sharded.local.ranks.degrees.experts == 1:
        with monkeypatch.context() as patched, pytest.raises(MemoryError, match="the host is full"):
            patched.setattr(Adapter, "snapshot", run_out)
            sharded.capture("m0")
    assert sharded.capture("m0").num_bytes > 0


def custom(model: int, fn: traced_losses.Loss, lengths: list[int], seed: int) -> Pass:
    rng = np.random.default_rng(seed)
    ranks = {"logprobs": 1, "weights": 1}
    data = []
    for length in lengths:
        tokens = rng.integers(0, tiny_models.VOCAB, length).astype(np.int32)
        weights = rng.normal(size=length).astype(np.float32)
        data.append(Datum(tokens, {"target_tokens": tokens.astype(np.int64), "weights": weights}))
    traced = traced_losses.parse_as_server(traced_losses.trace(fn, ranks))
    return Pass(f"r{model}", f"m{model}", tuple(data), "custom", {"loss_id": "l"}, False, custom_loss=traced)


def failing(logprobs, weights):
    """Its gradient is infinite where a weight is large: in one sequence of one rank."""
    loss = (logprobs * torch.where(weights > 2.5, weights / torch.zeros_like(weights), weights)).sum()
    return loss, {"custom/loss:sum": loss}


def test_a_custom_loss_that_fails_on_one_rank_fails_on_all(single: TorchBackend, sharded: ShardedBackend) -> None:
    passes = [custom(0, traced_losses.weighted, [8, 21, 3], 0), custom(1, traced_losses.weighted, [13], 1)]
    agree_on(single, sharded, passes)
    step_both(single, sharded)
    bad = custom(0, failing, [30, 31, 29], 2)
    spoiled = bad.data[1].inputs["weights"]
    assert isinstance(spoiled, np.ndarray)
    spoiled[4] = 3.0
    mixed = [bad, custom(0, traced_losses.weighted, [17, 5], 3), custom(1, traced_losses.weighted, [9, 9], 4)]
    for backend in (single, sharded):
        outcomes = run_to_end(backend.run_passes(mixed))
        assert isinstance(outcomes[0], UserError) and "data[1]" in str(outcomes[0])
        assert all(isinstance(outcome, PassResult) for outcome in outcomes[1:])
    for model in (0, 1):
        expected, actual = gradient(single, model), gradient(sharded, model)
        assert expected is not None and actual is not None and relative_error(actual, expected) < 1e-4


def test_memory_that_runs_out_on_one_rank_makes_all_begin_again(
    group: Group, shape: ModelShape, oracle: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(oracle)
    single, sharded = oracle, load(shape, group, DEGREES["dp2"])
    trainer, run_one = local_backend(sharded)._trainer, local_backend(sharded)._trainer._run_micro_batch

    def run(batch, objectives, *, train):
        if sum(batch.lengths) > 20:
            raise MemoryError("no room on rank 0")
        return run_one(batch, objectives, train=train)

    monkeypatch.setattr(trainer, "_run_micro_batch", run)
    rng = np.random.default_rng(4)
    agree_on(single, sharded, [pass_of(rng, 0, [10, 10, 10, 10, 9, 8]), pass_of(rng, 1, [7, 7])])
    # A sequence that does not fit on rank 0 is refused on all ranks.
    outcomes = run_to_end(sharded.run_passes([pass_of(rng, 2, [30]), pass_of(rng, 1, [5, 6])]))
    assert isinstance(outcomes[0], UserError) and "does not fit" in str(outcomes[0])
    assert isinstance(outcomes[1], PassResult)


def test_memory_that_runs_out_in_a_stage_ends_the_ranks(
    group: Group, shape: ModelShape, lost_ranks: LostRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other stage waits in the middle of a step, so the step cannot be repeated."""
    backend = load(shape, group, DEGREES["pp2"])

    def run(*_args: object, **_options: object) -> None:
        raise MemoryError("no room on rank 0")

    with monkeypatch.context() as patched:
        patched.setattr(local_backend(backend)._trainer, "_hidden", run)
        outcome = execute(group.rank_zero, "begin_passes", [[pass_of(np.random.default_rng(0), 0, [5])]])
        assert outcome.kind == "done"
        with pytest.raises(RanksLostError, match=r"rank 0 ran out of memory in its stage: .*no room"):
            execute(group.rank_zero, "run_micro_batch", [])
    assert not lost_ranks.reasons


def test_the_plan_counts_the_bytes_of_a_stage(group: Group, tmp_path: Path) -> None:
    """No weight of the other stage's layers stays, nor a copy of its adapters to multiply with; tied embeddings are on
    both.
    """
    for arch in ("llama", "qwen3"):
        shape = tiny_models.make(tmp_path / arch, arch, num_hidden_layers=4, hidden_size=128)
        backend = load(shape, group, DEGREES["pp2"], dtype="float32")
        model = read_directory(Path(shape.path))
        workload = Workload(2, 2**34, rank=4, dtype="float32", cuda=False)
        base_use = local_backend(backend).memory_use()["base"]
        assert base_use == pytest.approx(estimate_needs(model, workload, DEGREES["pp2"]).base, rel=0.1)
        assert base_use < 0.6 * memory.base_bytes(model, dtype="float32", quantize="off")
        adapter = local_backend(backend)._models["m0"].adapter
        assert adapter.compute_P.nbytes < 0.75 * adapter.flat_P.nbytes


def test_ragged_micro_batches_of_any_number_go_through_stages(
    group: Group, shape: ModelShape, oracle: TorchBackend
) -> None:
    sharded = load(shape, group, DEGREES["pp2"])
    lengths = st.lists(st.integers(1, 60), min_size=1, max_size=5)

    @settings(max_examples=12, deadline=None)
    @given(st.lists(lengths, min_size=1, max_size=4), lengths)
    def run(trained: list[list[int]], scored: list[int]) -> None:
        for backend in (oracle, sharded):
            create(backend)
        rng = np.random.default_rng(len(scored))
        passes = [pass_of(rng, model, own_lengths) for model, own_lengths in enumerate(trained)]
        agree_on(oracle, sharded, [*passes, pass_of(rng, 0, scored, forward_only=True)])

    run()


@pytest.mark.extended
@pytest.mark.parametrize("name", ["qwen3_5_text", "jamba"])
def test_layers_with_a_state_continue_at_the_next_context_rank(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By handing over states, or by gathering hidden states; each matrix of their adapters has its own gradient."""
    shape = families.make(tmp_path, next(family for family in families.FAMILIES if family.model_type == name))
    single = TorchBackend(shape, device="cpu", max_tokens_per_microbatch=256)
    create(single)
    sharded = load(shape, group, Degrees(context=2), max_tokens_per_microbatch="128")
    train_both(single, sharded, 2)
    agree_on(single, sharded, [pass_of(np.random.default_rng(1), 0, [9, 77, 10])])
    layout = local_backend(single)._models["m0"].adapter.layout
    actual, expected = (layout.views(cast(torch.Tensor, gradient(backend, 0))) for backend in (sharded, single))
    mixers = [target for target in expected if "linear_attn" in target or "mamba" in target]
    assert len(mixers) > 2
    for target in mixers:
        for ours, theirs in zip(actual[target], expected[target], strict=True):
            assert relative_error(ours, theirs) < 1e-3, target
    step_both(single, sharded)
    sizes = count_bytes(monkeypatch, -1)
    run_to_end(sharded.run_passes([pass_of(np.random.default_rng(2), 0, [96])]))
    sharded.optim_step([OptimStep("s", "m0", AdamParams())])
    model, workload = read_directory(tmp_path), Workload(2, 2**34, rank=4, dtype="float32", cuda=False)
    planned = traffic(model, workload, Degrees(context=2), StepShare(rows=48, recompute=False))
    assert sum(sizes) == pytest.approx(sum(planned), rel=0.05)


def test_work_goes_to_the_rank_that_has_least(group: Group, shape: ModelShape) -> None:
    backend = load(shape, group, DEGREES["dp2"])
    for sample in samples():
        if sample.version_id is None:
            backend.sampler.submit(sample)
    groups = [slot.group_index for slot in backend.sampler._assignments.values()]
    assert set(groups) == {0, 1}
    finish(backend)
    assert backend.sampler._loads == [0, 0] and not backend.sampler._assignments


@pytest.mark.parametrize(
    ("arch", "overrides", "degrees", "options", "reason"),
    [
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}, Degrees(1, 2), {}, "3 key and value heads"),
        ("qwen3", {"intermediate_size": 97}, Degrees(1, 2), {}, "width 97"),
        ("gpt_oss", {}, Degrees(1, 2), {}, "experts of GptOssForCausalLM cannot be split"),
        ("gpt_oss", {"num_local_experts": 3}, Degrees(2, experts=2), {}, "has 3 experts, which 2 does not divide"),
        ("qwen3", {}, Degrees(2, experts=2), {}, "expert_parallel is 2, and tiny/qwen3 has no routed experts"),
        ("qwen3_5", {}, Degrees(1, 2), {}, "tensor_parallel is 2, and layers of Qwen3_5ForCausalLM"),
        ("qwen3", {}, Degrees(2, 1, shard_base=True), {"quantize": "int8"}, "divide the codes with tensor_parallel"),
        (
            *("qwen3", {"hidden_size": 64}, Degrees(1, 2), {"quantize": "nf4"}),
            "self_attn.o_proj cannot be cut .* 64 inputs",
        ),
        ("qwen3", {}, Degrees(2), {"deterministic": "on"}, "deterministic is 'on'"),
        ("qwen3", {"num_hidden_layers": 1}, Degrees(pipeline=2), {}, "Qwen3ForCausalLM has 1 layers; set it to 1"),
    ],
)
def test_indivisible_degrees_are_refused_by_name(
    tmp_path: Path,
    group: Group,
    arch: str,
    overrides: dict[str, int],
    degrees: Degrees,
    options: dict[str, str],
    reason: str,
) -> None:
    shape = tiny_models.make(tmp_path, arch, seed=0, std=0.15, **overrides)
    with pytest.raises(SettingsError, match=reason):
        ShardedBackend(shape, degrees, group, **options)


@pytest.mark.parametrize(
    ("degrees", "reason"),
    [
        (("0", "1", "off"), "data_parallel is '0'"),
        (("1", "x", "off"), "tensor_parallel is 'x'"),
        (("1", "2", "off", "0"), "context_parallel is '0'"),
        (("1", "2", "on"), "shard_base shards"),
        (("2", "1", "off", "1", "4"), "expert_parallel is 4, which does not divide the 2 ranks"),
        (("2", "1", "yes"), "shard_base is 'yes'"),
        (("1", "1", "off", "1", "2", "2"), "expert_parallel is 2, which does not divide the 1 ranks"),
        (("1", "1", "off", "1", "1", "0"), "pipeline_parallel is '0'"),
        (("2", "1", "on", "1", "1", "2"), "shard_base is on and pipeline_parallel is over 1"),
    ],
)
def test_degrees_that_cannot_be_are_refused(degrees: tuple[str, ...], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        read_degrees(*degrees)


@pytest.mark.parametrize("choices", [1, 2])
def test_tokens_that_all_choose_the_experts_of_one_rank(tmp_path: Path, group: Group, choices: int) -> None:
    """With one choice all choose one expert. Other experts of that rank, or all of the other one, get no rows."""
    shape = tiny_models.make(tmp_path, "gpt_oss", num_experts_per_tok=choices)
    (file,) = tmp_path.glob("*.safetensors")
    weights = load_file(file)
    for name in [name for name in weights if name.endswith("router.bias")]:
        weights[name] = torch.tensor([0.0, 0.0, 1e3, 5e2])
    save_file(weights, file, {"format": "pt"})
    single = TorchBackend(shape, device="cpu", max_tokens_per_microbatch=64)
    create(single)
    sharded = load(shape, group, DEGREES["ep2"])
    train_both(single, sharded, 2)
    sample_both(single, sharded)


def test_a_rank_holds_only_its_own_experts(mixture: ModelShape, group: Group) -> None:
    base = load(mixture, group, DEGREES["ep2"]).local._base
    stores = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in base.frozen_tensors()}
    model = read_directory(Path(mixture.path))
    planned, all_experts = (base_bytes(model, dtype="float32", quantize="off", experts=experts) for experts in (2, 1))
    assert sum(store.nbytes() for store in stores.values()) == pytest.approx(planned, rel=0.1)
    assert base.num_bytes == pytest.approx(planned, rel=0.1) and planned < 0.85 * all_experts


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    """Half a row of each matrix is whole blocks of nf4."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 4}
    return tiny_models.make(tmp_path_factory.mktemp("wide"), "qwen3", std=0.05, **sizes)


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
@pytest.mark.parametrize("degrees", ["tp2", "pp2", "ep2"])
def test_codes_that_are_divided_stand_for_the_numbers_of_one_process(
    wide: ModelShape, mixture: ModelShape, group: Group, degrees: str, quantize: str
) -> None:
    pytest.importorskip("bitsandbytes")
    shape = mixture if degrees == "ep2" else wide
    single = TorchBackend(shape, device="cpu", max_tokens_per_microbatch=64, quantize=quantize)
    create(single)
    sharded = load(shape, group, DEGREES[degrees], quantize=quantize)
    train_both(single, sharded, 2)
    sample_both(single, sharded)
    base, whole = sharded.local._base, single.base
    codes, all_codes = (sum(codes.num_weights for codes in model.list_codes()) for model in (base, whole))
    assert codes < all_codes
    options = {"dtype": "float32", "quantize": quantize}
    spread = {"tp2": {"tensor": 2}, "pp2": {"stages": 2}, "ep2": {"experts": 2}}[degrees]
    planned = base_bytes(read_directory(Path(shape.path)), **options, **spread)
    assert base.num_bytes - base.copied_bytes == pytest.approx(planned, rel=0.15)


@pytest.mark.parametrize("degrees", ["tp2", "pp2", "ep2"])
def test_divided_linears_of_8_bit_floats_train_nearly_as_whole_ones(
    wide: ModelShape, mixture: ModelShape, group: Group, degrees: str
) -> None:
    """Half a row has a scale of its own, so its codes differ from those of the whole row."""
    shape, rng = mixture if degrees == "ep2" else wide, np.random.default_rng(0)
    single = TorchBackend(shape, device="cpu", quantize="fp8")
    create(single)
    sharded = load(shape, group, DEGREES[degrees], quantize="fp8")
    trained = pass_of(rng, 0, [30, 9])
    (expected,), (actual,) = (run_to_end(backend.run_passes([trained])) for backend in (single, sharded))
    assert isinstance(expected, PassResult) and isinstance(actual, PassResult), actual
    bound = 0.15 if degrees == "tp2" else 1e-4
    for ours, theirs in zip(actual.logprobs, expected.logprobs, strict=True):
        assert np.abs(ours - theirs).mean() < bound
    ours, theirs = gradient(sharded, 0), gradient(single, 0)
    assert ours is not None and theirs is not None and relative_error(ours, theirs) < 2 * bound


def test_a_version_that_is_gone_is_still_sampled_by_the_experts_of_other_ranks(
    mixture: ModelShape, mixture_oracle: TorchBackend, group: Group
) -> None:
    single, sharded = mixture_oracle, load(mixture, group, DEGREES["ep2"])
    create(single)
    train_both(single, sharded, 1)
    for backend in (single, sharded):
        publish(backend)
        for sample in samples():
            backend.sampler.submit(sample)
        backend.sampler.step()
        step(backend)
        backend.drop_version("v0")
        backend.publish("m0", "v1")
    results = finish(sharded)
    for request_id, result in finish(single).items():
        for first, second in zip(result.sequences, results[request_id].sequences, strict=True):
            assert second.tokens_T.tolist() == first.tokens_T.tolist()
    sharded._call("drop_version", "v1")
    sampler = sharded.local.sampler
    assert isinstance(sampler, RankSampler) and not sampler._held_adapters


def test_devices_that_are_not_there_are_refused() -> None:
    for device, reason in (("cuda:1", "choose 'cuda' or 'cpu'"), ("cuda", "0 CUDA devices")):
        with pytest.raises(SettingsError, match=reason):
            Group(2, device=device, timeout_s=10.0)


def test_ranks_that_differ_are_lost(group: Group, shape: ModelShape, lost_ranks: LostRanks) -> None:
    """If one rank alone changes an adapter, the next step detects it."""
    backend = load(shape, group, DEGREES["dp2"])
    run_to_end(backend.run_passes([pass_of(np.random.default_rng(0), 0, [5, 6])]))
    trained = local_backend(backend)._models["m0"]
    trained.step += 1
    with pytest.raises(RanksLostError, match="different results for optim_step"):
        step(backend)
    trained.adapter.flat_P[-1] += 1.0
    with pytest.raises(RanksLostError, match="different results for digest"):
        backend._call("digest", "m0")
    assert len(lost_ranks.reasons) == 2
    lost_ranks.reasons.clear()


@pytest.mark.matrix(2)
def test_ranks_that_sleep_go_on_bit_for_bit(sharded: ShardedBackend) -> None:
    def train_weights(*, sleeps: bool) -> list[bytes]:
        create(sharded)
        rng = np.random.default_rng(0)
        for _ in range(2):
            for _ in range(2):
                run_to_end(sharded.run_passes([pass_of(rng, model, [9, 4, 7]) for model in range(len(SPECS))]))
                if sleeps:
                    sharded.sleep()
                    frozen = sharded.local._frozen
                    assert frozen is not None and frozen.num_bytes == 0
                    sharded.wake_up()
                    # A stage keeps weights as they are in the file, which a CPU maps.
                    assert frozen.num_bytes > (0 if sharded.local.ranks.degrees.pipeline > 1 else 2**15)
            step(sharded)
        for model in range(len(SPECS)):
            sharded._call("digest", f"m{model}")
        return [weights(sharded, model).numpy().tobytes() for model in range(len(SPECS))]

    assert train_weights(sleeps=True) == train_weights(sleeps=False)
