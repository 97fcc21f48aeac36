"""nano with a chat template for tools in the format of Hermes and Qwen, for tests only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from support import tiny_models
from tinsmith.base_models import nano

TOOL_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' or not tools %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {%- generation %}{%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_tool_model(directory: Path) -> Path:
    shutil.copytree(nano.path(), directory)
    (directory / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return directory


def make_plain_model(directory: Path) -> Path:
    """A model without a chat template."""
    shutil.copytree(nano.path(), directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


AGENT_CONTEXT = 65536
_ROOT = Path(__file__).resolve().parents[2]


def make_agent_model(directory: Path) -> Path:
    """A random model of one small layer for agents: their prompts of 80 KB are 20,000 tokens and take seconds."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tiny_models.make(directory, num_hidden_layers=1, vocab_size=4096, max_position_embeddings=AGENT_CONTEXT)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=marks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train([str(path) for path in sorted((_ROOT / "docs").glob("*.md"))], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TOOL_TEMPLATE.replace(" or not tools", " or loop.index0 > 0"))
    end_id = marks.index("<|im_end|>")
    for name in ("config.json", "generation_config.json"):
        config = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(config | {"eos_token_id": end_id}))
    _end_soon(directory / "model.safetensors", end_id)
    return directory


def _end_soon(path: Path, end_id: int) -> None:
    """Give all embeddings a common direction, and the end token more of it, so that an answer has some 30 tokens."""
    weights = load_file(path)
    embedding_VD = weights["model.embed_tokens.weight"] * 0.1
    common_D = torch.ones(embedding_VD.shape[1]) / embedding_VD.shape[1] ** 0.5
    embedding_VD += common_D
    embedding_VD[end_id] = 2.3 * common_D
    save_file(weights | {"model.embed_tokens.weight": embedding_VD}, path, metadata={"format": "pt"})
