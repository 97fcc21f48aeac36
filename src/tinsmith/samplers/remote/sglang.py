"""SGLang's HTTP interface: /generate of token ids, adapters by name, release and resume of memory.

Logprobs of its answers are taken at the sampling temperature over the whole vocabulary, before top_k, top_p and min_p.
They follow our definition unless logits were penalised or biased. Then, at temperatures 0 and 1, a second request
scores the answer as part of the prompt. SGLANG_RETURN_ORIGINAL_LOGPROB changes their meaning, so an engine that runs
with it is refused. SGLang accepts seeds only with --enable-deterministic-inference, and only then are answers streamed.

A streamed event repeats the whole answer so far, or with --incremental-streaming-output has only its new tokens. Both
end with the new tokens, and `completion_tokens` tells how many there are in all.

Adapters of the unembedding are for versions that apply them to tied embeddings, too, taken to begin with 0.5.10.
Logprobs of prompts with such an adapter were wrong in some versions, so these prompts are scored token by token.
Its default, overlapped schedule applies penalties a token late (0.5.23), so they are for --disable-overlap-schedule.
With --lora-backend torch_native (0.5.23), the first token of an answer gets the adapter of another request in its
batch, so there such adapters are refused; by their sources, the other backends assign the rows correctly.

SGLang 0.5.23 was run on a CPU, without seeds and sleep. This module knows no connection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from tinsmith.errors import EngineFailedError, NotSupportedError, SettingsError
from tinsmith.samplers.remote.dialect import (
    MAX_BATCH_ADAPTERS,
    MAX_LORA_RANK,
    NO_ADJUSTMENTS,
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
)
from tinsmith.types import SamplingParams

GENERATE = "/generate"
MAX_TARGET_IDS = 4096
"""The most target ids of one request; the reply has a logprob for each id at each position."""

MIN_UNEMBEDDING_VERSION = (0, 5, 10)
MIXING_LORA_BACKEND = "torch_native"
"""It takes rows of the unembedding for rows of the batch, so that requests get each other's adapters."""

MAX_REPLY_LOGPROBS = 2**20
MAX_PENALTY = 2.0

MEMORY_TAGS = ("weights", "cuda_graph", "kv_cache")
"""The tags of SGLang's memory, in the order in which they are resumed."""

FINISH_REASONS = {"stop": "stop", "length": "length", "abort": "abort"}


