"""An independent float64 oracle: transformers' own model with LoRA folded into its weights, and plain-loop losses.

Shares no code with the backend: the model runs under eager attention one sequence at a time, the adapter enters as
W + scale * B A through functional_call, and each loss is written token by token as WIRE section 7 states it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

Leaves = dict[str, tuple[Tensor, Tensor]]


class Reference:
    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
        self.model.eval().requires_grad_(False)

    def leaves(self, weights: Mapping[str, tuple[Tensor, Tensor]]) -> Leaves:
        """float64 copies with requires_grad."""
        return {
            name: (a.detach().double().requires_grad_(), b.detach().double().requires_grad_())
            for name, (a, b) in weights.items()
        }

    def logprobs(self, tokens: np.ndarray, leaves: Leaves) -> Tensor:
        """[N, V]"""
        merged = {}
        for name, (a, b) in leaves.items():
            if name != "lm_head":
                weight = self.model.get_parameter(f"{name}.weight")
                merged[name.removeprefix("model.") + ".weight"] = weight + 32 / a.shape[0] * b @ a
        inputs = {"input_ids": torch.from_numpy(tokens.astype(np.int64))[None], "use_cache": False}
        hidden = torch.func.functional_call(self.model.model, merged, (), inputs).last_hidden_state[0]
        logits = hidden @ self.model.lm_head.weight.t()
        if "lm_head" in leaves:
            a, b = leaves["lm_head"]
            logits = logits + 32 / a.shape[0] * (hidden @ a.t()) @ b.t()
        softcap = getattr(self.model.config, "final_logit_softcapping", None)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return torch.log_softmax(logits, -1)


def loss(name: str, lp: Tensor, inputs: Mapping[str, np.ndarray], config: Mapping[str, float]) -> Tensor:
    """One datum's loss from lp [N] or [N, K], one token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    if name == "cross_entropy":
        flat, weights = lp.reshape(-1), inputs["weights"].reshape(-1)
        for t in range(len(flat)):
            total = total - float(weights[t]) * flat[t]
        return total
    q, advantages = inputs["logprobs"], inputs["advantages"]
    mask = inputs.get("sequence_ratio_mask", np.ones(len(q)))
    counted = [t for t in range(len(q)) if mask[t] != 0]
    m = sum(lp[t].item() - float(q[t]) for t in counted) / max(1, len(counted))
    for t in range(len(q)):
        a = float(advantages[t])
        if a == 0:
            continue
        low = float(inputs.get("clip_low_threshold", {t: config.get("clip_low_threshold", 0)})[t])
        high = float(inputs.get("clip_high_threshold", {t: config.get("clip_high_threshold", 0)})[t])
        r = torch.exp(lp[t] - float(q[t]))
        if "rollout_logprobs" in inputs:
            a *= min(math.exp(float(q[t]) - float(inputs["rollout_logprobs"][t])), config["rollout_ratio_max"])
        if name == "importance_sampling":
            total = total - r * a
        elif name == "ppo":
            objective = torch.minimum(r * a, r.clamp(low, high) * a)
            if a < 0 and (bound := config.get("dual_clip_threshold", 0)):
                objective = torch.maximum(objective, torch.tensor(bound * a, dtype=torch.float64))
            total = total - objective
        elif name == "cispo":
            total = total - r.clamp(low, high).detach() * lp[t] * a
        elif name == "dro":
            total = total - (lp[t] * a - 0.5 * config["beta"] * (lp[t] - float(q[t])) ** 2)
        elif name == "gspo":
            s = torch.exp(m + lp[t] - lp[t].detach())
            total = total - torch.minimum(s * a, s.clamp(low, high) * a)
        elif name == "stable_reinforce":
            total = total - r * a + config["kl_coeff"] * 0.5 * (lp[t] - float(q[t])) ** 2
        else:
            raise ValueError(name)
    return total
