"""Calls as `<invoke name="NAME">` elements in a section: MiniMax M2's, and the DSML of DeepSeek V3.2 and V4.

In DSML every tag has the prefix `DSML` between fullwidth bars, and each parameter says whether it is a string; MiniMax
leaves that to the tool's schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tinsmith.chat.calls import DialectParser
from tinsmith.chat.dialects.dialect import Tool, ToolDialect, ToolSchemas
from tinsmith.chat.dialects.elements import ElementForm, ElementReader, Elements, Tag, write_elements
from tinsmith.chat.dialects.grammar_writer import GrammarWriter, MarkedForm
from tinsmith.chat.dialects.marked import MarkedParser, Section

DSML = "\uff5cDSML\uff5c"
_NAME = re.compile(r"[\"']?([^<>\n\"']+)[\"']?")
_TYPED_NAME = re.compile(r"\"([^<>\n\"]+)\"\s+string=\"(true|false)\"")


def _new_dialect(
    name: str, prefix: str, section: str, is_in: Callable[[str], bool], aliases: tuple[str, ...] = ()
) -> ToolDialect:
    """Make a dialect of which every tag but the section's begins with `prefix`."""
    opening, closing = f"<{section}>", f"</{section}>"
    invoke, end_invoke = f"<{prefix}invoke name=", f"</{prefix}invoke>"
    parameter, end_parameter = f"<{prefix}parameter name=", f"</{prefix}parameter>"
    is_typed = bool(prefix)
    key_tag = Tag(parameter, _TYPED_NAME if is_typed else _NAME)
    is_string = (lambda key: key[2] == "true") if is_typed else None
    first = Elements((opening,), Tag(invoke, _NAME), key_tag, end_parameter, end_invoke, is_string=is_string)
    later = Elements((), Tag(invoke, _NAME), key_tag, end_parameter, end_invoke, is_string=is_string)

    def new_parser(schemas: ToolSchemas) -> DialectParser:
        def new_reader(start: int) -> ElementReader:
            return ElementReader(start, later, schemas)

        return MarkedParser(
            [(opening, lambda start: ElementReader(start, first, schemas))], Section(invoke, new_reader, (closing,))
        )

    def write_opening(key: str, is_text: bool) -> str:
        kind = f' string="{str(is_text).lower()}"' if is_typed else ""
        return f'{parameter}"{key}"{kind}>'

    form = ElementForm(f'{invoke}"', '">\n', write_opening, f"{end_parameter}\n", f"{end_invoke}\n")

    def write_call(writer: GrammarWriter, tool: Tool, index: int) -> str:
        return write_elements(writer, form, tool, index)

    return ToolDialect(
        name=name,
        is_in=is_in,
        form=MarkedForm(f"{opening}\n", write_call, separator="", closing=closing),
        new_parser=new_parser,
        aliases=aliases,
        marks=(opening, closing, *([DSML] if is_typed else [])),
        closing=end_invoke,
    )


MINIMAX_M2 = _new_dialect(
    "minimax_m2", "", "minimax:tool_call", lambda template: "<minimax:tool_call>" in template, ("minimax",)
)
DEEPSEEK_V32 = _new_dialect(
    "deepseek_v32", DSML, f"{DSML}function_calls", lambda template: DSML in template and "function_calls>" in template
)
DEEPSEEK_V4 = _new_dialect("deepseek_v4", DSML, f"{DSML}tool_calls", lambda template: DSML in template)
