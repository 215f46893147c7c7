"""Recurrent hybrids in our own decoder: against transformers, and bit for bit against a fresh read of a text."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.errors import UnsupportedModel
from forerun.core.types import Needs, Prompts, TreeBatch, Verdict
from forerun.models import decoder as decoder_module
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.hybrid.stateful import StatefulDecoder, States
from forerun.models.native import library as native
from forerun.models.native.target import native_decoder
from forerun.models.pages import PAGE
from forerun.testing import FakeSeq, check_target, extend, path_to, random_tree, random_verdict, tree_of
from tests.models.tiny_checkpoints import HYBRIDS, VOCAB, make_decoder, make_reference, reference_logits, save

Make = Callable[..., Decoder]
ALL = sorted(HYBRIDS)
ONE_EACH = ["lfm2-biased", "qwen3_next", "granite4", "nemotron_h"]


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, dict[str, Any], dict[str, Tensor]]]:
    known: dict[str, tuple[Any, dict[str, Any], dict[str, Tensor]]] = {}

    def make(name: str) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
        if name not in known:
            model = make_reference(name)
            known[name] = model, *save(model, tmp_path_factory.mktemp(name))
        return known[name]

    return make


@pytest.fixture(params=["native", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    """Decoders on the native kernels, and in torch."""
    if request.param == "native" and not native.available():
        pytest.skip("needs the native library")
    return partial(make_decoder, native=request.param == "native")


def fresh(target: Decoder, tokens: list[int], count: int = 1) -> Tensor:
    """[count, V] behind the last tokens of a text that nothing else shares: read at once, then scored as a chain."""
    seq = FakeSeq(1 << 40, tokens[: len(tokens) - count + 1], max_length=500)
    target.prefill([seq], Needs())
    logits = target.score([seq], TreeBatch.chains([tokens[-count:]]), Needs()).required_logits.clone()
    target.release(seq)
    return logits


@pytest.mark.parametrize("name", ALL)
def test_logits_of_prompts_and_chains_equal_transformers(name: str, made: Any, make: Make) -> None:
    model, config, weights = made(name)
    target, tokens = make(config, weights), text(1, 150)
    wanted = reference_logits(model, tokens)
    for cached in (0, 1, 70, 149):
        got = fresh(target, tokens, len(tokens) - cached)
        torch.testing.assert_close(got, wanted[cached:], atol=2e-4, rtol=0)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", ALL)
def test_hybrids_are_targets_to_the_bit(name: str, made: Any, make: Make) -> None:
    _, config, weights = made(name)
    check_target(lambda: make(config, weights), vocab_size=VOCAB, needs=Needs((-1, 1)), nodes=9, atol=0.0)


def test_hybrids_are_targets_to_the_bit_without_native_kernels(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, config, weights = made("qwen3_next")
    monkeypatch.setattr(native, "available", lambda: False)
    check_target(lambda: make_decoder(config, weights), vocab_size=VOCAB, rounds=4, atol=0.0)


@pytest.mark.skipif(not native.available(), reason="needs the native library")
@pytest.mark.parametrize("dtype", ["q8", "bfloat16"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "granite4"])
def test_rounded_weights_are_targets_to_the_bit_and_near_the_float_ones(name: str, dtype: str, made: Any) -> None:
    model, config, weights = made(name)

    def rounded() -> Decoder:
        target = native_decoder(DecoderConfig.from_hf(config), weights, dtype, None, None)
        assert target is not None
        assert target.mode == dtype
        return target

    check_target(rounded, vocab_size=VOCAB, rounds=4, atol=0.0)
    tokens = text(1, 70)
    wanted, got = reference_logits(model, tokens), fresh(rounded(), tokens, len(tokens))
    assert not torch.equal(got, wanted)
    assert (got - wanted).norm() < 0.2 * wanted.norm()


@pytest.mark.parametrize("name", ONE_EACH)
def test_trees_equal_transformers_along_every_path(name: str, made: Any, make: Make) -> None:
    model, config, weights = made(name)
    target, rng = make(config, weights), random.Random(3)
    seqs = [FakeSeq(b, text(b, n), max_length=200) for b, n in enumerate((30, 1, 9))]
    target.prefill(seqs, Needs())
    trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 8) for seq in seqs])
    logits = target.score(seqs, trees, Needs()).required_logits
    for b, seq in enumerate(seqs):
        tokens, parents = tree_of(trees, b)
        for i in range(len(tokens)):
            wanted = reference_logits(model, seq.tokens + [tokens[j] for j in path_to(parents, i)])[-1]
            torch.testing.assert_close(logits[trees.starts[b] + i], wanted, atol=2e-4, rtol=0)


def play(target: Decoder, plain: Decoder, rounds: int, seed: int) -> list[FakeSeq]:
    """Rounds of wide trees across the end of a page; every logit is that of a fresh read."""
    rng = random.Random(seed)
    seqs = [FakeSeq(b, text(seed + b, n), max_length=400, cache_salt="") for b, n in enumerate((50, 61, 3))]
    target.prefill(seqs, Needs())
    for _ in range(rounds):
        trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 7) for seq in seqs])
        logits = target.score(seqs, trees, Needs()).required_logits
        for b, seq in enumerate(seqs):
            tokens, parents = tree_of(trees, b)
            for i in {0, len(tokens) - 1}:
                wanted = fresh(plain, seq.tokens + [tokens[j] for j in path_to(parents, i)])
                assert torch.equal(logits[trees.starts[b] + i], wanted[0])
        verdict = random_verdict(rng, trees, VOCAB)
        target.commit(seqs, trees, verdict)
        extend(seqs, trees, verdict)
    return seqs


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", ALL)
def test_logits_after_every_rollback_are_those_of_a_fresh_read(name: str, made: Any, make: Make) -> None:
    _, config, weights = made(name)
    target, plain = make(config, weights), make(config, weights)
    seqs = play(target, plain, 6, seed=5)
    for seq in seqs:
        target.release(seq)
    assert target.used_slots == 0
    for seq in seqs:  # another turn starts where the last one ended, to the token
        again = FakeSeq(seq.id + 10, [*seq.tokens, 7, 8], max_length=400, cache_salt="")
        target.prefill([again], Needs())
        assert target.reused_tokens(again) == len(seq.tokens) - 1
        got = target.score([again], TreeBatch.chains([[8]]), Needs()).required_logits
        assert torch.equal(got, fresh(plain, again.tokens))


def last_node(self: Any, seq: Any, tokens: Any, nodes: Any) -> None:
    """Whatever was accepted, go on from the state of the tree's last node."""
    last = max(self._states.nodes[seq.id][0][0])
    advance(self, seq, tokens, [*nodes[:-1], last])


