"""Data making: prompts from an empty user turn, answers in shards, and a run that goes on where it was killed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from forerun.api.llm import LLM
from forerun.build.engine import load_target, make_engine
from forerun.core.errors import DamagedFile, InvalidInput
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.models.decoder import Decoder
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.native.target import NativeDecoder
from forerun.testing import TableLM
from forerun.train.checkpoint import write_provenance
from forerun.train.data.corpus import Corpus
from forerun.train.data.folder import keep_settings, other_targets
from forerun.train.data.make import write_answers, write_prompts, write_with_engine, writer_for
from forerun.train.data.prompts import Renderer, Sources, around_user_turn, read_prompts
from forerun.train.data.writer import Order, Written
from forerun.train.options import DataOptions


class Words:
    """A tokenizer of single characters, with a chat template."""

    eos_ids = frozenset({0})

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, *, tools: Any = None
    ) -> str:
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
    values = {"own_prompts": 20, "max_prompt": 100, "max_length": 120, "shard_tokens": 300, "temperatures": (0.0, 1.0)}
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
    again = write_prompts(options, Words(), lambda orders: pytest.fail("written again"), tmp_path, lambda p: None)
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


def test_a_model_without_a_chat_template_continues_its_own_texts(tmp_path: Path) -> None:
    """Which need not have ended, as a question must have."""
    options, asked = options_for(tmp_path, own_prompts=3), list[Order]()

    def write(orders: Iterable[Order]) -> Iterator[Written]:
        for order in orders:
            asked.append(order)
            said = f"{'abc'[order.number] * 9} and more"
            yield Written(order, [*order.prompt, *(ord(letter) for letter in said)], False)

    prompts = write_prompts(options, Sources(Words()), write, tmp_path, lambda progress: None)
    assert prompts == [f"{letter * 9} and more" for letter in "abc"]
    assert [order.prompt for order in asked] == [[0]] * 3
    assert Renderer(Sources(Words()))("text") == [ord(letter) for letter in "text"]


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
    assert len(kept) == 11, "all that was written is there, the shard that was not full included"
    write_answers(options, Words(), scripted, tmp_path, prompts, lambda progress: None)
    numbers = [n for file in sorted(tmp_path.glob("shard-*")) for n in load_file(file)["numbers"].tolist()]
    assert sorted(numbers) == list(range(20))
    corpus = Corpus(tmp_path, max_length=120, holdout=0.3)
    first, end, answer = corpus.training[0]
    text = Words().decode(corpus.tokens[first:end].tolist())
    assert text.startswith("<u>prompt ")
    assert text[answer - first :].startswith("Tell me")


@pytest.mark.parametrize("other", [{"temperatures": (0.0,)}, {"own_prompts": 30}, {"seed": 1}, {"max_length": 130}])
def test_a_folder_is_resumed_with_the_settings_it_was_begun_with(tmp_path: Path, other: dict[str, Any]) -> None:
    """Under other settings the same numbers mean other texts: nothing would be written, and nobody would notice."""
    options = options_for(tmp_path)
    keep_settings(tmp_path, options)
    keep_settings(tmp_path, replace(options, batch=3, shard_tokens=7, device="cpu", out="elsewhere"))
    (name,) = other
    with pytest.raises(InvalidInput, match=f"was begun with {name}=.*another --out"):
        keep_settings(tmp_path, replace(options, **other))
    keep_settings(tmp_path, options)


def test_texts_of_another_target_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    """Also in a folder that was finished before settings were kept."""
    options = options_for(tmp_path)
    write_provenance(tmp_path, options)
    keep_settings(tmp_path, options)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(InvalidInput, match="was begun with target='t', not 'u'"):
        keep_settings(tmp_path, replace(options, target="u"))
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(InvalidInput, match="damaged; remove it"):
        keep_settings(tmp_path, options)


def test_training_on_texts_of_another_target_is_warned_of(tmp_path: Path) -> None:
    for name in ("ours", "theirs", "unknown"):
        (tmp_path / name).mkdir()
    keep_settings(tmp_path / "ours", replace(options_for(tmp_path), target="/some/where/model.gguf"))
    keep_settings(tmp_path / "theirs", replace(options_for(tmp_path), target="other"))
    three = ",".join(str(tmp_path / name) for name in ("ours", "theirs", "unknown"))
    said = other_targets(three, "elsewhere/model.gguf")
    assert said is not None
    assert said.endswith(f": {tmp_path / 'theirs'} (other)")
    assert other_targets(f"{tmp_path / 'ours'},{tmp_path / 'unknown'}", "model.gguf") is None


def test_an_answer_has_a_limit_of_its_own(tmp_path: Path) -> None:
    """However short its prompt is; the limit of both together still holds."""
    lengths: dict[int, tuple[int, int]] = {}

    def write(orders: Iterable[Order]) -> Iterator[Written]:
        for order in orders:
            lengths[order.number] = len(order.prompt), order.max_length
            yield Written(order, [*order.prompt, 1], False)

    prompts = ["short", "l" * 75]
    options = options_for(tmp_path, max_answer=40, temperatures=(0.0,))
    write_answers(options, Words(), write, tmp_path, prompts, lambda progress: None)
    assert lengths[0][1] - lengths[0][0] == 40
    assert lengths[1][1] == 120 < lengths[1][0] + 40


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


@pytest.mark.parametrize(("length", "prompt"), [(512, 160), (128, 64), (16, 8)])
def test_prompts_get_half_of_a_short_length(tmp_path: Path, length: int, prompt: int) -> None:
    """`data make --max-length 128` failed on --max-prompt, which nobody had given."""
    assert DataOptions("tiny", str(tmp_path), max_length=length).max_prompt == prompt


def rambling(orders: Iterable[Order]) -> Iterator[Written]:
    """Never comes to an end: every text is cut at its limit."""
    for order in orders:
        said = [ord("w")] * (order.max_length - len(order.prompt))
        yield Written(order, [*order.prompt, *said], False)


def test_a_run_that_leaves_no_prompt_says_why_and_keeps_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    options = options_for(tmp_path, own_prompts=6, max_prompt=40)
    with pytest.raises(InvalidInput, match=r"6 that did not end within --max-prompt 40 \(3 of it the template\)"):
        write_prompts(options, Words(), rambling, tmp_path, lambda at: None, said.append)
    assert not (tmp_path / "prompts.jsonl").exists()  # else the next run would go on from it
    (tmp_path / "prompts.jsonl").write_text("")  # as earlier versions left it
    found = write_prompts(options_for(tmp_path), Words(), scripted, tmp_path, lambda at: None, said.append)
    assert len(found) == 5
    assert said == ["5 of 20 prompts are used; dropped: 15 that are like another"]


def test_a_template_that_fills_the_prompt_is_said_at_once(tmp_path: Path) -> None:
    def never(orders: Iterable[Order]) -> Iterator[Written]:
        raise AssertionError("nothing should be written")

    options = options_for(tmp_path, openings=("Tell me about",), max_prompt=16)
    with pytest.raises(InvalidInput, match="take 16 tokens; raise --max-prompt"):
        write_prompts(options, Words(), never, tmp_path, lambda at: None)


def test_prompts_without_room_for_an_answer_are_counted(tmp_path: Path) -> None:
    said: list[str] = []
    options = options_for(tmp_path, max_prompt=40, max_length=60)
    short, long = "What is a fjord?", "why " * 20
    texts, _ = write_answers(options, Words(), scripted, tmp_path, [short, long], lambda at: None, said.append)
    assert texts == 2  # at two temperatures
    assert said == [
        "1 of 2 prompts are used; dropped: 1 that leave less than 16 tokens of --max-length 60 for an answer"
    ]
    with pytest.raises(InvalidInput, match="no prompt is left to answer: 0 of 1"):
        write_answers(options, Words(), scripted, tmp_path, [long], lambda at: None)


def test_the_prompts_of_an_interrupted_run_may_be_damaged(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('"fine"\n{"')
    with pytest.raises(DamagedFile, match=r"prompts\.jsonl is damaged"):
        write_prompts(options_for(tmp_path), Words(), scripted, tmp_path, lambda at: None)


def test_a_cpu_writes_with_the_engine_many_texts_a_pass(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native kernels, a batch, and texts that do not depend on what is written beside them."""
    passes: list[int] = []
    score = Decoder.score

    def counted(self: Decoder, seqs: Any, *more: Any) -> Any:
        assert isinstance(self, NativeDecoder)
        passes.append(len(seqs))
        return score(self, seqs, *more)

    monkeypatch.setattr(Decoder, "score", counted)
    whole = replace(tiny, load_tokenizer=lambda: Words())
    orders = [Order([1 + i, 5, 3], (0.0, 1.0)[i % 2], 20, i) for i in range(8)]
    written: dict[int, list[list[int]]] = {}
    for batch in (8, 3):
        passes.clear()
        write = writer_for(whole, DataOptions("t", "o", batch=batch, device="cpu"))
        texts = {text.order.number: text.tokens for text in write(orders)}
        written[batch] = [texts[i] for i in range(8)]
        assert max(passes) == batch
        tokens = sum(len(text) for text in written[batch]) - 3 * len(orders)
        assert sum(passes) == tokens  # a token each; prompts cost no passes of their own
        assert len(passes) <= 17 * -(-8 // batch)
    assert written[8] == written[3]
    plain = LLM(make_engine(load_target(tiny, EngineConfig(device="cpu")), frozenset({0})), Words())  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=17)
    assert [plain.generate(order.prompt, params).token_ids for order in orders[::2]] == [
        text[3:] for text in written[8][::2]
    ]
