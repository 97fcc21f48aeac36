"""Four ranks, long sequences, every family of docs/models.md on two ranks, ranks that die or hang, and the SDK on two.
Run by `make test-ranks`; `make test` runs test_ranks.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from support import families, ranked, tiny_models
from support.families import FAMILIES, Family
from support.live import API_KEY, serving
from support.random_data import random_data
from tinsmith.backends import run_to_end
from tinsmith.backends.distributed import Degrees, Group
from tinsmith.backends.torch import TorchBackend
from tinsmith.errors import RanksLostError, SettingsError
from tinsmith.plan.architecture import read_directory
from tinsmith.plan.memory import base_bytes
from tinsmith.types import ModelShape, SampleResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

torch.set_num_threads(1)

TWO = {
    "dp2": Degrees(2),
    "tp2": Degrees(1, 2),
    "fsdp2": Degrees(2, 1, shard_base=True),
    "cp2": Degrees(context=2),
    "pp2": Degrees(pipeline=2),
}

FOUR = {
    "dp4": Degrees(4),
    "dp2-tp2": Degrees(2, 2),
    "fsdp4": Degrees(4, 1, shard_base=True),
    "fsdp2-tp2": Degrees(2, 2, shard_base=True),
    "cp4": Degrees(context=4),
    "dp2-cp2": Degrees(2, context=2),
    "cp2-tp2": Degrees(1, 2, context=2),
    "fsdp2-cp2": Degrees(2, shard_base=True, context=2),
    "fsdp-cp4": Degrees(shard_base=True, context=4),
    "pp4": Degrees(pipeline=4),
    "pp2-tp2": Degrees(1, 2, pipeline=2),
    "dp2-pp2": Degrees(2, pipeline=2),
    "cp2-pp2": Degrees(context=2, pipeline=2),
}

SPREAD = {
    "ep4": Degrees(4, experts=4),
    "ep2-dp2": Degrees(4, experts=2),
    "ep4-fsdp4": Degrees(4, shard_base=True, experts=4),
    "ep2-fsdp4": Degrees(4, shard_base=True, experts=2),
    "ep4-cp2-dp2": Degrees(2, context=2, experts=4),
    "ep2-cp4": Degrees(context=4, experts=2),
    "ep4-tp2": Degrees(2, 2, experts=4),
    "ep2-tp2": Degrees(2, 2, experts=2),
    "ep4-cp2-tp2": Degrees(1, 2, context=2, experts=4),
    "ep4-fsdp2-tp2": Degrees(2, 2, shard_base=True, experts=4),
    "ep2-pp2": Degrees(2, experts=2, pipeline=2),
    "ep2-pp2-cp2": Degrees(context=2, experts=2, pipeline=2),
    "ep2-pp2-tp2": Degrees(1, 2, experts=2, pipeline=2),
}
"""On four ranks."""

NO_PLAN = {"bitnet", "gpt_bigcode", "hunyuan_v1_dense", "opt", "persimmon"}
"""Families for which transformers has no tensor-parallel plan; they are refused with tensor_parallel."""

SPREAD_AND_CUT = {"qwen3_moe", "deepseek_v3", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "ernie4_5_moe",
                  "minimax_m2", "dots1", "flex_olmo", "cohere2_moe", "solar_open", "exaone_moe"}  # fmt: skip
"""Mixtures that run with tensor parallelism where their experts are spread; the others are refused."""


UNDIVIDED = {
    "gemma4_text": "has embeddings for each layer; use tensor_parallel or shard_base",
    "glm_moe_dsa": "pass on more than a row of hidden states per token",
}
"""Families whose layers cannot be stages."""

DIVIDED = {name: TWO[name] for name in ("tp2", "fsdp2", "cp2", "pp2")}
DIVIDED |= {"ep2": Degrees(2, experts=2), "ep2-tp2": Degrees(1, 2, experts=2)}


def refuse(reason: str) -> None:
    raise AssertionError(f"the group was lost: {reason}")


@pytest.fixture(scope="module", params=[4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Group | None]:
    """Open a group of ranks. The previous group is closed first, because a process is rank 0 of one group at a time."""
    if request.param == 0:
        yield None
        return
    group = Group(request.param, device="cpu", timeout_s=120.0, on_lost=refuse)
    yield group
    group.close()


on_two = pytest.mark.parametrize("ranks", [2], indirect=True, scope="module")
with_its_own = pytest.mark.parametrize("ranks", [0], indirect=True, scope="module")


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    """Of four stages, two have two layers and two have one."""
    return tiny_models.make(tmp_path_factory.mktemp("deep"), "llama", num_hidden_layers=6)


@pytest.mark.parametrize("degrees", FOUR.values(), ids=FOUR)
def test_ten_steps_on_four_ranks(ranks: Group, shape: ModelShape, deep: ModelShape, degrees: Degrees) -> None:
    shape = deep if degrees.pipeline > 1 else shape
    single = TorchBackend(shape, device="cpu", max_tokens_per_microbatch=64)
    ranked.create(single)
    sharded = ranked.load(shape, ranks, degrees)
    ranked.train_both(single, sharded, 10)
    ranked.sample_both(single, sharded)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("degrees", SPREAD.values(), ids=SPREAD)
def test_experts_over_four_ranks(ranks: Group, tmp_path: Path, name: str, degrees: Degrees) -> None:
    shape = families.make(tmp_path / "model", next(family for family in FAMILIES if family.model_type == name))
    if degrees.tensor > 1 and name == "gpt_oss":
        with pytest.raises(SettingsError, match="transformers has no plan for 'gpt_oss'"):
            ranked.load(shape, ranks, degrees)
        return
    single = TorchBackend(shape, device="cpu", max_tokens_per_microbatch=64)
    ranked.create(single)
    sharded = ranked.load(shape, ranks, degrees, recompute="on" if degrees.experts == 2 else "off")
    if degrees == SPREAD["ep2-pp2"] and name == "gpt_oss":
        planned = base_bytes(read_directory(Path(shape.path)), dtype="float32", quantize="off", experts=2, stages=2)
        assert sharded.local._base.num_bytes == pytest.approx(planned, rel=0.1)
    ranked.train_both(single, sharded, 10 if degrees == SPREAD["ep2-pp2"] and name == "qwen3_moe" else 3)
    ranked.agree_on(
        single, sharded, [ranked.pass_of(np.random.default_rng(9), 1, [1])]
    )  # other data ranks have no rows
    ranked.sample_both(single, sharded)
    sharded.capture("m0").write(tmp_path / "many")
    single.load("m0", ranked.SPECS[0], tmp_path / "many", optimizer=True)
    single.capture("m0").write(tmp_path / "one")
    for path in (tmp_path / "many").iterdir():
        assert path.read_bytes() == (tmp_path / "one" / path.name).read_bytes(), path.name


QUANTISED = {
    f"{name}-{layout}": (name, degrees)
    for layout, degrees in SPREAD.items()
    for name in ("qwen3_moe", "gpt_oss")
    if not degrees.shard_base and (degrees.tensor == 1 or name != "gpt_oss")  # which has no plan for tensors
}


@pytest.mark.parametrize(("name", "degrees"), QUANTISED.values(), ids=QUANTISED)
def test_codes_of_a_mixture_over_four_ranks(ranks: Group, tmp_path: Path, name: str, degrees: Degrees) -> None:
    """With experts whose matrices are stored by outputs and by inputs, biases, and recomputed activations."""
    pytest.importorskip("bitsandbytes")
    shape = families.make(tmp_path, next(family for family in FAMILIES if family.model_type == name))
    single = TorchBackend(shape, device="cpu", max_tokens_per_microbatch=64, quantize="int8")
    ranked.create(single)
    sharded = ranked.load(shape, ranks, degrees, quantize="int8", recompute="on", offload="on")
    ranked.train_both(single, sharded, 2)
    sharded.sleep()
    sharded.wake_up()
    ranked.sample_both(single, sharded)


@pytest.mark.parametrize("degrees", [FOUR["pp4"], FOUR["pp2-tp2"]], ids=["pp4", "pp2-tp2"])
def test_a_checkpoint_of_stages_has_the_same_bytes(
    ranks: Group, deep: ModelShape, tmp_path: Path, degrees: Degrees
) -> None:
    """With recomputed activations; saved with the optimizer's state, and loaded by the stages again."""
    single = TorchBackend(deep, device="cpu", max_tokens_per_microbatch=64)
    ranked.create(single)
    sharded = ranked.load(deep, ranks, degrees, recompute="on")
    ranked.train_both(single, sharded, 2)
    sharded.capture("m1").write(tmp_path / "many")
    single.load("m1", ranked.SPECS[1], tmp_path / "many", optimizer=True)
    single.capture("m1").write(tmp_path / "one")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "many" / path.name).read_bytes(), path.name
    sharded.load("m1", ranked.SPECS[1], tmp_path / "one", optimizer=True)
    ranked.train_both(single, sharded, 1, seed=1)


