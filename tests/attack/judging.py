"""Validates responses to broken requests: quick, no server error, with a reason, without secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from attack.mutations import FIELD_KINDS, Broken
from attack.sending import Answer
from attack.valid import NEVER_200

AT_MOST_S = 20.0
"""Limit for an answer on a busy machine; polls are held for a second."""
ALLOWED_FAILURES = (501, 503)
"""The place of parameters in the OpenAPI document."""
LEAKS = re.compile(
    r"Traceback \(most|sqlalchemy|sqlite3|psycopg|\bSELECT \w|INSERT INTO|site-packages"
    r"|/src/tinsmith/(?!base_models/nano/model\b)|signing\.key"
)
"""The embedded model's directory is public: it is the name of its tokenizer."""
MAX_WORDS = 2500


@dataclass
class Judge:
    """Collects the defects of responses. Per route, `declared` has the statuses and `fields` the names in the body."""

    declared: Mapping[str, Collection[int]]
    fields: Mapping[str, Collection[str]]
    secrets: list[str]
    faults: list[str] = field(default_factory=list)

    def look(self, broken: Broken, answer: Answer) -> None:
        for fault in self._faults(broken, answer):
            body = answer.body[:300].decode(errors="replace")
            body_start = broken.request.body[:300]
            self.faults.append(
                f"{fault}: {broken.request.label} ({broken.kind}, field {broken.field}): "
                f"{answer.status} in {answer.seconds:.1f} s: {body}\n    {broken.request.target[:200]} {body_start!r}"
            )

    def _faults(self, broken: Broken, answer: Answer) -> list[str]:
        label, faults = broken.request.label, []
        if answer.seconds > AT_MOST_S:
            faults.append("slow")
        if not answer.status and not broken.request.halts:
            faults.append("no answer")
        if answer.status >= 500 and not (answer.status in ALLOWED_FAILURES and answer.status in self.declared[label]):
            faults.append("a failure of the server")
        text = answer.body.decode(errors="replace")
        visible_text = " ".join([text, *(f"{name}: {value}" for name, value in answer.headers)])
        if leak := LEAKS.search(visible_text):
            faults.append(f"tells {leak[0]!r}")
        faults += ["tells a secret" for secret in self.secrets if secret in visible_text]
        if 400 <= answer.status < 500 and broken.request.method != "HEAD":
            faults += self._faults_of_words(broken, answer)
        return faults

    def _faults_of_words(self, broken: Broken, answer: Answer) -> list[str]:
        try:
            said = json.loads(answer.body)
            words = said["error"]["message"] if "error" in said else said["detail"]
        except (ValueError, KeyError, TypeError):
            return ["no words"]
        if not isinstance(words, str) or len(words) < 10:
            return ["hardly a word"]
        if len(words) > MAX_WORDS:
            return ["too many words"]
        if answer.status == 400 and broken.kind in FIELD_KINDS and broken.request.label not in NEVER_200:
            field_names = {
                *self.fields[broken.request.label],
                "body",
                "JSON",
                *([broken.field] if broken.field else []),
            }
            if not any(name in words for name in field_names):
                return ["does not name the field"]
        return []


def names_in(schema: object, document: Mapping[str, object]) -> set[str]:
    """Return the names of all fields of a schema, at any depth."""
    if isinstance(schema, list):
        return set().union(*(names_in(subschema, document) for subschema in schema))
    if not isinstance(schema, dict):
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        definition: object = document
        for part in reference.removeprefix("#/").split("/"):
            definition = definition[part]  # type: ignore[index]
        return names_in(definition, document)
    property_names = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
    return property_names.union(*(names_in(subschema, document) for subschema in schema.values()))
