"""EAGLE heads: what training computes in parallel is what drafting computes step by step; trees by brute force."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.errors import DamagedFile, InvalidInput, VocabularyMismatch
from forerun.core.params import SpeculativeConfig
from forerun.core.types import Budget, Scores, TreeBatch, Verdict
from forerun.drafters.base import Parts
from forerun.drafters.heads.eagle import Eagle2Drafter, Eagle3Drafter, EagleDrafter
from forerun.drafters.heads.eagle_head import EagleConfig, EagleHead, Kind, read_head, write_head
from forerun.models.base import SharedWeights
from forerun.testing import FakeSeq, TableLM
from forerun.train.recipes.eagle import PART, EagleModule
from forerun.train.recipes.scaling import Sizes, fold
from tests.drafters.rounds import as_lists, observe_prompts
from tests.drafters.tiny_heads import eagle_config, eagle_weights

VOCAB, LENGTH, STEPS = 11, 9, 4
KINDS = [
    ("eagle", {}),
    ("eagle3", {}),
    ("eagle3", {"fc_norm": True, "norm_output": True}),
    ("eagle3", {"norm_before_fc": False, "norm_output": True}),
    ("eagle3", {"depth": 2, "fc_norm": True, "norm_output": True}),
    ("eagle3", {"depth": 3}),
    ("eagle", {"window": 2, "windowed": (True,)}),
    ("eagle3", {"window": 3, "windowed": (True,)}),
    ("eagle3", {"depth": 2, "window": 4, "windowed": (False, True)}),
]


def trained(config: EagleConfig, weights: dict[str, Tensor]) -> EagleModule:
    """The module that training would hold, which learns these weights in units of its own."""
    sizes = Sizes(torch.full((config.width,), 2.0), torch.tensor([0.5, 1.0, 2.0, 1.0] * (config.width // 4)))
    module = EagleModule(config, own_head=True, sizes=sizes)
    module.load_state_dict({name: weights[name] for name in module.state_dict()})
    return module


def drafter_of(config: EagleConfig, weights: dict[str, Tensor]) -> EagleDrafter:
    cls = Eagle3Drafter if config.kind == "eagle3" else Eagle2Drafter
    return cls(EagleHead(config, weights, None))


def shown(drafter: EagleDrafter, tokens: list[int], features: Tensor) -> FakeSeq:
    """A sequence of these tokens whose rows [n - 1, F] were observed as its prompt."""
    seq = FakeSeq(0, tokens)
    chain = TreeBatch.chains([tokens[:-1]])
    layers = drafter.head.config.layers
    hidden = dict(zip(layers, features.chunk(len(layers), -1), strict=True))
    drafter.observe([seq], chain, Scores(None, hidden), Verdict.whole_chain(chain, [tokens[-1]]))
    return seq


@pytest.mark.parametrize("part", [PART, 2])
@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_training_in_parallel_equals_drafting_step_by_step(
    kind: Kind, more: dict[str, Any], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The off-by-one killer: for every row and step, the masked pass and the cached one say the same.

    What drafts is the module as a file holds it, so a size that is not folded into it shows as well.
    """
    monkeypatch.setattr("forerun.train.recipes.eagle.PART", part)
    compared, off = far_apart(eagle_config(kind, VOCAB, **more))
    assert compared > 20
    assert off < 1e-4


@pytest.mark.parametrize("other", [{"window": 2}, {"window": 4}, {"window": 0, "windowed": ()}])
def test_negative_control_a_window_off_by_one_shows(other: dict[str, Any]) -> None:
    config = eagle_config("eagle3", VOCAB, window=3, windowed=(True,))
    assert far_apart(config, replace(config, **other))[1] > 0.01


def test_beyond_its_trained_length_a_head_sees_the_last_positions() -> None:
    """As if the file had named a window of that length; with a longer one it sees more."""
    config = eagle_config("eagle3", VOCAB, depth=2)
    windowed = replace(config, window=3, windowed=(True, True))
    assert far_apart(windowed, replace(config, max_length=3))[1] < 1e-4
    assert far_apart(windowed, replace(config, max_length=4))[1] > 0.01


