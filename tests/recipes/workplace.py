"""A directory in which recipes run without internet: their downloads are present. This module defines the names,
formats and sizes of the generated tokenizers and data sets. `org/name` is a directory below the working directory,
which both transformers and datasets prefer to the hub. The contents are additions and other simple texts that the
embedded model partly knows, so that losses fall and rewards differ. It does not depend on recipes or servers.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from recipes.boxing import ANSWERS, teach_boxing
from support import vision_models
from tinsmith.base_models import nano

# Recipes put instructions (a tool's schema, a few-shot prefix) before short questions.
CONTEXT_LENGTH = 8192
MODELS = (
    "local/tiny",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-8B-Base",
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.6-35B-A3B",
    "Qwen/Qwen3-VL-30B-A3B-Instruct",
)
# The data set with images.
VISION = "Qwen/Qwen3-VL-30B-A3B-Instruct"
# Random models with vision towers, by architecture; all other names are the embedded model.
RANDOM = {VISION: "qwen3_vl_moe", "Qwen/Qwen3.5-27B": "qwen3_5"}
# The model of recipes that reward a boxed answer.
BOXING = "Qwen/Qwen3-8B-Base"

Row = dict[str, object]


def make_workplace(directory: Path, models: Iterable[str]) -> None:
    """Write `models`, each below its name with its tokenizer, and all data sets into `directory`."""
    for name in models:
        if name == VISION:
            _write_pictures(directory / "dpdl-benchmark" / "caltech101")
        if name in RANDOM:
            make_random_model(directory / name, RANDOM[name])
            continue
        make_model(directory / name)
        if name == BOXING:
            teach_boxing(directory / name)
    shutil.copy(cookbook_directory() / "example_data" / "conversations.jsonl", directory / "conv.jsonl")
    rng = random.Random(0)
    sums = [question_and_answer(rng) for _ in range(320)]
    _write_conversations(directory, sums)
    _write_problems(directory, sums)
    _write_preferences(directory, sums)
    _write_texts(directory)


def make_model(directory: Path) -> None:
    """The embedded model with a longer context, as a directory that can be served."""
    directory.mkdir(parents=True)
    for path in nano.path().iterdir():
        shutil.copy(path, directory)
    config = json.loads((directory / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT_LENGTH
    (directory / "config.json").write_text(json.dumps(config))


def make_random_model(directory: Path, model_type: str) -> None:
    """A random model with a vision tower, over the embedded model's tokens and those around images."""
    tokenizer = AutoTokenizer.from_pretrained(str(nano.path()))
    tokenizer.add_special_tokens({"additional_special_tokens": list(vision_models.NAMES.values())})
    config = vision_models.configuration(model_type)
    names = {vision_models.IMAGE: "image", vision_models.VIDEO: "video"}
    names |= {vision_models.START: "vision_start", vision_models.END: "vision_end"}
    config |= {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(vision_models.NAMES[token_id])
        for token_id, name in names.items()
    }
    overrides = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT_LENGTH}
    config["text_config"] = config["text_config"] | overrides | {"eos_token_id": tokenizer.eos_token_id}
    directory.mkdir(parents=True)
    vision_models.write(directory, AutoConfig.for_model(model_type, **config), tokenizer)


