"""When graphs that were left for later are captured: which turns are taken, and what they cost rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from forerun.core.params import SamplingParams
from forerun.core.types import Request
from forerun.engine.driver import _LEADER, Driver, Waiter
from forerun.engine.round import FIRST_SHARE, SHARE, WORTH_CAPTURES, CaptureTurns
from forerun.models.cuda.compile.later import LaterCaptures


class Kernels:
    """In place of kernels that other processes compile."""

    is_done = False

    def finish(self) -> None:
        assert self.is_done


def turns_with(kernels: Any, made: list[str]) -> tuple[CaptureTurns, list[str]]:
    later, settled = LaterCaptures(), list[str]()
    later.add("graphs", range(5, 9), lambda: kernels, [lambda: made.append("graph")])
    target: Any = SimpleNamespace(later=later, capture_few_first=lambda: None)
    return CaptureTurns(target, lambda: settled.append("settled"), lambda: 0.0), settled


def test_rounds_overlap_while_kernels_are_compiled_beside_them() -> None:
    made, kernels = list[str](), Kernels()
    turns, settled = turns_with(kernels, made)
    turns.beside(4)
    assert not settled, "there is nothing for so few"
    for _ in range(5):
        turns.beside(8)
    assert len(settled) == 1, "to ask for the kernels: what follows waits for other processes, and no round does"
    assert made == []
    kernels.is_done = True
    for _ in range(5):
        turns.beside(8)
    assert len(settled) == 2
    assert made == ["graph"]
    assert turns.waiting == 0


def test_a_drafter_that_has_no_graph_yet_gets_a_larger_share_of_the_time() -> None:
    seconds, later = [0.0], LaterCaptures()

    def capture() -> None:
        seconds[0] += 1.0

    later.add("first graphs", range(1, 2), lambda: None, [capture], failed=lambda error: None)
    later.add("others", range(1, 2), lambda: None, [capture])
    target: Any = SimpleNamespace(later=later, capture_few_first=lambda: None)
    turns = CaptureTurns(target, lambda: None, lambda: seconds[0])
    turns.has_thread = True
    for started, due in ((0.0, 1.0 + 1.0 / FIRST_SHARE), (5.0, 6.0 + 1.0 / SHARE)):
        seconds[0] = started
        turns.beside(1)  # its kernels
        turns.beside(1)
        assert turns._due == due


def test_what_is_timed_has_the_graphs_of_all_batches_that_it_comes_to() -> None:
    """Of eight texts four are left at last: their graphs would be captured, in a share of the time that is measured."""
    made = list[str]()
    turns, _ = turns_with(None, made)
    later: Any = turns._later
    later.add("graphs", range(2, 5), lambda: None, [lambda: made.append("smaller")])
    later.add("graphs", range(9, 13), lambda: None, [lambda: made.append("larger")])
    turns.up_to(8)
    assert made == ["smaller", "graph"]


def test_graphs_are_not_captured_for_a_batch_that_comes_while_others_write() -> None:
    """Whether anything is written is asked when its turn has come: it waited for the thread that leads."""
    made, engine = list[str](), SimpleNamespace(busy=False, max_batch=8)
    engine.captures, _ = turns_with(None, made)
    driver = Driver(engine)  # type: ignore[arg-type]
    for busy, wanted in ((True, []), (False, ["graph"])):
        driver._leading[_LEADER] = Waiter(lambda: False)  # another thread
        engine.busy = False
        driver.expect(_texts(20, WORTH_CAPTURES))
        engine.busy = busy
        driver._do_posted()
        assert made == wanted


def test_a_short_call_does_not_wait_for_graphs_that_take_longer_than_it() -> None:
    made, engine = list[str](), SimpleNamespace(busy=False, max_batch=8)
    engine.captures, _ = turns_with(None, made)
    driver = Driver(engine)  # type: ignore[arg-type]
    driver.expect(_texts(8, WORTH_CAPTURES - 1))
    assert made == []
    driver.expect(_texts(9, WORTH_CAPTURES // 2))  # the ninth comes when one of the eight has ended
    assert made == ["graph"]


def test_what_is_measured_has_its_graphs_however_short_it_is() -> None:
    made, engine = list[str](), SimpleNamespace(busy=False, max_batch=8)
    engine.captures, _ = turns_with(None, made)
    Driver(engine).expect(_texts(8, 1), rounds=0)  # type: ignore[arg-type]
    assert made == ["graph"]


def _texts(count: int, tokens: int) -> list[Request]:
    return [Request((1,), SamplingParams(tokens)) for _ in range(count)]
