"""The identity of a function that is pickled: equal for a script that is run again, different after a real change.

A pickle holds line numbers, and sets in an order that differs between processes, so its bytes say nothing. The identity
is a SHA-256 of what the function is and of everything of the user's program that it reaches:

- a function: its bytecode without lines and files, constants, names, defaults, values in its closure, and the globals
  that its code names; of the user's modules, the attributes that its code names;
- a class: its bases and attributes; an object: its class and the state that a pickle of it would have; sets and
  dictionaries in an order that depends on their contents only;
- what workers have themselves (builtins, the standard library, installed packages, tinsmith): its name. A new version
  of a package does not change the identity.

Code that refers to itself, directly or through others, is visited once. A value that cannot be described so counts with
its pickled bytes, so an identity may differ between two runs if these do; one that cannot be pickled counts with its
type. Bytecode belongs to a minor version of Python, and so does the identity, as does the pickle.
"""

from __future__ import annotations

import copyreg
import dataclasses
import dis
import functools
import hashlib
import site
import sys
import sysconfig
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, cast

MARKER_ATTRIBUTES = frozenset({"_is_remote_function", "_serializer"})
"""Attributes that `remote_function` sets."""
UNSTABLE_ATTRIBUTES = frozenset(
    {
        *("__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__dict__"),
        *("__firstlineno__", "__module__", "__signature__", "__static_attributes__", "__weakref__", "_abc_impl"),
    }
)
"""Attributes of a class that say where it stands, or that Python derives from the others."""
PYDANTIC = "__pydantic_"
PYDANTIC_FIELDS, PYDANTIC_DECORATORS = "__pydantic_fields__", "__pydantic_decorators__"
"""The attributes of pydantic's classes from which it derives the others, some of which hold addresses."""
GLOBAL_NAMES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"})
ATTRIBUTE_NAMES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR", "DELETE_ATTR"})
DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
OWN_MAIN = "__main__"


def function_identity(function: object) -> str:
    """The identity of a function, class or other callable, which can be pickled. Runs what a pickle of it runs."""
    try:
        return _Digester().digest_of(function).hex()
    except RecursionError:  # a value is nested too deeply
        return _digest_of_pickle(function).hex()


def is_own_module(module: object) -> bool:
    """Whether a module belongs to the user's program, and not to an installed package or the standard library."""
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    if not isinstance(module, types.ModuleType) or not isinstance(file, str) or sys.modules.get(name) is not module:
        return False
    return name.partition(".")[0] not in ("tinsmith", OWN_MAIN) and not file.startswith(_library_directories())


