"""Pretrains nano from nothing: `python -m tinsmith.nano.train`.

The schedule is by steps and every batch by (seed, step), so the same arguments on the
same machine give the same weights. The directory it writes is what `tinsmith.nano.path()`
ships. Compute is bfloat16 under autocast by default, on float32 weights.
"""

import argparse
import json
import math
import pathlib
import sys
import time
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from tinsmith.nano import path
from tinsmith.nano.batches import Batch, Shape, make_batch
from tinsmith.nano.tokenizer import END_OF_TEXT, TURN_END, save_tokenizer, train_tokenizer

MAX_POSITIONS = 2048
_LOG_EVERY = 100


@dataclass(frozen=True, slots=True)
class Recipe:
    seed: int = 0
    steps: int = 4200
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    weight_decay: float = 0.05
    shape: Shape = field(default_factory=Shape)
    hidden: int = 256
    layers: int = 4
    intermediate: int = 640
    heads: int = 4
    autocast: bool = True
    threads: int = 2


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads // 2,
        head_dim=recipe.hidden // recipe.heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    return Qwen3ForCausalLM(config)


def loss_of(model: Qwen3ForCausalLM, batch: Batch, autocast: bool) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits_BTV = model(input_ids=batch.tokens_BT, position_ids=batch.positions_BT, use_cache=False).logits
    weights = batch.weights_BT[:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1].float().flatten(0, 1),
        batch.tokens_BT[:, 1:].flatten(),
        reduction="none",
    )
    return (losses * weights).sum() / weights.sum()


def schedule(recipe: Recipe, step: int) -> float:
    """Linear warmup, then a cosine down to 2 % of the peak; `step` counts from 0."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(recipe: Recipe, model: Qwen3ForCausalLM) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.99), fused=True)


def train(recipe: Recipe) -> tuple[Qwen3ForCausalLM, Tokenizer]:
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    tokenizer = train_tokenizer(recipe.seed)
    model = build_model(recipe, tokenizer)
    optimizer = make_optimizer(recipe, model)
    start = time.monotonic()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule(recipe, step)
        batch = make_batch(tokenizer, recipe.seed, step, recipe.shape)
        loss = loss_of(model, batch, recipe.autocast)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % _LOG_EVERY == 0 or step == recipe.steps - 1:
            seconds = time.monotonic() - start
            sys.stderr.write(f"step {step} loss {loss.item():.4f} time {seconds:.0f}s\n")
    return model.eval(), tokenizer


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: pathlib.Path) -> None:
    """Writes bfloat16 weights under a float32 config: half the size, loaded as float32."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        do_sample=True,
        temperature=1.0,
    )
    model.bfloat16().save_pretrained(out)
    config_path = out / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["dtype"] = "float32"
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, out, MAX_POSITIONS)


def main() -> None:
    defaults = Recipe()
    parser = argparse.ArgumentParser(description="Pretrain the embedded model tinsmith/nano.")
    parser.add_argument("--out", type=pathlib.Path, default=path())
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--float32", action="store_true", help="no bfloat16 autocast")
    args = parser.parse_args()
    recipe = Recipe(seed=args.seed, steps=args.steps, autocast=not args.float32)
    save(*train(recipe), args.out)


if __name__ == "__main__":
    main()
