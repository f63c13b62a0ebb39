"""Everything that shardc uses of torch beyond its public API, in one place. Checked on torch 2.11 to 2.13.

Names are looked up when this module is imported, so that a torch without them is refused at once and by name.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard as _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from shardc.errors import ShardcError

OPTIMIZER_LOOPS: dict[str, tuple[str, str]] = {
    "adam": ("torch.optim.adam", "_single_tensor_adam"),
    "sgd": ("torch.optim.sgd", "_single_tensor_sgd"),
    "adagrad": ("torch.optim.adagrad", "_single_tensor_adagrad"),
    "rmsprop": ("torch.optim.rmsprop", "_single_tensor_rmsprop"),
    "radam": ("torch.optim.radam", "_single_tensor_radam"),
    "asgd": ("torch.optim.asgd", "_single_tensor_asgd"),
}
"""The functions that do torch.optim's updates parameter by parameter (AdamW uses Adam's)."""


def lookup(module: str, name: str) -> Any:
    """`module.name`.

    Raises:
        ShardcError: this torch has no such name.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ShardcError(
            f"torch {torch.__version__} has no {module}.{name}, which shardc uses",
            hint="a torch release from 2.11 on that this release of shardc was checked with (2.11 to 2.13)",
        ) from error


for _module, _name in OPTIMIZER_LOOPS.values():
    lookup(_module, _name)

fused_adam_: Callable[..., None] = lookup("torch", "_fused_adam_")
fused_adamw_: Callable[..., None] = lookup("torch", "_fused_adamw_")
fused_sgd_: Callable[..., None] = lookup("torch", "_fused_sgd_")
fused_adagrad_: Callable[..., None] = lookup("torch", "_fused_adagrad_")

flash_cpu: Callable[..., tuple[Tensor, Tensor]] = lookup("torch", "ops").aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)
flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention
flash_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
efficient_cuda = torch.ops.aten._scaled_dot_product_efficient_attention
efficient_cuda_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward


@contextlib.contextmanager
def replaced(module: str, name: str, new: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While inside, `module.name` is ``new(original)``; restored on exit, also on an error."""
    owner, original = importlib.import_module(module), lookup(module, name)
    setattr(owner, name, new(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def replaced_optimizer_loops(new: Mapping[str, Callable[[Callable[..., None]], Callable[..., None]]]) -> Iterator[None]:
    """While inside, torch.optim's loop functions are ``new[name](original)`` (see `OPTIMIZER_LOOPS`)."""
    with contextlib.ExitStack() as stack:
        for name, make in new.items():
            stack.enter_context(replaced(*OPTIMIZER_LOOPS[name], make))
        yield


@contextlib.contextmanager
def states_of_fused(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """While inside, `optimizer` makes the state of `groups` as its fused path does (whose step counters are float32), also
    where their flag says otherwise, and does not ask whether the device has fused kernels."""
    if not groups or not hasattr(optimizer, "_init_group"):
        yield
        return
    init, check = optimizer._init_group, "_need_device_dtype_check_for_fused"
    had = {name: optimizer.__dict__[name] for name in (check, "_init_group") if name in optimizer.__dict__}

    def init_group(group: dict[str, Any], *lists: Any) -> Any:
        flag, group["fused"] = group["fused"], any(group is g for g in groups)
        try:
            return init(group, *lists)
        finally:
            group["fused"] = flag

    optimizer.__dict__.update({check: False, "_init_group": init_group})
    try:
        yield
    finally:
        for name in (check, "_init_group"):
            optimizer.__dict__.pop(name, None)
        optimizer.__dict__.update(had)


def assign(target: Tensor, value: Tensor) -> None:
    """``target.copy_(value)``, without a copy in the graph where `target` is functionalised and the layouts agree."""
    if isinstance(target, FunctionalTensor) and isinstance(value, FunctionalTensor) and target.stride() == value.stride():
        value.sync()
        target.replace_(torch._from_functional_tensor(value.elem))
        target.commit_update()
        target.sync()
        torch.autograd.graph.increment_version(target)
        return
    target.copy_(value)


def storage_id(tensor: Tensor) -> int:
    """A number that tensors share iff they share their storage; valid while the storage lives. Also for meta tensors."""
    return int(tensor.untyped_storage()._cdata)


def may_alias(op: torch._ops.OpOverload) -> bool:
    """Whether a result of `op` may share storage with an operand: by its schema, or because it is composite, where the
    schema says nothing of views that are sometimes taken."""
    if any(r.alias_info is not None for r in op._schema.returns) or op is torch.ops.aten._unsafe_view.default:
        return True
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op._name, "CompositeImplicitAutograd"))


