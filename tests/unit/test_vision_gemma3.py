"""Gemma 3 with images: image tokens attend bidirectionally, and an image is processed in one chunk."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from support import vision_models
from support.local_sampling import run
from support.tolerances import rounding_of_model
from support.vision_models import END, GEMMA3, IMAGE, START, picture
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.model import BaseModel
from tinsmith.base_models import read_shape
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.errors import SettingsError, UserError
from tinsmith.plan.architecture import read_config, read_directory
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.types import Datum, Image, ModelShape, Sample, SamplingParams
from tinsmith.wire.adapter_files import wrapper_name
from unit.test_vision import compute_gradients, load_reference_model, reference_gradients, text, train_backend
from unit.test_vision import run as run_pass
from unit.test_vision_chats import IMAGE_CONTENT, chat
from unit.test_vision_sampling import check as check_sample

torch.set_num_threads(1)

ONE, OTHER, TALL = picture(61, 22, 1), picture(61, 22, 2), picture(20, 75, 3, "jpeg")
SIZE = 9
"""Tokens of an image."""

GREEDY = SamplingParams(max_tokens=7, temperature=0.0, stop_eos=False)
HOT = SamplingParams(max_tokens=7, temperature=1.0, stop_eos=False, seed=7)

Parts = tuple[list[int] | bytes, ...]
PROMPTS: dict[str, Parts] = {
    "begin": (ONE, text(7, 1)),
    "middle": (text(9, 2), OTHER, text(6, 3)),
    "two": ([*text(5, 4), START], ONE, [END, START], TALL, [END, *text(2, 6)]),
    "end": (text(6, 7), ONE),
    "text": (text(23, 8),),
}


def model_input(parts: Parts) -> tuple[np.ndarray, tuple[Image, ...]]:
    return vision_models.model_input(*parts, vision=GEMMA3)


def datum(*parts: list[int] | bytes) -> Datum:
    tokens, images = model_input(parts)
    rng = np.random.default_rng(len(tokens))
    weights = rng.uniform(0.1, 1.0, len(tokens)).astype(np.float32)
    return Datum(tokens, {"target_tokens": rng.integers(0, 256, len(tokens)), "weights": weights}, images)


DATA = tuple(datum(*parts) for parts in PROMPTS.values())


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return vision_models.make_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def backend(shape: ModelShape, tmp_path_factory: pytest.TempPathFactory) -> TorchBackend:
    trained_backend = train_backend(shape, Path(shape.path) / "adapter")
    trained_backend.publish("m", "v")
    return trained_backend


@pytest.fixture(scope="module")
def model(backend: TorchBackend, shape: ModelShape) -> nn.Module:
    return load_reference_model(shape.path, Path(shape.path) / "adapter")


def logits(model: nn.Module, example: Datum) -> Tensor:
    """[N, V], with transformers' own image processor and token types."""
    model_inputs: dict[str, Tensor] = {"input_ids": torch.from_numpy(example.tokens_N.astype(np.int64))[None]}
    if example.images:
        files = [Pillow.open(io.BytesIO(image.data)).convert("RGB") for image in example.images]
        processor = Gemma3ImageProcessorPil(size={"height": 24, "width": 24})
        model_inputs["pixel_values"] = processor(images=files, return_tensors="pt")["pixel_values"]
    model_inputs["token_type_ids"] = (model_inputs["input_ids"] == IMAGE).long()
    return model(**model_inputs, use_cache=False).logits[0]


def logprobs(model: nn.Module, example: Datum) -> Tensor:
    targets = torch.from_numpy(np.asarray(example.inputs["target_tokens"]))
    return torch.log_softmax(logits(model, example).double(), -1).gather(1, targets[:, None])[:, 0]


def test_logprobs_are_those_of_transformers_alone_and_packed(backend: TorchBackend, model: nn.Module) -> None:
    with torch.no_grad():
        expected = [logprobs(model, example) for example in DATA]
    packed = run_pass(backend, "m", *DATA, forward_only=True).logprobs
    for example, actual, reference in zip(DATA, packed, expected, strict=True):
        np.testing.assert_allclose(actual, reference, atol=1e-4)
        np.testing.assert_allclose(run_pass(backend, "m", example, forward_only=True).logprobs[0], reference, atol=1e-4)


