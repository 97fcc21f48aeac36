"""The models that benchmarks run on: made on the spot from a configuration and random weights, nothing is downloaded.

    python benchmarks/models.py m50 /tmp/m50        # writes one; then: tinsmith serve --model bench/m50=/tmp/m50

| name | hidden | layers | heads (keys) | MLP | vocabulary | numbers |
|---|---|---|---|---|---|---|
| tiny | 128 | 4 | 4 (2) of 32 | 384 | 8,192 | 2.9 M |
| m50 | 512 | 8 | 8 (4) of 64 | 2,048 | 8,192 | 40 M |
| h50 | 512 | 8 | 8 (4) of 64 | 2,048 | 8,192 | 46 M, Qwen3.5's layers: three of four are gated delta nets |
| m500 | 1,024 | 28 | 16 (8) of 128 | 3,072 | 151,936 | 596 M, Qwen3-0.6B's shape |
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

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


def make(size: str, directory: Path) -> Path:
    """Write the model and a tokenizer of as many made-up words to `directory`, unless they are there."""
    if (directory / "config.json").exists():
        return directory
    given = {"max_position_embeddings": CONTEXT, "tie_word_embeddings": size == "m500", "eos_token_id": 0}
    config = AutoConfig.for_model(str(SIZES[size].get("model_type", "qwen3")), **SIZES[size] | given)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokenizer = Tokenizer(
        tokenizer_models.WordLevel({"</s>": 0, **{f"w{i}": i for i in range(1, config.vocab_size)}}, unk_token="</s>")
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(directory)
    model.save_pretrained(directory)  # last but for config.json: a directory that has it is whole
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    sys.stdout.write(f"{make(given.size, given.directory)}\n")


if __name__ == "__main__":
    main()
