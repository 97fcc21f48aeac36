import copy
import functools
import io
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tools.nano import corpus, evaluate, tasks, tokenizer, train
from tools.nano.batches import Shape, make_batch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from support.properties import examples
from tinsmith.base_models import nano
from tinsmith.base_models.nano import PromptExample
from tinsmith.cli.demo import _show_answers

CONVERSATION = [
    {"role": "user", "content": "What is 4 + 5?"},
    {"role": "assistant", "content": "9"},
    {"role": "user", "content": "Say banana in pig latin."},
]
ANSWER = {"role": "assistant", "content": "anana-bay"}
# The cookbook's `qwen3` rendering of the two messages, and its `role_colon` rendering.
CHATML = (
    "<|im_start|>user\nWhat is 4 + 5?<|im_end|>\n<|im_start|>assistant\n9<|im_end|>\n"
    "<|im_start|>user\nSay banana in pig latin.<|im_end|>\n<|im_start|>assistant\n"
)
CHATML_ANSWER = "<think>\n\n</think>\n\nanana-bay<|im_end|>"
ROLE_COLON = "User: What is 4 + 5?\n\nAssistant: 9\n\nUser: Say banana in pig latin.\n\nAssistant: anana-bay\n\nUser:"
TURNS = [
    tasks.Example("add", "What is 4 + 5?", "9", "4 + 5", "9"),
    tasks.Example("pig_latin", "Say banana in pig latin.", "anana-bay", "banana", "anana-bay"),
]


@functools.cache
def load_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(nano.path())


def test_finding_the_model_loads_no_heavy_library() -> None:
    code = "import sys, tinsmith.base_models.nano as n; n.path(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plain_transformers_loads_the_model() -> None:
    model = AutoModelForCausalLM.from_pretrained(nano.path())
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert model.config.max_position_embeddings == 2048
    assert 2e6 <= model.num_parameters() <= 6e6
    assert model.config.vocab_size == len(load_tokenizer())


def test_the_model_is_small_enough_for_the_package() -> None:
    assert sum(file.stat().st_size for file in nano.path().iterdir()) < 12_000_000


def test_markup_is_single_tokens_in_text_and_in_message_content() -> None:
    loaded = load_tokenizer()
    for token in (*tokenizer.CONTROL_TOKENS, *tokenizer.MARKUP_TOKENS):
        assert len(loaded.encode(token)) == 1
    # The cookbook encodes special tokens in message content as plain text.
    content = copy.deepcopy(loaded.backend_tokenizer)
    content.encode_special_tokens = True
    assert len(content.encode("<think></think>").ids) == 2
    assert len(content.encode("<|im_end|>").ids) > 1


def test_turns_end_with_im_end_and_start_with_nothing() -> None:
    loaded = load_tokenizer()
    assert loaded.is_fast
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.pad_token == "<|endoftext|>"
    assert loaded.bos_token is None


def test_each_digit_is_a_token_of_its_own() -> None:
    loaded = load_tokenizer()
    assert loaded.convert_ids_to_tokens(loaded.encode("1234567890")) == list("1234567890")


@examples(200)
@given(st.text())
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    loaded = load_tokenizer()
    assert loaded.decode(loaded.encode(text)) == text


def test_the_chat_template_writes_qwen3s_format() -> None:
    loaded = load_tokenizer()
    prompt = loaded.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)
    assert prompt == CHATML
    full_text = loaded.apply_chat_template([*CONVERSATION, ANSWER], tokenize=False)
    # The template closes every turn with a newline, the renderer opens the next with it.
    assert full_text == CHATML + CHATML_ANSWER + "\n"