class SglangDialect(Dialect):
    name = "SGLang"
    health = "/health"
    health_asleep = "/model_info"  # the other generates a token
    info_paths = ("/model_info", "/server_info")  # in older versions with "get_" in front
    seed_bits = 31
    needs_seeds = True
    environment = ("-u", "SGLANG_RETURN_ORIGINAL_LOGPROB", "HF_HUB_OFFLINE=1")
    module = "sglang.launch_server"
    fixed_options = ("--enable-lora", "--enable-deterministic-inference")
    sleep_option = "--enable-memory-saver"
    default_options: Mapping[str, str] = {
        "--max-lora-rank": str(MAX_LORA_RANK),
        "--max-loras-per-batch": str(MAX_BATCH_ADAPTERS),
        "--lora-target-modules": "all",
        "--sampling-defaults": "openai",
    }
    _deterministic = True
    _counts_newest_token = True

    def learn(self, answers: Sequence[Json]) -> None:
        model, server = answers
        if model.get("is_generation") is False:
            raise SettingsError("SGLang serves a model that generates nothing")
        if not server.get("enable_lora", True):
            raise SettingsError(
                "SGLang runs without --enable-lora, so it cannot sample from adapters; start it with --enable-lora"
            )
        targets = server.get("lora_target_modules") or ["all"]
        version = _version(str(server.get("version", "")))
        self.takes_unembeddings = (
            not {"all", "lm_head"}.isdisjoint(targets)
            and version >= MIN_UNEMBEDDING_VERSION
            and server.get("lora_backend") != MIXING_LORA_BACKEND
        )
        self._deterministic = bool(server.get("enable_deterministic_inference"))
        self._counts_newest_token = bool(server.get("disable_overlap_schedule"))
        self.max_context_length = cast("int | None", server.get("context_length"))

    def learn_mode(self, drawn: Sequence[float], scored: Sequence[float]) -> None:
        if logprobs_match(drawn, scored):
            raise SettingsError("SGLang runs with SGLANG_RETURN_ORIGINAL_LOGPROB; start it without")

    def check(self, params: SamplingParams, *, alternatives: int) -> None:
        super().check(params, alternatives=alternatives)
        adjustments = params.adjustments or NO_ADJUSTMENTS
        if adjustments.repetition_penalty != 1:
            raise NotSupportedError("repetition_penalty is not supported where SGLang samples: its formula differs")
        for name in ("presence_penalty", "frequency_penalty"):
            if abs(getattr(adjustments, name)) > MAX_PENALTY:
                raise NotSupportedError(f"{name} is {getattr(adjustments, name)}; SGLang knows penalties from -2 to 2")
            if getattr(adjustments, name) and not self._counts_newest_token:
                raise NotSupportedError(
                    f"{name} is not supported by this SGLang, whose schedule applies penalties a token late: start it "
                    "with --disable-overlap-schedule"
                )
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

    def prompt_scoring(self, first: int, topk: int, ids: tuple[int, ...], length: int) -> PromptScoring:
        if len(ids) > MAX_TARGET_IDS or len(ids) * length > MAX_REPLY_LOGPROBS:
            raise NotSupportedError(
                f"target_prompt_logprobs names {len(ids)} different ids for {length} tokens; where SGLang samples, "
                f"which reports each id at each token, {MAX_TARGET_IDS} ids and {MAX_REPLY_LOGPROBS} logprobs are the "
                "most"
            )
        return PromptScoring(first, topk, ids)

    def rescores(self, params: SamplingParams) -> bool:
        return penalises(params)

    def call(self, request: EngineRequest) -> EngineCall:
        params = request.params
        sampling: Json = sampling_fields(params, -1) | {
            "max_new_tokens": request.max_tokens,
            "repetition_penalty": 1.0,
            "ignore_eos": not params.stop_eos,
            "no_stop_trim": True,
        }
        if params.stop_eos:
            sampling["stop_token_ids"] = sorted(self._eos_token_ids | set(params.stop_tokens))
        if params.stop_strings:
            sampling["stop"] = list(params.stop_strings)
        if request.seed is not None and self._deterministic:
            sampling["sampling_seed"] = request.seed
        body: Json = {
            "rid": request.request_id,
            "input_ids": list(request.tokens),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": request.topk,
            "lora_path": request.adapter,
        }
        if request.only_ids:
            body["token_ids_logprob"] = list(request.only_ids)
        if request.stream and self._deterministic:
            body["stream"] = True
        if request.cache_scope:
            body["extra_key"] = request.cache_scope
        if request.prompt is not None:
            # The entry of position t is that of token t; its prediction starts at position t - 1.
            body["logprob_start_len"] = request.prompt.first - 1
            body["top_logprobs_num"] = max(request.topk, request.prompt.topk)
            if request.prompt.ids:
                body["token_ids_logprob"] = list(request.prompt.ids)
        return EngineCall(GENERATE, body)

    def _read(self, request: EngineRequest, answer: Json, start: int) -> EngineReply:
        if error := answer.get("error"):
            raise EngineFailedError(f"SGLang failed while it answered: {error}")
        meta = answer["meta_info"]
        output_logprobs = meta["output_token_logprobs"]
        total = int(meta["completion_tokens"])
        first = len(output_logprobs) - (total - start)
        if first < 0 or total < start:
            raise ValueError(f"{len(output_logprobs)} tokens have logprobs, of {total} where {start} are known")
        finish = meta.get("finish_reason")
        reply = EngineReply(
            [int(entry[1]) for entry in output_logprobs[first:]],
            [logprob_of(entry[0]) for entry in output_logprobs[first:]],
            [],
            FINISH_REASONS[finish["type"]] if finish else "",
            int(meta.get("cached_tokens") or 0),
        )
        if request.topk or request.only_ids:
            rows = _row(meta["output_top_logprobs" if request.topk else "output_token_ids_logprobs"])
            if len(rows) != len(output_logprobs):
                raise ValueError(f"{len(output_logprobs)} tokens have {len(rows)} rows of top logprobs")
            reply.topk = list(rows[first:])
        if request.prompt is not None:
            reply.prompt_rows = _prompt_rows(meta, request)
        return reply

    def abort(self, request_id: str) -> EngineCall | None:
        return EngineCall("/abort_request", {"rid": request_id})

    def sleep(self) -> Sequence[EngineCall]:
        # Releasing the KV cache loses its contents, so it is flushed first and nothing refers to it.
        release_calls = (EngineCall("/release_memory_occupation", {"tags": [tag]}) for tag in reversed(MEMORY_TAGS))
        return [EngineCall("/flush_cache", {}), *release_calls]

    def wake_after(self, num_slept: int) -> list[EngineCall]:
        # A part that is awake must not be resumed: SGLang would end.
        sleeping_tags = MEMORY_TAGS[1 + len(MEMORY_TAGS) - num_slept :]
        return [EngineCall("/resume_memory_occupation", {"tags": [tag]}) for tag in sleeping_tags]


def _version(text: str) -> tuple[int, ...]:
    """The release of a version: (0, 5, 10) of 0.5.10.post1."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _prompt_rows(meta: Json, request: EngineRequest) -> list[LogprobRow]:
    """The logprobs at each prompt token. The reply begins at logprob_start_len, and the first token has no logprob."""
    assert request.prompt is not None
    start = request.prompt.first - 1
    rows: list[dict[int, float]] = [{} for _ in request.tokens]
    prompt_entries = meta["input_token_logprobs"]
    if [int(entry[1]) for entry in prompt_entries] != [int(token) for token in request.tokens[start:]]:
        raise ValueError("the tokens of input_token_logprobs are not the prompt's")
    row_lists = [[{int(entry[1]): logprob_of(entry[0])} for entry in prompt_entries]]
    row_lists += [_row(meta["input_top_logprobs"])] if request.prompt.topk else []
    row_lists += [_row(meta["input_token_ids_logprobs"])] if request.prompt.ids else []
    for row_list in row_lists:
        for offset, row in enumerate(row_list):
            if start + offset >= request.prompt.first:
                rows[start + offset].update(row)
    return cast("list[LogprobRow]", rows)


def _row(rows: Iterable[Sequence[Sequence[object]] | None]) -> list[dict[int, float]]:
    return [{int(cast(int, token)): logprob_of(value) for value, token, *_ in row or ()} for row in rows]
