"""Stored samples for the dashboard: a list, groups of answers to one prompt, one sample token by token, and files.

A group (`sample_groups`) has the stored answers to one prompt by one weight version. They carry notes on top of the
sample: the client's reward, and from training on it the run, the step, the advantage and the logprobs. Filters and
sorting cover the newest samples of the run or the tenant (`MAX_GROUPED`). All data belongs to the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated

from pydantic import Field
from starlette.responses import Response, StreamingResponse

from tinsmith.api.access import Access
from tinsmith.api.dashboard.routes import Search, SearchQuery
from tinsmith.api.dashboard.sample_export import write_json_lines, write_parquet
from tinsmith.api.dashboard.sample_groups import (
    AnswerGroup,
    CommonEnds,
    GroupAnswer,
    find_common_ends,
    find_tokenizer,
    list_placed,
    mean,
    read_groups,
    spell,
    summarize,
    summarize_steps,
    write_question,
)
from tinsmith.api.declaration import ThreadPool, operation
from tinsmith.api.openapi import ANYTHING, COUNT, FILE_TYPE, LIST, TEXT, fields, listing, ref
from tinsmith.api.queries import Order, PageQuery
from tinsmith.api.request import Call, JsonObject
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.store.stored_samples import AnswerNotes, SampleContent, StoredSample, StoredSequence
from tinsmith.wire.fields import ClosedBody, Number, OneOf, Query, Text, iso

PREVIEW_TOKENS = 24
MAX_STEP = 2**53 - 1


@listing(
    "/dashboard/samples",
    "List stored samples, newest first",
    answer=fields({"samples": LIST, "cursor": ref("Cursor")}),
    query=SearchQuery,
    filters=("?search={model_id}:0",),
)
def samples(call: Call, query: SearchQuery) -> JsonObject:
    rows, total = call.services.stored_samples.page(call.tenant_id, query.limit, query.offset, query.search)
    return {
        "samples": [
            _sample_fields(sample) | _preview(find_tokenizer(call, sample.base_model), content)
            for sample, content in rows
        ],
        "cursor": {"offset": query.offset, "limit": query.limit, "total_count": total},
        "limits": _limits(call),
    }


def _limits(call: Call) -> JsonObject:
    """How many samples are kept, and for how long; 0 of a tenant: none."""
    settings = call.services.settings
    return {
        "of_tenant": settings.stored_samples,
        "of_run": settings.stored_samples_of_run,
        "days": settings.stored_samples_days,
    }


@operation(
    "GET",
    "/dashboard/samples/{request_id}",
    "Read a stored sample token by token",
    answer=fields({"request_id": TEXT, "prompt": ANYTHING, "sequences": LIST}),
)
def sample(call: Call) -> JsonObject:
    store = call.services.stored_samples
    row, content = store.get(call.tenant_id, call.path["request_id"])
    tokenizer = find_tokenizer(call, row.base_model)
    notes = store.notes(call.tenant_id, [row.request_id])
    return _sample_fields(row) | {
        "prompt": _tokens(tokenizer, content.prompt),
        "prompt_cut": content.prompt_cut,
        "params": content.params,
        "images": content.images,
        "sequences": [
            _tokens(tokenizer, sequence.tokens)
            | {"logprobs": sequence.logprobs, "stop_reason": sequence.stop_reason}
            | _training(sequence, notes.get((row.request_id, index)))
            for index, sequence in enumerate(content.sequences)
        ],
        "turns_before": store.list_earlier_turns(row, content),
    }


def _training(sequence: StoredSequence, notes: AnswerNotes | None) -> JsonObject:
    """Return the notes of an answer. `training_logprobs` and `advantages` have one entry per stored token."""
    names = ("reward", "run", "step", "advantage", "training_logprobs", "advantages")
    if notes is None:
        return dict[str, object](dict.fromkeys(names))
    placed = [list_placed(values, sequence) for values in (notes.logprobs, notes.advantages)]
    return dict(zip(names, (notes.reward, notes.model_id, notes.step, notes.advantage, *placed), strict=True))


class AnswerRewardBody(ClosedBody):
    digest: Annotated[str, Field(min_length=32, max_length=32, pattern="^[0-9a-f]*$")]
    reward: Number


class AnswerRewardsRequest(ClosedBody):
    rewards: Annotated[list[AnswerRewardBody], Field(min_length=1, max_length=10_000)]


@operation(
    "POST",
    "/dashboard/samples/rewards",
    "Set rewards of stored responses by digest",
    body=AnswerRewardsRequest,
    answer=fields({"updated": COUNT}),
    access=Access.LISTING,
)
def rewards(call: Call, request: AnswerRewardsRequest) -> JsonObject:
    """Rewards of answers that are not kept are ignored. The digest is types.tokens_digest of prompt and answer."""
    reward_by_digest = {entry.digest: entry.reward for entry in request.rewards}
    return {"updated": call.services.stored_samples.set_rewards(call.tenant_id, reward_by_digest)}


# Groups.


SORTS: dict[str, Callable[[AnswerGroup], float | None]] = {
    "newest": lambda group: group.newest.created_at,
    "reward": lambda group: mean(group.values("reward")),
    "spread": lambda group: _spread(group.values("reward")),
    "advantage": lambda group: max(map(abs, group.values("advantage")), default=None),
    "length": lambda group: mean([float(answer.num_tokens) for answer in group.answers]),
    "step": lambda group: group.weights_step if group.step is None else group.step,
    "divergence": lambda group: summarize(answer.divergence_sums() for answer in group.answers).kl,
}


def _spread(values: Sequence[float]) -> float | None:
    return max(values) - min(values) if values else None


class GroupsQuery(PageQuery):
    """`run` sampled or trained on the answers. `least` and `most` bound the reward; `text` is part of prompt or answer;
    `prompt` is a group's `prompt_id`.
    """

    run: Text | None = None
    prompt: Annotated[str, Field(pattern="^([0-9a-f]{32})?$")] = ""
    step: Annotated[int, Field(ge=0, le=MAX_STEP)] | None = None
    least: Number | None = None
    most: Number | None = None
    text: Search = ""
    sort: Annotated[str, OneOf(tuple(SORTS))] = "newest"
    order: Order = "desc"


@listing(
    "/dashboard/groups",
    "List stored responses by prompt",
    answer=fields({"groups": LIST, "cursor": ref("Cursor")}, {"steps": LIST, "selection": ANYTHING}),
    query=GroupsQuery,
    filters=("?run={model_id}",),
)
def groups(call: Call, query: GroupsQuery) -> JsonObject:
    """Return the groups with an answer that passes every filter. A group keeps all its answers. For a run, `steps` has
    numbers of the passing groups by optimizer step, and `selection` of all of them.
    """
    all_groups = read_groups(call, query.run or "")
    passes = _filter(call, query)
    passing = [group for group in all_groups if passes(group)]
    # Groups without a value come last in both orders.
    sign = -1.0 if query.order == "desc" else 1.0
    keyed = [(SORTS[query.sort](group), group) for group in passing]
    keyed.sort(key=lambda entry: math.inf if entry[0] is None else sign * entry[0])
    page = [group for _, group in keyed[query.offset : query.offset + query.limit]]
    ends = find_common_ends(all_groups) if page else {}
    answer: JsonObject = {
        "groups": [_show_group(call, group, ends[group.newest.base_model, group.newest.model_id]) for group in page],
        "cursor": {"offset": query.offset, "limit": query.limit, "total_count": len(passing)},
        "limits": _limits(call),
    }
    if query.run:
        answers = [answer for group in passing for answer in group.answers]
        answer["steps"] = summarize_steps(passing)
        answer["selection"] = {
            "answers": len(answers),
            "reward": mean([answer.note("reward") for answer in answers]),
            **asdict(summarize(answer.divergence_sums() for answer in answers)),
        }
    return answer


def _filter(call: Call, query: GroupsQuery) -> Callable[[AnswerGroup], bool]:
    step, lower, upper, text = query.step, query.least, query.most, query.text.lower()

    def passes(answer: GroupAnswer) -> bool:
        reward = answer.note("reward")
        if step is not None and answer.note("step") != step:
            return False
        if lower is not None and (reward is None or reward < lower):
            return False
        return upper is None or (reward is not None and reward <= upper)

    def group_passes(group: AnswerGroup) -> bool:
        if query.prompt and group.prompt_id != query.prompt:
            return False
        passing = [answer for answer in group.answers if passes(answer)]
        if not passing or not text:
            return bool(passing)
        tokenizer = find_tokenizer(call, group.newest.base_model)
        if text in spell(tokenizer, group.prompt_T).lower():
            return True
        return any(text in spell(tokenizer, answer.tokens_T).lower() for answer in passing)

    return group_passes


def _show_group(call: Call, group: AnswerGroup, ends: CommonEnds) -> JsonObject:
    newest = group.newest
    tokenizer = find_tokenizer(call, newest.base_model)
    requests = {answer.sample.request_id: answer.sample for answer in group.answers}
    sums = [answer.divergence_sums() for answer in group.answers]
    return {
        "prompt_id": group.prompt_id,
        "question": write_question(tokenizer, group.prompt_T, ends),
        "is_whole_prompt": not ends.before and not ends.after,
        "prompt_tokens": newest.prompt_tokens,
        "run": newest.model_id or None,
        "weights": newest.weights,
        "weights_step": group.weights_step,
        "step": group.step,
        "base_model": newest.base_model,
        "created_at": iso(newest.created_at),
        "num_sampled": sum(sample.num_sequences for sample in requests.values()),
        **asdict(summarize(sums)),
        "answers": [
            {
                "request_id": answer.sample.request_id,
                "number": answer.index,
                "begins": spell(tokenizer, answer.tokens_T[: 2 * PREVIEW_TOKENS]),
                "tokens": answer.num_tokens,
                "stop_reason": answer.stop_reason,
                "logprob": _finite_mean(answer),
                **{name: answer.note(name) for name in ("reward", "advantage", "step")},
                "kl": summarize([of_answer]).kl,
                "run": answer.notes.model_id if answer.notes else None,
            }
            for answer, of_answer in zip(group.answers, sums, strict=True)
        ],
    }


def _finite_mean(answer: GroupAnswer) -> float | None:
    """The mean of the sampling logprobs."""
    return mean([value if math.isfinite(value) else None for value in answer.logprobs_T.tolist()])


# Files.


class ExportQuery(Query):
    format: Annotated[str, OneOf(("jsonl", "parquet"))] = "jsonl"


@operation(
    "GET",
    "/dashboard/runs/{run_id}/samples",
    "Download a run's stored samples",
    answer=FILE_TYPE,
    query=ExportQuery,
    errors=(404, 501),
    threads=ThreadPool.TRANSFERS,
)
def export(call: Call, query: ExportQuery) -> Response:
    """Send one row for each stored answer that was sampled from the run's weights or trained on in it."""
    model_id = call.path["run_id"]
    call.services.overview.run(call.tenant_id, model_id)
    write = write_parquet if query.format == "parquet" else write_json_lines
    name = f"samples-{model_id.replace(':', '-')}.{query.format}"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(write(call, model_id), media_type=FILE_TYPE, headers=headers)


# Decoded text.


def _sample_fields(sample: StoredSample) -> JsonObject:
    fields: JsonObject = {**asdict(sample), "created_at": iso(sample.created_at)}
    del fields["tenant_id"]
    return fields


def _preview(tokenizer: ModelTokenizer | None, content: SampleContent) -> JsonObject:
    """Return the end of the prompt and the beginning of the first answer."""
    answer = content.sequences[0].tokens if content.sequences else ()
    return {
        "prompt_ends": _decode(tokenizer, content.prompt[-PREVIEW_TOKENS:]),
        "answer_begins": _decode(tokenizer, answer[:PREVIEW_TOKENS]),
    }


def _decode(tokenizer: ModelTokenizer | None, tokens: Sequence[int]) -> str | None:
    return None if tokenizer is None else tokenizer.decode(tokens)


def _tokens(tokenizer: ModelTokenizer | None, tokens: Sequence[int]) -> JsonObject:
    if tokenizer is None:
        return {"tokens": tokens, "pieces": None, "text": None}
    texts = [tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]
    return {
        "tokens": tokens,
        "pieces": texts,
        "text": tokenizer.backend_tokenizer.decode(list(tokens), skip_special_tokens=False),
    }
