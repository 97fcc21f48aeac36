"""Tiny random models of four families with the chat template, tokens and end of each family's form: for tests only.

The templates are written for tests. They refuse what the families' own templates refuse: Qwen3.5's a system message
after the first and a conversation without a user, Llama 3's a message with several calls. Qwen3.5's opens the reasoning
in the prompt. The models end answers and reasoning soon, so that clients get whole answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from support import families, harmony
from support.tool_templates import BAR, BLOCK, ITEMS, VALUE
from tinsmith.chat.dialects import choose_dialect

VOCAB, CONTEXT = 2048, 16384
END_GAIN = 1.5
"""With it, answers have some 30 tokens."""
_ROOT = Path(__file__).resolve().parents[2]


def _token(words: str) -> str:
    return f"<{BAR}{words.replace(' ', BLOCK)}{BAR}>"


QWEN_TEMPLATE = (
    """\
{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nUse <tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>' }}
    {{- '\\n</tool_call>' + ('\\n' + system if system else '') + '<|im_end|>\\n' }}
{%- elif system %}{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}"""
    + ITEMS
    + "{{- '<parameter=' + key + '>\\n' }}"
    + VALUE
    + """{{- '\\n</parameter>\\n' }}{% endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}{{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' + ('\\n</think>\\n\\n' if enable_thinking is false else '') }}
{%- endif %}
"""
)

LLAMA_TEMPLATE = """\
{%- macro turn(role, text) %}{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + text + '<|eot_id|>' }}
{%- endmacro %}
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content | trim, messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- turn('system', system) }}
{%- for message in messages %}
    {%- if tools and loop.first %}
        {{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer with a call in the form ' }}
        {{- '{"name": function name, "parameters": dictionary of arguments}.\\n\\n' }}
        {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- elif message.role in ('tool', 'ipython') %}{{- turn('ipython', message.content | tojson) }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- set written = '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' %}
        {{- turn('assistant', written) }}
    {%- else %}{{- turn(message.role, message.content | trim) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

_BEGIN_CALLS, _END_CALLS = _token("tool calls begin"), _token("tool calls end")
_BEGIN_CALL, _SEPARATOR, _END_CALL = _token("tool call begin"), _token("tool sep"), _token("tool call end")
_BOS, _EOS = _token("begin of sentence"), _token("end of sentence")
_USER, _ASSISTANT = _token("User"), _token("Assistant")
DEEPSEEK_TEMPLATE = f"""\
{{%- set system = namespace(text='') %}}
{{%- for message in messages if message.role == 'system' %}}
    {{%- set system.text = system.text + ('\\n\\n' if system.text else '') + message.content %}}
{{%- endfor %}}
{{%- if tools %}}
    {{%- set system.text = system.text + '\\n\\n## Tools\\n' %}}
    {{%- for tool in tools %}}
        {{%- set system.text = system.text + tool.function.name + ': ' + tool.function.parameters | tojson + '\\n' %}}
    {{%- endfor %}}
{{%- endif %}}
{{{{- bos_token + system.text }}}}
{{%- set last = namespace(role='') %}}
{{%- for message in messages if message.role != 'system' %}}
    {{%- if message.role == 'user' %}}{{{{- '{_USER}' + message.content }}}}
    {{%- elif message.role == 'tool' %}}
        {{{{- '{_token("tool output begin")}' + message.content + '{_token("tool output end")}' }}}}
    {{%- else %}}
        {{%- if last.role == 'user' %}}{{{{- '{_ASSISTANT}</think>' }}}}{{%- endif %}}
        {{{{- message.content or '' }}}}
        {{%- for call in message.tool_calls or [] %}}
            {{{{- '{_BEGIN_CALLS}' if loop.first }}}}
            {{{{- '{_BEGIN_CALL}' + call.function.name + '{_SEPARATOR}' + call.function.arguments + '{_END_CALL}' }}}}
            {{{{- '{_END_CALLS}' if loop.last }}}}
        {{%- endfor %}}
        {{{{- '{_EOS}' }}}}
    {{%- endif %}}
    {{%- set last.role = message.role %}}
{{%- endfor %}}
{{%- if add_generation_prompt and last.role == 'user' %}}
    {{{{- '{_ASSISTANT}' + ('<think>' if thinking else '</think>') }}}}
{{%- endif %}}
"""


@dataclass(frozen=True)
class FamilyChat:
    """`model_type` as config.json has it, `marks` the tokens of turns; the first of `ends` is the tokenizer's end."""

    model_type: str
    template: str
    dialect: str
    marks: tuple[str, ...]
    ends: tuple[str, ...]
    soon: tuple[str, ...] = ()
    """The tokens besides the end that come soon: the end of the reasoning, or of a header."""
    bos_token: str | None = None


FAMILY_CHATS: Mapping[str, FamilyChat] = {
    "qwen35": FamilyChat(
        "qwen3_5_text", QWEN_TEMPLATE, "function_xml", ("<|im_start|>", "<think>"), ("<|im_end|>",), ("</think>",)
    ),
    "llama3": FamilyChat(
        "llama", LLAMA_TEMPLATE, "llama", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        ("<|eot_id|>",), bos_token="<|begin_of_text|>",
    ),
    "gpt_oss": FamilyChat("gpt_oss", harmony.TEMPLATE, "harmony", harmony.MARKS, ("<|return|>", "<|call|>"),
                          ("<|message|>", "<|end|>")),
    "deepseek": FamilyChat(
        "deepseek_v3", DEEPSEEK_TEMPLATE, "deepseek_v31", (_BOS, _USER, _ASSISTANT, "<think>"), (_EOS,),
        ("</think>",), _BOS,
    ),
}  # fmt: skip


def make_family_chat_model(directory: Path, name: str) -> Path:
    """Make the model directory of a family of FAMILY_CHATS."""
    chat = FAMILY_CHATS[name]
    marks = (*chat.marks, *chat.ends, *chat.soon, *choose_dialect(chat.dialect, chat.template).marks)
    tokenizer = _train_tokenizer(dict.fromkeys(marks))
    token_ids = tokenizer.get_vocab()
    end_ids = [token_ids[token] for token in chat.ends]
    family = next(family for family in families.ALL_FAMILIES if family.model_type == chat.model_type)
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "eos_token_id": end_ids[0]}
    config = AutoConfig.for_model(family.model_type, **{**families.COMMON, **family.config, **sizes})
    model = families.randomise_weights(AutoModelForCausalLM.from_config(config, dtype=torch.float32), 1.0)
    _end_soon(model, [token_ids[token] for token in (chat.ends[0], *chat.soon)])
    model.save_pretrained(directory)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=chat.ends[0], bos_token=chat.bos_token)
    fast.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(chat.template)
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": end_ids}))
    return directory


def _train_tokenizer(marks: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(marks), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(path) for path in sorted((_ROOT / "docs").glob("*.md"))], trainer)
    return tokenizer


def _end_soon(model: PreTrainedModel, end_ids: Sequence[int]) -> None:
    """Give all embeddings a common direction, which the layers hardly change, and the ends a logit for it."""
    embedding_VD = cast(torch.nn.Embedding, model.get_input_embeddings()).weight
    head_VD = cast(torch.nn.Linear, model.get_output_embeddings()).weight
    common_D = torch.ones(embedding_VD.shape[1]) / embedding_VD.shape[1] ** 0.5
    with torch.no_grad():
        embedding_VD += common_D
        for path, parameter in model.named_parameters():
            if path.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                parameter *= 0.1
        head_VD[list(end_ids)] = END_GAIN * common_D
