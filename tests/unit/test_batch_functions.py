"""Functions that are sent to workers: which are accepted, and that these run there."""

from __future__ import annotations

import asyncio
import base64
import gc
import importlib.util
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.payloads import load_mapper, serialize_function
from tinsmith import batch
from tinsmith.batch import shipping
from tinsmith.batch.client.functions import is_remote_function

HEAD = "from tinsmith.batch import remote_function\nimport json, typing\nfrom typing import Any\nX = 3\n"

# Name -> (the file, what the refusal names; None for accepted).
CASES: dict[str, tuple[str, str | None]] = {
    "global import": ("@remote_function\ndef gen():\n    return json.dumps(1)", "json"),
    "global constant": ("@remote_function\ndef gen():\n    return X", "X"),
    "global default": ("@remote_function\ndef gen(n=X):\n    return n", "X"),
    "extra decorator below": (
        "import functools\n@remote_function\n@functools.cache\ndef gen():\n    return 1",
        "functools.cache",
    ),
    "extra decorator above": (
        "import functools\n@functools.cache\n@remote_function\ndef gen():\n    return 1",
        "functools.cache",
    ),
    "closure over a variable": (
        "def outer():\n    secret = 1\n    @remote_function\n    def gen():\n        return secret\n    return gen\n"
        "gen = outer()",
        "secret",
    ),
    "closure over a function": (
        "def outer():\n    def helper(): return 1\n    @remote_function\n    def gen():\n        return helper()\n"
        "    return gen\ngen = outer()",
        "helper",
    ),
    "closure over a module": (
        "def outer():\n    import os\n    @remote_function\n    def gen():\n        return os.sep\n    return gen\n"
        "gen = outer()",
        "os",
    ),
    "closure over several": (
        "def outer():\n    a, b = 1, 2\n    @remote_function\n    def gen():\n        return a + b\n    return gen\n"
        "gen = outer()",
        "a, b",
    ),
    "decorator by name": ("@remote_function\ndef gen():\n    return 1", None),
    "decorator of a renamed module": (
        "import tinsmith.batch as sb\n@sb.remote_function\ndef gen():\n    return 1",
        None,
    ),
    "decorator with options": ("@remote_function(serializer='source')\ndef gen():\n    return 1", None),
    "return annotation": ("@remote_function\ndef gen() -> Any:\n    return 1", None),
    "argument annotation": ("@remote_function\ndef gen(n: typing.List[Any] = ()):\n    return 1", None),
    "tuple for-target": ("@remote_function\ndef gen():\n    for X, y in [(1, 2)]:\n        pass\n    return X", None),
    "tuple assignment": ("@remote_function\ndef gen():\n    X, y = 1, 2\n    return X", None),
    "comprehension variable": ("@remote_function\ndef gen():\n    return [X for X in range(2)]", None),
    "walrus": ("@remote_function\ndef gen():\n    if (X := 1):\n        return X", None),
    "with tuple": (
        "@remote_function\ndef gen():\n    import contextlib\n    with contextlib.nullcontext((1, 2)) as (X, y):\n"
        "        return X",
        None,
    ),
    "annotated assignment": ("@remote_function\ndef gen():\n    X: Any = 1\n    return X", None),
    "nested argument": ("@remote_function\ndef gen():\n    def f(X): return X\n    return f(1)", None),
    "lambda argument": ("@remote_function\ndef gen():\n    return (lambda X: X)(1)", None),
    "keyword-only argument": ("@remote_function\ndef gen(*, X=1):\n    return X", None),
    "star argument": ("@remote_function\ndef gen(*X):\n    return X", None),
    "match capture": ("@remote_function\ndef gen():\n    match 1:\n        case X:\n            return X", None),
    "global inside if": ("if True:\n    @remote_function\n    def gen():\n        return json.dumps(X)", "X, json"),
    "global inside a function": (
        "def outer():\n    @remote_function\n    def gen():\n        return X\n    return gen\ngen = outer()",
        "X",
    ),
    "multi-line text in an indented def": (
        'if True:\n    @remote_function\n    def gen():\n        return """a\nb\n  c"""',
        None,
    ),
    "undefined name": ("@remote_function\ndef gen():\n    return nowhere", "nowhere"),
    "global defined later": ("@remote_function\ndef gen():\n    return later()\ndef later(): return 1", "later"),
    "masked by a nested function's local": (
        "@remote_function\ndef gen():\n    def f():\n        X = 1\n        return X\n    return X",
        "X",
    ),
    "required parameter": ("@remote_function\ndef gen(n):\n    return n", "gen"),
    "method": ("class C:\n    @remote_function\n    def gen(self):\n        return 1\ngen = C.gen", "gen"),
    "bound method": ("class C:\n    def gen(self):\n        return 1\ngen = remote_function(C().gen)", "gen"),
    "lambda": ("gen = remote_function(lambda: 1)", "lambda"),
    "async": ("@remote_function\nasync def gen():\n    return 1", None),
    "generator": ("@remote_function\ndef gen():\n    yield 1", "generator"),
    "builtin overridden": ("def len(x): return 7\n@remote_function\ndef gen():\n    return len([])", "len"),
    "global assigned inside": ("@remote_function\ndef gen():\n    global X\n    X = 1\n    return X", None),
    "recursion": ("@remote_function\ndef gen(n=1):\n    return gen(0) if n else 1", None),
    "recursion inside a function": (
        "def outer():\n    @remote_function\n    def gen(n=1):\n        return gen(0) if n else 1\n"
        "    return gen\ngen = outer()",
        None,
    ),
    "inner class, def and import": (
        "@remote_function\ndef gen():\n    import json\n    class C:\n        y: int = 1\n"
        "        def f(self): return json.dumps(self.y)\n"
        "    def g(): return C().f()\n    return g()",
        None,
    ),
    "literal default": ("@remote_function\ndef gen(n=(1, 'a')):\n    return n", None),
    "our own names": (
        "from tinsmith import batch\nfrom tinsmith.batch import save_results\n@remote_function\ndef gen():\n"
        "    return [batch.load, save_results]",
        None,
    ),
}


