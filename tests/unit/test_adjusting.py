"""Penalties, bias, min_p and grammars, against a plain float64 reference and their definitions."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from support import tiny_models
from support.answers import read_parts
from support.local_sampling import finish, make_prompt, make_sample, run, sample_alone
from tinsmith.backends.torch.model import BaseModel
from tinsmith.base_models import nano, read_shape
from tinsmith.chat.calls import ToolCall
from tinsmith.chat.dialects import DIALECTS, choose_dialect
from tinsmith.chat.dialects.dialect import ToolDialect
from tinsmith.chat.generation_request import json_grammar
from tinsmith.chat.tokenizer import ModelTokenizer
from tinsmith.chat.tools import Tool, ToolUse, find_marks
from tinsmith.errors import UserError
from tinsmith.samplers.local.engine import LocalSampler
from tinsmith.samplers.local.grammar import MAX_NUMBER_LENGTH, GrammarCache
from tinsmith.samplers.local.sampling import uniform
from tinsmith.types import Adjustments, Grammar, SampledSequence, SamplingParams

SEED = 5


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return BaseModel.load(tiny_models.make(tmp_path_factory.mktemp("tiny")), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def chatty() -> BaseModel:
    return BaseModel.load(read_shape(nano.MODEL_NAME, nano.path()), device="cpu", dtype="float32")


def sequence(base: BaseModel, params: SamplingParams, prompt: np.ndarray, **options: object) -> SampledSequence:
    return sample_alone(base, make_sample("r", prompt, params, **options)).sequences[0]


def model_logits(base: BaseModel, prompt: np.ndarray, answer: list[int]) -> np.ndarray:
    """[T, V] float64 logits, one row before each token of the answer. The repetition penalty needs logits; logprobs
    differ from them by a constant per row.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base.shape.path, attn_implementation="eager").eval()
    tokens = torch.tensor([[*prompt.tolist(), *answer]])
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0].double().numpy()
    return logits[len(prompt) - 1 : len(prompt) + len(answer) - 1]


def reference_draw(
    logits: np.ndarray, prompt: np.ndarray, answer: list[int], params: SamplingParams, position: int
) -> tuple[int, float]:
    """The token that these parameters draw, and its margin to another token."""
    adjustments = params.adjustments
    assert adjustments is not None
    row = logits.copy()
    for token in range(len(row)):
        completes = any(
            word[-1] == token and answer[len(answer) + 1 - len(word) :] == [*word[:-1]]
            for word in adjustments.bad_words
        )
        stops = token in params.stop_tokens and position < adjustments.min_tokens
        if completes or stops or (adjustments.allowed_token_ids and token not in adjustments.allowed_token_ids):
            row[token] = -np.inf
    for token, bias in adjustments.logit_bias:
        row[token] += bias
    for token in {*prompt.tolist(), *answer}:
        row[token] = (
            row[token] / adjustments.repetition_penalty
            if row[token] > 0
            else row[token] * adjustments.repetition_penalty
        )
    for token in set(answer):
        row[token] -= adjustments.frequency_penalty * answer.count(token) + adjustments.presence_penalty
    if params.temperature == 0:
        best = np.sort(row)[::-1]
        return int(row.argmax()), float(best[0] - best[1])
    row = row / params.temperature
    weights = np.exp(row - row.max())
    weights /= weights.sum()
    weights[weights < adjustments.min_p * weights.max()] = 0
    cumulative = np.cumsum(weights) / weights.sum()
    target = uniform(SEED, 0, position)
    token = int(np.searchsorted(cumulative, target, side="right"))
    return token, float(np.abs(cumulative - target).min())


CASES = {
    "min_p": Adjustments(min_p=0.3),
    "repetition": Adjustments(repetition_penalty=1.7),
    "repetition below one": Adjustments(repetition_penalty=0.5),
    "presence": Adjustments(presence_penalty=1.5),
    "frequency": Adjustments(frequency_penalty=1.2),
    "negative": Adjustments(frequency_penalty=-0.7, presence_penalty=-0.5),
    "bias": Adjustments(logit_bias=((3, 4.0), (17, -100.0), (250, 3.5))),
    "all": Adjustments(0.05, 1.3, 0.6, 0.4, ((7, 2.0), (9, -3.0))),
    "allowed": Adjustments(allowed_token_ids=tuple(range(0, 256, 3))),
    "bad words": Adjustments(allowed_token_ids=(4, 5, 6), bad_words=((4, 5), (6,), (5, 5, 4))),
    "all masks": Adjustments(0.05, 1.3, 0.6, 0.4, ((7, 2.0),), None, tuple(range(5, 200)), ((9,), (30, 31)), 2),
}