@pytest.mark.parametrize("name", ["pp4", "dp2-pp2", "ep2-pp2"])
def test_samples_and_dropped_steps_between_micro_batches_meet_no_message(
    ranks: Group, deep: ModelShape, tmp_path: Path, name: str
) -> None:
    """At each pause in turn, rows that one stage has sent and the next has not used yet are kept, or forgotten. Layers
    run again with the adapters of their step; one data rank has four micro-batches less, and one has none to score.
    """
    spread = name in SPREAD
    shape = tiny_models.make(tmp_path, "gpt_oss") if spread else deep
    single = TorchBackend(shape, device="cpu", max_tokens_per_microbatch=64)
    ranked.create(single)
    sharded = ranked.load(shape, ranks, (FOUR | SPREAD)[name], recompute="on" if spread else "off")
    many_lengths = [40, 33, 38, 21, 40, 37, 9]
    lengths = ([200] if spread else many_lengths, many_lengths)
    passes = [ranked.pass_of(np.random.default_rng(model), model, lengths[model]) for model in (0, 1)]
    if spread:
        passes.append(ranked.pass_of(np.random.default_rng(2), 2, [5], forward_only=True))
    for backend in (single, sharded):
        ranked.publish(backend)
        for sample in ranked.samples():
            backend.sampler.submit(sample)
    expected = ranked.finish(single)
    for dropped_at in (1, 2):
        steps = sharded.run_passes(passes)
        for _ in range(dropped_at):
            next(steps)
        steps.close()
    results: dict[str, SampleResult] = {}

    def between() -> None:
        results.update(
            (request_id, result) for request_id, result in sharded.sampler.step() if isinstance(result, SampleResult)
        )

    run_to_end(sharded.run_passes(passes), between)
    run_to_end(single.run_passes(passes))
    for model in (0, 1):
        theirs, ours = ranked.gradient(single, model), ranked.gradient(sharded, model)
        assert theirs is not None and ours is not None and ranked.relative_error(ours, theirs) < ranked.TOLERANCE
    results |= ranked.finish(sharded)
    for request_id, result in expected.items():
        tokens = [sequence.tokens_T.tolist() for sequence in result.sequences]
        assert [sequence.tokens_T.tolist() for sequence in results[request_id].sequences] == tokens


