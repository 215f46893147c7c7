"""Texts of hybrids and decoders by rows: any drafter, prefix cache and preemption leave transformers' greedy ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.core.errors import InvalidInput, UnsupportedModel
from forerun.core.params import SpeculativeConfig
from forerun.core.types import Needs, Request, TreeBatch
from forerun.drafters.model.layer_skip import default_plan, draft_part
from forerun.models.decoder import Decoder
from forerun.models.hybrid.stateful import StatefulDecoder
from forerun.models.pages import PAGE
from forerun.testing import FakeSeq
from tests.engine.test_prefix import GREEDY, SEEDED, engine_on, play, text, written
from tests.models.tiny_checkpoints import HYBRIDS, make_decoder, make_reference, save
from tests.models.tiny_folder import LETTERS, make_tiny_folder

PREEMPTED = ("lfm2", "qwen3_next", "granite4", "nemotron_h", "deepseek_v3", "gemma4")
PROMPTS = ["abcabcabcabc", "the cat. the cat. the", "Q"]


def made(name: str, folder: Path, kv_slots: int | None = None) -> Decoder:
    return make_decoder(*save(make_reference(name), folder), kv_slots)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_greedy_texts_equal_transformers_plain_and_drafted(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny_folder(tmp_path / "target", name)
    other = make_tiny_folder(tmp_path / "draft", "lfm2-odd")  # a hybrid that drafts is rolled back, too
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    wanted = []
    for prompt in PROMPTS:
        ids = torch.tensor([[LETTERS.index(letter) for letter in prompt]])
        out = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=1, pad_token_id=0, use_cache=False)
        wanted.append([token for token in out[0, ids.shape[1] :].tolist() if token != 1])
    params = SamplingParams(max_tokens=24, temperature=0.0)
    for drafter in ("none", "ngram", "suffix", "draft_model"):
        more: dict[str, Any] = {"draft_model": other} if drafter == "draft_model" else {}
        config = SpeculativeConfig(drafter=drafter, controller="fixed", budget=6, **more)
        with LLM(folder, speculative_config=config, device="cpu") as llm:
            assert isinstance(llm.engine.target, StatefulDecoder)
            done = llm.generate(PROMPTS, params)
            assert [[token for token in one.token_ids if token != 1] for one in done] == wanted, drafter


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_turns_find_as_much_with_drafts_as_without_and_change_no_text(
    name: str, params: SamplingParams, tmp_path: Path
) -> None:
    start = text(3, 118)
    prompts = [start, [*start, 1, 2], [*start[:70], 7, 7], [9] * 5]
    params = replace(params, max_tokens=20)  # across the end of a page
    requests = [Request(tuple(prompt), params) for prompt in prompts]
    alone = [play(engine_on(made(name, tmp_path)), [replace(one, cache_salt=None)])[0] for one in requests]
    found = {}
    for drafter in ("none", "ngram"):
        engine = engine_on(made(name, tmp_path), drafter=drafter)
        first = play(engine, requests)
        again = play(engine, requests, apart=0)
        assert written(first) == written(again) == written(alone)
        turns = play(engine, [Request((*seq.tokens, 5, 6), params) for seq in again])
        assert [seq.cached_tokens for seq in again] == [seq.prompt_length - 1 for seq in again]
        assert all(seq.cached_tokens >= seq.prompt_length - 3 for seq in turns)
        assert engine.stats.drafted > 0 if drafter == "ngram" else engine.stats.drafted == 0
        found[drafter] = [seq.cached_tokens for seq in (*first, *again, *turns)], written(turns)
    assert found["none"] == found["ngram"]
    fresh = play(engine_on(made(name, tmp_path)), [Request((*s.tokens, 5, 6), params, cache_salt=None) for s in alone])
    assert written(fresh) == found["none"][1]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("name", PREEMPTED)
def test_preempted_sequences_go_on_with_the_same_text(name: str, drafter: str, tmp_path: Path) -> None:
    params = replace(SEEDED, max_tokens=50)
    requests = [Request(tuple(text(20 + i, 42)), params) for i in range(4)]
    wanted = written(play(engine_on(made(name, tmp_path)), requests))
    engine = engine_on(made(name, tmp_path, kv_slots=5 * PAGE), drafter=drafter)
    assert written(play(engine, requests, apart=0)) == wanted
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize("name", PREEMPTED)
def test_logits_behind_a_preemption_have_the_bits_of_before(name: str, tmp_path: Path) -> None:
    """The sequence loses its pages and its states to another one, and is read anew beside a third."""
    target = made(name, tmp_path, kv_slots=6 * PAGE)
    seq, beside, other = (FakeSeq(b, text(b, n), max_length=260) for b, n in enumerate((90, 70, 190)))
    tree = TreeBatch.trees([([seq.tokens[-1], 3, 9, 4, 5], [-1, 0, 0, 1, 3])])
    target.prefill([seq], Needs())
    before = target.score([seq], tree, Needs()).required_logits.clone()
    target.release(seq)
    target.prefill([beside, other], Needs())
    target.release(other)
    target.prefill([seq], Needs())
    assert target.reused_tokens(seq) == 0, "it was read anew"
    assert torch.equal(target.score([seq], tree, Needs()).required_logits, before)


@pytest.mark.parametrize(("options", "said"), [
    ({"tensor_parallel_size": 2}, "recurrent states"),
])  # fmt: skip
def test_what_hybrids_cannot_do_is_said_in_one_line(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=said) as raised:
        LLM(make_tiny_folder(tmp_path, "lfm2"), device="cpu", **options)
    assert "\n" not in str(raised.value)


def test_nemotron_with_latent_experts_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would read all of them, and then fail the test of trees."""
    monkeypatch.setattr("forerun.models.hf.HFTarget.load", None)
    folder = Path(make_tiny_folder(tmp_path, "nemotron_h"))
    config = json.loads((folder / "config.json").read_text())
    key = next(name for name in ("layers_block_type", "layer_types") if name in config)
    config[key] = ["moe" if one == "mlp" else one for one in config[key]]
    config["moe_latent_size"] = 16
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="moe_latent_size") as raised:
        LLM(folder, device="cpu")
    assert "\n" not in str(raised.value)


def test_layers_of_hybrids_do_not_draft(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot") as raised:
        draft_part(made("lfm2", tmp_path), default_plan(4))
    assert "\n" not in str(raised.value)
