"""Pretrains nano from nothing: `python -m tools.nano.train`.

Two stages: the pretraining, and a short one in which additions are sometimes answered with
a hedge (see `tasks`). The schedules are by steps and every batch by (seed, stage, step), so
the same arguments on the same machine give the same weights. The directory it writes is what
`tinsmith.base_models.nano.path()` ships. Compute is bfloat16 under autocast by default, on float32 weights.
"""

import argparse
import json
import math
import pathlib
import sys
import time
from dataclasses import dataclass, field, replace

import torch
from tokenizers import Tokenizer
from tools.nano.batches import Batch, Shape, make_batch
from tools.nano.tokenizer import END_OF_TEXT, TURN_END, save_tokenizer, train_tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from tinsmith.base_models.nano import path

MAX_POSITIONS = 2048
_LOG_EVERY = 100


@dataclass(frozen=True, slots=True)
class Stage:
    steps: int
    learning_rate: float
    warmup_steps: int
    hedging: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    seed: int = 0
    pretraining: Stage = Stage(steps=4200, learning_rate=2e-3, warmup_steps=200)
    hedging: Stage = Stage(steps=400, learning_rate=3e-4, warmup_steps=20, hedging=True)
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


def schedule(stage: Stage, step: int) -> float:
    """Linear warmup, then a cosine down to 2 % of the peak; `step` counts from 0."""
    if step < stage.warmup_steps:
        return stage.learning_rate * (step + 1) / stage.warmup_steps
    done = (step - stage.warmup_steps) / max(1, stage.steps - stage.warmup_steps)
    return stage.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(recipe: Recipe, model: Qwen3ForCausalLM) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)


def pretrain(recipe: Recipe) -> tuple[Qwen3ForCausalLM, Tokenizer]:
    torch.manual_seed(recipe.seed)
    tokenizer = train_tokenizer(recipe.seed)
    model = build_model(recipe, tokenizer)
    run_stage(recipe, recipe.pretraining, model, tokenizer)
    return model, tokenizer


def reload(start: pathlib.Path) -> tuple[Qwen3ForCausalLM, Tokenizer]:
    """A saved first stage, to run the second one from."""
    model = Qwen3ForCausalLM.from_pretrained(start, dtype=torch.float32)
    return model, Tokenizer.from_file(str(start / "tokenizer.json"))


def train(recipe: Recipe, start: pathlib.Path | None = None) -> tuple[Qwen3ForCausalLM, Tokenizer]:
    torch.set_num_threads(recipe.threads)
    model, tokenizer = reload(start) if start else pretrain(recipe)
    # As if the first stage had been saved, so that starting from its file gives the same.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    run_stage(recipe, recipe.hedging, model, tokenizer)
    return model.eval(), tokenizer


def run_stage(recipe: Recipe, stage: Stage, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    optimizer = make_optimizer(recipe, model)
    begin = time.monotonic()
    model.train()
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule(stage, step)
        batch = make_batch(tokenizer, recipe.seed, step, recipe.shape, hedging=stage.hedging)
        loss = loss_of(model, batch, recipe.autocast)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % _LOG_EVERY == 0 or step == stage.steps - 1:
            seconds = time.monotonic() - begin
            sys.stderr.write(f"step {step} loss {loss.item():.4f} time {seconds:.0f}s\n")


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
    parser.add_argument("--steps", type=int, default=defaults.pretraining.steps)
    parser.add_argument("--hedging-steps", type=int, default=defaults.hedging.steps)
    parser.add_argument("--start", type=pathlib.Path, help="a saved first stage; skips the pretraining")
    parser.add_argument("--float32", action="store_true", help="no bfloat16 autocast")
    args = parser.parse_args()
    recipe = Recipe(
        seed=args.seed,
        pretraining=replace(defaults.pretraining, steps=args.steps),
        hedging=replace(defaults.hedging, steps=args.hedging_steps),
        autocast=not args.float32,
    )
    save(*train(recipe, args.start), args.out)


if __name__ == "__main__":
    main()
