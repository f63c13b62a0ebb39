"""Where the code is: the module whose forward runs and the user's source line, read from the Python frames."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from types import CodeType

import torch
from torch.optim import Optimizer

_CALL = torch.nn.Module._call_impl.__code__
_SKIP = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(contextlib.__file__) + os.sep,
)
_STDLIB_SITE = sysconfig.get_paths()["purelib"] + os.sep


@dataclass(frozen=True)
class Place:
    """Path of the module whose forward runs ("" outside), the source line ``train.py:41``, and whether an optimizer steps."""

    module: str
    line: str
    optimizer: bool = False


@cache
def is_user_code(code: CodeType) -> bool:
    """Whether a code object belongs to the user or a model library: not to torch, shardc or the standard library."""
    name = code.co_filename
    if name.startswith(_SKIP[:2]) or name.startswith("<frozen"):
        return False
    return not name.startswith(_SKIP[2]) or name.startswith(_STDLIB_SITE)


@cache
def _is_optimizer_code(code: CodeType) -> bool:
    return code.co_name == "step" and code.co_filename.startswith(
        os.path.dirname(sys.modules[Optimizer.__module__].__file__ or "")
    )


@cache
def _file(code: CodeType) -> str:
    return os.path.basename(code.co_filename)


def place(module_names: dict[int, str]) -> Place:
    """Where the caller is now."""
    frame = sys._getframe(2)
    line, module, optimizer = "", "", False
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            if not module:
                module = module_names.get(id(frame.f_locals.get("self")), "")
        elif not line and is_user_code(code):
            line = f"{_file(code)}:{frame.f_lineno}"
        elif not optimizer and not module and (_is_optimizer_code(code) or isinstance_step(frame)):
            optimizer = True
        if module and line:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return Place(module, line, optimizer)


def isinstance_step(frame: object) -> bool:
    """Whether a frame is the wrapper that every optimizer's `step` runs in, torch's own or the user's."""
    return frame.f_code is _PROFILE  # type: ignore[attr-defined]


def _profile_code() -> CodeType:
    inner = Optimizer.profile_hook_step(lambda self: None)
    return inner.__code__


_PROFILE = _profile_code()
