"""A random (program, mesh, options) that must equal one device, and its text.

    case = cases().example()
    case.check()            # raises what is wrong
    print(case.script())    # a file that does the same

The draws of `cases` depend on Hypothesis' seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from shardc.errors import PlanError
from shardc.mesh import Mesh
from shardc.testing import strategies as sh
from shardc.testing.check import Report, check
from shardc.testing.compare import RTOL
from shardc.testing.training_program import TrainingProgram

KINDS = ("real", "real", "real", "exact", "dropout")
"""real: any operators, equal within rounding. exact: integers, equal in every bit. dropout: with random numbers, whose values
and generator must be those of one device."""


@dataclass(frozen=True)
class Case:
    """A training step and how to compile it.

    Args:
        kind: one of `KINDS`.
        program: the step, its state and its batches.
        mesh: axis -> size; simulated.
        options: of `shardc.compile`, besides the mesh.
    """

    kind: str
    program: TrainingProgram
    mesh: dict[str, int]
    options: dict[str, Any]

    def check(self) -> Report:
        """Run it on one device and compiled. A step that refuses microbatches, since its rows depend on each other, is compared
        without them.

        Raises:
            Mismatch: the two differ.
            ShardcError: it does not compile.
        """
        p, rtol = self.program, 0.0 if self.kind == "exact" else RTOL
        try:
            return check(p.train_step, p.make_state, p.batches, rtol=rtol, mesh=self.mesh, **self.options)
        except PlanError as error:
            if not error.what.startswith("microbatches="):
                raise
        return self.whole_batch().check()

    def whole_batch(self) -> Case:
        """The same without microbatches."""
        return replace(self, options={name: value for name, value in self.options.items() if name != "microbatches"})

    def script(self) -> str:
        """A Python file that runs the same comparison."""
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        rtol = ", rtol=0.0" if self.kind == "exact" else ""
        head = "from shardc import P\nfrom shardc.testing import check\n"
        call = f"print(check(train_step, make_state, make_batches(){rtol}, mesh={self.mesh!r}{options}))\n"
        return f"{head}{self.program.source}\n\n{call}"

    __repr__ = script


@st.composite
def cases(draw: DrawFn, max_layers: int = 4, max_axes: int = 3, max_ranks: int = 12) -> Case:
    """Programs of `strategies.programs` on meshes of up to `max_axes` axes and `max_ranks` ranks."""
    kind = draw(st.sampled_from(KINDS))
    program = draw(sh.programs(max_layers=max_layers, exact=kind == "exact", dropout=kind == "dropout"))
    mesh = draw(sh.meshes(max_axes=max_axes, max_ranks=max_ranks))
    options = draw(sh.options(Mesh(mesh.axes), program))
    del options["mesh"]
    return Case(kind, program, dict(mesh.axes), options)


def check_draws(drawn: st.SearchStrategy[Case], number: int, piece: int, shrink: bool = True) -> int:
    """Check `number` cases drawn with the seed `piece`; what fails is made small and printed as a script.

    Returns:
        How many of them were different.
    """
    seen: set[str] = set()
    phases = [Phase.generate, *([Phase.shrink] if shrink else [])]

    @seed(piece)
    @settings(max_examples=number, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck))
    @given(drawn)
    def draws(case: Case) -> None:
        text = case.script()
        if text not in seen:  # small cases are drawn more than once; a failing one must fail each time it is tried
            case.check()
            seen.add(text)

    draws()
    return len(seen)
