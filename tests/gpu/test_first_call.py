"""What is captured when a model is loaded suffices for the first call: no text waits for a graph.

Captures are emulated on the CPU: whatever is captured is only noted while the model is loaded, and done, each time
anew, once texts are written. So a piece of work that has no graph by then is seen, under any batch, drafter and law.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from forerun.api import llm
from forerun.build.engine import make_engine
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Offer, Request, Round, Seq, TreeForm
from forerun.drafters.base import Drafter
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device.drafter import OnDevice, built
from forerun.drafters.device.eagle import HeadDraft
from forerun.drafters.device.model import ModelDraft, over_model
from forerun.drafters.device.plan import FORMS, DraftMenu, forms_for
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.drafters.lookup.prediction import PredictionDrafter
from forerun.drafters.model.draft_model import ModelDrafter
from forerun.engine.driver import Driver, HeadSwap, Waiter
from forerun.engine.engine import Engine
from forerun.engine.scheduler import PrefillRows
from forerun.engine.sequence import SequenceState
from forerun.models.base import ON_GPU
from forerun.models.cuda import graphs
from forerun.models.cuda.plan import Size
from forerun.models.cuda.target import CudaDecoder
from tests.gpu.heads import both_drafters
from tests.gpu.test_adapters import folders_of
from tests.gpu.test_following import willing_target
from tests.gpu.tiny import VOCAB, make_target

MOST, LENGTH = 32, 400
PASSES = {1: 1.8e-3, 8: 1.8e-3, 64: 2.4e-3, 256: 4e-3, 1024: 12e-3}  # seconds, by rows
KINDS = ["eagle3", "ngram+eagle3", "draft_model", "ngram+draft_model"]


@dataclass
class Captures:
    """In place of graphs.capture."""

    is_loading: bool = True
    late: list[str] = field(default_factory=list)  # what was captured while texts were written

    def capture(self, work: Callable[[], None], device: object, pool: object) -> Graph:
        graph = Graph(work, self)
        if not self.is_loading:
            self.late.append(_name_of(work))
            work()
        return graph


@dataclass
class Graph:
    """In place of a graph: the work is done again, by then on real sequences."""

    work: Callable[[], None]
    captures: Captures

    def replay(self) -> None:
        if not self.captures.is_loading:
            self.work()


def _name_of(work: Callable[[], None]) -> str:
    inside = [cell.cell_contents for cell in work.__closure__ or ()]
    return f"{work.__qualname__} {[one for one in inside if isinstance(one, (int, str, tuple, TreeForm, Size))]}"


def _captures_all(*targets: CudaDecoder) -> None:
    for target in targets:
        target.passes.capture = target.after.replays.capture = True


def _head(target: CudaDecoder, at_once: int = MOST, most: int = MOST, length: int = LENGTH) -> Drafter:
    def make() -> OnDevice[HeadDraft]:
        drafter, _ = both_drafters(target, borrows=True)
        drafter.draft.replays.capture = True
        return drafter

    if not at_once:  # as a server has it
        built_drafter = built(make, target, most, length)
        assert built_drafter is not None
        return built_drafter
    drafter = make()
    drafter.draft.rehearse(target, most, length, at_once)
    return drafter


def _model(target: CudaDecoder, at_once: int = MOST) -> Drafter:
    draft = make_target("llama", "cpu", seed=9)
    draft.model.head[8:] = 0.0
    _captures_all(draft)
    model = ModelDraft(draft, VOCAB, target.grown.last)
    model.graphs.replays.capture = True
    model.rehearse(target, MOST, LENGTH, at_once)
    return over_model(model, lambda: ModelDrafter(draft, VOCAB))


def _load(
    kind: str,
    captures: Captures,
    at_once: int = MOST,
    most: int = MOST,
    length: int = LENGTH,
    few_first: bool = False,
    **more: Any,
) -> tuple[Engine, CudaDecoder]:
    """As load_engine does on a GPU: the drafter, which captures its graphs, then the target's passes."""
    target = willing_target()
    _captures_all(target)
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    config = EngineConfig(max_batch=most, max_length=length, **more)
    engine = make_engine(target, frozenset({1}), speculative, config)
    drafter = _head(target, at_once, most, length) if "eagle3" in kind else _model(target, at_once)
    if kind.startswith("ngram"):
        drafter = HybridDrafter(NgramDrafter(), drafter)
    if few_first:
        target.capture_few_first()
    target.warm_up(drafter.needs, most, length)
    engine.drafters.add("device", drafter)
    engine.captures.has_thread = not at_once

    def offer(seq: Seq) -> Offer:
        assert isinstance(seq, SequenceState)
        return engine.drafters.offer(seq)

    engine.controller = AdaptiveController(CostModel(PASSES), 60, 10, offer, engine.drafters.looks_up)
    engine.prefill_rows = PrefillRows(ON_GPU.prefill, target.pass_rows)
    engine.timeline.depth = 2
    captures.is_loading = False
    return engine, target


