"""Text as it comes: no half characters, no halves of stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.detokenize import Detokenizer


class Bytes:
    """Every token is one byte: the worst case for characters that span tokens."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(max_size=30), st.integers(1, 5))
def test_pieces_add_up_to_the_text(text: str, every: int) -> None:
    stream, pieces = Detokenizer(Bytes()), []
    for i, byte in enumerate(text.encode()):
        stream.push(byte)
        if i % every == 0:
            pieces.append(stream.take(final=False))
    pieces.append(stream.take(final=True))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_cut_at_the_first_place_and_are_never_shown(text: str, stops: list[str]) -> None:
    stream, shown, stopped = Detokenizer(Bytes(), stops), "", False
    for byte in text.encode():
        stopped = stream.push(byte)
        shown += stream.take(final=stopped)
        if stopped:
            break
    shown += stream.take(final=True)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stopped == bool(ends)
    if ends:  # the text ends with the token that completes the first stop string to be complete
        cut = text[: min(ends)]
        assert shown == cut[: min(cut.find(stop) for stop in stops if stop in cut)]
    else:
        assert shown == text


def test_an_unfinished_character_at_the_end_is_shown_as_such() -> None:
    stream = Detokenizer(Bytes())
    for byte in "é".encode()[:1]:
        stream.push(byte)
    assert stream.take(final=False) == ""
    assert stream.take(final=True) == "\ufffd"


@pytest.mark.parametrize("stops", [(), ("x",)])
def test_without_a_tokenizer_there_is_no_text(stops: tuple[str, ...]) -> None:
    stream = Detokenizer(None, stops)
    assert not stream.push(3)
    assert stream.take(final=True) == ""
