"""Kept samples as people read them: token by token, with what the model thought of each."""

from __future__ import annotations

from collections.abc import Sequence

from tinsmith.api.openapi import ANYTHING, LIST, PAGE, TEXT, fields, ref
from tinsmith.api.operation import Access, Call, JsonObject, operation
from tinsmith.chat.texts import Text
from tinsmith.errors import NotFoundError, NotSupportedError, UserError
from tinsmith.store.history import KeptSample, SampleContent
from tinsmith.wire.fields import iso

MAX_SEARCH = 200
PREVIEW_TOKENS = 24


@operation(
    "GET",
    "/dashboard/samples",
    "Kept samples, newest first",
    answer=fields({"samples": LIST, "cursor": ref("Cursor")}),
    access=Access.LISTING,
    query={**PAGE, "search": TEXT | {"maxLength": MAX_SEARCH}},
    filters=("?search={model_id}:0",),
)
def samples(call: Call) -> JsonObject:
    limit, offset = call.page(default_limit=50)
    search = call.query.get("search", "")
    if len(search) > MAX_SEARCH:
        raise UserError(f"the query's search has {len(search)} characters; at most {MAX_SEARCH} are looked for")
    found, total = call.services.kept_samples.page(call.tenant_id, limit, offset, search)
    return {
        "samples": [_shown(one) | _preview(_text(call, one.base_model), content) for one, content in found],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
        "kept": call.services.settings.kept_samples,
    }


@operation(
    "GET",
    "/dashboard/samples/{request_id}",
    "A kept sample, token by token",
    answer=fields({"request_id": TEXT, "prompt": ANYTHING, "sequences": LIST}),
)
def sample(call: Call) -> JsonObject:
    found, content = call.services.kept_samples.get(call.tenant_id, call.path["request_id"])
    text = _text(call, found.base_model)
    return _shown(found) | {
        "prompt": _tokens(text, content.prompt),
        "prompt_cut": content.prompt_cut,
        "params": content.params,
        "sequences": [
            _tokens(text, one.tokens) | {"logprobs": one.logprobs, "stop_reason": one.stop_reason}
            for one in content.sequences
        ],
        "turns_before": call.services.kept_samples.turns_before(found, content),
    }


def _shown(sample: KeptSample) -> JsonObject:
    return {
        "request_id": sample.request_id,
        "session_id": sample.session_id,
        "base_model": sample.base_model,
        "weights": sample.weights,
        "prompt_tokens": sample.prompt_tokens,
        "sampled_tokens": sample.sampled_tokens,
        "num_sequences": sample.num_sequences,
        "created_at": iso(sample.created_at),
    }


def _preview(text: Text | None, content: SampleContent) -> JsonObject:
    """Enough to tell one from another: the end of its prompt, and how its first answer begins."""
    answer = content.sequences[0].tokens if content.sequences else ()
    return {
        "prompt_ends": _words(text, content.prompt[-PREVIEW_TOKENS:]),
        "answer_begins": _words(text, answer[:PREVIEW_TOKENS]),
    }


def _words(text: Text | None, tokens: Sequence[int]) -> str | None:
    return None if text is None else text.decode(tokens)


def _text(call: Call, base_model: str) -> Text | None:
    """None where nothing here can tell what a token says."""
    try:
        text = call.services.texts.of(call.services.bases.get(base_model))
        _ = text.tokenizer
    except (NotFoundError, NotSupportedError):
        return None
    return text


def _tokens(text: Text | None, tokens: Sequence[int]) -> JsonObject:
    if text is None:
        return {"tokens": tokens, "pieces": None, "text": None}
    pieces = [text.token_bytes(token).decode(errors="replace") for token in tokens]
    return {"tokens": tokens, "pieces": pieces, "text": text.tokenizer.decode(list(tokens), skip_special_tokens=False)}
