"""Passes from a request to its first token: as few beside trees that a device grew as beside plain rounds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from forerun.control.base import WaitingPrompts
from forerun.core.params import SamplingParams
from forerun.core.tree import TreeBatch, TreeForm
from forerun.core.types import Form, Request
from forerun.engine.engine import Engine
from forerun.engine.scheduler import PrefillRows
from forerun.models.base import ON_GPU
from forerun.models.cuda import plan as chunks
from forerun.models.cuda import target as target_module
from forerun.models.cuda.plan import MAX_ROWS, ROW_SIZES, beside_trees, fitting_rows
from forerun.models.cuda.target import CudaDecoder
from tests.gpu.test_following import Forms, make, willing_target
from tests.gpu.tiny import VOCAB

CHAIN = Form(2, 2, 1)
WRITING, ROWS = 24, 256  # sequences that write, and rows of prompts that rounds ask for


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def first_tokens(
    target: CudaDecoder, passes: list[int], form: Form | None, lengths: Sequence[int]
) -> tuple[list[int], list[list[int]]]:
    """Passes from the arrival of requests, in a batch that writes, to the first token of each; and all texts so far."""
    engine = make(target, Forms([form], 99), follows=True, batch=WRITING + len(lengths))
    engine.prefill_rows = PrefillRows(ON_GPU.prefill, target.pass_rows, ROWS)
    texts = {engine.submit(request_of(9, i, 60)): list[int]() for i in range(WRITING)}
    for _ in range(3):
        take(engine, texts)
    passes.clear()
    late = [engine.submit(request_of(length, 100 + i, 4)) for i, length in enumerate(lengths)]
    texts |= {number: [] for number in late}
    found = dict[int, int]()
    while len(found) < len(late):
        take(engine, texts)
        found |= {number: len(passes) for number in late if texts[number] and number not in found}
    for number in texts:
        engine.abort(number)
    assert target.used_slots == 0
    return [found[number] for number in late], [*texts.values()]


def agree(some: Sequence[list[int]], others: Sequence[list[int]]) -> bool:
    """Are texts the same, as far as both were written?"""
    pairs = zip(some, others, strict=True)
    return all(min(map(len, pair)) > 0 and not any(a != b for a, b in zip(*pair, strict=False)) for pair in pairs)


def request_of(length: int, seed: int, tokens: int) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(prompt_of(length, seed), params, drafter="device", cache_salt=None)


def take(engine: Engine, texts: dict[int, list[int]]) -> None:
    for event in engine.step():
        assert event.error is None
        texts[event.seq_id] += event.tokens


def count_passes(target: CudaDecoder) -> list[int]:
    """Grows by one with every pass that is launched."""
    found, passes = list[int](), target.passes
    for name in ("run", "run_grown", "run_plain"):
        real = type(passes).__dict__[name]

        def noted(*given: object, real: object = real) -> object:
            found.append(1)
            return real(passes, *given)  # type: ignore[operator]

        setattr(passes, name, noted)
    return found


def rounded_down(nodes: int, rows: int) -> int:
    """What was done before: the next smaller size, so that trees that are not small leave little to prompts."""
    size = max(size for size in ROW_SIZES if size <= nodes + rows)
    return size - nodes if size > 64 and 2 * (size - nodes) >= rows else rows


def test_first_tokens_take_no_more_passes_beside_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [290, 240]
    target = willing_target(kv_slots=20_000)
    passes = count_passes(target)
    plain, wanted = first_tokens(target, passes, None, lengths)
    drafted, texts = first_tokens(target, passes, CHAIN, lengths)
    assert agree(texts, wanted)
    assert max(drafted) <= max(plain)
    monkeypatch.setattr(chunks, "fitting_rows", rounded_down)
    before, texts = first_tokens(target, passes, CHAIN, lengths)
    assert agree(texts, wanted)
    assert max(before) > max(drafted), "the negative control"


@pytest.mark.parametrize("nodes", [1, 8, 32, 72, 96, 144, 192, 256, 384, 700])
@pytest.mark.parametrize("rows", [256, 320, 512, MAX_ROWS])
def test_prompts_fill_a_pass_and_get_what_was_asked_for_or_nearly(nodes: int, rows: int) -> None:
    trees = TreeBatch([0] * nodes, [-1] * nodes, tuple(range(nodes + 1)), form=TreeForm(nodes, 1, 1))
    (taken,) = beside_trees([[1] * 5000], trees, rows)
    room = MAX_ROWS - nodes
    assert min(rows, room) * 0.5 <= len(taken) <= min(1.5 * rows, room)
    assert nodes + len(taken) in ROW_SIZES
    assert len(taken) >= min(rounded_down(nodes, rows), room)
    (taken,) = beside_trees([[1] * 9], trees, rows)
    assert len(taken) == 9, "what waits is read whole, where that is less"


def test_prompts_beside_trees_of_the_host_that_fill_a_pass_get_their_own() -> None:
    trees = TreeBatch.chains([[1] * 40] * 30)
    assert len(beside_trees([[1] * 5000], trees, 256)[0]) == 256


def test_the_nearest_size_is_taken() -> None:
    assert fitting_rows(96, 256) == 384 - 96
    assert fitting_rows(32, 256) == 256 - 32
    assert fitting_rows(384, 256) == 768 - 384, "of two that are as near the larger"
    assert fitting_rows(8, 1024) == MAX_ROWS - 8
    assert rounded_down(96, 256) == 160


def test_an_engine_tells_its_controller_what_waits() -> None:
    class Hears(Forms):
        heard: list[WaitingPrompts] = []  # noqa: RUF012

        def note_waiting(self, prompts: WaitingPrompts) -> None:
            self.heard.append(prompts)

    target = willing_target(kv_slots=20_000)
    engine = make(target, Hears([CHAIN], 99), follows=True, batch=6)
    engine.prefill_rows = PrefillRows(ON_GPU.prefill, target.pass_rows, 64)
    texts = {engine.submit(request_of(9, i, 30)): list[int]() for i in range(4)}
    for _ in range(4):
        take(engine, texts)
    assert not Hears.heard, "nothing waits, as before"
    for i in range(4):  # two places are free
        texts[engine.submit(request_of(101, 9 + i, 3))] = []
    take(engine, texts)
    assert Hears.heard[0] == WaitingPrompts(2, 200, 64, target_module.CHUNK)
    while engine.busy:
        take(engine, texts)
