"""A text that comes again from another replica: the client sees each token and each letter once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.types import Event
from forerun.server.cluster.backend import Replay, StreamLost, can_resume, with_seed

WORDS = ["The", " river", "", " runs", " down", "", "", " to the", " sea", "."]  # "" = held back, told later


def events(cuts: list[int], words: list[str] = WORDS, held: int = 0) -> list[Event]:
    """The tokens in rounds that end at these places; text may lag behind tokens by `held` words."""
    found, last, told = [], 0, 0
    for end in sorted({*(cut % len(words) for cut in cuts), len(words)} - {0}):
        upto = len(words) if end == len(words) else max(told, end - held)
        done = "length" if end == len(words) else None
        text = "".join(words[told:upto])
        found.append(Event(0, tuple(range(last, end)), min(2, end - last - 1), text, (), done))
        last, told = end, upto
    return found


@given(
    st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)), st.integers(0, 9), st.integers(0, 2), st.integers(0, 2)
)  # fmt: skip
def test_whatever_the_rounds_the_client_sees_the_text_once(
    first: list[int], second: list[int], seen: int, lag: int, later: int
) -> None:
    replay = Replay(resumable=True)
    got = [news for event in events(first, held=lag)[:seen] for news in replay.take(event)]
    if got and got[-1].finished:
        return
    replay.restart()
    got += [news for event in events(second, held=later) for news in replay.take(event)]
    assert [token for event in got for token in event.tokens] == list(range(len(WORDS)))
    assert "".join(event.text for event in got) == "".join(WORDS)
    assert got[-1].finished == "length"
    assert all(event.accepted <= len(event.tokens) for event in got)


def test_a_different_text_is_an_error() -> None:
    replay = Replay(resumable=True)
    for event in events([5]):
        if not event.finished:
            list(replay.take(event))
    replay.restart()
    with pytest.raises(StreamLost, match="different text"):
        [news for event in events([3], words=["A", *WORDS[1:]]) for news in replay.take(event)]


def test_a_text_that_depends_on_its_draft_is_not_resumed_but_sent_again_if_nothing_was_told() -> None:
    replay = Replay(resumable=False)
    replay.restart()
    list(replay.take(events([5])[0]))
    with pytest.raises(StreamLost, match="seed"):
        replay.restart()


def test_which_texts_are_functions_of_their_requests() -> None:
    assert can_resume({"temperature": 0.0}, "auto")
    assert can_resume({"temperature": 1.0, "seed": 3}, "auto")
    assert can_resume({"temperature": 1.0, "seed": 3, "verifier": "coupled"}, "exact")
    assert not can_resume({"temperature": 1.0}, "auto")
    assert not can_resume({"temperature": 1.0, "seed": 3, "verifier": "exact"}, "auto")
    assert not can_resume({"temperature": 1.0, "seed": 3}, "exact")
    assert not can_resume({"temperature": 0.0, "verifier": "typical"}, "auto")
    assert not can_resume({"temperature": 0.0}, "typical")


def test_a_sampled_text_gets_a_seed_where_that_makes_it_one() -> None:
    made = with_seed({"temperature": 1.0}, "auto")
    assert made["seed"] != with_seed({"temperature": 1.0}, "auto")["seed"]
    assert can_resume(made, "auto")
    assert "seed" not in with_seed({"temperature": 0.0}, "auto")
    assert "seed" not in with_seed({"temperature": 1.0, "verifier": "exact"}, "auto")
    assert "seed" not in with_seed({"temperature": 1.0}, "typical")
    assert with_seed({"temperature": 1.0, "seed": 5}, "auto")["seed"] == 5
