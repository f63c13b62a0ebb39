"""The exceptions of shardc. Every message says what, where, the numbers, and the way out."""

from __future__ import annotations


class ShardcError(Exception):
    """Base of all errors of shardc.

    Args:
        what: one sentence: what is wrong, with the numbers.
        where: the tensor path, or the user's source line, or both.
        hint: what to do next.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__("\n  ".join([what, *(f"at: {where}" for _ in [0] if where), *(f"try: {hint}" for _ in [0] if hint)]))


class MeshError(ShardcError):
    """A mesh that cannot be built, or does not fit the world size."""


class SpecError(ShardcError):
    """A shard spec that is malformed, of wrong rank, or contradicts another one."""


class OptionError(ShardcError):
    """An option of `shardc.compile` of wrong type, unknown name, or without effect."""


class CaptureError(ShardcError):
    """The step does something that cannot be captured; names the attribute and the line."""


class RuleError(ShardcError):
    """An operator without a factor rule, or a rule that does not fit its operands."""


class StateError(ShardcError):
    """User state (modules, optimizers) that is not what the compiled step left behind."""


class InputError(ShardcError):
    """Arguments of a call that do not fit the program, or differ between ranks."""


class AgreementError(ShardcError):
    """Ranks hold different programs, plans or signatures."""


class RuntimeFailure(ShardcError):
    """A step failed while running: the instruction, the user's line and the tensors."""


class PlanError(ShardcError):
    """A plan that cannot be made, saved, loaded, or does not fit the model or mesh."""


class VerifyError(ShardcError):
    """A pass left a program that breaks the invariants of the IR (a bug of shardc)."""
