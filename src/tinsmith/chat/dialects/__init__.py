"""The dialects in which chat templates ask models to write calls. Each is one incremental parser.

A new dialect is a module with a `DialectParser`, an entry in `PARSERS`, and its recognition in `tools`. `marked` serves
dialects whose calls begin with a mark, and `json_objects` finds the end of a JSON object in growing text. The harmony
format has no parser here, since its calls are messages between tokens; `harmony` makes the same events from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tinsmith.chat.calls import DialectParser
from tinsmith.chat.dialects.function_xml import new_function_xml_parser
from tinsmith.chat.dialects.hermes import new_hermes_parser
from tinsmith.chat.dialects.llama import LlamaParser

ToolSchemas = Mapping[str, Mapping[str, object]]
"""The JSON schemas of the arguments, by the names of the tools."""

PARSERS: Mapping[str, Callable[[ToolSchemas], DialectParser]] = {
    "hermes": lambda _schemas: new_hermes_parser(),
    "llama": lambda _schemas: LlamaParser(),
    "function_xml": new_function_xml_parser,
}
