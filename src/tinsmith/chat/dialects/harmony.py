"""The harmony format of gpt-oss: a call is a message to `functions.NAME` on the channel "commentary".

Its calls are messages between tokens and not text, so that `chat.harmony` reads them. Every grammar begins after
`<|start|>assistant`, which ends the prompt.
"""

from __future__ import annotations

import json

from tinsmith.chat.dialects.dialect import CallRequest, ToolDialect
from tinsmith.chat.dialects.grammar_writer import ANY_TEXT, GrammarWriter, write_json_arguments, write_union
from tinsmith.types import Grammar

FINAL = '<|channel|> "final" <|message|> '


class HarmonyForm:
    """A completion has one call, since the token that ends a call ends the completion. Free text is messages of
    reasoning and preambles before the call or the final message.
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
            writer.add_rule("TEXT", ANY_TEXT)
            writer.add_rule("before", '<|channel|> ("analysis" | "commentary") <|message|> TEXT')
            next_message = 'before <|end|> <|start|> "assistant"'
            return writer.write_grammar("lark", f"({next_message})* (call | {FINAL} TEXT)")
        return write_union(writer, "call", "json_lark", request.answer, FINAL)


HARMONY = ToolDialect(
    name="harmony",
    is_in=lambda template: "<|channel|>" in template and "functions." in template,
    form=HarmonyForm(),
    new_parser=None,
    aliases=("openai", "gpt_oss"),
)