def first_state(self: Any, seq: Any, tokens: Any, nodes: Any) -> None:
    """Go on from the state before the round."""
    before = self._states.now[seq.id].state
    advance(self, seq, tokens, nodes)
    self._states.now[seq.id] = type(self._states.now[seq.id])(self._states.now[seq.id].length, before)


advance = StatefulDecoder._advance


@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("wrong", [last_node, first_state])
def test_a_state_that_is_not_rolled_back_is_caught(
    name: str, wrong: Any, made: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config, weights = made(name)
    target, plain = make(config, weights), make(config, weights)
    monkeypatch.setattr(target, "_advance", wrong.__get__(target))
    with pytest.raises(AssertionError):
        play(target, plain, 4, seed=5)


@pytest.mark.parametrize("name", ONE_EACH)
def test_chunks_and_company_change_no_bit(name: str, made: Any, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _, config, weights = made(name)
    tokens = text(9, 140)
    wanted = fresh(make(config, weights), tokens, 3)
    monkeypatch.setattr(decoder_module, "CHUNK", 11)
    assert torch.equal(fresh(make(config, weights), tokens, 3), wanted)
    target = make(config, weights)
    others = [FakeSeq(b, text(20 + b, 5 + b), max_length=200) for b in range(4)]
    seq = FakeSeq(9, tokens[:-2], max_length=200)
    target.prefill(others, Needs())
    for rows in (1, 40, 63, 1, 30, 9):  # beside trees of others
        roots = TreeBatch.trees([random_tree(random.Random(rows), one.tokens[-1], VOCAB, 4) for one in others])
        target.score(others, roots, Needs(), Prompts([seq], rows))
    trees = TreeBatch.chains([*([one.tokens[-1], 5] for one in others), tokens[-3:]])
    assert target.cached_tokens(seq) == len(seq.tokens) - 1
    got = target.score([*others, seq], trees, Needs()).required_logits[-3:]
    assert torch.equal(got, wanted)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", ALL)
def test_what_is_found_has_the_bits_of_what_is_read(name: str, made: Any, make: Make) -> None:
    _, config, weights = made(name)
    tokens, target = text(4, 200), make(config, weights)
    first = FakeSeq(1, tokens[:150], max_length=400, cache_salt="")
    target.prefill([first], Needs())
    plain = make(config, weights)
    for ends, found in ((150, 2 * PAGE), (100, PAGE), (65, PAGE), (63, 0)):
        seq = FakeSeq(2, [*tokens[:ends], 3], max_length=400, cache_salt="")
        target.prefill([seq], Needs())
        assert target.reused_tokens(seq) == found
        got = target.score([seq], TreeBatch.chains([[3, 4]]), Needs()).required_logits
        assert torch.equal(got, fresh(plain, [*tokens[:ends], 3, 4], 2))
        target.kv.release(seq.id)  # leaves nothing behind
    target.release(first)
    longer = FakeSeq(3, tokens, max_length=400, cache_salt="")
    target.prefill([longer], Needs())
    assert target.reused_tokens(longer) == 149
    other = FakeSeq(4, tokens, max_length=400, cache_salt="another")
    target.prefill([other], Needs())
    assert target.reused_tokens(other) == 0
    both = target.score([longer, other], TreeBatch.chains([tokens[-1:]] * 2), Needs()).required_logits
    assert torch.equal(both, fresh(plain, tokens).expand_as(both))


def test_states_that_no_longer_fit_are_read_again(made: Any, make: Make) -> None:
    _, config, weights = made("qwen3_next")
    target, tokens = make(config, weights), text(4, 200)
    assert isinstance(target, StatefulDecoder)
    state = target._empty_state()
    target._states = States(sum(part.nbytes for layer in state for part in layer))  # room for one
    first = FakeSeq(1, list(tokens), max_length=400, cache_salt="")
    target.prefill([first], Needs())
    target.release(first)
    assert len(target._states._kept) == 1
    shorter = FakeSeq(2, tokens[:180], max_length=400, cache_salt="")
    target.prefill([shorter], Needs())
    assert target.reused_tokens(shorter) == 0
    got = target.score([shorter], TreeBatch.chains([tokens[179:180]]), Needs()).required_logits
    assert torch.equal(got, fresh(make(config, weights), tokens[:180]))


@pytest.mark.parametrize("salt", [None, ""])
def test_truncated_texts_go_on_to_the_bit(salt: str | None, made: Any, make: Make) -> None:
    _, config, weights = made("lfm2")
    target, plain, tokens = make(config, weights), make(config, weights), text(4, 150)
    seq = FakeSeq(1, list(tokens), max_length=400, cache_salt=salt)
    target.prefill([seq], Needs())
    for length in (140, 128, 70, 64, 2, 0):
        target.truncate(seq, length)
        assert target.cached_tokens(seq) == length
        seq.tokens[length:] = [5, 6, 7]
        chains, _ = target.prefill([seq], Needs())
        assert chains.tokens.tolist() == [5, 6]
        got = target.score([seq], TreeBatch.chains([[7]]), Needs()).required_logits
        assert torch.equal(got, fresh(plain, seq.tokens))


def test_a_commit_that_was_interrupted_leaves_no_state_for_others(
    made: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config, weights = made("lfm2")
    target, tokens = make(config, weights), text(4, 80)
    seq = FakeSeq(1, list(tokens), max_length=400, cache_salt="")
    target.prefill([seq], Needs())
    tree = TreeBatch.chains([[tokens[-1], 3]])
    target.score([seq], tree, Needs())
    monkeypatch.setattr(target, "_advance", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        target.commit([seq], tree, Verdict.whole_chain(tree, [4]))
    monkeypatch.undo()
    seq.tokens += [3, 4]
    target.release(seq)
    again = FakeSeq(2, [*seq.tokens, 9], max_length=400, cache_salt="")
    target.prefill([again], Needs())
    got = target.score([again], TreeBatch.chains([[9]]), Needs()).required_logits
    assert torch.equal(got, fresh(make(config, weights), again.tokens))


def test_a_release_that_was_interrupted_is_finished_by_the_next(
    made: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config, weights = made("lfm2")
    target = make(config, weights)
    assert isinstance(target, StatefulDecoder)
    seq = FakeSeq(1, text(4, 80), max_length=400, cache_salt="")
    target.prefill([seq], Needs())
    monkeypatch.setattr(target._states, "drop", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        target.release(seq)
    monkeypatch.undo()
    target.release(seq)
    assert target.used_slots == 0
    assert not target._states.now


def test_time_steps_with_limits_are_refused(made: Any) -> None:
    config = made("granite4")[1]
    with pytest.raises(UnsupportedModel, match="time_step_limit"):
        DecoderConfig.from_hf({**config, "time_step_limit": [0.0, 0.5]})


def test_patterns_of_nemotron_name_its_layers(made: Any) -> None:
    config = made("nemotron_h")[1]
    old = {key: value for key, value in config.items() if key != "layers_block_type"}
    read = DecoderConfig.from_hf({**old, "hybrid_override_pattern": "M-*-M"})
    assert read == DecoderConfig.from_hf(config)
    assert read.kv_layers == 1
    assert DecoderConfig.from_hf({**old, "hybrid_override_pattern": "ME*-M"}).sparse == (False, True, *[False] * 3)
    with pytest.raises(UnsupportedModel, match="moe_latent_size"):
        DecoderConfig.from_hf({**old, "hybrid_override_pattern": "ME*-M", "moe_latent_size": 16})


def test_vision_wrappers_are_read_as_text(made: Any, make: Make) -> None:
    _, config, weights = made("qwen3_5")
    renamed = {"model.language_model." + key.removeprefix("model."): one for key, one in weights.items()}
    nested = {"model_type": "qwen3_5", "text_config": config, "tie_word_embeddings": True}
    tokens = text(5, 12)
    assert torch.equal(fresh(make(nested, renamed), tokens), fresh(make(config, weights), tokens))


def test_states_are_no_part_of_the_kv_cache(made: Any) -> None:
    config = DecoderConfig.from_hf(made("lfm2")[1])
    assert config.kv_layers == 1
    assert config.features == ("recurrent states",)
    assert DecoderConfig.from_hf(made("qwen3_next")[1]).kv_layers == 1
