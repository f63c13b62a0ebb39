"""Factor rules: how each operator may be split over ranks. One small table for each family of operators."""

from shardc.rules.call import map_operands, tensor_operands
from shardc.rules.catalogue import prove, table
from shardc.rules.decompose import decompositions, masked_writes, writes_one_value
from shardc.rules.decompose_split import split_forms
from shardc.rules.localise import localise
from shardc.rules.registry import has_rule, register, rule_for, unregister
from shardc.rules.rule import Rule

__all__ = [
    "Rule",
    "decompositions",
    "has_rule",
    "localise",
    "map_operands",
    "masked_writes",
    "prove",
    "register",
    "rule_for",
    "split_forms",
    "table",
    "tensor_operands",
    "unregister",
    "writes_one_value",
]
