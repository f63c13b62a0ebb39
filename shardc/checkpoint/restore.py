"""Putting a checkpoint into a step's state.

Before a step has run, its state is plain or on meta and it is not known how it will rest. So a load has two halves: `prepare`
makes the state as it is in the checkpoint (which optimizer entries there are, all numbers), with tensors that have no memory
yet; the step is captured and planned with it, and sharded; then `fill` reads each rank's pieces in place. After a step has run
both halves follow each other.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardc.capture.world import write
from shardc.checkpoint.collect import SLOT, Content, collect
from shardc.checkpoint.compare import compare
from shardc.checkpoint.directory import Manifest, damage, share
from shardc.checkpoint.pieces import Parts
from shardc.checkpoint.sources import Source, Wanted, source_of
from shardc.checkpoint.together import Together
from shardc.checkpoint.tree import filled, is_plain_optimizer
from shardc.errors import AgreementError, StateError
from shardc.runtime.world import Ranks


@dataclass
class Loading:
    """A checkpoint on its way into a step.

    Args:
        folder: the complete checkpoint, or a file.
        manifest: its manifest; None for what other programs wrote.
        kept: paths of tensors in arguments that are state; `prepare` adds those that are in the checkpoint.
    """

    folder: Path
    manifest: Manifest | None
    kept: frozenset[str] = frozenset()
    _source: Source | None = None
    _blank: dict[int, Tensor] = field(default_factory=dict)
    _pending: dict[int, Tensor] = field(default_factory=dict)

    # -- what `shard_module_state` asks ----------------------------------------------------------------------------

    def gives(self, t: Tensor) -> bool:
        """Whether a tensor without memory gets its values from here."""
        return id(t) in self._blank

    def replaces(self, t: Tensor) -> bool:
        """Whether the values of a tensor do not matter: they will be those of the checkpoint."""
        return id(t) in self._pending

    def whole(self, t: Tensor, device: torch.device) -> Tensor:
        """Memory for a blank tensor, to be cut and then filled (the CPU touches only what is cut)."""
        fresh = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
        if isinstance(t, nn.Parameter):
            fresh = nn.Parameter(fresh, t.requires_grad)
            fresh.__dict__.update(t.__dict__)
            if t.grad is not None:
                fresh.grad = torch.empty_like(fresh)
        return fresh

    # -- the two halves --------------------------------------------------------------------------------------------

    def open(self, ranks: Ranks | None) -> Source:
        """Check the files against their checksums, each rank some of them, and open them.

        Raises:
            StateError: on all ranks, if a file is damaged.
            AgreementError: the ranks found different checkpoints.
        """
        if self._source is None:
            both, manifest = Together.of(ranks), self.manifest
            seen = both.all("finding the checkpoint", lambda: (self.folder.name, manifest.saved_at if manifest else 0.0))
            odd = next((r for r, x in enumerate(seen) if x != seen[0]), None)
            if odd is not None:
                raise AgreementError(f"rank 0 found the checkpoint {seen[0][0]}, rank {odd} {seen[odd][0]}",
                                     where=str(self.folder), hint="give all ranks one shared directory")  # fmt: skip
            if manifest is not None:
                mine = share(manifest.files, both.rank, both.world)
                found = both.all("checking the checkpoint", lambda: damage(self.folder, manifest, mine))
                broken = [text for text in found if text]
                if broken:
                    more = f" ({len(broken)} such files)" if len(broken) > 1 else ""
                    raise StateError(f"{broken[0]}{more}", where=str(self.folder),
                                     hint="load an older checkpoint, or restore this one from a copy")  # fmt: skip
            self._source = both.all_own("opening the checkpoint", lambda: source_of(self.folder))
        return self._source

    def prepare(self, arguments: Mapping[str, Any], fn: Callable[..., Any], ranks: Ranks | None) -> bool:
        """The first half; changes nothing if the checkpoint does not fit.

        Returns:
            Whether tensors without memory were made, so that the step has to place them before `fill`.

        Raises:
            StateError: entries missing, left over, or of other shapes; names them.
        """
        source = self.open(ranks)
        self.kept |= {key.removeprefix(SLOT) for key in source.tensors if key.startswith(SLOT)}
        content = collect(arguments, fn, self.kept)
        problems = compare(content, source, own=self.manifest is not None)
        problems.refuse(source.where)
        self._blank.clear()
        for path, obj, _ in content.objects:
            key = ".".join(map(str, path))
            if is_plain_optimizer(obj):
                self._optimizer(obj, key, source)
            elif isinstance(obj, nn.Module):
                for full in [k for k in source.values if k.startswith(f"{key}.") and k.endswith("_extra_state")]:
                    owner = obj.get_submodule(full[len(key) + 1 :].removesuffix("_extra_state").removesuffix("."))
                    get = functools.partial(self._tensor_in, source, full)
                    owner.set_extra_state(filled(copy.deepcopy(source.value(full)), get))
                self._blank.update({id(t): t for t in (*obj.parameters(), *_persistent(obj)) if t.is_meta})
        self._gradients(content, source)
        for path, obj, own in content.objects:
            if not isinstance(obj, nn.Module) and not is_plain_optimizer(obj):
                self._other(obj, ".".join(map(str, path)), own.tensors, source, ranks)
        for place, value in (self.manifest.numbers if self.manifest is not None else {}).items():
            if place in content.world.places:
                write(*content.world.places[place], value)
        self._pending = {id(t): t for t in collect(arguments, fn, self.kept).flat.tensors.values()}
        return bool(self._blank)

    def fill(self, arguments: Mapping[str, Any], fn: Callable[..., Any], ranks: Ranks | None) -> None:
        """The second half: this rank's pieces, read in place.

        Raises:
            StateError: on all ranks, if one cannot read.
        """
        source, content = self.open(ranks), collect(arguments, fn, self.kept)
        parts, wanted = Parts(ranks), []
        skip = [own for _, obj, own in content.objects if not isinstance(obj, nn.Module) and not is_plain_optimizer(obj)]
        done = {key for own in skip for key in own.tensors}
        for key, t in content.flat.tensors.items():
            if key in source.tensors and key not in done:
                if t.is_meta:
                    raise StateError(f"{key} has no memory to be loaded into", where=key, hint="report this: a bug of shardc")
                part = parts.of(t)
                wanted.append(Wanted(key, part.local, part.pieces))
        with torch.no_grad():
            Together.of(ranks).all("reading the checkpoint", lambda: source.read(wanted))
        self._blank, self._pending = {}, {}

    # -- kinds of objects ------------------------------------------------------------------------------------------

    def _optimizer(self, obj: torch.optim.Optimizer, key: str, source: Source) -> None:
        owners = [(p, group) for group in obj.param_groups for p in group["params"]]
        entries: dict[int, list[str]] = {}
        for full in (*source.tensors, *source.values):
            if full.startswith(f"{key}.state."):
                entries.setdefault(int(full[len(key) + 7 :].split(".")[0]), []).append(full)
        values = set(source.values)
        state: dict[Tensor, dict[str, Any]] = {}
        for i in sorted(entries):
            p, group = owners[i]
            old, base = obj.state.get(p, {}), f"{key}.state.{i}."
            new = {}
            for full in entries[i]:
                name = full[len(base) :]
                if full in values:
                    made = functools.partial(self._entry_in, p, group, source, full)
                    new[name] = filled(copy.deepcopy(source.value(full)), made)
                elif not any(full.startswith(f"{other}.") for other in entries[i] if other in values):
                    new[name] = self._entry(p, group, old.get(name), name, source, full)
            state[p] = new
        order = [p for p in obj.state if p not in state]
        for p in order:
            del obj.state[p]
        obj.state.clear()
        obj.state.update(state)
        for g, group in enumerate(obj.param_groups):
            base = f"{key}.param_groups.{g}."
            for full in values:
                if full.startswith(base) and full != f"{base}params":
                    group[full[len(base) :]] = copy.deepcopy(source.value(full))
            for full in source.tensors:
                if full.startswith(base) and not isinstance(group.get(full[len(base) :]), Tensor):
                    group[full[len(base) :]] = self._small(source, full, torch.device("cpu"))

    def _entry_in(self, p: Tensor, group: Mapping[str, Any], source: Source, full: str, hole: str) -> Tensor:
        return self._entry(p, group, None, "", source, f"{full}.{hole}")

    def _entry(self, p: Tensor, group: Mapping[str, Any], old: Any, name: str, source: Source, full: str) -> Tensor:
        """The tensor of a piece of optimizer state: the one that is there, a new one, or one without memory yet."""
        stored = source.tensors[full]
        if isinstance(old, Tensor) and not old.is_meta and (tuple(old.shape), old.dtype) == (stored.shape, stored.dtype):
            return old
        if not stored.shape:
            on_host = name == "step" and not group.get("capturable") and not group.get("fused") or p.is_meta
            return self._small(source, full, torch.device("cpu") if on_host else p.device)
        same = stored.shape == tuple(p.shape)
        stride = p.stride() if same else torch.empty(stored.shape, device="meta").stride()
        blank = torch.empty_strided(stored.shape, stride, dtype=stored.dtype, device="meta")
        self._blank[id(blank)] = blank
        return blank

    def _tensor_in(self, source: Source, full: str, hole: str) -> Tensor:
        return self._small(source, f"{full}.{hole}", torch.device("cpu"))

    def _small(self, source: Source, full: str, device: torch.device) -> Tensor:
        stored = source.tensors[full]
        out = torch.empty(stored.shape, dtype=stored.dtype)
        part = Parts(None).of(out)
        source.read([Wanted(full, part.local, part.pieces)])
        return out.to(device)

    def _other(self, obj: Any, key: str, live: Mapping[str, Tensor], source: Source, ranks: Ranks | None) -> None:
        """A scheduler, a scaler, any object with `load_state_dict`; its tensors are sharded if they are now."""
        parts = Parts(ranks)

        def get(hole: str) -> Tensor:
            full = f"{key}.{hole}"
            stored, like = source.tensors[full], live.get(full)
            fits = like is not None and tuple(like.shape) == stored.shape and not like.is_meta
            plain = None if fits and like is not None else torch.empty(stored.shape, dtype=stored.dtype)
            out = torch.empty_like(like, dtype=stored.dtype) if plain is None and like is not None else plain
            assert out is not None
            part = parts.of(out)
            source.read([Wanted(full, part.local, part.pieces)])
            return out

        with torch.no_grad():
            obj.load_state_dict(filled(copy.deepcopy(source.value(key)), get))

    def _gradients(self, content: Content, source: Source) -> None:
        """Gradients that survive a step are there afterwards iff they were when the checkpoint was made."""
        if self.manifest is None:
            return
        for path, ref in content.world.slots.items():
            if not ref.trainable:
                continue
            p, stored = ref.get(), f"{SLOT}{path}.grad" in source.tensors
            if not stored:
                p.grad = None
            elif p.grad is None:
                p.grad = torch.zeros_like(p)


def _persistent(module: nn.Module) -> list[Tensor]:
    named = [(b, name in m._non_persistent_buffers_set) for m in module.modules() for name, b in m._buffers.items()]
    return [b for b, gone in named if b is not None and not gone]
