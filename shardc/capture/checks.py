"""What is refused before and during the trace, in words that name the tensor and the line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from torch import Tensor

from shardc import _torch
from shardc._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from shardc.capture.lines import is_user_code
from shardc.capture.loss_scale import NAME as LOSS_SCALE
from shardc.capture.world import World
from shardc.errors import CaptureError, ShardcError
from shardc.program import SlotKind

_SYMBOLS = ("SymFloat", "SymInt", "SymBool")


def check_storages_and_devices(world: World) -> None:
    """State must lie on one device and tensors must not overlap.

    Raises:
        CaptureError: two tensors share memory, or modules or inputs lie on several devices.
    """
    for kinds, what in (((SlotKind.PARAMETER, SlotKind.BUFFER), "modules"), ((), "inputs")):
        tensors = {p: s.get() for p, s in world.slots.items() if s.kind in kinds} if kinds else dict(world.inputs)
        first: dict[str, str] = {}
        for path, t in tensors.items():
            if not path.startswith(LOSS_SCALE):  # which is put beside the model by the first call
                first.setdefault(str(t.device), path)
        if len(first) > 1:
            (d0, p0), (d1, p1) = list(first.items())[:2]
            raise CaptureError(
                f"the {what} lie on several devices: {p0} on {d0}, {p1} on {d1}", where=p1, hint="move all to one"
            )
    of: dict[str, tuple[str, int]] = {}
    for name, optimizer in world.optimizers.items():
        for group in optimizer.param_groups:  # one that wraps another may share its groups
            for path in (world.tensors[id(p)] for p in group["params"]):
                first_name, first_group = of.setdefault(path, (name, id(group)))
                if first_name != name and first_group != id(group):
                    raise CaptureError(
                        f"two optimizers, {first_name} and {name}, update {path}", where=path, hint="give it to one"
                    )
    seen: dict[int, list[tuple[int, int, str]]] = {}
    for path, t in [*((p, s.get()) for p, s in world.slots.items()), *world.inputs.items()]:
        if t.numel() == 0 or hasattr(t, "placements"):
            continue
        start, stop = _extent(t)
        spans = seen.setdefault(_torch.storage_id(t), [])
        for a, b, other in spans:
            if start < b and a < stop and (path in world.slots or other in world.slots):
                raise CaptureError(f"{path} and {other} are views of the same memory", where=path, hint="clone one of them")
        spans.append((start, stop, path))


def _extent(t: Tensor) -> tuple[int, int]:
    start = int(t.storage_offset()) * t.element_size()
    last = sum(int(n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * t.element_size()


@contextlib.contextmanager
def refusals(module_names: dict[int, str]) -> Iterator[None]:
    """Errors of torch that mean "this cannot be traced" become `CaptureError`s with the user's line; others pass."""
    try:
        yield
    except ShardcError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(
            f"the size or value of a result depends on data ({error.func})", where=user_line(error),
            hint="use a mask (torch.where) instead of selecting a data-dependent number of elements",
        ) from error  # fmt: skip
    except UnsupportedOperatorException as error:
        raise CaptureError(f"torch has no shape function for {error.func}", where=user_line(error)) from error
    except TypeError as error:
        if any(name in str(error) for name in _SYMBOLS):
            raise CaptureError(
                f"a number that has no value yet is formatted or handed to code that needs a plain number ({error})",
                where=user_line(error), hint="return it from the step and use it outside",
            ) from error  # fmt: skip
        raise
    except (RuntimeError, NotImplementedError, AssertionError, AttributeError) as error:
        text = str(error)
        if any(
            w in text for w in ("FunctionalTensor", "FakeTensor", "fake tensor", "data pointer", "Functionalize", "numpy()")
        ):
            raise CaptureError(
                f"the step does something that cannot be traced: {text.splitlines()[0]}", where=user_line(error)
            ) from error
        raise


def user_line(error: BaseException) -> str:
    """Innermost line of the user's in an error's traceback."""
    line, tb = "", error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        if is_user_code(code):
            line = f"{os.path.basename(code.co_filename)}:{tb.tb_lineno}"
        tb = tb.tb_next
    return line