@pytest.mark.matrix(8)
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_a_float64_reference_and_logprobs_the_models_own(
    base: BaseModel, name: str, temperature: float
) -> None:
    params = SamplingParams(max_tokens=24, seed=SEED, stop_eos=False, temperature=temperature, adjustments=CASES[name])
    prompt = make_prompt(9, seed=2)
    sampled = sequence(base, params, prompt)
    answer = sampled.tokens_T.tolist()
    logits = model_logits(base, prompt, answer)
    sure = 0
    for position, row in enumerate(logits):
        token, margin = reference_draw(row, prompt, answer[:position], params, position)
        if margin > 1e-4:
            assert answer[position] == token, position
            sure += 1
        scaled = row / (temperature or 1.0)
        logprob = scaled[answer[position]] - np.logaddexp.reduce(scaled)
        assert sampled.logprobs_T[position] == pytest.approx(logprob, abs=1e-4)
    assert sure > 15
    if temperature == 0 and name in ("min_p", "negative"):
        return  # the most likely token becomes more likely
    plain = sequence(base, replace(params, adjustments=None), prompt)
    assert answer != plain.tokens_T.tolist(), "the adjustments change nothing"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_has_at_least_so_many_tokens(base: BaseModel, temperature: float) -> None:
    """Stop tokens are masked until then, as in the reference, which draws without them."""
    prompt = make_prompt(9, seed=2)
    stops = tuple(range(200, base.shape.vocab_size))
    params = SamplingParams(
        max_tokens=40, seed=SEED, stop_eos=False, stop_tokens=stops, temperature=temperature,
        adjustments=Adjustments(min_tokens=11),
    )  # fmt: skip
    sampled = sequence(base, params, prompt)
    answer = sampled.tokens_T.tolist()
    assert sampled.stop_reason == "stop" and len(answer) > 11 and answer[-1] in stops
    assert not set(answer[:11]) & set(stops)
    for position, row in enumerate(model_logits(base, prompt, answer)):
        token, margin = reference_draw(row, prompt, answer[:position], params, position)
        assert margin <= 1e-4 or answer[position] == token
    assert len(sequence(base, replace(params, adjustments=None), prompt).tokens_T) < 11


def test_masks_that_leave_no_token_end_their_own_request_only(base: BaseModel) -> None:
    sampler = LocalSampler(base, {})
    params = SamplingParams(max_tokens=6, seed=1, stop_eos=False)
    masks = Adjustments(allowed_token_ids=(4,), bad_words=((4, 4),))
    sampler.submit(make_sample("empty", make_prompt(5), replace(params, adjustments=masks)))
    sampler.submit(make_sample("other", make_prompt(5), params))
    settled = dict(finish(sampler))
    assert isinstance(settled["empty"], UserError) and "leave no token to draw" in str(settled["empty"])
    assert settled["other"].sequences[0].tokens_T.tolist() == sequence(base, params, make_prompt(5)).tokens_T.tolist()


def test_adjustments_of_one_request_change_no_other(base: BaseModel) -> None:
    plain = SamplingParams(max_tokens=12, seed=3, stop_eos=False, temperature=0.9)
    adjusted = replace(plain, adjustments=CASES["all"])
    prompts = [make_prompt(5, seed=seed) for seed in range(4)]
    samples = [
        make_sample(f"r{i}", prompt, adjusted if i % 2 else plain, num_samples=2) for i, prompt in enumerate(prompts)
    ]
    together = run(LocalSampler(base, {}), *samples)
    for sample in samples:
        ours, theirs = together[sample.request_id], sample_alone(base, sample)
        assert [s.tokens_T.tolist() for s in ours.sequences] == [s.tokens_T.tolist() for s in theirs.sequences]


# Grammars.

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def constrain(grammar: Grammar, **changes: object) -> SamplingParams:
    return replace(SamplingParams(max_tokens=200, adjustments=Adjustments(grammar=grammar)), **changes)  # type: ignore[arg-type]


def text_of(base: BaseModel, sampled: SampledSequence) -> str:
    return base.tokenizer.decode(sampled.tokens_T.tolist(), skip_special_tokens=True)


@pytest.mark.parametrize("model", ["base", "chatty"])
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_that_is_held_to_a_schema_fits_it(request: pytest.FixtureRequest, model: str, seed: int) -> None:
    base = request.getfixturevalue(model)
    params = constrain(Grammar("json_schema", json.dumps(SCHEMA)), seed=seed, temperature=1.0)
    result = sample_alone(base, make_sample("r", make_prompt(6), params, num_samples=3))
    for sampled in result.sequences:
        assert sampled.stop_reason == "stop"
        value = json.loads(text_of(base, sampled))
        assert set(value) == {"name", "age"} and len(value["name"]) <= 8 and 0 <= value["age"] <= 99


