"""Thinking: its budget and the grammar behind it hold in every text, under every drafter, greedy and sampled."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import tokenizers
import torch

pytest.importorskip("llguidance")

from forerun.build.engine import make_engine
from forerun.core.errors import InvalidInput
from forerun.core.params import EngineConfig, Prefix, SamplingParams, SpeculativeConfig, for_schema
from forerun.core.thinking import HARMONY, marks_of
from forerun.core.types import Request
from forerun.engine.engine import Engine
from forerun.models.load.tokenizer import Tokenizer
from forerun.verify.grammar.compiled import Grammars
from tests.exactness.harness import DRAFTERS, Alike, head_folder, run, table
from tests.exactness.partial_table import with_layers

ANSWERS = ["ab", "ba", "a</think>b", "c" * 5]
SCHEMA = for_schema({"enum": ANSWERS})
KINDS = {
    "one token": ["<think>", "</think>"],  # of the vocabulary
    "many tokens": [],  # the marks are spelt in letters
    "plain": [],  # it does not think
    "overrunning": ["nk>{", "k>\n", '>"', "</think>x"],  # tokens that end the mark and write on
}
HARMONY_MARKS = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|return|>"]


@cache
def tokenizer(kind: str) -> Tokenizer:
    """A vocabulary of bytes, and of a few more tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    if kind == "harmony":
        backend.add_special_tokens(HARMONY_MARKS)
        template = "<|start|>user<|message|>{{ messages[0].content }}<|end|><|start|>assistant{# <|channel|> #}"
        return Tokenizer(backend, [backend.token_to_id("<|return|>")], chat_template=template)
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in KINDS[kind]])
    backend.add_special_tokens(["<eos>"])
    template = "{{ messages[0].content }}{% if not opens %}{% else %}<think>{# </think> #}{% endif %}"
    template = "{{ messages }}" if kind == "plain" else template
    return Tokenizer(backend, [backend.token_to_id("<eos>")], chat_template=template)


def engine_of(kind: str, drafter: str) -> Engine:
    own = tokenizer(kind)
    size = own.vocab_size
    speculative = SpeculativeConfig(
        drafter=drafter, draft_model=head_folder(drafter, size), budget=5, width=2, controller="fixed",
        verifier="coupled",
    )  # fmt: skip
    return make_engine(
        with_layers(table(size)), own.eos_ids, speculative, EngineConfig(max_batch=32), tokenizer=own,
        draft_target=Alike(vocab_size=size, order=2, seed=1, sharpness=1.6),
    )  # fmt: skip


def requests(kind: str, temperature: float) -> list[Request]:
    """Prompts that open thinking or leave it to the model; budgets, and none; with a schema and without."""
    asked = []
    for i, budget in enumerate((0, 1, 3, 7, 20, None)):
        for opens in (True, False):
            for schema in (SCHEMA, None):
                if budget is None and (schema is None or not opens):
                    continue
                text = {"harmony": "<|start|>assistant" if opens else f"{i}"}.get(kind, f"{i}{'<think>' * opens}")
                params = SamplingParams(
                    max_tokens=70, temperature=temperature, seed=i, response_format=schema, max_thinking_tokens=budget,
                )  # fmt: skip
                asked.append(Request(tuple(tokenizer(kind).encode(text, False)), params))
    return asked


def check(kind: str, request: Request, tokens: list[int]) -> None:
    """No violation."""
    own, params = tokenizer(kind), request.params
    marks, ends = own.thinking, own.eos_ids
    assert marks is not None
    thinking = Grammars(own, own.vocab_size, ends)._thinking
    assert thinking is not None
    start, budget = thinking.starts(request.prompt), params.max_thinking_tokens
    text = own.decode([token for token in tokens if token not in ends], skip_special=False)
    thinks = start == "open" or (start == "may" and text.startswith(marks.begin))
    _, mark, answer = text.partition(marks.end) if thinks else ("", "", text)
    if thinks and budget is not None:
        inside = 0 if start == "open" else len(thinking.begin)
        most = inside + budget + len(thinking.close)
        written = next((i for i in range(len(tokens)) if marks.end in own.decode(tokens[: i + 1], False)), None)
        assert written is None or written + 1 <= most, (text, budget)
        assert written is not None or tokens[-1] in ends or len(tokens) < most, (text, budget)
    if params.response_format is not None and len(tokens) < params.max_tokens:
        assert mark or not thinks, f"the text ended while it thought: {text!r}"
        assert json.loads(answer) in ANSWERS, text


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_text_breaks_its_budget_or_its_schema(drafter: str, temperature: float) -> None:
    kinds = ("one token", "overrunning") if temperature else ("many tokens", "harmony")
    for kind in kinds:
        asked = requests(kind, temperature)
        wanted, _ = written(kind, "none", temperature)
        tokens, _ = written(kind, drafter, temperature)
        assert tokens == wanted
        for request, text in zip(asked, tokens, strict=True):
            check(kind, request, text)
        assert any(
            request.params.response_format and len(text) < 70 for request, text in zip(asked, tokens, strict=True)
        )


