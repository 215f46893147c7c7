"""A part of a target as a draft model: its logits, the target's KV cache, and passes that start behind an exit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.types import Needs, Prompts, TreeBatch, Verdict
from forerun.models.base import LayerSubset
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.native.target import NativeDecoder
from forerun.models.partial import PartialTarget
from forerun.testing import FakeSeq
from tests.models.tiny_checkpoints import FAMILIES, in_tiers, make_decoder, make_reference, save
from tests.native.blocks import needs_native

LAYERS = 3
TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]
KINDS = ["torch", pytest.param("native", marks=needs_native)]
SKIPPED = LayerSubset(LAYERS, without_attention=frozenset({1}), without_mlp=frozenset({0, 2}))


def decoder_of(kind: str, folder: Path, name: str = "smollm2", silent: LayerSubset | None = None) -> Decoder:
    """A tiny decoder; where a subset is given, what it leaves out adds nothing."""
    config, weights = save(make_reference(name), folder)
    for part, layers in (("self_attn.o_proj", silent), ("mlp.down_proj", silent)) if silent else ():
        assert layers is not None
        for i in layers.without_attention if part.startswith("self") else layers.without_mlp:
            weights[f"model.layers.{i}.{part}.weight"].zero_()
    if kind == "native":
        return NativeDecoder(DecoderConfig.from_hf(config), weights, mode="float32", kv_slots=None)
    return make_decoder(config, weights)


def started(target: Decoder, tokens: list[int], seq_id: int = 1) -> FakeSeq:
    seq = FakeSeq(seq_id, list(tokens), max_length=40)
    target.prefill([seq], Needs())
    return seq


def drafted(part: PartialTarget, seq: FakeSeq, tokens: list[int]) -> Tensor:
    """[n, V] after each of these tokens, which follow one by one, as a drafter reads them."""
    rows, view = [], FakeSeq(seq.id, list(seq.tokens), max_length=40)
    for i, token in enumerate(tokens):
        view.tokens = [*seq.tokens[:-1], *tokens[: i + 1]]
        chain = TreeBatch.chains([[token]])
        rows.append(part.score([view], chain, Needs()).required_logits)
        part.commit([view], chain, Verdict.whole_chain(chain, [0]))
    return torch.cat(rows)


def scored(target: Decoder, seq: FakeSeq, tokens: list[int]) -> Tensor:
    return target.score([seq], TreeBatch.chains([tokens]), Needs()).required_logits.clone()


@pytest.mark.parametrize("name", in_tiers(sorted(FAMILIES)))
def test_all_layers_are_the_target(name: str, tmp_path: Path) -> None:
    target = decoder_of("torch", tmp_path, name)
    seq = started(target, TEXT[:5])
    wanted = scored(target, seq, TEXT[4:])
    got = drafted(PartialTarget(target, LayerSubset(LAYERS)), seq, TEXT[4:])
    assert torch.allclose(got, wanted, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exit", [1, 2])
def test_an_exit_has_the_logits_of_the_hidden_state_there(kind: str, exit: int, tmp_path: Path) -> None:
    """Against transformers: its hidden state behind that layer, its norm and its head."""
    model = make_reference("smollm2")
    with torch.no_grad():
        states = model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
        wanted = model.lm_head(model.model.norm(states[exit]))[0]
    target = decoder_of(kind, tmp_path)
    seq = started(target, TEXT[:5])
    got = drafted(PartialTarget(target, LayerSubset(exit)), seq, TEXT[4:])
    assert torch.allclose(got, wanted[4:], atol=1e-4)
    assert not torch.allclose(got, target.score([seq], TreeBatch.chains([TEXT[4:]]), Needs()).required_logits, atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_skipped_adds_nothing(kind: str, tmp_path: Path) -> None:
    """From the first token on, so that no keys or values are the whole target's."""
    (tmp_path / "a").mkdir()
    target, silent = decoder_of(kind, tmp_path / "a"), decoder_of(kind, tmp_path, silent=SKIPPED)
    wanted = scored(silent, started(silent, TEXT[:1]), TEXT)
    got = drafted(PartialTarget(target, SKIPPED), started(target, TEXT[:1]), TEXT)
    assert torch.allclose(got, wanted, atol=1e-4)
    assert not torch.allclose(got, scored(target, started(target, TEXT[:1], 2), TEXT), atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [LayerSubset(1), LayerSubset(2), LayerSubset(LAYERS), SKIPPED])
