"""The plan counts parameters as transformers' models do and predicts measured memory; its choices have reasons."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from typer.testing import CliRunner, Result

from support import families
from support.known_models import DOCUMENT, PUBLISHED_MODELS, PublishedModel, render
from tinsmith.backends.torch import backend
from tinsmith.cli import main as cli
from tinsmith.cli import plan as report
from tinsmith.cli.doctor import measure_rates
from tinsmith.cli.plan import as_json, rows, summary
from tinsmith.errors import SettingsError
from tinsmith.plan import measurement, memory
from tinsmith.plan.architecture import Architecture, read, read_directory, size_of_files
from tinsmith.plan.degrees import (
    Degrees,
    Workload,
    adapter_regions,
    candidates,
    check,
    choose,
    estimate_needs,
    evaluate,
    find_problem,
)
from tinsmith.plan.speed import DEVICES, LinkRate, Rates, StepShare, calls, step_time, token_s, traffic
from tinsmith.settings import Settings

GPU = 80 * 10**9
REFUSED = {"gemma4_text", "mimo_v2_flash"}
"""Models whose layers have different head sizes."""

MEASURED = Path(__file__).parents[1] / "support" / "measured_memory.py"


STATEFUL = tuple(family for family in families.FAMILIES if family.states)


def find_known(name: str) -> Architecture:
    return next(row.model for row in PUBLISHED_MODELS if row.name == name)


def count_with_transformers(config: dict[str, Any]) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).num_parameters()


@pytest.mark.matrix(6)
@pytest.mark.parametrize("row", PUBLISHED_MODELS, ids=lambda row: row.name)
def test_a_known_model_has_as_many_parameters_as_transformers_builds_and_as_was_published(row: PublishedModel) -> None:
    model = row.model
    assert model.num_parameters == count_with_transformers(dict(row.config))
    assert model.num_parameters / 1e9 == pytest.approx(row.published, rel=0.01)
    if row.active is not None:
        # OpenAI's published sizes omit the embeddings.
        unpublished_size = model.embedding_parameters if model.model_type == "gpt_oss" else 0
        assert (model.num_active - unpublished_size) / 1e9 == pytest.approx(row.active, rel=0.02)
    else:
        assert model.num_active == model.num_parameters


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.model_type)
def test_a_family_is_counted_exactly_or_refused_by_name(family: families.Family) -> None:
    config = AutoConfig.for_model(family.model_type, **{**families.COMMON, **family.config})
    config_json = json.loads(config.to_json_string(use_diff=False))
    if family.model_type in REFUSED:
        with pytest.raises(SettingsError, match=f"'{family.model_type}' is not supported by plans"):
            read(config_json)
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    architecture = read(config_json)
    assert architecture.num_parameters == model.num_parameters()
    assert architecture.has_experts == family.experts == (architecture.num_active < architecture.num_parameters)


@pytest.mark.parametrize("family", families.VISION[:2], ids=lambda family: family.model_type)
@pytest.mark.parametrize("tied", [True, False])
def test_a_vision_tower_is_counted_exactly(family: families.Family, tied: bool) -> None:
    config = AutoConfig.for_model(family.model_type, **{**family.config, "tie_word_embeddings": tied})
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    model_read = read(config.to_dict())
    assert model_read.num_parameters == model.num_parameters()
    assert model_read.vision_parameters == model.model.visual.num_parameters() > 0
    base_bytes = [
        memory.base_bytes(architecture, dtype="float32", quantize="off")
        for architecture in (model_read, replace(model_read, vision_parameters=0))
    ]
    assert base_bytes[0] - base_bytes[1] == 4 * model_read.vision_parameters
    published = AutoConfig.for_model(family.model_type)
    with torch.device("meta"):
        assert (
            read(published.to_dict()).num_parameters
            == AutoModelForImageTextToText.from_config(published).num_parameters()
        )


def test_adapters_are_as_large_as_the_backend_makes_them(tmp_path: Path) -> None:
    for name in ("qwen3", "phi3", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_text", "nemotron_h", "jamba"):
        family = next(candidate for candidate in families.FAMILIES if candidate.model_type == name)
        base = backend.BaseModel.load(families.make(tmp_path / name, family))
        targets = base.adaptable_targets()
        for rank in (1, 8):
            num_elements = sum(int(torch.Size(shape).numel()) for target in targets for shape in target.shapes(rank))
            assert memory.adapter_parameters(read_directory(tmp_path / name), rank) == num_elements


@pytest.mark.extended
def test_keys_and_values_are_as_large_as_the_sampler_caches_them(tmp_path: Path) -> None:
    from tinsmith.samplers.local.kv_cache import layer_shapes, probe_layers
    from tinsmith.samplers.local.states import state_bytes

    for name in ("gemma2", "deepseek_v3", "phi3", "gpt_neox", "opt", *(candidate.model_type for candidate in STATEFUL)):
        family = next(candidate for candidate in families.FAMILIES if candidate.model_type == name)
        base = backend.BaseModel.load(families.make(tmp_path / name, family))
        cached = sum(shape.num_bytes for shape in layer_shapes(base).values())
        model = read_directory(tmp_path / name)
        assert memory.key_value_bytes(model, dtype="float32") == cached
        assert 4 * model.state_elements == state_bytes(probe_layers(base))


def test_files_tell_their_own_size(tmp_path: Path) -> None:
    family = families.FAMILIES[0]
    families.make(tmp_path, family)
    model = read_directory(tmp_path)
    assert size_of_files(tmp_path) == (model.num_parameters, 4 * model.num_parameters)
    assert size_of_files(tmp_path / "config.json") is None
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 9)
    with pytest.raises(SettingsError, match=r"broken\.safetensors is not a safetensors file"):
        size_of_files(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"hidden_size": "many"}, "hidden_size is 'many'"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported by plans"),
        ({"vocab_size": True}, "vocab_size is True"),
    ],
)
def test_a_configuration_that_says_too_little_is_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        read({**PUBLISHED_MODELS[0].config, **change})


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read_directory(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(SettingsError, match="is not JSON"):
        read_directory(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(SettingsError, match="no JSON object"):
        read_directory(tmp_path)


@pytest.mark.extended
def test_measured_peaks_are_within_the_factor() -> None:
    # Freed memory is returned at once, so that the resident set is the allocated memory.
    at_once = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    words, environment = [sys.executable, str(MEASURED)], {**os.environ, **at_once}
    process = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert process.returncode == 0, process.stderr
    measurements = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]  # others are logs
    assert len(measurements) == 4 + 2 + 2  # steps, images in vision towers, and steps of one of two context ranks
    for step in measurements:
        ratio = step["measured"] / step["expected"]
        assert 1 / memory.FACTOR < ratio < memory.FACTOR, step


# Choices.


def test_a_small_model_is_on_every_device() -> None:
    plan = choose(find_known("Llama-3.1-8B"), Workload(8, GPU))
    assert (plan.degrees, plan.mode) == (Degrees(8), "kept")
    assert "holds the whole base (15.0 GiB)" in " ".join(plan.reasons)


def test_tensor_parallel_comes_before_a_sharded_base_and_no_higher_than_needed() -> None:
    plan = choose(find_known("Llama-3.1-70B"), Workload(8, GPU))
    assert plan.degrees == Degrees(2, 4)
    assert evaluate(plan.model, plan.workload, Degrees(4, 2)).mode not in ("kept", "recomputed")


def test_a_base_is_sharded_where_heads_do_not_divide() -> None:
    # 28 query and 4 key heads cannot be divided by 3 or 6.
    model = find_known("Qwen2.5-7B")
    plan = choose(model, Workload(3, 16 * 10**9, rank=8, context=2048))
    assert plan.degrees == Degrees(3, 1, shard_base=True)
    assert plan.fits and "does not divide" in " ".join(plan.reasons)


def test_taking_turns_is_the_last_resort_of_one_device() -> None:
    plan = choose(find_known("Gemma-3-27B (text)"), Workload(1, GPU))
    assert plan.mode == "in turns"
    assert plan.needs.total("recomputed") > GPU >= plan.needs.total("in turns")


def test_a_model_that_does_not_fit_names_the_gap_and_the_devices_needed() -> None:
    plan = choose(find_known("Qwen3-32B"), Workload(1, GPU))
    words = " ".join(plan.reasons)
    assert not plan.fits and plan.missing_bytes > 0
    assert f"lacks {plan.missing_bytes / 2**30:.1f} GiB" in words and "It fits on 2 such devices" in words
    assert choose(plan.model, replace(plan.workload, devices=2)).fits


def test_a_context_that_no_device_holds_is_a_matter_of_context_parallel() -> None:
    plan = choose(find_known("Llama-3.2-1B"), Workload(1, 8 * 2**30, context=131072))
    assert (
        not plan.fits
        and "on 8 such devices: data parallel 1 x context parallel 4 x tensor parallel 2" in plan.reasons[-1]
    )
    split = choose(plan.model, replace(plan.workload, devices=8))
    assert split.degrees == Degrees(1, 2, context=4) and "a device trains 32768 of them" in split.reasons[0]
    unsplit = replace(split.degrees, data=4, context=1)
    assert estimate_needs(plan.model, split.workload, unsplit).least_activations > 3.9 * split.needs.least_activations
    assert estimate_needs(plan.model, split.workload, unsplit).keys_and_values == split.needs.keys_and_values


def test_ranks_of_a_stage_and_of_a_sampling_group_are_adjacent() -> None:
    degrees = Degrees(2, 2, pipeline=3)
    assert degrees.devices == 12 and degrees.sampling_group(1) == [6, 7, 8, 9, 10, 11]
    assert degrees.tensor_group(1, 2) == [10, 11] and degrees.replica_group(1) == [1, 3, 5, 7, 9, 11]
    assert Degrees(1, 2, context=2, pipeline=3).context_group(0, 5) == [5, 11]


@pytest.mark.parametrize(
    "degrees",
    [Degrees(4, experts=2, pipeline=2), Degrees(2, 2, context=2, experts=4, pipeline=3), Degrees(3, 4, experts=6)],
)
def test_experts_are_spread_over_ranks_of_one_stage(degrees: Degrees) -> None:
    groups = degrees.expert_groups()
    assert sorted(rank for group in groups for rank in group) == list(range(degrees.devices))
    for group in groups:
        assert len(group) == degrees.experts == len(set(group)) and group == sorted(group)
        assert len({rank // degrees.tensor % degrees.pipeline for rank in group}) == 1
    assert Degrees(4, experts=2, pipeline=2).expert_groups() == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_every_rank_is_in_one_group_of_each_kind() -> None:
    degrees = Degrees(2, 3, context=4)
    tensor = [degrees.tensor_group(index) for index in range(degrees.groups)]
    context = [degrees.context_group(data, index) for data in range(2) for index in range(3)]
    replicas = [degrees.replica_group(index) for index in range(3)]
    for groups, size in ((tensor, 3), (context, 4), (replicas, 8)):
        assert sorted(rank for group in groups for rank in group) == list(range(24))
        assert {len(group) for group in groups} == {size}
    assert context[1] == [1, 4, 7, 10] and all(set(group) <= set(replicas[1]) for group in context[1::3])


def test_sequences_are_split_only_where_nothing_else_fits() -> None:
    workload = Workload(8, GPU, context=131072)
    assert choose(find_known("Llama-3.1-8B"), workload).degrees == Degrees(4, 2)
    assert choose(find_known("Llama-3.1-70B"), workload).degrees == Degrees(1, 1, shard_base=True, context=8)


@pytest.mark.parametrize(("name", "is_split"), [("bamba", True), ("jamba", False), ("mamba2", True)])
def test_layers_with_a_state_are_split_by_tokens_if_they_can(tmp_path: Path, name: str, is_split: bool) -> None:
    families.make(tmp_path, next(candidate for candidate in families.FAMILIES if candidate.model_type == name))
    model, workload = replace(read_directory(tmp_path), context=65536), Workload(4, GPU, context=65536)
    assert model.mixers == 2 and Degrees(context=4) in candidates(model, 4)
    split, unsplit = (
        estimate_needs(model, workload, degrees).activations for degrees in (Degrees(context=4), Degrees(4))
    )
    assert (3.5 < unsplit / split < 4.01) if is_split else (unsplit / split < 2)


def test_layers_that_no_device_holds_are_a_matter_of_pipeline_parallel() -> None:
    """Gathering one of its large layers takes more than a stage; stages count only where nothing without them fits."""
    model, workload = find_known("Llama-3.1-70B"), Workload(3, 76 * 10**9)
    plan = choose(model, workload)
    assert plan.fits and plan.degrees == Degrees(pipeline=3)
    assert "a device holds at most 28 of 80 layers" in " ".join(plan.reasons)
    without = [degrees for degrees in candidates(model, 3) if degrees.pipeline == 1]
    assert without and not any(evaluate(model, workload, degrees).fits for degrees in without)
    assert choose(model, replace(workload, devices=4)).degrees.pipeline == 1
    assert "It fits on 32 such devices" in choose(find_known("DeepSeek-V3"), Workload(8, GPU)).reasons[-1]
    assert "on no number of such devices" in choose(find_known("DeepSeek-V3"), Workload(8, GPU // 6)).reasons[-1]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7).flatmap(
        lambda sizes: st.tuples(st.just(tuple(sizes)), st.integers(1, len(sizes)))
    )
)
def test_the_largest_stage_is_as_small_as_possible(case: tuple[tuple[int, ...], int]) -> None:
    sizes, stages = case
    counts = memory.split_layers(sizes, stages)
    assert len(counts) == stages and sum(counts) == len(sizes) and min(counts) >= 1

    def largest(cuts: Sequence[int]) -> int:
        return max(sum(sizes[a:b]) for a, b in pairwise([0, *cuts, len(sizes)]))

    best = min(largest(cuts) for cuts in itertools.combinations(range(1, len(sizes)), stages - 1))
    assert largest(list(itertools.accumulate(counts))[:-1]) == best


def test_the_largest_stage_counts() -> None:
    """A stage has whole layers, the first also the embeddings and the last the unembedding; activations are kept for as
    many micro-batches as there are stages from it on.
    """
    model, workload = find_known("Llama-3.1-70B"), Workload(4, GPU)
    counts = memory.stages_of(model, 4)
    assert counts == (19, 21, 21, 19)  # the ends are about two layers each
    unsplit, split = estimate_needs(model, workload, Degrees()), estimate_needs(model, workload, Degrees(pipeline=4))
    assert split.base == pytest.approx(21 * model.layer_sizes[0] * 2, rel=0.01)
    assert split.keys_and_values == pytest.approx(unsplit.keys_and_values * 21 / 80, rel=0.01)
    assert split.activations == pytest.approx(unsplit.activations * 76 / 80, rel=0.05)
    num_parameters = memory.adapter_parameters(model, workload.rank)
    # Of the accumulated gradient and the moments a fourth.
    assert unsplit.adapters - split.adapters == 12 * num_parameters * 3 // 4


def test_the_last_stage_has_a_part_of_the_unembedding() -> None:
    model = find_known("Qwen2.5-7B")
    assert memory.stages_of(model, 3) == (8, 11, 9)
    largest_bytes = memory.base_bytes(model, dtype="bfloat16", quantize="off", tensor=8, stages=3)
    first, last = model.layer_sizes[0] + model.embedding_parameters, 9 / 8 * model.layer_sizes[0]
    assert first > last + model.embedding_parameters / 8
    assert largest_bytes == pytest.approx(2 * first, rel=0.01)


@pytest.mark.parametrize(
    ("model", "degrees", "reason"),
    [
        ({}, Degrees(pipeline=33), "pipeline parallel 33: the model has 32 layers"),
        ({}, Degrees(2, 1, shard_base=True, pipeline=2), "do not shard the base"),
        (
            {"indivisible_reason": "has embeddings for each layer"},
            Degrees(pipeline=2),
            "llama has embeddings for each layer",
        ),
        ({"layer_sizes": ()}, Degrees(pipeline=2), "does not mark which of its modules are layers"),
    ],
)
def test_layers_that_cannot_be_stages_are_named(model: dict[str, Any], degrees: Degrees, reason: str) -> None:
    assert reason in str(find_problem(replace(find_known("Llama-3.1-8B"), **model), degrees))


def test_stages_wait_for_each_other() -> None:
    """(P - 1) / (M + P - 1) of a step, with at least two micro-batches a stage."""
    model = find_known("Llama-3.1-8B")
    plans = [evaluate(model, Workload(4, GPU), degrees) for degrees in (Degrees(), Degrees(pipeline=4))]
    unsplit, split = (step_time(plan, DEVICES[1], StepShare(8192)) for plan in plans)
    assert split.waiting == pytest.approx(3 / 11) and unsplit.waiting == 0
    assert split.compute == pytest.approx(unsplit.compute / 4) and split.total > split.compute / (1 - 3 / 11)
    assert split.stages > 0 == unsplit.stages


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (Degrees(1, 3), "tensor parallel 3 does not divide the model's 32 attention heads"),
        (Degrees(1, 16), "needs 16 devices; there are 8"),
        (Degrees(0, 1), "each must be at least 1"),
        (Degrees(1, 1, context=16), "data parallel 1 x context parallel 16 x tensor parallel 1 needs 16 devices"),
        (Degrees(1, 2, shard_base=True), "raise data parallel"),
    ],
)
def test_impossible_degrees_are_refused_with_the_reason(degrees: Degrees, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        check(find_known("Llama-3.1-8B"), Workload(8, GPU), degrees)


def test_key_heads_count_too() -> None:
    problem = find_problem(find_known("Qwen2.5-7B"), Degrees(1, 7))
    assert problem == "tensor parallel 7 does not divide the model's 4 key and value heads"


def test_experts_are_spread_over_as_few_devices_as_will_do() -> None:
    plan = choose(find_known("Qwen3-30B-A3B"), Workload(8, 76 * 10**9))
    assert plan.degrees == Degrees(8, experts=2) and not evaluate(plan.model, plan.workload, Degrees(8)).fits
    assert "Each of 2 devices has 64 of the 128 experts" in " ".join(plan.reasons)
    large = choose(find_known("Qwen3-235B-A22B"), Workload(64, GPU))
    assert large.fits and large.degrees.experts == 16 and not large.degrees.shard_base
    # On an odd number of devices, layers are gathered with their experts.
    assert choose(plan.model, Workload(3, GPU)).degrees == Degrees(3, 1, shard_base=True)


def test_spread_experts_are_counted_once_for_all_devices() -> None:
    model = find_known("Qwen3-235B-A22B")
    unspread, eighth = (memory.base_bytes(model, dtype="bfloat16", quantize="off", experts=degree) for degree in (1, 8))
    routed = 2 * sum(linear.num_parameters for linear in model.linears if linear.copies > 1)
    assert unspread - eighth == routed - routed // 8
    spread_and_sharded = memory.base_bytes(model, dtype="bfloat16", quantize="off", experts=8, shards=8)
    assert routed // 8 < spread_and_sharded < eighth


def test_adapters_of_experts_are_counted_where_the_experts_are() -> None:
    """Of DeepSeek-V3 nearly all of an adapter; by hand, from its 58 layers with 256 experts."""
    model, workload = find_known("DeepSeek-V3"), Workload(32, GPU)
    total, inner, hidden = memory.adapter_parameters(model, 32), 2048, 7168
    routed = 58 * 256 * 32 * 3 * inner  # B of gate and of up, A of down
    assert sum(linear.expert_adapter_parameters(32) for linear in model.linears) == routed > 0.9 * total
    assert memory.adapter_regions(model, 32) == ((total, 1),) and model.hidden == hidden
    spread, staged = Degrees(32, experts=8), Degrees(8, experts=8, pipeline=4)
    assert adapter_regions(model, 32, spread) == ((total - routed, 32), (routed // 8, 4))
    common, (num_local, holders) = adapter_regions(model, 32, staged)
    assert common == (total - routed, 32) and holders == 1
    assert memory.stages_of(model, 4) == (17, 15, 15, 14) and num_local == routed * 15 // 58 // 8
    copied = 4 + 4 + 2  # weight, the step's gradient, bfloat16
    expected = copied * (total - routed + routed // 8) + 12 * (-(-(total - routed) // 32) + routed // 32)
    assert estimate_needs(model, workload, spread).adapters == expected
    one_device = estimate_needs(model, workload, Degrees(32)).adapters
    assert one_device == copied * total + 12 * -(-total // 32) > 4 * expected
    share, alone = StepShare(4096), StepShare(4096, recompute=False)
    sent = traffic(model, workload, spread, share).gradients
    assert sent < 0.3 * traffic(model, workload, Degrees(32), share).gradients
    assert calls(model, spread, alone).gradients == 1 + 2 * (32 + 4)


def test_experts_in_stages_count_where_nothing_simpler_fits() -> None:
    model, workload = find_known("gpt-oss-120b"), Workload(6, 64 * 10**9)
    plan = choose(model, workload)
    assert plan.fits and plan.degrees.pipeline > 1 and plan.degrees.experts > 1
    simpler = [degrees for degrees in candidates(model, 6) if degrees.pipeline == 1 or degrees.experts == 1]
    assert simpler and not any(evaluate(model, workload, degrees).fits for degrees in simpler)


def test_a_stage_holds_parts_of_its_own_experts() -> None:
    """The first three of DeepSeek-V3's 61 layers have none. A step's exchanges are divided among the stages."""
    model = find_known("DeepSeek-V3")
    assert [layer for layer, num_parameters in enumerate(model.expert_sizes) if not num_parameters] == [0, 1, 2]
    routed = sum(linear.num_parameters for linear in model.linears if linear.copies > 1)
    assert sum(model.expert_sizes) == routed
    stages, start, stage_bytes = memory.stages_of(model, 4), 0, []
    for stage, count in enumerate(stages):
        layers = slice(start, start := start + count)
        experts = sum(model.expert_sizes[layers])
        ends = model.embedding_parameters if stage in (0, 3) else 0
        stage_bytes.append(2 * (sum(model.layer_sizes[layers]) - experts + experts / 8 + ends))
    largest_bytes = memory.base_bytes(model, dtype="bfloat16", quantize="off", experts=8, stages=4)
    assert largest_bytes == pytest.approx(max(stage_bytes), rel=1e-3)
    share, unsplit, split = StepShare(4096), Degrees(8, experts=8), Degrees(8, experts=8, pipeline=4)
    workload = Workload(32, GPU)
    assert traffic(model, workload, unsplit, share).experts == 4 * traffic(model, workload, split, share).experts > 0
    assert calls(model, unsplit, share).experts == 4 * calls(model, split, share).experts
    network, machine = (
        DEVICES[1].rates(evaluate(model, workload, degrees)).experts
        for degrees in (split, Degrees(2, 4, experts=4, pipeline=4))
    )
    assert network.bytes_s < machine.bytes_s


@pytest.mark.parametrize(
    ("name", "degrees", "words"),
    [
        ("Qwen3-30B-A3B", Degrees(1, 8), "routed experts, which cannot be split; spread them, too: expert parallel 8"),
        ("Qwen3-30B-A3B", Degrees(6, experts=3), "expert parallel 3 does not divide the model's 128 experts"),
        ("Qwen3-30B-A3B", Degrees(2, experts=4), "expert parallel 4 does not divide the 2 devices of data parallel 2"),
        ("Qwen3-30B-A3B", Degrees(2, experts=4, pipeline=2), "does not divide the 2 devices of a stage of data"),
        ("Llama-3.1-8B", Degrees(2, experts=2), "expert parallel 2: llama has no routed experts"),
    ],
)
def test_experts_that_cannot_be_spread_so_are_refused_with_the_reason(name: str, degrees: Degrees, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        check(find_known(name), Workload(8, GPU), degrees)


def test_codes_are_divided_with_their_linears_and_experts() -> None:
    for name, degrees in (("Qwen3-32B", Degrees(1, 2)), ("Qwen3-32B", Degrees(pipeline=2)),
                          ("Qwen3-30B-A3B", Degrees(2, experts=2)),
                          ("Qwen3-30B-A3B", Degrees(1, experts=2, pipeline=2, context=2))):  # fmt: skip
        model, workload = find_known(name), Workload(degrees.devices, GPU, dtype="bfloat16")
        for quantize, share in (("int8", 0.5), ("nf4", 0.28), ("fp8", 0.5)):
            needs = estimate_needs(model, replace(workload, quantize=quantize), degrees)
            whole = estimate_needs(model, replace(workload, quantize=quantize), Degrees(degrees.devices))
            assert needs.base < 0.62 * whole.base
            assert needs.base < (share + 0.15) * estimate_needs(model, workload, degrees).base
            check(model, replace(workload, quantize=quantize), degrees)


def test_a_quantised_base_is_not_sharded_nor_a_block_of_nf4_cut() -> None:
    model, workload = find_known("Qwen3-32B"), Workload(8, GPU, quantize="nf4")
    with pytest.raises(SettingsError, match=r"a quantised base \(nf4\) cannot be sharded"):
        check(model, workload, Degrees(8, shard_base=True))
    narrow = replace(
        model, linears=tuple(replace(linear, inputs=linear.inputs + 64) if linear.split_dim == "inputs" else linear
                             for linear in model.linears)
    )  # fmt: skip
    with pytest.raises(
        SettingsError, match=r"tensor parallel 2: nf4 has a scale for 64 inputs, and a part of .* would"
    ):
        check(narrow, workload, Degrees(4, 2))
    check(narrow, replace(workload, quantize="int8"), Degrees(4, 2))


def test_requested_degrees_are_used_if_they_fit_and_else_refused_with_the_gap() -> None:
    model, workload = find_known("Llama-3.1-70B"), Workload(8, GPU)
    plan = check(model, workload, Degrees(1, 8))
    assert plan.fits and "Without given degrees the plan is data parallel 2 x tensor parallel 4." in plan.reasons
    with pytest.raises(
        SettingsError, match=r"each device needs .* GiB less; data parallel 2 x tensor parallel 4 would"
    ):
        check(model, workload, Degrees(8, 1))


@pytest.mark.parametrize("name", ["Qwen3-32B", "Qwen3-30B-A3B", "gpt-oss-20b"])
def test_quantising_takes_less(name: str) -> None:
    model = find_known(name)
    unquantised, int8, nf4 = (
        memory.base_bytes(model, dtype="bfloat16", quantize=quantize) for quantize in ("off", "int8", "nf4")
    )
    linears = sum(linear.num_parameters for linear in model.linears)
    assert unquantised - int8 == linears and int8 - nf4 == pytest.approx(0.4375 * linears, rel=1e-6)


def test_a_quantised_mixture_trains_on_one_device_of_80_gb() -> None:
    model, workload = find_known("Qwen3-30B-A3B"), Workload(1, GPU, rank=32)
    assert not choose(model, workload).fits
    for quantize in ("fp8", "int8", "nf4"):
        plan = choose(model, replace(workload, quantize=quantize))
        assert plan.fits, plan.reasons
        assert plan.needs.activations > 2 * 2**30, "room for a batch"
    # Gate and up of 128 experts in bfloat16, also in graphs, and one expert's on a CPU.
    sizes = [memory.count_copied_bytes(model, dtype="bfloat16", quantize="int8", cuda=cuda) for cuda in (True, False)]
    assert sizes == [2 * 128 * 2 * 2048 * 768 * 2, 2 * 2048 * 768 * 2]
    assert memory.count_copied_bytes(model, dtype="bfloat16", quantize="fp8", cuda=True) == sizes[0] // 2
    dense, off = find_known("Qwen3-32B"), {"dtype": "bfloat16", "cuda": True}
    assert not memory.count_copied_bytes(dense, quantize="nf4", **off) and not memory.count_copied_bytes(
        model, quantize="off", **off
    )


@pytest.mark.extended
@given(
    st.sampled_from(PUBLISHED_MODELS),
    st.sampled_from([1, 2, 3, 4, 8, 16, 64]),
    st.integers(4, 200),
    st.integers(1, 256),
    st.integers(1, 20_000),
)
def test_a_plan_uses_all_devices_and_more_memory_never_fits_less(
    row: PublishedModel, devices: int, gigabytes: int, rank: int, context: int
) -> None:
    workload = Workload(devices, gigabytes * 10**9, rank=rank, context=context)
    plan, doubled = (
        choose(row.model, workload),
        choose(row.model, replace(workload, memory_bytes=2 * workload.memory_bytes)),
    )
    assert plan.degrees.devices == devices
    assert plan.degrees in candidates(row.model, devices)
    assert plan.fits == (plan.missing_bytes == 0)
    assert doubled.fits or not plan.fits
    assert not plan.fits or check(row.model, workload, plan.degrees).mode == plan.mode


@given(st.sampled_from(PUBLISHED_MODELS), st.integers(1, 3), st.integers(1, 3))
def test_cutting_a_model_further_never_takes_more_of_a_device(row: PublishedModel, tensor: int, data: int) -> None:
    workload = Workload(64, GPU)
    coarse, fine = (
        Degrees(2**data, 2**tensor, shard_base=True),
        Degrees(2 ** (data + 1), 2 ** (tensor + 1), shard_base=True),
    )
    before, after = estimate_needs(row.model, workload, coarse), estimate_needs(row.model, workload, fine)
    assert after.base <= before.base and after.activations <= before.activations
    assert after.keys_and_values <= before.keys_and_values


def test_a_plan_is_printed_as_text_and_json() -> None:
    plan = choose(find_known("Qwen3-30B-A3B"), Workload(8, 76 * 10**9))
    assert summary(plan).startswith("qwen3_moe: 30.5 B parameters (3.35 B of them active) in bfloat16; 1 adapter(s)")
    assert ("frozen base model", "29.9 GiB") in list(rows(plan))
    plan_json = json.loads(json.dumps(as_json(plan)))
    assert (plan_json["data_parallel"], plan_json["expert_parallel"], plan_json["shard_base"], plan_json["fits"]) == (
        8,
        2,
        False,
        True,
    )
    assert plan_json["bytes_per_device"]["total_recomputed"] == plan.needs.total("recomputed")


def test_the_document_matches_the_known_models() -> None:
    assert DOCUMENT.read_text() == render(), "run scripts/write-plan"


# The command.


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B", "qwen3-8b", "meta-llama/Llama-3.1-8B-Instruct", "google/gemma-2-9b-it"]
)
def test_a_known_model_is_planned_without_its_files_and_ends_with_a_command(name: str) -> None:
    result = doctor(name, "--gpus", "2", "--memory", "80GB", "--quantize", "int8")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == f"tinsmith serve --model {name} --quantize int8 --data-parallel 2"
    assert "H100 SXM: about" in result.output and "A100 80 GB: about" in result.output and "L4" not in result.output


def test_the_command_of_a_mixture_spreads_its_experts() -> None:
    result = doctor("Qwen3-30B-A3B", "--gpus", "8", "--memory", "76GB", "--expert-parallel", "4")
    assert result.exit_code == 0, result.output
    assert "Without given degrees the plan is" in result.output and "experts over 2" in result.output
    command = result.output.splitlines()[-1]
    assert command == "tinsmith serve --model Qwen3-30B-A3B --data-parallel 8 --expert-parallel 4"
    options = ("--expert-parallel", "2", "--pipeline-parallel", "4")
    command = doctor("Qwen3-30B-A3B", "--gpus", "8", "--memory", "80GB", *options).output.splitlines()[-1]
    assert command == f"tinsmith serve --model Qwen3-30B-A3B --data-parallel 2 {' '.join(options)}"


def test_each_known_model_is_found_by_its_own_name_and_a_directory_is_itself(tmp_path: Path) -> None:
    for row in PUBLISHED_MODELS:
        model = report.find_known_model(f"owner/{row.name}")
        assert model is not None and model.num_parameters == row.model.num_parameters
    assert report.find_known_model("owner/Qwen3-8B-distilled") is None
    assert report.find_known_model("name=Qwen3-8B") is report.find_known_model(str(tmp_path)) is None


def test_speeds_are_those_of_the_formulas() -> None:
    plan = choose(find_known("Qwen3-8B"), Workload(1, 48 * 10**9))
    (line,) = report.speeds(plan)
    trained = 0.4 * 362e12 / (6 * plan.model.num_active)
    sampled = 0.6 * 864e9 / (2 * plan.model.num_active)
    assert line.startswith("L40S: about ")
    speeds = [int(match.replace(",", "")) for match in re.findall(r"([\d,]+) (?:trained|sampled)", line)]
    assert speeds == [pytest.approx(trained, rel=0.05), pytest.approx(sampled, rel=0.05)]


def test_a_step_takes_as_long_as_its_operations_and_exchanges() -> None:
    """By hand, for Llama-3.1-70B on four groups of two devices with NVLink."""
    plan = evaluate(find_known("Llama-3.1-70B"), Workload(8, 80 * 10**9), Degrees(4, 2))
    h100 = next(device for device in DEVICES if device.name == "H100 SXM")
    link, network, share = 0.7 * 450e9, 0.7 * 50e9, StepShare(8192)
    step = step_time(plan, h100, share)
    layers, hidden, mlp, vocab, keys = 80, 8192, 28672, 128256, 1024
    states = (4 + 2) * layers * hidden  # two forwards and two linears; the two inputs in backward ...
    states += hidden - hidden  # ... but for the first layer's; and the unembedding's
    tensor = 2 * 8192 * states + 3 * 4 * 8192  # and three numbers a row for the loss
    sides = 4 * hidden + 2 * (hidden + keys) + 3 * (hidden + mlp)
    weights = 4 * 32 * (layers * sides + hidden + vocab)
    gradients = 2 * 7 / 8 * weights + 2 * 3 / 4 * 4 * 4 * 8192  # and the weights that a device has stepped
    assert step.compute == pytest.approx(6 * plan.model.num_active * 8192 / 2 / (0.4 * 989e12))
    assert step.tensor == pytest.approx(tensor / link)
    assert step.gradients == pytest.approx(gradients / link)
    assert step.context == step.base == 0 and step.total == sum(step)
    near = step_time(evaluate(plan.model, plan.workload, Degrees(8, shard_base=True)), h100, share)
    layer_parameters = plan.model.num_parameters - 2 * vocab * hidden
    assert near.base == pytest.approx(2 * 7 / 8 * 2 * layer_parameters / link, rel=1e-3)
    far = step_time(evaluate(plan.model, replace(plan.workload, devices=64), Degrees(64, shard_base=True)), h100, share)
    assert far.base == pytest.approx(2 * 63 / 64 * 2 * layer_parameters / network, rel=1e-3)
    assert far.total == far.compute + far.gradients, "layers are gathered while others are computed"
    assert token_s(plan, h100) == pytest.approx(2 * plan.model.num_active / 2 / (0.6 * 3350e9))
    assert token_s(replace(plan, degrees=Degrees(8, shard_base=True)), h100) == pytest.approx(near.base / 2)


@pytest.mark.parametrize("name", ["Qwen3-32B", "Qwen3-30B-A3B"])
def test_a_sampled_token_waits_for_weights_that_are_dequantised(name: str) -> None:
    """Per weight: 2 bytes in bfloat16; 1 in FP8; in int8 1, and a copy of 2 is written and read."""
    (rates,) = [device for device in DEVICES if device.name == "H100 SXM"]
    model = find_known(name)
    seconds = {
        quantize: token_s(evaluate(model, Workload(1, GPU, dtype="bfloat16", quantize=quantize), Degrees()), rates)
        for quantize in ("off", "int8", "nf4", "fp8")
    }
    linears = sum(linear.num_active_parameters for linear in model.linears)
    others, scale = model.num_active - linears, seconds["off"] / (2 * model.num_active)
    for quantize, num_bytes in {"fp8": 1, "int8": 1 + 2 * 2, "nf4": 0.5625 + 2 * 2}.items():
        assert seconds[quantize] == pytest.approx(scale * (num_bytes * linears + 2 * others))


def test_the_speed_of_a_cpu_follows_from_measured_products() -> None:
    dtypes: list[str] = []

    def measure(dtype: str, hidden: int, num_weights: int) -> tuple[float, float]:
        assert hidden == 1024 and num_weights == plan.model.num_active
        dtypes.append(dtype)
        return 100e9, 20e9

    small = Workload(1, 32 * 10**9, rank=8, context=512, dtype="float32", cuda=False)
    plan = choose(find_known("Qwen3-0.6B"), small)
    assert plan.mode == "kept"
    (line,) = report.speeds(plan, measure, lambda: 0.02)
    *_, warning = report.speeds(plan, measure, lambda: 0.63)
    assert warning.startswith("Other processes used 63% of the CPUs during this measurement")
    assert dtypes.pop() == "float32"
    active = plan.model.num_active
    speeds = [float(match) for match in re.findall(r"([\d.]+) (?:trained|sampled)", line)]
    assert speeds == [pytest.approx(100e9 / (4 * active), abs=1), pytest.approx(20e9 / (4 * active), abs=0.1)]
    assert "measured here: 100 GFLOP/s with 256 rows, 20.0 GB/s of weights with one" in line and dtypes == ["float32"]
    quantised = choose(find_known("Qwen3-0.6B"), replace(small, quantize="int8"))
    assert list(report.speeds(quantised, measure)) == [
        "No estimate of the speed: a CPU dequantizes the weights for each product."
    ]
    assert not list(report.speeds(choose(find_known("Qwen3-32B"), small), measure)) and dtypes == ["float32"]


def test_the_work_of_other_processes_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 hundredths of a second, 100 were idle and 50 waited for a disk."""
    counters = tmp_path / "stat"
    counters.write_text("cpu  100 0 50 1000 10 0 0 0 7 0\ncpu0 1 1 1 1\n")
    monkeypatch.setattr(measurement, "CPU_TIMES", counters)
    monkeypatch.setattr(
        measurement.time, "sleep", lambda _: counters.write_text("cpu  300 0 100 1100 60 0 0 0 99 0\ncpu0 1 1 1 1\n")
    )
    assert measurement.measure_busy_share() == pytest.approx(250 / 400)
    monkeypatch.setattr(measurement, "CPU_TIMES", tmp_path / "missing")
    assert 0 <= measurement.measure_busy_share() <= 1


