"""What must hold of every head: the contract, no memory of earlier drafts, no influence of neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.core import registry
from forerun.core.errors import InvalidInput, ModelNotFound
from forerun.core.noise import exponential
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Budget
from forerun.drafters.base import Drafter, Parts
from forerun.drafters.heads.block_config import KINDS
from forerun.testing import FakeSeq, TableLM, check_drafter
from tests.drafters.rounds import as_lists, observe_prompts, play
from tests.drafters.tiny_heads import BLOCKS, DEEP, HEADS, save_head

VOCAB = 13
BUDGET = Budget(7, 4, width=3)
HOTTEST = 1e4
ALL = (*HEADS, DEEP, *BLOCKS)


def make(name: str, folder: Path, **more: str) -> Drafter:
    if not (folder / "config.json").is_file():
        save_head(name, folder, VOCAB)
    drafted = "eagle3" if name == DEEP else name.partition(" ")[0]
    speculative = SpeculativeConfig(drafter=drafted, draft_model=str(folder))
    drafter: Drafter = registry.drafters.get(drafted).build(Parts(TableLM(VOCAB), None, speculative))
    if more:
        drafter.sampled = True  # type: ignore[attr-defined]
    return drafter


@pytest.mark.parametrize("name", ALL)
def test_the_contract(name: str, tmp_path: Path) -> None:
    check_drafter(lambda: make(name, tmp_path), vocab_size=VOCAB, rounds=12)


@pytest.mark.parametrize("name", ["hydra", "eagle", "eagle3", DEEP, "mtp", "dflash", "dspark", "peagle", *BLOCKS])
def test_the_contract_of_sampled_chains(name: str, tmp_path: Path) -> None:
    check_drafter(lambda: make(name, tmp_path, how="sampled"), vocab_size=VOCAB, rounds=12)


@pytest.mark.parametrize("name", ALL)
def test_a_draft_depends_on_the_text_alone(name: str, tmp_path: Path) -> None:
    """After rounds of drafts, accepted and not, a head drafts as one that was shown the text as a prompt."""
    target, drafter = TableLM(VOCAB), make(name, tmp_path)
    seqs = [FakeSeq(0, [1, 2, 3, 4, 5]), FakeSeq(1, [7, 8]), FakeSeq(2, [9])]
    observe_prompts(drafter, target, seqs)
    budgets = [BUDGET, Budget(0, 0), Budget(3, 3)]
    play(drafter, target, seqs, budgets, rounds=7, seed=3)
    fresh, again = make(name, tmp_path), TableLM(VOCAB)
    copies = [FakeSeq(seq.id, list(seq.tokens)) for seq in seqs]
    observe_prompts(fresh, again, copies)
    wishes = [BUDGET, BUDGET, Budget(5, 2, width=2)]
    drafts = as_lists(drafter.propose(seqs, wishes))
    assert drafts == as_lists(fresh.propose(copies, wishes))
    assert all(len(tokens) > 1 for tokens, _ in drafts)
    alone = [as_lists(drafter.propose([seq], [wish]))[0] for seq, wish in zip(seqs, wishes, strict=True)]
    assert alone == drafts  # neighbours do not matter either, nor does drafting twice


@pytest.mark.parametrize("name", ALL)
def test_a_long_prompt_is_caught_up_with_in_pieces(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, whole = TableLM(VOCAB), make(name, tmp_path)
    seqs = [FakeSeq(0, [i * 7 % VOCAB for i in range(40)]), FakeSeq(1, [i * 5 % VOCAB for i in range(9)])]
    observe_prompts(whole, target, seqs)
    wanted = as_lists(whole.propose(seqs, [BUDGET, BUDGET]))
    for module in ("eagle_head", "eagle_native", "block"):
        monkeypatch.setattr(f"forerun.drafters.heads.{module}.CHUNK", 7)
    pieces = make(name, tmp_path)
    observe_prompts(pieces, TableLM(VOCAB), seqs)
    assert as_lists(pieces.propose(seqs, [BUDGET, BUDGET])) == wanted


@pytest.mark.parametrize("name", ALL)
def test_a_price_cuts_the_tree_and_a_chain_stays_a_chain(name: str, tmp_path: Path) -> None:
    target, drafter = TableLM(VOCAB), make(name, tmp_path)
    seq = FakeSeq(0, [1, 2, 3, 4])
    observe_prompts(drafter, target, [seq])
    free = as_lists(drafter.propose([seq], [Budget(6, 4, 3)]))[0]
    dear = as_lists(drafter.propose([seq], [Budget(6, 4, 3, price=tuple(1.0 + 5.0 * n for n in range(7)))]))[0]
    chain = as_lists(drafter.propose([seq], [Budget(4, 4, 1)]))[0]
    assert len(free[0]) > 2
    assert dear == ([4], [-1])
    assert chain[1] == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize("name", ALL)
def test_noise_that_is_shared_is_the_verifiers(name: str, tmp_path: Path) -> None:
    """At a huge temperature noise alone decides: a head then guesses what coupled verification will choose.

    Greedy texts know no noise.
    """
    target, drafter = TableLM(VOCAB), make(name, tmp_path)
    hot = SamplingParams(temperature=HOTTEST)
    seqs = [FakeSeq(i, [1, 2, 3, 4], params=hot, seed=i, shares_noise=True) for i in range(6)]
    observe_prompts(drafter, target, seqs)
    skipped: set[int] = set()
    for seq, (tokens, _) in zip(seqs, as_lists(drafter.propose(seqs, [Budget(4, 4)] * 6)), strict=True):
        assert len(tokens) > 2
        for depth, token in enumerate(tokens[1:]):
            noise = exponential(seq.seed, len(seq.tokens) + depth, VOCAB, target.device)
            # ties may fall either way
            skipped |= set((noise < 0.95 * noise[token]).nonzero().flatten().tolist())
    # which have two tokens fewer
    assert len(skipped) <= (2 if name in ("eagle3", DEEP) or name.partition(" ")[0] in KINDS else 0)
    cold = [FakeSeq(i, [1, 2, 3, 4], seed=i, shares_noise=True) for i in range(6)]
    assert len({str(tree) for tree in as_lists(drafter.propose(cold, [BUDGET] * 6))}) == 1


@pytest.mark.parametrize("name", HEADS)
def test_a_head_needs_its_folder(name: str, tmp_path: Path) -> None:
    cls = registry.drafters.get(name)
    with pytest.raises(InvalidInput, match="draft_model=FOLDER"):
        cls.build(Parts(TableLM(VOCAB), None, SpeculativeConfig(drafter=name)))
    absent = SpeculativeConfig(drafter=name, draft_model=str(tmp_path / "absent"))
    with pytest.raises(ModelNotFound, match="no folder"):
        cls.build(Parts(TableLM(VOCAB), None, absent))
