"""HFTarget against transformers itself: masks, windows, positions, long prompts, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from forerun.core.errors import ModelNotFound, UnsupportedModel  # noqa: E402
from forerun.core.types import Needs, TreeBatch, Verdict  # noqa: E402
from forerun.models import hf as hf  # noqa: E402
from forerun.models.hf import HFTarget  # noqa: E402
from forerun.testing import FakeSeq, path_to  # noqa: E402

VOCAB = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 96,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def build(model_class: str, config_class: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**SMALL, **changes})
    return getattr(transformers, model_class)(config).eval()


def llama(**changes: Any) -> Any:
    return build("LlamaForCausalLM", "LlamaConfig", **changes)


def gemma2() -> Any:
    return build("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, sliding_window=5)


def mistral() -> Any:
    return build("MistralForCausalLM", "MistralConfig", sliding_window=5)


def tokens(count: int, seed: int = 0) -> list[int]:
    drawn: list[int] = torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


@torch.no_grad()
def plain(model: Any, text: list[int]) -> Any:
    return model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)


@pytest.mark.parametrize("make", [llama, gemma2, mistral])
def test_nodes_equal_plain_passes_of_the_model(make: Callable[[], Any]) -> None:
    """Far past the sliding window, where a mask that counts slots instead of positions goes wrong."""
    model = make()
    target, seq = HFTarget(model), FakeSeq(0, tokens(14))
    tree = ([seq.tokens[-1], *tokens(7, seed=1)], [-1, 0, 0, 1, 2, 3, 4, 2])
    target.prefill([seq], Needs())
    scores = target.score([seq], TreeBatch.trees([tree]), Needs((0, 1, -1)))
    assert scores.logits is not None
    assert scores.logits.dtype == torch.float32
    for node in range(8):
        wanted = plain(model, seq.tokens + [tree[0][i] for i in path_to(tree[1], node)])
        torch.testing.assert_close(scores.logits[node], wanted.logits[0, -1], atol=1e-4, rtol=0)
        for layer in (0, 1, -1):
            got = scores.hidden[layer][node]
            torch.testing.assert_close(got, wanted.hidden_states[layer][0, -1], atol=1e-4, rtol=0)


def test_a_prompt_in_chunks_is_the_same_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "CHUNK", 4)
    model = gemma2()
    target, seqs = HFTarget(model), [FakeSeq(0, tokens(14)), FakeSeq(1, tokens(1)), FakeSeq(2, tokens(7))]
    chains, scores = target.prefill(seqs, Needs((-1,)))
    assert chains.sizes() == [13, 0, 6]
    assert scores.logits is None
    wanted = [plain(model, seq.tokens[:-1]).hidden_states[-1][0] for seq in seqs if len(seq.tokens) > 1]
    torch.testing.assert_close(scores.hidden[-1], torch.cat(wanted), atol=1e-4, rtol=0)


def test_commit_keeps_the_path_and_nothing_else() -> None:
    model = llama()
    target, seq = HFTarget(model), FakeSeq(0, tokens(5))
    target.prefill([seq], Needs())
    trees = TreeBatch.trees([([seq.tokens[-1], 7, 8, 9, 10], [-1, 0, 0, 2, 3])])
    target.score([seq], trees, Needs())
    target.commit([seq], trees, Verdict.of([[2, 3]], [11], "cpu"))
    seq.tokens += [8, 9, 11]
    assert target.used_slots == len(seq.tokens) - 1
    scores = target.score([seq], TreeBatch.chains([[11]]), Needs())
    assert scores.logits is not None
    torch.testing.assert_close(scores.logits[0], plain(model, seq.tokens).logits[0, -1], atol=1e-4, rtol=0)


def test_rows_move_up_when_a_sequence_leaves() -> None:
    model = llama()
    target, seqs = HFTarget(model), [FakeSeq(i, tokens(4 + i, seed=i)) for i in range(3)]
    target.prefill(seqs, Needs())
    target.release(seqs[0])
    rest = [seqs[2], seqs[1]]
    scores = target.score(rest, TreeBatch.chains([[seq.tokens[-1]] for seq in rest]), Needs())
    assert scores.logits is not None
    for row, seq in enumerate(rest):
        wanted = plain(model, seq.tokens).logits[0, -1]
        torch.testing.assert_close(scores.logits[row], wanted, atol=1e-4, rtol=0)


def test_memory_is_given_back() -> None:
    target, seq = HFTarget(llama()), FakeSeq(0, tokens(9))
    target.prefill([seq], Needs())
    assert all(layer.keys is not None for layer in target._cache.layers)
    target.release(seq)
    target.release(seq)
    assert target.used_slots == 0
    assert all(layer.keys is None and layer.values is None for layer in target._cache.layers)


def test_room_is_what_is_not_cached_and_not_promised_to_trees() -> None:
    target, seq = HFTarget(llama(), kv_slots=50), FakeSeq(0, tokens(9), max_length=30)
    assert target.has_room(50)
    target.prefill([seq], Needs())
    assert target.has_room(42)
    assert not target.has_room(43)
    assert not target.make_room([seq], [43])
    assert target.make_room([seq], [6])
    assert target.has_room(30, 6)
    assert not target.has_room(30, 7)
    trees = TreeBatch.chains([[seq.tokens[-1]]])
    target.score([seq], trees, Needs())
    target.commit([seq], trees, Verdict.whole_chain(trees, [1]))
    assert target.has_room(41)
    target.release(seq)
    assert target.has_room(50)


def test_prompts_share_a_pass_with_those_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass is padded to more than twice a prompt, but for the very short; each has the rows it has alone."""
    monkeypatch.setattr(hf, "CHUNK", 32)
    lengths = [3, 41, 12, 1, 20, 75, 40]  # one token each stays out
    assert list(hf._alike([n - 1 for n in lengths])) == [
        (0, [0, 2]), (0, [1, 4, 5, 6]), (32, [1, 6]), (32, [5]), (64, [5]),
    ]  # fmt: skip
    model = llama()
    seqs = [FakeSeq(b, tokens(n, b)) for b, n in enumerate(lengths)]
    together = HFTarget(model).prefill(seqs, Needs((1, -1)))[1].hidden
    for layer, rows in together.items():
        alone = [HFTarget(model).prefill([seq], Needs((1, -1)))[1].hidden[layer] for seq in seqs]
        torch.testing.assert_close(rows, torch.cat(alone), atol=1e-5, rtol=0)


