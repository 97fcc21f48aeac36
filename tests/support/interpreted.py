"""Triton kernels on a CPU. tests/conftest.py turns Triton's interpreter on before anything imports Triton; this module
corrects the interpreter.
"""

# ruff: noqa: ANN401 - Triton's interpreter is not typed

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


def _product(
    self: Any,
    a: Any,
    b: Any,
    d: Any,
    input_precision: Any,
    max_num_imprecise_acc: Any,
) -> Any:
    """bfloat16 is kept as 16-bit integers, whose product would be one of integers."""
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _dot(self, a, b, d, input_precision, max_num_imprecise_acc)


interpreter._patch_lang_tensor = _patch
interpreter.InterpreterBuilder.create_dot = _product
