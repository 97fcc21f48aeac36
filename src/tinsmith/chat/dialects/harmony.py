"""The harmony format of gpt-oss: a call is a message to `functions.NAME` on the channel "commentary".

Its calls are messages between tokens and not text, so that `chat.harmony` reads them. Every grammar begins after
`<|start|>assistant`, which ends the prompt, and lets messages of reasoning come first.
"""

from __future__ import annotations

import json

from tinsmith.chat.dialects.dialect import CallRequest, ToolDialect
from tinsmith.chat.dialects.grammar_writer import ANY_TEXT, GrammarWriter, write_json_arguments, write_union
from tinsmith.types import Grammar

FINAL = '<|channel|> "final" <|message|> '


def write_final_answer(answer: Grammar) -> Grammar:
    """Return the grammar of messages of reasoning and a final message that `answer` holds."""
    return _write_after_reasoning(GrammarWriter({}), "", answer)


def _write_after_reasoning(writer: GrammarWriter, call: str, answer: Grammar | None) -> Grammar:
    reasoning = _add_messages(writer, "analysis")
    return write_union(writer, call, "json_lark", answer, before=f"{reasoning}*", answer_prefix=FINAL)


def _add_messages(writer: GrammarWriter, *channels: str) -> str:
    """Add the rule of a message on one of these channels and of what begins the next message."""
    writer.add_rule("TEXT", ANY_TEXT)
    options = " | ".join(map(json.dumps, channels))
    return writer.add_rule("before", f'<|channel|> ({options}) <|message|> TEXT <|end|> <|start|> "assistant"')


class HarmonyForm:
    """A completion has one call, since the token that ends a call ends the completion. Free text is messages of
    reasoning and preambles before the call or the final message. A completion without free text has reasoning only.
    """

    def write_grammar(self, request: CallRequest) -> Grammar:
        writer = GrammarWriter({})
        calls: list[str] = []
        for index, tool in enumerate(request.tools):
            recipient = json.dumps(f"commentary to=functions.{tool.name} ")
            header = f'<|channel|> {recipient} <|constrain|> "json" <|message|>'
            arguments = write_json_arguments(writer, tool, index)
            calls.append(writer.add_rule(f"call_{index}", f"{header} {arguments}"))
        writer.add_rule("call", " | ".join(calls))
        if request.allows_text:
            before = _add_messages(writer, "analysis", "commentary")
            return writer.write_grammar("lark", f"{before}* (call | {FINAL} TEXT)")
        return _write_after_reasoning(writer, "call", request.answer)


HARMONY = ToolDialect(
    name="harmony",
    is_in=lambda template: "<|channel|>" in template and "functions." in template,
    form=HarmonyForm(),
    new_parser=None,
    aliases=("openai", "gpt_oss"),
)
