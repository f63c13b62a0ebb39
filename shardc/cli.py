"""The `shardc` command line.

shardc plan train.py --mesh dp=64 [the script's own arguments]     plan a script's training step without devices
shardc rules [PATTERN]                                             the factor rules
shardc rules --check [--op GLOB] [--json]                          their proof by execution, on our samples and torch's op_db
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardc.api
from shardc.errors import MeshError, PlanError, ShardcError
from shardc.mesh import Mesh


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 1: a shardc error, printed; 2: wrong usage."""
    parser = argparse.ArgumentParser(prog="shardc", description="A functional sharding compiler for PyTorch training steps.")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="plan a script's training step without running it", allow_abbrev=False)
    plan.add_argument("script", type=Path, help="a script that calls a step compiled by shardc; its own arguments may follow")
    plan.add_argument("--mesh", help='another mesh than the script\'s: "dp=64" or "dp=8,tp=8"')
    plan.add_argument("--device", help="cpu or cuda: the device to plan for")
    plan.add_argument("--profile", help="hardware profile for predictions, for example H100")
    plan.add_argument("--step", metavar="NAME", help="plan the step of this function; default: the first one that is called")
    plan.add_argument("--explain", metavar="NAME", help="explain one tensor instead of printing the page")
    plan.add_argument("--stage", metavar="PASS", help="print the program after this pass instead")
    plan.add_argument("--save", type=Path, metavar="FILE", help="also save the plan as JSON")
    plan.add_argument("--keep-values", action="store_true", help="build the modules with their values, not on the meta device")
    rules = commands.add_parser("rules", help="print the factor rules")
    rules.add_argument("pattern", nargs="?", default="*", help="operators to print, for example 'aten.mm*'")
    rules.add_argument("--check", action="store_true", help="prove the rules by execution, on torch's op_db too")
    rules.add_argument(
        "--op", metavar="GLOB", help="with --check: entries of op_db or operators, for example 'nn.functional.*'"
    )
    rules.add_argument("--json", action="store_true", help="with --check: print all findings as JSON, the summary last")
    args, rest = parser.parse_known_args(argv)
    if rest and args.command != "plan":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return _plan(args, [a for a in rest if a != "--"]) if args.command == "plan" else _rules(args)
    except ShardcError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `shardc plan train.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# ---------------------------------------------------------------------------------------------------------------------
# shardc plan
# ---------------------------------------------------------------------------------------------------------------------


class _PlanReady(BaseException):
    """Ends the script once its step is planned. Not an Exception, so that no handler of the script's takes it."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan


def parse_mesh(text: str, *, device: str | None = None, profile: str | None = None) -> Mesh:
    """``dp=8,tp=2`` -> Mesh.

    Raises:
        MeshError: not of that form.
    """
    axes: dict[str, int] = {}
    for part in text.replace(" ", ",").split(","):
        name, _, size = part.partition("=")
        if not size.lstrip("-").isdigit() or name in axes:
            raise MeshError(f"--mesh {text!r} is not a list of axes and sizes", hint='write "dp=64" or "dp=8,tp=8"')
        axes[name] = int(size)
    return Mesh(axes, device=device, profile=profile)


def _plan(args: argparse.Namespace, script_args: list[str]) -> int:
    if not args.script.is_file():
        raise PlanError(f"no script {args.script}", hint="the path of a Python file")

    def instead(step: Any, call_args: tuple[Any, ...], call_kwargs: dict[str, Any]) -> None:
        if args.step is not None and step.__name__ != args.step:
            raise PlanError(
                f"the script called {step.__name__!r} before {args.step!r}",
                where=str(args.script),
                hint="without --step the first compiled step that is called is planned",
            )
        changes: dict[str, Any] = {}
        if args.mesh is not None:
            changes["mesh"] = parse_mesh(args.mesh, device=args.device, profile=args.profile)
        elif args.device or args.profile:
            changes["mesh"] = Mesh(step.options.mesh.axes, device=args.device, profile=args.profile)
        call_args, call_kwargs = pytree.tree_map(_on_meta, (call_args, call_kwargs))
        raise _PlanReady(step.replan(**changes).lower(*call_args, **call_kwargs))

    plan = _run_until_planned(args.script, script_args, instead, on_meta=not args.keep_values)
    if args.save is not None:
        plan.save(args.save)
    if args.explain is not None:
        print(plan.explain(args.explain))
    elif args.stage is not None:
        if args.stage not in plan.stages:
            raise PlanError(f"no pass {args.stage!r}", hint=f"the passes are {', '.join(plan.stages)}")
        print(plan.stages[args.stage])
    else:
        print(plan)
    return 0


def _run_until_planned(script: Path, script_args: list[str], instead: Any, *, on_meta: bool) -> Any:
    """Run the script as __main__ until its step is called; returns the plan."""
    argv, path = sys.argv, list(sys.path)
    hooks = _build_on_meta() if on_meta else []
    try:
        sys.argv = [str(script), *script_args]
        sys.path.insert(0, str(script.resolve().parent))
        with shardc.api.dry_run(instead):
            runpy.run_path(str(script), run_name="__main__")
    except _PlanReady as ready:
        return ready.plan
    except SystemExit as end:
        raise PlanError(f"the script ended (exit code {end.code}) before it called a compiled step", where=str(script)) from end
    finally:
        sys.argv, sys.path[:] = argv, path
        for hook in hooks:
            hook.remove()
    raise PlanError(
        "the script ended without calling a compiled step", where=str(script), hint="is the call behind an if or an argument?"
    )


def _build_on_meta() -> list[Any]:
    """Parameters go to the meta device as modules register them, before they are initialised: no memory is touched.

    The script's other tensors stay real, since it may well look into its data.
    """
    known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # keeps the real one alive, so that its id stays its own

    def parameter(module: nn.Module, name: str, value: nn.Parameter | None) -> nn.Parameter | None:
        if value is None or value.device.type == "meta" or isinstance(value, nn.UninitializedParameter):
            return None
        if id(value) not in known:
            meta = nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
            meta.__dict__.update(value.__dict__)
            known[id(value)] = (value, meta)
        return known[id(value)][1]

    from torch.nn.modules.module import register_module_parameter_registration_hook

    return [register_module_parameter_registration_hook(parameter)]  # type: ignore[arg-type]


def _on_meta(x: Any) -> Any:
    """Inputs, and buffers of modules, whose values a plan does not depend on."""
    if isinstance(x, nn.Module):
        for module in x.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to("meta"))
    return x.to("meta") if isinstance(x, Tensor) else x


# ---------------------------------------------------------------------------------------------------------------------
# shardc rules
# ---------------------------------------------------------------------------------------------------------------------


def _rules(args: argparse.Namespace) -> int:
    from shardc import rules

    if args.check and (args.op or args.json or args.pattern == "*"):
        return _check_op_db(args.op or "*", as_json=args.json)
    table = {name: text for name, text in rules.table().items() if fnmatch.fnmatch(name, args.pattern)}
    if not table:
        raise PlanError(f"no rule for an operator like {args.pattern!r}", hint="'*' prints all of them")
    width = max(map(len, table))
    for name, text in table.items():
        print(f"{name:<{width}}  {text}")
    if not args.check:
        return 0
    failures = {name: found for name in table if (found := rules.prove(name))}
    for name, found in failures.items():
        print(f"{name}: {found}", file=sys.stderr)
    print(f"{len(table) - len(failures)} of {len(table)} rules hold")
    return int(bool(failures))


def _check_op_db(pattern: str, *, as_json: bool) -> int:
    """Our own samples, for backward and shardc's operators, then op_db. Exit code 1: a rule is false, or a bound is missed."""
    from shardc import rules
    from shardc.rules import opdb
    from shardc.rules.registry import BUILT_IN

    own = {name: found for name in BUILT_IN if fnmatch.fnmatch(name, pattern) and (found := rules.prove(name))}
    report = opdb.check(pattern, own)
    if not report.entries and not any(fnmatch.fnmatch(name, pattern) for name in BUILT_IN):
        raise PlanError(f"no entry of op_db and no operator like {pattern!r}", hint="'*' checks all of them")
    print(report.to_json() if as_json else report)
    return int(not report.holds)


if __name__ == "__main__":
    sys.exit(main())
