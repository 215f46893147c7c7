"""Texts of the advisor: contenders write next to each other, and those without hope write the first few only."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from forerun.control.cost import CostModel
from forerun.core.errors import ForerunError
from forerun.measure.advise.evidence import FEW, Runs, Text, gather, has_hope, prospects, write_in_turn
from forerun.measure.bench.alternate import Contender, Drafts, Group, Prompt, Run, Written
from forerun.measure.bench.settings import Settings, parse_setups
from tests.measure.conftest import table_llm

FLAT = CostModel({1: 1.0, 8: 1.2, 64: 4.0})


def group(number: int) -> Group:
    return Group.of([Prompt(str(number), "qa", (2, 3, 4 + number))])


def test_all_write_in_turn_and_only_those_asked_for_go_on(caplog: pytest.LogCaptureFixture) -> None:
    order = list[str]()

    def contender(name: str) -> Contender:
        def write(prompts: Sequence[Sequence[int]], max_tokens: int) -> Written:
            order.append(name)
            return Written([[5] * max_tokens], 1.0)

        return Contender(name, write)

    asked = dict[str, int]()

    def goes_on(name: str, runs: Runs) -> bool:
        asked[name] = len(runs[name])
        return name == "good"

    some, groups = [contender("good"), contender("bad")], [group(i) for i in range(FEW + 3)]
    with caplog.at_level(logging.INFO, logger="forerun.progress"):
        runs = write_in_turn(contender("plain"), some, groups, 9, goes_on)
    assert asked == {"good": FEW, "bad": FEW}
    assert {name: len(found) for name, found in runs.items()} == {"plain": FEW + 3, "good": FEW + 3, "bad": FEW}
    assert order[:3] == ["plain", "good", "bad"], "all warm up"
    assert [sorted(order[i : i + 3]) for i in range(3, 12, 3)] == [["bad", "good", "plain"]] * 3
    assert len({order[i] for i in range(3, 12, 3)}) == 3, "each goes first in its turn"
    assert f"prompt {FEW + 3} of {FEW + 3}" in caplog.messages[-1]


def drafted(rounds: Drafts, draft: float) -> Run:
    passes = tuple({"pass": FLAT.pass_seconds(1 + nodes), "draft": depth * draft} for nodes, depth, _ in rounds)
    tokens = sum(1 + kept for _, _, kept in rounds)
    return Run("d", "0", "qa", 0, ((5,) * tokens,), 1.0, len(rounds), 1.0, passes, (rounds,))


@pytest.mark.parametrize(
    ("rounds", "draft", "hope"),
    [
        (((4, 4, 3),) * 6, 0.1, True),
        (((4, 4, 0),) * 24, 0.1, True),  # cut to one token it loses a little, and other prompts may differ
        (((4, 4, 0),) * 24, 0.5, False),
        (((8, 8, 1),) * 12, 0.5, True),  # one token of eight would do
    ],
)
def test_who_has_hope(rounds: Drafts, draft: float, hope: bool) -> None:
    run = drafted(rounds, draft)
    plain = drafted(((0, 0, 0),) * 24, 0.0)
    assert has_hope(FLAT, [Text((1,), (5,) * 24)], [plain], [run], 8) is hope


def test_evidence_of_the_first_texts_alone_is_enough_for_a_prediction() -> None:
    prompts = [Prompt(str(i), "qa", (2 + i, 40, 41, 40, 41)) for i in range(FEW + 2)]
    settings = Settings(max_tokens=12, setups=parse_setups(["auto"]))
    found = gather(table_llm(), CostModel({1: 1.0, 2: 30.0, 64: 900.0}), prompts, settings)
    assert len(found.texts) == FEW + 2
    sizes = {len(drafting.rounds) for drafting in found.draftings.values()}
    assert sizes <= {FEW, FEW + 2}
    assert {one.drafter for one in prospects(found, 1)} == {*found.draftings} > {*found.free}


def test_only_the_drafters_asked_for_are_tried() -> None:
    settings = Settings(max_tokens=6, setups=parse_setups(["draft_model", "ngram"]))
    found = gather(table_llm(), FLAT, [Prompt("a", "qa", (2, 3, 4))], settings)
    assert (list(found.draftings), found.free) == (["draft_model", "ngram"], ("ngram",))
    settings = Settings(max_tokens=6, setups=parse_setups(["eagle3"]))
    with pytest.raises(ForerunError):  # which needs a head, and says so
        gather(table_llm(), FLAT, [Prompt("a", "qa", (2, 3, 4))], settings)
