"""Tiny random models for images, with an image processor that needs no download, and pictures; for tests only."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image as Pillow
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from support import tiny_models
from tinsmith.base_models import read_shape
from tinsmith.types import I32, Image, ModelShape, VisionShape
from tinsmith.wire.images import ImageBytes, InputParts

IMAGE, START, END, VIDEO = 270, 271, 272, 273
"""Ids of the placeholders: <|image_pad|>, <|vision_start|>, <|vision_end|> and <|video_pad|>."""

NAMES = {IMAGE: "<|image_pad|>", START: "<|vision_start|>", END: "<|vision_end|>", VIDEO: "<|video_pad|>"}
VISION = VisionShape(IMAGE, 8, 64, 4096)

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The image placeholder of Qwen3-VL's template."""

_TEXT: dict[str, object] = {
    "vocab_size": tiny_models.VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 256,
    "eos_token_id": tiny_models.EOS,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_VISION: dict[str, object] = {
    "depth": 3,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
_HYBRID: dict[str, object] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 1.0,
    },
}
_GEMMA3_TEXT: dict[str, object] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 6,
    "query_pre_attn_scalar": 8,
    "rope_parameters": None,
    "bos_token_id": None,
}
_SIGLIP: dict[str, object] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 24,
    "patch_size": 4,
}
_EXPERTS: dict[str, object] = {
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def make(directory: Path, model_type: str = "qwen3_vl", *, seed: int = 0) -> ModelShape:
    """Write a random model whose image features matter, with tokenizer and image processor."""
    return write(directory, AutoConfig.for_model(model_type, **configuration(model_type)), tokenizer(), seed=seed)


def write(
    directory: Path, config: PreTrainedConfig, text_tokenizer: tiny_models.PreTrainedTokenizerFast, *, seed: int = 0
) -> ModelShape:
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    # Larger weights make float32's rounding visible in the logprobs of experts behind gated delta nets.
    scale = 0.12 if config.model_type.startswith("qwen3_5") else 0.2
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * scale
            is_norm = "norm" in name and name.endswith("weight") and parameter.dim() == 1
            parameter.copy_(1.0 + noise if is_norm else noise)
    model.save_pretrained(directory)
    processor().save_pretrained(directory)
    text_tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return read_shape(f"tiny/{config.model_type}", directory)


def configuration(model_type: str) -> dict[str, object]:
    if model_type == "gemma3":
        return {
            "text_config": _TEXT | _GEMMA3_TEXT,
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 9,
            "image_token_index": IMAGE,
            "boi_token_index": START,
            "eoi_token_index": END,
        }
    return {
        "text_config": _TEXT
        | (_EXPERTS if model_type.endswith("_moe") else {})
        | (_HYBRID if model_type.startswith("qwen3_5") else {}),
        "vision_config": _VISION,
        "image_token_id": IMAGE,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "video_token_id": VIDEO,
    }


GEMMA3 = VisionShape(IMAGE, 8, 576, 576, 3, START, END)
GEMMA3_TEMPLATE = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>")
"""Gemma 3's template writes only the first marker."""


def make_gemma3(directory: Path) -> ModelShape:
    """A random Gemma 3: windows of 6 tokens in two layers, images of 9 tokens."""
    config = AutoConfig.for_model("gemma3", **configuration("gemma3"))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            is_layer_norm = "vision_tower" in name and "norm" in name and name.endswith("weight")
            parameter.copy_(is_layer_norm + torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(directory)
    Gemma3ImageProcessorPil(size={"height": 24, "width": 24}).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(GEMMA3_TEMPLATE)
    return read_shape("tiny/gemma3", directory)


def processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": VISION.min_pixels, "longest_edge": VISION.max_pixels},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def tokenizer() -> tiny_models.PreTrainedTokenizerFast:
    """The byte-level tokenizer with these names for the placeholders' ids."""
    plain = tiny_models.tokenizer()
    text = plain.backend_tokenizer.to_str()
    for token_id, name in NAMES.items():
        text = text.replace(f'"<|special_{token_id - 257}|>"', f'"{name}"')
    return tiny_models.PreTrainedTokenizerFast(
        tokenizer_object=tiny_models.Tokenizer.from_str(text),
        eos_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


def picture(width: int, height: int, seed: int = 0, form: str = "png") -> bytes:
    """An image file of random pixels."""
    pixels = np.random.default_rng([seed, width, height]).integers(0, 256, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, form.upper())
    return file.getvalue()


def model_input(*parts: I32 | list[int] | bytes, vision: VisionShape = VISION) -> tuple[I32, tuple[Image, ...]]:
    """Convert texts and PNG files, in order, into token ids and images."""
    gathered = InputParts(vision)
    for index, part in enumerate(parts):
        if isinstance(part, bytes):
            gathered.add_image(ImageBytes(part, "png" if part.startswith(b"\x89") else "jpeg"), f"chunks[{index}]")
        else:
            gathered.add_tokens(np.asarray(part, np.int32))
    return gathered.tokens, gathered.images
