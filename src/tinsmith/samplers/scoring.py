"""Logprobs of a prompt's own tokens, as their hidden states come by: temperature 1, exact, in bounded memory.

Row t of a prompt predicts token t + 1, so a span start..stop of the prompt fills positions start + 1..stop of
the request's arrays; a span that is computed twice (after a preemption) fills them twice with the same
numbers.

Letters: T rows of the span, D hidden size, R rows scored at once, V vocabulary, k likeliest tokens.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tinsmith.backends.torch.base import BaseModel
from tinsmith.backends.torch.lora import Routing, Segment
from tinsmith.samplers.sampling import top_rows
from tinsmith.samplers.sequences import Request

SCORED_NUMBERS = 2**22
"""Rows times vocabulary of the logits computed at once: 16 MiB of float32."""


def score_prompt(base: BaseModel, request: Request, hidden_TD: Tensor, start: int) -> bool:
    """Fill in what hidden states of prompt tokens start.. predict. False if some logits are not finite."""
    stop = min(start + len(hidden_TD), request.num_prompt - 1)
    chunk = max(SCORED_NUMBERS // base.vocab_size, 1)
    cuts = [*range(start, stop, chunk), stop]
    for first, last in pairwise(cuts):
        routing = Routing([Segment(0, last - first, request.weights.adapter)])
        logits_RV = base.logits(hidden_TD[first - start : last - start], routing)
        logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
        if bool(logprobs_RV[:, 0].isnan().any()):
            return False
        if request.prompt_logprobs_T is not None:
            targets_R = torch.from_numpy(request.sample.prompt_T[first + 1 : last + 1].astype(np.int64))
            picked_R = logprobs_RV.gather(1, targets_R.to(logits_RV.device)[:, None])[:, 0]
            request.prompt_logprobs_T[first + 1 : last + 1] = picked_R.cpu().numpy()
        if request.topk_prompt is not None:
            ids_Rk, values_Rk = top_rows(logprobs_RV, request.sample.topk_prompt_logprobs)
            width = ids_Rk.shape[1]
            request.topk_prompt.token_ids_Tk[first + 1 : last + 1, :width] = ids_Rk.cpu().numpy()
            request.topk_prompt.logprobs_Tk[first + 1 : last + 1, :width] = values_Rk.cpu().numpy()
    request.num_scored = max(request.num_scored, stop + 1)
    return True
