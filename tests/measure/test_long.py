"""Long prompts: of the lengths that are asked for, the same every time, and about what is in them."""

from __future__ import annotations

import ast
import re

import pytest

from forerun.core.errors import InvalidInput
from forerun.measure.bench import suites
from forerun.measure.bench.suites import LENGTHS, LONG_TASKS, PER_TASK, Item, lengths_in, load_suite, suite_size


class Words:
    """Tokens are words and the blanks between them; a chat has seven tokens more."""

    has_chat_template = True

    def chat_ids(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[str]:
        return ["x"] * 7 + re.findall(r"\w+|\W", messages[0]["content"])


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "_tokenizer", lambda model: Words())
    suites._long.cache_clear()


def text_of(item: Item) -> str:
    return item.messages[0]["content"]


@pytest.mark.parametrize("length", [2000, 16000])
def test_prompts_have_the_length_that_was_asked_for(length: int) -> None:
    items = load_suite(f"long:{length}", model="m")
    sizes = [len(Words().chat_ids(list(item.messages))) for item in items]
    assert len(items) == PER_TASK * len(LONG_TASKS) == suite_size(f"long:{length}")
    assert len({text_of(item) for item in items}) == len(items)
    assert max(sizes) <= length
    # a line may have more tokens than 2% of a short prompt
    assert min(sizes) >= 0.97 * length - 30


def test_the_same_prompts_come_every_time() -> None:
    before = [text_of(item) for item in load_suite("long:2k", model="m")]
    suites._long.cache_clear()
    assert [text_of(item) for item in load_suite("long:2k", model="m")] == before


def test_limit_and_tasks_choose_among_lengths() -> None:
    chosen = load_suite("long:2k,3k", ["needle_3k", "code_edit_2k"], 1, "m")
    assert [item.id for item in chosen] == ["code_edit_2k-1", "needle_3k-1"]
    assert suite_size("long:2k,3k", ["needle_3k"]) == PER_TASK
    with pytest.raises(InvalidInput, match=r"unknown task 'needle_4k'; this suite has: code_edit_2k, code_edit_3k"):
        load_suite("long:2k,3k", ["needle_4k"], model="m")


def test_the_function_to_edit_is_whole_in_the_prompt() -> None:
    for item in load_suite("long:6k", ["code_edit_6k"], model="m"):
        name, file = re.findall(r"the function `(\w+)` in `([\w./]+)`", text_of(item))[-1]
        part = text_of(item).split(f"===== {file} =====")[1].split("\n===== ")[0]
        start = re.search(rf"^ *(def {name}\()", part, re.MULTILINE)
        assert start is not None
        indent = start.start(1) - start.start()
        body = [line[indent:] for line in part[start.start() :].splitlines()]
        assert max(n for n in range(2, 80) if _parses("\n".join(body[:n]))) >= 12


def _parses(text: str) -> bool:
    try:
        return len(ast.parse(text).body) == 1
    except SyntaxError:
        return False


def test_a_broken_off_file_ends_with_the_line_that_is_named() -> None:
    for item in load_suite("long:4k", ["code_completion_4k"], model="m"):
        above, asked = text_of(item).rsplit("\n\n", 1)
        named = re.search(r"from the line after `(.*)`\. Write code only\.$", asked)
        assert named is not None
        assert named[1]
        assert above.splitlines()[-1].strip() == named[1]


def test_needles_are_once_in_the_document() -> None:
    items = load_suite("long:4k", ["needle_4k"], model="m")
    for item in items[::2]:
        thing = re.findall(r"inventory number of (.*)\? Quote", text_of(item))[0]
        assert text_of(item).count(f"The inventory number of {thing} is ") == 1
    for item in items[1::2]:
        document, asked = text_of(item).split("The document ends here.")
        words = re.findall(r"begins with (['\"])(.*)\1\. Write", asked)[0][1].replace("\\'", "'")
        assert words in " ".join(document.split())


def test_lengths_are_read_or_refused() -> None:
    assert lengths_in("long") == LENGTHS
    assert lengths_in("long:4k, 16000,4k") == (4000, 16000)
    assert lengths_in("longer.jsonl") is None
    for wrong in ("long:", "long:4", "long:x", "long:4k;8k", "long:2000k"):
        with pytest.raises(InvalidInput, match="is not 1000 to 1000000 tokens; write long:4k,16k"):
            lengths_in(wrong)


def test_a_length_beyond_this_machines_texts_is_refused() -> None:
    with pytest.raises(InvalidInput, match="texts end before 1000000 tokens"):
        load_suite("long:1000k", ["summary_1000k"], 1, "m")


def test_without_a_model_nothing_can_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(InvalidInput, match="no model is named"):
        load_suite("long:2k")
