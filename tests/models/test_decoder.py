"""Our decoder against transformers' own models: every family, prompts and trees alike."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.core.errors import DamagedFile, InvalidInput
from forerun.core.types import Needs, TreeBatch
from forerun.models import decoder as decoder_module
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.testing import FakeSeq, extend, path_to, random_tree, random_verdict, tree_of
from tests.models.tiny_checkpoints import (
    FAMILIES,
    VOCAB,
    in_tiers,
    make_decoder,
    make_reference,
    reference_logits,
    save,
    score_chain,
)

LENGTH = 22  # beyond every sliding window, within the short half of every rope


def _text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.fixture(scope="module", params=in_tiers(sorted(FAMILIES)))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    model = make_reference(request.param)
    return model, make_decoder(*save(model, tmp_path_factory.mktemp("checkpoint")))


@pytest.mark.parametrize("cached", [0, 1, 13, LENGTH - 1])
def test_chains_equal_transformers(pair: tuple[Any, Decoder], cached: int) -> None:
    model, decoder = pair
    text = _text(1, LENGTH)
    got = score_chain(decoder, text, cached, LENGTH)
    torch.testing.assert_close(got, reference_logits(model, text)[cached:], atol=1e-4, rtol=0)


@pytest.mark.slow(keep=8)
def test_every_node_of_a_ragged_batch_equals_its_path(pair: tuple[Any, Decoder]) -> None:
    model, decoder = pair
    rng = random.Random(2)
    seqs = [FakeSeq(b, _text(b, n), max_length=LENGTH) for b, n in enumerate((11, 1, 17))]
    decoder.prefill(seqs, Needs())
    for _ in range(2):
        trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 5) for seq in seqs])
        logits = decoder.score(seqs, trees, Needs()).logits
        assert logits is not None
        for b, seq in enumerate(seqs):
            tokens, parents = tree_of(trees, b)
            for i in range(len(tokens)):
                path = [tokens[j] for j in path_to(parents, i)]
                wanted = reference_logits(model, seq.tokens + path)[-1]
                torch.testing.assert_close(logits[trees.starts[b] + i], wanted, atol=1e-4, rtol=0)
        verdict = random_verdict(rng, trees, VOCAB)
        decoder.commit(seqs, trees, verdict)
        extend(seqs, trees, verdict)
        seqs = [seq for seq in seqs if len(seq.tokens) < LENGTH - 5]
    for b in range(3):
        decoder.release(FakeSeq(b, [0]))
    assert decoder.used_slots == 0


def test_neighbours_do_not_change_scores(pair: tuple[Any, Decoder]) -> None:
    _, decoder = pair
    rng = random.Random(12)
    seqs = [FakeSeq(b, _text(b, n), max_length=LENGTH) for b, n in enumerate((9, 14, 2, 5))]
    decoder.prefill(seqs, Needs())
    trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, n) for n, seq in enumerate(seqs)])
    together = decoder.score(seqs, trees, Needs()).logits
    for b, seq in enumerate(seqs):
        decoder.release(seq)
        decoder.prefill([seq], Needs())
        alone = decoder.score([seq], trees.select([b]), Needs()).logits
        assert together is not None
        assert alone is not None
        torch.testing.assert_close(together[trees.starts[b] : trees.starts[b + 1]], alone, atol=1e-5, rtol=1e-5)
        decoder.release(seq)


def test_ropes_that_stretch_with_the_length(tmp_path: Path) -> None:
    """By what a text may become; longropes are tested in tests/engine/test_longrope.py."""
    model = make_reference("llama-dynamic")
    decoder = make_decoder(*save(model, tmp_path))
    text = _text(3, 90)
    wanted = reference_logits(model, text)
    for cached in (0, 40, 89):
        got = score_chain(decoder, text, cached, len(text))
        torch.testing.assert_close(got, wanted[cached:], atol=1e-4, rtol=0)
    short, long = (FakeSeq(i, text[:20], max_length=n) for i, n in enumerate((24, 90)))
    decoder.prefill([short, long], Needs())
    roots = TreeBatch.chains([[text[19]], [text[19]]])
    both = decoder.score([short, long], roots, Needs()).logits
    assert both is not None
    torch.testing.assert_close(both[0], reference_logits(model, text[:20])[-1], atol=1e-4, rtol=0)
    assert not torch.allclose(both[0], both[1], atol=1e-3)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_stacked_experts_are_read_too(name: str, tmp_path: Path) -> None:
    model = make_reference(name)
    config, on_disk = save(model, tmp_path)
    in_memory = dict(model.state_dict())
    assert any(".experts.0." in key for key in on_disk)
    assert not any(".experts.0." in key for key in in_memory)
    text = _text(4, 12)
    got = [score_chain(make_decoder(config, weights), text, 3, 20) for weights in (on_disk, in_memory)]
    torch.testing.assert_close(got[0], got[1], atol=0, rtol=0)


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
def test_prefixes_and_nested_settings(prefix: str, tmp_path: Path) -> None:
    model = make_reference("gemma3")
    config, weights = save(model, tmp_path)
    renamed = {prefix + key.removeprefix("model."): weight for key, weight in weights.items()}
    nested = {"model_type": "gemma3", "text_config": config}
    text = _text(5, 12)
    got = score_chain(make_decoder(nested, renamed), text, 3, 20)
    torch.testing.assert_close(got, reference_logits(model, text)[3:], atol=1e-4, rtol=0)


def test_hidden_rows_are_the_residual_stream(pair: tuple[Any, Decoder]) -> None:
    model, decoder = pair
    text = _text(6, 10)
    with torch.no_grad():
        states = model(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    seq, needs = FakeSeq(0, text[:7], max_length=20), Needs((-1, 0, 2))
    chains, prefilled = decoder.prefill([seq], needs)
    scored = decoder.score([seq], TreeBatch.chains([text[6:]]), needs)
    decoder.release(seq)
    assert chains.tokens.tolist() == text[:6]
    assert prefilled.logits is None
    for layer, wanted in ((0, states[0][0]), (2, states[2][0]), (-1, states[-1][0])):
        got = torch.cat((prefilled.hidden[layer], scored.hidden[layer]))
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_long_prompts_go_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = make_reference("mistral")
    decoder = make_decoder(*save(model, tmp_path))
    monkeypatch.setattr(decoder_module, "CHUNK", 8)
    seqs = [FakeSeq(b, _text(b, n), max_length=40) for b, n in enumerate((30, 3, 1, 19))]
    chains, scores = decoder.prefill(seqs, Needs((-1,)))
    assert chains.sizes() == [29, 2, 0, 18]
    logits = decoder.score(seqs, TreeBatch.chains([seq.tokens[-1:] for seq in seqs]), Needs()).logits
    assert logits is not None
    for b, seq in enumerate(seqs):
        wanted = reference_logits(model, seq.tokens)
        torch.testing.assert_close(logits[b], wanted[-1], atol=1e-4, rtol=0)
        rows = scores.hidden[-1][chains.starts[b] : chains.starts[b + 1]]
        with torch.no_grad():
            torch.testing.assert_close(model.lm_head(rows), wanted[:-1], atol=1e-4, rtol=0)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    for name in ("qwen3", "gemma3"):
        config, weights = save(make_reference(name), tmp_path / name)
        text = _text(8, 12)
        wide = make_decoder(config, weights)
        narrow = Decoder(DecoderConfig.from_hf(config), weights, dtype=torch.bfloat16, device="cpu", kv_slots=None)
        a, b = score_chain(wide, text, 4, 20), score_chain(narrow, text, 4, 20)
        assert b.dtype == torch.float32
        off = float((a - b).abs().mean() / a.abs().mean())
        assert 0.002 < off < 0.03, off  # 1.9% and 0.9% were measured; without bfloat16 it would be 0


def test_scores_can_be_used_in_place(tmp_path: Path) -> None:
    decoder = make_decoder(*save(make_reference("llama2"), tmp_path))
    score_chain(decoder, _text(9, 5), 2, 20).add_(1.0)  # an inference tensor would refuse


def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    config, weights = save(make_reference("llama2"), tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(DamagedFile, match=name):
        make_decoder(config, {key: weight for key, weight in weights.items() if key != name})
    with pytest.raises(DamagedFile, match=name):
        make_decoder(config, {**weights, name: weights[name][:-1]})


def test_limits_are_said(tmp_path: Path) -> None:
    config, weights = save(make_reference("llama2"), tmp_path)
    decoder = make_decoder(config, weights, kv_slots=200)
    seqs = [FakeSeq(b, [1, 2, 3], max_length=30) for b in range(3)]
    assert decoder.slots == 256
    assert decoder.has_room(256)
    assert not decoder.has_room(257)
    decoder.prefill(seqs[:1], Needs())
    with pytest.raises(InvalidInput, match="kv_slots"):
        decoder.prefill([seqs[1], FakeSeq(9, [1] * 129)], Needs())
    assert decoder.used_slots == 64
    assert decoder.has_room(128)  # a page for each that runs is kept back
    assert not decoder.has_room(129)
    assert not decoder.make_room(seqs[:1], [255])
    assert decoder.used_slots == 64
    assert decoder.make_room(seqs[:1], [200])
    assert decoder.used_slots == 256
    tree = TreeBatch.chains([[3] * 286])
    with pytest.raises(InvalidInput, match="286 nodes"):
        decoder.score(seqs[:1], tree, Needs())
    with pytest.raises(InvalidInput, match="hidden layer 4"):
        decoder.prefill(seqs[:1], Needs((4,)))
    with pytest.raises(InvalidInput, match="prefill"):
        decoder.score(seqs[1:2], TreeBatch.chains([[3]]), Needs())


def test_a_full_text_has_room_for_the_largest_tree(tmp_path: Path) -> None:
    decoder = make_decoder(*save(make_reference("llama2"), tmp_path))
    seq = FakeSeq(0, _text(10, 30), max_length=30)
    decoder.prefill([seq], Needs())
    trees = TreeBatch.trees([([seq.tokens[-1], *[5] * 256], [-1, *[0] * 256])])
    logits = decoder.score([seq], trees, Needs()).logits
    assert logits is not None
    torch.testing.assert_close(logits[1:], logits[1:2].expand(256, -1), atol=1e-4, rtol=0)
