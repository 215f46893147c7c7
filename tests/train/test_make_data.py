"""Data making: prompts from an empty user turn, answers in shards, and a run that goes on where it was killed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from forerun.build import make_engine
from forerun.errors import InvalidInput
from forerun.params import EngineConfig, SpeculativeConfig
from forerun.testing import TableLM
from forerun.train.data.corpus import Corpus
from forerun.train.data.make import write_answers, write_prompts, write_with_engine
from forerun.train.data.prompts import around_user_turn, read_prompts
from forerun.train.data.writer import Order, Written
from forerun.train.options import DataOptions


class Words:
    """A tokenizer of single characters, with a chat template."""

    eos_ids = frozenset({0})

    def chat_text(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        return "<u>" + str(messages[0]["content"]) + "</u><a>"

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(i) for i in ids if i != 0)


def scripted(orders: Iterable[Order]) -> Iterator[Written]:
    """Writes the order's number after the prompt; every fifth prompt is one that it wrote before."""
    for order in orders:
        thing = ("rivers", "clocks", "bread", "whales", "chess")[order.number % 5]
        said = f"Tell me about {thing}: how do {thing} work, and who likes {thing}?"
        tokens = [*order.prompt, *(ord(letter) for letter in said)]
        yield Written(order, [*tokens, 0][: order.max_length], True)


def options_for(folder: Path, **more: Any) -> DataOptions:
    values = {
        "own_prompts": 20,
        "max_prompt": 100,
        "max_length": 120,
        "shard_tokens": 300,
        "temperatures": (0.0, 1.0),
    }
    return DataOptions(target="t", out=str(folder), **{**values, **more})


def test_prompts_come_from_an_empty_user_turn_without_repeats(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("What is a fjord?\n")
    options = options_for(tmp_path, prompts=(str(tmp_path / "mine.txt"),))
    seen: list[Order] = []

    def write(orders: Iterable[Order]) -> Iterator[Written]:
        seen.extend(orders)
        return scripted(seen)

    prompts = write_prompts(options, Words(), write, tmp_path, lambda progress: None)
    assert prompts[0] == "What is a fjord?"
    assert len(prompts) == 1 + 5
    assert all(Words().decode(order.prompt) == "<u>" for order in seen)
    assert around_user_turn(Words()) == ("<u>", "</u><a>")
    again = write_prompts(
        options, Words(), lambda orders: pytest.fail("written again"), tmp_path, lambda p: None
    )
    assert again == prompts


def test_a_separator_inside_a_prompt_is_no_end_of_line(tmp_path: Path) -> None:
    asked = "one\u2028two\x85three"
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"prompt": asked}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert list(read_prompts([file])) == [asked]


def test_prompts_begin_as_asked_and_may_then_be_cut(tmp_path: Path) -> None:
    options = options_for(tmp_path, openings=("", "Summarize: "), own_prompts=4)

    def write(orders: Iterable[Order]) -> Iterator[Written]:
        for order in orders:
            said = f"text {'abcd'[order.number] * 9}"
            yield Written(order, [*order.prompt, *(ord(letter) for letter in said)], False)

    prompts = write_prompts(options, Words(), write, tmp_path, lambda progress: None)
    assert prompts == ["Summarize: text bbbbbbbbb", "Summarize: text ddddddddd"]


def test_answers_go_on_where_a_run_was_killed(tmp_path: Path) -> None:
    options = options_for(tmp_path)
    prompts = [f"prompt {i} {'abc' * i}" for i in range(10)]

    def killed(orders: Iterable[Order]) -> Iterator[Written]:
        for i, written in enumerate(scripted(orders)):
            if i == 11:
                raise KeyboardInterrupt
            yield written

    with pytest.raises(KeyboardInterrupt):
        write_answers(options, Words(), killed, tmp_path, prompts, lambda progress: None)
    kept = [n for file in sorted(tmp_path.glob("shard-*")) for n in load_file(file)["numbers"].tolist()]
    assert 0 < len(kept) < 12
    write_answers(options, Words(), scripted, tmp_path, prompts, lambda progress: None)
    numbers = [n for file in sorted(tmp_path.glob("shard-*")) for n in load_file(file)["numbers"].tolist()]
    assert sorted(numbers) == list(range(20))
    corpus = Corpus(tmp_path, max_length=120, holdout=0.3)
    first, end, answer = corpus.training[0]
    text = Words().decode(corpus.tokens[first:end].tolist())
    assert text.startswith("<u>prompt ")
    assert text[answer - first :].startswith("Tell me")


def test_the_engine_writes_for_targets_of_other_families() -> None:
    speculative = SpeculativeConfig(drafter="none", verifier="exact", controller="fixed")
    target = TableLM(vocab_size=12, sharpness=8.0)
    engine = make_engine(target, frozenset({0}), speculative, EngineConfig(max_batch=3))
    orders = [Order([1 + i, 2], 0.0, 12, i) for i in range(7)]
    written = {w.order.number: w for w in write_with_engine(engine, orders)}
    assert sorted(written) == list(range(7))
    for order in orders:
        text = list(order.prompt)
        while len(text) < 12 and (len(text) == 2 or text[-1] != 0):
            text.append(int(target.logits(text).argmax()))
        assert written[order.number].tokens == text


def test_nonsense_options_are_refused(tmp_path: Path) -> None:
    for wrong in ({"temperatures": ()}, {"max_prompt": 200}, {"own_prompts": 0}, {"batch": 0}):
        with pytest.raises(InvalidInput):
            options_for(tmp_path, **wrong)
