"""Qwen3-Coder's, Qwen3.5's and Nemotron 3's form: `<tool_call>` around `<function=NAME>`, in which each argument is a
`<parameter=KEY>` element. Seed-OSS writes the same between `<seed:tool_call>` tags.

One line end at both ends of a value belongs to the tags. Qwen3-Coder sometimes leaves out the outer opening tag, so
that `<function=NAME>` alone begins a call, too.
"""

from __future__ import annotations

import re

from tinsmith.chat.calls import DialectParser
from tinsmith.chat.dialects.dialect import Tool, ToolDialect, ToolSchemas
from tinsmith.chat.dialects.elements import ElementForm, ElementReader, Elements, Tag, write_elements
from tinsmith.chat.dialects.grammar_writer import GrammarWriter, MarkedForm
from tinsmith.chat.dialects.marked import MarkedParser, Section

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"([^<>\n]*)")


def _new_dialect(name: str, tag: str, aliases: tuple[str, ...]) -> ToolDialect:
    opening, closing = f"<{tag}>", f"</{tag}>"
    name_tag, key_tag = Tag(FUNCTION, _NAME), Tag(PARAMETER, _NAME)
    elements = Elements((opening,), name_tag, key_tag, END_PARAMETER, END_FUNCTION, after=(closing,), trims_lines=True)
    bare_elements = Elements((), name_tag, key_tag, END_PARAMETER, END_FUNCTION, trims_lines=True)
    form = ElementForm(
        before_name=f"\n{FUNCTION}",
        after_name=">\n",
        write_opening=lambda key, _is_text: f"{PARAMETER}{key}>\n",
        value_end=f"\n{END_PARAMETER}\n",
        end=f"{END_FUNCTION}\n{closing}",
    )

    def new_parser(schemas: ToolSchemas) -> DialectParser:
        def new_reader(start: int) -> ElementReader:
            return ElementReader(start, elements, schemas)

        marks = [(opening, new_reader), (FUNCTION, lambda start: ElementReader(start, bare_elements, schemas))]
        return MarkedParser(marks, Section(opening, new_reader, (closing,)))

    def write_call(writer: GrammarWriter, tool: Tool, index: int) -> str:
        return write_elements(writer, form, tool, index)

    return ToolDialect(
        name=name,
        is_in=lambda template: opening in template and FUNCTION in template,
        form=MarkedForm(opening, write_call, gap="\n", excluded=FUNCTION),
        new_parser=new_parser,
        aliases=aliases,
        marks=(opening, closing),
        closing=closing,
    )


FUNCTION_XML = _new_dialect("function_xml", "tool_call", ("qwen3_coder", "qwen3_xml", "nemotron3", "mimo"))
SEED_OSS = _new_dialect("seed_oss", "seed:tool_call", ())
