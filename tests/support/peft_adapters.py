"""Random adapters created by PEFT itself, for tests only."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

TOKENS = torch.arange(3, 15)[None]


def make(base: Path, directory: Path, *, seed: int = 1, **settings: object) -> Path:
    """Write an adapter whose matrices are all random, so that it has an effect everywhere."""
    import peft

    config = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "target_modules": ["q_proj", "v_proj"], **settings})  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        for name, parameter in sorted(model.named_parameters()):
            if ".lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        model.save_pretrained(str(directory))
    return directory


def logits(base: Path, adapter: Path | None = None, tokens: Tensor = TOKENS) -> Tensor:
    """The logits of transformers, in float32, with an adapter that PEFT applies."""
    import peft

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, str(adapter))
        return model.eval()(input_ids=tokens, use_cache=False).logits[0].float()
