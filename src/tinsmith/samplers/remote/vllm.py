"""vLLM's HTTP interface: completions of token ids, adapters by name, sleep and wake.

Every request goes to /v1/completions, which accepts and returns token ids and has not changed for a year. The meaning
of its logprobs depends on vLLM's option `--logprobs-mode`; drawing one token at temperature 0.5 at start shows it:

- processed: logprobs of the distribution that is drawn from. They follow our definition unless tokens are left out or
  penalised. Then, at temperatures 0 and 1, a second request scores the answer as part of the prompt.
- raw (vLLM's default): logprobs of the model at temperature 1. They follow our definition at temperatures 0 and 1.

With adapters of the unembedding, vLLM 0.32 assigns the rows of a prompt to the adapters of the requests that run beside
it: an engine on a CPU dies, and one on a GPU would answer wrongly. A prompt that is scored alone is correct if its
version does not adapt the unembedding. So prompts are scored alone, and prompts of other versions token by token
(translation.py). An engine with --lora-target-modules that exclude lm_head does not have this problem.

Requests name the end tokens, because vLLM reads its own from only one of the model's files. This module knows no
connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from tinsmith.errors import NotSupportedError, SettingsError
from tinsmith.samplers.remote.dialect import (
    MAX_BATCH_ADAPTERS,
    MAX_LORA_RANK,
    Dialect,
    EngineCall,
    EngineReply,
    EngineRequest,
    Json,
    LogprobRow,
    PromptScoring,
    logprob_of,
    logprobs_match,
    penalises,
    sampling_fields,
    truncates,
)
from tinsmith.types import SamplingParams

COMPLETIONS = "/v1/completions"
BASE_MODEL_NAME = "tinsmith-base"
"""The name of the base model in an engine that this process starts."""

MAX_REPLY_LOGPROBS = 2**18
"""The most logprobs of one prompt that a reply may have: about 16 MiB of JSON."""


class VllmDialect(Dialect):
    name = "vLLM"
    health = health_asleep = "/health"
    info_paths = ("/v1/models",)
    seed_bits = 62
    root = "/v1"
    environment = (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
        "VLLM_SERVER_DEV_MODE=1",  # /sleep and /wake_up
        "VLLM_NO_USAGE_STATS=1",
        "HF_HUB_OFFLINE=1",
    )
    module = "vllm.entrypoints.openai.api_server"
    model_option = "--model"
    fixed_options = (
        *("--served-model-name", BASE_MODEL_NAME, "--generation-config", "vllm"),
        *("--enable-lora", "--enable-prompt-tokens-details"),
    )
    sleep_option = "--enable-sleep-mode"
    default_options: Mapping[str, str] = {
        "--max-lora-rank": str(MAX_LORA_RANK),
        "--max-loras": str(MAX_BATCH_ADAPTERS),
        "--max-logprobs": "-1",
        "--logprobs-mode": "processed_logprobs",
    }

    def __init__(self, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        super().__init__(eos_token_ids, vocab_size)
        self.scores_alone = True
        self._base = BASE_MODEL_NAME
        self._processed = True

    def learn(self, answers: Sequence[Json]) -> None:
        models = [model for model in answers[0].get("data", []) if not model.get("parent")]
        if not models:
            raise SettingsError("vLLM serves no base model: /v1/models names none")
        self._base = str(models[0]["id"])
        self.max_context_length = cast("int | None", models[0].get("max_model_len"))

    def learn_mode(self, drawn: Sequence[float], scored: Sequence[float]) -> None:
        self._processed = not logprobs_match(drawn, scored)

    def check(self, params: SamplingParams, *, alternatives: int) -> None:
        super().check(params, alternatives=alternatives)
        if params.temperature in (0.0, 1.0):
            return
        if not self._processed:
            raise NotSupportedError(
                f"sampling_params.temperature is {params.temperature}; vLLM runs with --logprobs-mode raw_logprobs, "
                "which has logprobs for temperatures 0 and 1 only: start it with --logprobs-mode processed_logprobs"
            )
        if truncates(params) or penalises(params):
            raise NotSupportedError(
                f"sampling_params.temperature is {params.temperature}, with top_k, top_p, min_p, a penalty or a bias: "
                "vLLM has no logprobs of the whole distribution then; use temperature 1, or leave the others out"
            )

    def prompt_scoring(self, first: int, topk: int, ids: tuple[int, ...], length: int) -> PromptScoring:
        if ids and length * self._vocab_size > MAX_REPLY_LOGPROBS:
            raise NotSupportedError(
                f"target_prompt_logprobs is not supported where vLLM samples, for a prompt of {length} tokens and a "
                f"vocabulary of {self._vocab_size}: vLLM reports logprobs of chosen ids only with all others, and "
                f"{MAX_REPLY_LOGPROBS} are the most; use topk_prompt_logprobs"
            )
        return PromptScoring(first, topk, ids, whole_vocabulary=bool(ids))

    def rescores(self, params: SamplingParams) -> bool:
        return self._processed and (truncates(params) or penalises(params))

    def call(self, request: EngineRequest) -> EngineCall:
        params = request.params
        stops = set(params.stop_tokens) | (self._eos_token_ids if params.stop_eos else frozenset())
        body: Json = sampling_fields(params, 0) | {
            "model": request.adapter or self._base,
            "prompt": list(request.tokens),
            "add_special_tokens": False,
            "max_tokens": request.max_tokens,
            "ignore_eos": True,
            "stop_token_ids": sorted(stops),
            "stop": list(params.stop_strings),
            "include_stop_str_in_output": True,
            "logprobs": request.topk,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "request_id": request.request_id,
        }
        if request.only_ids:
            body["logprob_token_ids"] = list(request.only_ids)
        if request.seed is not None:
            body["seed"] = request.seed
        if request.cache_scope:
            body["cache_salt"] = request.cache_scope[:1024]
        if request.prompt is not None:
            body["prompt_logprobs"] = -1 if request.prompt.whole_vocabulary else request.prompt.topk
        if request.stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        return EngineCall(COMPLETIONS, body)

    def _read(self, request: EngineRequest, answer: Json, start: int) -> EngineReply:
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        reply = EngineReply([], [], [], cached_tokens=int(details.get("cached_tokens") or 0))
        for choice in answer["choices"]:
            _add(reply, choice, request)
        return reply

    def sleep(self) -> Sequence[EngineCall]:
        # Level 1 keeps the weights in host memory; level 2 discards them, and this client could not restore them.
        return [EngineCall("/sleep?level=1", {})]

    def wake_after(self, num_slept: int) -> list[EngineCall]:
        return [EngineCall("/wake_up?tags=weights", {}), EngineCall("/wake_up?tags=kv_cache", {})]

    def command(self, python: str, model: str, port: int, options: Sequence[str], shares_device: bool) -> list[str]:
        flags = {option.partition("=")[0] for option in options}
        self.takes_unembeddings = "--lora-target-modules" not in flags or "lm_head" in options
        self.scores_alone = self.takes_unembeddings
        return super().command(python, model, port, options, shares_device)


def _add(reply: EngineReply, choice: Json, request: EngineRequest) -> None:
    tokens = [int(token) for token in choice.get("token_ids") or []]
    logprobs_object = choice.get("logprobs") or {}
    logprobs = [logprob_of(value) for value in logprobs_object.get("token_logprobs") or []]
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens have {len(logprobs)} logprobs")
    top_logprobs = (logprobs_object.get("top_logprobs") or []) if request.topk or request.only_ids else []
    topk: list[LogprobRow] = [
        {int(name.removeprefix("token_id:")): logprob_of(value) for name, value in row.items()} for row in top_logprobs
    ]
    if (request.topk or request.only_ids) and len(topk) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens have {len(topk)} rows of top logprobs")
    reply.add(EngineReply(tokens, logprobs, topk, str(choice.get("finish_reason") or "")))
    if request.prompt is not None and choice.get("prompt_logprobs") is not None:
        reply.prompt_rows = [
            {int(token): logprob_of(entry["logprob"]) for token, entry in (row or {}).items()}
            for row in choice["prompt_logprobs"]
        ]
