"""Whether a checkpoint fits the state that it is to be put into; what does not is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from shardc.checkpoint.collect import SLOT, Content
from shardc.checkpoint.sources import Source
from shardc.checkpoint.tree import is_plain_optimizer
from shardc.errors import StateError

_SHOWN = 5


@dataclass
class Problems:
    """Args:
    missing: keys that the state has and the checkpoint has not.
    unexpected: the other way round.
    wrong: what is there on both sides, but differs: "model.w is [3, 4] here, [5, 4] in the checkpoint".
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def refuse(self, where: str, hint: str = "build the model, optimizer and schedulers as when it was saved") -> None:
        """Raises `StateError` if there is any."""
        parts = [
            f"{title} {', '.join(keys[:_SHOWN])}" + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")
            for title, keys in (("missing:", self.missing), ("unexpected:", self.unexpected), ("different:", self.wrong))
            if keys
        ]
        if parts:
            raise StateError(f"the checkpoint does not fit: {'; '.join(parts)}", where=where, hint=hint)


def compare(content: Content, source: Source, own: bool) -> Problems:
    """Compare the state of a step with a checkpoint. A checkpoint of other programs (not `own`) may lack what no state dict
    has, and may have other dtypes: values are cast, as `load_state_dict` does."""
    out, taken = Problems(), set[str]()
    values = set(source.values)
    for path, obj, flat in content.objects:
        key = ".".join(map(str, path))
        mine = {k for k in (*source.tensors, *source.values) if k.startswith(f"{key}.") or k == key}
        taken |= mine
        if isinstance(obj, nn.Module):
            out.missing += [k for k in flat.paths if k not in mine]
            out.unexpected += [k for k in sorted(mine) if k not in flat.paths]
            tensors(flat.tensors, source, own, out)
        elif is_plain_optimizer(obj):
            _optimizer(obj, key, mine, source, out)
            tensors({k: t for k, t in flat.tensors.items() if ".param_groups." in k and k in source.tensors}, source, own, out)
        elif key not in values:
            out.missing.append(key)
    slots = content.slots
    stored = {k for k in source.tensors if k.startswith(SLOT)}
    if own:
        out.missing += [k.removeprefix(SLOT) for k in slots if k not in stored and not k.endswith(".grad")]
        out.unexpected += [k.removeprefix(SLOT) for k in sorted(stored) if k not in slots and not _gradient(k, content)]
        tensors({k: t for k, t in slots.items() if k in stored}, source, own, out)
    rest = [k for k in (*source.tensors, *source.values) if k not in taken and k not in stored]
    out.unexpected += sorted({k.split(".")[0] if own else k for k in rest})
    return out


def _gradient(key: str, content: Content) -> bool:
    path = key.removeprefix(SLOT)
    return path.endswith(".grad") and path.removesuffix(".grad") in content.world.slots


def tensors(live: Mapping[str, Tensor], source: Source, own: bool, out: Problems) -> None:
    """Compare shapes, and for shardc's own checkpoints dtypes."""
    for key, t in live.items():
        stored = source.tensors.get(key)
        if stored is None:
            continue
        if stored.shape != tuple(t.shape):
            out.wrong.append(f"{key} is {list(t.shape)} here, {list(stored.shape)} in the checkpoint")
        elif own and stored.dtype != t.dtype:
            out.wrong.append(f"{key} is {t.dtype} here, {stored.dtype} in the checkpoint")


def _optimizer(obj: object, key: str, mine: set[str], source: Source, out: Problems) -> None:
    groups = obj.state_dict()["param_groups"]  # type: ignore[attr-defined]
    count = sum(len(g["params"]) for g in groups)
    stored = {int(k[len(key) + 14 :].split(".")[0]) for k in mine if k.startswith(f"{key}.param_groups.")}
    if not stored:
        out.missing.append(f"{key}.param_groups")
        return
    if stored != set(range(len(groups))):
        out.wrong.append(f"{key} has {len(groups)} param_groups here, {len(stored)} in the checkpoint")
        return
    for g, group in enumerate(groups):
        name = f"{key}.param_groups.{g}.params"
        if name in mine and list(saved := source.value(name)) != group["params"]:
            out.wrong.append(f"{name} has {len(group['params'])} parameters here, {len(saved)} in the checkpoint")
    strange = {int(k[len(key) + 7 :].split(".")[0]) for k in mine if k.startswith(f"{key}.state.")} - set(range(count))
    out.unexpected += [f"{key}.state.{i}" for i in sorted(strange)]