@cache
def _library_directories() -> tuple[str, ...]:
    """The directories of the interpreter's own modules and packages."""
    paths = sysconfig.get_paths()
    return (*(paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages())


def _is_own(definition: object) -> bool:
    """Whether a function or class is defined in the user's program."""
    name = getattr(definition, "__module__", None)
    return name is None or name == OWN_MAIN or name not in sys.modules or is_own_module(sys.modules[name])


def _reference(definition: Any) -> str | None:  # noqa: ANN401
    """The name under which a worker imports a function or class; None if it has none there."""
    module, name = getattr(definition, "__module__", None), getattr(definition, "__qualname__", None)
    if module is None or name is None or _is_own(definition):
        return None
    value: object = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return f"{module}:{name}" if value is definition else None


def _digest(kind: str, *parts: bytes | str) -> bytes:
    """The digest of parts with their lengths, so that no two lists of parts have the same bytes."""
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.digest()


class _Digester:
    """Computes digests of objects that depend on nothing but their contents."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[object, bytes]] = {}
        """The digests by the object's id, with the object, so that no other object gets its id."""
        self._stack: dict[int, int] = {}
        """The depth of each object that is being visited, by id."""

    def digest_of(self, value: object) -> bytes:
        atom = _atom(value)
        if atom is not None:
            return atom
        if id(value) in self._stack:
            return _digest("within", str(self._stack[id(value)]))
        if id(value) in self._digests:
            return self._digests[id(value)][1]
        self._stack[id(value)] = len(self._stack)
        try:
            digest = self._visit(value)
        finally:
            del self._stack[id(value)]
        if not isinstance(value, tuple | list | dict | set | frozenset):
            self._digests[id(value)] = value, digest
        return digest

    def _visit(self, value: object) -> bytes:
        kind = type(value)
        if kind in (tuple, list):
            return self._sequence(kind.__name__, cast(Iterable[object], value))
        if kind is dict:
            return self._mapping("dict", cast(dict[object, object], value))
        if isinstance(value, set | frozenset):
            elements = sorted(map(_digest_alone, value))
            return _digest("set", self.digest_of(kind), *elements, self.digest_of(getattr(value, "__dict__", None)))
        if isinstance(value, types.MappingProxyType):
            return self._mapping("mappingproxy", value)
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            return _digest("module", value.__name__)
        return self._wrapper(value) or self._tensor(value) or self._object(value)

    def _sequence(self, kind: str, values: Iterable[object]) -> bytes:
        return _digest(kind, *map(self.digest_of, values))

    def _mapping(self, kind: str, values: Mapping[Any, object]) -> bytes:
        pairs = sorted(((_digest_alone(key), value) for key, value in values.items()), key=lambda pair: pair[0])
        return _digest(kind, *(part for key, value in pairs for part in (key, self.digest_of(value))))

    def _code(self, code: types.CodeType) -> bytes:
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return _digest(
            "code",
            code.co_code,
            code.co_exceptiontable,
            *map(self.digest_of, (counts, names)),
            *map(self.digest_of, code.co_consts),
        )

    def _function(self, function: types.FunctionType) -> bytes:
        reference = _reference(function)
        if reference is not None:
            return _digest("reference", reference)
        code = function.__code__
        attributes = set(_names(code, ATTRIBUTE_NAMES))
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        closure = {name: _cell_content(cell) for name, cell in cells}
        used: dict[str, object] = {}
        if _is_own(function):  # the globals of a package are the package's
            names = sorted(set(_names(code, GLOBAL_NAMES)) & function.__globals__.keys())
            used = {name: function.__globals__[name] for name in names}
        extra = {name: value for name, value in function.__dict__.items() if name not in MARKER_ATTRIBUTES}
        return _digest(
            "function",
            self.digest_of(code),
            self.digest_of(function.__defaults__),
            self.digest_of(function.__kwdefaults__),
            self._digest_by_name(closure, attributes),
            self._digest_by_name(used, attributes),
            self.digest_of(extra),
        )

    def _digest_by_name(self, values: Mapping[str, object], attributes: set[str]) -> bytes:
        """The digest of values that code uses by name; of the user's modules, of the attributes that it names."""
        parts: list[bytes | str] = []
        for name in sorted(values):
            value = values[name]
            if is_own_module(value) and id(value) not in self._stack:
                inside = {attribute: vars(value)[attribute] for attribute in attributes & vars(value).keys()}
                self._stack[id(value)] = len(self._stack)
                parts += [name, "module", self._digest_by_name(inside, attributes)]
                del self._stack[id(value)]
            else:
                parts += [name, "value", self.digest_of(value)]
        return _digest("named", *parts)

    def _class(self, value: type) -> bytes:
        reference = _reference(value)
        if reference is not None:
            return _digest("reference", reference)
        skipped = UNSTABLE_ATTRIBUTES | ({"__doc__"} if "__dataclass_fields__" in vars(value) else set())
        attributes = {
            name: attribute
            for name, attribute in vars(value).items()
            if name not in skipped and (not name.startswith(PYDANTIC) or name == PYDANTIC_FIELDS)
        }
        if (decorators := vars(value).get(PYDANTIC_DECORATORS)) is not None:
            attributes[PYDANTIC_DECORATORS] = {
                kind.name: {name: decorator.info for name, decorator in getattr(decorators, kind.name).items()}
                for kind in dataclasses.fields(decorators)
            }
        bases = self._sequence("bases", value.__bases__)
        return _digest("class", value.__qualname__, bases, self.digest_of(type(value)), self.digest_of(attributes))

    def _wrapper(self, value: object) -> bytes | None:
        """The digest of a value that holds functions, or is a part of a class; None for any other value."""
        match value:
            case types.MethodType():
                return self._sequence("method", (value.__self__, value.__func__))
            case functools.partial():
                return self._sequence("partial", (type(value), value.func, value.args, value.keywords))
            case classmethod() | staticmethod():
                return self._sequence(type(value).__name__, (value.__func__,))
            case property():
                return self._sequence("property", (type(value), value.fget, value.fset, value.fdel))
            case functools.cached_property():
                return self._sequence("cached_property", (value.func, value.attrname))
            case types.BuiltinFunctionType():
                holder = value.__self__
                name = holder.__name__ if isinstance(holder, types.ModuleType) else self.digest_of(holder)
                return _digest("builtin", name, value.__qualname__)
            case types.CellType():
                return self._sequence("cell", (_cell_content(value),))
        if isinstance(value, DESCRIPTORS):
            return _digest("descriptor", value.__name__)
        return None

    def _tensor(self, value: Any) -> bytes | None:  # noqa: ANN401
        """The digest of a tensor, whose pickle holds addresses; None for any other value."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return None
        try:
            tensor = value.detach().cpu().contiguous()
            data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        except (RuntimeError, NotImplementedError, TypeError):  # a sparse one, or one without values
            return _digest_of_pickle(value)
        parts = (type(value), str(tensor.dtype), tuple(tensor.shape), value.requires_grad)
        return _digest("tensor", *map(self.digest_of, parts), data)

    def _object(self, value: Any) -> bytes:  # noqa: ANN401
        """Describe an object by the parts from which a pickle would make it again."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            parts = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001  of the value's own methods
            return _digest_of_pickle(value)
        if isinstance(parts, str):
            wrapped = self.digest_of(getattr(value, "__wrapped__", None))
            return _digest("named object", getattr(value, "__module__", None) or "", parts, wrapped)
        call, arguments, state, items, pairs, *_ = (*parts, None, None, None, None)
        entries = _digest("no pairs")
        if pairs is not None:
            content = list(pairs)
            is_ordered = isinstance(value, OrderedDict)
            entries = self._sequence("ordered", content) if is_ordered else self._mapping("pairs", dict(content))
        elements = self._sequence("items", items or ())
        return _digest("object", *map(self.digest_of, (call, arguments, state)), elements, entries)


def _atom(value: object) -> bytes | None:
    """The digest of a value that holds no others; None for any other value."""
    kind = type(value)
    if kind is str or kind is bytes:
        return _digest(kind.__name__, cast("str | bytes", value))
    if value is None or value is Ellipsis or value is NotImplemented or kind in (bool, int, float, complex, range):
        return _digest(kind.__name__, repr(value))
    if kind is bytearray:
        return _digest("bytearray", bytes(cast(bytearray, value)))
    return None


def _digest_alone(value: object) -> bytes:
    """The digest of an element or key, whatever was visited before it: elements are sorted by their digests."""
    return _atom(value) or _Digester().digest_of(value)


def _cell_content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return "<an empty cell>"


def _names(code: types.CodeType, instructions: frozenset[str]) -> Iterator[str]:
    """The names in these instructions of a function, and of the functions inside it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in instructions and isinstance(instruction.argval, str):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant, instructions)


def _digest_of_pickle(value: object) -> bytes:
    import cloudpickle

    try:
        return _digest("pickle", cloudpickle.dumps(value))
    except Exception:  # noqa: BLE001  of the value's own methods
        return _digest("type", f"{type(value).__module__}.{type(value).__qualname__}")
