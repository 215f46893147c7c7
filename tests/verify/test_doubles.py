"""The shipped doubles keep the contracts, and the shipped checks catch those who break them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from forerun.core.types import Budget, Draws, Needs, Prompts, Scores, Seq, TreeBatch, Verdict
from forerun.testing import FakeSeq, LawDrafter, ScriptedDrafter, TableLM, check_drafter, check_target

V = 11
NEEDS = Needs((-1, 2))
LAW = TableLM(V, seed=3).law


class Leaky(TableLM):
    def release(self, seq: Seq) -> None:
        """Holds on to everything."""


class ByIndex(TableLM):
    """Takes a tree for a chain: each node sees the nodes before it, not its ancestors."""

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        scores = super().score(seqs, trees, needs, prompts)
        assert scores.logits is not None
        for b, seq in enumerate(seqs):
            tokens = trees.tokens[trees.starts[b] : trees.starts[b + 1]].tolist()
            for i in range(len(tokens)):
                scores.logits[trees.starts[b] + i] = self.logits(seq.tokens + tokens[1 : i + 1])
        return scores


class Mixing(TableLM):
    """Its scores depend on who is in the batch."""

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        scores = super().score(seqs, trees, needs, prompts)
        assert scores.logits is not None
        return replace(scores, logits=scores.logits + 0.01 * (len(seqs) > 1))


class Hasty(TableLM):
    """Reads prompts whole, whatever it was asked."""

    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        return super().prefill(seqs, needs)


class Inattentive(TableLM):
    """Leaves prompts for later."""

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        return super().score(seqs, trees, needs)


class Rootless(TableLM):
    """Forgets to keep the root."""

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        super().commit(seqs, trees, verdict)
        for seq in seqs:
            self._cached[seq.id].pop()


class Unseeing(TableLM):
    """Hidden rows of the wrong number."""

    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        trees, scores = super().prefill(seqs, needs, rows)
        return trees, Scores(None, {layer: rows[1:] for layer, rows in scores.hidden.items()})


@pytest.mark.parametrize("seed", range(3))
def test_the_table_keeps_the_contract(seed: int) -> None:
    check_target(lambda: TableLM(V), vocab_size=V, needs=NEEDS, seed=seed)


@pytest.mark.parametrize("broken", [Leaky, ByIndex, Mixing, Rootless, Unseeing, Hasty, Inattentive])
def test_broken_targets_are_caught(broken: type[TableLM]) -> None:
    with pytest.raises(AssertionError):
        check_target(lambda: broken(V), vocab_size=V, needs=NEEDS)


@pytest.mark.parametrize("seed", range(3))
def test_the_drafters_keep_the_contract(seed: int) -> None:
    for how in ("chosen", "sampled", "distinct"):
        check_drafter(lambda how=how: LawDrafter(LAW, how), vocab_size=V, seed=seed)  # type: ignore[misc]
    check_drafter(lambda: ScriptedDrafter.random(V), vocab_size=V, seed=seed)


class Broken(LawDrafter):
    """A sampling drafter that spoils what it proposes in one way."""

    spoiling = ""

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        if self.spoiling == "budget":
            budgets = [Budget(2, 2)] * len(seqs)
        if self.spoiling == "depth":
            budgets = [Budget(budget.nodes, 9) for budget in budgets]
        trees = super().propose(seqs, budgets)
        draws = trees.drawn_from
        if draws is None:
            return trees
        changes = {
            "root": TreeBatch((trees.tokens + 1) % V, trees.parents, trees.starts, draws),
            "law": TreeBatch(trees.tokens, trees.parents, trees.starts, Draws(draws.laws * 2, draws.rows, True)),
            "rows": TreeBatch(trees.tokens, trees.parents, trees.starts, Draws(draws.laws, draws.rows + 1, True)),
            "vocabulary": TreeBatch(
                torch.where(trees.parents < 0, trees.tokens, V), trees.parents, trees.starts, draws
            ),
            "order": TreeBatch(trees.tokens, trees.parents.clamp(max=0) + 5, trees.starts, draws),
        }
        return changes.get(self.spoiling, trees)


@pytest.mark.parametrize("spoiling", ["budget", "depth", "root", "law", "rows", "vocabulary", "order"])
def test_broken_drafters_are_caught(spoiling: str) -> None:
    def make() -> Broken:
        drafter = Broken(LAW)
        drafter.spoiling = spoiling
        return drafter

    with pytest.raises(AssertionError):
        check_drafter(make, vocab_size=V)


def test_equal_chosen_siblings_are_caught() -> None:
    twins = ScriptedDrafter(lambda seq, budget: ([seq.tokens[-1], 3, 3], [-1, 0, 0]))
    with pytest.raises(AssertionError, match="equal siblings"):
        check_drafter(lambda: twins, vocab_size=V)


def test_the_table_refuses_misuse() -> None:
    target, seq = TableLM(V, max_length=4), FakeSeq(0, [1, 2, 3])
    chain = TreeBatch.chains([[3, 4]])
    with pytest.raises(AssertionError, match="without prefill"):
        target.score([seq], chain, Needs())
    target.prefill([seq], Needs())
    with pytest.raises(AssertionError, match="root"):
        target.score([seq], TreeBatch.chains([[4]]), Needs())
    with pytest.raises(AssertionError, match="longer"):
        target.score([seq], TreeBatch.chains([[3, 4, 5]]), Needs())
    with pytest.raises(AssertionError, match="not scored"):
        target.commit([seq], chain, Verdict.of([[1]], [0], "cpu"))
    target.score([seq], chain, Needs())
    target.commit([seq], chain, Verdict.of([[1]], [0], "cpu"))
    assert target.used_slots == 4
    with pytest.raises(AssertionError, match="does not hold its tokens"):
        target.score([seq], TreeBatch.chains([[3]]), Needs())
    target.release(seq)
    assert target.used_slots == 0


def test_a_path_that_is_none_is_refused() -> None:
    target, seq = TableLM(V), FakeSeq(0, [1])
    trees = TreeBatch.trees([([1, 2, 3], [-1, 0, 0])])
    target.prefill([seq], Needs())
    target.score([seq], trees, Needs())
    with pytest.raises(AssertionError, match="no path"):
        target.commit([seq], trees, Verdict.of([[1, 2]], [0], "cpu"))


def test_room_is_counted_in_slots() -> None:
    target = TableLM(V, slots=6)
    target.prefill([FakeSeq(0, [1, 2, 3, 4])], Needs())
    assert target.has_room(3)
    assert not target.has_room(4)


def test_scripts_are_cut_to_the_budget() -> None:
    drafter = ScriptedDrafter(lambda seq, budget: ([seq.tokens[-1], 1, 2, 3, 4], [-1, 0, 1, 2, 0]))
    seq = FakeSeq(0, [9])
    for budget, tokens in [(Budget(9, 9), [9, 1, 2, 3, 4]), (Budget(2, 9), [9, 1, 2]), (Budget(9, 1), [9, 1, 4])]:
        assert drafter.propose([seq], [budget]).tokens.tolist() == tokens
