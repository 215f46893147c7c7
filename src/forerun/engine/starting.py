"""Who starts with the pass that reads the rest of its prompt: its first token then comes with that pass.

In a plain round a root is a row more. Beside trees that a device has grown, a root gets a tree of their form, and only
where the pass has padding, so that it costs nothing: forms have trees for 8, 12 or 16 sequences, not for 9. Nobody has
drafted such a tree: what is accepted of it, by chance, is all that counts as drafted. Beside trees from the host nobody
starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from forerun.engine.sequence import SequenceState, traits_of
from forerun.types import TreeBatch, TreeForm

if TYPE_CHECKING:
    from forerun.engine.engine import Engine


def with_starters(
    engine: Engine, seqs: list[SequenceState], trees: TreeBatch, readers: Sequence[SequenceState], rows: int
) -> tuple[list[SequenceState], TreeBatch]:
    """A round that is launched, with those of the readers who start with it."""
    starters = list[SequenceState]()
    if trees.form is not None:
        starters, trees = in_padding(engine, seqs, trees, readers, rows)
    elif trees.is_plain():
        starters = engine.scheduler.starters(readers, len(seqs) + len(readers), rows)
        if starters:
            trees = TreeBatch.chains([seq.tokens[-1:] for seq in (*seqs, *starters)])
            trees.undrafted = len(starters)
    engine.scheduler.start(starters)
    return [*seqs, *starters] if starters else seqs, trees


def in_padding(
    engine: Engine,
    others: Sequence[SequenceState],
    trees: TreeBatch,
    readers: Sequence[SequenceState],
    rows: int,
    sampled: bool = True,
) -> tuple[list[SequenceState], TreeBatch]:
    """Readers who start beside trees of a form, in place of its padding, and the trees of all.

    None where the device could not decide about them and `others`: the next round is to follow unread.
    """
    form, grower = trees.form, trees.grower
    if form is None or grower is None or not grower.follows_undrafted or not readers:
        return [], trees
    starters = engine.scheduler.starters(readers, form.rows, rows)[: form.trees - len(trees)]
    has_room = engine.target.has_room(*[len(seq.tokens) + form.nodes for seq in starters])
    if not starters or not has_room or not device_decides(engine, [*others, *starters], sampled):
        return [], trees
    return starters, _with_undrafted(trees, form, [seq.tokens[-1] for seq in starters])


def _with_undrafted(trees: TreeBatch, form: TreeForm, roots: Sequence[int]) -> TreeBatch:
    """These trees, and one behind them for each root, with the nodes of the first: a tree like any other.

    The host sends no array, as it would wait for the device.
    """
    columns, nodes = (trees.tokens, trees.parents), form.nodes
    tokens, parents = (torch.cat((each, each[:nodes].repeat(len(roots)))) for each in columns)
    for place, root in enumerate(roots, start=len(trees)):
        tokens[place * nodes].fill_(root)
    return TreeBatch(
        tokens, parents, form.starts(len(trees) + len(roots)), form=form, device_seconds=trees.device_seconds,
        grower=trees.grower, follows=None if trees.follows is None else (*trees.follows, *[-1] * len(roots)),
        undrafted=len(roots),
    )  # fmt: skip


def device_decides(engine: Engine, seqs: Sequence[SequenceState], sampled: bool) -> bool:
    """Does the device decide about all of these (`sampled`: it samples), and does one drafter serve them?"""
    if len({seq.drafting for seq in seqs}) > 1:
        return False
    traits = traits_of(seqs)
    if any(one.wants_logprobs or not engine.verifiers.is_exact(one.verifier) for one in traits):
        return False
    greedy = all(one.is_plain_greedy for one in traits)
    return greedy or (sampled and engine.verifiers.device_decides(seqs))
