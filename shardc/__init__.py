"""shardc: a functional sharding compiler for PyTorch training steps."""

import importlib

from shardc.api import CompiledStep, compile
from shardc.checkpoint import load, save
from shardc.errors import ShardcError
from shardc.init import init
from shardc.mesh import Mesh
from shardc.ops.constrain import constrain
from shardc.ops.save_name import save_name
from shardc.plan import Plan
from shardc.runtime.whole import gathered
from shardc.spec import P, ShardSpec


def __getattr__(name: str) -> object:
    """`shardc.testing`, `shardc.rules` and `shardc.recipes` without an import of their own."""
    if name in ("testing", "rules", "recipes"):
        return importlib.import_module(f"shardc.{name}")
    raise AttributeError(f"module 'shardc' has no attribute {name!r}")


__all__ = [
    "CompiledStep",
    "Mesh",
    "P",
    "Plan",
    "ShardSpec",
    "ShardcError",
    "compile",
    "constrain",
    "gathered",
    "init",
    "load",
    "save",
    "save_name",
]
