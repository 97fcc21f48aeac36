"""The model families that tests serve, and those that are refused: the source of docs/models.md.

Each family is a configuration of a few thousand weights, which test_families.py trains, samples and exports; each
refusal must be raised by BaseModel.load, with this reason. The document is rendered from the two lists, so every family
in it has a test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel, __version__

from support import tiny_models, vision_models
from tinsmith.plan.versions import TORCH, TRANSFORMERS, VersionRange
from tinsmith.types import ModelShape

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"

COMMON: Mapping[str, object] = {
    "vocab_size": tiny_models.VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": tiny_models.EOS,
    "bos_token_id": None,
    "pad_token_id": None,
}

WINDOW = 6
EXPERTS: Mapping[str, object] = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
LATENT: Mapping[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "head_dim": 4,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 128,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}


STATES_FIRST = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
GATED_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    **STATES_FIRST,
}
CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"], "conv_L_cache": 3}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 8}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2, "chunk_size": 8}
INDEXER = {"index_topk": 128, "index_n_heads": 2, "index_head_dim": 8}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 24}
AFMOE = {**EXPERTS, "num_local_experts": 4, "num_dense_layers": 1, "num_shared_experts": 1}


@dataclass(frozen=True, slots=True)
class Family:
    """`model_type` as config.json has it. `states`: some layers are recurrent. `core`: the test is in `make test`.
    `since`: the oldest release of transformers with which it is served.
    """

    model_type: str
    title: str
    peculiarity: str = ""
    config: Mapping[str, object] = field(default_factory=dict)
    experts: bool = False
    states: bool = False
    core: bool = False
    since: str = TRANSFORMERS.oldest


ALL_FAMILIES = (
    Family("llama", "Llama 3", "scaled RoPE", {"rope_parameters": LLAMA3_ROPE}, core=True),
    Family("qwen2", "Qwen2.5", "biases on queries, keys and values", core=True),
    Family("qwen3", "Qwen3", "norms of queries and keys, tied embeddings", {"tie_word_embeddings": True}, core=True),
    Family("qwen3_moe", "Qwen3-MoE", "experts, one dense layer",
           {**EXPERTS, "norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [0]},
           experts=True, core=True),
    Family("mistral", "Mistral", "sliding window", {"sliding_window": WINDOW}, core=True),
    Family("gemma2", "Gemma 2", "windows in every other layer, capped scores and logits",
           {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0}, core=True),
    Family("gemma3_text", "Gemma 3 (text)", "windows, another RoPE in them",
           {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}, core=True),
    Family("phi3", "Phi-3", "one linear for queries, keys and values, one for gate and up", core=True),
    Family("gpt_oss", "gpt-oss", "experts, attention sinks, windows, YaRN",
           {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}, experts=True, core=True),
    Family("deepseek_v3", "DeepSeek-V3", "latent attention, experts, shared experts, one dense layer, YaRN",
           {**EXPERTS, **LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "rope_parameters": YARN}, experts=True, core=True),
    Family("qwen3_next", "Qwen3-Next", "gated delta nets, gated attention, experts, a shared expert",
           {**SHARED_EXPERT, **GATED_DELTA}, experts=True, states=True, core=True),
    Family("qwen3_5_text", "Qwen3.5", "gated delta nets, gated attention", GATED_DELTA, states=True,
           core=True),
    Family("qwen3_5_moe_text", "Qwen3.5-MoE", "gated delta nets, gated attention, experts, a shared expert",
           {**SHARED_EXPERT, **GATED_DELTA}, experts=True, states=True),
    Family("kimi_linear", "Kimi Linear", "delta nets with a gate for each channel, latent attention, experts",
           {**EXPERTS, **LATENT, **STATES_FIRST, "q_lora_rank": None, "num_experts_per_token": 2, "linear_head_dim": 8,
            "linear_num_heads": 4, "mlp_layer_types": ["dense", "sparse", "sparse"]},
           experts=True, states=True, since="5.17"),
    Family("granitemoehybrid", "Granite 4", "Mamba-2, experts, a shared expert",
           {**MAMBA2, **STATES_FIRST, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
            "logits_scaling": 4.0, "attention_multiplier": 0.2}, experts=True, states=True, core=True),
    Family("nemotron_h", "Nemotron-H", "Mamba-2, layers with an MLP alone",
           {**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "num_hidden_layers": 4}, states=True),
    Family("bamba", "Bamba", "Mamba-2", {**MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [2]}, states=True),
    Family("falcon_h1", "Falcon-H1", "Mamba-2 beside attention", {**MAMBA2, "mamba_d_ssm": 64}, states=True,
           since="5.17"),
    Family("jamba", "Jamba", "Mamba-1, experts",
           {"num_hidden_layers": 3, "num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 2,
            "mamba_d_state": 6, "mamba_dt_rank": 4}, experts=True, states=True),
    Family("lfm2", "LFM2", "short convolutions", {**CONVOLUTIONS, "block_auto_adjust_ff_dim": False}, states=True,
           core=True),
    Family("lfm2_moe", "LFM2-MoE", "short convolutions, experts",
           {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1}, experts=True, states=True),
    Family("minimax", "MiniMax-Text-01", "lightning attention, experts",
           {**STATES_FIRST, "num_local_experts": 4, "block_size": 8}, experts=True, states=True),
    Family("gemma", "Gemma"),
    Family("qwen2_moe", "Qwen2-MoE", "experts, a shared expert",
           {**EXPERTS, "shared_expert_intermediate_size": 24}, experts=True),
    Family("mixtral", "Mixtral", "experts", {"num_local_experts": 4, "num_experts_per_tok": 2}, experts=True),
    Family("olmo2", "OLMo 2", "norms after attention and MLP"),
    Family("olmo3", "OLMo 3", "windows", LAYERS),
    Family("olmoe", "OLMoE", "experts", {"num_experts": 4, "num_experts_per_tok": 2}, experts=True),
    Family("granite", "Granite", "scaled logits and residuals",
           {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2}),
    Family("granitemoe", "Granite MoE", "experts",
           {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0, "attention_multiplier": 0.2},
           experts=True),
    Family("smollm3", "SmolLM3", "layers without RoPE", {"no_rope_layers": [1, 0], "use_sliding_window": False}),
    Family("cohere", "Command R", "attention beside the MLP, scaled logits", {"logit_scale": 0.5}),
    Family("cohere2", "Command R7B", "windows, layers without RoPE", {**LAYERS, "logit_scale": 0.5}),
    Family("glm", "GLM-4 (9B)", "partial RoPE", {"partial_rotary_factor": 0.5}),
    Family("glm4", "GLM-4-0414", "partial RoPE, more norms", {"partial_rotary_factor": 0.5}),
    Family("glm4_moe", "GLM-4.5", "experts, shared experts, one dense layer",
           {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1, "partial_rotary_factor": 0.5}, experts=True),
    Family("deepseek_v2", "DeepSeek-V2", "latent attention, experts, shared experts",
           {**EXPERTS, **LATENT, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
            "first_k_dense_replace": 0, "topk_method": "greedy"}, experts=True),
    Family("starcoder2", "StarCoder2", "layer norms with biases, an MLP without a gate", {"sliding_window": WINDOW}),
    Family("ernie4_5", "ERNIE 4.5"),
    Family("ernie4_5_moe", "ERNIE 4.5 MoE", "experts",
           {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
           experts=True),
    Family("exaone4", "EXAONE 4", "windows", LAYERS),
    Family("hunyuan_v1_dense", "Hunyuan"),
    Family("seed_oss", "Seed-OSS"),
    Family("arcee", "Arcee AFM", "an MLP without a gate"),
    Family("apertus", "Apertus"),
    Family("helium", "Helium"),
    Family("ministral", "Ministral", "windows", LAYERS),
    Family("minimax_m2", "MiniMax-M2", "experts", {**EXPERTS, "num_local_experts": 4, "rotary_dim": 4}, experts=True),
    Family("dots1", "dots.llm1", "experts", {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
           "n_shared_experts": 1, "first_k_dense_replace": 1}, experts=True),
    Family("phimoe", "Phi-3.5-MoE", "experts", {"num_local_experts": 4, "num_experts_per_tok": 2}, experts=True),
    Family("flex_olmo", "FlexOlmo", "experts",
           {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}, experts=True),
    Family("gpt_neox", "GPT-NeoX, Pythia", "one linear for queries, keys and values, partial RoPE"),
    Family("persimmon", "Persimmon"),
    Family("olmo", "OLMo"),
    Family("phi", "Phi-2", "attention beside the MLP, partial RoPE"),
    Family("afmoe", "Arcee Trinity", "experts, gated attention, windows", AFMOE, experts=True),
    Family("hunyuan_v1_moe", "Hunyuan MoE", "experts", {"num_experts": 4, "moe_topk": [2, 2]}, experts=True),
    Family("mimo_v2_flash", "MiMo-V2-Flash", "experts, windows with sinks",
           {**EXPERTS, "n_routed_experts": 4, "num_local_experts": 4, "sliding_window": WINDOW, "n_group": 1,
            "topk_group": 1}, experts=True),
    Family("cohere2_moe", "Command A MoE", "experts",
           {**EXPERTS, "num_local_experts": 4, "sliding_window": WINDOW}, experts=True),
    Family("granitemoeshared", "Granite MoE, shared", "experts, a shared expert",
           {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24}, experts=True),
    Family("solar_open", "Solar Open", "experts",
           {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}, experts=True),
    Family("exaone_moe", "EXAONE MoE", "experts",
           {**EXPERTS, "n_group": 1, "topk_group": 1, "sliding_window": WINDOW}, experts=True),
    Family("internlm3", "InternLM 3", since="5.23"),
    Family("ministral3", "Ministral 3"),
    Family("bitnet", "BitNet"),
    Family("vaultgemma", "VaultGemma", "", {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    Family("gpt_bigcode", "StarCoder", "one key and value head, learned positions",
           {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "n_inner": 40}),
    Family("phi3", "Phi-3 128k up to its original length", "scaled RoPE",
           {"max_position_embeddings": 256, "rope_parameters": LONGROPE}),
    Family("opt", "OPT", "learned positions", {"ffn_dim": 40, "word_embed_proj_dim": 32}),
    Family("llama", "Llama with dynamic RoPE", "scaled RoPE",
           {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    Family("gemma4_text", "Gemma 4 (text)", "embeddings for each layer",
           {"sliding_window": WINDOW, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 300,
            "num_kv_shared_layers": 0}),
    Family("nemotron_h", "Nemotron-H with experts", "Mamba-2, experts without a gate in a smaller space",
           {**NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "num_hidden_layers": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "moe_latent_size": 20},
           experts=True, states=True),
    Family("deepseek_v32", "DeepSeek-V3.2 up to index_topk tokens", "latent attention, experts, shared experts",
           {**EXPERTS, **LATENT, **INDEXER, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"]}, experts=True, since="5.18"),
    Family("glm_moe_dsa", "GLM-5 up to index_topk tokens", "latent attention, experts, shared experts",
           {**EXPERTS, **LATENT, **INDEXER, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "shared"]}, experts=True, since="5.18"),
    Family("llama4_text", "Llama 4 (text)", "chunked attention, layers without RoPE, experts, a shared expert",
           {"num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 24,
            "intermediate_size_mlp": 40, "moe_layers": [1, 2], "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": WINDOW, "floor_scale": 4}, experts=True),
    Family("mamba2", "Mamba-2", "Mamba-2 alone",
           {"num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 6, "n_groups": 2, "chunk_size": 8}, states=True),
    Family("mamba", "Mamba", "Mamba-1 alone", {"state_size": 6, "time_step_rank": 4}, states=True),
    Family("falcon_mamba", "Falcon Mamba", "Mamba-1 alone", {"state_size": 6, "time_step_rank": 4}, states=True),
    Family("gptj", "GPT-J", "attention beside the MLP, partial RoPE",
           {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "n_inner": 40, "rotary_dim": 4}, since="5.24"),
)  # fmt: skip


def is_installed(since: str = TRANSFORMERS.oldest, until: str = TRANSFORMERS.newest) -> bool:
    """Whether a release of transformers from `since` to `until` is installed; later ones than tested count as that."""
    return VersionRange("transformers", since, "99.0" if until == TRANSFORMERS.newest else until).includes(__version__)


FAMILIES = tuple(family for family in ALL_FAMILIES if is_installed(family.since))
"""Those of the installed release of transformers."""

VISION = tuple(
    Family(model_type, title, peculiarity, vision_models.configuration(model_type))
    for model_type, title, peculiarity in (
        ("qwen3_vl", "Qwen3-VL", "M-RoPE, deepstack"),
        ("qwen3_vl_moe", "Qwen3-VL-MoE", "M-RoPE, deepstack, experts"),
        ("qwen3_5", "Qwen3.5", "M-RoPE"),
        ("qwen3_5_moe", "Qwen3.5-MoE", "M-RoPE, experts"),
        ("gemma3", "Gemma 3", "images seen both ways"),
    )
)
"""Families with images: tests/unit/test_vision.py, test_vision_sampling.py and test_vision_gemma3.py."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """`reason` is part of the server's error at start. `since` and `until`: the releases of transformers with it."""

    model_type: str
    title: str
    reason: str
    config: Mapping[str, object] = field(default_factory=dict)
    since: str = TRANSFORMERS.oldest
    until: str = TRANSFORMERS.newest


