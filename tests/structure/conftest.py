"""The default model's tokenizer with llguidance, and texts drawn from a grammar alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forerun.core.params import Prefix, SamplingParams
from forerun.core.request import Request
from forerun.models.load.tokenizer import Tokenizer
from forerun.verify.grammar.compiled import GrammarLaw, Grammars

pytest.importorskip("llguidance")


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Any) -> Tokenizer:
    found: Tokenizer = checkpoint.tokenizer()
    return found


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


def law_of(grammars: Grammars, schema: Any, **how: Any) -> GrammarLaw:
    params = SamplingParams.from_dict({"json_schema": schema, "structured_outputs": how or None})
    (law,) = grammars.compile(Request((1,), params)).params.processors
    assert isinstance(law, GrammarLaw)
    return law


def allowed(law: GrammarLaw, output: list[int], path: tuple[int, ...] = ()) -> list[int]:
    """What may follow; the committed tokens come behind a prompt of one."""
    logits = law(Prefix([1, *output], 1, path), torch.zeros(49152))
    return (logits == 0).nonzero()[:, 0].tolist()


@pytest.fixture(scope="session")
def drawn(tokenizer: Tokenizer) -> Callable[[GrammarLaw, int], str]:
    """A text of random tokens that the law allows, short ones where it gets long, up to its end."""
    spelt = [tokenizer.decode([token], skip_special=False) for token in range(tokenizer.vocab_size)]
    closing = {token for token, text in enumerate(spelt) if text and set(text) <= set('"]}')}
    at = {token for token, text in enumerate(spelt) if text in ("@", ":")}  # an address has one
    short = {token for token, text in enumerate(spelt) if 0 < len(text) < 3 and text.isascii() and text.strip() == text}

    def draw(law: GrammarLaw, seed: int) -> str:
        numbers, output = random.Random(seed), list[int]()
        while True:
            may = allowed(law, output)
            if len(output) > 30 + numbers.randrange(10):  # random tokens would not end a text
                wanted = (tokenizer.eos_ids, closing, at, short, may)
                may = next(found for each in wanted if (found := [t for t in may if t in each]))
            output.append(numbers.choice(may))
            if output[-1] in tokenizer.eos_ids:
                return tokenizer.decode(output[:-1])
            assert len(output) < 400

    return draw
