"""Medusa and Hydra: the planted tree is the best one; training computes what drafting computes; files round-trip."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.core.errors import DamagedFile, InvalidInput
from forerun.core.types import Budget
from forerun.drafters.heads.growth import best_tree
from forerun.drafters.heads.medusa import (
    Family,
    HeadSet,
    HydraDrafter,
    HydraSteps,
    MedusaDrafter,
    read_heads,
    write_heads,
)
from forerun.testing import FakeSeq, TableLM
from forerun.train.recipes.medusa import HeadsModule
from forerun.train.recipes.scaling import Sizes, fold
from tests.drafters.rounds import as_lists, observe_prompts
from tests.drafters.tiny_heads import heads_config, heads_weights

VOCAB = 9


@pytest.mark.slow
def test_the_fixed_tree_is_the_best_of_all() -> None:
    """Against every connected tree of that many nodes whose children are taken by rank."""
    rates = ((0.5, 0.3, 0.1), (0.45, 0.35, 0.05), (0.6, 0.1, 0.05))
    paths = [p for n in (1, 2, 3) for p in itertools.product(range(3), repeat=n)]

    def worth(path: tuple[int, ...]) -> float:
        value = 1.0
        for level, rank in enumerate(path):
            value *= rates[level][rank]
        return value

    for nodes in (1, 2, 4, 5):
        best = 0.0
        for some in itertools.combinations(paths, nodes):
            if all(len(p) == 1 or p[:-1] in some for p in some):
                best = max(best, sum(map(worth, some)))
        found = best_tree(rates, nodes, depth=3, width=3)
        assert sum(gain for *_, gain in found) == pytest.approx(best)


def test_medusa_drafts_what_its_heads_say() -> None:
    config = replace(heads_config("medusa", VOCAB), rates=((0.6, 0.3), (0.5, 0.2), (0.4, 0.1), (0.1, 0.05)))
    weights = heads_weights(config)
    target, drafter = TableLM(VOCAB), MedusaDrafter(HeadSet(config, weights, None))
    seq = FakeSeq(0, [1, 2, 3, 4])
    observe_prompts(drafter, target, [seq])
    ((tokens, parents),) = as_lists(drafter.propose([seq], [Budget(6, 3, 2)]))
    hidden = target._row(-1, seq.tokens[:-1], 8)  # of the token before the root
    guesses = []
    for i in range(3):
        row = hidden
        for j in range(config.blocks):
            w, b = weights[f"{i}.{j}.linear.weight"], weights[f"{i}.{j}.linear.bias"]
            row = row + torch.nn.functional.silu(row @ w.t() + b)
        guesses.append((row @ weights["lm_head.weight"].t()).topk(2).indices.tolist())
    depth = [0]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        assert token in guesses[depth[parent]]
        depth.append(depth[parent] + 1)
    assert tokens[1] == guesses[0][0]
    assert max(depth) == 3


@pytest.mark.parametrize("family", ["medusa", "hydra"])
def test_training_in_parallel_equals_drafting(family: Family) -> None:
    config = heads_config(family, VOCAB)
    weights = heads_weights(config, seed=5) | {"embed_tokens.weight": torch.randn(VOCAB, 8)}
    module = HeadsModule(config, Sizes(torch.full((8,), 0.25), torch.tensor([0.5, 1.0, 2.0, 4.0] * 2)))
    module.load_state_dict({name: weights[name] for name in module.state_dict()})
    torch.manual_seed(1)
    tokens, hidden = torch.randint(VOCAB, (1, 10)), torch.randn(1, 10, 8)
    with torch.no_grad():
        rolled = [
            rows @ weights["lm_head.weight"].t() for rows in module(hidden, weights["embed_tokens.weight"][tokens])
        ]
    heads = HeadSet(config, weights | fold(module), None)  # as a file holds what the module learns in units
    for row in range(5):
        seq = FakeSeq(0, tokens[0, : row + 2].tolist())
        if family == "hydra":
            walk = HydraSteps(heads, hidden[:, row], torch.tensor(seq.tokens[-1:]))
            said = [walk.first()[0]]
            root = torch.zeros(1, 1, dtype=torch.long)
            said += [walk.after(root, tokens[:, row + 2 + i, None])[0, 0] for i in range(config.count - 1)]
        else:
            said = []
            for i in range(config.count):
                one = hidden[:, row]
                for j in range(config.blocks):
                    one = heads.block(i, j, one, one)
                said.append(heads.logits(i, one)[0])
        for i, logits in enumerate(said):
            torch.testing.assert_close(logits, rolled[i][0, row], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["medusa", "hydra"])
@pytest.mark.parametrize("own", [True, False])
def test_files_round_trip(tmp_path: Path, family: Family, own: bool) -> None:
    config = replace(heads_config(family, VOCAB), target="some/target")
    weights = heads_weights(config, own=own)
    write_heads(tmp_path, config, weights)
    again, loaded = read_heads(tmp_path, family)
    assert again == config
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert (tmp_path / f"{family}_lm_head.safetensors").is_file()


def test_a_pickle_is_read_only_when_asked_for(tmp_path: Path) -> None:
    config = heads_config("medusa", VOCAB)
    weights = heads_weights(config)
    write_heads(tmp_path, config, weights)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    torch.save(weights, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(InvalidInput, match="pickle"):
        read_heads(tmp_path, "medusa")
    loaded = read_heads(tmp_path, "medusa", pickle=True)[1]
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_a_missing_block_is_named(tmp_path: Path) -> None:
    config = heads_config("hydra", VOCAB)
    weights = heads_weights(config)
    del weights["2.0.linear.weight"]
    write_heads(tmp_path, config, weights)
    with pytest.raises(DamagedFile, match=r"2\.0\.linear"):
        read_heads(tmp_path, "hydra")


def test_hydra_stops_where_its_heads_end() -> None:
    config = heads_config("hydra", VOCAB)
    target, drafter = TableLM(VOCAB), HydraDrafter(HeadSet(config, heads_weights(config), None))
    seq = FakeSeq(0, [1, 2, 3])
    observe_prompts(drafter, target, [seq])
    assert as_lists(drafter.propose([seq], [Budget(9, 9, 1)]))[0][1] == [-1, 0, 1, 2, 3]