def thing(required: bool = True, **properties: object) -> dict[str, object]:
    """A schema of objects with exactly these properties."""
    names = list(properties) if required else []
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


LETTERS = {"enum": ["x", "y"]}
SCHEMAS: dict[str, dict[str, object]] = {
    "flat": thing(ok={"type": "boolean"}, n={"enum": [1, 2]}),
    "optional": thing(required=False, a={"type": "boolean"}, b=LETTERS),
    "nested": thing(a=thing(b=thing(c={"type": "boolean"}, d={"type": "null"})), e=LETTERS),
    "array": thing(rows={"type": "array", "items": thing(id=LETTERS), "minItems": 1, "maxItems": 3}),
    "text": thing(name={"type": "string", "maxLength": 8}, city={"enum": ["Rome", "Oslo"]}),
    "integer": thing(n={"type": "integer"}),
    "number": thing(x={"type": "number"}, y={"type": "number"}),
    "either": thing(v={"anyOf": [{"type": "boolean"}, thing(k={"type": "null"})]}),
}
QUESTIONS = ("Say hello.", "What is 2+2?")


def sample_constrained(base: BaseModel, grammar: Grammar, max_tokens: int = 160) -> list[tuple[str, str]]:
    """The texts and stop reasons of answers to several prompts at temperatures 1 and 0."""
    samples = []
    for seed, question in enumerate(QUESTIONS):
        prompt = base.tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        for temperature in (1.0, 0.0):
            params = constrain(grammar, seed=seed, temperature=temperature, max_tokens=max_tokens)
            ids = np.array(prompt, np.int32)
            samples.append(make_sample(f"{seed} {temperature}", ids, params, num_samples=3 if temperature else 1))
    results = run(LocalSampler(base, {}), *samples).values()
    return [(text_of(base, sampled), sampled.stop_reason) for result in results for sampled in result.sequences]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_that_is_held_to_a_schema_ends_in_time(chatty: BaseModel, name: str) -> None:
    """Endless white space and digits are prevented."""
    for text, reason in sample_constrained(chatty, json_grammar(SCHEMAS[name])):
        assert reason == "stop", text
        jsonschema.validate(json.loads(text), SCHEMAS[name])
        assert "\n" not in text and "  " not in text


@pytest.mark.matrix(2)
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("name", ["flat", "nested", "array", "integer"])
def test_a_call_that_must_be_made_comes_back(chatty: BaseModel, name: str, by_name: bool) -> None:
    tools = Tool(name, SCHEMAS[name], {}), Tool("other", {"type": "object", "additionalProperties": False}, {})
    hermes = choose_dialect("hermes", "")
    marks = find_marks(hermes, ModelTokenizer(read_shape(nano.MODEL_NAME, nano.path())))
    use = ToolUse(tools, name if by_name else "required", by_name, not by_name, hermes, marks)
    grammar = use.grammar()
    assert grammar is not None
    for text, reason in sample_constrained(chatty, grammar, 400):
        assert reason == "stop", text
        parts = read_parts(use, text)
        calls = [part for part in parts if isinstance(part, ToolCall)]
        assert calls == parts and calls and (not by_name or [call.name for call in calls] == [name])
        for call in calls:
            jsonschema.validate(
                json.loads(call.arguments), SCHEMAS[name] if call.name == name else {"maxProperties": 0}
            )


@pytest.mark.matrix(3)
@pytest.mark.parametrize("dialect", [dialect for dialect in DIALECTS if dialect.new_parser], ids=lambda d: d.name)
def test_every_dialect_is_sampled_in_its_form(chatty: BaseModel, dialect: ToolDialect) -> None:
    """The sampler appends forced tokens, which the tokenizer must write as the grammar reads them."""
    marks = find_marks(dialect, ModelTokenizer(read_shape(nano.MODEL_NAME, nano.path())))
    properties = {"kind": {"enum": ["a", "b c"]}, "code": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["kind", "code"], "additionalProperties": False}
    use = ToolUse((Tool("f", schema, {}),), "required", False, False, dialect, marks)
    grammar = use.grammar()
    assert grammar is not None
    for text, reason in sample_constrained(chatty, grammar, 300):
        assert reason == "stop", text
        (call,) = read_parts(use, text)
        assert isinstance(call, ToolCall)
        jsonschema.validate(json.loads(call.arguments), schema)


