"""Test doubles and conformance checks, shipped so that your own targets and drafters can be tested.

    check_target(lambda: MyTarget(tiny_model), vocab_size=96)
    check_drafter(lambda: MyDrafter(), vocab_size=96)

Both raise AssertionError with what did not hold.
"""

from forerun.testing.conformance import check_drafter, check_target
from forerun.testing.doubles import (
    FakeSeq,
    LawDrafter,
    ScriptedDrafter,
    TableLM,
    extend,
    path_to,
    random_tree,
    random_verdict,
    tree_of,
)
from forerun.testing.faults import Fault, count_points

__all__ = [
    "FakeSeq",
    "Fault",
    "LawDrafter",
    "ScriptedDrafter",
    "TableLM",
    "check_drafter",
    "check_target",
    "count_points",
    "extend",
    "path_to",
    "random_tree",
    "random_verdict",
    "tree_of",
]
