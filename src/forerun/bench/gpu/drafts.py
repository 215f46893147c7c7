"""Drafts on this GPU by form and batch size, how long the menu takes to capture, and texts that must capture nothing.

    python -m forerun.bench.gpu.drafts [--shape 8b] [--layers 2] [--max-batch 64] [--texts 96] [--batch 32]

The target and its head have random weights, which does not change what a draft costs. The texts come and go in a batch
whose form changes every few rounds; they are compared with texts written without drafts, and the graphs that were
captured behind the first token are counted: there must be none of drafts. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch

from forerun.bench.gpu.command import random_target
from forerun.bench.gpu.rounds import make_drafter, random_head, seconds_of
from forerun.bench.machine import machine_facts
from forerun.build import make_engine
from forerun.drafters.eagle.cuda.capture import capture_menu, jobs_of
from forerun.drafters.eagle.cuda.draft_plan import bucket_of
from forerun.drafters.eagle.cuda.drafter import DeviceEagle
from forerun.drafters.eagle.cuda.menu import FORMS, forms_for
from forerun.engine.engine import Engine
from forerun.errors import InvalidInput
from forerun.models.cuda.target import CudaDecoder
from forerun.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.types import Budget, Request, Round, Seq

HOLDS = 5  # rounds that a form is kept for


class ChangingForms:
    """A controller that goes through all forms that a batch of this size has, and none, a few rounds each."""

    def __init__(self) -> None:
        self._rounds = 0

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        forms = [None, *forms_for(bucket_of(len(seqs)))]
        form = forms[self._rounds // HOLDS % len(forms)]
        self._rounds += 1
        return [Budget(0, 0) if form is None else Budget(*form)] * len(seqs)

    def observe(self, outcome: Round) -> None:
        pass

    def forget(self, seq: Seq) -> None:
        pass


def captured(target: CudaDecoder, drafter: DeviceEagle) -> dict[str, int]:
    """Graphs so far: of drafts and passes over their trees, and of all other passes."""
    grown = target.passes.captured_grown
    return {"drafts": drafter.draft.replays.captured + grown, "passes": target.passes.captured - grown}


def measure_menu(
    drafter: DeviceEagle, target: CudaDecoder, max_batch: int, max_length: int
) -> dict[str, Any]:
    """Capture everything, and what each draft and the pass over its trees take, in ms."""
    seconds = capture_menu(drafter.draft, target, drafter.needs, max_batch, max_length)
    graphs = len(jobs_of(max_batch, max_length))
    print(
        f"captured {graphs} drafts, with their passes, for batches up to {max_batch} in {seconds:.1f} s",
        flush=True,
    )
    rows = []
    for (bucket, form), draft in sorted(drafter.draft.menu.measured().items()):
        trees = drafter.draft.rehearse(form, bucket, 512)
        target.rehearse(trees, drafter.needs, 512)
        passes = seconds_of(target.passes.replay_last, 3)
        rows.append({"batch": bucket, "form": tuple(form), "draft_ms": draft * 1e3, "pass_ms": passes * 1e3})
    for form in FORMS:
        mine = [row for row in rows if row["form"] == tuple(form)]
        label = f"{form.nodes}:{form.depth}:{form.width}"
        said = ", ".join(f"{row['batch']}: {row['draft_ms']:.2f} + {row['pass_ms']:.2f}" for row in mine)
        print(f"{label:>8} draft + pass, ms, by batch: {said}", flush=True)
    return {"capture_s": seconds, "graphs": graphs, "drafts": rows}


def measure_texts(
    engine: Engine, drafter: DeviceEagle, target: CudaDecoder, texts: int, batch: int
) -> dict[str, Any]:
    """Texts of many lengths with changing forms, which must equal those written plainly."""
    requests = [
        Request(
            tuple((7 * i + j) % 997 for j in range(20 + 17 * (i % 9))),
            SamplingParams(max_tokens=24 + 13 * (i % 7), ignore_eos=True),
        )
        for i in range(texts)
    ]
    found: dict[str, list[list[int]]] = {}
    first: dict[str, int] = {}
    for name in ("none", "head"):
        engine.max_batch = batch
        written: dict[int, list[int]] = {}
        for one in requests:
            written[engine.submit(Request(one.prompt, one.params, drafter=name))] = []
        first = {}
        while engine.busy:
            for event in engine.step():
                written[event.seq_id] += event.tokens
            first = first or captured(target, drafter)
        found[name] = list(written.values())
    end = captured(target, drafter)
    late = {name: end[name] - first[name] for name in end}
    differing = sum(a != b for a, b in zip(found["none"], found["head"], strict=True))
    print(
        f"{texts} texts at batch {batch}: {differing} differ from plain ones; captured behind the first token: "
        f"{late['drafts']} drafts (must be 0), {late['passes']} other passes",
        flush=True,
    )
    return {"texts": texts, "batch": batch, "differing": differing, "captured_late": late}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.gpu.drafts", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shape", default="8b", help="135m, 1b or 8b")
    parser.add_argument("--head", default="int8", help="weights of the head: plain or int8")
    parser.add_argument("--layers", type=int, default=1, help="layers of the head")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument(
        "--max-length", type=int, default=1000, help="contexts beyond 1024 have graphs of their own"
    )
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--batch", type=int, default=32)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise InvalidInput("this benchmark needs a CUDA device and torch sees none")
    target = random_target(given.shape, "plain")
    drafter = make_drafter(target, random_head(target, layers=given.layers), given.head)
    document: dict[str, Any] = {"machine": {**machine_facts(), "gpu": torch.cuda.get_device_name()}}
    document |= measure_menu(drafter, target, given.max_batch, given.max_length)
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    config = EngineConfig(max_batch=given.batch, max_length=given.max_length)
    engine = make_engine(target, frozenset(), speculative, config)
    engine.drafters.add("head", drafter)
    engine.controller = ChangingForms()
    document["texts"] = measure_texts(engine, drafter, target, given.texts, given.batch)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
