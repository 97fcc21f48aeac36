"""Triton kernels on a CPU. tests/conftest.py turns Triton's interpreter on before anything imports Triton; importing this
module corrects the interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter

_patch_tensor, _dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot


def _patch(tensor: type, scope: interpreter._LangPatchScope) -> None:
    """Bounds of loops are arrays of one element, which NumPy 2.4 no longer converts to indices."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _product(self: Any, a: Any, b: Any, *rest: Any) -> Any:  # noqa: ANN401
    """bfloat16 is kept as 16-bit integers, whose product would be one of integers."""
    return _dot(self, *(self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *rest)


interpreter._patch_lang_tensor = _patch
interpreter.InterpreterBuilder.create_dot = _product
