"""shardc: a functional sharding compiler for PyTorch training steps."""

from shardc.api import CompiledStep, compile
from shardc.errors import ShardcError
from shardc.mesh import Mesh
from shardc.ops.constrain import constrain
from shardc.plan import Plan
from shardc.runtime.whole import gathered
from shardc.spec import P, ShardSpec

__all__ = ["CompiledStep", "Mesh", "P", "Plan", "ShardSpec", "ShardcError", "compile", "constrain", "gathered"]
