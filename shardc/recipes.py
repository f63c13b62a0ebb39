"""Ready-made `params` and `activations` for common families of models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from shardc.errors import OptionError
from shardc.spec import P


def megatron(model: nn.Module, axis: str = "tp") -> dict[str, P]:
    """Tensor parallelism of a decoder as in Megatron-LM (Shoeybi et al. 2019): `params` for `shardc.compile`.

    Found by structure, not by names. In each repeated layer, the linear layers that one module holds form a group:
    the last one leads back to the model's width and is split by rows of its input (its product is a partial sum), the
    others lead from the width and are split by columns, with their biases. Between them may stand layers from the inner
    width (split by rows) and onto it (by columns), as in a state space model; then what else the module holds for each
    of its inner channels (a convolution of each by itself, their parameters) is split with them. The largest embedding, and a
    linear layer onto as many outputs, are split over the vocabulary. What does not fit (a router, a group that does not
    begin and end at the width) is left whole.

    Args:
        model: on any device, meta too.
        axis: the mesh axis.

    Returns:
        Parameter name -> P. Tied weights are named once.

    Raises:
        OptionError: no embedding, or no layer with such a group.

    Example: ``shardc.compile(step, mesh={"dp": 2, "tp": 2}, params=shardc.recipes.megatron(model))``
    """
    found = _decoder(model)
    out: dict[str, P] = {}
    for group in found.groups:
        out |= _pinned(model, group, found.width, axis)
    out[f"{found.table}.weight"] = P(axis, None)
    for name in found.heads:
        out |= _split(model, name, axis, columns=True)
    named = {name for name, _ in model.named_parameters()}  # a tied weight has the name that comes first
    return {name: p for name, p in out.items() if name in named}


def sequence_parallel(
    model: nn.Module, axis: str = "tp", batch: str | tuple[str, ...] | None = "dp", sequence: tuple[str, ...] = ()
) -> dict[str, P]:
    """Sequence parallelism between the blocks of `megatron` (Korthikanti et al. 2022): `activations` for `shardc.compile`.

    What each block adds to the residual stream, and what the vocabulary's embedding gives, is cut along the sequence over the
    tensor-parallel axis. Norms, dropout and residual sums then work on shards, and each all-reduce of an activation becomes a
    reduce-scatter and an all-gather of the same bytes. The length need not be a multiple of the axis.

    Args:
        model: a decoder whose activations are [batch, sequence, width].
        axis: the axis given to `megatron`.
        batch: the axes of the batch, as in `shardc.compile`; None for a mesh without.
        sequence: axes over which the inputs are split along the sequence already.

    Returns:
        Name of a module -> P of what it returns.

    Raises:
        OptionError: as `megatron`.

    Example: ``shardc.compile(step, params=recipes.megatron(model), activations=recipes.sequence_parallel(model), ...)``
    """
    found = _decoder(model)
    p = P(batch, (*sequence, axis), None)
    return {name: p for name in (found.table, *(group[-1] for group in found.groups))}


@dataclass(frozen=True)
class _Decoder:
    """The parts of a decoder.

    Args:
        groups: linear layers from the width and back to it; the last of each leads back.
        width: of the residual stream.
        table: the embedding of the vocabulary.
        heads: linear layers onto the vocabulary.
    """

    groups: tuple[tuple[str, ...], ...]
    width: int
    table: str
    heads: tuple[str, ...]


def _decoder(model: nn.Module) -> _Decoder:
    tables = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Embedding)]
    if not tables:
        raise OptionError(
            "the model has no nn.Embedding, so it is no decoder that this recipe knows", hint="write the pins by hand"
        )
    vocabulary, table = max(tables, key=lambda t: t[1].num_embeddings)
    width = table.embedding_dim
    groups = []
    inside: set[str] = set()
    for layer in _layers(model):
        for group in _groups(model, layer):
            inside |= set(group)
            if _pinned(model, group, width, "any"):
                groups.append(tuple(group))
    if not groups:
        raise OptionError(
            f"no layer with a group of linear layers from and to the model's width {width}", hint="write the pins by hand"
        )
    heads = [
        name
        for name, m in model.named_modules()
        if name not in inside and isinstance(m, nn.Linear) and m.out_features == table.num_embeddings
    ]
    return _Decoder(tuple(groups), width, vocabulary, tuple(heads))


def _layers(model: nn.Module) -> Iterator[str]:
    """Paths of the members of the outermost lists of layers."""
    lists: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(outer + ".") for outer in lists):
            lists.append(name)
            yield from (f"{name}.{child}" for child, _ in module.named_children())


def _groups(model: nn.Module, layer: str) -> Iterator[list[str]]:
    """The linear layers that each module of a layer holds itself, in order of registration."""
    for name, module in model.get_submodule(layer).named_modules(prefix=layer):
        own = [f"{name}.{child}" for child, m in module.named_children() if _is_linear(m)]
        if own:
            yield own


def _pinned(model: nn.Module, group: Sequence[str], width: int, axis: str) -> dict[str, P]:
    """The pins of one group; nothing where it does not fit."""
    *first, (last, inner, end) = [(name, *_features(model.get_submodule(name))) for name in group]
    between = [(a, b) for _, a, b in first if a != width]
    if end != width or len(between) == len(first) or any(inner not in ab for ab in between):
        return {}
    out = _split(model, last, axis, columns=False)
    for name, start, _ in first:
        out |= _split(model, name, axis, columns=start == width or start != inner)
    return out | (_channels(model, last.rpartition(".")[0], inner, axis) if between else {})


def _channels(model: nn.Module, path: str, inner: int, axis: str) -> dict[str, P]:
    """What a module holds for each inner channel: its own parameters, and convolutions of each channel by itself."""
    module = model.get_submodule(path)
    own = [name for name, p in module.named_parameters(recurse=False) if p.dim() and p.shape[0] == inner]
    for name, m in module.named_children():
        if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and m.groups == m.in_channels == m.out_channels == inner:
            own += [f"{name}.{child}" for child, _ in m.named_parameters()]
    return {f"{path}.{name}": P(axis) for name in own}


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """A linear layer with its weight as [inputs, outputs], such as GPT-2's."""
    weight, nf = getattr(module, "weight", None), getattr(module, "nf", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2 and nf == weight.shape[1]


def _features(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    weight = module.get_parameter("weight")
    a, b = weight.shape
    return (a, b) if _is_transposed(module) else (b, a)


def _split(model: nn.Module, name: str, axis: str, columns: bool) -> dict[str, P]:
    module = model.get_submodule(name)
    first = columns != _is_transposed(module)
    out = {f"{name}.weight": P(axis, None) if first else P(None, axis)}
    if columns and getattr(module, "bias", None) is not None:
        out[f"{name}.bias"] = P(axis)
    return out
