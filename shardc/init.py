"""`shardc.init`: a model that is sharded from the start, with the values that one device would draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardc.capture.walk import walk_world
from shardc.errors import StateError
from shardc.options import Options
from shardc.passes.annotate import slot_storage
from shardc.program import Slot, TensorType
from shardc.runtime.agree import agree
from shardc.runtime.deferred import Recorder
from shardc.runtime.fingerprint import fingerprint
from shardc.runtime.state import shard_module_state
from shardc.runtime.world import setup

M = TypeVar("M", bound=nn.Module)


class _Drawn:
    """Values by replay, see `shardc.runtime.deferred`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def gives(self, t: Tensor) -> bool:
        return t.is_meta

    def replaces(self, t: Tensor) -> bool:
        return False

    def whole(self, t: Tensor, device: torch.device) -> Tensor:
        value = self.recorder.value(t).detach().to(device)
        if isinstance(t, nn.Parameter):
            value = nn.Parameter(value, t.requires_grad)
        value.__dict__.update(t.__dict__)
        return value


def init(make_model: Callable[[], M], step: Any = None, **options: Any) -> M:
    """Make a model whose parameters rest sharded from the start: no rank ever holds more of it than its shards and one tensor.

    `make_model` runs as it is, but on tensors without memory; then each tensor's values are drawn, cut and dropped, one after
    the other. They are bit for bit those of ``make_model()`` on one device from the same seed, whatever it does, and the
    random generator is left as that would leave it. On one rank and on a simulated mesh the tensors are whole, as ever.

    Args:
        make_model: returns a module; called once.
        step: the compiled step that will train it, for its mesh, zero and params. Else:
        **options: as of `shardc.compile`.

    Raises:
        StateError: both `step` and options; not a module; something in `make_model` that needs memory (``.numpy()``).
        AgreementError: the ranks' random generators differ: ``torch.manual_seed`` first.

    Example::

        torch.manual_seed(0)
        model = shardc.init(lambda: GPT(config), train_step)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    if step is not None and options:
        raise StateError(f"shardc.init takes a step or options ({', '.join(options)}), not both", hint="leave the options out")
    found: Options = step.options if step is not None else Options.of(options)
    ranks = setup(found.mesh)
    generator = str(fingerprint(torch.get_rng_state()))
    agree(ranks, {"random generator before shardc.init (torch.manual_seed on all ranks)": generator})
    with Recorder() as recorder:
        model = make_model()
    if not isinstance(model, nn.Module):
        raise StateError(f"make_model returned a {type(model).__name__}, not a module", hint="return the model")
    world = walk_world({"model": model}, [])
    agree(ranks, {"model of shardc.init": "\n".join(f"{p} {tuple(ref.get().shape)}" for p, ref in world.slots.items())})
    typed = [Slot(r.path, r.kind, TensorType.of(r.get()), r.of, r.aliases) for r in world.slots.values()]
    specs = slot_storage(typed, found, ranks.mesh)
    slots = list(world.slots.values())
    del world
    shard_module_state(slots, specs, ranks, [model], compare=False, values=_Drawn(recorder))
    return model
