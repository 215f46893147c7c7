"""Long prompts from the answers of an earlier run: which serve, what they become, the same every time."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from forerun.core.errors import ForerunError, InvalidInput
from forerun.train.data.corpus import Text, write_shard
from forerun.train.data.make import write_answers, write_prompts
from forerun.train.data.prompts import (
    CODE_SHARES,
    LEAST,
    SHARES,
    Passage,
    Prompt,
    Renderer,
    Sources,
    Wrapper,
    as_messages,
    made_up,
    read_passages,
)
from forerun.train.data.writer import Order, Written
from forerun.train.options import DataOptions

END = 0
HEATS = (0.0, 1.0)


class Vocabulary:
    """A tokenizer of words, which learns them as they come, and has several turns in its template."""

    eos_ids = frozenset({END})

    def __init__(self) -> None:
        self._ids: dict[str, int] = {"": END}
        self._words = [""]

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, *, tools: Any = None
    ) -> str:
        head = f" <tools> {json.dumps(tools)}" if tools else ""
        return head + "".join(f" <{m['role']}> {m['content']} </>" for m in messages) + " <assistant>"

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        words = re.findall(r"\s*\S+|\s+$", text)
        for word in words:
            if self._ids.setdefault(word, len(self._words)) == len(self._words):
                self._words.append(word)
        return [self._ids[word] for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self._words[i] for i in ids)


def speech(number: int, words: int) -> str:
    """Sentences of twelve words, unlike those of any other number."""
    made = random.Random(number)
    drawn = ["".join(made.choices("abcdefgh", k=5)) for _ in range(words)]
    lines = [" ".join(drawn[i : i + 12]).capitalize() + "." for i in range(0, words, 12)]
    return " ".join(lines)


def question(number: int) -> str:
    return f"Tell me about number {number} and {speech(1000 + number, 4)}"


def earlier_run(
    folder: Path, tokenizer: Vocabulary, *, lengths: Sequence[int], ended: bool = True, record: bool = True
) -> Path:
    """A data folder: one prompt per length, answered at two temperatures; texts lie in their order of completion."""
    folder.mkdir()
    render, texts = Renderer(tokenizer), list[Text]()
    for i, words in enumerate(lengths):
        for j, heat in enumerate(HEATS):
            asked = render(question(i))
            answer = tokenizer.encode(" " + speech(2 * i + j, words)) + ([END] if ended else [])
            texts.append(Text([*asked, *answer], len(asked), heat, 2 * i + j))
    random.Random(1).shuffle(texts)
    write_shard(folder / "shard-00000.safetensors", texts)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(question(i)) + "\n" for i in range(len(lengths))))
    if record:
        (folder / "provenance.json").write_text(json.dumps({"arguments": {"temperatures": HEATS}}))
    return folder


def options_for(out: Path, passages: Path, **more: Any) -> DataOptions:
    values = {"own_prompts": 0, "max_prompt": 600, "max_length": 640, "temperatures": (0.0,), **more}
    return DataOptions(target="t", out=str(out), passages=(str(passages),), **values)


def never(orders: Iterable[Order]) -> Iterator[Written]:
    raise AssertionError("nothing should be written")


def prompts_of(options: DataOptions, tokenizer: Vocabulary) -> list[Prompt]:
    Path(options.out).mkdir(exist_ok=True)
    return write_prompts(options, tokenizer, never, Path(options.out), lambda progress: None)


@pytest.mark.parametrize("record", [True, False])
def test_passages_are_answers_that_ended_with_their_questions(tmp_path: Path, record: bool) -> None:
    words = Vocabulary()
    run = earlier_run(tmp_path / "run", words, lengths=(100, LEAST - 1, LEAST, 501, 500), record=record)
    passages = read_passages([str(run)], words, most=500)
    found = sorted((p.length, str(p.question), p.text) for p in passages)
    lengths = {0: 100, 2: LEAST, 4: 500}
    assert found == sorted(
        (n, question(i), speech(2 * i + j, n)) for i, n in lengths.items() for j in range(len(HEATS))
    )
    few = read_passages([str(run)], words, most=500, count=3)
    assert few == passages[:3]
    assert few != read_passages([str(run)], words, most=500, count=3, seed=1)


def test_excuses_and_repeats_are_no_passages(tmp_path: Path) -> None:
    words = Vocabulary()
    run = earlier_run(tmp_path / "run", words, lengths=(100,))
    asked, texts = Renderer(words)(question(0)), list[Text]()
    for i, start in enumerate(("I'm sorry, but as an AI I cannot. ", "")):
        answer = words.encode(f" {start}{speech(i, 100)}")  # the second is what the run holds already
        texts.append(Text([*asked, *answer, END], len(asked), HEATS[i], i))
    other = tmp_path / "other"
    shutil.copytree(run, other)
    write_shard(other / "shard-00000.safetensors", texts)
    assert len(read_passages([str(run), str(other)], words, most=500)) == 2


def test_a_folder_without_a_usable_passage_is_refused(tmp_path: Path) -> None:
    words = Vocabulary()
    cut = earlier_run(tmp_path / "cut", words, lengths=(100, 120), ended=False)
    with pytest.raises(InvalidInput, match=r"none of the 4 texts .* larger --max-prompt"):
        prompts_of(options_for(tmp_path / "out", cut), words)
    with pytest.raises(InvalidInput, match="none of the 4 texts"):  # the ids of another model
        read_passages([str(earlier_run(tmp_path / "run", words, lengths=(90, 99)))], _Strange(), most=500)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ForerunError, match="holds no shards"):
        prompts_of(options_for(tmp_path / "out", tmp_path / "empty"), words)
    (cut / "prompts.jsonl").unlink()
    with pytest.raises(InvalidInput, match="what was asked"):
        prompts_of(options_for(tmp_path / "out", cut), words)
    assert not (tmp_path / "out" / "prompts.jsonl").exists()


class _Strange(Vocabulary):
    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(f"word{i}" for i in ids)


def wrapper_of(folder: Path, limit: int, seed: int = 0) -> tuple[Wrapper, Vocabulary, list[Passage]]:
    words = Vocabulary()
    run = earlier_run(folder, words, lengths=[60 + 3 * i for i in range(60)])
    passages = read_passages([str(run)], words, most=limit - 50)
    return Wrapper(words, passages, limit, seed), words, passages


def test_kinds_come_in_their_shares_and_lengths_are_spread(tmp_path: Path) -> None:
    wrapper, words, passages = wrapper_of(tmp_path / "run", limit=600)
    made = list(wrapper.wrap(len(passages)))
    assert len(made) == len(passages) == 120
    kinds = Counter(wrapped.kind for wrapped in made)
    for kind, share in SHARES.items():
        assert kinds[kind] == pytest.approx(share * 120, abs=3), kind
    render = Renderer(words)
    lengths = [len(render(wrapped.prompt)) for wrapped in made]
    assert lengths == [wrapped.length for wrapped in made]
    assert max(lengths) <= 600
    assert 0.3 < sum(length < 250 for length in lengths) / 120 < 0.45
    assert sum(length > 400 for length in lengths) > 24


def test_prompts_hold_passages_and_what_was_asked(tmp_path: Path) -> None:
    wrapper, _, passages = wrapper_of(tmp_path / "run", limit=600)
    spoken = {passage.text for passage in passages}
    firsts = {text.split(".")[0] for text in spoken}
    for wrapped in wrapper.wrap(120):
        messages = as_messages(wrapped.prompt)
        if wrapped.kind in ("tools", "maths"):
            continue
        if wrapped.kind == "turns":
            assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2) + ["user"]
            assert all(m["content"] in spoken for m in messages[1::2])  # never cut
            assert len(messages) >= 3
        elif wrapped.kind == "sentence":
            assert any(line in messages[0]["content"] for text in spoken for line in text.split(". "))
        else:
            assert sum(first in messages[0]["content"] for first in firsts) in range(1, 5)
            assert (wrapped.kind == "retrieve") == ("Tell me about number" in messages[0]["content"])


def test_what_was_made_up_fits_together() -> None:
    """Every slot can be filled, and a function requires what it has."""
    known = made_up()
    said = [ask for function in known["functions"] for ask in function["asks"]]
    said += [words for part in known["maths"].values() for words in part]
    slots = {slot for words in said for slot in re.findall(r"\{(\w+)\}", words)}
    assert slots == {*known["slots"], "small", "n", "big", "text", "problem"}
    for function in known["functions"]:
        assert set(function["parameters"]["required"]) <= set(function["parameters"]["properties"])
    assert len({function["name"] for function in known["functions"]}) == len(known["functions"])


@pytest.mark.parametrize("has_template", [False, True])
def test_functions_are_offered_as_the_template_does_or_in_words(tmp_path: Path, has_template: bool) -> None:
    _, words, passages = wrapper_of(tmp_path / "run", limit=600)
    tokenizer = words if has_template else Sources(words)
    render, asks, fitting = Renderer(tokenizer), made_up()["functions"], 0
    wrapper = Wrapper(tokenizer, passages, 600, 0)
    made = [wrapped for _ in range(40) if (wrapped := wrapper._try("tools", passages[0], 500))]
    assert len(made) == 40
    for wrapped in made:
        assert isinstance(wrapped.prompt, dict)
        asked = wrapped.prompt["messages"][0]["content"]
        functions = [tool["function"] for tool in wrapped.prompt["tools"]]
        assert "{" not in asked
        read = words.decode(render(wrapped.prompt))
        assert wrapped.length == len(render(wrapped.prompt)) <= 600
        assert asked in read
        assert all(json.dumps(function) in read for function in functions)
        assert ("<tools>" in read) is has_template
        assert ("You can call these functions" in read) is not has_template
        offered = {function["name"] for function in functions}
        forms = [ask for function in asks if function["name"] in offered for ask in function["asks"]]
        patterns = [re.sub(r"\\\{\w+\\\}", ".+", re.escape(form)) for form in forms]
        fitting += any(re.fullmatch(pattern, asked, re.DOTALL) for pattern in patterns)
    assert 30 <= fitting < 40  # sometimes no function fits


def test_problems_of_maths_are_whole_and_differ(tmp_path: Path) -> None:
    wrapper, _, passages = wrapper_of(tmp_path / "run", limit=600)
    made = [wrapped.prompt for wrapped in wrapper.wrap(600) if wrapped.kind == "maths"]
    assert len(made) == len(set(map(str, made))) > 30
    assert all(isinstance(prompt, str) and "{" not in prompt and re.search(r"\d", prompt) for prompt in made)
    assert len(passages) == 120


def program(number: int, lines: int = 8) -> str:
    """An answer with code in it, as a chat model writes it."""
    body = "\n".join(f"    step{i} = {speech(77 * number + i, 2).lower()!r}" for i in range(lines))
    return f"{speech(number, 40)}\n\n```python\ndef work{number}(x):\n{body}\n```\n\n{speech(500 + number, 30)}"


def test_code_is_edited_and_the_prompt_holds_all_of_it() -> None:
    words = Vocabulary()
    texts = [program(i) for i in range(80)]
    passages = [Passage(text, len(words.encode(text)), ({"role": "user", "content": "?"},)) for text in texts]
    made = list(Wrapper(words, passages, 600, 0).wrap(80))
    kinds = Counter(wrapped.kind for wrapped in made)
    assert set(kinds) == set(CODE_SHARES)
    for kind, share in CODE_SHARES.items():
        assert kinds[kind] == pytest.approx(share * 80, abs=3), kind
    pieces = [text.split("\n\n")[1] for text in texts]
    for wrapped in made:
        if wrapped.kind == "edit":
            asked = as_messages(wrapped.prompt)[0]["content"]
            held = [i for i, piece in enumerate(pieces) if piece in asked]
            assert len(held) == 1
            about = asked.replace(pieces[held[0]], "")
            assert all(line not in about for line in texts[held[0]].split("\n\n")[::2])  # no prose around it
            assert "{" not in about
            assert set(re.findall(r"work\d+", about)) <= {f"work{held[0]}"}


def test_prose_and_scraps_of_code_are_not_edited() -> None:
    prose, scrap, nameless = (
        Passage(text, 100, ({"role": "user", "content": "?"},))
        for text in (speech(1, 90), program(1, lines=1), "```sql\nSELECT a\nFROM {b}\nWHERE c\n  AND d;\n```")
    )
    assert prose.code() is None
    assert scrap.code() is None
    assert nameless.code() == nameless.text
    made = list(Wrapper(Vocabulary(), [nameless], 600, 0).wrap(1))
    assert made[0].kind == "edit"
    assert nameless.text in str(made[0].prompt)
    assert "``" not in str(made[0].prompt).replace("```", "")  # no instruction about a name that is not there


def test_the_seed_alone_decides(tmp_path: Path) -> None:
    one, two, three = (
        [w.prompt for w in wrapper_of(tmp_path / str(i), limit=500, seed=seed)[0].wrap(40)]
        for i, seed in enumerate((5, 5, 6))
    )
    assert one == two
    assert one != three


def test_a_passage_comes_back_only_when_all_were_used_and_in_another_kind(tmp_path: Path) -> None:
    words = Vocabulary()
    run = earlier_run(tmp_path / "run", words, lengths=(80, 100, 120))
    many = prompts_of(options_for(tmp_path / "many", run, wrapped=15, max_prompt=200), words)
    assert len(many) == 15
    assert len({json.dumps(prompt) for prompt in many}) == 15
    everything = prompts_of(options_for(tmp_path / "all", run, wrapped=10_000), words)
    assert 15 < len(everything) <= 6 * len(SHARES)


def test_no_prompt_leaves_less_than_32_tokens_for_its_answer(tmp_path: Path) -> None:
    words = Vocabulary()
    run = earlier_run(tmp_path / "run", words, lengths=[60 + 5 * i for i in range(30)])
    options = options_for(tmp_path / "out", run, max_prompt=250, max_length=260)
    lengths = [len(Renderer(words)(prompt)) for prompt in prompts_of(options, words)]
    assert max(lengths) <= 260 - 32


def test_a_shortened_passage_ends_with_a_sentence() -> None:
    passage = Passage(speech(3, 240), 240, ({"role": "user", "content": "?"},))
    cut = passage.shortened(100)
    assert passage.text.startswith(cut.text)
    assert cut.text.endswith(".")
    assert LEAST <= len(cut.text.split()) <= 110
    assert cut.length == pytest.approx(len(cut.text.split()), abs=2)
    assert passage.shortened(240) == passage == passage.shortened(LEAST - 30)


def test_a_run_with_conversations_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    words = Vocabulary()
    run, out = earlier_run(tmp_path / "run", words, lengths=[60 + 9 * i for i in range(12)]), tmp_path / "out"
    options = options_for(out, run, shard_tokens=1500)
    prompts = prompts_of(options, words)
    assert any(isinstance(prompt, list) for prompt in prompts)
    assert prompts_of(options, words) == prompts  # as read back

    def write(orders: Iterable[Order], most: int = 1000) -> Iterator[Written]:
        for i, order in enumerate(orders):
            if i == most:
                raise KeyboardInterrupt
            yield Written(order, [*order.prompt, *words.encode(" yes indeed"), END], True)

    with pytest.raises(KeyboardInterrupt):
        write_answers(options, words, lambda orders: write(orders, 14), out, prompts, lambda progress: None)
    written: list[int] = []

    def rest(orders: Iterable[Order]) -> Iterator[Written]:
        for text in write(orders):
            written.append(text.order.number)
            yield text

    write_answers(options, words, rest, out, prompts_of(options, words), lambda progress: None)
    numbers = [n for file in out.glob("shard-*") for n in load_file(file)["numbers"].tolist()]
    assert sorted(numbers) == list(range(len(prompts)))
    assert 10 <= len(written) < len(prompts)


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    for wrong in ({"wrapped": -1}, {"passages": (), "wrapped": 5, "own_prompts": 3}, {"passages": (str(tmp_path),)}):
        values: dict[str, Any] = {"target": "t", "out": str(tmp_path), "passages": ("x",), "own_prompts": 0}
        with pytest.raises(InvalidInput):
            DataOptions(**{**values, **wrong})