def far_apart(
    config: EagleConfig, serving: EagleConfig | None = None, weights: dict[str, Tensor] | None = None
) -> tuple[int, float]:
    """How many rows and steps were compared, and how far, at most, drafting is from training; `serving`: drafts."""
    weights, kind, serving = weights or eagle_weights(config, seed=1), config.kind, serving or config
    module = trained(config, weights)
    folded = weights | fold(module)
    assert torch.equal(folded["fc.weight"], weights["fc.weight"]) == (kind == "eagle3")
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (1, LENGTH))
    features = torch.randn(1, LENGTH, config.feature_width)
    embedded = weights["embed_tokens.weight"][tokens]
    with torch.no_grad():
        rolled = [rows @ weights["lm_head.weight"].t() for rows, _ in module(embedded, features, STEPS, False)]
    compared, most = 0, 0.0
    for row in range(LENGTH - 1):  # a draft that starts behind row `row`
        drafter = drafter_of(serving, folded)
        text = tokens[0, : row + 2].tolist()
        seq = shown(drafter, text, features[0, : row + 1])
        with torch.no_grad():
            walk = drafter._runner.begin([seq], [drafter._sequences[0]], [Budget(STEPS, STEPS)])
            said = walk.first()[0]
            for step in range(min(STEPS, LENGTH - 1 - row)):
                wanted = rolled[step][0, row]
                most = max(most, float((said - wanted).abs().max() / wanted.abs().max()))
                compared += 1
                follow = tokens[:, row + 2 + step] if row + 2 + step < LENGTH else tokens[:, 0]
                said = walk.after(torch.zeros(1, 1, dtype=torch.long), follow[:, None])[0, 0]
    return compared, most


@pytest.mark.parametrize(("kind", "layers"), [("eagle", 1), ("eagle3", 1), ("eagle3", 2)])
@pytest.mark.parametrize("window", [0, 2, 5])
def test_the_dynamic_tree_is_that_of_brute_force(kind: Kind, layers: int, window: int) -> None:
    """Every path's law from scratch, all candidates in a list, the best kept."""
    config = eagle_config(kind, VOCAB, draft_vocab=8 if kind == "eagle3" else None, depth=layers)
    config = replace(config, window=window, windowed=(True,) * layers if window else ())
    weights = eagle_weights(config, seed=4)
    target, drafter = TableLM(VOCAB), drafter_of(config, weights)
    seq, width, depth, nodes = FakeSeq(0, [3, 1, 4, 1, 5]), 3, 4, 12
    observe_prompts(drafter, target, [seq])
    ((tokens, parents),) = as_lists(drafter.propose([seq], [Budget(nodes, depth, width)]))

    def law(path: tuple[int, ...]) -> list[float]:
        fresh = drafter_of(config, weights)
        observe_prompts(fresh, TableLM(VOCAB), [seq])
        with torch.no_grad():
            walk = fresh._runner.begin([seq], [fresh._sequences[0]], [Budget(8, 8)])
            said = walk.first()[0]
            for token in path:
                said = walk.after(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[token]]))[0, 0]
        whole = fresh.head.vocabulary.spread(said).softmax(-1)
        return [float(p) for p in whole]

    pool: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        children: dict[tuple[int, ...], float] = {}
        for path, mass in frontier.items():
            probs = law(path)
            best = sorted(range(VOCAB), key=lambda i: -probs[i])[:width]
            children |= {(*path, token): mass * probs[token] for token in best}
        pool |= children
        frontier = dict(sorted(children.items(), key=lambda item: -item[1])[:width])
    wanted = set(sorted(pool, key=lambda path: (-pool[path], len(path)))[:nodes])
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    assert set(paths[1:]) == wanted
    assert len(paths) == nodes + 1


def test_ties_keep_the_tree_connected() -> None:
    """A head that is certain gives a chain of survivals all equal to one: parents must come first."""
    config = eagle_config("eagle3", VOCAB)
    weights = eagle_weights(config, seed=2)
    weights["lm_head.weight"] = weights["lm_head.weight"] * 1e4
    target, drafter = TableLM(VOCAB), drafter_of(config, weights)
    seq = FakeSeq(0, [1, 2, 3])
    observe_prompts(drafter, target, [seq])
    ((tokens, parents),) = as_lists(drafter.propose([seq], [Budget(4, 4, 3)]))
    assert parents == [-1, 0, 1, 2, 3]
    assert len(tokens) == 5