def module_of(text: str, tmp_path: Path) -> ModuleType:
    path = tmp_path / "case.py"
    path.write_text(HEAD + text + "\n")
    spec = importlib.util.spec_from_file_location("case", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["case"] = module  # where inspect looks for the source of its classes
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CASES)
def test_a_function_is_accepted_exactly_if_it_can_run_alone(name: str, tmp_path: Path) -> None:
    text, refused = CASES[name]
    if refused is None:
        function = module_of(text, tmp_path).gen
        loaded = load_mapper(serialize_function(function)).call
        assert loaded.__name__ == "gen" and loaded is not function
        returned = loaded()
        assert (asyncio.run(returned) if asyncio.iscoroutine(returned) else returned) is not None
        return
    with pytest.raises(ValueError, match=refused):
        serialize_function(module_of(text, tmp_path).gen)


def test_external_names_are_refused_with_a_fix_for_each(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="references external variables") as refusal:
        module_of("@remote_function\ndef gen():\n    return json.dumps(X) + nowhere", tmp_path)
    text = str(refusal.value)
    for part in ("'gen'", "clean namespace", "To fix", "import it inside", "fn_kwargs={'X': 3}", "'nowhere' is not"):
        assert part in text


def test_the_decorator_marks_the_function_and_returns_it(tmp_path: Path) -> None:
    def plain() -> int:
        """Its words."""
        return 1

    marked = batch.remote_function(plain)
    assert marked is plain and is_remote_function(marked) and not is_remote_function(print)
    loaded = load_mapper(serialize_function(marked)).call
    assert (loaded.__name__, loaded.__doc__, loaded()) == ("plain", "Its words.", 1)


def test_text_in_an_indented_function_keeps_its_spaces(tmp_path: Path) -> None:
    function = module_of(CASES["multi-line text in an indented def"][0], tmp_path).gen
    assert load_mapper(serialize_function(function)).call() == "a\nb\n  c"


class SwitchThreads:
    """Garbage whose collection lets another thread run."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Path("/").stat()


def test_functions_are_described_in_several_threads_at_once() -> None:
    """Python before 3.11.8 and 3.12.2 cannot parse in two threads at once."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()

    def describe(_: int) -> str:
        SwitchThreads()
        return shipping.text_of(shipping.definition_of(shipping.definition_of))

    gc.set_threshold(10)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            texts = set(pool.map(describe, range(400)))
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    assert len(texts) == 1