LONG = 4096

ATTENTION = {
    "grouped keys": ("qwen3", {}),
    "one key head": ("qwen3", {"num_key_value_heads": 1}),
    "heads that 2 and 4 do not divide": (
        "llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "windows and soft caps": ("gemma2", {"sliding_window": 300, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "experts, windows and sinks": ("gpt_oss", {"sliding_window": 300, "num_attention_heads": 2}),
}


@pytest.mark.parametrize(
    ("ranks", "degrees"), [(2, TWO["cp2"]), (4, FOUR["cp4"])], indirect=["ranks"], ids=["cp2", "cp4"], scope="module"
)
@pytest.mark.parametrize("name", ATTENTION)
def test_a_long_sequence_over_context_ranks_is_that_of_one_process(
    ranks: Group, tmp_path: Path, name: str, degrees: Degrees
) -> None:
    arch, overrides = ATTENTION[name]
    shape = tiny_models.make(tmp_path, arch, max_position_embeddings=2 * LONG, **overrides)
    single = TorchBackend(shape, device="cpu", max_tokens_per_microbatch=2 * LONG)
    ranked.create(single)
    recompute = {2: "off", 4: "on"}[degrees.context]
    sharded = ranked.load(shape, ranks, degrees, max_tokens_per_microbatch=str(2 * LONG), recompute=recompute)
    rng = np.random.default_rng(0)
    ranked.agree_on(single, sharded, [ranked.pass_of(rng, 0, [LONG])])
    ranked.agree_on(single, sharded, [ranked.pass_of(rng, 1, [1])])  # most ranks have only padding
    ragged = [
        ranked.pass_of(rng, 0, [1500, 7, 3], "gspo"),
        ranked.pass_of(rng, 1, [1301, 299], "ppo"),
        ranked.pass_of(rng, 2, [1], "cispo"),
        ranked.pass_of(rng, 3, [600, 2], "cross_entropy"),
        ranked.pass_of(rng, 0, [31], forward_only=True),
    ]
    ranked.agree_on(single, sharded, ragged)
    ranked.step_both(single, sharded)


STATES = {"qwen3_next": FOUR["cp4"], "falcon_h1": FOUR["cp4"], "lfm2": FOUR["cp4"], "minimax": FOUR["cp4"],
          "nemotron_h": FOUR["dp2-cp2"], "jamba": FOUR["dp2-cp2"], "granitemoehybrid": FOUR["fsdp-cp4"],
          "bamba": FOUR["cp2-pp2"], "qwen3_5_moe_text": SPREAD["ep4-cp2-dp2"]}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_states_continue_over_four_ranks(ranks: Group, tmp_path: Path, name: str) -> None:
    """Sequences that end at, within and beyond a rank's rows, with tenants that come and go in between."""
    shape, degrees = (
        families.make(tmp_path, next(single for single in FAMILIES if single.model_type == name)),
        STATES[name],
    )
    single = TorchBackend(shape, device="cpu", max_tokens_per_microbatch=256)
    ranked.create(single)
    recompute = "on" if degrees.data == 1 else "off"
    sharded = ranked.load(shape, ranks, degrees, max_tokens_per_microbatch="64", recompute=recompute)
    rng = np.random.default_rng(0)
    for lengths in ([100], [1], [2, 3], [8, 8, 8, 8], [13, 1, 24, 2], [70, 2, 1, 30, 9]):
        ranked.agree_on(single, sharded, [ranked.pass_of(rng, index % 3, [n]) for index, n in enumerate(lengths)])
    ranked.agree_on(
        single, sharded, [ranked.pass_of(rng, 1, [51, 30]), ranked.pass_of(rng, 0, [37], forward_only=True)]
    )
    ranked.step_both(single, sharded)


@on_two
def test_a_quantised_base_is_whole_on_context_ranks(ranks: Group, shape: ModelShape) -> None:
    pytest.importorskip("bitsandbytes")
    single = TorchBackend(shape, device="cpu", quantize="int8", max_tokens_per_microbatch=64)
    ranked.create(single)
    sharded = ranked.load(shape, ranks, TWO["cp2"], quantize="int8")
    ranked.train_both(single, sharded, 2)


@pytest.mark.parametrize("name", ["dp4", "dp2-tp2", "cp4", "pp4"])
def test_bfloat16_on_four_ranks_is_as_near_as_its_rounding(
    ranks: Group, shape: ModelShape, deep: ModelShape, name: str
) -> None:
    near_in_bfloat16(ranks, deep if FOUR[name].pipeline > 1 else shape, FOUR[name])


@on_two
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_spread_experts_in_bfloat16_are_as_near_as_their_rounding(ranks: Group, tmp_path: Path, name: str) -> None:
    shape = families.make(tmp_path, next(family for family in FAMILIES if family.model_type == name))
    near_in_bfloat16(ranks, shape, Degrees(2, experts=2))


def near_in_bfloat16(ranks: Group, shape: ModelShape, degrees: Degrees) -> None:
    single = TorchBackend(shape, device="cpu", dtype="bfloat16", max_tokens_per_microbatch=64)
    ranked.create(single)
    sharded = ranked.load(shape, ranks, degrees, dtype="bfloat16")
    rng = np.random.default_rng(0)
    for model in (0, 1):
        passes = [ranked.pass_of(rng, model, [9, 17, 30])]
        (theirs,), (ours,) = run_to_end(single.run_passes(passes)), run_to_end(sharded.run_passes(passes))
        assert not isinstance(theirs, Exception) and not isinstance(ours, Exception)
        for expected, actual in zip(theirs.logprobs, ours.logprobs, strict=True):
            assert np.abs(actual - expected).max() < 0.3
        expected_P, found_P = ranked.gradient(single, model), ranked.gradient(sharded, model)
        assert expected_P is not None and found_P is not None and ranked.relative_error(found_P, expected_P) < 0.05


@on_two
@pytest.mark.parametrize(
    ("family", "degrees"),
    [
        pytest.param(family, degrees, id=f"{family.model_type}-{name}")
        for family in FAMILIES
        for name, degrees in DIVIDED.items()
        if family.experts or degrees.experts == 1
    ],
)
def test_every_family_is_divided_exactly_or_refused(
    ranks: Group, tmp_path: Path, family: Family, degrees: Degrees
) -> None:
    shape = families.make(tmp_path, family)
    if (
        degrees.tensor > 1
        and (family.experts or family.states or family.model_type in NO_PLAN)
        and not (degrees.experts > 1 and family.model_type in SPREAD_AND_CUT)
    ):
        spread_out = degrees.experts > 1
        reason = "experts of .* cannot be split" if family.experts else "tensor_parallel is 2, and"
        reason = "tensor_parallel is 2, and|cannot be sharded" if spread_out else reason
        with pytest.raises(SettingsError, match=reason):
            ranked.load(shape, ranks, degrees)
        return
    if degrees.pipeline > 1 and family.model_type in UNDIVIDED:
        with pytest.raises(SettingsError, match=UNDIVIDED[family.model_type]):
            ranked.load(shape, ranks, degrees)
        return
    single = TorchBackend(shape, device="cpu", max_tokens_per_microbatch=64)
    ranked.create(single)
    sharded = ranked.load(shape, ranks, degrees)
    # AdamW turns the rounding of one of its experts' smallest gradients into whole steps, with any degrees. Chunks of
    # Qwen3-Next's delta rule that begin elsewhere round differently, also in one process.
    rounds = family.model_type == "lfm2_moe" or (degrees.context > 1 and family.model_type == "qwen3_next")
    ranked.train_both(single, sharded, 1 if rounds else 3)
    ranked.sample_both(single, sharded)


@with_its_own
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_is_gone_is_noticed_and_named(shape: ModelShape, name: str, how: signal.Signals) -> None:
    reasons: list[str] = []
    noticed = threading.Event()

    def on_lost(reason: str) -> None:
        reasons.append(reason)
        noticed.set()

    group = Group(2, device="cpu", timeout_s=40.0, on_lost=on_lost)
    try:
        backend = ranked.load(shape, group, TWO[name])
        os.kill(group.pids[1], how)
        if how == signal.SIGKILL:
            # The group is idle: the loss is noticed without a call.
            assert noticed.wait(60) and f"process {group.pids[1]}) was killed by signal 9" in reasons[0]
        with pytest.raises(RanksLostError):
            run_to_end(backend.run_passes([ranked.pass_of(np.random.default_rng(0), 0, [9, 10])]))
        assert noticed.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(group.pids[1], signal.SIGKILL)
        group.close()


@pytest.mark.parametrize("degree", ["DATA_PARALLEL", "CONTEXT_PARALLEL", "PIPELINE_PARALLEL"])
def test_the_sdk_trains_and_samples_on_two_ranks_also_after_a_death(tmp_path: Path, degree: str) -> None:
    shards = str(degree != "PIPELINE_PARALLEL").lower()
    settings = {degree: "2", "SHARD_BASE": shards, "DEVICE": "cpu", "SESSION_TIMEOUT_S": "-1"}
    with serving(tmp_path, settings=settings) as server:
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            model = service.create_lora_training_client("tinsmith/nano", rank=8).result()
            losses = [_step(model) for _ in range(4)]
            assert losses[-1] < losses[0]
            other_pids = _other_pids(server.engine_pids())
            assert len(other_pids) == 1
            os.kill(other_pids[0], signal.SIGKILL)
            losses += [_step(model) for _ in range(4)]
            assert losses[-1] < losses[3] and _other_pids(server.engine_pids()) != other_pids
            sampler = model.save_weights_and_get_sampling_client().result()
            prompt = types.ModelInput.from_ints([1, 2, 3, 4])
            answers = [sampler.sample(prompt, 2, types.SamplingParams(max_tokens=6, seed=seed)) for seed in range(4)]
            assert all(len(answer.result().sequences) == 2 for answer in answers)
    with serving(tmp_path / "alone", settings={"DEVICE": "cpu"}) as server:
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            lone_run = service.create_lora_training_client("tinsmith/nano", rank=8, seed=0).result()
            assert abs(_step(lone_run) - losses[0]) < 1.0


def test_the_sdk_trains_and_samples_a_mixture_whose_experts_are_spread(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.model_type == "gpt_oss")
    flags = ["--model", f"tiny/mixture={families.make(tmp_path / 'mixture', family).path}", "--device", "cpu"]
    flags += ["--data-parallel", "2", "--expert-parallel", "2"]
    with serving(tmp_path / "data", *flags, settings={"SESSION_TIMEOUT_S": "-1"}) as server:
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            model = service.create_lora_training_client("tiny/mixture", rank=8).result()
            losses = [_step(model) for _ in range(4)]
            other_pids = _other_pids(server.engine_pids())
            os.kill(other_pids[0], signal.SIGKILL)
            losses += [_step(model) for _ in range(4)]
            assert losses[0] > losses[3] > losses[-1] and len(other_pids) == 1
            sampler = model.save_weights_and_get_sampling_client().result()
            prompt = types.ModelInput.from_ints([1, 2, 3, 4])
            answers = [sampler.sample(prompt, 2, types.SamplingParams(max_tokens=6, seed=seed)) for seed in range(4)]
            assert all(len(answer.result().sequences) == 2 for answer in answers)


def _step(model: tinker.TrainingClient) -> float:
    data = random_data(np.random.default_rng(0), (12, 30, 7), 200)
    passed = model.forward_backward(data, "cross_entropy")
    stepped = model.optim_step(types.AdamParams(learning_rate=1e-3))
    loss = passed.result().metrics["loss:sum"]
    stepped.result()
    return loss


def _other_pids(engines: list[int]) -> list[int]:
    """The engines' child processes, which are their other ranks."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        pids = []
        for pid in engines:
            path = Path(f"/proc/{pid}/task/{pid}/children")
            pids += [int(child) for child in path.read_text().split()] if path.exists() else []
        if pids:
            return pids
        time.sleep(0.2)
    raise AssertionError("no engine has other ranks")