@pytest.mark.matrix(1)
@pytest.mark.parametrize("isa", ["", "AVX2"])
def test_matmuls_are_measured_on_any_processor(isa: str) -> None:
    """A processor without AVX-512 has no packed matmuls in bfloat16. oneDNN reads the variable once a process."""
    code = (
        "from tinsmith.plan.measurement import measure_matmul as f\n"
        "print(*f('float32', 64, 10_000), *f('bfloat16', 64, 10_000))"
    )
    environment = os.environ | ({"ONEDNN_MAX_CPU_ISA": isa, "ATEN_CPU_CAPABILITY": isa.lower()} if isa else {})
    args = [sys.executable, "-c", code]
    output = subprocess.run(args, env=environment, capture_output=True, text=True, check=True).stdout
    rates = [float(word) for word in output.split()]
    assert len(rates) == 4
    for operations_s, bytes_s in (rates[:2], rates[2:]):
        assert 1e6 < operations_s < 1e16 and 1e5 < bytes_s < 1e14


@pytest.mark.parametrize(
    ("model", "words", "advice", "command"),
    [
        ("Qwen/Qwen3-32B", "--memory 80GB", "linear layers in int8", "serve --model {} --quantize int8"),
        (
            *("Qwen/Qwen3-8B", "--memory 15GB --quantize int8 --rank 256"),
            *("sequences of up to 2048 tokens, adapters of rank 8", "serve --model {} --quantize int8"),
        ),
        (
            *("Qwen/Qwen3-8B", "--memory 24GB --dtype float32"),
            *("bfloat16, linear layers in int8", "serve --model {} --dtype bfloat16 --quantize int8"),
        ),
        (
            "Qwen/Qwen3-30B-A3B",
            "--memory 24GB --rank 4",
            "Plan for larger",
            "doctor {} --gpus 1 --memory 80GB --rank 4",
        ),
        ("deepseek-ai/DeepSeek-V3", "--memory 80GB", "Plan for larger ones", "doctor {} --gpus 16 --memory 141GB"),
    ],
)
def test_a_plan_that_does_not_fit_ends_with_a_command_that_does(
    model: str, words: str, advice: str, command: str
) -> None:
    flags = (model, "--gpus", "1", *words.split())
    plan_json = json.loads(doctor(*flags, "--json").stdout)
    assert not plan_json["fits"] and advice in plan_json["advice"]
    assert plan_json["command"].startswith("tinsmith " + command.format(model))
    text_result = doctor(*flags)
    assert text_result.exit_code == 1 and text_result.stdout.splitlines()[-1] == plan_json["command"]
    assert "Nothing fits. Closest configuration: data parallel" in text_result.stdout
    verb, *recommend = plan_json["command"].split()[1:]
    assert verb == "serve" or doctor(*recommend).exit_code == 0


