"""Small chat templates, one for each dialect of tool calls, which write the calls of a history in the models' form.

They are written for tests. Their turns are nano's, so that one tokenizer serves all of them; the marks of a dialect
are added to it as special tokens, or stay text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tinsmith.base_models import nano, read_shape
from tinsmith.chat.dialects import choose_dialect
from tinsmith.chat.tokenizer import ModelTokenizer

BAR, BLOCK = "\uff5c", "\u2581"
"""The letters of DeepSeek's tokens."""
JSON_CALL = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
ITEMS = "{% for key, value in call.function.arguments.items() %}"
VALUE = "{{ value if value is string else value | tojson }}"


def _token(words: str) -> str:
    return f"<{BAR}{words.replace(' ', BLOCK)}{BAR}>"


def _each(call: str, before: str = "", between: str = "", after: str = "") -> str:
    """Write every call of the message, with texts around and between them."""
    separator = f"{{{{ {between!r} if not loop.last }}}}" if between else ""
    return f"{before}{{% for call in message.tool_calls %}}{call}{separator}{{% endfor %}}{after}"


def _invoke(prefix: str, section: str, kind: str) -> str:
    parameter = f'<{prefix}parameter name="{{{{ key }}}}"{kind}>{VALUE}</{prefix}parameter>\n'
    call = f'<{prefix}invoke name="{{{{ call.function.name }}}}">\n{ITEMS}{parameter}{{% endfor %}}</{prefix}invoke>\n'
    return _each(call, f"<{section}>\n", after=f"</{section}>")


def _functions(tag: str) -> str:
    parameter = f"{ITEMS}<parameter={{{{ key }}}}>\n{VALUE}\n</parameter>\n{{% endfor %}}"
    function = f"<function={{{{ call.function.name }}}}>\n{parameter}</function>"
    return _each(f"<{tag}>\n{function}\n</{tag}>", between="\n")


GEMMA_MACRO = """\
{%- macro literal(value) -%}
    {%- if value is string -%}<|"|>{{ value }}<|"|>
    {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
    {%- elif value is mapping -%}{
        {%- for key, inner in value.items() -%}{{ key }}:{{ literal(inner) }}{{ ',' if not loop.last }}{%- endfor -%} }
    {%- elif value is none -%}null
    {%- elif value is iterable -%}[
        {%- for inner in value -%}{{ literal(inner) }}{{ ',' if not loop.last }}{%- endfor -%} ]
    {%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
"""
TYPED = " string=\"{{ 'true' if value is string else 'false' }}\""
DSML = f"{BAR}DSML{BAR}"
DEEPSEEK_CALL = _token("tool call begin"), _token("tool sep"), _token("tool call end")
GLM_ITEM = "<arg_key>{{ key }}</arg_key>%s<arg_value>" + VALUE + "</arg_value>%s"

CALLS: Mapping[str, str] = {
    "hermes": _each(f"<tool_call>\n{JSON_CALL}\n</tool_call>", between="\n"),
    "function_xml": _functions("tool_call"),
    "seed_oss": _functions("seed:tool_call"),
    "glm45": _each(
        "<tool_call>{{ call.function.name }}\n" + ITEMS + GLM_ITEM % ("\n", "\n") + "{% endfor %}</tool_call>",
        between="\n",
    ),
    "glm47": _each(
        "<tool_call>{{ call.function.name }}" + ITEMS + GLM_ITEM % ("", "") + "{% endfor %}</tool_call>"
    ),
    "llama": _each(JSON_CALL.replace("arguments\":", "parameters\":"), between="; "),
    "pythonic": _each(
        "{{ call.function.name }}(" + ITEMS + "{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %})",
        "[", ", ", "]",
    ),
    "mistral_list": _each(JSON_CALL.replace("}}}", "}}, \"id\": \"{{ call.id }}\"}"), "[TOOL_CALLS] [", ", ", "]"),
    "mistral_args": _each(
        "[TOOL_CALLS]{{ call.function.name }}{% if call.id | length != 9 %}{{ raise_exception('bad id') }}{% endif %}"
        "[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}"
    ),
    "deepseek_v3": _each(
        DEEPSEEK_CALL[0] + "function" + DEEPSEEK_CALL[1] + "{{ call.function.name }}\n```json\n"
        "{{ '' + call.function.arguments }}\n```" + DEEPSEEK_CALL[2],
        _token("tool calls begin"), "\n", _token("tool calls end"),
    ),
    "deepseek_v31": _each(
        DEEPSEEK_CALL[0] + "{{ call.function.name }}" + DEEPSEEK_CALL[1] + "{{ call.function.arguments }}"
        + DEEPSEEK_CALL[2],
        _token("tool calls begin"), "", _token("tool calls end"),
    ),
    "deepseek_v32": _invoke(DSML, f"{DSML}function_calls", TYPED),
    "deepseek_v4": _invoke(DSML, f"{DSML}tool_calls", TYPED),
    "minimax_m2": _invoke("", "minimax:tool_call", ""),
    "kimi_k2": _each(
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}"
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>",
    ),
    "gemma4": _each("<|tool_call>call:{{ call.function.name }}{{ literal(call.function.arguments) }}<tool_call|>"),
    "granite": _each(JSON_CALL, "<|tool_call|>[", ", ", "]"),
    "nemotron": _each(JSON_CALL, "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
}  # fmt: skip
"""How each dialect's template writes the calls of a message."""

HINTS = {
    "llama": 'Answer with {"name": function name, "parameters": dictionary of arguments}.',
    "pythonic": "Answer with [func_name1(param1=value1, param2=value2), func_name2()].",
}
"""What templates of dialects without marks tell the model."""


def make_template(name: str) -> str:
    macro = GEMMA_MACRO if name == "gemma4" else ""
    return f"""\
{macro}{{%- if tools %}}
    {{{{- '<|im_start|>system\\n' }}}}
    {{%- for tool in tools %}}{{{{- tool | tojson + '\\n' }}}}{{%- endfor %}}
    {{{{- {HINTS.get(name, "")!r} + '<|im_end|>\\n' }}}}
{{%- endif %}}
{{%- for message in messages %}}
    {{{{- '<|im_start|>' + message.role + '\\n' + message.content }}}}
    {{%- if message.tool_calls %}}{CALLS[name]}{{%- endif %}}
    {{{{- '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{%- endif %}}
"""


def make_dialect_model(directory: Path, name: str, *, special: bool) -> ModelTokenizer:
    """Make a model directory of a dialect; its marks are special tokens or text."""
    shutil.copytree(nano.path(), directory)
    (directory / "chat_template.jinja").write_text(make_template(name))
    path = directory / "tokenizer.json"
    tokens = json.loads(path.read_text())
    marks = choose_dialect(name, "").marks
    if not special:  # nano has the tags of Hermes as tokens
        tokens["added_tokens"] = [token for token in tokens["added_tokens"] if token["content"] not in marks]
    tokenizer = Tokenizer.from_str(json.dumps(tokens))
    if special:
        tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.save(str(path))
    return ModelTokenizer(read_shape(f"local/{name}", directory))
