"""The identity of a function: the same in every run of an unchanged script, another after every real change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinsmith.batch.client import functions
from tinsmith.batch.client.identity import function_identity
from tinsmith.batch.types import identity_of, packed

HELPERS = """
import numpy as np
LIMIT = 3
TABLE = {"x": {"p", "q", "r"}, "y": frozenset({1, 2, 3})}
WEIGHTS = np.arange(4.0)
def clean(text): return strip(text)[:LIMIT]
def strip(text): return text.strip() if text else clean(text)
def unused(text): return text
class Deep:
    words = {"deep", "deeper", "deepest"}
    def __init__(self): self.seen = {"a", "b", "c"}
"""
SCRIPT = """
import asyncio, collections, dataclasses, datetime, enum, functools, logging, pathlib, re, typing
import numpy as np
import pydantic
import helpers
from helpers import TABLE, Deep, clean
from tinsmith import batch

STOP = {"a", "bad", "the", "of", "zebra"}
NESTED = {frozenset({"u", "v", "w"}): {("m", frozenset({"n", "o"}))}, "k": [{"s", "t"}]}
PATTERN = re.compile("a+", re.I)
LOG = logging.getLogger("script")
COUNTS = collections.defaultdict(set, {"one": {"i", "j", "k"}})
ORDERED = collections.OrderedDict([("first", {"i", "j"}), ("second", 2)])

def stop(row): return {"stop": row["w"] in STOP}
def inline(row): return {"stop": row["w"] in {"x", "y", "z", "w"}, "helper": STOP}
def calls(row): return clean(row["w"])
def by_module(row): return helpers.clean(row["w"]), helpers.WEIGHTS.sum()
def nested(row):
    def inner(value, known=frozenset({"d", "e", "f"})):
        return [part for part in NESTED if part in known or TABLE]
    try:
        return inner(row)
    except KeyError:
        return None
def defaults(row, words=frozenset({"a", "b", "c"}), *, more={"d": {"e", "f", "g"}}): return words, more, STOP
def closing(words):
    def closed(row): return row["w"] in words
    return closed
def odd(n): return n and even(n - 1)
def even(n): return not n or odd(n - 1)
def recursive(row): return recursive(row) or STOP
@functools.lru_cache
def cached(word): return word in STOP
def uses_cached(row): return cached(row["w"]), LOG, PATTERN, COUNTS, ORDERED, np.float32, datetime.timezone.utc
async def asynchronous(row):
    await asyncio.sleep(0)
    return STOP
class Base:
    words = {"base", "basis", "based"}
    def say(self): return self.words
class Mapper(Base):
    def __init__(self, n=2): self.n, self.words, self.deep = n, {"p", "q", "r", "s"}, Deep()
    def __call__(self, row): return super().say(), self.deep, type(self).made(self.n), self.size
    @classmethod
    def made(cls, n): return cls(n)
    @staticmethod
    def stop(): return STOP
    @property
    def size(self): return len(STOP)
    @functools.cached_property
    def cached(self): return STOP
class Colour(enum.Enum):
    RED = frozenset({"r", "e", "d"})
    BLUE = "blue"
@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    words: frozenset = frozenset({"one", "two", "three"})
    colour: Colour = Colour.RED
    more: dict = dataclasses.field(default_factory=dict)
    def __call__(self, row): return self.words, self.colour
class Pair(typing.NamedTuple):
    left: str
    right: frozenset = frozenset({"x", "y"})
class Model(pydantic.BaseModel):
    words: set[str] = {"q", "w", "e", "r", "t", "y"}
    n: int = 1
    @pydantic.field_validator("n")
    @classmethod
    def positive(cls, value): return abs(value) + len(STOP)
def uses_types(row): return Settings(), Pair("x"), Model(n=1), Colour.BLUE
def chained(row): return [functools.partial(clean), lambda x: STOP, pathlib.Path("a"), datetime.date(2020, 1, 1)]

CALLABLES = {
    "stop": stop, "inline": inline, "calls": calls, "by_module": by_module, "nested": nested, "defaults": defaults,
    "closed": closing({"a", "b", "c", "d"}), "odd": odd, "recursive": recursive, "uses_cached": uses_cached,
    "asynchronous": asynchronous, "class": Mapper, "instance": Mapper(3), "settings": Settings(),
    "settings_more": Settings(more={"k": {"a", "b", "c"}}), "partial": functools.partial(defaults, words={"h", "i"}),
    "lambda": lambda row: STOP, "method": Mapper(1).__call__, "types": uses_types, "chained": chained,
    "array": closing(np.arange(5)), "builtin": functools.partial(len), "model": closing(Model(words={"z", "y", "x"})),
}
"""
REPORT = """
import importlib, json, sys, types
from pathlib import Path
from tinsmith.batch.client.identity import function_identity

