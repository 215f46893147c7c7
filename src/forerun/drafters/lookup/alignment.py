"""Alignment: where a text stands in the prediction of it, token by token; found again behind every difference.

The cursor is the predicted token that should come next. While the text follows the prediction, the cursor moves along.
Behind a token that was not predicted the text was replaced, inserted or deleted there: the last few tokens are looked
for near the place where the two parted, then anywhere. Until they are found, the token is taken for a replaced one.

A pure function of prediction and text: what `usage` says of a prediction does not depend on rounds. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

KEYS = (4, 2, 1)  # last tokens that are looked for, the longest first
NEAR = 48  # predicted tokens behind the place of parting in which a single token is looked for
SURE = 4  # tokens in a row, of text and prediction, that make a place certain
BEGIN = 2  # the trust in the first token, as if so many had been right
REPLACED = 2  # tokens behind a difference that are guessed as if single tokens had been replaced


class Alignment:
    def __init__(self, prediction: Sequence[int]) -> None:
        self.tokens = tuple(prediction)
        self.at = 0  # the cursor
        self.run = BEGIN  # tokens before the cursor that agree with the end of the text
        self.lost = 0  # tokens of the text since they agreed
        self._known = frozenset(self.tokens)
        self._text = "".join(map(chr, self.tokens))  # a character per token: quick to search
        self._tail = ""  # the last tokens of the text
        self._place = 0  # of the last certain agreement, in the prediction
        self._found = bytearray(len(self.tokens))  # predicted tokens that the text has

    @property
    def guesses(self) -> bool:
        """Is there a token that should come next?"""
        return self.at < len(self.tokens) and self.lost <= REPLACED

    def add(self, token: int) -> bool:
        """The text goes on with this token: was it the predicted one?"""
        known = token in self._known  # of a useless prediction few are
        self._tail = (self._tail + chr(token))[-KEYS[0] :] if known else ""
        if known and self.guesses and self.tokens[self.at] == token:
            self.at, self.run, self.lost = self.at + 1, self.run + 1, 0
            agreed = min(self.run, self.at, KEYS[0])
            self._found[self.at - agreed : self.at] = b"\1" * agreed
            if self.run >= SURE:
                self._place = self.at
            return True
        self.lost += 1
        found = self._look_up() if known else None
        if found is None:
            self.at, self.run = min(self.at + 1, len(self.tokens)), 0
        else:
            self.at, self.run = found
            self.lost = 0
        return False

    def _look_up(self) -> tuple[int, int] | None:
        """Behind the last tokens of the text in the prediction, and how many they are; None = they are not in it."""
        for length in KEYS:
            end, key = len(self._text), self._tail[-length:]
            if len(key) < length:
                continue
            near = max(0, self._place - length + 1)
            if length == 1:
                end = min(end, self._place + NEAR + self.lost)
            start = self._text.find(key, near, end)
            if start < 0 and length == KEYS[0]:
                start = self._text.rfind(key, 0, near + length - 1)
            if start >= 0:
                return start + length, length
        return None

    @property
    def found(self) -> int:
        """Predicted tokens that are in the text."""
        return sum(self._found)


def counts_of(prediction: Sequence[int], text: Sequence[int]) -> tuple[int, int]:
    """Of the predicted tokens: how many the text has, and how many it does not have."""
    alignment = Alignment(prediction)
    for token in text:
        alignment.add(token)
    return alignment.found, len(alignment.tokens) - alignment.found
