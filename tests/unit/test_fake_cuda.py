"""The branches for CUDA on a simulated device: shapes, dtypes, devices, and waits of the host. Only tests/gpu checks
values. Steps run the same lines of our code as on a GPU, with gradients, and any wait of the host is an error, except
for one read at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from pydantic import ByteSize, ValidationError
from structlog.testing import capture_logs
from torch import nn

from support import families, tiny_models, traced_losses, vision_models
from support.fake_cuda import DEVICE, FakeCudaBackend, FakeCudaFullBackend, fake_cuda
from support.local_sampling import make_prompt, make_sample
from support.ranked import NAMED_LOSSES
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.attention import PackedCausal, Window
from tinsmith.backends.torch.host import read, upload
from tinsmith.backends.torch.memory import STEP_ROWS
from tinsmith.backends.torch.model import BaseModel
from tinsmith.engine.__main__ import _options, check_device
from tinsmith.errors import SettingsError
from tinsmith.samplers.local.engine import MAX_SEQUENCES, LocalSampler, SamplerOptions
from tinsmith.samplers.local.request import Request, Weights
from tinsmith.settings import Settings
from tinsmith.types import (
    AdamParams,
    Adjustments,
    CustomLoss,
    Datum,
    DimuonParams,
    LoraSpec,
    ModelShape,
    OptimStep,
    Pass,
    PassResult,
    Sample,
    SamplingParams,
)

ARCHS = ("qwen3", "gemma2", "gpt_oss", "qwen3_5")
"""Fused layers; windows and capped scores; sinks and experts; states."""

SLOW_VISION = ("qwen3_5", "gemma3")


@pytest.fixture(scope="module", params=ARCHS)
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("mixture"), "gpt_oss")


def open_backend(shape: ModelShape, **options: str | int) -> FakeCudaBackend:
    backend = FakeCudaBackend(shape, **options)  # pyright: ignore[reportArgumentType]
    for index, rank in enumerate((8, 8, 16)):
        optimizer = "dimuon" if index == 2 else "adamw"
        backend.create_model(str(index), LoraSpec(rank, seed=index), optimizer)
        backend.publish(str(index), f"{index}/1")
    return backend


def data(*lengths: int) -> tuple[Datum, ...]:
    rng, datums = np.random.default_rng(0), []
    for length in lengths:
        tokens = rng.integers(1, tiny_models.VOCAB, length + 1)
        floats = {name: np.ones(length, np.float32) for name in ("logprobs", "advantages")}
        inputs = {"target_tokens": tokens[1:], **floats}
        datums.append(Datum(tokens[:-1].astype(np.int32), inputs))
    return tuple(datums)


@pytest.mark.parametrize(
    "waits",
    [
        lambda x, _: x.sum().item(),
        lambda x, _: bool(x[0] == 0),
        lambda x, _: x.nonzero(),
        lambda x, _: x[x > 0],
        lambda x, _: x[[0, 1]],
        lambda x, indices: x[indices],
        lambda x, _: torch.tensor([1, 2], device=x.device),
        lambda x, indices: indices.to(x.device),
        lambda x, _: x.to("cpu"),
        lambda x, _: x.repeat_interleave(torch.arange(3, device=x.device)),
    ],
)
def test_waits_for_the_device_are_errors(waits: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    with fake_cuda() as device:
        x, indices = upload(np.arange(3.0), DEVICE), torch.arange(2)
        device.strict = True
        with pytest.raises((RuntimeError, AssertionError)):
            waits(x, indices)


def test_numbers_of_several_kinds_cross_in_one_copy_each_way() -> None:
    with fake_cuda() as device:
        device.strict = True
        x = upload(np.arange(3), DEVICE, torch.float64)
        assert (x.device, x.dtype) == (DEVICE, torch.float64)
        floats, flags = read(x[None], x > 1)
    assert (floats.shape, floats.dtype, flags.dtype) == ((1, 3), np.float64, np.bool_)
    assert device.reads == 1


@pytest.mark.matrix(1)
def test_a_step_of_training_reads_once_and_one_of_the_optimizers_once(shape: ModelShape) -> None:
    with fake_cuda() as device:
        backend = open_backend(shape)
        passes = [
            Pass("a", "0", data(9, 9, 4), "cross_entropy", {}, False),
            Pass("b", "1", data(22), "ppo", {}, False),  # as many rows as the other of its layout: one product of both
            Pass("c", "2", data(9, 30), "gspo", {}, False),
        ]
        device.strict = True
        results = run_to_end(backend.run_passes(passes))
        assert all(isinstance(result, PassResult) for result in results), results
        assert device.reads == 1
        for trained in backend._models.values():
            assert trained.gradient_P is not None and trained.gradient_P.device == DEVICE
            assert trained.gradient_P.dtype == torch.float32
        device.reads = 0
        params = AdamParams(1e-3, grad_clip_norm=0.5)
        steps = [OptimStep("a", "0", params), OptimStep("b", "1", params), OptimStep("c", "2", DimuonParams(1e-3))]
        outcomes = backend.optim_step(steps)
        assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes
        assert device.reads == 1
        run_to_end(backend.run_passes([Pass("d", "0", data(9), "cross_entropy", {}, True)]))
        assert device.reads == 2


def step(backend: TorchBackend, *passes: Pass) -> None:
    results = run_to_end(backend.run_passes(passes))
    assert all(isinstance(result, PassResult) for result in results), results


@pytest.mark.parametrize("arch", ["qwen3_vl", *(pytest.param(x, marks=pytest.mark.extended) for x in SLOW_VISION)])
def test_images_in_training_and_in_prompts_add_no_reads(tmp_path: Path, arch: str) -> None:
    shape = vision_models.make_gemma3(tmp_path) if arch == "gemma3" else vision_models.make(tmp_path, arch)
    assert shape.vision is not None
    files = [vision_models.picture(width, height) for width, height in ((61, 22), (20, 75))]
    prompts = [vision_models.model_input(list(range(9)), file, [1], vision=shape.vision) for file in files]
    image_data = [Datum(tokens, {"target_tokens": tokens.astype(np.int64)}, images) for tokens, images in prompts]
    with fake_cuda(pages=False) as device:
        backend = open_backend(shape)
        sampler = backend.sampler
        device.strict = True
        step(backend, Pass("a", "0", (*image_data, *data(5)), "cross_entropy", {}, False))
        assert device.reads == 1
        for index, (tokens, images) in enumerate(prompts):
            sampler.submit(make_sample(str(index), tokens, version_id="0/1", images=images))
        for expected in (1, 2):
            sampler.step()
            assert device.reads == expected, "tokens are read a step later"


@pytest.mark.parametrize("forward_only", [False, True])
def test_every_loss_reads_once(qwen: ModelShape, forward_only: bool) -> None:
    with fake_cuda() as device:
        backend = open_backend(qwen)
        device.strict = True
        for reads, loss_fn in enumerate(NAMED_LOSSES, 1):
            step(backend, Pass("a", "0", data(9, 4), loss_fn, {}, forward_only))
            assert device.reads == reads, loss_fn


def custom(name: str) -> tuple[CustomLoss, Datum]:
    fn, ranks = traced_losses.LOSSES[name]
    traced = traced_losses.datum(np.random.default_rng(0), 9, tiny_models.VOCAB, ranks)
    inputs = {key: tensor.to_numpy() for key, tensor in traced.loss_fn_inputs.items()}
    loss = traced_losses.parse_as_server(traced_losses.trace(fn, ranks))
    return loss, Datum(np.array(traced.model_input.to_ints(), np.int32), inputs)


@pytest.mark.parametrize("name", ["clipped", "top_k"])
def test_a_custom_loss_reads_its_log_probabilities_besides(qwen: ModelShape, name: str) -> None:
    loss, datum = custom(name)
    with fake_cuda() as device:
        backend = open_backend(qwen)
        device.strict = True
        for forward_only, reads in ((True, 1), (False, 3)):
            step(backend, Pass("a", "0", (datum, datum), "custom", {"loss_id": "1"}, forward_only, loss))
            assert device.reads == reads


@pytest.mark.extended
@pytest.mark.parametrize("recompute", ["off", "on"])
@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "llama"])
def test_training_of_all_weights_reads_once(tmp_path: Path, arch: str, recompute: str) -> None:
    shape = tiny_models.make(tmp_path, arch)
    with fake_cuda() as device:
        backend = FakeCudaFullBackend(shape, recompute=recompute)
        for name in ("0", "1"):
            backend.create_model(name, LoraSpec(0))
        backend.publish("0", "0/1")
        device.strict = True
        step(backend, Pass("a", "0", data(9, 4), "cross_entropy", {}, False))
        assert device.reads == 1
        trained, model = backend._models["0"], backend.base.model
        assert trained.gradient_P is not None and trained.gradient_P.device == DEVICE
        assert all(parameter.grad is None and parameter.device == DEVICE for parameter in model.parameters())
        (outcome,) = backend.optim_step([OptimStep("a", "0", AdamParams(1e-3, grad_clip_norm=0.5))])
        assert isinstance(outcome, dict) and device.reads == 2
        for version_id in ("0/1", None):
            backend.sampler.submit(make_sample(str(version_id), make_prompt(9), version_id=version_id))
        for _ in range(2):
            backend.sampler.step()
        assert device.reads == 3, "tokens are read a step later"


def crowd() -> list[Sample]:
    adjustments = (
        Adjustments(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, min_p=0.1),
        Adjustments(logit_bias=((5, 4.0), (17, -100.0)), bad_words=((3, 4), (7,)), min_tokens=4),
        Adjustments(allowed_token_ids=tuple(range(40))),
    )
    params = [
        SamplingParams(max_tokens=40, temperature=0.0, stop_eos=False, seed=1),
        SamplingParams(max_tokens=40, temperature=1.0, stop_eos=False, seed=1),
        SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, stop_eos=False, seed=1),
        SamplingParams(max_tokens=40, temperature=0.7, top_k=20, stop_eos=False, seed=1),
        SamplingParams(max_tokens=40, top_k=200, top_p=0.5, stop_eos=False, seed=1),
        *(SamplingParams(max_tokens=40, stop_eos=False, seed=1, adjustments=adjustment) for adjustment in adjustments),
    ]
    versions = (None, "0/1", "1/1", "2/1")
    return [
        make_sample(
            str(index), make_prompt(3 + 5 * index), param_set, version_id=versions[index % 4],
            num_samples=1 + index % 3, topk_sample_logprobs=index % 4,
        )
        for index, param_set in enumerate(params)
    ]  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("pages", [True, False])
def test_steps_of_all_kinds_of_samples_read_once_from_a_cache_that_stays(shape: ModelShape, pages: bool) -> None:
    with fake_cuda(pages=pages) as device:
        backend = open_backend(shape)
        division, sampler = backend._divide_memory(), backend.sampler
        num_blocks, stores = sampler._cache.num_blocks, dict(sampler._cache._stores)
        assert division is not None and backend.model_budget_bytes == division.models
        assert sampler._cache.num_bytes == pytest.approx(division.kv_cache, rel=0.01) or sampler._keeps_states
        device.strict = True
        for sample in crowd():
            sampler.submit(sample)
        for _ in range(5):
            device.reads = 0
            sampler.step()
            assert device.reads == 1
        assert len(sampler._batcher.running) == sum(sample.num_samples for sample in crowd())
        assert sampler._cache.num_blocks == sampler._batcher.pool.num_blocks == num_blocks
        assert all(sampler._cache._stores[layer] is store for layer, store in stores.items())


@pytest.mark.extended
@pytest.mark.parametrize("pages", [True, False])
def test_tokens_are_read_a_step_late_unless_the_next_draw_needs_them(shape: ModelShape, pages: bool) -> None:
    with fake_cuda(pages=pages) as device:
        sampler = open_backend(shape).sampler
        device.strict = True
        free = [sample for sample in crowd() if not Request(sample, Weights(None, 0), 0, 1).needs_answer]
        for sample in free:
            sampler.submit(sample)
        reads = []
        for _ in range(4):
            before = device.reads
            sampler.step()
            reads.append(device.reads - before)
            assert {s.num_unread for s in sampler._batcher.running} == {1}
        sampler.submit(make_sample("needs", make_prompt(5), SamplingParams(adjustments=Adjustments(bad_words=((1,),)))))
        before = device.reads
        sampler.step()
        assert {s.num_unread for s in sampler._batcher.running} == {0}
    assert reads == [0, 1, 1, 1]
    assert device.reads - before == 2, "those of the step before, and those of the step"


@pytest.mark.parametrize("reads_late", [True, False])
@pytest.mark.parametrize("pages", [True, False])
def test_a_prompt_in_pieces_is_read_when_it_has_ended(qwen: ModelShape, pages: bool, reads_late: bool) -> None:
    with fake_cuda(pages=pages) as device:
        backend = open_backend(qwen)
        options = SamplerOptions(max_tokens_per_step=16, kv_cache_bytes=2**20, reads_late=reads_late)
        sampler = LocalSampler(backend.base, backend._versions, options=options)
        device.strict = True
        sampler.submit(make_sample("a", make_prompt(40), SamplingParams(max_tokens=4, stop_eos=False)))
        reads = []
        for _ in range(4):
            before = device.reads
            sampler.step()
            reads.append(device.reads - before)
    assert reads == ([0, 0, 0, 1] if reads_late else [0, 0, 1, 1])


def test_scores_of_a_prompt_are_one_more_read_for_each_chunk(qwen: ModelShape) -> None:
    prompt = make_prompt(60)
    targets = np.stack([prompt[1:], prompt[:-1]], 1).astype(np.int64)
    logprob_options = {"prompt_logprobs": True, "topk_prompt_logprobs": 5, "prompt_alt_tokens_k": 3}
    with fake_cuda() as device:
        sampler = open_backend(qwen).sampler
        device.strict = True
        params = SamplingParams(max_tokens=4, stop_eos=False)
        sampler.submit(
            make_sample("a", prompt, params, version_id="0/1", target_prompt_logprobs=targets, **logprob_options)
        )
        sampler.step()
        assert device.reads == 1
        sampler.step()
        assert device.reads == 2, "the token of the first step"


def test_kernels_take_experts_of_adapters_up_to_rank_128_and_no_others(mixture: ModelShape) -> None:
    for grouped, rank, expected in ((True, 4, True), (False, 8, False), (True, 128, True), (True, 129, False)):
        with fake_cuda(pages=False, grouped=grouped):
            backend = open_backend(mixture)
            backend.create_model("own", LoraSpec(rank))
            assert backend.base.experts[0]._is_grouped([None, backend._models["own"].adapter]) == expected


@pytest.mark.parametrize("recompute", ["off", "on"])
def test_experts_with_a_fused_gate_train_without_reads_of_their_own(tmp_path: Path, recompute: str) -> None:
    (family,) = (family for family in families.FAMILIES if family.model_type == "qwen3_moe")
    shape = families.make(tmp_path, family)
    with fake_cuda(pages=False) as device:
        backend = open_backend(shape, recompute=recompute)
        assert all(experts.is_fused for experts in backend.base.experts)
        device.strict = True
        three = (Pass(str(i), str(i), data(9 + i, 4), "cross_entropy", {}, False) for i in range(3))
        step(backend, *three)
        assert device.reads == 1


@pytest.mark.parametrize("kind", ["int8", "nf4", "fp8"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_quantised_experts_train_in_groups_without_reads_of_their_own(
    tmp_path: Path, model_type: str, kind: str
) -> None:
    (family,) = (family for family in families.FAMILIES if family.model_type == model_type)
    sizes = {"intermediate_size": 48, "moe_intermediate_size": 48}  # multiples of 16 for 8-bit floats
    shape = families.make(tmp_path, replace(family, config={**family.config, **sizes}))
    if kind != "fp8":
        pytest.importorskip("bitsandbytes")
    with fake_cuda() as device:
        backend = open_backend(shape, quantize=kind)
        assert all(experts.is_quantised and experts.can_capture for experts in backend.base.experts)
        assert {tensor.device for tensor in backend.base.frozen_tensors()} == {DEVICE}
        experts = backend.base.experts[0]
        size = experts.num_experts * 2 * experts.hidden_features * experts.inner_features
        assert backend.base.copied_bytes == 2 * size * (1 if kind == "fp8" else 2), "once more in graphs"
        device.strict, device.reads = True, 0  # codes are made on the host, at load
        three = (Pass(str(i), str(i), data(9 + i, 4), "cross_entropy", {}, False) for i in range(3))
        step(backend, *three)
        assert device.reads == 1


def test_a_budget_leaves_the_cache_as_it_was_allocated(qwen: ModelShape) -> None:
    with fake_cuda():
        backend = open_backend(qwen, memory_budget=40 * 2**20)
        sampler = backend.sampler
        memory, pool = backend._memory, sampler._batcher.pool
        assert 0.9 * memory.steady_limit() < sampler._cache.num_bytes <= memory.steady_limit()
        for sample in crowd():
            sampler.submit(sample)
        sampler.step()
        before = (sampler._cache.num_bytes, pool.num_blocks, len(sampler._batcher.running))
        assert not memory.evict_for(memory.free() + 2**20, "activations")
        assert (sampler._cache.num_bytes, pool.num_blocks, len(sampler._batcher.running)) == before
        sampler.step()


@pytest.mark.parametrize("on_cuda", [False, True])
def test_one_line_names_the_kernels_of_every_part(mixture: ModelShape, on_cuda: bool) -> None:
    with capture_logs() as lines:
        if on_cuda:
            with fake_cuda():
                FakeCudaBackend(mixture)
        else:
            TorchBackend(mixture, device="cpu")
    (line,) = (line for line in lines if line["event"] == "kernels")
    assert {"attention", "decode", "lora", "optimizer", "experts", "layers"} <= line.keys()
    assert ("grouped_mm" in line["experts"]) == on_cuda
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize(
    ("pages", "expected"),
    [(True, "Triton on pages, in CUDA graphs; SDPA for prompts"), (False, "SDPA on gathered keys")],
)
def test_the_line_names_what_samples(qwen: ModelShape, pages: bool, expected: str) -> None:
    with fake_cuda(pages=pages):
        assert FakeCudaBackend(qwen).kernels()["decode"] == expected


def test_experts_whose_sizes_do_not_fit_are_named_as_a_loop(tmp_path: Path) -> None:
    shape = tiny_models.make(tmp_path, "gpt_oss", intermediate_size=20)
    with fake_cuda(pages=False):
        assert FakeCudaBackend(shape).kernels()["experts"] == "loop over experts"


@pytest.mark.parametrize(
    ("dtype", "dim", "window", "repeated"),
    [
        (torch.bfloat16, 64, None, False),
        (torch.float32, 64, None, True),
        (torch.bfloat16, 320, None, True),
        (torch.bfloat16, 64, Window(4), True),
    ],
)
def test_heads_are_repeated_where_a_fused_kernel_needs_it(
    dtype: torch.dtype, dim: int, window: Window | None, repeated: bool
) -> None:
    with fake_cuda():
        q = torch.empty(12, 4, dim, dtype=dtype, device=DEVICE)
        k = torch.empty(12, 2, dim, dtype=dtype, device=DEVICE)
        plan = PackedCausal([7, 5], DEVICE)
        with mock.patch.object(nn.functional, "scaled_dot_product_attention", wraps=attention_of) as called:
            assert plan.attend(0, q, k, k, scale=1.0, window=window).shape == q.shape
        (call,) = called.call_args_list
        assert call.args[1].shape[1] == call.args[2].shape[1] == (4 if repeated else 2)
        assert call.kwargs["enable_gqa"] is not repeated


attention_of = nn.functional.scaled_dot_product_attention


def test_a_gpu_that_is_not_there_is_refused_by_name() -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
    ):
        check_device(Settings(device="cuda:0"))
        check_device(Settings(device="cuda"))
        with pytest.raises(SettingsError, match=r"device is 'cuda:1', and torch .* finds 1 devices of the kind"):
            check_device(Settings(device="cuda:1"))
    with pytest.raises(ValidationError, match="device"):
        Settings(device="gpu")


def test_a_device_with_an_index_becomes_the_current_one(qwen: ModelShape) -> None:
    chosen: list[str] = []
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
        mock.patch.object(torch.cuda, "set_device", chosen.append),
        pytest.raises(SettingsError, match="cannot be served"),  # where torch has no CUDA
    ):
        BaseModel.load(qwen, device="cuda:1")
    assert chosen == ["cuda:1"]


def test_settings_limit_the_sampler(qwen: ModelShape) -> None:
    settings = Settings(kv_cache_bytes=ByteSize(2**21), sampler_sequences=5, sampler_step_tokens=40, device="cpu")
    backend = TorchBackend(qwen, **_options(settings))
    batcher = backend.sampler._batcher
    block_bytes = backend.sampler._cache.token_bytes * batcher.block_size
    assert (batcher._max_sequences, batcher._max_tokens) == (5, 40)
    assert batcher.pool.max_blocks == 2**21 // block_bytes
    assert backend._trainer.memory is not None
    assert backend._trainer.memory.sampling_bytes < TorchBackend(qwen, device="cpu")._trainer.memory.sampling_bytes  # pyright: ignore[reportOptionalMemberAccess]


def test_limits_follow_the_device_unless_they_are_given(qwen: ModelShape) -> None:
    with fake_cuda():
        backend = open_backend(qwen)
        batcher = backend.sampler._batcher
        assert (batcher._max_sequences, batcher._max_tokens) == (MAX_SEQUENCES, STEP_ROWS)
        options = SamplerOptions(max_sequences=3, max_tokens_per_step=24, kv_cache_bytes=2**20)
        sampler = LocalSampler(backend.base, backend._versions, options=options)
        assert (sampler._batcher._max_sequences, sampler._batcher._max_tokens) == (3, 24)
        assert sampler._cache.num_bytes == pytest.approx(2**20, rel=0.05)