@cache
def written(kind: str, drafter: str, temperature: float) -> tuple[list[list[int]], list[str]]:
    return run(engine_of(kind, drafter), requests(kind, temperature))


@pytest.mark.parametrize("kind", ["one token", "many tokens", "overrunning", "harmony"])
def test_texts_drawn_by_the_law_alone_keep_their_budget_and_schema(kind: str) -> None:
    """Tokens that end the text, or end thinking and write on, are the likeliest ones time and again."""
    own, numbers = tokenizer(kind), random.Random(kind)
    tempting = [*own.eos_ids, *(index for token in KINDS.get(kind, ()) for index in own.encode(token, False))]
    for asked in requests(kind, 1.0):
        laws = Grammars(own, own.vocab_size, own.eos_ids).compile(asked).params.processors
        output = list[int]()
        if not laws:
            continue  # this prompt opens an answer, which is free
        while len(output) < asked.params.max_tokens and own.eos_ids.isdisjoint(output):
            logits = torch.tensor([numbers.random() for _ in range(own.vocab_size)])
            logits[numbers.sample(tempting, min(2, len(tempting)))] += numbers.random() < 0.5
            output.append(int(laws[0](Prefix([*asked.prompt, *output], len(asked.prompt)), logits).argmax()))
        check(kind, asked, output)


def test_thinking_ends_in_the_token_that_ends_it_and_writes_on() -> None:
    own = tokenizer("overrunning")
    asked = Request(tuple(own.encode("1<think>", False)), SamplingParams(max_tokens=70, max_thinking_tokens=3))
    (law,) = Grammars(own, own.vocab_size, own.eos_ids).compile(asked).params.processors
    output = own.encode("a</think>x", False)
    for _ in range(6):
        logits = torch.rand(own.vocab_size)
        assert law(Prefix([*asked.prompt, *output], len(asked.prompt)), logits.clone()).equal(logits)
        output += own.encode("b", False)


def test_a_broken_law_would_be_seen() -> None:
    """Negative control: without the law, texts of the same requests break both."""
    asked = requests("one token", 1.0)
    free = [replace(one, params=replace(one.params, response_format=None, max_thinking_tokens=None)) for one in asked]
    tokens, _ = run(engine_of("one token", "none"), free)
    broken = 0
    for request, text in zip(asked, tokens, strict=True):
        try:
            check("one token", request, text)
        except (AssertionError, ValueError):
            broken += 1
    assert broken > len(asked) / 3


def test_a_model_that_does_not_think_has_no_budget() -> None:
    own = Tokenizer(tokenizer("many tokens")._backend, [0], chat_template="{{ messages }}")
    with pytest.raises(InvalidInput, match="max_thinking_tokens=5 is for models that think"):
        Grammars(own, own.vocab_size, [0]).compile(Request((1,), SamplingParams(max_thinking_tokens=5)))


@pytest.mark.parametrize(
    ("prompt", "start"), [("x<think>\n", "open"), ("x<think>\n\n</think>\n\n", "none"), ("x", "may")]
)
def test_a_prompt_says_how_its_text_starts(prompt: str, start: str) -> None:
    marks = marks_of("{{ x }}</think>")
    assert marks is not None
    assert marks.start_of(prompt) == start
    assert marks_of("no marks") is None
    assert marks_of("<|channel|>") is HARMONY


def test_marks_of_harmony_are_in_the_text_and_its_messages_do_not_end_it() -> None:
    own: Any = tokenizer("harmony")
    ids = own.encode("<|channel|>analysis<|message|>x<|end|>", False)
    assert own.decode([*ids, *own.eos_ids]) == "<|channel|>analysis<|message|>x<|end|>"
    assert {own.token(index) for index in own.eos_ids} == {"<|return|>"}
