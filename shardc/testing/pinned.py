"""Random programs of the rule book, with layouts pinned at random.

A program is a line of values, each made by an operator of `shardc.testing.operators` of earlier ones; about half of them are
pinned (`shardc.constrain`), as are parameters and inputs, to any axes of the mesh: several on one dim, on dims that they do not
divide, on dims smaller than the axis. All ends in one loss, so that each operator is also run backwards, and in results.

    case = pinned_cases().example()
    case.check()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from shardc.mesh import Mesh
from shardc.spec import P
from shardc.testing.campaign import Case
from shardc.testing.operators import EXACT, REAL
from shardc.testing.strategies import AXES
from shardc.testing.training_program import TrainingProgram

SIZES = st.sampled_from([3, 2, 5, 4, 1, 6, 7])
LARGEST, DEEPEST = 400, 5
"""Elements and dims of a value at most."""
WIDE = 2.0**10
"""Exact values beyond this are clamped before they go on."""
BITS = 2.0**40
"""Exact values and gradients stay below this, and are multiples of its inverse times 2**52."""


@st.composite
def pins(draw: DrawFn, mesh: Mesh, dims: int) -> P:
    """Pins of a tensor: each axis on one of the dims, or on none; axes that meet in one dim nest in any order."""
    entries: list[list[str]] = [[] for _ in range(dims)]
    for axis in draw(st.permutations(mesh.names)):
        place = draw(st.integers(0, dims))
        if place < dims:
            entries[place].append(axis)
    return P(*(None if not e else e[0] if len(e) == 1 else tuple(e) for e in entries))


@st.composite
def wide_meshes(draw: DrawFn, max_axes: int, max_ranks: int) -> Mesh:
    """Meshes whose axes are rarely of size one."""
    axes: dict[str, int] = {}
    for name in draw(st.permutations(AXES[: draw(st.integers(1, max_axes))])):
        most = max_ranks // math.prod(axes.values())
        axes[name] = min(draw(st.sampled_from([2, 3, 4, 2, 3, 5, 1])), max(1, most))
    return Mesh(axes)


class Writer:
    """A program that is being written: its lines, and what they compute.

    Args:
        draw: Hypothesis' own.
        mesh: whose axes values are pinned to.
        exact: whole numbers (and halves) only.
    """

    def __init__(self, draw: DrawFn, mesh: Mesh, exact: bool) -> None:
        self.draw, self.mesh, self.exact = draw, mesh, exact
        self.init: list[str] = []
        self.lines: list[str] = []
        self.self = SimpleNamespace()
        self.values: dict[str, Tensor] = {}
        self.used: set[str] = set()
        self.space: dict[str, Any] = {"torch": torch, "F": F, "self": self.self, "numbers": numbers(exact)}

    # -- what operators ask for --------------------------------------------------------------------------------------------

    def choose(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def size(self) -> int:
        return self.draw(SIZES)

    def __getitem__(self, name: str) -> Tensor:
        """The value of a name, ``v3`` or ``self.w0``."""
        return self.values[name] if name in self.values else getattr(self.self, name.removeprefix("self."))

    def pick(self, where: Callable[[Tensor], bool] = lambda t: True, kind: str = "float") -> str | None:
        """An earlier value, the later the likelier; None if there is none like it."""
        found = [name for name, t in self.values.items() if kind_of(t) == kind and where(t)]
        if not found:
            return None
        return found[-1 - min(self.number(0, 3), len(found) - 1)]

    def fresh(self, *shape: int) -> str:
        """A new parameter."""
        return self._declare("w", f"nn.Parameter(numbers({len(self.init)}, {', '.join(map(str, shape))}))", shape)

    def partner(self, shape: tuple[int, ...]) -> str:
        """A value or parameter that broadcasts to `shape`: of its shape, or with dims of size one or left out."""
        if self.choose(True, False) and (old := self.pick(lambda t: fits(t.shape, shape))):
            return old
        short = shape[self.number(0, len(shape)) if self.number(0, 2) == 0 else 0 :]
        return self.fresh(*(1 if self.number(0, 3) == 3 else n for n in short))

    def like(self, *shape: int) -> str:
        """A value of this very shape, or a parameter."""
        if self.choose(True, False) and (old := self.pick(lambda t: tuple(t.shape) == shape)):
            return old
        return self.fresh(*shape)

    def index(self, below: int, *shape: int) -> str:
        """Whole numbers of 0 to `below` - 1: constants, a buffer, or made of an earlier value."""
        how = self.number(0, 2)
        if how and (old := self.pick(lambda t: tuple(t.shape) == shape, "int")):
            return f"{old}.remainder({below})"
        if how == 2 and self.exact and (old := self.pick(lambda t: tuple(t.shape) == shape)):
            return f"{old}.detach().long().remainder({below})"
        count = math.prod(shape)
        text = f"torch.tensor({[self.number(0, below - 1) for _ in range(count)]})"
        text = text if len(shape) == 1 else f"{text}.view({', '.join(map(str, shape))})"
        return self._declare("i", text, shape, buffer=True) if how else text

    def order(self, size: int) -> str:
        """A permutation of 0 to `size` - 1, or a part of one."""
        order = self.draw(st.permutations(range(size)))
        text = f"torch.tensor({list(order[: self.number(1, size)])})"
        return self._declare("i", text, (), buffer=True) if self.choose(True, False) else text

    def length(self, order: str) -> int:
        """Elements of what `order` gave."""
        return len(self[order]) if order.startswith("self.") else order.count(",") + 1

    def draw_order(self, items: list[Any]) -> list[Any]:
        return list(self.draw(st.permutations(items)))

    def mask(self, shape: tuple[int, ...]) -> str:
        """Booleans that broadcast to `shape`."""
        if old := self.pick(lambda t: fits(t.shape, shape), "bool"):
            return old
        if self.exact and self.choose(True, False):
            return f"({self.partner(shape)} > 0)"
        rest = [1 if self.number(0, 3) == 3 else n for n in shape]
        bits = [self.number(0, 1) for _ in range(math.prod(rest))]
        return self._declare("m", f"torch.tensor({bits}).bool().view({rest})", tuple(rest), buffer=True)

    # -- writing -----------------------------------------------------------------------------------------------------------

    def _declare(self, stem: str, text: str, shape: tuple[int, ...], buffer: bool = False) -> str:
        name = f"{stem}{len(self.init)}"
        self.init.append(f'self.register_buffer("{name}", {text})' if buffer else f"self.{name} = {text}")
        made = eval(text, {**self.space, "nn": torch.nn})
        setattr(self.self, name, made)
        return f"self.{name}"

    def write(self, text: str) -> bool:
        """Add what an expression gives, if it is small and tame; whether it was."""
        made = eval(text, {**self.space, **self.values})
        several = [made] if isinstance(made, Tensor) else [t for t in made]
        if not all(self._tame(t) for t in several):
            return False
        names = [f"v{len(self.values) + k}" for k in range(len(several))]
        self.lines.append(f"{', '.join(names)}{',' if len(names) == 1 and not isinstance(made, Tensor) else ''} = {text}")
        self.used |= {name for name in self.values if name in words(text)}
        for name, t in zip(names, several, strict=True):
            self.values[name] = t
        for name, t in zip(names, several, strict=True):
            if self.exact and t.is_floating_point() and t.numel() and t.detach().abs().max() > WIDE:
                self.write(f"{name}.clamp(-{self.size()}, 9)")
                self.used.add(name)
            elif self.number(0, 2):
                self.pin(name)
        return True

    def _tame(self, t: Tensor) -> bool:
        if not 0 < t.numel() <= LARGEST or t.dim() > DEEPEST:
            return False
        return not t.is_floating_point() or bool(t.isfinite().all() and t.abs().max() < (BITS if self.exact else 1e3))

    def pin(self, name: str) -> None:
        self.lines.append(f"{name} = shardc.constrain({name}, {self.draw(pins(self.mesh, self.values[name].dim()))!r})")

    def end(self) -> None:
        """The loss: all floating-point values that nothing else uses, each element with a weight of its own."""
        loose = [name for name, t in self.values.items() if name not in self.used]
        losses = [f"weigh({name})" for name in loose if self.values[name].requires_grad]
        losses += [] if losses else [f"weigh({self.fresh(3)})"]
        self.lines.append(f"loss = {' + '.join(losses)}")
        self.lines.append(f"return loss, {{{', '.join(f'{name!r}: {name}' for name in loose)}}}")


def kind_of(t: Tensor) -> str:
    return "float" if t.is_floating_point() else "bool" if t.dtype == torch.bool else "int"


def fits(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a shape broadcasts to another one."""
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))