def test_the_payload_is_readable_and_says_what_it_is() -> None:
    @batch.remote_function
    def gen(n: int = 1, word: str = "") -> str:
        return word * n

    data = payload_of(serialize_function(gen, kwargs={"n": 2, "word": "ab"}))
    assert (data["type"], data["name"], data["version"], data["kwargs"]) == (
        "source",
        "gen",
        "1.0",
        {"n": 2, "word": "ab"},
    )
    assert "def gen(" in data["source"] and data["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert not data["is_async"] and len(data["sha256"]) == 64


def payload_of(payload: str) -> dict[str, Any]:
    return json.loads(base64.b64decode(payload))


def packed(data: dict[str, Any]) -> str:
    return base64.b64encode(json.dumps(data).encode()).decode()


def test_a_required_parameter_is_accepted_where_it_is_given() -> None:
    @batch.remote_function
    def gen(n: int) -> int:
        return n

    mapper = load_mapper(serialize_function(gen, kwargs={"n": 5}))
    assert mapper.call(**mapper.kwargs) == 5
    for kwargs in ({}, {"n": 1, "m": 2}, {"n": {1, 2}}):
        with pytest.raises(ValueError, match="gen"):
            serialize_function(gen, kwargs=kwargs)


def test_payloads_that_are_not_ours_are_refused() -> None:
    @batch.remote_function
    def gen() -> int:
        return 1

    data = payload_of(serialize_function(gen))
    for changed, message in [
        ({}, "Unknown or missing serialization type"),
        ({"type": "pickle"}, "Unknown or missing serialization type"),
        ({**data, "source": data["source"] + "#"}, "changed after it was sent"),
        ({"type": "source", "name": "gen", "source": "def gen(:"}, "the source of 'gen' cannot be run"),
        ({"type": "source", "name": "gen", "source": "x = 1"}, "the source of 'gen' cannot be run"),
        ({**data, "provided": {"os": "os"}}, "not part of tinsmith.batch"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_mapper(packed(changed))
    with pytest.raises(ValueError, match="base64"):
        load_mapper("not base64!")


def test_a_function_without_a_source_is_refused_when_it_is_sent() -> None:
    namespace: dict[str, Any] = {"remote_function": batch.remote_function}
    exec("@remote_function\ndef gen():\n    return 1", namespace)
    with pytest.raises(TypeError, match="unable to retrieve source code"):
        serialize_function(namespace["gen"])
    with pytest.raises(TypeError, match="unable to retrieve source code"):
        serialize_function(print, serializer="source")


HELPERS = """
BASE = 10
def helper(n): return n + BASE
def shout(row): return {"n": helper(row["n"]), "text": json.dumps(row["n"])}
add = lambda row: {"n": helper(row["n"])}
class Adder:
    def __init__(self, by): self.by = by
    def __call__(self, row): return {"n": helper(row["n"]) + self.by}
    def method(self, row): return {"n": helper(row["n"])}
bound = Adder(1).method
"""


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("shout", {}, {"n": 15, "text": "5"}),
        ("add", {}, {"n": 15}),
        ("bound", {}, {"n": 15}),
        ("Adder", {"by": 100}, {"n": 115}),
    ],
)
def test_a_function_that_uses_its_module_is_pickled_with_it(
    name: str, kwargs: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    """It runs in a process that cannot import the module."""
    payload = serialize_function(getattr(module_of(HELPERS, tmp_path), name), kind="row", kwargs=kwargs)
    assert payload_of(payload)["type"] == "cloudpickle"
    load = "from tinsmith.batch.client.functions import mapper_of; from tinsmith.batch.types import unpack_payload"
    script = f"{load}; print(mapper_of(unpack_payload({payload!r})).instance()({{'n': 5}}))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/", check=False)
    assert ran.stdout == f"{expected}\n", ran.stderr


def test_a_function_that_cannot_be_sent_or_pickled_has_both_reasons(tmp_path: Path) -> None:
    module = module_of("import threading\nlock = threading.Lock()\ndef held(row):\n    return lock", tmp_path)
    with pytest.raises(ValueError, match=r"'lock' is a lock(.|\n)*cannot be pickled either") as refusal:
        serialize_function(module.held, kind="row")
    assert "external variables: lock" in str(refusal.value)


def test_a_pickled_function_needs_no_source_but_the_same_python() -> None:
    namespace: dict[str, Any] = {"remote_function": batch.remote_function, "X": 4}
    exec("@remote_function(serializer='cloudpickle')\ndef gen():\n    return X", namespace)
    payload = serialize_function(namespace["gen"])
    assert load_mapper(payload).call() == 4
    with pytest.raises(ValueError, match=r"Python 3\.0"):
        load_mapper(packed({**payload_of(payload), "python": "3.0"}))


def test_a_class_is_sent_with_its_constructor_arguments() -> None:
    class Shout:
        def __init__(self, mark: str = "!") -> None:
            self.mark = mark

        def __call__(self, rows: list[dict[str, str]]) -> list[dict[str, str]]:
            return [{"text": row["text"].upper() + self.mark} for row in rows]

    mapper = load_mapper(serialize_function(Shout, kind="batch", kwargs={"mark": "?"}))
    assert mapper.call(**mapper.kwargs)([{"text": "a"}]) == [{"text": "A?"}]


def test_a_class_that_needs_its_file_is_refused(tmp_path: Path) -> None:
    shout = module_of("class Shout:\n    def __call__(self, rows):\n        return X", tmp_path).Shout
    with pytest.raises(ValueError, match="X"):
        serialize_function(shout, kind="batch", serializer="source")


def test_a_traceback_of_a_mapper_shows_its_lines() -> None:
    @batch.remote_function
    def gen() -> float:
        zero = 0
        return 1 / zero

    import traceback

    try:
        load_mapper(serialize_function(gen)).call()
    except ZeroDivisionError:
        assert "return 1 / zero" in traceback.format_exc()


def test_a_function_of_a_script_without_this_file_runs_in_another_process() -> None:
    @batch.remote_function
    def gen() -> str:
        import os

        return os.sep * 3

    load = "from tinsmith.batch.client.functions import mapper_of; from tinsmith.batch.types import unpack_payload"
    script = f"{load}; print(mapper_of(unpack_payload({serialize_function(gen)!r})).call())"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "///\n"


def test_nothing_is_accepted_as_a_decorator_for_its_name_alone(tmp_path: Path) -> None:
    text = textwrap.dedent(
        """
        ours = remote_function
        def remote_function(f): return f
        @ours
        @remote_function
        def gen():
            return 1
        """
    )
    with pytest.raises(ValueError, match="decorator @remote_function"):
        module_of(text, tmp_path)


def test_only_functions_and_classes_can_be_marked() -> None:
    unmarkable: Callable[..., Any] = 5  # type: ignore[assignment]
    with pytest.raises(TypeError, match="int"):
        batch.remote_function(unmarkable)
    with pytest.raises(ValueError, match="serializer"):
        batch.remote_function(serializer="json")


def test_a_reader_is_shipped_by_the_rules_of_a_function(tmp_path: Path) -> None:
    """What its source lacks is refused with a fix for each name, whether it is of the file or of a function around."""
    text = """
from dataclasses import dataclass
from tinsmith import batch
def make():
    step = 2
    @dataclass
    class Odd(batch.InputReader):
        def __len__(self): return step + X
        def download_batch(self, start_idx, end_idx, cache_dir): return json.loads(nowhere)
    return Odd
"""
    reader = module_of(text, tmp_path).make()("rows")
    with pytest.raises(ValueError, match="class 'Odd' references external variables: X, nowhere, step") as refusal:
        reader.to_dict()
    for part in (
        "clean namespace",
        "X=3 is a constant",
        "step=2 is a constant",
        "'nowhere' is not",
        "installed package",
    ):
        assert part in str(refusal.value)


def test_a_changed_source_has_one_error_for_functions_and_readers(tmp_path: Path) -> None:
    text = "from dataclasses import dataclass\nfrom tinsmith import batch\n@dataclass\nclass Odd(batch.InputReader):\n"
    text += "    def __len__(self): return 1\n"
    text += "    def download_batch(self, start_idx, end_idx, cache_dir): return [json.loads('{}')]\n"
    text += "@remote_function\ndef gen(): return 1"
    module = module_of(text, tmp_path)
    reader, function = module.Odd("rows").to_dict(), payload_of(serialize_function(module.gen))
    assert batch.InputReader.from_dict(reader).download_batch(0, 0, "") == [{}]
    changed = "the source of '{}' was changed after it was sent"
    with pytest.raises(shipping.ShippedCodeError, match=changed.format("Odd")):
        batch.InputReader.from_dict({**reader, "_class_source": reader["_class_source"] + "#"})
    with pytest.raises(shipping.ShippedCodeError, match=changed.format("gen")):
        load_mapper(packed({**function, "source": function["source"] + "#"}))