UNKNOWN_STATE = "whose state is not supported"
NOT_ATTENDING = "layer 0 does not attend through our attention"
ONE_DECODER = "only decoder-only models are supported"
OWN_MASK = "does not pass on the attention plan or builds its own mask"
NO_LINEARS = "has no linear attention projections to adapt"
MANY_MATRICES = "in a form that cannot carry adapters here"

ALL_REFUSED = (
    # It needs adapters on one linear that several layers share, each with low-rank weights of its own.
    Refusal("zamba2", "Zamba 2", UNKNOWN_STATE, {"layers_block_type": ["mamba", "hybrid"]}),
    Refusal("rwkv", "RWKV", NOT_ATTENDING),
    # Its layers keep their state in themselves, and not in transformers' cache.
    Refusal("recurrent_gemma", "RecurrentGemma", UNKNOWN_STATE, since="5.23"),
    Refusal("recurrent_gemma", "RecurrentGemma", NO_LINEARS, until="5.22"),
    # It needs a row for each expert's weighted input.
    Refusal("llama4_text", "Llama 4 with several experts for each token", "experts of Llama 4 are served with 1",
            {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # It needs keys of the indexer in the cache.
    Refusal("deepseek_v32", "DeepSeek-V3.2 beyond index_topk tokens", "tokens that an indexer selects",
            {**EXPERTS, **LATENT, **INDEXER, "index_topk": 64, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
            since="5.18"),
    Refusal("t5", "T5", ONE_DECODER, {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}),
    Refusal("bart", "BART", ONE_DECODER, {"d_model": 32}),
    Refusal("bert", "BERT", "attends to later tokens"),
    Refusal("bloom", "BLOOM", NOT_ATTENDING, {"n_head": 4, "n_layer": 2}),
    Refusal("mpt", "MPT", "cannot be served", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    Refusal("gpt2", "GPT-2", NO_LINEARS, {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}),
    Refusal("gptj", "GPT-J", "cannot be served",
            {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "rotary_dim": 4}, until="5.23"),
    Refusal("stablelm", "StableLM", OWN_MASK),
    Refusal("nemotron", "Nemotron-4", OWN_MASK),
    Refusal("doge", "Doge", OWN_MASK),
    Refusal("diffllama", "DiffLlama", "layer 0 attends 2 times"),
    Refusal("jetmoe", "JetMoE", MANY_MATRICES),
)  # fmt: skip

REFUSED = tuple(refusal for refusal in ALL_REFUSED if is_installed(refusal.since, refusal.until))


def make(directory: Path, family: Family) -> ModelShape:
    """Create a random model whose logits differ."""
    return _write(directory, build(family), family.model_type)


def build(family: Family) -> PreTrainedModel:
    config = AutoConfig.for_model(family.model_type, **{**COMMON, **family.config})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Gemma's norms multiply by one more than their weight.
    return randomise_weights(model, 0.0 if "gemma" in family.model_type else 1.0)


def make_later(directory: Path, family: Family) -> ModelShape:
    """A family of a later release of transformers; only its config.json where the installed one has no class for it."""
    try:
        return make(directory, family)
    except ValueError:
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps({"model_type": family.model_type}))
        (directory / "model.safetensors").touch()
        return ModelShape(f"tiny/{family.model_type}", str(directory), tiny_models.VOCAB, 128, family.model_type)


def make_refused(directory: Path, refusal: Refusal) -> ModelShape:
    config = AutoConfig.for_model(refusal.model_type, **{**COMMON, **refusal.config})
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return _write(directory, randomise_weights(auto.from_config(config, dtype=torch.float32), 1.0), refusal.model_type)


def randomise_weights(model: PreTrainedModel, norm_offset: float) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            is_norm = "norm" in path and path.endswith("weight") and parameter.dim() == 1
            is_convolution = parameter.dim() == 3 and parameter.shape[1] == 1
            # With small inputs, delta nets and the norms after them would mostly amplify rounding.
            parameter.copy_(norm_offset + noise if is_norm else noise * (5.0 if is_convolution else 1.0))
    return model


def _write(directory: Path, model: PreTrainedModel, name: str) -> ModelShape:
    model.save_pretrained(directory)
    tiny_models.tokenizer().save_pretrained(directory)
    return ModelShape(f"tiny/{name}", str(directory), tiny_models.VOCAB, 128, type(model).__name__)


INTRODUCTION = """# Model families

`tests/unit/test_families.py` trains, publishes, samples and saves two adapters of a small random model of each family
below. The logprobs of training, answers and prompts are those of `transformers` to 1e-4 in float32, also with the saved
adapter loaded by PEFT. `make test-families` tests all, also through a server, and `make test` those with a star. This
page is made by `scripts/write-models` from `tests/support/families.py`; in brackets are a `model_type` that differs
from the name, and the releases of transformers if not all tested ones.

"""

WITH_IMAGES = """
These are trained and sampled with images; `--no-vision` serves text alone:

"""

BETWEEN = """
Any other family is served if it passes checks at start: every layer attends once, to all earlier tokens or to its
configured window, or keeps a state that `backends/torch/recurrent.py` knows, and logits of packed rows are the model's
own. Of a model with another vision tower only the text part is served (Mistral 3 `mistral3`, Kimi K2.5 `kimi_k25`).
`train_attn` trains layers with a state, too; `train_mlp` trains experts, shared experts and dense layers, never the
router.

A CUDA graph can hold the decode steps of all families but Phi-3.5-MoE (`test_captured_families.py`).

Weights stored in mxfp4 (gpt-oss) or in block-wise fp8 are dequantised at load, and `--quantize` may quantise them
again; other formats are refused.

## Releases of transformers and torch

{releases} (`plan/versions.py`).

How layers with a state exchange it changes between releases of transformers, so an engine checks every model with such
layers when it starts (`backends/torch/start_check.py`), and every model under a release that was not tested. The
reference is transformers' forward of the whole sequence:

- One layer of each class computes a row of two sequences, with gradients, and a sequence in pieces, in single rows and
  continued twice from one state.
- The whole model samples some tokens, also from a saved state.

A layer that does not use the cache that it gets, or asks it for something unknown, is an error whenever it runs.

## Refused at start

The error gives the reason:

"""


def _describe(family: Family | Refusal) -> str:
    notes = [f"`{family.model_type}`"] if family.title.lower() != family.model_type else []
    if family.since != TRANSFORMERS.oldest:
        notes.append(f"from {family.since} on")
    if isinstance(family, Refusal) and family.until != TRANSFORMERS.newest:
        notes.append(f"up to {family.until}")
    return f"{family.title} ({', '.join(notes)})" if notes else family.title


def render() -> str:
    served: dict[str, list[str]] = {}
    for family in ALL_FAMILIES:
        name = f"{_describe(family)}{'*' if family.core else ''}"
        served.setdefault(family.peculiarity or "no peculiarity", []).append(name)
    refused: dict[str, list[str]] = {}
    for refusal in ALL_REFUSED:
        refused.setdefault(refusal.reason, []).append(_describe(refusal))
    kinds = [f"- {peculiarity}: {', '.join(names)}\n" for peculiarity, names in served.items()]
    images = "- " + ", ".join(_describe(family) for family in VISION) + "\n"
    reasons = [f"- *{reason}*: {', '.join(names)}\n" for reason, names in refused.items()]
    releases = f"Tested with {TRANSFORMERS} and {TORCH}"
    return INTRODUCTION + "".join(kinds) + WITH_IMAGES + images + BETWEEN.format(releases=releases) + "".join(reasons)