def test_a_draft_changes_no_logits_of_the_target(kind: str, layers: LayerSubset, tmp_path: Path) -> None:
    """Drafted or not, agreed or not, beside another sequence and a prompt that is read: bit by bit on our kernels."""
    target = decoder_of(kind, tmp_path)
    part, seqs = PartialTarget(target, layers), [started(target, TEXT[:5], i) for i in (1, 2)]
    trees = TreeBatch.chains([TEXT[4:], TEXT[4:6]])
    atol = 0.0 if kind == "native" else 1e-5
    for first in ([], TEXT[4:9], TEXT[4:], [TEXT[4], 60, 60], [60]):
        if first:
            drafted(part, seqs[0], first)
        prompt = Prompts([FakeSeq(9, [1, 2, 3], max_length=40)], 8)
        got = target.score(seqs, trees, Needs(), prompt).required_logits
        target.release(prompt.seqs[0])
        plain = target.score(seqs, trees, Needs()).required_logits
        assert float((got - plain).abs().max()) <= atol, first


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_layers_compute_a_drafted_token_once(kind: str, tmp_path: Path) -> None:
    """The negative control of the test above: rows that are changed between draft and pass change the logits."""
    target = decoder_of(kind, tmp_path)
    seq = started(target, TEXT[:5])
    plain = scored(target, seq, TEXT[4:])
    drafted(PartialTarget(target, LayerSubset(2)), seq, TEXT[4:9])
    target.early_exits[seq.id].rows[2].mul_(-1.0)
    got = scored(target, seq, TEXT[4:])
    changed = (got - plain).abs().amax(-1) > 1e-3
    assert changed.tolist() == [False, False, True, True, True, True]  # itself, and those that attend to it
    assert not target.early_exits
    assert torch.allclose(scored(target, seq, TEXT[4:]), plain, atol=1e-5)  # it is used once


def test_what_was_begun_before_a_commit_or_a_release_is_not_used(tmp_path: Path) -> None:
    target = decoder_of("torch", tmp_path)
    part, seq = PartialTarget(target, LayerSubset(2)), started(target, TEXT[:5])
    drafted(part, seq, TEXT[4:7])
    stale = target.early_exits[seq.id]
    tree = TreeBatch.chains([TEXT[4:6]])
    target.score([seq], tree, Needs())
    target.commit([seq], tree, Verdict.whole_chain(tree, [TEXT[6]]))
    seq.tokens = TEXT[:7]
    plain = scored(target, seq, TEXT[6:])
    for change in (lambda: None, lambda: (target.release(seq), target.prefill([seq], Needs()))):
        change()
        stale.rows[0].mul_(-1.0)
        target.early_exits[seq.id] = stale
        assert torch.allclose(scored(target, seq, TEXT[6:]), plain, atol=1e-5)
    assert part.cached_tokens(seq) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_two_parts_of_a_target_do_not_mistake_each_others_keys_for_their_own(kind: str, tmp_path: Path) -> None:
    """As in a cascade of two: the lower part writes where the upper one's draft is."""
    target = decoder_of(kind, tmp_path)
    upper, lower = PartialTarget(target, LayerSubset(2)), PartialTarget(target, SKIPPED)
    seq = started(target, TEXT[:5])
    plain = scored(target, seq, TEXT[4:])
    drafted(upper, seq, TEXT[4:7])
    drafted(lower, seq, [TEXT[4], 60, 60, 60])
    view = FakeSeq(seq.id, TEXT[:8], max_length=40)
    chain = TreeBatch.chains([[TEXT[7]]])
    upper.score([view], chain, Needs())
    upper.commit([view], chain, Verdict.whole_chain(chain, [0]))
    assert not target.early_exits
    assert torch.allclose(scored(target, seq, TEXT[4:]), plain, atol=1e-5)


def test_a_tree_is_scored_whole(tmp_path: Path) -> None:
    """Its nodes lie elsewhere than those of the early-exit chain."""
    target = decoder_of("torch", tmp_path)
    seq = started(target, TEXT[:5])
    tree = TreeBatch.trees([([TEXT[4], 20, TEXT[5], TEXT[6]], [-1, 0, 0, 2])])
    plain = target.score([seq], tree, Needs()).required_logits.clone()
    drafted(PartialTarget(target, LayerSubset(2)), seq, TEXT[4:7])
    assert torch.allclose(target.score([seq], tree, Needs()).required_logits, plain, atol=1e-5)


def test_a_path_through_a_drafted_tree_is_followed(tmp_path: Path) -> None:
    """As a cascade does: a tree of the level below, of which a path is kept."""
    target = decoder_of("torch", tmp_path)
    part, seq = PartialTarget(target, LayerSubset(2)), started(target, TEXT[:5])
    wanted = drafted(part, seq, TEXT[4:8])
    part.release(seq)
    tree = TreeBatch.trees([([TEXT[4], 20, TEXT[5], TEXT[6]], [-1, 0, 0, 2])])
    part.score([seq], tree, Needs())
    part.commit([seq], tree, Verdict.of([[2, 3]], [0], "cpu"))
    view = FakeSeq(seq.id, TEXT[:8], max_length=40)
    got = part.score([view], TreeBatch.chains([[TEXT[7]]]), Needs()).required_logits
    assert torch.allclose(got[0], wanted[-1], atol=1e-5)


def test_a_subset_names_layers_that_there_are() -> None:
    with pytest.raises(InvalidInput, match="is not one of layers 0 to 2"):
        LayerSubset(2, without_mlp=frozenset({2}))
    assert LayerSubset(2).is_prefix
    assert not SKIPPED.is_prefix
    assert SKIPPED.sublayers == 3