def test_gradients_are_those_of_transformers_alone_and_packed(backend: TorchBackend, model: nn.Module) -> None:
    for data in ((DATA[0],), (DATA[2],), DATA):
        expected = reference_gradients(model, data, logprobs)
        views = compute_gradients(backend, data)
        assert len(views) == 3 * 7 + 1
        for name, pair in views.items():
            for letter, actual in zip("AB", pair, strict=True):
                reference = expected[f"{wrapper_name(name)}.lora_{letter}"]
                np.testing.assert_allclose(actual, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))


def test_an_image_that_data_share_stays_in_one_node(
    backend: TorchBackend, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens see later ones of it, so rows are shared up to an image that differs, not into it."""
    monkeypatch.setattr(backend._trainer, "_min_shared_rows", 4)
    beginning = text(9, 2), ONE, text(3, 3)
    data = (
        datum(*beginning, text(6, 4)),
        datum(*beginning, text(8, 5)),
        datum(text(9, 2), OTHER, text(7, 6)),
        datum(text(9, 2), ONE),
    )
    with torch.no_grad():
        expected = [logprobs(model, example) for example in data]
    result = run_pass(backend, "m", *data, forward_only=True)
    for actual, reference in zip(result.logprobs, expected, strict=True):
        np.testing.assert_allclose(actual, reference, atol=1e-4)
    assert result.num_rows == 9 + SIZE + (3 + 6) + (3 + 8) + (SIZE + 7), "three tokens are too few to be shared"
    gradients = reference_gradients(model, data, logprobs)
    for name, pair in compute_gradients(backend, data).items():
        for letter, actual in zip("AB", pair, strict=True):
            reference = gradients[f"{wrapper_name(name)}.lora_{letter}"]
            np.testing.assert_allclose(actual, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))


def test_an_image_is_seen_both_ways_and_text_is_not(backend: TorchBackend, model: nn.Module) -> None:
    """Shows that the other comparisons depend on the mask."""
    before = datum(*PROMPTS["middle"])
    inputs = {**before.inputs, "target_tokens": np.full(len(before.tokens_N), 5)}
    first, second = (replace(before, inputs=inputs, images=datum(text(9, 2), data, text(6, 3)).images)
                  for data in (ONE, OTHER))  # fmt: skip
    by_image = [run_pass(backend, "m", variant, forward_only=True).logprobs[0] for variant in (first, second)]
    difference = np.abs(by_image[0] - by_image[1])
    assert difference[:9].max() == 0.0
    assert difference[9:].min() > 1e-4
    placed = backend.base.prepare_images(before.tokens_N, before.images, "")
    assert placed is not None
    visible_ends = placed.visible_counts(0, len(before.tokens_N))
    assert visible_ends is not None and visible_ends.tolist() == [*range(1, 10), *[18] * SIZE, *range(19, 25)]
    causal = replace(placed, bidirectional=False)
    assert causal.visible_counts(0, 24) is None
    base = backend.base
    base_place = base.prepare_images
    try:
        base.prepare_images = lambda *_: causal  # type: ignore[method-assign]
        wrong = run_pass(backend, "m", before, forward_only=True).logprobs[0]
    finally:
        base.prepare_images = base_place  # type: ignore[method-assign]
    with torch.no_grad():
        assert np.abs(wrong - logprobs(model, before).numpy())[9:].max() > 1e-2


def sampler(backend: TorchBackend, **options: int) -> LocalSampler:
    arguments: dict[str, Any] = {"block_size": 4, **options}
    return LocalSampler(backend.base, backend._versions, options=SamplerOptions(**arguments))


def ask(name: str, params: SamplingParams = GREEDY, num_samples: int = 1, **options: object) -> Sample:
    tokens, images = model_input(PROMPTS[name.partition("/")[0]])
    return Sample(name, "v", tokens, num_samples, params, images=images, **options)  # pyright: ignore[reportArgumentType]


check = partial(check_sample, logits_of=logits)


@pytest.mark.parametrize("rows", [1, 5, 12, 512])
def test_answers_match_transformers_in_chunks_and_in_batches(
    backend: TorchBackend, model: nn.Module, rows: int
) -> None:
    samples = [ask(name, prompt_logprobs=True) for name in PROMPTS]
    samples += [ask(f"{name}/hot", HOT, num_samples=3) for name in PROMPTS]
    answers = run(sampler(backend, max_tokens_per_step=rows), *samples)
    for sample in samples:
        check(answers[sample.request_id], sample, model)


def test_no_piece_ends_within_an_image(backend: TorchBackend) -> None:
    own_sampler = sampler(backend, max_tokens_per_step=5)
    step, ends = own_sampler._batcher.schedule, []

    def record_ends(*args: object) -> object:
        schedule = step(*args)  # type: ignore[arg-type]
        ends.extend(span.stop for span in schedule.spans)
        return schedule

    own_sampler._batcher.schedule = record_ends  # type: ignore[method-assign, assignment]
    run(own_sampler, ask("middle"))
    # 9 tokens of text, the image, 6 of text, and the answer.
    assert ends[:5] == [5, 9, 18, 23, 24]


def test_sampled_logprobs_are_those_of_training(backend: TorchBackend) -> None:
    tolerance = rounding_of_model(read_config(Path(backend.base.shape.path) / "config.json"))
    for name in ("middle", "two"):
        sample = ask(name, HOT)
        answer = run(sampler(backend), sample)[name].sequences[0]
        tokens = np.concatenate([sample.prompt_T, answer.tokens_T])
        inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
        scored = run_pass(backend, "m", Datum(tokens[:-1], inputs, sample.images), forward_only=True).logprobs[0]
        np.testing.assert_allclose(scored[len(sample.prompt_T) - 1 :], answer.logprobs_T, atol=tolerance)


def test_cached_blocks_that_end_within_an_image_serve_the_same_image_alone(
    backend: TorchBackend, model: nn.Module
) -> None:
    """Tokens 0..23: the image begins at 9, within a block of 4, and ends at 18, within another."""
    shared = sampler(backend)

    def same(name: str, data: bytes) -> Sample:
        tokens, images = model_input((text(9, 2), data, text(6, 3)))
        return Sample(name, "v", tokens, 1, GREEDY, images=images)

    hits = []
    for name, data in (("a", ONE), ("b", OTHER), ("c", ONE), ("d", OTHER)):
        result = run(shared, same(name, data))[name]
        check(result, same(name, data), model)
        hits.append(result.prompt_cache_hit_tokens)
    assert hits == [0, 8, 20, 20]
    # The same image at the end of a prompt: the rest after a hit within the image is one chunk.
    tokens, images = model_input((text(9, 2), ONE))
    sample = Sample("e", "v", tokens, 1, GREEDY, images=images)
    result = run(shared, sample)["e"]
    assert result.prompt_cache_hit_tokens == 16
    check(result, sample, model)


def test_preempted_sequences_come_to_the_same_answers(backend: TorchBackend, model: nn.Module) -> None:
    samples = [ask(f"{name}/{n}", HOT) for name in ("middle", "two", "end") for n in range(2)]
    small = sampler(backend, kv_cache_bytes=80 * sampler(backend)._cache.token_bytes)
    answers = run(small, *samples)
    for sample in samples:
        check(answers[sample.request_id], sample, model)


def test_a_deterministic_sampler_gives_the_same_bits_in_any_batch(backend: TorchBackend, model: nn.Module) -> None:
    make = partial(LocalSampler, backend.base, backend._versions)
    options = SamplerOptions(block_size=4, deterministic=True)
    samples = [ask("two", prompt_logprobs=True), ask("begin"), ask("end"), ask("middle"), ask("text")]
    together, pinned = run(make(options=options), *samples), make(options=options)
    for sample in samples:
        check(together[sample.request_id], sample, model)
        single = run(pinned, sample)[sample.request_id].sequences[0]
        assert single.tokens_T.tolist() == together[sample.request_id].sequences[0].tokens_T.tolist()
        assert single.logprobs_T.tolist() == together[sample.request_id].sequences[0].logprobs_T.tolist()
    # From cached blocks.
    again = run(pinned, samples[0])["two"].sequences[0]
    assert again.logprobs_T.tolist() == together["two"].sequences[0].logprobs_T.tolist()


def test_images_that_touch_are_refused(backend: TorchBackend) -> None:
    tokens, images = model_input((text(3, 1), ONE, OTHER))
    with pytest.raises(UserError, match=r"chunks\[2\] directly follows another image"):
        sampler(backend).submit(Sample("bad", "v", tokens, 1, GREEDY, images=images))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"do_pan_and_scan": True, "pan_and_scan_min_ratio_to_activate": 1.2}, "do_pan_and_scan is on"),
        ({"size": {"height": 48, "width": 48}}, "the vision tower takes 24 x 24 pixels"),
    ],
)
def test_an_image_processor_that_does_otherwise_is_refused(
    settings: dict[str, Any], said: str, shape: ModelShape, tmp_path: Path
) -> None:
    for file in Path(shape.path).iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "preprocessor_config.json").unlink()
    config: dict[str, Any] = {"size": {"height": 24, "width": 24}, **settings}
    Gemma3ImageProcessorPil(**config).save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=re.escape(said)):
        BaseModel.load(read_shape("x", tmp_path), device="cpu")


def test_a_text_model_has_no_tower_and_the_same_names(shape: ModelShape, backend: TorchBackend, tmp_path: Path) -> None:
    plain = TorchBackend(replace(shape, vision=None), device="cpu")
    assert type(plain.base.model).__name__ == "Gemma3ForCausalLM"
    assert [t.name for t in plain.base.adaptable_targets()] == [t.name for t in backend.base.adaptable_targets()]
    for candidate in (plain, backend):
        candidate.load("n", backend._models["m"].adapter.spec, Path(shape.path) / "adapter", optimizer=False)
    first, second = (run_pass(candidate, "n", DATA[4], forward_only=True).logprobs[0] for candidate in (plain, backend))
    np.testing.assert_allclose(first, second, atol=1e-6)


def test_a_plan_counts_the_tower(shape: ModelShape, backend: TorchBackend) -> None:
    counted = read_directory(Path(shape.path))
    names = ("vision_tower", "multi_modal_projector")
    tower = sum(
        p.numel()
        for name, p in load_reference_model(shape.path).named_parameters()
        if any(part in name for part in names)
    )
    assert counted.vision_parameters == tower > 0


def test_numbers_that_published_configurations_leave_out_are_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}')
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 896, "width": 896}}')
    model_shape = read_shape("g", tmp_path)
    assert (model_shape.vocab_size, model_shape.max_context_length) == (262_208, 131_072)
    assert model_shape.vision is not None and model_shape.vision.grid(100, 7) == (16, 16)
    vision = model_shape.vision
    assert (vision.image_token_id, vision.begin_token_id, vision.end_token_id) == (262_144, 255_999, 256_000)


def test_a_chat_has_the_marks_and_line_breaks_of_the_models_own_processor(shape: ModelShape) -> None:
    """The reference is transformers' Gemma3Processor.full_image_sequence."""
    plan = chat(ModelTokenizer(shape), *IMAGE_CONTENT)
    tokenizer = AutoTokenizer.from_pretrained(shape.path)
    content = [{"type": "image"} if block["type"] == "image_url" else block for block in IMAGE_CONTENT]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    sequence = f"\n\n<|vision_start|>{'<|image_pad|>' * SIZE}<|vision_end|>\n\n"
    expected = tokenizer(written.replace("<|vision_start|>", sequence))["input_ids"]
    assert list(plan.prompts[0]) == expected
    assert [image.num_tokens for image in plan.images] == [SIZE, SIZE]
