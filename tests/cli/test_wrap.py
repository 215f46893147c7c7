"""Lines of an answer break between words, however the text arrives; nothing but line breaks is added."""

from __future__ import annotations

import random

import pytest

from forerun.cli.show import WordWrap

WIDTH = 20
STORY = "The lighthouse keeper  had sailed across\nthe world, and (mostly) back again.\n\n- one\n- two words"


def shown(text: str, sizes: list[int], width: int = WIDTH) -> str:
    """The text as it is shown if it arrives in pieces of these sizes."""
    wrap, pieces, left = WordWrap(), list[str](), text
    for i in range(len(text)):
        size = sizes[i % len(sizes)]
        piece, left = left[:size], left[size:]
        pieces += [part for part, _ in wrap.push(piece, False, width)]
    return "".join([*pieces, *(part for part, _ in wrap.flush(width))])


@pytest.mark.parametrize("sizes", [[1], [3], [1, 2, 7], [1000]])
def test_lines_break_between_words(sizes: list[int]) -> None:
    lines = shown(STORY, sizes).split("\n")
    assert [line.rstrip() for line in lines] == [
        "The lighthouse", "keeper  had sailed", "across", "the world, and", "(mostly) back again.", "", "- one",
        "- two words",
    ]  # fmt: skip


def test_a_word_that_no_line_can_hold_is_shown_whole() -> None:
    link = "https://example.org/" + "a" * 30
    assert shown(f"see {link} there we go", [4]) == f"see \n{link} there we \ngo"  # 50 cells: ten of the third line


def test_code_between_fences_is_left_alone() -> None:
    code = "```python\nreturn [one for one in many if one.is_long_enough()]\n```\n"
    assert shown(code + "and then it goes on", [5]) == code + "and then it goes on"
    assert shown(code + "and then it goes on and on", [5]) == code + "and then it goes on \nand on"


def test_wide_characters_are_words_of_their_own_and_are_not_held_back() -> None:
    wrap = WordWrap()
    assert "".join(part for part, _ in wrap.push("灯台守", False, WIDTH)) == "灯台守"
    assert shown("灯" * 12, [5]) == "灯" * 10 + "\n" + "灯" * 2


def test_only_line_breaks_are_added_whatever_comes() -> None:
    chance = random.Random(0)
    for _ in range(300):
        text = "".join(chance.choices("ab,.-`\n\t 灯é", k=chance.randrange(1, 90)))
        sizes = [chance.randrange(1, 9) for _ in range(5)]
        found = shown(text, sizes, width=chance.randrange(2, 40))
        assert found.replace("\n", "").replace(" ", "") == text.replace("\n", "").replace(" ", "")


def test_drafted_letters_stay_drafted() -> None:
    wrap = WordWrap()
    pieces = [*wrap.push("one tw", True, 5), *wrap.push("o more", False, 5), *wrap.flush(5)]
    assert pieces == [("one ", True), ("\n", False), ("tw", True), ("o ", False), ("\nmore", False)]