def returns_sequence(op: torch._ops.OpOverload) -> bool:
    """Whether `op` gives several results or a list, rather than one tensor or number."""
    returns = op._schema.returns
    return len(returns) != 1 or isinstance(returns[0].type, torch.ListType)


def default_store() -> Any:
    """The key-value store of the default process group."""
    return lookup("torch.distributed.distributed_c10d", "_get_default_store")()


# -- capture -----------------------------------------------------------------------------------------------------------

_current_graph_task_id: Callable[[], int] = lookup("torch._C", "_current_graph_task_id")
_current_autograd_node: Callable[[], Any] = lookup("torch._C", "_current_autograd_node")
sequence_number: Callable[[], int] = lookup("torch.autograd", "_get_sequence_nr")


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread."""
    return _current_graph_task_id() != -1


def backward_sequence_number() -> int | None:
    """Sequence number of the autograd node whose backward runs; None outside of one."""
    node = _current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def is_random(op: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


def functional(x: Tensor) -> FunctionalTensor:
    """`x` (fake) as a functionalised tensor; inside a `FunctionalTensorMode` only."""
    return FunctionalTensor.to_functional(x)


def current_value(x: FunctionalTensor) -> Tensor:
    """The (fake) tensor that is a functionalised tensor's value now."""
    x.sync()
    return torch._from_functional_tensor(x.elem)


def is_traced(x: Tensor) -> bool:
    """Whether `x` is a value of a step that is being captured."""
    return isinstance(x, FunctionalTensor)


def flash_enabled() -> bool:
    """False inside ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``."""
    return bool(torch._C._get_flash_sdp_enabled())


def local_of(t: Any) -> Tensor:
    """The very tensor that a DTensor holds (`to_local()` of a Parameter gives a view of it)."""
    out = t._local_tensor
    assert isinstance(out, Tensor)
    return out

BELOW_FUNCTIONAL: Any = lookup("torch._C", "_TorchDispatchModeKey").FAKE
"""The slot of the mode stack below functionalisation."""

_Suspended = contextlib.AbstractContextManager[Any]
MAKE_GRADS: Any = lookup("torch.autograd", "_make_grads").__code__
"""The code that makes the gradient a backward starts from."""

without_modes: Callable[[], _Suspended] = lookup("torch.utils._python_dispatch", "_disable_current_modes")
"""Suspends all dispatch modes while inside."""


# -- collectives -------------------------------------------------------------------------------------------------------


def _collective(new: str, old: str) -> Callable[..., Any]:
    """torch 2.13 renames the collectives on one flat tensor and warns of the old names."""
    module = importlib.import_module("torch.distributed")
    return lookup("torch.distributed", new if hasattr(module, new) else old)  # type: ignore[no-any-return]


