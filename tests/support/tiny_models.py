"""Tiny random-weight models with a tokenizer, in Hugging Face's directory format, for tests only."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from tinsmith.types import ModelShape

VOCAB = 300
EOS = 256

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
}


def config(arch: str, **overrides: object) -> PreTrainedConfig:
    """arch: qwen3 (tied), llama (untied, biases), gemma2 (windows, soft caps), gpt_oss (experts, sinks) or qwen3_5
    (gated delta nets, tied).
    """
    if arch == "qwen3":
        return Qwen3Config(**{**_COMMON, "tie_word_embeddings": True, **overrides})
    if arch == "llama":
        return LlamaConfig(**{**_COMMON, "tie_word_embeddings": False, "attention_bias": True, **overrides})
    if arch == "gemma2":
        arch_options = {"sliding_window": 6, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0}
        return Gemma2Config(**{**_COMMON, **arch_options, **overrides})
    if arch == "gpt_oss":
        arch_options = {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}
        return GptOssConfig(**{**_COMMON, **arch_options, **overrides})
    if arch == "qwen3_5":
        arch_options = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
               "linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
        return Qwen3_5TextConfig(**{**_COMMON, "tie_word_embeddings": True, **arch_options, **overrides})
    raise ValueError(arch)


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, no merges: token i is byte i of the byte alphabet, then specials up to VOCAB."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"] + [f"<|special_{i}|>" for i in range(VOCAB - 257)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )


def make(directory: Path, arch: str = "qwen3", *, seed: int = 0, std: float = 0.15, **overrides: object) -> ModelShape:
    """Write a model whose weights are large enough that logits differ, and return its shape."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(arch, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(1.0 + noise if "norm" in name and arch != "gemma2" else noise)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return ModelShape(
        name=f"tiny/{arch}",
        path=str(directory),
        vocab_size=model.config.vocab_size,
        max_context_length=model.config.max_position_embeddings,
        arch=type(model).__name__,
    )
