"""Passes captured before texts are written: larger sizes than needed change no text, and nothing is captured later."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.build import load
from forerun.build.engine import make_engine
from forerun.build.load import rehearse_verdicts
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Laws, Needs, Request, TreeBatch
from forerun.engine.engine import Engine
from forerun.models.cuda import graphs
from forerun.models.cuda.graphs import menu, scored_rows
from forerun.models.cuda.plan import Need, Plan, Size, padding, splits_to
from forerun.models.cuda.target import CudaDecoder
from forerun.testing import FakeSeq
from tests.gpu.test_first_call import Captures
from tests.gpu.test_plain_rounds import PROMPTS, _write
from tests.gpu.tiny import DEVICES, make_target, need_cuda

BATCH, LENGTH = 5, 400


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_nothing_is_captured_while_texts_are_written(device: str, drafter: str) -> None:
    need_cuda(device)
    target = make_target("llama", device, torch.float32 if device == "cpu" else torch.bfloat16)
    speculative = SpeculativeConfig(drafter=drafter, controller="fixed", budget=6)
    engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=BATCH, max_length=LENGTH))
    requests = [
        Request(prompt * 2, SamplingParams(max_tokens=12 + 4 * i, ignore_eos=True)) for i, prompt in enumerate(PROMPTS)
    ]
    wanted = _write(engine, requests)
    if device == "cuda":
        target.warm_up(Needs(), BATCH, LENGTH)
    else:
        target.passes.take_sizes(menu(LENGTH))
    captured = target.passes.captured
    assert _write(engine, requests) == wanted
    assert target.passes.captured == captured


@pytest.mark.parametrize("device", DEVICES)
def test_a_rehearsed_verdict_leaves_nothing_behind(device: str) -> None:
    need_cuda(device)
    target = make_target("llama", device, torch.float32 if device == "cpu" else torch.bfloat16)
    speculative = SpeculativeConfig(drafter="ngram", controller="fixed", budget=6)
    engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=BATCH, max_length=LENGTH))
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=4, ignore_eos=True)
    wanted = _write(engine, [Request(PROMPTS[0] * 2, params)])
    rehearse_verdicts(engine)
    assert not engine.busy
    assert target.used_slots == 0
    assert _write(engine, [Request(PROMPTS[0] * 2, params)]) == wanted


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The kernels that a device would load: by operation, and by types, dimensions and places of its tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = set[tuple[object, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for each in args for one in (each if isinstance(each, (list, tuple)) else [each])]
        tensors = [(one.dtype, one.dim(), _place(one)) for one in given if isinstance(one, Tensor)]
        self.found.add((str(func), *tensors))
        return func(*args, **(kwargs or {}))


def _place(one: Tensor) -> int:
    """How much of it can be read at once where it lies, in bytes; 0 = it is read number by number anyway.

    In its storage, which begins at a multiple of 512 on a device, and anywhere on a CPU.
    """
    begin = one.storage_offset() * one.element_size()
    return next(at for at in (32, 16, 8, 4, 2, 1) if not begin % at) if one.is_contiguous() else 0


def _operations_of_texts(
    monkeypatch: pytest.MonkeyPatch, requests: list[Request]
) -> tuple[set[tuple[object, ...]], set[int]]:
    """What verdicts on looked-up trees did that no rehearsed one had done; and how many nodes these trees had."""

    def reads_once(trees: TreeBatch, laws: Laws) -> bool:  # as on a GPU
        return trees.drawn_from is None and not all(laws.greedy)

    monkeypatch.setattr("forerun.verify.walk.reads_once", reads_once)
    target, sizes = make_target("llama", "cpu", torch.float32), set[int]()
    speculative = SpeculativeConfig(drafter="ngram", controller="fixed", budget=9)
    engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=BATCH, max_length=LENGTH))
    rehearsed, written = Operations(), Operations()
    with rehearsed:
        rehearse_verdicts(engine)
    _note_verdicts(engine, written, sizes)
    for request in requests:
        _write(engine, [request])
    return written.found - rehearsed.found, sizes


def _note_verdicts(engine: Engine, written: Operations, sizes: set[int]) -> None:
    decide = engine.verifiers.decide

    def noted(seqs: Any, trees: TreeBatch, scores: Any) -> Any:
        if trees.is_plain():  # decided by the device
            return decide(seqs, trees, scores)
        sizes.add(trees.nodes)
        with written:
            return decide(seqs, trees, scores)

    engine.verifiers.decide = noted  # type: ignore[method-assign]


LAWS = [
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.6, seed=4),
    SamplingParams(temperature=0.8, top_p=0.95, seed=4),
    SamplingParams(temperature=1.0, top_k=5, min_p=0.02, seed=4),
]


@pytest.mark.parametrize("params", LAWS, ids=["plain", "cool", "top-p", "top-k"])
def test_verdicts_on_looked_up_trees_do_what_was_rehearsed(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request(prompt * 2, replace(params, max_tokens=40, ignore_eos=True)) for prompt in PROMPTS]
    fresh, sizes = _operations_of_texts(monkeypatch, requests)
    assert {nodes % 4 for nodes in sizes} == {0, 1, 2, 3}
    assert fresh == set()


def test_a_rehearsal_of_even_chains_alone_leaves_operations_to_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: the first tree with an odd number of nodes had a kernel of its own compiled in mid-text."""
    monkeypatch.setattr(load, "_REHEARSED", ((8, 0.0), (8, 30.0), (24, 30.0)))
    request = Request(PROMPTS[0] * 2, replace(LAWS[0], max_tokens=40, ignore_eos=True))
    fresh, _ = _operations_of_texts(monkeypatch, [request])
    assert fresh


