"""Every drafter x every exact verifier x {chain, tree} x settings, through the real loop."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from forerun.core import registry
from forerun.core.params import SamplingParams
from forerun.core.types import Laws, Request, TreeBatch, Verdict
from tests.exactness.harness import (
    PRODUCT,
    SETTINGS,
    Letters,
    chi_square_p,
    engine_for,
    joint_law,
    law_after,
    run,
    sample_texts,
    table,
)

PROMPTS = [(5, 6, 7, 8, 5, 6, 7), (1, 2, 3, 1, 2, 3, 1, 2), (9,), (4, 4, 4, 4), (10, 11, 12, 13, 14, 15, 10)]
VOCAB = 16


@cache
def oracle(prompt: tuple[int, ...], setting: str) -> list[int]:
    """Greedy text by the definition, one token at a time, with no engine, tree or cache."""
    params, output = SETTINGS[setting], list[int]()
    while len(output) < params.max_tokens:
        output.append(int(law_after(table(VOCAB), prompt, output, params).argmax()))
        if output[-1] == 0:
            break
    return output


# a greedy tree is walked alike under every verifier, whatever the penalties did to its logits: one of them tells
GREEDY = [(*case, "greedy") for case in PRODUCT] + [
    (*case, "greedy+penalties") for case in PRODUCT if case[1] == "exact"
]


@pytest.mark.slow(keep=64)
@pytest.mark.parametrize(("drafter", "verifier", "shape", "setting"), GREEDY)
def test_greedy_text_is_the_oracles(drafter: str, verifier: str, shape: str, setting: str) -> None:
    engine = engine_for(drafter, verifier, shape, VOCAB)
    tokens, _ = run(engine, [Request(prompt, SETTINGS[setting]) for prompt in PROMPTS])
    assert tokens == [oracle(prompt, setting) for prompt in PROMPTS]
    assert engine.target.used_slots == 0  # type: ignore[attr-defined]


@cache
def plain_texts(verifier: str, setting: str) -> tuple[list[list[int]], list[str]]:
    return run(engine_for("none", verifier, "chain", VOCAB), [Request(prompt, SETTINGS[setting]) for prompt in PROMPTS])


@pytest.mark.slow(keep=48)
@pytest.mark.parametrize(("drafter", "verifier", "shape"), [p for p in PRODUCT if p[1] == "coupled"])
@pytest.mark.parametrize("setting", [name for name in SETTINGS if not name.startswith("greedy")])
def test_a_seed_fixes_the_text_whatever_drafts(drafter: str, verifier: str, shape: str, setting: str) -> None:
    requests = [Request(prompt, SETTINGS[setting]) for prompt in PROMPTS]
    plain = plain_texts(verifier, setting)
    drafted = run(engine_for(drafter, verifier, shape, VOCAB), requests)
    assert drafted == plain
    first = [*SETTINGS].index(setting) + (shape == "tree")
    for i in (first % len(requests), (first + 2) % len(requests)):  # over settings and shapes, every prompt
        assert run(engine_for(drafter, verifier, shape, VOCAB), [requests[i]])[0] == [plain[0][i]]


def test_another_seed_gives_another_text() -> None:
    """The control of the test above: were the noise constant, it would pass for nothing."""
    engine = engine_for("ngram", "coupled", "chain", VOCAB)
    requests = [Request(PROMPTS[0], replace(SETTINGS["T=0.8"], seed=seed)) for seed in range(8)]
    assert len({tuple(tokens) for tokens in run(engine, requests)[0]}) > 4


# the others only choose nodes, in other ways: one case each tells
SAMPLES = ("none", "ngram", "draft_model", "ngram>draft_model")
LAW_CASES = [
    (*case, "T=0.8")
    for case in PRODUCT
    if (case[0] in SAMPLES and (case[0] != "none" or case[2] == "tree")) or case[1:] == ("exact", "tree")
] + [
    (*case, setting)
    for case in PRODUCT
    if case[0] in SAMPLES and case[2] == "tree"
    for setting in ("top-p", "penalties")
]


LENGTH, SHORT, PROMPT = 3, 6, (1, 2, 3, 1, 2, 3, 1, 2)  # a few tokens of six: their law can be enumerated


def short_params(setting: str) -> SamplingParams:
    params = SETTINGS[setting]
    return replace(params, max_tokens=LENGTH, min_tokens=0, top_k=min(params.top_k, 4))


@cache
def short_law(setting: str) -> dict[tuple[int, ...], float]:
    return joint_law(table(SHORT), PROMPT, short_params(setting), LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "verifier", "shape", "setting"), LAW_CASES)
def test_the_law_of_the_text_is_the_targets(drafter: str, verifier: str, shape: str, setting: str) -> None:
    """Chi-square of whole texts against the enumerated law of the target alone."""
    params, law = short_params(setting), short_law(setting)
    assert abs(sum(law.values()) - 1) < 1e-6
    counts = sample_texts(engine_for(drafter, verifier, shape, SHORT, frozenset()), PROMPT, params, 1000)
    assert chi_square_p(counts, law) > 1e-4


class TargetLawOnRejection:
    """A wrong verifier that many have written: on rejection it samples the target's law, not the residual."""

    exact, shares_noise = True, False

    def verify(self, trees: TreeBatch, laws: Laws, noise: object) -> Verdict:
        from forerun.core.noise import ACCEPT, DRAW, draw

        paths, bonus = [], []
        for b in range(len(trees)):
            first, path, node = trees.starts[b], list[int](), 0
            while True:
                child = next((i for i in range(1, trees.sizes()[b]) if trees.parents[first + i] == node), None)
                p = laws.probs(first + node)
                if child is None:
                    break
                token, draws = int(trees.tokens[first + child]), trees.drawn_from
                q = 1.0 if draws is None else float(draws.laws[draws.rows[first + child], token])
                if noise.uniform(b, len(path), ACCEPT) * q >= p[token]:  # type: ignore[attr-defined]
                    break
                path.append(child)
                node = child
            bonus.append(draw(p, noise.uniform(b, len(path), DRAW)))  # type: ignore[attr-defined]
            paths.append(path)
        return Verdict.of(paths, bonus, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_negative_control_a_wrong_rule_is_caught(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.verifiers.paths, "wrong", f"{__name__}:TargetLawOnRejection")
    params = short_params("T=0.8")
    counts = sample_texts(engine_for(drafter, "wrong", "chain", SHORT, frozenset()), PROMPT, params, 1000)
    assert chi_square_p(counts, short_law("T=0.8")) < 1e-6


FREE = [*(spec.name for spec in registry.drafters.specs() if spec.needs != "head"), "ngram>draft_model"]


@pytest.mark.parametrize(
    "names", [["ngram", "draft_model", "none", "draft_model", "ngram", "ngram", "draft_model"], FREE]
)
def test_a_mixed_batch_writes_what_each_request_would_write_alone(names: list[str]) -> None:
    """Different prompts, lengths, parameters, drafters and verifiers side by side; some join late."""
    requests = [
        Request(prompt, replace(params, max_tokens=6 + 3 * i), drafter=drafter, verifier=verifier)
        for i, (prompt, params, drafter, verifier) in enumerate(
            zip(
                PROMPTS * 2,
                [*SETTINGS.values()] * 2,
                names * 2,
                ["coupled", "exact", "coupled", "coupled", "exact", "block", "coupled"] * 2,
                strict=False,
            )
        )
    ]
    assert len({(request.drafter, request.verifier) for request in requests}) >= 5
    together, texts = run(engine_for("ngram", "auto", "tree", VOCAB, batch=4), requests)
    for request, tokens, text in zip(requests, together, texts, strict=True):
        assert run(engine_for("ngram", "auto", "tree", VOCAB), [request]) == ([tokens], [text])


@pytest.mark.slow
def test_stop_strings_end_the_text_where_they_would_without_drafting() -> None:
    params = replace(SETTINGS["stop-strings"], stop=("f g", "c"), max_tokens=60, min_tokens=0)
    requests = [Request(prompt, replace(params, seed=seed)) for prompt in PROMPTS for seed in range(6)]
    tokens, texts = run(engine_for("draft_model", "coupled", "tree", VOCAB, frozenset()), requests)
    assert (tokens, texts) == run(engine_for("none", "coupled", "chain", VOCAB, frozenset()), requests)
    stopped = [(ids, text) for ids, text in zip(tokens, texts, strict=True) if len(ids) < 60]
    assert stopped
    for ids, text in stopped:
        whole = Letters().decode(ids)
        assert "f g" not in text
        assert "c" not in text
        assert whole.startswith(text)
        assert "f g" in whole or "c" in whole  # the token that completed it is kept, and is the last