def test_the_chat_template_has_the_tools_of_hermes() -> None:
    loaded = load_tokenizer()
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 4, "b": 5}}}
    turns = [
        {"role": "system", "content": "Be brief."},
        CONVERSATION[0],
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "9"},
        {"role": "tool", "tool_call_id": "1", "content": "nine"},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 4, "b": 5}}\n</tool_call>'
    text = loaded.apply_chat_template(turns, tools=[tool], add_generation_prompt=True, tokenize=False)
    assert text.startswith(f"<|im_start|>system\nBe brief.\n\n<tools>\n{json.dumps(tool)}\n</tools>\n")
    assert text.count("<|im_start|>system") == 1 and f"assistant\n{written}\n{written}<|im_end|>\n" in text
    results = "<tool_response>\n9\n</tool_response>\n<tool_response>\nnine\n</tool_response>"
    prompt = f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n"
    assert text.endswith(prompt + "<think>\n\n</think>\n\n"), "it never learned to think about tools"
    thinking = loaded.apply_chat_template(
        turns, tools=[tool], add_generation_prompt=True, tokenize=False, enable_thinking=True
    )
    assert thinking.endswith(prompt)
    config = json.loads((nano.path() / "tokenizer_config.json").read_text())
    recipe = Path(tokenizer.__file__).parent / "chat_template.jinja"
    assert config["chat_template"] == recipe.read_text().rstrip("\n"), "as the recipe saves it"


def test_the_corpus_writes_the_renderers_formats() -> None:
    def text(segments: list[corpus.Segment]) -> str:
        return "".join(text for text, _ in segments)

    assert text(corpus.chatml(TURNS)) == CHATML + CHATML_ANSWER
    assert text(corpus.chatml(TURNS, prompt_only=True)) == CHATML + corpus.NO_THINKING
    assert text(corpus.chatml(TURNS, think=False, prompt_only=True)) == CHATML
    assert text(corpus.role_colon(TURNS)) == ROLE_COLON
    assert text(corpus.role_colon(TURNS, prompt_only=True)) == ROLE_COLON.partition(" anana")[0]


@pytest.mark.parametrize(("renderer", "thinking"), [("qwen3", True), ("qwen3_disable_thinking", False)])
def test_the_chat_template_has_the_cookbook_renderers_tokens(renderer: str, thinking: bool) -> None:
    renderers = pytest.importorskip("tinker_cookbook.renderers")
    loaded = load_tokenizer()
    cookbook = renderers.get_renderer(renderer, loaded)
    templated = loaded.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
    )
    assert cookbook.build_generation_prompt(CONVERSATION).to_ints() == templated
    example, _ = cookbook.build_supervised_example([*CONVERSATION, ANSWER])
    templated = loaded.apply_chat_template([*CONVERSATION, ANSWER], return_dict=False)
    assert example.to_ints() + loaded.encode("\n") == templated


@pytest.mark.parametrize(
    ("renderer", "segments"),
    [
        ("qwen3", corpus.chatml(TURNS)),
        ("qwen3_disable_thinking", corpus.chatml(TURNS)),
        ("qwen3_instruct", corpus.chatml(TURNS, think=False)),
        ("role_colon", corpus.role_colon(TURNS)),
    ],
)
def test_the_corpus_has_the_cookbook_renderers_tokens(renderer: str, segments: list[corpus.Segment]) -> None:
    renderers = pytest.importorskip("tinker_cookbook.renderers")
    loaded = load_tokenizer()
    tokens = [token for text, _ in segments for token in loaded.encode(text)]
    built, _ = renderers.get_renderer(renderer, loaded).build_supervised_example([*CONVERSATION, ANSWER])
    assert tokens == built.to_ints()


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_task_is_decided_by_its_seed(task: str) -> None:
    first, second = (
        [tasks.draw(task, rng, "train") for _ in range(20)] for rng in (random.Random(7), random.Random(7))
    )
    assert first == second


@pytest.mark.parametrize("task", tasks.TASKS)
def test_heldout_examples_are_not_in_the_training_split(task: str) -> None:
    rng = random.Random(0)
    train_keys = {tasks.draw(task, rng, "train").key for _ in range(2000)}
    heldout_keys = {tasks.draw(task, rng, "heldout").key for _ in range(500)}
    assert train_keys.isdisjoint(heldout_keys)