def _requests(batch: int, temperature: float) -> list[Request]:
    """Prompts of ragged lengths, texts that end one after another, and a few that join later."""
    rng = random.Random(batch)
    count = batch + 1 + batch // 4
    return [
        Request(
            [rng.randrange(2, VOCAB) for _ in range(rng.choice((1, 3, 20, 20, 70)))],
            SamplingParams(2 + i // 2, temperature=temperature, seed=i if temperature else None),
            drafter="device",
        )
        for i in range(count)
    ]


def _write(engine: Engine, requests: Sequence[Request], batch: int) -> list[list[int]]:
    texts, waiting = dict[int, list[int]](), list(requests)
    while waiting or engine.busy:
        while waiting and len(engine.running) + len(engine.waiting) + len(engine.reading) < batch:
            texts[engine.submit(waiting.pop(0))] = []
        for event in engine.step():
            assert event.error is None
            texts[event.seq_id] += event.tokens
    return [texts[key] for key in sorted(texts)]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_captured_in_first_calls(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures()
    monkeypatch.setattr(graphs, "capture", captures.capture)
    engine, _ = _load(kind, captures)
    for batch, temperature in ((32, 0.0), (32, 1.0), (8, 1.0), (1, 0.0)):
        _write(engine, _requests(batch, temperature), batch)
        assert captures.late == [], f"at batch {batch}, temperature {temperature}"
    assert engine.stats.rounds > 0
    assert not engine.drafters._failed


def _insisting(batch: int) -> list[Request]:
    """The same requests, written further, each with a budget of its own: what is drafted depends on graphs alone."""
    return [
        replace(one, budget=Budget(3, 3), params=SamplingParams(16 + i % 3, temperature=0.0))
        for i, one in enumerate(_requests(batch, 0.0))
    ]


def _drafted_batches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """How many sequences were drafted for in one round, from now on."""
    found, observe = set[int](), engine.controller.observe

    def note(outcome: Round) -> None:
        if any(outcome.drafted):
            found.add(sum(map(bool, outcome.drafted)))
        observe(outcome)

    monkeypatch.setattr(engine.controller, "observe", note)
    return found


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_batches_whose_graphs_come_later_are_written_plainly_and_all_texts_are_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = Captures()
    monkeypatch.setattr(graphs, "capture", captures.capture)
    engine, _ = _load(kind, captures)
    wanted = [_write(engine, _insisting(batch), batch) for batch in (1, 8)]

    later = Captures()
    monkeypatch.setattr(graphs, "capture", later.capture)
    engine, target = _load(kind, later, at_once=1)
    at_load = len(target.later)
    assert at_load > 0
    assert engine.captures.waiting == at_load
    engine.captures._due = float("inf")  # none beside texts
    drafted = _drafted_batches(engine, monkeypatch)
    assert [_write(engine, _insisting(batch), batch) for batch in (1, 8)] == wanted
    assert later.late == []
    assert drafted == {1}, "larger batches have no graphs"
    assert len(target.later) == at_load

    engine.captures.before(8)
    assert 0 < len(target.later) < at_load, "of this size alone"
    later.late.clear()
    assert _write(engine, _insisting(8), 8) == wanted[1]
    assert later.late == []
    assert max(drafted) > 4

    later.is_loading = True  # noted alone, as at load: the idle driver below does the work of each
    while engine.captures.when_idle():
        pass
    later.is_loading = False
    assert len(target.later) == 0
    later.late.clear()
    _write(engine, _insisting(32), 32)
    assert later.late == []
    assert max(drafted) > 16


def test_captures_beside_texts_take_a_small_share_and_texts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures()
    monkeypatch.setattr(graphs, "capture", captures.capture)
    engine, target = _load("eagle3", captures, at_once=1)
    at_load, seconds, now = len(target.later), 0.0, engine.captures._now
    engine.captures._due = float("inf")
    wanted = _write(engine, _insisting(8), 8)
    advance = target.later._advance

    def slowly(group: Any, waits: bool) -> bool:
        nonlocal seconds
        seconds += 1000.0  # of the clock that turns are taken by: the next is due 20,000 s later
        return advance(group, waits)

    monkeypatch.setattr(target.later, "_advance", slowly)
    engine.captures._now, engine.captures._due = (lambda: now() + seconds), 0.0
    assert _write(engine, _insisting(8), 8) == wanted
    assert seconds == 1000.0
    assert len(target.later) == at_load, "kernels were asked for, and nothing was captured yet"
    engine.captures._due = 0.0
    assert _write(engine, _insisting(8), 8) == wanted
    assert len(target.later) == at_load - 1


def test_a_capture_that_fails_beside_a_text_changes_no_token_and_leaves_its_batches_without_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The draft that was started for the next round lay where the failed capture had left trees of padding."""
    captures = Captures()
    monkeypatch.setattr(graphs, "capture", captures.capture)
    engine, target = _load("eagle3", captures, at_once=1)
    engine.captures._due = float("inf")
    request = _insisting(4)[0]
    wanted = _write(engine, [request], 1)
    draft: Any = engine.drafters.get("device")
    draft, texts, was_ahead = draft.draft, list[int](), False

    def fail(*given: object) -> None:
        raise RuntimeError("no memory for a graph")

    monkeypatch.setattr(target, "rehearse", fail)
    engine.submit(request)
    for turn in count():
        if turn in (3, 5):  # its kernels, in a turn of their own; its first graph
            engine.settle()
            was_ahead = draft._ahead is not None
            assert target.later.next(4)
        texts += [token for event in engine.step() for token in event.tokens]
        if not engine.busy:
            break
    assert was_ahead
    assert [texts] == wanted
    assert not target.later.wants(4)
    assert target.later.wants(8)
    assert "no more drafts for batches of 4 sequences: RuntimeError: no memory for a graph" in caplog.text
    assert not engine.drafters._failed


def test_a_drafter_that_was_dropped_is_not_captured_for(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures()
    monkeypatch.setattr(graphs, "capture", captures.capture)
    target = willing_target()
    _captures_all(target)
    drafter = _head(target, at_once=1)
    captures.is_loading = False
    del drafter
    gc.collect()
    while target.later.next():
        pass
    assert captures.late == []


def test_an_idle_driver_captures_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures()
    monkeypatch.setattr(graphs, "capture", captures.capture)
    engine, target = _load("eagle3", captures, at_once=1, most=8)
    assert len(target.later) > 1
    driver = Driver(engine)
    driver.wait(Waiter(lambda: not len(target.later)))
    assert not engine.captures.when_idle()


def test_sampling_is_captured_for_trees_alone_and_for_trees_beside_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    names, target, form = list[Any](), willing_target(), TreeForm(2, 4, 3, 1)
    monkeypatch.setattr(graphs.Replays, "do", lambda replays, name, work: names.append(name))
    target.sampler.rehearse(Size(8, 8, 8), form)
    kinds = {name[-1] for name in names}
    assert kinds
    assert {(name[0], name[1], name[-1]) for name in names} == {
        (what, form, kind) for what in ("sample", "tokens") for kind in kinds
    }


# ---- a server, which is ready before any draft of one sequence is captured

WHOLE = Budget(*FORMS[-1].sizes)  # or any smaller form of the menu
ALONE = len(forms_for(1))  # captures of one sequence in contexts of one length


def _asked(length: int = 20, tokens: int = 16, **more: Any) -> Request:
    rng = random.Random(length)
    prompt = [rng.randrange(2, VOCAB) for _ in range(length)]
    return Request(
        prompt, SamplingParams(tokens, temperature=0.0, ignore_eos=True), drafter="device", budget=WHOLE, **more
    )


def _served(
    monkeypatch: pytest.MonkeyPatch, length: int = LENGTH, **more: Any
) -> tuple[Engine, CudaDecoder, Captures, set[int]]:
    """Nothing is captured beside its texts, unless `_capture` does it."""
    later = Captures()
    monkeypatch.setattr(graphs, "capture", later.capture)
    engine, target = _load("eagle3", later, at_once=0, most=4, length=length, **more)
    engine.captures._due = float("inf")
    return engine, target, later, _drafted_batches(engine, monkeypatch)


def _plain(request: Request, **more: Any) -> list[list[int]]:
    config = EngineConfig(max_batch=1, **more)
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(willing_target(), frozenset({1}), speculative, config)
    return _write(engine, [replace(request, drafter="none", budget=None)], 1)


def _capture(engine: Engine, captures: Captures, turns: int) -> None:
    """Between rounds; they are done, and do not count as captures in mid-text."""
    late = [*captures.late]
    for _ in range(turns):
        assert engine.captures.when_idle()
    engine.captures._due, captures.late[:] = float("inf"), late


def test_a_server_writes_before_any_draft_is_captured_and_forms_join_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _, captures, drafted = _served(monkeypatch)
    wanted, missing = _plain(_asked()), engine.captures.missing
    assert missing == ALONE
    assert _write(engine, [_asked()], 1) == wanted
    assert (captures.late, drafted) == ([], set())
    _capture(engine, captures, 1)
    assert engine.captures.missing == missing, "kernels were asked for"
    for turns in (1, 1, 3, ALONE - 5):
        _capture(engine, captures, turns)
        drafted.clear()
        assert _write(engine, [_asked()], 1) == wanted
        assert (captures.late, drafted) == ([], {1})
    assert not engine.drafters._failed


def test_an_engine_that_no_thread_runs_has_its_drafts_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, captures, drafted = _served(monkeypatch)
    engine.captures.has_thread = False
    seq = engine.find(engine.submit(_asked()))
    engine.step()
    assert seq is not None
    assert engine.captures.missing == 0
    assert len(seq.tokens) <= seq.prompt_length + 1
    captures.late.clear()
    while engine.busy:
        engine.step()
    assert [seq.tokens[seq.prompt_length :]] == _plain(_asked())
    assert (captures.late, drafted) == ([], {1})


LONG = 1200  # two lengths of context have graphs of their own: up to 1,023 tokens, and beyond


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("prompt", [900, 980, 1100])
def test_a_long_text_is_written_plainly_until_its_graphs_are_there(
    prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first begins with drafts and grows out of the context that is captured."""
    engine, _, captures, drafted = _served(monkeypatch, LONG)
    request = _asked(prompt, 45)
    wanted = _plain(request, max_length=LONG)
    assert engine.captures.missing == 2 * ALONE
    _capture(engine, captures, 1 + ALONE)
    assert _write(engine, [request], 1) == wanted
    assert captures.late == []
    assert drafted == ({1} if prompt == 900 else set())
    _capture(engine, captures, 1 + ALONE)
    assert engine.captures.missing == 0
    assert _write(engine, [request], 1) == wanted
    assert (captures.late, drafted) == ([], {1})


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("prompt", [20, 1010, 1100])
def test_most_passes_run_without_a_graph_until_it_is_captured(prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of prompts and behind long contexts, into which the second text grows."""
    engine, target, captures, _ = _served(monkeypatch, LONG, few_first=True)
    request, left = _asked(prompt, 45), len(target.passes._waiting)
    wanted = _plain(request, max_length=LONG)
    jobs = [*graphs.menu(LONG, target.grown.tiled_nodes)]
    assert len(jobs) - left == sum(size.splits == 8 and size.rows <= 64 and scored > 0 for size, scored in jobs) > 0
    assert engine.captures.missing == 2 * ALONE + left
    assert _write(engine, [request], 1) == wanted
    assert captures.late == []
    captured = target.passes.captured
    engine.captures.before(1)
    assert engine.captures.missing == len(target.passes._waiting) == 0
    assert target.passes.captured - target.passes.captured_grown >= captured - target.passes.captured_grown + left
    captures.late.clear()
    assert _write(engine, [request], 1) == wanted
    assert captures.late == []


@pytest.mark.slow
def test_passes_captured_between_rounds_of_a_long_text_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, target, captures, _ = _served(monkeypatch, LONG, few_first=True)
    request, texts = _asked(1005, 60), list[int]()
    _capture(engine, captures, 2 * (1 + ALONE))  # of the drafts
    engine.submit(request)
    while engine.busy:
        if target.passes._waiting:
            _capture(engine, captures, 2)
        texts += [token for event in engine.step() for token in event.tokens]
    assert [texts] == _plain(request, max_length=LONG)
    assert captures.late == []


def test_without_that_rule_a_long_text_waits_for_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of these tests: a capture in mid-text is seen."""
    engine, _, captures, _ = _served(monkeypatch, LONG)
    _capture(engine, captures, 1 + ALONE)
    monkeypatch.setattr(DraftMenu, "holds", lambda menu, length: True)
    _write(engine, [_asked(1100, 20)], 1)
    assert captures.late


def test_where_the_first_capture_fails_the_host_drafts_and_no_token_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, target, captures, drafted = _served(monkeypatch)

    def fail(*given: object) -> None:
        raise RuntimeError("no memory for a graph")

    monkeypatch.setattr(target, "rehearse", fail)
    engine.submit(_asked())
    texts = list[int]()
    for turn in count():
        if turn in (3, 5):
            engine.settle()
            assert target.later.next(1)
        texts += [token for event in engine.step() for token in event.tokens]
        if not engine.busy:
            break
    assert [texts] == _plain(_asked())
    assert "drafting on the device failed" in caplog.text
    assert engine.captures.missing == 0
    while target.later.next():  # of larger batches: nobody needs them now
        pass
    assert len(captures.late) == 2, "one draft, without noise and with it, whose pass could not be captured"
    assert _write(engine, [_asked()], 1) == _plain(_asked())
    assert drafted == {1}, "by the host"


def test_captures_between_rounds_and_an_abort_change_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, captures, _ = _served(monkeypatch)
    kept, dropped = engine.submit(_asked()), engine.submit(_asked(30))
    texts = list[int]()
    for turn in count():
        if turn == 4:
            engine.abort(dropped)
        if turn % 2:
            _capture(engine, captures, 1)
        texts += [token for event in engine.step() if event.seq_id == kept for token in event.tokens]
        if not engine.busy:
            break
    assert [texts] == _plain(_asked())
    assert captures.late == []


@pytest.mark.slow
def test_a_head_that_is_swapped_while_captures_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, target, captures, drafted = _served(monkeypatch)
    pool = engine.drafters
    monkeypatch.setattr(pool, "_make", lambda name, head=None: _head(target, 0, 4))
    monkeypatch.setattr(pool, "_runs_head", lambda name: name == "device")
    _capture(engine, captures, 4)
    seq = engine.find(engine.submit(_asked()))
    engine.step()
    order = HeadSwap("anywhere")  # type: ignore[arg-type]
    order(engine)
    order.raise_error()
    captures.late.clear()  # how prompts are read
    while engine.busy:
        engine.step()
    assert seq is not None
    wanted = _plain(_asked())
    assert [seq.tokens[seq.prompt_length :]] == wanted
    assert drafted == {1}, "this text kept its head"
    drafted.clear()
    assert _write(engine, [_asked()], 1) == wanted
    assert (captures.late, drafted) == ([], set())
    _capture(engine, captures, engine.captures.missing + 2)
    assert _write(engine, [_asked()], 1) == wanted
    assert (captures.late, drafted) == ([], {1})


@pytest.mark.slow
def test_a_prediction_beside_a_head_whose_captures_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its composition has a draft of its own, which is built when the request comes."""
    engine, target, captures, _ = _served(monkeypatch)
    made = list[str]()

    def make(name: str, head: str | None = None) -> Drafter:
        made.append(name)
        drafter = HybridDrafter(PredictionDrafter(), _head(target, 0, 4))
        captures.late.clear()
        return drafter

    monkeypatch.setattr(engine.drafters, "_make", make)
    wanted, missing = _plain(_asked()), engine.captures.missing
    request = _asked(prediction=tuple(wanted[0]))
    assert _write(engine, [replace(request, budget=None)], 1) == wanted
    assert made == ["prediction+device"]
    assert captures.late == []
    assert engine.captures.missing == 2 * missing
    _capture(engine, captures, 2 * missing + 2)
    assert _write(engine, [request, _asked()], 1) == [*wanted, *wanted]
    assert captures.late == []


@pytest.mark.slow
def test_adapters_are_captured_for_as_drafts_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = folders_of("llama", tmp_path, 1)
    engine, _, captures, drafted = _served(monkeypatch, adapters=adapters)
    request = _asked(adapter=next(iter(adapters)))
    wanted = _plain(request, adapters=adapters)
    assert wanted != _plain(_asked())
    for turns in (0, 1 + ALONE):
        _capture(engine, captures, turns)
        assert _write(engine, [request], 1) == wanted
        assert captures.late == []
    assert drafted == {1}


def test_a_library_has_its_drafts_when_it_is_loaded_and_a_server_is_ready_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(name: str, options: object) -> tuple[Engine, Any]:
        return _served(monkeypatch)[0], Any

    monkeypatch.setattr(llm, "load_engine", load)
    assert llm.LLM("model").engine.captures.missing == 0

    async def serve() -> None:
        monkeypatch.setattr(Driver, "wait", lambda driver, waiter: None)  # its thread does nothing yet
        with caplog.at_level("INFO"):
            served = llm.AsyncLLM("model")
        assert served.llm.engine.captures.missing == ALONE
        await served.close()

    asyncio.run(serve())
    assert f"ready; graphs for one sequence are still being captured ({ALONE} left)" in caplog.text