def report(directory):
    sys.path[0] = str(directory)
    sys.modules.pop("helpers", None)
    importlib.invalidate_caches()
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    file = directory / "script.py"
    exec(compile(file.read_text(), file, "exec"), vars(module))
    return {name: function_identity(value) for name, value in module.CALLABLES.items()}

print(json.dumps([report(Path(directory)) for directory in sys.argv[1:]]))
"""
Version = tuple[str, str]
"""The texts of a script and of its module of helpers."""


def identities(directory: Path, seed: str, *versions: Version) -> list[dict[str, str]]:
    """The identities of all callables in each version, computed by another process."""
    directories = []
    for index, (script, helpers) in enumerate(versions):
        directories.append(directory / str(index))
        directories[-1].mkdir(exist_ok=True)
        (directories[-1] / "script.py").write_text(script)
        (directories[-1] / "helpers.py").write_text(helpers)
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", REPORT, *map(str, directories)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    [baseline] = identities(tmp_path_factory.mktemp("identity"), "0", (SCRIPT, HELPERS))
    return baseline


def test_an_unchanged_script_has_the_same_functions_in_every_run(first: dict[str, str], tmp_path: Path) -> None:
    assert len(set(first.values())) == len(first)
    commented = SCRIPT.replace("\ndef ", "\n\n# what it does\n\ndef ").replace("\nclass ", "\n\n# a class\nclass ")
    commented = commented.replace("    try:", "    # inside\n\n    try:")
    assert commented.count("#") > 15
    for seed in ("1", "4294967295"):  # the second run of each reads compiled helpers
        versions = (SCRIPT, HELPERS), (commented, "# more\n\n" + HELPERS)
        assert identities(tmp_path, seed, *versions) == [first, first]


EVERYWHERE = "a constant that most functions use"
CHANGES = {
    EVERYWHERE: ('"zebra"}', '"lion"}', "stop inline defaults recursive asynchronous class lambda method"),
    "a literal": ('"z", "w"}, "helper"', '"z", "v"}, "helper"', "inline"),
    "a nested default": ('"e", "f"})):', '"e", "g"})):', "nested"),
    "an exception": ("except KeyError", "except IndexError", "nested"),
    "a nested global": ('"o"})', '"p"})', "nested"),
    "a default": ('"b", "c"}), *', '"b", "d"}), *', "defaults partial"),
    "a keyword default": ('{"e", "f", "g"}', '{"e", "f", "h"}', "defaults partial"),
    "a closure": ('closing({"a", "b", "c", "d"})', 'closing({"a", "b", "c", "e"})', "closed"),
    "an array": ("arange(5)", "arange(6)", "array"),
    "a mutual call": ("return not n or", "return n == 0 or", "odd"),
    "a cached function": ("return word in STOP", "return word not in STOP", "uses_cached"),
    "a pattern": ('compile("a+", re.I)', 'compile("a+")', "uses_cached"),
    "an order": ('[("first", {"i", "j"}), ("second", 2)]', '[("second", 2), ("first", {"i", "j"})]', "uses_cached"),
    "a base": ('"basis"', '"basics"', "class instance method"),
    "a state": ("Mapper(3)", "Mapper(4)", "instance"),
    "a property": ("return len(STOP)", "return -len(STOP)", "class instance method"),
    "a static method": ("def stop(): return STOP", "def stop(): return None", "class instance method"),
    "an attribute": ('{"p", "q", "r", "s"}', '{"p", "q", "r", "t"}', "class instance method"),
    "an enumeration": ('"blue"', '"navy"', "types settings settings_more"),
    "a field": ('"two", "three"', '"two", "four"', "settings settings_more types"),
    "a field's value": ('more={"k": {"a", "b", "c"}}', 'more={"k": {"a", "b", "d"}}', "settings_more"),
    "a bound argument": ('words={"h", "i"}', 'words={"h", "j"}', "partial"),
    "a named tuple": ('{"x", "y"})\nclass Model', '{"x", "z"})\nclass Model', "types"),
    "a model's default": ('"t", "y"}', '"t", "u"}', "types model"),
    "a model's validator": ("abs(value)", "-abs(value)", "types model"),
    "a model's value": ('Model(words={"z", "y", "x"})', 'Model(words={"z", "y", "w"})', "model"),
}
CHANGES_OF_HELPERS = {
    "a called helper": ("return strip(text)", "return strip(text.lower())", "calls by_module chained"),
    "a helper's helper": ("text.strip()", "text.lstrip()", "calls by_module chained"),
    "a helper's constant": ("LIMIT = 3", "LIMIT = 4", "calls by_module chained"),
    "an imported table": ('{"p", "q", "r"}', '{"p", "q", "s"}', "nested"),
    "a module's array": ("arange(4.0)", "arange(5.0)", "by_module"),
    "a class that is used": ('"deepest"}', '"deep end"}', "class instance method"),
    "a helper that nothing uses": ("def unused(text): return text", "def unused(text): return None", ""),
}


def _replace_once(source: str, old: str, new: str) -> str:
    assert source.count(old) == 1, old
    return source.replace(old, new)


def test_a_real_change_changes_what_it_reaches_and_nothing_else(first: dict[str, str], tmp_path: Path) -> None:
    changes = {**CHANGES, **CHANGES_OF_HELPERS}
    versions = [(_replace_once(SCRIPT, old, new), HELPERS) for old, new, _ in CHANGES.values()]
    versions += [(SCRIPT, _replace_once(HELPERS, old, new)) for old, new, _ in CHANGES_OF_HELPERS.values()]
    for (change, (_, _, words)), after in zip(changes.items(), identities(tmp_path, "7", *versions), strict=True):
        reached = set(words.split())
        different = {name for name in first if first[name] != after[name]}
        assert (reached <= different) if change == EVERYWHERE else (reached == different), change


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
        | st.frozensets(st.text() | st.integers() | st.tuples(st.text(), st.integers()), max_size=4)
    ),
    max_leaves=8,
)


def with_value(value: object) -> str:
    return function_identity(lambda: value)


def rebuilt(value: object) -> object:
    """An equal value of other objects, its sets and dictionaries in the reverse order."""
    if isinstance(value, dict):
        return {key: rebuilt(inner) for key, inner in reversed(value.items())}
    if isinstance(value, list | tuple):
        return type(value)(rebuilt(inner) for inner in value)
    return frozenset(reversed(list(value))) if isinstance(value, frozenset) else value


@given(VALUES, VALUES)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_values_are_the_same_exactly_if_their_contents_and_types_are(value: object, another: object) -> None:
    assert with_value(value) == with_value(rebuilt(value))
    assert (with_value(value) == with_value(another)) == (with_types(value) == with_types(another))


def with_types(value: object) -> object:
    """The value with the types of its parts, so that 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return "dict", frozenset((with_types(key), with_types(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(map(with_types, value))
    if isinstance(value, frozenset):
        return "set", frozenset(map(with_types, value))
    return type(value).__name__, repr(value)


def test_a_value_that_refers_to_itself_and_one_that_cannot_be_pickled_have_an_identity() -> None:
    import threading

    looped: list[object] = [1]
    looped.append(looped)
    other: list[object] = [2]
    other.append(other)
    assert with_value(looped) != with_value(other)
    assert with_value(threading.Lock()) == with_value(threading.Lock())
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert len(with_value(deep)) == 64


def test_tensors_count_with_their_values() -> None:
    torch = pytest.importorskip("torch", reason="a test of tensors")
    values = [torch.zeros(3), torch.zeros(3).reshape(1, 3), torch.ones(3), torch.zeros(3, dtype=torch.bfloat16)]
    hashes = [with_value({"weights": value}) for value in values]
    assert len(set(hashes)) == len(hashes)
    assert hashes == [with_value({"weights": value.clone()}) for value in values]


STOP = {"a", "b", "c", "d"}


def stop(row: dict[str, str]) -> dict[str, bool]:
    return {"stop": row["w"] in STOP}


def test_a_pickled_payload_is_recognized_by_its_identity() -> None:
    payload = functions.described(stop, kind="row")
    assert payload["type"] == "cloudpickle" and payload["identity"] == function_identity(stop)
    repickled = packed({**payload, "source": "other bytes"})
    assert identity_of(packed(payload)) == identity_of(repickled)
    assert identity_of(packed(payload)) != identity_of(packed({**payload, "kwargs": {"n": 1}}))
    without = {name: value for name, value in payload.items() if name != "identity"}
    assert identity_of(packed(without)) != identity_of(repickled), "an older payload is compared by its bytes"
    lambda_payload = functions.described(lambda row: {"n": 1}, kind="row", serializer="cloudpickle")
    assert functions.mapper_of(lambda_payload).call({}) == {"n": 1}
