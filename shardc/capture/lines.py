"""Where the code is: the module whose forward runs and the user's source line, read from the Python frames."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from types import CodeType

import torch
from torch.optim import Optimizer

from shardc import _torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_CONVERSIONS = os.path.join(_TORCH, "__init__.py")  # where bool(), int() and float() of symbols are
_SYMBOLS = os.path.join(_TORCH, "fx", "experimental", "")
_SHARDC = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = os.path.dirname(contextlib.__file__) + os.sep
_SITE = sysconfig.get_paths()["purelib"] + os.sep
_CALL = torch.nn.Module._call_impl.__code__
_STEP: CodeType = Optimizer.profile_hook_step(lambda self: None).__code__  # what every optimizer's `step` is wrapped in


@dataclass(frozen=True)
class Place:
    """Where an operator was called.

    Args:
        module: path of the module whose forward runs, "" outside of one.
        line: the user's source line, ``train.py:41``.
        optimizer: whether an optimizer steps.
        seeding: whether a backward is being started (the gradient of the loss is made).
    """

    module: str
    line: str
    optimizer: bool = False
    seeding: bool = False


def is_user_code(code: CodeType) -> bool:
    """Whether a code object belongs to the user or a model library: not to torch, shardc or the standard library."""
    name = code.co_filename
    if name.startswith((_TORCH, _SHARDC, "<frozen")):
        return False
    return not name.startswith(_STDLIB) or name.startswith(_SITE)


def asks_itself() -> bool:
    """Whether the user's code, and no function of torch's that it called, is at work: it converts a symbol
    (``bool(size > 3)``), and nothing else stands between the caller and it."""
    frame = sys._getframe(1)
    converts = False
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _CONVERSIONS:
            converts = True
        elif converts or not name.startswith((_SHARDC, _SYMBOLS)):
            return converts and is_user_code(frame.f_code)
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Frames:
    """Reads the stack of the caller; remembers what it found out about code objects.

    Args:
        modules: id of a module -> its path.
    """

    def __init__(self, modules: dict[int, str]) -> None:
        self.modules = modules
        self._files: dict[CodeType, str] = {}

    def _file(self, code: CodeType) -> str:
        """Short name of the file of user code; "" for other code."""
        name = self._files.get(code)
        if name is None:
            name = self._files[code] = os.path.basename(code.co_filename) if is_user_code(code) else ""
        return name

    def text(self) -> str:
        """What the user's line says, for messages: a condition without its ``if``."""
        frame = sys._getframe(1)
        while frame is not None:
            if self._file(frame.f_code):
                text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
                words = text.removesuffix(":").split(maxsplit=1)
                return words[1] if len(words) == 2 and words[0] in ("if", "elif", "while") else text
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def place(self) -> Place:
        """Where the caller is now."""
        frame = sys._getframe(1)
        line, module, optimizer, seeding = "", "", False, False
        while frame is not None:
            code = frame.f_code
            if code is _CALL:
                module = module or self.modules.get(id(frame.f_locals.get("self")), "")
            elif not line and (file := self._file(code)):
                line = f"{file}:{frame.f_lineno}"
            elif code is _STEP:
                optimizer = optimizer or not module
            elif code is _torch.MAKE_GRADS:
                seeding = True
            if module and line:
                break
            frame = frame.f_back  # type: ignore[assignment]
        return Place(module, line, optimizer, seeding)
