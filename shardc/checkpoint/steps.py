"""`shardc.save` and `shardc.load`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from shardc.checkpoint.collect import collect, plain_numbers
from shardc.checkpoint.directory import Manifest, manifest_of, newest
from shardc.checkpoint.modules import load_module, save_module
from shardc.checkpoint.pieces import Parts
from shardc.checkpoint.restore import Loading
from shardc.checkpoint.sources import source_of
from shardc.checkpoint.together import Together
from shardc.checkpoint.write import Content, Saving, saving_group, write
from shardc.errors import AgreementError, StateError
from shardc.hosts import Host
from shardc.options import Options


@dataclass
class Checkpoints:
    """What a step remembers of its checkpoints.

    Args:
        loading: one that is to be put into the state at the next call.
        saving: the last asynchronous save.
        group: on which asynchronous saves talk.
    """

    loading: Loading | None = None
    saving: Saving | None = None
    group: dist.ProcessGroup | None = field(default=None, repr=False)


class Step(Protocol):
    """The parts of a compiled step that checkpoints read and set."""

    fn: Callable[..., Any]
    options: Options
    step: int
    __name__: str
    checkpoints: Checkpoints
    _host: Host | None
    _arguments: dict[str, Any]
    _poisoned: str | None
    _seed: int | None
    _kept: frozenset[str]

    def changed_numbers(self) -> set[str]: ...


def save(path: str | Path, step: Step | nn.Module, *, asynchronous: bool = False) -> Saving | None:
    """Save the state of a compiled step: modules, optimizers, schedulers and all else with a state dict among its arguments,
    surviving gradients, the step counter and the random stream. All ranks call it; each writes its own shards.

    The checkpoint at `path` is replaced at the very end: an interrupted save leaves it as it was.

    Args:
        path: a directory. For a module: a ``.safetensors`` file.
        step: what `shardc.compile` made, after a call; or a module, to export its weights.
        asynchronous: copy the state to host memory and return; a thread does the rest.

    Returns:
        With `asynchronous` a handle; `result()` waits. The next save waits too, and raises if this one failed.

    Raises:
        StateError: the step has not run, or its state is that of half a step; the directory holds something else; no space.
        AgreementError: the ranks save different things.

    Example::

        if i % 100 == 0:
            shardc.save("checkpoint", train_step)
    """
    path = Path(path)
    if isinstance(step, nn.Module):
        save_module(path, step)
        return None
    if step._poisoned is not None:
        raise StateError(f"the state is that of half a step: {step._poisoned}", hint="load the last checkpoint")
    if step._host is None or not step._arguments or step.checkpoints.loading is not None:
        raise StateError(f"{step.__name__} has not run yet" + (" since a checkpoint was loaded" if step._arguments else ""),
                         hint="save after a call")  # fmt: skip
    ranks = step._host.ranks
    if step.checkpoints.saving is not None:
        before, step.checkpoints.saving = step.checkpoints.saving, None
        before.result()
    if asynchronous and ranks.distributed and step.checkpoints.group is None:
        step.checkpoints.group = saving_group()
    together = Together.of(ranks)
    said = together.all("saving", lambda: f"{step.__name__} at {path} after step {step.step}")
    if any(text != said[0] for text in said):
        odd = next(r for r, text in enumerate(said) if text != said[0])
        raise AgreementError(f"rank 0 saves {said[0]}, rank {odd} saves {said[odd]}", hint="save the same on all ranks")

    def take() -> tuple[Content, Manifest]:
        found = collect(step._arguments, step.fn, step._kept)
        content = Content(found.flat, Parts(ranks), together.rank, asynchronous)
        numbers = plain_numbers(found.world, step.changed_numbers())
        torchs = step.options.rng == "torch"
        generator = bytes(torch.default_generator.get_state().tolist()).hex() if torchs else ""
        axes = dict(ranks.mesh.axes)
        return content, Manifest(
            step.step, step._seed or 0, step.options.rng, generator, time.time(), axes, step.options.zero, numbers
        )

    content, manifest = together.all_own("collecting the state", take)
    if not asynchronous:
        write(path, content, manifest, together)
        return None
    step.checkpoints.saving = Saving(path, content, manifest, Together.of(ranks, step.checkpoints.group))
    return step.checkpoints.saving


def load(path: str | Path, step: Step | nn.Module, *, missing_ok: bool = False) -> int:
    """Put a checkpoint into the state of a compiled step, on any mesh and at any stage.

    After a call it is done at once, in place. Before the first call (in a new process) it is remembered, and done when the
    first call shows the arguments: their values are then those of the checkpoint, whatever they were, and each rank reads its
    own shards only.

    Args:
        path: of a checkpoint of `save`, a folder of several (the newest complete one is taken), a directory of
            torch.distributed.checkpoint, or a file of ``torch.save(step.full_state_dict())``.
        step: what `shardc.compile` made; or a module, for weights alone (also from safetensors).
        missing_ok: no error if nothing is there: training starts anew.

    Returns:
        The number of steps that the checkpoint has behind it; 0 if there is none, or it does not say.

    Raises:
        StateError: nothing there, damaged, or it does not fit: names what is missing, left over or of another shape.

    Example::

        start = shardc.load("checkpoint", train_step, missing_ok=True)
        for i in range(start, steps): ...
    """
    path = Path(path)
    if isinstance(step, nn.Module):
        load_module(path, step)
        return 0
    if step.checkpoints.saving is not None:
        step.checkpoints.saving.result()
    folder = newest(path)
    if folder is None and missing_ok and not path.exists():
        return 0
    manifest = manifest_of(folder) if folder is not None else None
    if folder is None:
        source_of(path)
    loading = Loading(folder or path, manifest, step._kept)
    if manifest is not None:
        _check_stream(step, manifest, str(folder))
    if step._host is not None and step._arguments:
        ranks = step._host.ranks
        if loading.prepare(step._arguments, step.fn, ranks):
            step.checkpoints.loading = loading
        else:
            step._poisoned = "a checkpoint was loaded in part"
            loading.fill(step._arguments, step.fn, ranks)
    else:
        step.checkpoints.loading = loading
    step._poisoned = None
    if manifest is None:
        return 0
    step.step, step._seed = manifest.step, manifest.seed
    if manifest.rng == "torch":
        torch.default_generator.set_state(torch.tensor(list(bytes.fromhex(manifest.generator)), dtype=torch.uint8))
    return manifest.step


def _check_stream(step: Step, manifest: Manifest, where: str) -> None:
    if manifest.rng != step.options.rng:
        raise StateError(f"the checkpoint was made with rng={manifest.rng!r}, the step has rng={step.options.rng!r}",
                         where=where, hint=f"compile the step with rng={manifest.rng!r}")  # fmt: skip
    if step.options.seed is not None and manifest.rng == "counter" and step.options.seed != manifest.seed:
        raise StateError(f"the checkpoint was made with seed={manifest.seed}, the step has seed={step.options.seed}",
                         where=where, hint=f"compile the step with seed={manifest.seed}, or without")  # fmt: skip
