"""Updates of torch.optim, and of the loss scale, as one operator: everything that has the parameter's shape is split alike, the
rest is whole."""

from __future__ import annotations

from shardc.rules.call import Builder, Call, Draft
from shardc.rules.rule import WHOLE, Factors, Rule

NAMES = """
    adam adam_amsgrad sgd sgd_momentum_first sgd_momentum adagrad rmsprop rmsprop_centered rmsprop_momentum
    rmsprop_centered_momentum radam asgd
"""


def update(call: Call) -> Rule:
    """Operand 0 is the parameter. Step counters are whole, and every part advances them, an empty one as well."""
    draft = Draft(call)
    shape = call.operands[0].shape
    dims = tuple(draft.fresh(shape))

    def factors(other: tuple[int, ...]) -> Factors:
        return dims if other == shape else tuple(draft.fresh(other, WHOLE))

    results = [None if r is None else factors(r.shape) for r in call.results]
    return draft.rule([factors(t.shape) for t in call.operands], results)


TABLE: dict[str, Builder] = {
    **{f"shardc.{name}.default": update for name in NAMES.split()},
}
