"""Peers in processes of their own: what they write comes back, and one that dies takes nobody along."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from forerun.core.errors import InvalidInput
from forerun.measure.bench.alternate import (
    Contender,
    ContenderLost,
    Group,
    Prompt,
    Written,
    alternate,
    differences,
    warm_up,
    without_lost,
)
from forerun.measure.bench.figures import Figures, summarise
from forerun.measure.peers.process import PeerProcess, Peers, answer
from tests.measure.peers.dying import FATAL

ENGINE = "tests.measure.peers.dying"
FINE = [Group.of([Prompt(f"p{i}", "qa", (i, i + 1))]) for i in range(3)]
DEADLY = Group.of([Prompt("deadly", "qa", (1, FATAL))])


@pytest.fixture
def process() -> Iterator[PeerProcess]:
    with PeerProcess() as found:
        yield found


def ours(name: str) -> Contender:
    def write(prompts: Sequence[Sequence[int]], max_tokens: int) -> Written:
        return Written([[0] * max_tokens for _ in prompts], 0.5, max_tokens, 0.25)

    return Contender(name, write)


def test_it_is_another_process_and_what_it_prints_does_not_get_between_the_answers(process: PeerProcess) -> None:
    told = process.call(f"{ENGINE}:echo", a=1, b=[2, "ü"])
    assert told.pop("pid") != os.getpid()
    assert told == {"a": 1, "b": [2, "ü"]}
    one, two = process.load(f"{ENGINE}:load", names=["one", "two"])
    assert (one.name, one.exact, one.like, two.like) == ("one", False, None, "one")
    for _ in range(2):
        written = one.write([(4, 5), (9,)], 3)
        assert [list(text) for text in written.texts] == [[6, 7, 8], [10, 11, 12]]
        assert (written.seconds, written.rounds, written.decode_seconds) == (0.25, 3, 0.125)
        assert [dict(part) for part in written.passes] == [{"pass": 0.1}]


def test_an_illegal_instruction_ends_the_peer_and_nobody_else(process: PeerProcess) -> None:
    peer, lookup = process.load(f"{ENGINE}:load", names=["peer", "lookup"])
    contenders = [peer, lookup, ours("plain"), ours("auto")]
    lost: dict[str, str] = {}
    warm_up(contenders, FINE[0], 2, lost)
    assert lost == {}
    runs = list(alternate(contenders, [*FINE, DEADLY], 4, 2, lost=lost))
    assert set(lost) == {"peer", "lookup"}
    assert all("died of SIGILL (an illegal instruction: it was built for" in why for why in lost.values())
    assert sum(run.contender == "plain" for run in runs) == 8, "ours went on to the end"
    left, kept = without_lost(contenders, runs, lost)
    assert [contender.name for contender in left] == ["plain", "auto"]
    found = summarise(Figures(kept), left, differences(kept, left))
    assert list(found["contenders"]) == ["plain", "auto"]
    assert found["ratios"]["auto_vs_plain"] == 1.0


def test_without_a_list_to_note_it_in_the_loss_is_raised(process: PeerProcess) -> None:
    peers = process.load(f"{ENGINE}:load", names=["peer"])
    with pytest.raises(ContenderLost, match="SIGILL"):
        list(alternate(peers, [DEADLY], 4, 1))
    with pytest.raises(ContenderLost, match="SIGILL"):
        process.call(f"{ENGINE}:echo")  # and the process stays dead


def test_a_lookup_that_outlives_its_plain_loop_is_compared_with_nobody() -> None:
    contenders = [ours("peer"), Contender("lookup", ours("lookup").write, False, like="peer"), ours("plain")]
    runs = list(alternate(contenders, FINE, 4, 1))
    left, _ = without_lost(contenders, runs, {"peer": "gone"})
    assert [(contender.name, contender.like) for contender in left] == [("lookup", None), ("plain", None)]


def test_engines_that_do_not_get_up_are_left_out_with_the_reason() -> None:
    peers = Peers()
    try:
        peers.host("fine", ["one", "two"], ENGINE)
        peers.host("ill", ["three", "four"], ENGINE, how="SIGILL")
        peers.host("broken", ["five"], ENGINE, how="bug")
        peers.host("gone", ["six"], ENGINE, how="exit")
        assert [contender.name for contender in peers.contenders] == ["one", "two"]
        assert peers.isa == {"fine": "abacus"}
        assert list(peers.left_out) == ["three", "four", "five", "six"]
        assert "SIGILL" in peers.left_out["four"]
        assert peers.left_out["five"] == "ZeroDivisionError: a bug of theirs"
        assert peers.left_out["six"] == "its process ended with code 7: last words"
        with pytest.raises(InvalidInput, match="that cannot be; do otherwise"):
            peers.host("asked wrongly", ["seven"], ENGINE, how="user")
    finally:
        peers.close()
    assert all(process._process.poll() is not None for process in peers.processes), "nobody is left running"


def test_questions_are_answered_one_by_one() -> None:
    hosted: dict[str, Contender] = {}
    loaded = answer({"load": f"{ENGINE}:load", "arguments": {"names": ["a"]}}, hosted)
    assert loaded == {"result": [("a", False, None)]}
    assert list(hosted) == ["a"]
    assert answer({"call": f"{ENGINE}:isa", "arguments": {}}, hosted) == {"result": "abacus"}
    assert answer({"call": f"{ENGINE}:load", "arguments": {"names": [], "how": "user"}}, hosted) == {
        "refused": "that cannot be; do otherwise"
    }
    assert answer({"write": "nobody", "prompts": [], "max_tokens": 1}, hosted) == {"failed": "KeyError: 'nobody'"}