all_gather_single = _collective("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _collective("reduce_scatter_single", "reduce_scatter_tensor")

lookup("torch.compiler", "_is_compiling_flag")


@contextlib.contextmanager
def compiling(flag: bool = True) -> Iterator[None]:
    """While inside, `torch.compiler.is_compiling()` says `flag`: libraries then avoid reading the values of tensors."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = flag
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def when_printed(act: Callable[[], None]) -> Iterator[None]:
    """While inside, `act` is called when a functionalised tensor is printed or formatted."""
    before = FunctionalTensor.__repr__

    def refuse(self: Any, *args: Any, **kwargs: Any) -> str:
        act()
        return before(self)

    FunctionalTensor.__repr__ = refuse  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        FunctionalTensor.__repr__ = before  # type: ignore[method-assign, assignment]


def profiled_memory(run: torch.profiler.profile) -> tuple[list[tuple[int, int]], list[tuple[int, int, str, str]]]:
    """Of a finished profile with ``profile_memory``: (time, bytes; frees are negative) of each change, and (begin, end, name,
    operand shapes) of each operator, callers before what they call. Times in ns."""
    assert run.profiler is not None and run.profiler.kineto_results is not None
    changes, ranges = [], []
    for e in run.profiler.kineto_results.events():
        if e.name() == "[memory]":
            changes.append((e.start_ns(), e.nbytes()))  # type: ignore[attr-defined]
        else:
            ranges.append((e.start_ns(), e.start_ns() + e.duration_ns(), e.name(), str(e.shapes())))
    return sorted(changes), sorted(ranges, key=lambda r: (r[0], -r[1]))

_Autocast: Any = lookup("torch.amp.autocast_mode", "autocast")


@contextlib.contextmanager
def autocast_stands_for(device: str) -> Iterator[None]:
    """While inside, `torch.autocast` of `device`, or of "cpu" (which is what tensors then say), casts on the CPU."""
    init, enter, leave = _Autocast.__init__, _Autocast.__enter__, _Autocast.__exit__

    def new_init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type in (device, "cpu"):
            device_type, dtype = "cpu", torch.get_autocast_dtype(device) if dtype is None else dtype
        init(self, device_type, dtype, enabled, cache_enabled)

    def new_enter(self: Any) -> Any:
        self.outer_device, self.device = self.device, "cpu" if self.device == device else self.device
        return enter(self)

    def new_exit(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            self.device = self.outer_device

    _Autocast.__init__, _Autocast.__enter__, _Autocast.__exit__ = new_init, new_enter, new_exit
    try:
        yield
    finally:
        _Autocast.__init__, _Autocast.__enter__, _Autocast.__exit__ = init, enter, leave


@contextlib.contextmanager
def float_in_lbfgs(new: Callable[[Any], Any]) -> Iterator[None]:
    """While inside, ``float(x)`` in the module of torch.optim.LBFGS is ``new(x)``."""
    module = importlib.import_module("torch.optim.lbfgs")
    vars(module)["float"] = new
    try:
        yield
    finally:
        del vars(module)["float"]


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """While inside, operators do not take oneDNN's own fused forms (an LSTM as one operator of the CPU alone)."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def operator_database() -> list[Any]:
    """torch's own samples of its operators: entries with `name`, `variant_test_name`, `op`, `sample_inputs`, `dtypes`.

    Raises:
        ImportError: torch's test requirements (expecttest) are not installed.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def references(t: Tensor) -> int:
    """How many hold the tensor, in Python (once) and in C++."""
    count: int = t._use_count()  # type: ignore[attr-defined]
    return count


@contextlib.contextmanager
def modules_called_by(new: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While inside, calling any module is ``new(original)(module, *args, **kwargs)``."""
    original = torch.nn.Module.__call__
    torch.nn.Module.__call__ = new(original)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = original  # type: ignore[method-assign]


# -- sizes that depend on data (looked up when a step has one: these modules are slow to import) ------------------------------


def shape_env(answer: Callable[[Any, Any], Any]) -> Any:
    """A `ShapeEnv` whose questions are answered by ``answer(expression, its value for the stand-ins)``; it learns nothing."""
    base: Any = lookup("torch.fx.experimental.symbolic_shapes", "ShapeEnv")

    class Answering(base):  # type: ignore[misc]
        def evaluate_sym_node(self, sym_node: Any, size_oblivious: bool = False, fallback_value: bool | None = None) -> Any:
            return answer(sym_node.expr, sym_node.hint)

    return Answering(duck_shape=False, specialize_zero_one=False)


def sized(env: Any, name: str, stands_for: int) -> tuple[torch.SymInt, Any]:
    """A new size of a `ShapeEnv`, of any value from 0 on, and its symbol."""
    kind: Any = lookup("torch.fx.experimental.symbolic_shapes", "DimDynamic")
    source = lookup("torch._dynamo.source", "ConstantSource")(name)
    symbol = env.create_symbol(
        stands_for, source=source, dynamic_dim=kind.DYNAMIC, constraint_dim=None, positive=None,
        do_not_specialize_zero_one=True,
    )
    return env.create_symintnode(symbol, hint=stands_for, source=source), symbol


def is_size(x: Any) -> bool:
    """Whether a value is a symbol of a `ShapeEnv`."""
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(x, symbols) and getattr(x.node, "shape_env", None) is not None


def integer_arguments(op: torch._ops.OpOverload) -> frozenset[str]:
    """Names of the arguments that are sizes, dims and indices, and no values (the schema's Scalars)."""
    return frozenset(a.name for a in op._schema.arguments if "int" in str(a.real_type))


def map_integers(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], fn: Callable[[Any], Any]) -> Any:
    """(arguments, keyword arguments) with `fn` applied to each of `integer_arguments`."""
    names, chosen = [a.name for a in op._schema.arguments], integer_arguments(op)
    new = tuple(fn(a) if name in chosen else a for name, a in zip(names, args, strict=False))
    return new, {k: fn(v) if k in chosen else v for k, v in kwargs.items()}


def plain_size(n: Any) -> int:
    """A size of a fake tensor; one that depends on data as the number that stands for it."""
    return int(n) if isinstance(n, int) else int(n.node.hint)
