"""The models that benchmarks run on: made on the spot from a configuration and random weights, nothing is downloaded.

    python benchmarks/models.py m50 /tmp/m50        # writes one; then: tinsmith serve --model bench/m50=/tmp/m50

| name | hidden | layers | heads (keys) | MLP | vocabulary | numbers |
|---|---|---|---|---|---|---|
| tiny | 128 | 4 | 4 (2) of 32 | 384 | 8,192 | 2.9 M |
| m50 | 512 | 8 | 8 (4) of 64 | 2,048 | 8,192 | 40 M |
| h50 | 512 | 8 | 8 (4) of 64 | 2,048 | 8,192 | 46 M, Qwen3.5's layers: three of four are gated delta nets |
| m500 | 1,024 | 28 | 16 (8) of 128 | 3,072 | 151,936 | 596 M, Qwen3-0.6B's shape |

`qwen3-0.6b`, `-1.7b`, `-4b` and `-8b` have the shapes of those models, in bfloat16 (`write_random`), and so have those
of `SHAPES`, some with a part of the layers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

M50: dict[str, int | str] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": 8192,
}
SIZES: dict[str, dict[str, int | str]] = {
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "vocab_size": 8192,
    },
    "m50": M50,
    "h50": M50
    | {
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "m500": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
    },
}
CONTEXT = 4096

QWEN3 = {
    "qwen3-0.6b": (1024, 28, 16, 3072),
    "qwen3-1.7b": (2048, 28, 16, 6144),
    "qwen3-4b": (2560, 36, 32, 9728),
    "qwen3-8b": (4096, 36, 32, 12288),
}
"""Hidden size, layers, heads and inner size; all have 8 key heads of 128 and 151,936 words."""

SHAPES: dict[str, dict[str, object]] = {
    "qwen3-30b-a3b-12l": {
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "qwen3.5-4b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": True,
    },
    "gpt-oss-20b-4l": {
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "tie_word_embeddings": False,
    },
}
"""Mixtures and a model with states. The names end with the number of layers where these are not all."""

SMALL: dict[str, object] = {
    "vocab_size": 8192,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""In place of a shape's sizes, to try a benchmark."""

PART_BYTES = 4 * 10**9
"""Weights of one file."""


def make(size: str, directory: Path, device: str = "cpu") -> Path:
    """Write the model and a tokenizer of as many made-up words to `directory`, unless they are there. `device` draws
    the weights of Qwen3's shapes.
    """
    if (directory / "config.json").exists():
        return directory
    if size in QWEN3 or size in SHAPES:
        return write_random(shape_of(size), directory, device)
    overrides = {"max_position_embeddings": CONTEXT, "tie_word_embeddings": size == "m500", "eos_token_id": 0}
    config = AutoConfig.for_model(str(SIZES[size].get("model_type", "qwen3")), **SIZES[size] | overrides)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    write_tokenizer(config.vocab_size, directory)
    model.save_pretrained(directory)  # last but for config.json: a directory that has it is whole
    return directory


def shape_of(name: str, *, is_small: bool = False, context: int = CONTEXT) -> PreTrainedConfig:
    """The configuration of a model of `QWEN3` or `SHAPES`."""
    shape = {"model_type": "qwen3", **qwen3(name).to_diff_dict()} if name in QWEN3 else SHAPES[name]
    sizes = shape | ({key: size for key, size in SMALL.items() if key in shape} if is_small else {})
    options = {"max_position_embeddings": context, "eos_token_id": 0}
    return AutoConfig.for_model(**sizes | options)  # pyright: ignore[reportArgumentType]


def qwen3(size: str) -> PreTrainedConfig:
    hidden, layers, heads, inner = QWEN3[size]
    return AutoConfig.for_model(
        "qwen3",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=size != "qwen3-8b",
        eos_token_id=0,
    )


def write_random(config: PreTrainedConfig, directory: Path, device: str = "cpu") -> Path:
    """Write a model in bfloat16 whose weights the device draws, one by one: a host takes minutes for 8 billion."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    write_tokenizer(config.vocab_size, directory)
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(index.values())):05}.safetensors"
        save_file(part, directory / name, {"format": "pt"})
        index.update(dict.fromkeys(part, name))
        part.clear()

    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = torch.ones(weight.shape, dtype=torch.bfloat16, device=device)
        if weight.dim() > 1:
            value.normal_(0.0, 0.02, generator=generator)
        part[name] = value.cpu()
        if sum(x.nbytes for x in part.values()) >= PART_BYTES:
            flush()
    if part:
        flush()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.architectures, config.dtype = [type(model).__name__], "bfloat16"
    config.save_pretrained(directory)
    return directory


def write_tokenizer(vocab_size: int, directory: Path) -> None:
    tokenizer = Tokenizer(
        tokenizer_models.WordLevel({"</s>": 0, **{f"w{i}": i for i in range(1, vocab_size)}}, unk_token="</s>")
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=[*SIZES, *QWEN3, *SHAPES])
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    sys.stdout.write(f"{make(args.size, args.directory)}\n")


if __name__ == "__main__":
    main()