def test_nodes_past_the_context_do_no_harm() -> None:
    """A learnt position table ends; what is drafted past it can never stand, but must not crash."""
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=8, n_embd=32, n_layer=1, n_head=4)
    model = transformers.GPT2LMHeadModel(config).eval()
    target, seq = HFTarget(model), FakeSeq(0, tokens(7))
    target.prefill([seq], Needs())
    scores = target.score([seq], TreeBatch.chains([[seq.tokens[-1], 1, 2, 3]]), Needs())
    assert scores.logits is not None
    torch.testing.assert_close(scores.logits[1], plain(model, [*seq.tokens, 1]).logits[0, -1], atol=1e-4, rtol=0)


def test_bloom_is_itself_again_after_a_pass() -> None:
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    model = transformers.BloomForCausalLM(config).eval()
    before = plain(model, tokens(9)).logits
    HFTarget(model)
    assert "build_alibi_tensor" not in vars(model.transformer)
    assert torch.equal(plain(model, tokens(9)).logits, before)


def test_a_16_bit_model_passes_the_check() -> None:
    assert HFTarget(llama().to(torch.bfloat16)).vocab_size == VOCAB


def test_attention_that_takes_no_mask_is_replaced() -> None:
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    HFTarget(model)
    assert model.config._attn_implementation == "sdpa"


def test_dynamic_rope_is_kept_to_the_length_it_was_trained_at() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 24}
    assert HFTarget(llama(rope_parameters=rope)).max_length == 24


def small_mamba() -> Any:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    return transformers.MambaForCausalLM(config)


def small_mpt() -> Any:
    return transformers.MptForCausalLM(transformers.MptConfig(vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2))


def small_t5() -> Any:
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, num_layers=1, num_heads=4, d_ff=32, d_kv=8)
    return transformers.T5ForConditionalGeneration(config)


def local_gpt_neo() -> Any:
    types = [[["global", "local"], 1]]
    config = transformers.GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=types
    )
    return transformers.GPTNeoForCausalLM(config)


def alibi_falcon() -> Any:
    config = transformers.FalconConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
    )
    return transformers.FalconForCausalLM(config)


def conv_lfm2() -> Any:
    kinds = ["conv", "full_attention"]
    return build("Lfm2ForCausalLM", "Lfm2Config", layer_types=kinds)


@pytest.mark.parametrize("make", [small_mamba, small_mpt, small_t5, local_gpt_neo, alibi_falcon, conv_lfm2])
def test_what_cannot_score_trees_is_refused_by_name(make: Callable[[], Any]) -> None:
    model = make()
    with pytest.raises(UnsupportedModel, match=f"^{model.config.model_type} .*") as refusal:
        HFTarget(model)
    assert "\n" not in str(refusal.value)


def test_a_model_that_ignores_the_mask_is_found_out() -> None:
    model = llama()
    attend = model.forward

    def deaf(*args: Any, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        return attend(*args, past_key_values=past_key_values, **kwargs)

    model.forward = deaf
    with pytest.raises(UnsupportedModel, match="llama"):
        HFTarget(model)


def test_a_model_that_ignores_positions_is_found_out() -> None:
    model = llama()
    attend = model.forward

    def lost(*args: Any, position_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        return attend(*args, past_key_values=past_key_values, **kwargs)

    model.forward = lost
    with pytest.raises(UnsupportedModel, match="unlike text"):
        HFTarget(model)


def test_loading_from_a_folder(tmp_path: Any) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    target, seq = HFTarget.load(tmp_path, torch.float32, "cpu"), FakeSeq(0, tokens(5))
    target.prefill([seq], Needs())
    scores = target.score([seq], TreeBatch.chains([seq.tokens[-1:]]), Needs())
    assert scores.logits is not None
    torch.testing.assert_close(scores.logits[0], plain(model, seq.tokens).logits[0, -1], atol=1e-4, rtol=0)


def test_a_folder_that_is_not_there(tmp_path: Any) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        HFTarget.load(tmp_path / "nowhere", torch.float32, "cpu")


def test_two_targets_of_one_model_do_not_meet() -> None:
    model = llama()
    one, other, seq = HFTarget(model), HFTarget(model), FakeSeq(0, tokens(6))
    one.prefill([seq], Needs())
    twin = copy.copy(seq)
    twin.tokens = tokens(3, seed=5)
    other.prefill([twin], Needs())
    scores = one.score([seq], TreeBatch.chains([seq.tokens[-1:]]), Needs())
    assert scores.logits is not None
    torch.testing.assert_close(scores.logits[0], plain(model, seq.tokens).logits[0, -1], atol=1e-4, rtol=0)
