"""Drafts while prompts wait: trees give way to prompts where many requests wait for them, and only there."""

from __future__ import annotations

import pytest

from forerun.control import forms
from forerun.control.base import WaitingPrompts
from forerun.control.cost import CostModel
from forerun.control.forms import FormChooser, Promise
from forerun.control.prices import Allowance
from forerun.core.types import PLAIN
from lab.simulate.speeds import h200
from tests.simulate.head import SimulatedForms
from tests.simulate.load import Answered, SimulatedServer, asks

ROOM = 1024


def chooser_of(batch: int) -> FormChooser:
    """A chooser that knows what plain rounds of this batch take around their pass."""
    speeds = h200()
    chooser = FormChooser(SimulatedForms(speeds, 0.7), CostModel(speeds.curve()), Allowance(), 60, 10)
    plain = Promise(PLAIN, batch, 5e-3)
    chooser.observe(plain, range(batch), [0] * batch, batch, {"pass": 5e-3, "host": 1e-4})
    return chooser


def chosen(batch: int, prompts: WaitingPrompts) -> int:
    """Nodes of the form for a batch, while so much waits."""
    chooser = chooser_of(batch)
    chooser.note_waiting(prompts)
    return chooser.choose(range(batch), batch).form.nodes


def test_trees_give_way_where_many_requests_wait() -> None:
    assert chosen(8, WaitingPrompts()) > 3
    assert chosen(8, WaitingPrompts(24, 24 * 290, ROOM, ROOM)) == 0
    assert chosen(24, WaitingPrompts(24, 24 * 290, ROOM, ROOM)) == 0


@pytest.mark.parametrize("batch", [8, 32])
def test_one_long_prompt_does_not_stop_the_drafts_of_a_batch(batch: int) -> None:
    assert chosen(batch, WaitingPrompts(1, 30_000, 256, ROOM)) > 0


def test_a_prompt_of_one_token_has_no_rows_to_wait_for() -> None:
    assert chosen(8, WaitingPrompts(1, 0, 256, ROOM)) == chosen(8, WaitingPrompts(1, 1, 256, ROOM)) > 0


def have_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "WAITING_TOKEN_WORTH", 0.0)
    monkeypatch.setattr(forms, "BURST", 1000)


def test_negative_control_without_patience_large_trees_are_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    have_no_patience(monkeypatch)
    assert chosen(8, WaitingPrompts(24, 24 * 290, ROOM, ROOM)) > 3


def test_what_is_missed_grows_with_rows_and_requests() -> None:
    chooser = chooser_of(8)

    def missed(prompts: WaitingPrompts) -> list[float]:
        chooser.note_waiting(prompts)
        return [one.missed for one in chooser._promises(range(8), 8) if one.seconds < 1.0]

    none, some, many = (missed(WaitingPrompts(n, n * 290, ROOM, ROOM)) for n in (0, 1, 2))
    assert set(none) == {0.0}
    assert some[0] == many[0] == 0.0, "plain rounds are what is compared with"
    assert all(0.0 < few < more for few, more in zip(some[1:], many[1:], strict=True))
    assert some[1:] == sorted(some[1:]), "the menu's forms, smallest first"


@pytest.mark.parametrize(("batch", "few"), [(8, 2), (32, 5)])
def test_nothing_is_drafted_while_a_sixth_of_the_batch_waits(batch: int, few: int) -> None:
    """However few rows they have; a chain beside fewer that have few rows is drafted."""
    assert chosen(batch, WaitingPrompts(few, 2 * few, 256, ROOM)) > 0
    assert chosen(batch, WaitingPrompts(few + 1, 2 * few, 256, ROOM)) == 0


def test_a_form_under_way_ends_when_many_come(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = chooser_of(8)
    assert chooser.choose(range(8), 8).form.nodes
    assert chooser.keeps(range(8), 8) is not None
    chooser.note_waiting(WaitingPrompts(24, 24 * 290, ROOM, ROOM))
    assert chooser.keeps(range(8), 8) is None
    have_no_patience(monkeypatch)
    chooser.note_waiting(WaitingPrompts())
    chooser.note_waiting(WaitingPrompts(24, 24 * 290, ROOM, ROOM))
    assert chooser.keeps(range(8), 8) is not None, "the negative control"


def test_nothing_is_drafted_until_the_last_of_many_is_read() -> None:
    """One that waits alone does not stop drafts; the last of many does."""
    chooser, last = chooser_of(8), WaitingPrompts(1, 2, 256, ROOM)
    for prompts, drafts in (
        (last, True),
        (WaitingPrompts(24, 48, 256, ROOM), False),
        (last, False),
        (WaitingPrompts(), True),
        (last, True),
    ):
        chooser.note_waiting(prompts)
        assert (chooser.choose(range(8), 8).form.nodes > 0) == drafts


def served(drafts: bool, clients: int) -> tuple[Answered, SimulatedServer]:
    """The second load of so many clients, on a server that has learnt from the first."""
    server = SimulatedServer(drafts)
    for _ in range(2):
        found = server.serve(asks(2 * clients, seed=clients), clients)
    return found, server


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("clients", [8, 32])
def test_first_tokens_come_as_soon_as_without_drafts_and_more_follow(clients: int) -> None:
    (plain, _), (drafted, _) = served(False, clients), served(True, clients)
    assert drafted.rate >= 1.28 * plain.rate
    assert drafted.first_at(0.99) <= 1.1 * plain.first_at(0.99)  # 1.03 before chunks were limited by their time


@pytest.mark.slow
def test_negative_control_without_patience_first_tokens_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    patient, _ = served(True, 32)
    have_no_patience(monkeypatch)
    hasty, _ = served(True, 32)
    assert hasty.first_at(0.99) > 1.03 * patient.first_at(0.99)


def test_a_simulated_load_is_the_same_every_time() -> None:
    once, again = served(True, 8)[0], served(True, 8)[0]
    assert once == again
    assert once.tokens == sum(one.answer for one in asks(16, seed=8))


def test_a_round_with_prompts_of_one_request_takes_two_rounds_more_at_most() -> None:
    """One long prompt among 32 that write: nobody waits longer than for two rounds more than usual."""
    for drafts in (False, True):
        server = SimulatedServer(drafts)
        server.serve(asks(64, seed=3), 32)
        usual = server.serve(asks(32, seed=4, prompt=3), 32)
        assert usual.longest_pause < 0.012
        mixed = server.serve([*asks(31, seed=4, prompt=3), *asks(1, seed=5, prompt=20_000)], 32)
        assert mixed.longest_pause <= 3.0 * usual.longest_pause


@pytest.mark.parametrize(("clients", "delayed"), [(1, False), (8, True)])
def test_prompts_count_beside_trees_only_where_somebody_writes(
    clients: int, delayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is alone starts with the pass that reads its prompt: the trees behind it cost what they cost."""
    noted, note = list[int](), CostModel.note_prompts
    monkeypatch.setattr(CostModel, "note_prompts", lambda self, rows: (noted.append(rows), note(self, rows))[1])
    server = SimulatedServer(True, places=8)
    server.serve(asks(16), clients)
    assert len(noted) > 50
    assert any(noted) is delayed
