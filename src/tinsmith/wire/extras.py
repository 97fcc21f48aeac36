"""What a stored sample may hold beyond the SDK's fields: written by this server alone, never read from an asample.

One field of the body, `beyond`, so that the wire's own fields keep their meaning and an asample that has it is refused
like any other unknown field. Knows both directions; what is written here was checked where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tinsmith.errors import UserError
from tinsmith.types import Adjustments, Grammar, Sample, SamplingParams
from tinsmith.wire.fields import Fields

FIELD = "beyond"
_NUMBERS = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def sample_body(
    prompt: Sequence[int],
    num_samples: int,
    params: SamplingParams,
    shown: Mapping[str, object],
    *,
    stream: bool = False,
) -> dict[str, object]:
    """The body of a sample as it is stored; `shown` are the fields that say which logprobs are wanted."""
    own = {"max_tokens": params.max_tokens, "seed": params.seed, "temperature": params.temperature}
    own |= {"top_k": params.top_k, "top_p": params.top_p, "stop": list(params.stop_strings) or None}
    beyond = {"stop_tokens": list(params.stop_tokens), "stop_eos": params.stop_eos, "stream": stream}
    return {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
        "num_samples": num_samples,
        "sampling_params": own,
        FIELD: beyond | _written(params.adjustments),
        **shown,
    }


def _written(adjustments: Adjustments | None) -> dict[str, object]:
    if adjustments is None:
        return {}
    written: dict[str, object] = {name: getattr(adjustments, name) for name in _NUMBERS}
    written["logit_bias"] = [[token_id, bias] for token_id, bias in adjustments.logit_bias]
    if adjustments.grammar:
        written["grammar"] = {"kind": adjustments.grammar.kind, "text": adjustments.grammar.text}
    return written


def with_extras(sample: Sample, fields: Fields) -> Sample:
    """A sample with what `beyond` says of it."""
    usual = Adjustments()
    biases = fields.values.get("logit_bias") or []
    tokens = fields.values.get("stop_tokens") or []
    grammar = fields.fields_or("grammar", None)
    if not isinstance(biases, list) or not isinstance(tokens, list):
        raise UserError(f"{fields.where} holds no lists")
    adjustments = Adjustments(
        **{name: fields.number_or(name, getattr(usual, name)) for name in _NUMBERS},
        logit_bias=tuple((int(token_id), float(bias)) for token_id, bias in biases),
        grammar=grammar and Grammar(grammar.text("kind"), grammar.text_or("text", "", max_length=2**31)),
    )
    params = replace(
        sample.params,
        stop_tokens=tuple(int(one) for one in tokens),
        stop_eos=fields.flag_or("stop_eos", True),
        adjustments=None if adjustments == usual else adjustments,
    )
    return replace(sample, params=params, stream=fields.flag_or("stream", False))
