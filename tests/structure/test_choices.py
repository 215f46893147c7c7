"""Greedy texts that a grammar holds: asked about one token, a law says what its mask would; verdicts are the same.

The mask decides everywhere else: above temperature 0, and where log-probabilities are asked for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.noise import Noise
from forerun.core.params import Forces, Prefix, SamplingParams
from forerun.core.request import Request
from forerun.core.types import PlainSeq, Scores, TreeBatch
from forerun.verify.decide import choosers_of, chosen
from forerun.verify.exact import ExactVerifier
from forerun.verify.grammar.compiled import GrammarLaw, Grammars
from forerun.verify.grammar.thinking import ThinkingLaw, _State
from forerun.verify.processors import IMPOSSIBLE
from forerun.verify.warp import argmax_rows, chooser_of, warp
from tests.structure.answers import SCHEMAS
from tests.structure.conftest import law_of
from tests.structure.test_kinds import KINDS
from tests.structure.test_thinking import SCHEMA, requests
from tests.structure.test_thinking import tokenizer as thinker

NAMES = ["nested", "limits", "with $defs", "formats"]


def masked(law: Any, prefix: Prefix, logits: Tensor) -> Tensor:
    found: Tensor = law(prefix, logits.clone())
    return found


def likely(law: Any, prefix: Prefix, numbers: random.Random, size: int) -> Tensor:
    """Logits [V] whose largest may follow half of the time."""
    logits = torch.tensor([numbers.random() for _ in range(64)]).repeat(size // 64 + 1)[:size].clone()
    may = (masked(law, prefix, logits) > IMPOSSIBLE).nonzero()[:, 0].tolist()
    logits[numbers.choice(may) if numbers.random() < 0.5 else numbers.randrange(size)] = 2.0
    return logits


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", NAMES)
def test_a_choice_is_the_largest_that_the_mask_leaves(name: str, grammars: Grammars) -> None:
    """Along random texts; by laws that were asked about other paths before, and by one that knows masks alone."""
    numbers, schema = random.Random(name), SCHEMAS[name][0]
    law, other, known = law_of(grammars, schema), law_of(grammars, schema), 0
    prefix = Prefix([1], 1)
    for _ in range(60):
        for _ in range(3):
            logits = likely(other, prefix, numbers, 49152)
            top = argmax_rows(logits[None])[0]
            token, (wanted,) = law.choice(prefix, top), argmax_rows(masked(other, prefix, logits)[None])
            assert token in (None, wanted)
            known += token is not None
        if wanted == 2:
            prefix = Prefix([1], 1)
        else:
            kept = len(prefix.output) - len(prefix.path)  # some of a draft is committed, the rest is not
            text = [*prefix.output, wanted][: numbers.randrange(kept, len(prefix.output) + 2)]
            where = numbers.randrange(kept, len(text) + 1)
            prefix = Prefix([1, *text[:where]], 1, tuple(text[where:]))
    assert 40 < known < 180, "negative control: both cases occur"


@pytest.mark.parametrize("kind", ["one token", "many tokens", "overrunning", "harmony"])
@pytest.mark.parametrize("budget", [None, 3])
def test_thinking_chooses_what_its_law_leaves(kind: str, budget: int | None) -> None:
    """Of every state of random texts."""
    own, numbers, known = thinker(kind), random.Random(kind), 0
    laws = Grammars(own, own.vocab_size, own.eos_ids)
    params = SamplingParams(response_format=SCHEMA, max_thinking_tokens=budget)
    marks = own.thinking
    assert marks is not None
    for prompt in {request.prompt for request in requests(kind, 0.0)[-4:]}:
        (law,) = laws.compile(Request(prompt, params)).params.processors
        if not isinstance(law, ThinkingLaw):
            continue  # this prompt opens an answer
        output = list[int]()
        end = own.encode(marks.end, False)
        for step in range(24):
            prefix = Prefix((*prompt, *output), len(prompt))
            logits = torch.rand(own.vocab_size)
            wanted = argmax_rows(masked(law, prefix, logits)[None])[0]
            for top in {*numbers.sample(range(own.vocab_size), 40), *end, *own.eos_ids}:
                peak = logits.clone()
                peak[top] = 2.0
                token = law.choice(prefix, top)
                assert token in (None, argmax_rows(masked(law, prefix, peak)[None])[0]), (own.decode(output), top)
                known += token is not None
            state = law._states.state(prefix)
            assert isinstance(state, _State)
            thinks = state.mode == "thinking"
            output += end if step == 8 and thinks and not budget else [wanted]
            if own.eos_ids.intersection(output):
                break
    assert known


def grown(law: Any, seq: PlainSeq, numbers: random.Random, size: int) -> tuple[list[int], list[int], Tensor]:
    """A tree that often follows the target's choice, and else holds what may not follow; and logits of its nodes."""
    tokens, parents, rows = [seq.tokens[-1]], [-1], [torch.rand(size)]
    paths: list[tuple[int, ...] | None] = [()]  # None = it may not follow
    while len(tokens) < 9:
        parent = len(tokens) - 1 if numbers.random() < 0.7 else numbers.randrange(len(tokens))
        path, token, best = paths[parent], numbers.randrange(size), -1
        if path is not None:
            [best] = argmax_rows(masked(law, Prefix(seq.tokens, seq.prompt_length, path), rows[parent])[None])
            token = best if numbers.random() < 0.8 else token
        if (parent, token) in zip(parents, tokens, strict=True):
            continue
        tokens, parents, rows = [*tokens, token], [*parents, parent], [*rows, torch.rand(size)]
        paths.append((*path, token) if path is not None and token == best else None)
    return tokens, parents, torch.stack(rows)


