"""Images in packed rows: logprobs and gradients are those of transformers' own model, alone and beside others."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from support import tiny_models, vision_models
from support.vision_models import IMAGE, picture
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch import vision as images_there
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import SettingsError, UserError
from tinsmith.types import AdamParams, Datum, Image, LoraSpec, ModelShape, OptimStep, Pass, PassResult
from tinsmith.wire.adapter_files import wrapper_name

torch.set_num_threads(1)

LogprobsOf = Callable[[nn.Module, Datum], Tensor]

MODELS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


@pytest.fixture(scope="module", params=MODELS)
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return vision_models.make(tmp_path_factory.mktemp(request.param), request.param)


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 256, length).tolist()


def datum(*parts: list[int] | bytes, seed: int = 0) -> Datum:
    tokens, images = vision_models.model_input(*parts)
    rng = np.random.default_rng([seed, len(tokens)])
    targets = rng.integers(0, tiny_models.VOCAB, len(tokens))
    weights = rng.uniform(0.1, 1.0, len(tokens)).astype(np.float32)
    return Datum(tokens, {"target_tokens": targets, "weights": weights}, images)


WIDE, TALL, SMALL = picture(61, 22, 1), picture(20, 75, 2, "jpeg"), picture(8, 8, 3)
DATA = (
    datum(text(5, 1), WIDE, text(7, 2)),
    datum(text(12, 3)),
    # transformers' own positions do not distinguish adjacent images.
    datum(TALL, text(4, 4), SMALL, text(1, 1), SMALL, text(9, 5)),
    datum(text(3, 6), WIDE),
)


def load_reference_model(path: str | Path, adapter: Path | None = None) -> nn.Module:
    """transformers' own model, with an adapter that PEFT has loaded."""
    model = AutoModelForImageTextToText.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    if adapter is None:
        return model.eval()
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()


def logits(model: nn.Module, example: Datum) -> Tensor:
    """[N, V], from the tokens and the output of the model's own image processor."""
    model_inputs: dict[str, Tensor] = {"input_ids": torch.from_numpy(example.tokens_N.astype(np.int64))[None]}
    if example.images:
        files = [Pillow.open(io.BytesIO(image.data)) for image in example.images]
        model_inputs |= dict(vision_models.processor()(images=files, return_tensors="pt"))
        model_inputs["mm_token_type_ids"] = (model_inputs["input_ids"] == IMAGE).int()
    return model(**model_inputs, use_cache=False).logits[0]


def logprobs(model: nn.Module, example: Datum) -> Tensor:
    targets = torch.from_numpy(np.asarray(example.inputs["target_tokens"]))
    return torch.log_softmax(logits(model, example).double(), -1).gather(1, targets[:, None])[:, 0]


def run(backend: TorchBackend, model_id: str, *data: Datum, forward_only: bool = False) -> PassResult:
    request = Pass(f"r-{model_id}", model_id, data, "cross_entropy", {}, forward_only)
    (result,) = run_to_end(backend.run_passes([request]))
    assert isinstance(result, PassResult), result
    return result


def train_backend(shape: ModelShape, directory: Path) -> TorchBackend:
    """A backend with a model `m` whose adapter is not zero, saved in the directory."""
    backend = TorchBackend(shape, device="cpu")
    backend.create_model("m", LoraSpec(3, seed=1))
    for seed in (1, 2):
        run(backend, "m", datum(text(20, seed)))
        assert not isinstance(backend.optim_step([OptimStep("o", "m", AdamParams(2e-2))])[0], Exception)
    backend.save("m", directory, optimizer=False)
    return backend


def test_logprobs_are_those_of_transformers_alone_and_packed(shape: ModelShape, tmp_path: Path) -> None:
    backend = train_backend(shape, tmp_path)
    model = load_reference_model(shape.path, tmp_path)
    with torch.no_grad():
        expected = [logprobs(model, example) for example in DATA]
    packed = run(backend, "m", *DATA, forward_only=True).logprobs
    for example, actual, reference in zip(DATA, packed, expected, strict=True):
        np.testing.assert_allclose(actual, reference, atol=1e-4)
        np.testing.assert_allclose(run(backend, "m", example, forward_only=True).logprobs[0], reference, atol=1e-4)