@pytest.mark.parametrize("batch", [1, 3, 8, 40, 64, 65, 100, 128])
def test_plain_rounds_of_any_batch_have_a_size(batch: int) -> None:
    jobs = list(menu(4096))
    for farthest in (5, 1020, 3000, 4095):
        need = Need(batch, batch, farthest)
        sizes = [size for size, scored in jobs if scored and need.fits(size)]
        first = min(sizes, key=lambda size: (size.rows, size.groups, size.splits))
        assert first.splits == splits_to(farthest)


def test_a_need_that_no_size_has_room_for_is_rounded() -> None:
    need = Need(1000, 1100, 20)
    assert need.rounded() == Size(1024, 2048, 8)
    assert not any(need.fits(size) for size, _ in menu(4096))
    for scored in (True, False):
        assert any(Need(600, 70, 20).fits(size) for size, kind in menu(4096) if (kind > 0) == scored)


def test_passes_with_many_rows_of_prompts_have_fewer_with_logits() -> None:
    assert [scored_rows(rows) for rows in (128, 256, 512, 768, 1024)] == [
        [128], [128, 256], [128, 256, 512], [128, 256, 384], [128, 256, 384],
    ]  # fmt: skip


def test_a_pass_takes_the_graph_with_the_fewest_logits_that_are_enough() -> None:
    passes = make_target("llama", "cpu", torch.float32).passes
    passes.take_sizes(menu(LENGTH))
    size = passes.scored_size(Need(600, 70, 20))
    found = [passes._key(Plan(size, 600, padding(size).ints), (), scored).scored for scored in (1, 128, 129, 300, 500)]
    assert found == [128, 128, 256, 384, 512]  # the last is captured when it comes


def test_passes_that_are_left_for_later_run_without_a_graph_until_they_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt of more rows than a short text's passes have."""
    captures, jobs = Captures(), [job for job in menu(LENGTH) if job[0].rows in (8, 192)]
    monkeypatch.setattr(graphs, "capture", captures.capture)
    monkeypatch.setattr(graphs, "menu", lambda *given: jobs)
    target = make_target("llama", "cpu", torch.float32)
    target.passes.capture = True
    target.capture_few_first()
    target.warm_up(Needs(), BATCH, LENGTH)
    captures.is_loading = False
    assert target.passes._waiting
    wanted = _logits_behind_prompt(target, 1)
    assert captures.late == []
    while target.later.next():
        pass
    assert target.passes._waiting == set()
    captures.late.clear()
    assert torch.equal(_logits_behind_prompt(target, 2), wanted)
    assert captures.late == []


def _logits_behind_prompt(target: CudaDecoder, number: int) -> Tensor:
    seq = FakeSeq(number, [2 + i % 90 for i in range(150)])
    target.prefill([seq], Needs())
    logits = target.score([seq], TreeBatch.chains([seq.tokens[-1:]]), Needs()).required_logits.clone()
    target.release(seq)
    return logits