class Yes(Forces):
    """Negative control: it takes every token."""

    def forced(self, prefix: Prefix) -> Sequence[int]:
        return ()

    def choice(self, prefix: Prefix, top: int) -> int:
        return top


def test_the_verdict_is_that_of_masked_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of batches of trees, beside a text that nothing holds; and masks are made of fewer nodes."""
    own, numbers, masks, wrong = thinker("plain"), random.Random(5), list[int](), 0
    laws, made = Grammars(own, own.vocab_size, own.eos_ids), GrammarLaw._mask_after

    def counted(*args: Any) -> Any:
        masks.append(1)
        return made(*args)

    monkeypatch.setattr(GrammarLaw, "_mask_after", counted)
    counts, accepted = {"one": 0, "all": 0}, 0
    for _ in range(12):
        seqs, trees = list[PlainSeq](), list[tuple[list[int], list[int], Tensor]]()
        for i, (how, _) in enumerate(KINDS.values()):
            (law,) = laws.compile(Request((65,), SamplingParams(structured_outputs=how))).params.processors
            seqs.append(PlainSeq(i, [65], params=SamplingParams(temperature=0.0, processors=(law,))))
            other = laws.compile(Request((65,), SamplingParams(structured_outputs=how))).params.processors[0]
            trees.append(grown(other, seqs[-1], numbers, own.vocab_size))
        seqs.append(PlainSeq(9, [65], params=SamplingParams(temperature=0.0)))
        trees.append(([65], [-1], torch.rand(1, own.vocab_size)))
        batch = TreeBatch.trees([tree[:2] for tree in trees])
        scores = Scores(torch.cat([tree[2] for tree in trees]))
        before = scores.required_logits.clone()
        masks.clear()
        choosers = choosers_of(seqs)
        assert choosers is not None
        laws_of, verdict = chosen(seqs, batch, scores, choosers)
        counts["one"] += len(masks)
        assert torch.equal(scores.required_logits, before)
        assert not laws_of.impossible
        full = warp(scores.required_logits, seqs, batch)
        counts["all"] += len(masks)
        wanted = ExactVerifier().verify(batch, full, Noise([0] * 6, [1] * 6)).to_host()
        assert verdict.to_host() == wanted
        accepted += sum(map(len, wanted[0]))
        wrong += chosen(seqs, batch, scores, [law and Yes() for law in choosers])[1].to_host() != wanted
    assert accepted > 60
    assert wrong > 6
    assert counts["one"] * 1.2 < counts["all"]


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.7}, {"logprobs": 1}, {"logit_bias": {3: 1.0}}, {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"min_tokens": 4}, {"bad_words": [[5]]},
    ],
)  # fmt: skip
def test_only_a_law_that_is_the_argmax_otherwise_is_asked_about_one_token(
    changed: dict[str, Any], grammars: Grammars
) -> None:
    law = law_of(grammars, SCHEMAS["nested"][0])
    usual = SamplingParams(max_tokens=8, temperature=0.0, processors=(law,))
    assert chooser_of(PlainSeq(0, [1], params=usual)) is law
    assert chooser_of(PlainSeq(0, [1], params=replace(usual, **changed))) is None
    assert chooser_of(PlainSeq(0, [1], params=replace(usual, processors=(law, law)))) is None