def parse_command_line(words: list[str]) -> dict[str, Any]:
    """The arguments of a command line of `tinsmith`, as the command itself parses them."""
    name, *arguments = words
    command = typer.main.get_command(cli.app).commands[name]  # type: ignore[attr-defined]
    return command.make_context(name, arguments).params


@pytest.mark.parametrize(
    ("flags", "machines", "gpus_per_machine"),
    [("--gpus 1", 1, 1), ("--gpus 8", 1, 8), ("--gpus 16", 2, 8), ("--gpus 4 --machines 2 --dtype bfloat16", 2, 2)],
)
def test_the_doctor_prints_the_commands_that_launch_its_plan(
    flags: str, machines: int, gpus_per_machine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each printed command is parsed by the command that it calls, and its settings by `Settings`."""
    model = "Qwen/Qwen3-8B" if flags == "--gpus 1" else "Qwen/Qwen3-32B"
    plan_json = json.loads(doctor(model, "--memory", "80GB", *flags.split(), "--json").stdout)
    text_result = doctor(model, "--memory", "80GB", *flags.split())
    assert all(f"  {launcher}: {line}" in text_result.stdout for launcher, line in plan_json["launches"].items())
    tool, *serve = shlex.split(plan_json["command"])
    first = parse_command_line(serve)
    assert tool == "tinsmith" and (first["machines"] or 1) == machines
    names = ("data_parallel", "tensor_parallel", "context_parallel", "shard_base")
    degrees = {name: plan_json[name] for name in names}
    assert {name: first[name] or type(degrees[name])(name != "shard_base") for name in names} == degrees

    def set_up(words: list[str]) -> list[str]:
        """Set the variables before a command, and return the command."""
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            monkeypatch.setenv(name, value)
        return words

    tool, *up = set_up(shlex.split(plan_json["launches"]["Ray"]))
    reserved = parse_command_line(up)
    assert (
        tool == "tinsmith" and reserved["engine_gpus"] == gpus_per_machine and (reserved["machines"] or 1) == machines
    )
    settings = Settings(machines=machines)
    assert settings.num_ranks == plan_json["wanted"]["devices"] == machines * gpus_per_machine
    assert settings.dtype == ("bfloat16" if "--dtype" in flags else "auto")
    sky = shlex.split(plan_json["launches"]["SkyPilot"])
    assert sky[:5] == ["sky", "launch", "-c", "tinsmith", "deploy/skypilot/tinsmith.yaml"]
    assert sky[sky.index("--gpus") + 1] == f"H100:{gpus_per_machine}"
    assert ("--num-nodes" in sky) == (machines > 1) and (machines == 1 or sky[sky.index("--num-nodes") + 1] == "2")
    rented = [sky[index + 1] for index, word in enumerate(sky) if word == "--env"]
    assert set_up([*rented, "end"]) == ["end"] and Settings().models == (model,)
    assert Settings().num_ranks == machines * gpus_per_machine
    if machines > 1:
        other = parse_command_line(shlex.split(plan_json["launches"]["other machines"])[1:])
        assert (other["join"], other["ranks"], other["models"]) == (
            f"{first['peer_host']}:29500",
            gpus_per_machine,
            [model],
        )


def test_a_tensor_group_stays_on_one_machine() -> None:
    result = doctor("Qwen/Qwen3-32B", "--gpus", "12", "--memory", "80GB", "--tensor-parallel", "4")
    assert "tensor parallel 4 does not divide the 6 devices of a machine" in str(result.exception)
    spread = ("Qwen/Qwen3-32B", "--gpus", "8", "--memory", "80GB", "--machines")
    assert json.loads(doctor(*spread, "4", "--json").stdout)["tensor_parallel"] <= 2
    refused = doctor(*spread, "8", "--tensor-parallel", "2")
    assert "tensor parallel 2 does not divide the 1 devices of a machine" in str(refused.exception)
    assert "--machines is 3" in str(doctor(*spread, "3").exception)
    for degrees in candidates(find_known("Qwen3-32B"), 12):
        assert 6 % degrees.tensor == 0, "two machines have six devices each"


def test_measured_rates_enter_the_time_of_a_step() -> None:
    model = find_known("Qwen3-8B")
    workload = Workload(8, GPU)
    share = StepShare(4096)
    rates = Rates(1e14, 1e12, *(LinkRate(2e9, 1e-3) for _ in Rates._fields[2:]))
    for degrees in (Degrees(4, 2), Degrees(2, 2, context=2), Degrees(8, shard_base=True), Degrees(2, pipeline=4)):
        plan = evaluate(model, workload, degrees)
        step, volumes, times = (
            step_time(plan, rates, share),
            traffic(model, workload, degrees, share),
            calls(model, degrees, share),
        )
        assert step.compute == pytest.approx(6 * model.num_active * 4096 / degrees.group_size / 1e14)
        seconds = (step.tensor, step.context, step.stages, step.base, step.gradients, step.experts)
        exchanges = (
            (volumes.tensor + volumes.logits, times.tensor + times.logits),
            *zip(volumes[2:], times[2:], strict=True),
        )
        assert seconds == pytest.approx([num_bytes / 2e9 + 1e-3 * count for num_bytes, count in exchanges])
        assert (times.tensor > 0) == (degrees.tensor > 1) and (times.base > 0) == degrees.shard_base
        faster = [rates._replace(**{name: LinkRate(4e9, 5e-4)}) for name in Rates._fields[2:]]
        changed_names = [
            name
            for name, candidate in zip(Rates._fields[2:], faster, strict=True)
            if step_time(plan, candidate, share) != step
        ]
        assert changed_names == [name for name, value in zip(Rates._fields[2:], seconds, strict=True) if value]
    assert token_s(evaluate(model, workload, Degrees(8)), rates) == pytest.approx(2 * model.num_active / 1e12)


@pytest.mark.extended
def test_the_doctor_measures_the_ranks_of_its_plan(tmp_path: Path) -> None:
    """Two processes: what is printed is what the formula gives for what they measured."""
    plan = report.plan_of(report.PlanRequest("tinsmith/nano", tensor_parallel=2, dtype="float32"))
    assert plan.workload.devices == 2 and not plan.workload.cuda
    rates = measure_rates(Settings(data_dir=tmp_path), plan)
    assert 1e6 < rates.operations_s < 1e16 and 1e5 < rates.memory_bytes_s < 1e14
    for measured in (rates.tensor, rates.gradients):
        assert 1e4 < measured.bytes_s < 1e13 and 0 < measured.latency_s < 60
    assert rates.context == rates.base == LinkRate()
    measurement, prediction = report.describe_measurement(plan, rates)
    assert "sums of a tensor group" in measurement and "exchanges" not in measurement
    step = step_time(plan, rates, report.micro_batch(plan))
    assert step.tensor > 0 and f"takes about {1e3 * step.total:,.0f} ms" in prediction


def doctor(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, ("doctor", *words))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(next(dict(row.config) for row in PUBLISHED_MODELS if row.name == "Llama-3.1-70B")))
    return str(path)


def test_the_doctor_plans_for_a_model_from_its_configuration_alone(config: str) -> None:
    result = doctor(config, "--gpus", "8", "--memory", "80GB")
    assert result.exit_code == 0
    assert "data parallel 2 x tensor parallel 4" in result.stdout and "131.4 GiB" in result.stdout
    plan_json = json.loads(doctor(str(Path(config).parent), "--gpus", "8", "--memory", "80GB", "--json").stdout)
    assert (plan_json["parameters"], plan_json["data_parallel"], plan_json["tensor_parallel"]) == (70_553_706_496, 2, 4)
    assert plan_json["wanted"] | {"rank": 32, "context": 8192, "devices": 8} == plan_json["wanted"]


def test_the_doctor_says_no_with_the_gap(config: str) -> None:
    result = doctor(config, "--gpus", "1", "--memory", "80GB", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["missing_bytes"] > 80 * 2**30


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--tensor-parallel", "3"), "does not divide the model's 64 attention heads"),
        (("--tensor-parallel", "2", "--data-parallel", "4"), "GiB less"),
        (("--data-parallel", "4", "--tensor-parallel", "4"), "needs 16 devices; there are 8"),
        (("--rank", "0"), "--rank is 0; it must be from 1 to 256"),
        (("--context", "200000"), "--context is 200000; it must be from 1 to the model's own 131,072"),
        (("--dtype", "int3"), "--dtype is 'int3'"),
        (("--quantize", "int3"), "--quantize is 'int3'"),
        (("--memory", "much"), "--memory is 'much'; write a size such as 80GB"),
        (("--gpus", "0"), "--gpus is 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_the_doctor_refuses_with_the_reason(config: str, words: tuple[str, ...], reason: str) -> None:
    result = doctor(config, "--gpus", "8", "--memory", "80GB", *words)
    assert isinstance(result.exception, SettingsError) and reason in str(result.exception)


def test_the_doctor_plans_for_a_base_that_the_server_knows() -> None:
    plan_json = json.loads(doctor("tinsmith/nano", "--json").stdout)
    assert plan_json["fits"] and plan_json["wanted"]["devices"] >= 1 and plan_json["parameters"] < 10**7


def test_files_that_hold_less_than_their_configuration_tells_are_refused(tmp_path: Path) -> None:
    families.make(tmp_path, families.FAMILIES[0])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 400}))
    result = doctor(str(tmp_path), "--gpus", "1", "--memory", "8GB")
    assert isinstance(result.exception, SettingsError) and "its files hold" in str(result.exception)


COMMAND = re.compile(r"^tinsmith serve --model (\S+)((?: --[a-z-]+(?: [\w.]+)?)+)$", re.MULTILINE)


def test_the_commands_of_the_page_about_devices_fit_on_gpus_of_80_gigabytes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "several-devices.md").read_text()
    commands = COMMAND.findall(page)
    assert len(commands) >= 8
    for name, options in commands:
        degree_of = {flag: int(value) for flag, value in re.findall(r"--(\w+)-parallel (\d+)", options)}
        experts = degree_of.pop("expert", 1)
        degrees = Degrees(**degree_of, experts=experts, shard_base="--shard-base" in options)
        model = find_known(name.rpartition("/")[2])
        machines = int(re.findall(r"--machines (\d+)|$", options)[0] or 1)
        workload = Workload(degrees.devices, GPU, machines=machines)
        assert find_problem(model, degrees) is None, name
        assert evaluate(model, workload, degrees).fits, f"{name}{options}"