def _write_pictures(directory: Path) -> None:
    """Classes of a color each; `datasets` reads the names of folders as labels."""
    rng = np.random.default_rng(0)
    for split, num_pictures in (("train", 24), ("test", 6)):
        for label, color in (("red_panda", (200, 40, 30)), ("blue_whale", (20, 60, 210))):
            folder = directory / split / label
            folder.mkdir(parents=True)
            for index in range(num_pictures):
                pixels = np.clip(np.array(color) + rng.integers(-20, 20, (24, 40, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")


def cookbook_directory() -> Path:
    cookbook = find_spec("tinker_cookbook")
    assert cookbook is not None and cookbook.origin is not None
    return Path(cookbook.origin).parent


def question_and_answer(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    return f"What is {a} + {b}?", str(a + b)


def _write_conversations(directory: Path, sums: list[tuple[str, str]]) -> None:
    """Supervised data: 128 rows per split, the smallest batch of `sl_basic`, and more."""
    messages: list[Row] = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in sums
    ]
    no_robots = directory / "HuggingFaceH4" / "no_robots"
    _write_rows(no_robots / "train.jsonl", messages[:160])
    _write_rows(no_robots / "test.jsonl", messages[160:288])
    _write_rows(directory / "allenai" / "tulu-3-sft-mixture" / "train.jsonl", messages)
    thoughts: list[Row] = [
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        for question, answer in sums
    ]
    _write_rows(directory / "open-thoughts" / "OpenThoughts3-1.2M" / "train.jsonl", thoughts)


def _write_problems(directory: Path, sums: list[tuple[str, str]]) -> None:
    """Data with gradable answers; boxed ones are among those of boxing.py."""
    rng = random.Random(2)
    boxed = [(question, rng.choice(ANSWERS)) for question, _ in sums]
    grade_school: list[Row] = [{"question": question, "answer": f"Sum.\n#### {answer}"} for question, answer in boxed]
    _write_splits(directory / "openai" / "gsm8k", "main", {"train": grade_school[:160], "test": grade_school[160:192]})
    deep: list[Row] = [{"question": question, "final_answer": answer} for question, answer in boxed]
    _write_rows(directory / "zwhe99" / "DeepMath-103K" / "train.jsonl", deep)
    polaris: list[Row] = [{"problem": question, "answer": answer} for question, answer in boxed]
    _write_rows(directory / "POLARIS-Project" / "Polaris-Dataset-53K" / "train.jsonl", polaris)
    choices: list[Row] = [
        {
            "domain": "Chemistry",
            "details": {"level": "L3"},
            "type": "mcq-4-choices",
            "question": question,
            "choices": {"label": ["A", "B"], "text": [answer, "0"]},
            "answerKey": "A",
        }
        for question, answer in sums[:40]
    ]
    _write_rows(directory / "hicai-zju" / "SciKnowEval" / "test.jsonl", choices)


def _write_preferences(directory: Path, sums: list[tuple[str, str]]) -> None:
    harmless: list[Row] = [
        {
            "chosen": f"\n\nHuman: {question}\n\nAssistant: {answer}",
            "rejected": f"\n\nHuman: {question}\n\nAssistant: I do not know.",
        }
        for question, answer in sums
    ]
    target = directory / "Anthropic" / "hh-rlhf"
    _write_rows(target / "train.jsonl", harmless[:80])
    _write_rows(target / "test.jsonl", harmless[80:96])
    rubrics: list[Row] = [
        {
            "convo": [{"role": "user", "content": question}],
            "rubric_items": [
                {
                    "rubric_str": f"Is the answer {answer}?",
                    "extraction_regex": "([0-9])",
                    "grader_output_format_instruction": "Answer with 1 or 0.",
                }
            ],
        }
        for question, answer in sums
    ]
    _write_rows(directory / "rubric_train.jsonl", rubrics[:40])
    _write_rows(directory / "rubric_test.jsonl", rubrics[40:44])


def _write_texts(directory: Path) -> None:
    """Plain text: an encyclopedia whose pages repeat common words, and sentences to classify."""
    rng = random.Random(1)
    words = ("after", "before", "between", "later", "many", "most", "only", "over", "their", "then", "time", "while")
    lines: list[Row] = [{"text": " ".join(rng.choices(words, k=12)) + "\n"} for _ in range(400)]
    _write_splits(directory / "Salesforce" / "wikitext", "wikitext-103-raw-v1", {"train": lines})
    # It has the name of the package, which has priority over a directory without __init__.py.
    sentences = directory / "tinker_cookbook" / "example_data"
    sentences.mkdir(parents=True)
    (sentences / "multilingual.txt").write_text("Good morning to you\nGuten Morgen und gute Reise\n")


def _write_splits(directory: Path, config: str, splits: dict[str, list[Row]]) -> None:
    """A data set whose splits belong to a named configuration, which its card declares."""
    card = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        _write_rows(directory / config / f"{split}.jsonl", rows)
        card += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (directory / "README.md").write_text("\n".join([*card, "---", ""]))


def _write_rows(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