@pytest.mark.parametrize("seed", range(8))
def test_numbers_have_bounded_lengths_and_strings_of_digits_do_not(chatty: BaseModel, seed: int) -> None:
    """Tokens are drawn uniformly from the allowed ones, which is the worst case of a model."""
    grammars = GrammarCache(chatty.tokenizer, 512, frozenset([chatty.tokenizer.eos_token_id]))
    dice = np.random.default_rng(seed)
    digits = [chatty.tokenizer.encode(digit)[0] for digit in "0123456789"]

    def draw_value(schema: object) -> object:
        grammar = json_grammar({"type": "array", "prefixItems": [schema], "items": False, "minItems": 1})
        constraint = grammars.constraint(Adjustments(grammar=grammar))
        assert constraint is not None
        tokens: list[int] = []
        while not constraint.is_finished and len(tokens) < 200:
            allowed = np.flatnonzero(constraint.token_mask())
            tokens.append(int(dice.choice([token for token in allowed if token in digits] or allowed)))
            if tokens[-1] == chatty.tokenizer.eos_token_id:
                break
            constraint.push(tokens[-1])
        return json.loads(chatty.tokenizer.decode(tokens, skip_special_tokens=True))[0]

    assert 1 <= len(str(draw_value({"type": "integer"}))) <= MAX_NUMBER_LENGTH
    text = draw_value({"type": "string", "pattern": "^[0-9]{60}$"})
    assert isinstance(text, str) and len(text) == 60, "digits of a text are not counted"
    assert draw_value({"enum": [10**59]}) == 10**59, "a schema may want a longer one"


def test_a_grammar_goes_with_penalties_and_survives_a_crowd(chatty: BaseModel) -> None:
    grammar = Grammar("regex", "(yes|no)( [0-9]{2}){3}")
    adjustments = Adjustments(repetition_penalty=1.4, frequency_penalty=1.0, min_p=0.01, grammar=grammar)
    samples = [
        make_sample(f"r{i}", make_prompt(4, seed=i), SamplingParams(max_tokens=40, seed=i, adjustments=adjustments))
        for i in range(6)
    ]
    for outcome in run(LocalSampler(chatty, {}), *samples).values():
        words = text_of(chatty, outcome.sequences[0]).split(" ")
        assert words[0] in ("yes", "no") and len(words) == 4 and all(len(word) == 2 for word in words[1:])


def test_an_answer_ends_where_nothing_may_follow_even_if_end_tokens_stop_nothing(chatty: BaseModel) -> None:
    sampled = sequence(chatty, constrain(Grammar("regex", "[0-9]{4}"), stop_eos=False, seed=1), make_prompt(4))
    assert sampled.stop_reason == "stop" and len(sampled.tokens_T) == 4


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", "[1]"), "cannot be compiled"),
        (Grammar("json_schema", '{"$ref": "http://127.0.0.1/a"}'), "registry"),
        (Grammar("json_schema", '{"type": "integer", "multipleOf": 999999937}'), "fuel"),
        (Grammar("regex", "("), "cannot be compiled"),
        (Grammar("lark", "start: missing"), "cannot be compiled"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_at_submission(
    chatty: BaseModel, grammar: Grammar, words: str
) -> None:
    sampler = LocalSampler(chatty, {})
    with pytest.raises(UserError, match=words):
        sampler.submit(make_sample("r", make_prompt(4), constrain(grammar)))
    assert not sampler.has_work


def test_a_grammar_that_explodes_ends_its_own_request_only(chatty: BaseModel) -> None:
    sampler = LocalSampler(chatty, {})
    schema = {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(900)}}
    sampler.submit(make_sample("bad", make_prompt(4), constrain(Grammar("json_schema", json.dumps(schema)))))
    sampler.submit(make_sample("good", make_prompt(4), SamplingParams(max_tokens=4, stop_eos=False)))
    outcomes = finish(sampler)
    assert isinstance(outcomes["bad"], UserError) and "grammar" in str(outcomes["bad"])
    assert len(outcomes["good"].sequences[0].tokens_T) == 4


def test_a_streams_partials_are_its_result(base: BaseModel) -> None:
    params = SamplingParams(max_tokens=10, seed=1, stop_eos=False)
    sampler = LocalSampler(base, {})
    sampler.submit(make_sample("r", make_prompt(4), params, num_samples=2, topk_sample_logprobs=2, stream=True))
    sampler.submit(make_sample("quiet", make_prompt(4), params))
    partials, outcomes = [], {}
    while sampler.has_work:
        outcomes |= dict(sampler.step())
        partials += sampler.partials()
    assert {partial.request_id for partial in partials} == {"r"}
    for index, sampled in enumerate(outcomes["r"].sequences):
        sequence_partials = [partial for partial in partials if partial.index == index]
        assert [partial.start for partial in sequence_partials] == list(range(10))
        assert [token for partial in sequence_partials for token in partial.tokens] == sampled.tokens_T.tolist()
        assert [lp for partial in sequence_partials for lp in partial.logprobs] == pytest.approx(
            sampled.logprobs_T.tolist()
        )
        assert [row[0] for partial in sequence_partials for row in partial.topk] == [
            tuple(r) for r in sampled.topk.token_ids_Tk.tolist()
        ]
