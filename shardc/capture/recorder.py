"""The recorder: a dispatch mode below functionalisation that writes every operator into an `fx.Graph` with what is known of it.

It sits between `FunctionalTensorMode` (above) and fake tensors (below), so what it sees is functional ATen at global shapes,
forward and backward alike. Owner and source line come from the Python frames; backward nodes take those of the forward node
with the same autograd sequence number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from shardc import _torch
from shardc._torch import FakeTensor, FakeTensorMode, TorchDispatchMode, is_size
from shardc.capture.constants import constant_value
from shardc.capture.fakes import corrected
from shardc.capture.lines import Frames, Place
from shardc.capture.lists import is_list_op, loop
from shardc.capture.numbers import Number, is_symbol, symbol
from shardc.capture.selections import Selections
from shardc.errors import CaptureError
from shardc.program import Draw, Guard, Info, Phase, TensorType, Types, op_name

aten = torch.ops.aten
Ask = Callable[[fx.Node, int, str], float | int | bool]
"""(node, number of decisions before, the user's line) -> the node's value in the call being captured."""
_FIRST_SEED = 0x5EED_0000_0000
_LIFTS = (aten.lift_fresh_copy.default, aten.lift_fresh.default)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See the module docstring. One recorder serves one trace.

    Args:
        fake_mode: the mode that computes shapes.
        module_names: id of a module -> its path.
        ask: gives the value of a number that Python decides on, see `decide`.
        device: kind of device that the program will run on.
    """

    def __init__(self, fake_mode: FakeTensorMode, module_names: dict[int, str], ask: Ask, device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.fake_mode, self.frames = fake_mode, Frames(module_names)
        self.graph = fx.Graph()
        self.info: dict[fx.Node, Info] = {}
        self.draws: dict[fx.Node, Draw] = {}
        self.guards: list[tuple[fx.Node, Any]] = []  # on numbers that the host knows before the step
        self.decisions: dict[fx.Node, Guard] = {}  # on values of the step
        self.ask = ask
        self.constants: dict[str, Tensor] = {}
        self._items: dict[fx.Node, fx.Node] = {}  # tensor -> its value as a number
        self.selections = Selections(self)
        self.saw_backward = False
        self._nodes: dict[int, tuple[FakeTensor, fx.Node]] = {}  # the tensor is kept, so that its id stays its own
        self._drawn: list[tuple[Any, Any]] = []  # operator and result of each draw
        self._by_seq: dict[int, Place] = {}
        self._last_backward = Place("", "")
        self._mode_key = _torch.BELOW_FUNCTIONAL
        self.const_nodes: dict[str, fx.Node] = {}
        self._last_input: fx.Node | None = None
        self._last_number: fx.Node | None = None

    def release(self) -> None:
        """Forget the fake tensors."""
        self._nodes.clear()
        self._drawn.clear()
        self.selections.release()

    # -- placeholders --------------------------------------------------------------------------------------------------

    def placeholder(self, path: str, type_: Types) -> fx.Node:
        """A new tensor input of the graph, after the ones made before and ahead of the numbers."""
        with self.graph.inserting_after(self._last_input):
            node = self._last_input = self.graph.placeholder(_identifier(path))
        self.info[node] = Info(type_, module=path)
        return node

    def number(self, path: str) -> fx.Node:
        """A new number input of the graph."""
        with self.graph.inserting_after(self._last_number or self._last_input):
            node = self._last_number = self.graph.placeholder(_identifier(path))
        self.info[node] = Info(None, module=path)
        return node

    def input_tensor(self, path: str, real: Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> FakeTensor:
        """A fake tensor that stands for the placeholder `path`."""
        with _torch.without_modes(), self.fake_mode:
            fake = torch.empty_strided(shape, stride, dtype=real.dtype, device="cpu")
        assert isinstance(fake, FakeTensor)
        self.bind(fake, self.placeholder(path, TensorType.of(fake)))
        return fake

    def bind(self, fake: FakeTensor, node: fx.Node) -> None:
        self._nodes[id(fake)] = (fake, node)

    def node_of(self, fake: Tensor) -> fx.Node | None:
        """The node whose value a fake tensor is."""
        found = self._nodes.get(id(fake))
        return found[1] if found else None

    # -- numbers -------------------------------------------------------------------------------------------------------

    def number_op(self, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        phase, where = self.place([a for a in args if isinstance(a, fx.Node)])
        node = self.graph.call_function(target, args)
        self.info[node] = Info(None, phase, where.module, where.line)
        return node

    def guard(self, node: fx.Node, value: float | int | bool) -> None:
        self.guards.append((node, value))

    def decide(self, node: fx.Node, pytype: type, line: str = "", text: str = "") -> float | int | bool:
        """The value of a number of the step, as a decision that the program depends on from here: its guard.

        `line` and `text` say where and what it is; by default the user's line.

        What follows from numbers that were decided on before is known, and needs no guard of its own.
        """
        known: float | int | bool | None = self._known(node)
        if known is not None:
            return known
        line = line or self.line()
        value: float | int | bool = pytype(self.ask(node, len(self.decisions), line))
        self.decisions[node] = Guard(node, value, line, text or self.frames.text())
        return value

    def _known(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node in self.decisions:
            return self.decisions[node].expected
        if isinstance(node.target, torch._ops.OpOverload) or node.op != "call_function" or self.info[node].type is not None:
            return None
        args = [self._known(a) for a in node.args]
        return None if any(a is None for a in args) else node.target(*args)  # type: ignore[operator]

    def line(self) -> str:
        return self.frames.place().line

    # -- operators -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LIFTS and not isinstance(args[0], FakeTensor):
            return self._lift(args[0])
        if func is aten._local_scalar_dense.default:
            return self.item(args[0])
        if is_list_op(func):
            return loop(func, args, kwargs, lambda op, given, named: self.__torch_dispatch__(op, types, given, named))
        if func._schema.is_mutable:
            raise CaptureError(
                f"{op_name(func)} changes a tensor in place and torch has no functional form of it", where=self.line()
            )
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func in (aten.equal.default, aten.allclose.default):
            return self._equal(func, *args, **kwargs)
        if (selected := self.selections.result(func, args, kwargs)) is not None:
            return selected
        args, kwargs = self.selections.counted(func, *_decided_sizes(func, args, kwargs))
        inputs: list[fx.Node] = []

        def as_node(x: Any) -> Any:
            if isinstance(x, Tensor):
                node = self.node_of(x)
                if node is None:
                    raise self.stranger(x, func)
                inputs.append(node)
                return node
            if is_size(x):
                return x.node.hint
            if is_symbol(x):
                number = x.node.recorded()
                if isinstance(number, fx.Node):
                    inputs.append(number)
                return number
            if isinstance(x, (list, tuple)):
                return [as_node(y) for y in x]
            if isinstance(x, torch.Generator):
                raise CaptureError(f"{op_name(func)} draws from a generator of its own", where=self.line(),
                                   hint="draw from torch's default generator")  # fmt: skip
            return x

        node_args = tuple(as_node(a) for a in args)
        node_kwargs = {k: as_node(v) for k, v in kwargs.items()}
        random = _torch.is_random(func)
        if random and (again := self._drawn_before(func)) is not None:
            return again
        with self.fake_mode:
            out = func(*_hints(args), **{k: _hints(v) for k, v in kwargs.items()})
            out = corrected(func, args, out, self.device)
        self.selections.refuse_equal_sizes(func, out)
        phase, where = self.place(inputs)
        node = self.graph.call_function(func, node_args, node_kwargs)
        self.info[node] = Info(_types(out), phase, where.module, where.line)
        self.bind_results(node, out)
        if random:
            self._drawn.append((func, out))
            self.draws[node] = Draw(len(self.draws))
            self.seed(len(self._drawn))
        return out

    # -- draws ---------------------------------------------------------------------------------------------------------

    # The real generator carries the number of the next draw as its seed, so that code which saves and restores its state
    # (checkpoint) gets the same draws again. The trace runs under `fork_rng`.

    def seed(self, draw: int) -> None:
        """Make `draw` the next one."""
        torch.default_generator.manual_seed(_FIRST_SEED + draw)

    def _drawn_before(self, func: Any) -> Any:
        """What this draw gave when the generator was in its present state before; None for a new draw."""
        at = torch.default_generator.initial_seed() - _FIRST_SEED
        if not 0 <= at <= len(self._drawn):
            raise CaptureError(
                "the step sets the seed of torch's generator", where=self.line(), hint="seed outside of the step"
            )
        if at == len(self._drawn):
            return None
        before, out = self._drawn[at]
        if before is not func:
            raise CaptureError(
                f"the generator's state was restored and {op_name(func)} follows where {op_name(before)} was drawn before",
                where=self.line(), hint="repeat the same draws, or do not restore the generator",
            )  # fmt: skip
        self.seed(at + 1)
        return out

    def bind_results(self, node: fx.Node, out: Any) -> None:
        info = self.info[node]
        if isinstance(out, Tensor):
            if id(out) not in self._nodes:
                assert isinstance(out, FakeTensor)
                self.bind(out, node)
        elif isinstance(out, (list, tuple)):
            for i, item in enumerate(out):
                if isinstance(item, FakeTensor) and id(item) not in self._nodes:
                    part = self.graph.call_function(operator.getitem, (node, i))
                    self.info[part] = info.but(type=TensorType.of(item))
                    self.bind(item, part)
                elif isinstance(item, (list, tuple)) and item:
                    part = self.graph.call_function(operator.getitem, (node, i))
                    self.info[part] = info.but(type=_types(item))
                    self.bind_results(part, item)

    def _lift(self, real: Tensor) -> Tensor:
        """A tensor that the code makes from Python data."""
        phase, where = self.place([])
        with self.fake_mode:
            fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cpu")
        assert isinstance(fake, FakeTensor)
        flat = real.reshape(-1)
        if real.numel() == 0 or bool((flat == flat[0]).all()):
            value = flat[0].item() if real.numel() else 0
            node = self.graph.call_function(
                aten.full.default,
                (list(real.shape), value),
                {"dtype": real.dtype, "device": torch.device("cpu"), "pin_memory": False},
            )
            self.info[node] = Info(TensorType.of(fake), phase, where.module, where.line)
        else:
            path = f"const[{len(self.constants)}]"
            self.constants[path] = real.detach().clone()
            node = self.const_nodes[path] = self.placeholder(path, TensorType.of(fake))
        self.bind(fake, node)
        return fake

    def item(self, x: Tensor) -> Any:
        """`.item()`: a number that the host does not know before the step runs."""
        source = self.node_of(x)
        if source is None:
            raise self.stranger(x, aten._local_scalar_dense.default)
        pytype = bool if x.dtype == torch.bool else float if x.dtype.is_floating_point else int
        if source.target is aten.full.default and isinstance(source.args[1], (bool, int, float)):
            return pytype(source.args[1])
        known = constant_value(source, self.info, self.constants)
        if known is not None:
            return pytype(known.item())
        node = self._items.get(source)
        if node is None:
            phase, where = self.place([source])
            node = self._items[source] = self.graph.call_function(aten._local_scalar_dense.default, (source,))
            self.info[node] = Info(None, phase, where.module, where.line)
        return symbol(Number(self, node, pytype, None))

    def _equal(self, func: Any, a: Tensor, b: Tensor, *tolerances: Any, **named: Any) -> bool:
        """`torch.equal` and `torch.allclose` give a Python bool: a decision."""
        if func is aten.equal.default and a.shape != b.shape:
            return False
        with self:
            same = aten.eq.Tensor(a, b) if func is aten.equal.default else _close(a, b, *tolerances, **named)
            return bool(aten._local_scalar_dense.default(aten.all.default(same)))

    def stranger(self, x: Tensor, func: Any) -> CaptureError:
        what = "parameter" if isinstance(x, torch.nn.Parameter) else "tensor"
        return CaptureError(
            f"{op_name(func)} reads a {what} of shape {tuple(x.shape)} that is neither reached from the arguments nor named in "
            "the step's code, so it cannot be state of the program",
            where=self.line(),
            hint="pass the object that holds it as an argument of the step",
        )

    # -- where we are --------------------------------------------------------------------------------------------------

    def place(self, inputs: list[fx.Node]) -> tuple[Phase, Place]:
        if _torch.in_backward():
            self.saw_backward = True
            seq = _torch.backward_sequence_number()
            where = self._by_seq.get(seq) if seq is not None else None
            if where is None:
                where = self._last_backward
            self._last_backward = where
            return Phase.BACKWARD, where
        where = self.frames.place()
        self._by_seq.setdefault(_torch.sequence_number() - 1, where)
        return self._phase(where, inputs), where

    def _phase(self, where: Place, inputs: list[fx.Node]) -> Phase:
        """Update: in an optimizer's step, or on gradients and updated values outside of a module's forward."""
        if where.optimizer:
            return Phase.UPDATE
        if where.seeding:
            return Phase.BACKWARD
        if where.module or not self.saw_backward:
            return Phase.FORWARD
        if not torch.is_grad_enabled():
            return Phase.UPDATE
        return Phase.UPDATE if any(self.info[n].phase is not Phase.FORWARD for n in inputs) else Phase.FORWARD


def _close(a: Tensor, b: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """`torch.isclose`, whose own form works in place."""
    gap = aten.abs.default(aten.sub.Tensor(a, b))
    allowed = aten.add.Scalar(aten.mul.Scalar(aten.abs.default(b), rtol), atol)
    near = aten.logical_and.default(aten.le.Tensor(gap, allowed), aten.ne.Scalar(gap, float("inf")))
    same = aten.logical_or.default(aten.eq.Tensor(a, b), near)
    if not equal_nan:
        return same  # type: ignore[no-any-return]
    both = aten.logical_and.default(aten.ne.Tensor(a, a), aten.ne.Tensor(b, b))
    return aten.logical_or.default(same, both)  # type: ignore[no-any-return]


def _hints(x: Any) -> Any:
    """Arguments with symbols replaced by the numbers they have now (shapes do not depend on them)."""
    if is_symbol(x):
        hint = x.node._hint
        return x.node.pytype(1) if hint is None else hint
    if isinstance(x, (list, tuple)):
        return type(x)(_hints(y) for y in x)
    return x


def _decided_sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments in which sizes and indices (not the schema's Scalars) are plain numbers: what a tensor's shape depends on is
    decided at capture."""
    given = [*args, *kwargs.values()]
    if not any(map(is_symbol, given)) and not any(is_symbol(y) for x in given if isinstance(x, (list, tuple)) for y in x):
        return args, kwargs

    def plain(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(plain, x))
        return int(x) if is_symbol(x) else x

    return _torch.map_integers(func, args, kwargs, plain)  # type: ignore[no-any-return]


def _types(out: Any) -> Types:
    if isinstance(out, Tensor):
        return TensorType.of(out)
    if isinstance(out, (list, tuple)):
        return tuple(TensorType.of(x) if isinstance(x, Tensor) else None for x in out)
    return None


def _identifier(path: str) -> str:
    name = "".join(c if c.isalnum() else "_" for c in path).strip("_")
    return name if name and not name[0].isdigit() else f"arg_{name}"
