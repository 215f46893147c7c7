"""WordWrap: breaks the lines of a streamed text between words, as a terminal by itself does not.

A word is held back until it is whole: only then is it known whether it fits the line. Code between ``` fences is
left as it is, so that it can be copied; characters that are two cells wide (Chinese, Japanese) are words of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.cells import cell_len

_TAB = 8


class WordWrap:
    """The state of one text: what is held back, and where on its line the text is."""

    def __init__(self) -> None:
        self._word: list[tuple[str, bool]] = []
        self._line = ""  # of the text itself, to find fences
        self._column = 0
        self._is_code = self._is_cut = False  # cut: the beginning of a word that no line can hold is shown

    def push(self, text: str, drafted: bool, width: int) -> Iterator[tuple[str, bool]]:
        """What can be shown now on a line of so many cells, in pieces: (text, was it drafted?)."""
        shown = list[tuple[str, bool]]()
        for letter in text:
            if letter.isspace():
                shown += [*self._placed(width), *self._space(letter, drafted, width)]
            elif cell_len(letter) > 1:
                shown += self._placed(width)
                self._word.append((letter, drafted))
                shown += self._placed(width)
            else:
                self._word.append((letter, drafted))
                if len(self._word) >= width:
                    shown += self._placed(width)
                    self._is_cut = True
        return _pieces(shown)

    def flush(self, width: int) -> Iterator[tuple[str, bool]]:
        """The rest, at the end of the text; the next one starts on a new line."""
        shown = self._placed(width)
        self._line, self._column, self._is_code = "", 0, False
        return _pieces(shown)

    def _space(self, letter: str, drafted: bool, width: int) -> list[tuple[str, bool]]:
        if letter == "\n":
            self._is_code ^= self._line.lstrip().startswith("```")
            self._line, self._column = "", 0
            return [(letter, drafted)]
        self._line += letter
        if letter == " " and self._column >= width and not self._is_code:
            return []  # the line is broken here
        self._column += _TAB - self._column % _TAB if letter == "\t" else 1
        return [(letter, drafted)]

    def _placed(self, width: int) -> list[tuple[str, bool]]:
        """The word that was held back, on a new line where this one has no room for it."""
        word, self._word = self._word, []
        letters = "".join(letter for letter, _ in word)
        self._line += letters
        needed, stays = (
            cell_len(letters),
            self._is_code or self._is_cut or self._line.lstrip().startswith("```"),
        )
        if self._column and needed and self._column + needed > width and not stays:
            self._column = 0
            word.insert(0, ("\n", False))
        self._column, self._is_cut = self._column + needed, False
        if self._column > width:  # the terminal has broken it
            self._column = (self._column - 1) % width + 1
        return word


def _pieces(shown: list[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    for drafted, letters in groupby(shown, lambda pair: pair[1]):
        yield "".join(letter for letter, _ in letters), drafted
