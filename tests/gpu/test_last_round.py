"""What the device keeps of its last round for a round that is launched before that one is read, part by part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from forerun.core.types import TreeForm
from forerun.models.cuda.device_trees import LastRound, Outcome, Placing, TreesPass
from forerun.models.cuda.network import Run
from forerun.models.cuda.plain_rounds import complete_roots
from forerun.models.cuda.plan import MAX_ROWS, plan_pass
from forerun.models.pages import PAGE

CPU = torch.device("cpu")


def last_of_trees() -> LastRound:
    """Of three trees of four nodes: two, none and three nodes were accepted."""
    last = LastRound(CPU)
    tokens = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
    paths = torch.tensor([[1, 3, -1], [-1, -1, -1], [1, 2, 3]])
    last.note(tokens, paths, torch.tensor([2, 0, 3]), torch.tensor([19, 29, 39]))
    return last


def test_tokens_and_rows_of_accepted_paths_are_kept_and_the_bonus_is_behind_them() -> None:
    last = last_of_trees()
    assert last.accepted[:3].tolist() == [2, 0, 3]
    assert [last.tokens[b, : n + 1].tolist() for b, n in enumerate((2, 0, 3))] == [[11, 13, 19], [29], [31, 32, 33, 39]]
    assert [last.rows[b, : n + 1].tolist() for b, n in enumerate((2, 0, 3))] == [[0, 1, 3], [4], [8, 9, 10, 11]]
    assert last.added(torch.tensor([2, -1, 0, 1])).tolist() == [4, 0, 3, 1], "root and path; nothing where none follows"


def test_lone_roots_behind_trees_add_one_row_each() -> None:
    last = last_of_trees()
    last.note_roots(torch.tensor([7, 8]))
    assert last.accepted[:3].tolist() == [0, 0, 3]
    assert (last.tokens[:2, 0].tolist(), last.rows[:2, 0].tolist()) == ([7, 8], [0, 1])
    assert last.added(torch.tensor([0, 1])).tolist() == [1, 1]


def test_roots_behind_trees_are_found_and_placed_on_the_device() -> None:
    roots = [(-1, [5, 6], 60), (77, [2], 9), (-3, [3, 4], 63)]  # behind the first tree, behind none, behind the third
    plan = plan_pass([], 16, roots=roots, added=4)
    ints = torch.zeros(MAX_ROWS + len(plan.ints), dtype=torch.int32)
    ints[MAX_ROWS:] = torch.from_numpy(plan.ints)
    complete_roots(ints, plan.size, 3, last_of_trees())
    run = Run.of(plan.size, ints)
    assert run.tokens[:3].tolist() == [19, 77, 39]
    assert run.positions[:3].tolist() == [63, 9, 67]
    pages = [[5, 6], [2], [3, 4]]
    slots = [held[at // PAGE] * PAGE + at % PAGE for held, at in zip(pages, (63, 9, 67), strict=True)]
    assert run.slots[:3].tolist() == slots
    assert run.groups[:3, 5].tolist() == [63, 9, 67]


def test_an_outcome_is_the_latest_until_another_pass_or_a_plain_one_is_launched_behind_it() -> None:
    def outcome(number: int, **buffers: int) -> Outcome:
        known: Any = SimpleNamespace(**{"passes": 3, "superseded": 0, "moved": 2, **buffers})
        return Outcome(known, number, [0, 1, 2])

    assert [outcome(number).is_latest for number in (2, 3)] == [False, True]
    assert not outcome(3, superseded=3).is_latest, "a plain round follows it, and no draft"
    assert outcome(3, superseded=2).is_latest
    assert [outcome(number).is_moved for number in (1, 2, 3)] == [True, True, False]
    assert list(outcome(3).kept([2, 0]).kept([1]).trees) == [0]


def test_a_round_behind_trees_may_be_as_much_longer_as_their_deepest_path() -> None:
    kv: Any = SimpleNamespace()
    placing = Placing(kv, lambda seq, nodes: kv)
    assert placing.added == 1
    placing.last = TreesPass(TreeForm(2, 6, 5, 1), lambda: kv)
    assert placing.added == 6
