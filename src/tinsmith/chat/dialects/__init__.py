"""The dialects in which chat templates ask models to write calls: one module for each form.

A new dialect is a module with a `ToolDialect` and an entry in `DIALECTS`. `marked` parses dialects whose calls begin
with a mark, `json_calls`, `elements` and `literals` read one call, and `grammar_writer` and `parameter_values` write
grammars. The harmony format has no parser here, since its calls are messages between tokens; `chat.harmony` makes the
same events from them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith.chat.dialects.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from tinsmith.chat.dialects.dialect import ToolDialect
from tinsmith.chat.dialects.function_xml import FUNCTION_XML, SEED_OSS
from tinsmith.chat.dialects.gemma import GEMMA4
from tinsmith.chat.dialects.glm import GLM45, GLM47
from tinsmith.chat.dialects.harmony import HARMONY
from tinsmith.chat.dialects.hermes import HERMES
from tinsmith.chat.dialects.invoke import DEEPSEEK_V4, DEEPSEEK_V32, MINIMAX_M2
from tinsmith.chat.dialects.json_lists import GRANITE, NEMOTRON
from tinsmith.chat.dialects.kimi import KIMI_K2
from tinsmith.chat.dialects.llama import LLAMA
from tinsmith.chat.dialects.mistral import MISTRAL, MISTRAL_LIST
from tinsmith.chat.dialects.pythonic import PYTHONIC
from tinsmith.errors import SettingsError

DIALECTS: tuple[ToolDialect, ...] = (
    # The three forms within <tool_call> tags, the most specific first.
    SEED_OSS,
    FUNCTION_XML,
    GLM47,
    GLM45,
    HERMES,
    # Forms with marks that no other form has; V3.2's and V3's templates contain the marks of the later ones.
    HARMONY,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    MINIMAX_M2,
    GEMMA4,
    MISTRAL_LIST,
    MISTRAL,
    GRANITE,
    NEMOTRON,
    # Forms without marks, which only the template's examples show. Templates for Pythonic calls may name Llama's tag.
    PYTHONIC,
    LLAMA,
)
"""All dialects, in the order in which a chat template is compared with them; the first match decides."""


def detect_dialect(template: str) -> ToolDialect | None:
    """Return the dialect of a chat template, or None."""
    return next((dialect for dialect in DIALECTS if dialect.is_in(template)), None)


def choose_dialect(name: str, template: str) -> ToolDialect:
    """Return the dialect of a name or an alias; the template decides between several. Raises KeyError."""
    dialects = [dialect for dialect in DIALECTS if name in (dialect.name, *dialect.aliases)]
    if not dialects:
        raise KeyError(name)
    return next((dialect for dialect in dialects if dialect.is_in(template)), dialects[0])


def list_names() -> list[str]:
    """Return the names and aliases of all dialects."""
    return sorted({name for dialect in DIALECTS for name in (dialect.name, *dialect.aliases)})


def read_tool_parsers(setting: str) -> Mapping[str, str]:
    """Return the names of tool parsers by base model, of `NAME` for all or `MODEL=NAME,MODEL=NAME`; the model "" is
    every other one. Raises SettingsError for an unknown name.
    """
    parsers: dict[str, str] = {}
    for entry in setting.split(","):
        model, _, name = entry.strip().rpartition("=")
        if name != "auto" and name not in list_names():
            raise SettingsError(f"--tool-parser names {name!r}; use auto or one of {', '.join(list_names())}")
        parsers[model] = name
    return parsers