def words(text: str) -> set[str]:
    return set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())


def numbers(exact: bool) -> Callable[..., Tensor]:
    """What ``numbers`` is in the program."""
    space: dict[str, Any] = {"torch": torch}
    exec(_NUMBERS[exact], space)
    return space["numbers"]  # type: ignore[no-any-return]


_NUMBERS = {
    True: """\
def numbers(seed, *shape):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()
""",
    False: """\
def numbers(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
""",
}

_TEMPLATE = '''\
import torch
import torch.nn.functional as F
from torch import nn

import shardc
from shardc import P


{numbers}

def weigh(v):
    """A sum in which each element has a weight of its own."""
    return (v * torch.arange(v.numel()).mul(7).remainder(5).sub(2).to(v.dtype).view(v.shape)).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {inputs}):
        {lines}


def make_state():
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr={lr})


def train_step(model, optimizer, {inputs}):
    optimizer.zero_grad()
    loss, results = model({inputs})
    loss.backward()
    optimizer.step()
    return loss, results


def make_batches():
    return [({batch})]
'''


def source(w: Writer, inputs: dict[str, str]) -> str:
    """The text of a program."""
    gap = "\n        "
    return _TEMPLATE.format(
        numbers=_NUMBERS[w.exact], init=gap.join(w.init), lines=gap.join(w.lines), inputs=", ".join(inputs),
        lr="1.0" if w.exact else "0.1", batch="".join(f"{text}, " for text in inputs.values()).rstrip(),
    )  # fmt: skip


