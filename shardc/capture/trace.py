"""One trace of the step over its twin: from the user's function to a `Program`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from shardc import _torch, ops
from shardc._torch import FakeTensorMode, FunctionalTensor, FunctionalTensorMode
from shardc.capture.captured import Captured
from shardc.capture.checks import check_storages_and_devices, refusals
from shardc.capture.compare import Carry, after
from shardc.capture.effects import Effects, Scheduled
from shardc.capture.floats import as_float
from shardc.capture.loss_scale import Scaled
from shardc.capture.numbers import Number, is_symbol, symbol
from shardc.capture.outputs import module_outputs
from shardc.capture.precision import compute_in
from shardc.capture.recorder import Recorder
from shardc.capture.results import flatten
from shardc.capture.scaling import Scaling
from shardc.capture.sparse import SparseGradients
from shardc.capture.surroundings import host_random, optimizers, schedulers
from shardc.capture.twin import Twin
from shardc.capture.walk import GRAPH
from shardc.capture.watch import Watch
from shardc.capture.world import World, write
from shardc.errors import CaptureError
from shardc.program import Program, Slot, SlotKind, TensorType

Decide = Callable[[Program, fx.Node, dict[str, Tensor], str], float | int | bool]
"""(program so far, a number of it, its constants, the user's line) -> the number's value in the call being captured. The
program has no exits and results yet; its graph grows from one decision to the next."""


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    world: World,
    input_types: dict[str, TensorType] | None = None,
    device: str = "cpu",
    decide: Decide | None = None,
    known: Sequence[float | int | bool] = (),
    precision: str | None = None,
) -> Captured:
    """Trace one call of the step; nothing of the user's is changed, no tensor is computed or allocated.

    Args:
        fn: the step.
        args: its positional arguments, real or meta tensors, DTensors where state is sharded.
        kwargs: its keyword arguments.
        world: `observe(fn, args, kwargs)`. Plain numbers that the step changes (counters) become numbers of it.
        device: kind of device that the program will run on; the trace is the same for all but for autocast.
        input_types: global types of inputs of which the arguments hold a part.
        decide: gives the value of a number on which Python decides, from the program so far; see `Decide`.
        known: the first decisions of this call, in order, where they are known: they are not asked for.
        precision: "bf16" or "fp16": what forward and backward compute in (see `shardc.capture.precision`).

    Raises:
        CaptureError: the step does something that a program cannot hold; names what and the line.
    """
    check_storages_and_devices(world)
    carried: frozenset[str] = frozenset()
    decided = list(known)
    while True:
        try:
            trace = Trace(fn, args, kwargs, world, input_types or {}, device, decide, decided, precision)
            try:
                found = trace.run()
            finally:
                trace.release()
        except Carry as more:
            carried |= more.paths
            world.carry(carried)
        else:
            return replace(found, carried=carried)


class Trace:
    """One trace; see `capture`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        world: World,
        input_types: dict[str, TensorType],
        device: str,
        decide: Decide | None,
        decided: list[float | int | bool],
        precision: str | None,
    ) -> None:
        self.device, self.decide, self.decided, self.precision = device, decide, decided, precision
        self.fn, self.args, self.kwargs, self.world, self.input_types = fn, args, kwargs, world, input_types
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=False)
        self.module_names: dict[int, str] = {}
        self.recorder = Recorder(self.fake_mode, self.module_names, self._ask, device)
        self.twin = Twin(self._unknown_tensor, world.outside)
        self.program = Program(self.recorder.graph, self.recorder.info)
        self.versions = self.program.versions
        self.slot_twins: dict[str, FunctionalTensor] = {}
        self.input_twins: dict[str, FunctionalTensor] = {}
        self.paths: dict[int, str] = {}  # id of a slot's twin -> path
        self.sparse = SparseGradients(self.recorder, self.paths)
        self.scaling: Scaling | None = None
        self.stepped: set[str] = set()  # optimizers
        self.scheduled: list[Scheduled] = []

    # -- the twin world ------------------------------------------------------------------------------------------------

    def run(self) -> Captured:
        world = self.world
        with self._modes(), refusals(self.module_names):
            self._placeholders()
            args, kwargs = self._copy(self.args), {k: self._copy(v) for k, v in self.kwargs.items()}
            arguments = {name: self._copy(value) for name, value in world.arguments.items()}
            fn = self._copy(self.fn.__wrapped__ if isinstance(self.fn, Scaled) else self.fn)
            if isinstance(self.fn, Scaled):
                self.scaling = Scaling(self, self._copy(self.fn.loss_scale))
            self._hooks()
            self._numbers()
            for ident, path in world.modules.items():
                self.module_names[id(self.twin.memo[ident])] = path
            self.recorder.seed(0)
            around = (
                module_outputs(self.module_names, self._value_of, self.program.outputs),
                compute_in(self.precision), _torch.compiling(), optimizers(self), schedulers(self), host_random(),
                _torch.when_printed(self._printed), _torch.float_in_lbfgs(as_float),
            )  # fmt: skip
            with contextlib.ExitStack() as stack:
                for context in around:
                    stack.enter_context(context)
                if self.scaling is not None:
                    stack.enter_context(self.scaling.inside())
                result = fn(*args, **kwargs)
            self.sparse.active = False
            self.program.notes += self.sparse.notes()
            overflow = self.scaling is not None and self.scaling.settle()
            effects = self.scaling.unchanged() if self.scaling is not None and overflow else after(self, arguments)
            self._poll()
            self._results(result)
        self._finish(effects)
        numbers = {path: node for path, node in self.program.numbers.items()}
        return Captured(
            self.program, effects, self.recorder.constants, guards=self.recorder.guards, guard_numbers=numbers
        )  # fmt: skip

    def _ask(self, node: fx.Node, before: int, line: str) -> float | int | bool:
        """The value of a number on which Python decides: known from an earlier trace of this call, or had computed now."""
        if before == len(self.decided):
            if self.decide is None:
                raise CaptureError(
                    "Python needs the value of a tensor to go on (if, while, float(), int(), a size or an index)", where=line,
                    hint="keep the decision in tensors (torch.where, a mask), or take it outside the compiled step",
                )  # fmt: skip
            inputs = {**self.program.inputs, **self.recorder.const_nodes}
            so_far = replace(self.program, inputs=inputs, draws=self.recorder.draws)
            self.decided.append(self.decide(so_far, node, self.recorder.constants, line))
        return self.decided[before]

    def release(self) -> None:
        """Let go of the user's objects and of the twin: hooks on tensors make cycles that the collector does not see."""
        for twin in self.slot_twins.values():
            twin.grad = None
            for hooks in (twin._backward_hooks, twin._post_accumulate_grad_hooks):
                if hooks:
                    hooks.clear()
        self.twin.release()
        self.recorder.release()
        self.sparse.release()
        self.__dict__.clear()

    def _copy(self, obj: Any) -> Any:
        return self.twin.copy(obj)

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(_torch.without_mkldnn())
            stack.enter_context(self.recorder)
            self.functional_mode = stack.enter_context(FunctionalTensorMode())
            stack.enter_context(ops.sdpa_mode())
            if self.device != "cpu":
                stack.enter_context(_torch.autocast_stands_for(self.device))
            stack.enter_context(Watch(self._edited, self.recorder.line, self.device, self.sparse))
            stack.enter_context(ops.optimizer_kernels())
            yield

    def _printed(self) -> None:
        what = "a tensor is printed or formatted inside the step, before it has a value"
        raise CaptureError(what, where=self.recorder.line(),
                           hint="return it from the step and print it outside")  # fmt: skip

    def _placeholders(self) -> None:
        program, memo = self.program, self.twin.memo
        for path, ref in self.world.slots.items():
            real = ref.get()
            twin = self._stand_in(path, real, tuple(real.shape), tuple(real.stride()))
            self.slot_twins[path] = twin
            self.paths[id(twin)] = path
            node = self.recorder.node_of(_torch.current_value(twin))
            assert node is not None
            program.entry[path] = node
            self.versions[node] = path
            memo[id(real)] = twin
            type_ = TensorType.of(_torch.current_value(twin))
            program.slots[path] = Slot(path, ref.kind, type_, ref.of, tuple(ref.aliases), ref.trainable)
        for path, ref in self.world.slots.items():
            if ref.kind is SlotKind.GRADIENT:
                self.slot_twins[ref.of].grad = self.slot_twins[path]
        for path, real in self.world.inputs.items():
            given = self.input_types.get(path)
            shape = given.shape if given else tuple(real.shape)
            stride = tuple(real.stride()) if given is None else given.stride or _contiguous(given.shape)
            twin = self._stand_in(path, real, shape, stride)
            self.input_twins[path] = twin
            node = self.recorder.node_of(_torch.current_value(twin))
            assert node is not None
            program.inputs[path] = node
            memo[id(real)] = twin

    def _stand_in(self, path: str, real: Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> FunctionalTensor:
        fake = self.recorder.input_tensor(path, real, shape, stride)
        twin = _torch.functional(fake)
        twin.requires_grad_(real.requires_grad and path not in self.world.graphs)
        if isinstance(real, torch.nn.Parameter):
            twin._is_param = True
        return twin

    def _unknown_tensor(self, real: Tensor) -> Tensor:
        """A tensor in a place that is not walked (an attribute of a foreign object): an input by its own name."""
        if real.requires_grad or type(real) not in (Tensor, torch.nn.Parameter):
            raise CaptureError(
                f"a tensor of shape {tuple(real.shape)} that requires grad is reached through an object that is not walked",
                hint="pass the object that holds it as an argument of the step",
            )
        path = f"const[{len(self.recorder.constants)}]"
        self.recorder.constants[path] = real
        twin = self._stand_in(path, real, tuple(real.shape), tuple(real.stride()))
        self.input_twins[path] = twin
        node = self.recorder.node_of(_torch.current_value(twin))
        assert node is not None
        self.recorder.const_nodes[path] = node
        return twin

    def _hooks(self) -> None:
        """User's hooks on tensors, then ours: it records the gradient that a backward leaves."""
        for path, ref in self.world.slots.items():
            if ref.kind is SlotKind.GRADIENT:
                continue
            real: Any = ref.get()
            twin: Any = self.slot_twins[path]
            for name, value in _own_attributes(real):
                setattr(twin, name, self._copy(value))
            if not real.requires_grad or path in self.world.graphs:
                continue
            if self.scaling is not None:
                twin.register_hook(self.scaling.unscale)
            for hook in (real._backward_hooks or {}).values():
                twin.register_hook(self._copy(hook))
            twin.register_post_accumulate_grad_hook(self._gradient_hook(path))
            for hook in (real._post_accumulate_grad_hooks or {}).values():
                twin.register_post_accumulate_grad_hook(self._copy(hook))

    def _gradient_hook(self, path: str) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            grad = param.grad
            if isinstance(grad, FunctionalTensor):
                self._version(f"{path}.grad", grad)
                self.sparse.gradient(path, param, grad)
                if self.scaling is not None:
                    self.scaling.arrived(grad)

        return hook

    def _version(self, path: str, twin: FunctionalTensor) -> fx.Node | None:
        node = self.recorder.node_of(_torch.current_value(twin))
        if node is not None:
            self.versions.setdefault(node, path)
        return node

    def _value_of(self, tensor: Tensor) -> fx.Node | None:
        """The node whose value a tensor of the trace is now."""
        return self.recorder.node_of(_torch.current_value(tensor)) if isinstance(tensor, FunctionalTensor) else None

    def _edited(self, twin: Tensor) -> None:
        path = self.paths.get(id(twin))
        if path is not None:
            assert isinstance(twin, FunctionalTensor)
            self._version(path, twin)

    def optimizer_stepped(self, path: str, optimizer: Any) -> None:
        """An optimizer has stepped: its parameters have new values."""
        self.stepped.add(path)
        for group in optimizer.param_groups:
            for p in group["params"]:
                self._edited(p)

    def _poll(self) -> None:
        """Record the values that slots have now as versions."""
        for path, twin in self.slot_twins.items():
            self._version(path, twin)

    def _numbers(self) -> None:
        for path, (holder, key, index) in self.world.number_holders.items():
            value = self.world.numbers[path]
            node = self.recorder.number(path)
            self.program.numbers[path] = node
            sym = symbol(Number(self.recorder, node, type(value), value))
            twin = self.twin.namespace(holder)
            if index is None:
                write(twin, key, sym)
            else:
                old = twin[key]
                new = [*old[:index], sym, *old[index + 1 :]]
                twin[key] = tuple(new) if isinstance(old, tuple) else new

    # -- results -------------------------------------------------------------------------------------------------------

    def _results(self, result: Any) -> None:
        program = self.program
        state = {id(t): path for path, t in self.slot_twins.items()}

        def leaf(x: Any, path: str) -> tuple[str, Any]:
            if isinstance(x, Tensor):
                if id(x) in state and program.slots[state[id(x)]].kind is SlotKind.PARAMETER:
                    raise CaptureError(f"the step returns the parameter {state[id(x)]} itself ({path})",
                                       where=state[id(x)], hint="return a detached clone of it")  # fmt: skip
                if not isinstance(x, FunctionalTensor):
                    return "const", x
                node = self.recorder.node_of(_torch.current_value(x))
                assert node is not None
            elif is_symbol(x):
                if x.node.constant is not None:
                    return "const", x.node.constant
                node = x.node.fx_node
            else:
                return "const", x
            program.results.append(node)
            return "node", len(program.results) - 1

        program.returns = flatten(result, leaf)

    def _finish(self, effects: Effects) -> None:
        program = self.program
        program.draws.update(self.recorder.draws)
        program.guards.extend(self.recorder.decisions.values())
        program.inputs.update(self.recorder.const_nodes)
        program.set_output()
        _remove_dead(program, {n for n, _ in self.recorder.guards})
        output = program.graph.output_node()
        for path in self.world.graphs:  # what torch's old weight_norm and pruning leave is replaced before it is read
            if any(user is not output for user in program.entry[path].users):
                raise CaptureError(f"{path} {GRAPH}", where=path, hint="detach it")
        order = {n: i for i, n in enumerate(n for n in program.graph.nodes if n in program.draws)}
        program.graph.lint()
        for node, i in order.items():
            program.draws[node] = type(program.draws[node])(i)


def _remove_dead(program: Program, keep: set[fx.Node]) -> None:
    """Drop nodes nobody reads. Draws stay: a generator advances whether or not the numbers are used."""
    for node in reversed(list(program.graph.nodes)):
        if node.op == "call_function" and not node.users and node not in program.draws and node not in keep:
            for table in (program.info, program.versions):
                table.pop(node, None)
            program.graph.erase_node(node)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    out, n = [], 1
    for size in reversed(shape):
        out.append(n)
        n *= max(size, 1)
    return tuple(reversed(out))


def _own_attributes(real: Tensor) -> Iterator[tuple[str, Any]]:
    """Attributes that the user set on a tensor."""
    yield from ((k, v) for k, v in real.__dict__.items() if not k.startswith("_"))
