"""`tinsmith/nano-long`: the embedded model with room for the prompts of agents."""

from __future__ import annotations

from pathlib import Path

import anthropic
import numpy as np
import openai
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from support.live import API_KEY, serving
from tinsmith.base_models import nano

LENGTH = 3000


def test_a_prompt_beyond_nanos_context_is_answered_with_the_models_own_logprobs(tmp_path: Path) -> None:
    models = ("--model", nano.MODEL_NAME, "--model", nano.LONG_NAME)
    tokens = np.random.default_rng(0).integers(16, 500, LENGTH).tolist()
    with serving(tmp_path / "data", *models) as server:
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            sampler = service.create_sampling_client(base_model=nano.LONG_NAME).result()
            scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        text = "word " * LENGTH
        with anthropic.Anthropic(base_url=server.url, api_key=API_KEY, max_retries=0) as claude:
            message = claude.messages.create(
                model=nano.LONG_NAME, max_tokens=8, messages=[{"role": "user", "content": text}]
            )
            assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > LENGTH
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="maximum context length is 2048"):
                client.chat.completions.create(model=nano.MODEL_NAME, messages=[{"role": "user", "content": text}])
    model = AutoModelForCausalLM.from_pretrained(nano.path(), dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    expected = torch.log_softmax(logits, -1)[torch.arange(LENGTH - 1), torch.tensor(tokens[1:])]
    np.testing.assert_allclose(np.array(scored[1:], float), expected.numpy(), atol=1e-3)
