"""The closed form, and the checkpoint that is written of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from forerun.referee.checkpoint import HEAD_DIM, THETA, VOCAB, Made, make_model, token_ids
from forerun.referee.tables import FAR, Pair, Rules, warped


@pytest.fixture(scope="module")
def made(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_model(tmp_path_factory.mktemp("table"), pair)


def test_the_law_is_that_of_the_three_rows(pair: Pair) -> None:
    table = pair.target
    prompt, output = table.encode("abcdefghij"), table.encode("kl0")
    contexts = table.contexts(prompt, output)
    tokens = [*prompt, *output]
    for i, row in enumerate(table.logits(contexts.last)):
        at = len(prompt) - 1 + i
        due = table.rows[0, tokens[at]] + table.rows[1, tokens[at - 1]] + table.rows[2, tokens[at - FAR]] + table.offset
        assert np.array_equal(row, due)
    assert contexts.used[-1].sum() == 3
    assert contexts.used[0].sum() == 0


def test_no_context_has_two_likeliest_symbols(pair: Pair) -> None:
    rng = np.random.default_rng(1)
    logits = np.sort(pair.target.logits(rng.integers(0, pair.target.size, (5000, 3))), -1)
    assert (logits[:, -1] - logits[:, -2]).min() >= 1 / 128 - 1e-9


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"presence_penalty": 0.8, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.3},
        {"logit_bias": {0: 2.0, 3: -1.0}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_laws_are_those_of_our_warp(pair: Pair, options: dict[str, object]) -> None:
    """Two implementations that share no code: numpy here, torch in the engine."""
    import torch

    from forerun.core.params import SamplingParams
    from forerun.core.types import TreeBatch
    from forerun.testing import FakeSeq
    from forerun.verify.warp import warp

    table = pair.target
    prompt, output = table.encode(table.prompts(1, 5)[0]), table.encode("abcaadl01")
    contexts = table.contexts(prompt, output)
    names = {key: value for key, value in options.items() if key != "logit_bias"}
    bias = {table.alphabet[i]: value for i, value in options.get("logit_bias", {}).items()}  # type: ignore[attr-defined]
    laws, clear = table.laws(contexts, Rules(**names, bias=bias))  # type: ignore[arg-type]
    params = SamplingParams.from_dict({"temperature": 1.0, **options})
    for i in np.flatnonzero(clear):
        tokens = [*prompt, *output[:i]]
        seq = FakeSeq(0, tokens, prompt_length=len(prompt), params=params, stop_ids=frozenset())
        logits = torch.tensor(table.logits(contexts.last[[i]])).float()
        found = warp(logits, [seq], TreeBatch.chains([[tokens[-1]]])).log_weights[0].double().softmax(-1)
        assert np.allclose(found.numpy(), laws[i], atol=1e-6)


def test_borders_that_rounding_decides_are_not_clear() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]))
    assert warped(logits, Rules(top_p=0.8))[1].tolist() == [False, True]


def test_a_second_best_position_is_far_below_in_every_context() -> None:
    angles = np.arange(1, 4096)[:, None] * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    assert (28.0**2 / 8) * (1 - np.cos(angles)).sum(-1).min() > 80


def test_a_pair_is_read_back(pair: Pair, made: Made) -> None:
    again = Pair.load(made.table)
    assert np.array_equal(again.target.rows, pair.target.rows)
    assert np.array_equal(again.draft.rows, pair.draft.rows)


@pytest.mark.slow
def test_transformers_computes_the_closed_form(pair: Pair, made: Made) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    table, ids = pair.target, token_ids(pair.target)
    tokenizer = AutoTokenizer.from_pretrained(made.target)
    model = AutoModelForCausalLM.from_pretrained(made.target, dtype=torch.float32)
    text = table.prompts(1, 9, 60, 60)[0]
    tokens = tokenizer(text)["input_ids"]
    assert tokens == [ids[symbol] for symbol in table.encode(text)]
    assert tokenizer.decode(tokens) == text
    due = table.logits(table.contexts(table.encode(text[:8]), table.encode(text[8:])).last)
    with torch.no_grad():
        for dtype, error in ((torch.float32, 1e-5), (torch.float16, 1e-3)):
            logits = model.to(dtype)(torch.tensor([tokens])).logits[0, 7:].double()
            assert np.abs(logits.numpy()[:, ids] - due).max() < error
            assert float(1 - logits.softmax(-1)[:, ids].sum(-1).min()) < 1e-9


def test_half_precision_files_hold_the_same_numbers(pair: Pair, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    half, full = make_model(tmp_path / "half", pair, "float16"), make_model(tmp_path / "full", pair)
    exact = load_file(full.target / "model.safetensors")
    for name, values in load_file(half.target / "model.safetensors").items():
        if "q_proj" not in name and "k_proj" not in name:  # angles, which only choose a position
            assert np.array_equal(values, exact[name]), name
    assert json.loads((half.target / "config.json").read_text())["vocab_size"] == VOCAB


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3"])
def test_our_engine_accepts_drafts_as_often_as_is_known(pair: Pair, made: Made, drafter: str) -> None:
    """Greedy: a drafted symbol is accepted where both tables have the same likeliest symbol."""
    from forerun import LLM

    table = pair.target
    folder = made.draft if drafter == "draft_model" else made.head
    options = {"budget": 1, "width": 1, "controller": "fixed"}
    with LLM(str(made.target), speculative_config={"drafter": drafter, "draft_model": str(folder), **options}) as llm:
        rounds = accepted = 0
        for prompt in table.prompts(6, 31):
            done = llm.generate(prompt, max_tokens=30)
            out = table.greedy(table.encode(prompt), 30)
            assert done.text == table.decode([symbol for symbol in out if symbol != table.end])
            contexts = table.contexts(table.encode(prompt), out)
            agrees = table.logits(contexts.last).argmax(-1) == pair.draft.logits(contexts.last).argmax(-1)
            rounds, accepted = rounds + done.drafted, accepted + done.accepted
            place = 1  # the first token comes with the prompt
            due = 0
            while place < len(out):
                due += bool(agrees[place]) and place + 1 <= len(out)
                place += 1 + bool(agrees[place])
            assert abs(done.accepted - due) <= 1, prompt
    assert 0 < accepted < rounds
