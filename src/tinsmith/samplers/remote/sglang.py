"""SGLang's HTTP interface: /generate of token ids, adapters by name, release and resume of memory.

Logprobs of its answers are taken at the sampling temperature over the whole vocabulary, before top_k, top_p and min_p.
They follow our definition unless logits were penalised or biased. Then, at temperatures 0 and 1, a second request
scores the answer as part of the prompt. SGLANG_RETURN_ORIGINAL_LOGPROB changes their meaning, so an engine that runs
with it is refused. SGLang accepts seeds only with --enable-deterministic-inference, and only then are answers streamed.

A streamed event repeats the whole answer so far, or with --incremental-streaming-output has only its new tokens. Both
end with the new tokens, and `completion_tokens` tells how many there are in all.

Adapters of the unembedding are for versions that apply them to tied embeddings, too, taken to begin with 0.5.10.
Logprobs of prompts with such an adapter were wrong in some versions, so these prompts are scored token by token.

Written after published sources of versions up to 0.5.18; no SGLang was run. This module knows no connection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from tinsmith.errors import EngineFailedError, NotSupportedError, SettingsError
from tinsmith.samplers.remote.dialect import (
    MAX_ADAPTERS_AT_ONCE,
    MAX_RANK,
    NO_ADJUSTMENTS,
    Ask,
    Dialect,
    EngineCall,
    EngineReply,
    Json,
    PromptAsk,
    Row,
    agree,
    logprob_of,
    penalises,
    sampling_fields,
)
from tinsmith.types import SamplingParams

GENERATE = "/generate"
MOST_IDS = 4096
"""The most target ids of one request; the reply has a logprob for each id at each position."""

FIRST_WITH_UNEMBEDDINGS = (0, 5, 10)
MOST_CELLS = 2**20
MOST_PENALTY = 2.0

MEMORY = ("weights", "cuda_graph", "kv_cache")
"""The parts of its memory, in the order in which they are resumed."""

FINISHES = {"stop": "stop", "length": "length", "abort": "abort"}


class SglangDialect(Dialect):
    name = "SGLang"
    health = "/health"
    health_asleep = "/model_info"  # the other generates a token
    questions = ("/model_info", "/server_info")  # in older versions with "get_" in front
    seed_bits = 31
    needs_seeds = True
    environment = ("-u", "SGLANG_RETURN_ORIGINAL_LOGPROB", "HF_HUB_OFFLINE=1")
    module = "sglang.launch_server"
    fixed_options = ("--enable-lora", "--enable-deterministic-inference")
    sleep_option = "--enable-memory-saver"
    default_options: Mapping[str, str] = {
        "--max-lora-rank": str(MAX_RANK),
        "--max-loras-per-batch": str(MAX_ADAPTERS_AT_ONCE),
        "--lora-target-modules": "all",
        "--sampling-defaults": "openai",
    }
    _deterministic = True

    def learn(self, facts: Sequence[Json]) -> None:
        model, server = facts
        if model.get("is_generation") is False:
            raise SettingsError("SGLang serves a model that generates nothing")
        if not server.get("enable_lora", True):
            raise SettingsError(
                "SGLang runs without --enable-lora, so it cannot sample from adapters; start it with --enable-lora"
            )
        targets = server.get("lora_target_modules") or ["all"]
        version = _version(str(server.get("version", "")))
        self.takes_unembeddings = not {"all", "lm_head"}.isdisjoint(targets) and version >= FIRST_WITH_UNEMBEDDINGS
        self._deterministic = bool(server.get("enable_deterministic_inference"))
        self.max_context_length = cast("int | None", server.get("context_length"))

    def learn_mode(self, drawn: Sequence[float], scored: Sequence[float]) -> None:
        if agree(drawn, scored):
            raise SettingsError("SGLang runs with SGLANG_RETURN_ORIGINAL_LOGPROB; start it without")

    def check(self, params: SamplingParams, *, alternatives: int) -> None:
        super().check(params, alternatives=alternatives)
        given = params.adjustments or NO_ADJUSTMENTS
        if given.repetition_penalty != 1:
            raise NotSupportedError("repetition_penalty is not supported where SGLang samples: its formula differs")
        for name in ("presence_penalty", "frequency_penalty"):
            if abs(getattr(given, name)) > MOST_PENALTY:
                raise NotSupportedError(f"{name} is {getattr(given, name)}; SGLang knows penalties from -2 to 2")
        if not params.stop_eos and (params.stop_tokens or params.stop_strings):
            raise NotSupportedError(
                "stops without end tokens are not supported where SGLang samples: its ignore_eos ignores stops, too"
            )
        if params.seed is not None and not self._deterministic:
            raise NotSupportedError(
                "sampling_params.seed is not supported by this SGLang: start it with --enable-deterministic-inference"
            )
        if penalises(params) and params.temperature not in (0.0, 1.0):
            raise NotSupportedError(
                f"sampling_params.temperature is {params.temperature}, with a penalty or a bias: SGLang has no "
                "logprobs of the model's own distribution then; use temperature 1, or leave the others out"
            )

    def about_prompt(self, first: int, topk: int, ids: tuple[int, ...], length: int) -> PromptAsk:
        if len(ids) > MOST_IDS or len(ids) * length > MOST_CELLS:
            raise NotSupportedError(
                f"target_prompt_logprobs names {len(ids)} different ids for {length} tokens; where SGLang samples, "
                f"which reports each id at each token, {MOST_IDS} ids and {MOST_CELLS} logprobs are the most"
            )
        return PromptAsk(first, topk, ids)

    def rescores(self, params: SamplingParams) -> bool:
        return penalises(params)

    def call(self, ask: Ask) -> EngineCall:
        params = ask.params
        sampling: Json = sampling_fields(params, -1) | {
            "max_new_tokens": ask.max_tokens,
            "repetition_penalty": 1.0,
            "ignore_eos": not params.stop_eos,
            "no_stop_trim": True,
        }
        if params.stop_eos:
            sampling["stop_token_ids"] = sorted(self._eos_token_ids | set(params.stop_tokens))
        if params.stop_strings:
            sampling["stop"] = list(params.stop_strings)
        if ask.seed is not None and self._deterministic:
            sampling["sampling_seed"] = ask.seed
        body: Json = {
            "rid": ask.request_id,
            "input_ids": list(ask.tokens),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": ask.topk,
            "lora_path": ask.adapter,
        }
        if ask.only:
            body["token_ids_logprob"] = list(ask.only)
        if ask.stream and self._deterministic:
            body["stream"] = True
        if ask.cache_scope:
            body["extra_key"] = ask.cache_scope
        if ask.prompt is not None:
            # The entry of position t is that of token t; its prediction starts at position t - 1.
            body["logprob_start_len"] = ask.prompt.first - 1
            body["top_logprobs_num"] = max(ask.topk, ask.prompt.topk)
            if ask.prompt.ids:
                body["token_ids_logprob"] = list(ask.prompt.ids)
        return EngineCall(GENERATE, body)

    def _read(self, ask: Ask, answer: Json, start: int) -> EngineReply:
        if error := answer.get("error"):
            raise EngineFailedError(f"SGLang failed while it answered: {error}")
        meta = answer["meta_info"]
        told = meta["output_token_logprobs"]
        total = int(meta["completion_tokens"])
        first = len(told) - (total - start)
        if first < 0 or total < start:
            raise ValueError(f"{len(told)} tokens have logprobs, of {total} where {start} are known")
        finish = meta.get("finish_reason")
        reply = EngineReply(
            [int(entry[1]) for entry in told[first:]],
            [logprob_of(entry[0]) for entry in told[first:]],
            [],
            FINISHES[finish["type"]] if finish else "",
            int(meta.get("cached_tokens") or 0),
        )
        if ask.topk or ask.only:
            rows = _row(meta["output_top_logprobs" if ask.topk else "output_token_ids_logprobs"])
            if len(rows) != len(told):
                raise ValueError(f"{len(told)} tokens have {len(rows)} rows of top logprobs")
            reply.topk = list(rows[first:])
        if ask.prompt is not None:
            reply.prompt_rows = _prompt_rows(meta, ask)
        return reply

    def abort(self, request_id: str) -> EngineCall | None:
        return EngineCall("/abort_request", {"rid": request_id})

    def sleep(self) -> Sequence[EngineCall]:
        # Releasing the KV cache loses its contents, so it is flushed first and nothing refers to it.
        released = (EngineCall("/release_memory_occupation", {"tags": [tag]}) for tag in reversed(MEMORY))
        return [EngineCall("/flush_cache", {}), *released]

    def wake_after(self, num_slept: int) -> list[EngineCall]:
        # A part that is awake must not be resumed: SGLang would end.
        asleep = MEMORY[1 + len(MEMORY) - num_slept :]
        return [EngineCall("/resume_memory_occupation", {"tags": [tag]}) for tag in asleep]


def _version(text: str) -> tuple[int, ...]:
    """The numbers at the start of a version such as 0.5.10.post1."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _prompt_rows(meta: Json, ask: Ask) -> list[Row]:
    """The reply begins at logprob_start_len; the first token of a prompt has no logprob."""
    assert ask.prompt is not None
    start = ask.prompt.first - 1
    rows: list[dict[int, float]] = [{} for _ in ask.tokens]
    own = meta["input_token_logprobs"]
    if [int(entry[1]) for entry in own] != [int(token) for token in ask.tokens[start:]]:
        raise ValueError("the tokens of input_token_logprobs are not the prompt's")
    told = [[{int(entry[1]): logprob_of(entry[0])} for entry in own]]
    told += [_row(meta["input_top_logprobs"])] if ask.prompt.topk else []
    told += [_row(meta["input_token_ids_logprobs"])] if ask.prompt.ids else []
    for kind in told:
        for offset, row in enumerate(kind):
            if start + offset >= ask.prompt.first:
                rows[start + offset].update(row)
    return cast("list[Row]", rows)


def _row(rows: Iterable[Sequence[Sequence[object]] | None]) -> list[dict[int, float]]:
    return [{int(cast(int, token)): logprob_of(value) for value, token, *_ in row or ()} for row in rows]