def test_a_static_tree_has_one_shape() -> None:
    config = replace(eagle_config("eagle", VOCAB), rates=((0.6, 0.3), (0.5, 0.2), (0.35, 0.1)))
    drafter = EagleDrafter(EagleHead(config, eagle_weights(config), None))
    shapes = []
    for i in range(4):
        seq = FakeSeq(i, [i, 2, i + 3, 1])
        observe_prompts(drafter, TableLM(VOCAB), [seq])
        shapes.append(as_lists(drafter.propose([seq], [Budget(5, 3, 2)]))[0][1])
    assert shapes == [[-1, 0, 0, 1, 1, 2]] * 4  # survivals 0.6, 0.3, then 0.3, 0.12, 0.15; below them 0.105


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
@pytest.mark.parametrize(("borrows", "depth"), [(False, 1), (True, 1), (True, 3)])
def test_eagle3_files_round_trip(tmp_path: Path, layout: str, borrows: bool, depth: int) -> None:
    config = eagle_config("eagle3", VOCAB, draft_vocab=7, fc_norm=True, norm_output=True, depth=depth)
    config = replace(config, target="some/target", rates=((0.5, 0.25), (0.25, 0.125)), layers=(2, 5, 7), max_length=99)
    weights = eagle_weights(config, borrows=borrows)
    write_head(tmp_path, config, weights, layout)  # type: ignore[arg-type]
    again, loaded = read_head(tmp_path, kind="eagle3")
    assert again == config
    assert set(loaded) == set(weights)
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    names = set(read_head.__globals__["read_tensors"](tmp_path))
    assert ("midlayer.mlp.up_proj.weight" in names) == (layout == "eagle")
    assert ("layers.0.mlp.up_proj.weight" in names) == (layout == "speculators")
    assert [f"layers.{i}.input_layernorm.weight" in names for i in (1, 2, 3)] == [depth > 1, depth > 1, False]
    assert not any("hidden_norm" in name for name in names if name.startswith(("layers.1", "layers.2")))


def test_eagle1_files_round_trip_and_borrow(tmp_path: Path) -> None:
    config = eagle_config("eagle", VOCAB)
    weights = eagle_weights(config, borrows=True)
    write_head(tmp_path, config, weights)
    again, loaded = read_head(tmp_path)
    assert again == config
    own = torch.randn(VOCAB, 8)
    head = EagleHead(again, loaded, SharedWeights.of(torch.randn(VOCAB, 8), own))
    torch.testing.assert_close(head.logits(torch.ones(1, 8)), torch.ones(1, 8) @ own.t())
    with pytest.raises(InvalidInput, match="shares none"):
        EagleHead(again, loaded, None)
    with pytest.raises(InvalidInput, match="another target"):
        EagleHead(again, loaded, SharedWeights.of(torch.randn(VOCAB, 6), torch.randn(VOCAB, 6)))
    with pytest.raises(VocabularyMismatch, match="another target"):
        EagleHead(again, loaded, SharedWeights.of(torch.randn(5, 8), torch.randn(5, 8)))


def test_a_head_of_one_kind_is_not_taken_for_another(tmp_path: Path) -> None:
    for kind, other in (("eagle3", "eagle"), ("eagle", "eagle3")):
        config = eagle_config(kind, VOCAB)  # type: ignore[arg-type]
        write_head(tmp_path / kind, config, eagle_weights(config))
        cls = Eagle3Drafter if other == "eagle3" else EagleDrafter
        speculative = SpeculativeConfig(drafter=other, draft_model=str(tmp_path / kind))
        with pytest.raises(InvalidInput, match=f"use drafter='{kind}'"):
            cls.build(Parts(TableLM(VOCAB), None, speculative))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    config = eagle_config("eagle3", VOCAB, draft_vocab=7)
    weights = eagle_weights(config)
    write_head(tmp_path / "a", config, weights | {"fc.weight": torch.zeros(8, 8)})
    with pytest.raises(DamagedFile, match=r"fc\.weight"):
        read_head(tmp_path / "a")
    deep = replace(config, depth=2)
    write_head(tmp_path / "deep", deep, weights)
    with pytest.raises(DamagedFile, match=r"layers\.1\."):
        read_head(tmp_path / "deep")
    write_head(tmp_path / "flat", config, eagle_weights(deep))
    with pytest.raises(DamagedFile, match="1 layers"):
        read_head(tmp_path / "flat")
    write_head(tmp_path / "b", config, weights | {"d2t": torch.arange(7) + 20})
    with pytest.raises(DamagedFile, match="offsets"):
        EagleHead(*read_head(tmp_path / "b"), None)
