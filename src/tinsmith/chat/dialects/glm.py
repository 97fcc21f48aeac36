"""GLM-4.5 and later: `<tool_call>NAME`, and an `<arg_key>` and an `<arg_value>` element for each argument.

GLM-4.5 and 4.6 write a line for each element, later models none; values have no line ends around them in both. The
grammar has the form of the template.
"""

from __future__ import annotations

import re

from tinsmith.chat.calls import DialectParser
from tinsmith.chat.dialects.dialect import Tool, ToolDialect, ToolSchemas
from tinsmith.chat.dialects.elements import ElementForm, ElementReader, Elements, Tag, write_elements
from tinsmith.chat.dialects.grammar_writer import GrammarWriter, MarkedForm
from tinsmith.chat.dialects.marked import MarkedParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = Tag("", re.compile(r"([^<>\n{}]*)"), ends="\n<", keeps_end=True)
_KEY = Tag(KEY, re.compile(r"([^<>\n]*)"), ends="<", keeps_end=True)
_ELEMENTS = Elements((OPEN,), _NAME, _KEY, END_VALUE, CLOSE, key_end=(END_KEY, VALUE))


def _new_parser(schemas: ToolSchemas) -> DialectParser:
    return MarkedParser([(OPEN, lambda start: ElementReader(start, _ELEMENTS, schemas))])


def _new_dialect(name: str, line_end: str, aliases: tuple[str, ...], pattern: str) -> ToolDialect:
    form = ElementForm(
        before_name="",
        after_name=line_end,
        write_opening=lambda key, _is_text: f"{KEY}{key}{END_KEY}{line_end}{VALUE}",
        value_end=END_VALUE + line_end,
        end=CLOSE,
    )

    def write_call(writer: GrammarWriter, tool: Tool, index: int) -> str:
        return write_elements(writer, form, tool, index)

    return ToolDialect(
        name=name,
        # Hunyuan's form has the same elements after `<tool_sep>`, and is another one.
        is_in=lambda template: (
            OPEN in template and "<tool_sep>" not in template and re.search(pattern, template) is not None
        ),
        form=MarkedForm(OPEN, write_call, gap="\n" if line_end else ""),
        new_parser=_new_parser,
        aliases=aliases,
        marks=(OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE),
        closing=CLOSE,
    )


GLM47 = _new_dialect("glm47", "", (), re.escape(END_KEY + VALUE))
GLM45 = _new_dialect("glm45", "\n", ("glm4_moe",), re.escape(KEY))