def test_an_image_changes_what_follows_it(shape: ModelShape) -> None:
    """Shows that the other comparisons depend on the features."""
    model = load_reference_model(shape.path)
    first, second = (datum(text(5, 1), picture(61, 22, seed), text(7, 2)) for seed in (1, 9))
    with torch.no_grad():
        difference = (logprobs(model, first) - logprobs(model, second)).abs()
    assert difference[:5].max() < 1e-9
    assert difference[-7:].min() > 1e-3


def reference_gradients(model: nn.Module, data: Sequence[Datum], logprobs_of: LogprobsOf) -> dict[str, Tensor]:
    """Gradients of the summed weighted loss, by the names of PEFT's matrices."""
    model.zero_grad()
    weights = [torch.from_numpy(np.asarray(example.inputs["weights"])) for example in data]
    loss = -sum((w * logprobs_of(model, example)).sum() for w, example in zip(weights, data, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()
    return {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def compute_gradients(backend: TorchBackend, data: Sequence[Datum]) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradients of the same pass, without an optimizer step, by the names of linears."""
    run(backend, "m", *data)
    model = backend._models["m"]
    assert model.gradient_P is not None
    views = model.adapter.layout.views(model.gradient_P)
    model.gradient_P = None
    return views


def test_gradients_are_those_of_transformers_alone_and_packed(shape: ModelShape, tmp_path: Path) -> None:
    backend = train_backend(shape, tmp_path)
    model = load_reference_model(
        shape.path, tmp_path
    ).double()  # gated delta nets round as much in float32 as the bound allows
    for data in ((DATA[0],), (DATA[2],), DATA):
        expected = reference_gradients(model, data, logprobs)
        views = compute_gradients(backend, data)
        assert views
        if "moe" in shape.arch.lower():  # experts' matrices have other names there; the linears are compared
            views = {name: pair for name, pair in views.items() if ".experts." not in name}
        # Parts of fused projections are one matrix to PEFT: tests/unit/test_recurrent.py has their gradients.
        views = {name: pair for name, pair in views.items() if f"{wrapper_name(name)}.lora_A" in expected}
        assert views
        for name, pair in views.items():
            for letter, actual in zip("AB", pair, strict=True):
                reference = expected[f"{wrapper_name(name)}.lora_{letter}"]
                np.testing.assert_allclose(
                    actual.reshape(reference.shape), reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max())
                )


@pytest.mark.matrix(2)
def test_data_that_begin_with_equal_images_share_their_rows(shape: ModelShape, tmp_path: Path) -> None:
    """Not those with another image at the same place, whose tokens are the same."""
    backend = train_backend(shape, tmp_path)
    beginning = text(5, 1), picture(61, 22, 1), text(4, 2)
    data = [datum(*beginning, text(6, 3)), datum(*beginning, text(9, 4), picture(22, 22, 3), text(3, 8))]
    data.append(datum(text(5, 1), picture(61, 22, 9), text(8, 5)))
    model = load_reference_model(shape.path, tmp_path)
    with torch.no_grad():
        expected = [logprobs(model, example) for example in data]
    gradients_by_min = []
    for min_rows in (0, 4):
        backend._trainer._min_shared_rows = min_rows
        gradients_by_min.append(compute_gradients(backend, data))
        result = run(backend, "m", *data, forward_only=True)
        for actual, reference in zip(result.logprobs, expected, strict=True):
            np.testing.assert_allclose(actual, reference, atol=1e-4)
    shared = len(data[0].tokens_N) - 6
    assert result.num_rows == sum(len(example.tokens_N) for example in data) - shared - 5
    apart, together = gradients_by_min
    for name, pair in together.items():
        for ours, theirs in zip(pair, apart[name], strict=True):
            assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-7


def test_a_neighbour_that_is_not_finite_does_not_cross(shape: ModelShape, tmp_path: Path) -> None:
    backend = train_backend(shape, tmp_path)
    unpacked = run(backend, "m", DATA[0], forward_only=True).logprobs[0]
    backend.create_model("broken", LoraSpec(3, seed=2))
    backend._models["broken"].adapter.flat_P.fill_(float("nan"))
    requests = [Pass(name, name, (DATA[0],), "cross_entropy", {}, True) for name in ("m", "broken")]
    first, second = run_to_end(backend.run_passes(requests))
    assert isinstance(first, PassResult) and isinstance(second, PassResult)
    np.testing.assert_allclose(first.logprobs[0], unpacked, atol=1e-6)


@cache
def corrupt_image(how: str) -> bytes:
    data = bytearray(picture(40, 40, 5, "png" if how == "chunk" else "jpeg"))
    if how == "cut":
        return bytes(data[: len(data) // 2])
    data[len(data) // 2] ^= 0xFF
    return bytes(data)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("how", ["cut", "chunk"])
def test_a_broken_image_fails_its_own_pass_alone(shape: ModelShape, tmp_path: Path, how: str) -> None:
    backend = train_backend(shape, tmp_path)
    broken = datum(text(3, 1), corrupt_image(how), text(3, 2))
    requests = [
        Pass("bad", "m", (DATA[1], broken), "cross_entropy", {}, False),
        Pass("good", "m", (DATA[0],), "cross_entropy", {}, False),
    ]
    refused, result = run_to_end(backend.run_passes(requests))
    assert isinstance(result, PassResult)
    assert isinstance(refused, UserError)
    form = "png" if how == "chunk" else "jpeg"
    assert f"chunks[1].data is not a valid {form} image" in str(refused)


def test_an_image_is_upright_as_its_file_says(shape: ModelShape) -> None:
    base = BaseModel.load(shape, device="cpu")
    assert base.vision is not None
    pixels = Pillow.open(io.BytesIO(picture(61, 22, 1)))
    exif, file = Pillow.Exif(), io.BytesIO()
    exif[0x0112] = 6  # after the rotation, the first row is on the right
    pixels.save(file, "PNG", exif=exif)
    _, (turned,) = vision_models.model_input(file.getvalue())
    _, (plain,) = vision_models.model_input(png(pixels.transpose(Pillow.Transpose.ROTATE_270)))
    assert turned.num_tokens == plain.num_tokens
    torch.testing.assert_close(base.vision.features(turned), base.vision.features(plain))
    placed = base.vision.prepare_images(turned.num_tokens, (turned,))
    assert placed is not None and placed.positions_3N[1:].max(1).tolist() == [7, 2]


def png(image: Pillow.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_features_are_computed_once_and_kept_within_bounds(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    base = BaseModel.load(shape, device="cpu")
    vision = base.vision
    assert vision is not None
    calls: list[int] = []
    vision.tower.register_forward_hook(lambda *_: calls.append(1))
    images = [vision_models.model_input(picture(8 * n, 8, n))[1][0] for n in range(1, 5)]
    for image in (*images, *images):
        vision.features(image)
    assert len(calls) == 4
    assert vision.feature_bytes == sum(vision.features(image).num_bytes for image in images)
    monkeypatch.setattr(images_there, "FEATURE_BYTES", vision.features(images[3]).num_bytes)
    vision.features(vision_models.model_input(picture(16, 16))[1][0])
    assert vision.feature_bytes <= images_there.FEATURE_BYTES
    vision.features(images[0])
    assert len(calls) == 6


def test_features_are_found_within_one_scope(shape: ModelShape) -> None:
    """Otherwise their latency would reveal to another tenant which images were sent."""
    base = BaseModel.load(shape, device="cpu")
    vision = base.vision
    assert vision is not None
    calls: list[int] = []
    vision.tower.register_forward_hook(lambda *_: calls.append(1))
    tokens, images = vision_models.model_input(WIDE)
    embeddings = []
    for scope in ("a", "b", "a"):
        placed = base.prepare_images(tokens, images, scope)
        assert placed is not None
        embeddings.append(vision.features(placed.images[0]).embeddings_RD)
    assert len(calls) == 2
    assert torch.equal(embeddings[0], embeddings[1])


def test_features_give_way_in_a_memory_budget(shape: ModelShape) -> None:
    backend = TorchBackend(shape, device="cpu", memory_budget=64 << 20)
    vision = backend.base.vision
    assert vision is not None
    backend.create_model("m", LoraSpec(3, seed=1))
    run(backend, "m", DATA[0], forward_only=True)
    image_bytes = backend.memory_use()["images"]
    assert image_bytes == vision.feature_bytes > 0
    memory = backend._memory
    assert memory.evict_for(memory.free() + image_bytes, "kv_cache")
    assert vision.feature_bytes == backend.memory_use()["images"] == 0
    vision.limit_bytes = lambda: 0.0
    run(backend, "m", DATA[0], forward_only=True)
    assert vision.feature_bytes == 0


def test_a_text_model_has_no_tower_and_the_same_names(shape: ModelShape, tmp_path: Path) -> None:
    plain = TorchBackend(replace(shape, vision=None), device="cpu")
    with_tower = TorchBackend(shape, device="cpu")
    names = [t.name for t in plain.base.adaptable_targets()]
    assert names == [t.name for t in with_tower.base.adaptable_targets()]
    assert names[0].startswith("model.layers.0.")
    assert plain.base.num_bytes < with_tower.base.num_bytes
    for backend in (plain, with_tower):
        backend.create_model("m", LoraSpec(3, seed=1))
    by_backend = [run(backend, "m", DATA[1], forward_only=True).logprobs[0] for backend in (plain, with_tower)]
    np.testing.assert_allclose(*by_backend, atol=1e-6)
    (refused,) = run_to_end(plain.run_passes([Pass("r", "m", (DATA[0],), "cross_entropy", {}, True)]))
    assert isinstance(refused, UserError) and "chunks[1] is an image" in str(refused)


def test_checkpoints_go_between_servers_with_and_without_images_and_into_the_cookbook(
    shape: ModelShape, tmp_path: Path
) -> None:
    from tinker_cookbook import weights

    backend = train_backend(shape, tmp_path / "saved")
    adapter = backend._models["m"].adapter
    backend.save("m", tmp_path / "export", optimizer=False, stacked=True)
    plain = TorchBackend(replace(shape, vision=None), device="cpu")
    for name in ("saved", "export"):
        for other in (backend, plain):
            other.load(name, LoraSpec(3, seed=1), tmp_path / name, optimizer=False)
            assert torch.equal(other._models[name].adapter.flat_P, adapter.flat_P), name
    merged = tmp_path / "merged"
    weights.build_hf_model(
        base_model=shape.path, adapter_path=str(tmp_path / "export"), output_path=str(merged), dtype="float32"
    )
    with torch.no_grad():
        actual, expected = (
            logprobs(load_reference_model(merged), DATA[0]),
            logprobs(load_reference_model(shape.path, tmp_path / "saved"), DATA[0]),
        )
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_an_image_processor_that_counts_otherwise_is_refused(shape: ModelShape) -> None:
    assert shape.vision is not None
    other = replace(shape, vision=replace(shape.vision, min_pixels=4 * shape.vision.min_pixels))
    with pytest.raises(SettingsError, match="its image processor makes 1 tokens of an image of 1 x 1 pixels, where 4"):
        BaseModel.load(other, device="cpu")


def images_of(*parts: list[int] | bytes) -> tuple[Image, ...]:
    return vision_models.model_input(*parts)[1]


def test_positions_are_those_of_transformers(shape: ModelShape) -> None:
    base = BaseModel.load(shape, device="cpu")
    assert base.vision is not None
    model = load_reference_model(shape.path)
    for example in DATA:
        placed = base.vision.prepare_images(len(example.tokens_N), example.images)
        if placed is None:
            continue
        ids = torch.from_numpy(example.tokens_N.astype(np.int64))[None]
        grids = [base.vision._grid(image) for image in placed.images]
        expected, shift = model.model.get_rope_index(  # type: ignore[operator, union-attr]
            ids, (ids == IMAGE).int(), torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids])
        )
        assert placed.positions_3N.tolist() == expected[:, 0].tolist()
        assert placed.shift == int(shift)
        assert placed.positions(0, len(ids[0]) + 3)[:, -3:].tolist() == [
            [len(ids[0]) + n + int(shift) for n in range(3)] for _ in range(3)
        ]
