"""A model directory whose tokenizer and chat template are in the harmony format (gpt-oss): for tests only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from tinsmith.base_models import nano

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")

TEMPLATE = """\
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n}<|end|>' }}
{%- endif %}
{%- set last = namespace(call='') %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if not last.call %}{{- raise_exception('a tool message needs a call before it') }}{%- endif %}
        {{- '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.thinking and loop.last %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {%- set last.call = call.name %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- call.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""


def make_harmony_model(directory: Path) -> Path:
    shutil.copytree(nano.path(), directory)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(path))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    ends = [tokenizer.token_to_id(token) for token in ("<|return|>", "<|call|>")]
    config = directory / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": ends}))
    return directory