@st.composite
def pinned_cases(
    draw: DrawFn, max_operators: int = 12, max_axes: int = 3, max_ranks: int = 12, among: Sequence[str] = ()
) -> Case:
    """Programs of up to `max_operators` operators on meshes of up to `max_axes` axes and `max_ranks` ranks.

    Args:
        among: names in the tables of `shardc.testing.operators` to choose from; all of them unless given.
    """
    mesh = draw(wide_meshes(max_axes, max_ranks))
    kind = draw(st.sampled_from(["exact", "real"]))
    w = Writer(draw, mesh, kind == "exact")
    inputs = {}
    for k, name in enumerate("xy"[: w.number(1, 2)]):
        shape = [w.size() for _ in range(w.number(1, 4))]
        inputs[name] = f"numbers({100 + k}, {', '.join(map(str, shape))})"
        w.values[name] = eval(inputs[name], w.space)
    table = {name: write for name, write in (EXACT if w.exact else REAL).items() if not among or name in among}
    w.write(f"{(first := w.pick())} * {w.partner(tuple(w[str(first)].shape))}")
    for _ in range(draw(st.integers(1, max_operators))):
        text = table[draw(st.sampled_from(sorted(table)))](w)
        if text is not None:
            w.write(text)
    w.end()
    if w.exact:
        assume(_is_exact(w))
    options: dict[str, Any] = {}
    if zero := w.choose(0, 0, 1, 2, 3):
        options["zero"] = zero
    if w.number(0, 5) == 5:
        options["recompute"] = "full"
    free = {name: draw(pins(mesh, w.values[name].dim())) for name in inputs if w.choose(True, False)}
    if free:
        options["inputs"] = free
    parameters = [line.split()[0].removeprefix("self.") for line in w.init if "Parameter" in line]
    own = Mesh({a: n for a, n in mesh.axes.items() if a != "dp"}) if len(mesh.names) > 1 and zero else mesh
    held = {name: draw(pins(own, w[f"self.{name}"].dim())) for name in parameters[:3] if w.choose(True, False)}
    if held:
        options["params"] = held
    return Case(kind, TrainingProgram(source(w, inputs)), dict(mesh.axes), options)


def _is_exact(w: Writer) -> bool:
    """Whether all values and gradients have few enough bits that no order of summation rounds."""
    last = w.lines[-2].removeprefix("loss = ")
    space = {**w.space, **w.values, "weigh": _weigh}
    values = [t for t in (*w.values.values(), *vars(w.self).values()) if t.is_floating_point()]
    wanted = [t for t in values if t.requires_grad]
    gradients = torch.autograd.grad(eval(last, space), wanted, allow_unused=True)
    both = [*values, *(g for g in gradients if g is not None)]
    return all(bool((t.abs().max() < BITS) and (t * 2.0**12 == (t * 2.0**12).round()).all()) for t in both)


def _weigh(v: Tensor) -> Tensor:
    return (v * torch.arange(v.numel()).mul(7).remainder(5).sub(2).to(v.dtype).view(v.shape)).sum()