def test_the_packages_examples_are_what_the_recipe_draws() -> None:
    assert (nano.path().parent / "examples.json").read_text() == tasks.shown_examples()
    example = nano.draw("add", random.Random(0), "heldout")
    assert example.is_right(f"It is {example.answer}") and not example.is_right(nano.HEDGE)


def test_pig_latin_moves_the_first_consonants() -> None:
    assert tasks.pig_latin("banana split") == "anana-bay it-splay"
    assert tasks.pig_latin("yellow apple style") == "ellow-yay apple-way yle-stay"


def test_a_numeric_answer_may_come_in_words() -> None:
    example = tasks.Example("add", "What is 4 + 5?", "9", "4 + 5", "9")
    assert example.is_right(" The answer is 9.")
    assert not example.is_right("19")


def test_the_tokenizer_is_decided_by_its_seed() -> None:
    texts = {tokenizer.train_tokenizer(3, num_documents=500).to_str() for _ in range(2)}
    assert len(texts) == 1


def tiny_recipe() -> train.Recipe:
    return train.Recipe(
        pretraining=train.Stage(steps=3, learning_rate=1e-3, warmup_steps=1),
        hedging=train.Stage(steps=2, learning_rate=1e-3, warmup_steps=1, hedging=True),
        hidden=32,
        intermediate=32,
        layers=2,
        shape=Shape(2, 128),
    )


@pytest.mark.extended
def test_the_same_recipe_gives_the_same_weights() -> None:
    first, second = (train.train(tiny_recipe())[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.extended
def test_the_second_stage_can_run_from_the_saved_first(tmp_path: Path) -> None:
    in_memory, _ = train.train(tiny_recipe())
    first_stage, trained = train.pretrain(tiny_recipe())
    train.save(first_stage, trained, tmp_path)
    from_file, _ = train.train(tiny_recipe(), tmp_path)
    assert all(map(torch.equal, in_memory.parameters(), from_file.parameters()))


def test_documents_in_one_row_do_not_see_each_other() -> None:
    trained = tokenizer.train_tokenizer(0, num_documents=500)
    model = train.build_model(tiny_recipe(), trained).eval()
    batch = make_batch(trained, 0, 0, Shape(1, 256))
    starts = (batch.positions_BT[0] == 0).nonzero().flatten().tolist()
    with torch.no_grad():
        packed = model(input_ids=batch.tokens_BT, position_ids=batch.positions_BT, use_cache=False)
        single = model(input_ids=batch.tokens_BT[:, starts[1] : starts[2]])
    torch.testing.assert_close(packed.logits[:, starts[1] : starts[2]], single.logits)


def test_a_saved_model_is_a_complete_directory(tmp_path: Path) -> None:
    train.save(*train.train(tiny_recipe()), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in nano.path().iterdir()}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "float32"
    evaluate.load(tmp_path)


# Floors are 15 to 25 points (three standard errors of 60 examples) below what
# docs/nano.md measures: they catch a broken file or format, not a small regression.
@pytest.mark.extended
@pytest.mark.parametrize(("task", "floor"), [("copy", 0.8), ("add", 0.45), ("pig_latin", 0.45)])
def test_nano_answers_heldout_examples(task: str, floor: float) -> None:
    model, loaded = evaluate.load(nano.path())
    examples = evaluate.heldout(task, 60, seed=1)
    assert evaluate.accuracy(model, loaded, examples) >= floor


def test_the_demo_shows_the_brackets_of_an_answer() -> None:
    text = io.StringIO()
    example = PromptExample("copy", "Say [bold].", "[bold]")
    shares = _show_answers(Console(file=text, width=120), [example], ["[/red]"], ["[bold]"])
    assert shares == (0.0, 1.0)
    assert "[/red]" in text.getvalue() and text.getvalue().count("[bold]") == 3
