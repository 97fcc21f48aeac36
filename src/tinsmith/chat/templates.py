"""Chat templates: a model's own Jinja program that writes a conversation as text, run in a sandbox.

The environment is the one that transformers gives such programs (its version 5, utils/chat_template_utils.py): the
same filters, functions and white space, so that the text is the same. Templates come with the model; what they are
given comes from strangers and is plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinsmith.chat.refusals import RequestError

Message = Mapping[str, object]

MAX_RENDERED = 16 << 20
"""Characters of one conversation."""


class _Generation(Extension):
    """`{% generation %}` marks what a model said, for training. To a reader it is not there."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    @staticmethod
    def _as_it_is(caller: jinja2.runtime.Macro) -> str:
        return caller()


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` by the names that templates call them: bos_token, eos_token, ..."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template = environment.from_string(source)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, variables: Mapping[str, object]
    ) -> str:
        """The conversation up to where the model's turn begins. Raises RequestError with the template's own reason."""
        given = {"messages": list(messages), "tools": tools, "documents": None, "add_generation_prompt": True}
        try:
            parts: list[str] = []
            size = 0
            for part in self._template.generate(**(self._special_tokens | dict(variables) | given)):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED:
                    raise RequestError("messages", f"messages become more than {MAX_RENDERED} characters of prompt")
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError("messages", f"messages do not fit the model's chat template: {error}") from error
        return "".join(parts)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape what HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
