"""``float(t)`` in the step's own code stays a number of the step, as ``t.item()`` does: Python insists on a plain float from a
call of its builtin, and a plain float could only be had by deciding on the exact value."""

from __future__ import annotations

import dis
import sys
import types
from typing import Any

import torch
from torch import Tensor

from shardc._torch import is_traced
from shardc.capture.numbers import is_symbol

NAME = "__shardc_float__"
"""The name under which `as_float` stands in copied globals."""


def as_float(x: Any = 0.0) -> Any:
    """``float(x)``; of a value of the step, a number that has no value yet."""
    if isinstance(x, Tensor) and is_traced(x) and x.numel() == 1 and not x.is_complex():
        x = x.item()
    if is_symbol(x) and x.node.pytype is not bool:
        return torch.sym_float(x)  # type: ignore[no-untyped-call]
    return float(x)


def calls_float(code: types.CodeType) -> bool:
    """Whether a code object, or one inside of it, calls the builtin ``float`` and uses that name for nothing else."""
    return renamed(code) is not code


def renamed(code: types.CodeType) -> types.CodeType:
    """The code with ``float(x)`` calling `NAME`; the code itself where nothing is to be changed."""
    consts = tuple(renamed(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    if any(a is not b for a, b in zip(consts, code.co_consts, strict=True)):
        code = code.replace(co_consts=consts)
    if "float" not in code.co_names or sys.version_info < (3, 11):
        return code
    for at in dis.get_instructions(code):
        called = at.opname == "LOAD_GLOBAL" and at.arg is not None and at.arg & 1  # a NULL for the call is pushed with it
        named = at.argval == "float" and at.opname not in ("LOAD_CONST", "KW_NAMES", "LOAD_FAST", "STORE_FAST", "LOAD_DEREF")
        if named and not called:
            return code
    return code.replace(co_names=tuple(NAME if n == "float" else n for n in code.co_names))
