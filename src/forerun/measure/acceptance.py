"""Tokens per round (acceptance) of drafters over a suite, by task; speed is not compared.

    python -m forerun.measure.acceptance --target M --suite builtin --drafters runs/eagle3,suffix,recycling

A drafter is named by the folder of its head or draft model, or by its name where it needs none. Each drafts a chain of
five (`--length`) and a tree of at most 60 nodes (`--nodes`; a draft model only chains), at the temperatures given, in
batches; verdicts are the exact verifier's, and those of others with `--verifiers exact typical`: such a row says
`"exact": false`, its texts have not the target's law. Above temperature 0 heads draw what they draft from their own
law; with `--chosen` they draft the likeliest there too. A GPU drafts and decides by itself above 0 with `--verifiers
coupled`, what `auto` is there; trees that a head draws are the host's work, and slow. With `--seconds`, a row ends
after so many, with the rounds that there were until then; prompts take turns by task. A row also says how
many nodes its trees had (`nodes`): fewer than asked for where a text ends or a drafter has nothing more to say.
The last line is one JSON document. It needs torch and transformers only.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product, zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any

from forerun.api.calls import make_request
from forerun.api.llm import LLM
from forerun.control.base import FixedController
from forerun.core import registry
from forerun.core.errors import ForerunError
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.request import ALWAYS
from forerun.core.types import Budget, Request
from forerun.engine.driver import Waiter
from forerun.engine.sequence import SequenceState
from forerun.heads import open_head
from forerun.measure.bench.suites import Item, load_suite
from forerun.models.load import checkpoint as loading

SEED = 20261115
DEEPEST, WIDEST = 7, 10  # levels of a tree at least, and children of a node at most


@dataclass(frozen=True, slots=True)
class Plan:
    temperatures: Sequence[float] = (0.0, 1.0)
    verifiers: Sequence[str] = ("exact",)
    tokens: int = 256
    length: int = 5
    nodes: int = 60
    trees: bool = True
    chosen: bool = False
    batch: int = 32
    seconds: float | None = None  # that a row may take; None = until all texts are written

    def shapes(self, drafter: str) -> dict[str, Budget]:
        """What is drafted every round. The plan stands, so that on a GPU rounds need not be read one by one."""
        found = {f"chain of {self.length}": Budget(self.length, self.length, 1, repeats=ALWAYS)}
        if self.trees and drafter != "draft_model":
            depth = max(DEEPEST, self.length)
            found[f"tree of {self.nodes}"] = Budget(self.nodes, depth, WIDEST, repeats=ALWAYS)
        return found

    def rows(self, drafter: str) -> Iterator[tuple[float, str, Budget, str]]:
        shapes = self.shapes(drafter).items()
        for heat, (shape, budget), verifier in product(self.temperatures, shapes, self.verifiers):
            if heat or verifier == self.verifiers[0]:  # all follow the likeliest at 0
                yield heat, shape, budget, verifier


def drafter_of(folder: Path) -> str:
    """The drafter for the trained head or draft model in a folder; one that needs neither is named itself."""
    if str(folder) in registry.drafters.names():
        return str(folder)
    head = open_head(folder)
    return "draft_model" if head is None else registry.drafters.running(head.kind)[0].name


def load(target: str, folder: Path, drafter: str, items: Sequence[Item], plan: Plan, device: str) -> LLM:
    """The target with one drafter, for texts no longer than these.

    A GPU captures the drafts of its menu for every batch size and context that it may meet, a minute's work, and two
    forms are used here: so it is told of single texts no longer than these, and captures the two as they come.
    """
    tokenizer = loading.open_checkpoint(target).tokenizer()
    longest = max(len(tokenizer.chat_ids(list(item.messages))) for item in items) + plan.tokens + 1
    fixed = SpeculativeConfig(
        controller="fixed", drafter=drafter, draft_model=str(folder) if folder.is_dir() else None, verifier="exact",
        draft_sample_method="greedy" if plan.chosen else "probabilistic",
    )  # fmt: skip
    config = EngineConfig(device=device, max_batch=1, max_length=longest)
    return LLM.load(target, speculative_config=fixed, config=config)


def measure(llm: LLM, folder: str, items: Sequence[Item], plan: Plan) -> list[dict[str, Any]]:
    """One row per shape, temperature and verifier: tokens per round by task and in all."""
    drafter, rows = llm.engine.default_drafter, []
    in_turn = by_turns(items)
    for heat, shape, budget, verifier in plan.rows(drafter):
        llm.engine.max_batch = batch_for(plan.batch, budget.nodes, llm.engine.target.pass_rows)
        llm.engine.controller = always(budget)
        params = SamplingParams(max_tokens=plan.tokens, temperature=heat, seed=SEED if heat else None)
        made = [make_request(list(item.messages), params, {"verifier": verifier}, llm.encode) for item in in_turn]
        started = perf_counter()
        seqs = write(llm, made, plan.seconds)
        row = {
            "folder": folder,
            "drafter": drafter,
            "temperature": heat,
            "chosen": plan.chosen or not heat,
            "shape": shape,
            "verifier": verifier,
            "exact": registry.verifiers.get(verifier)().exact or not heat,
            "nodes": mean_nodes(seqs),
            "prompts": sum(bool(seq.rounds) for seq in seqs),
            "seconds": round(perf_counter() - started, 1),
            **by_task(in_turn, seqs),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def always(budget: Budget) -> FixedController:
    controller = FixedController(budget.nodes, budget.width)
    controller.budget = budget
    return controller


def batch_for(most: int, nodes: int, rows: int) -> int:
    """Sequences at once whose trees fit half a pass of so many rows: in a larger batch than fits, a GPU cuts the trees.

    The other half is for prompts. A power of two, since batches are padded to sizes that are not all known here.
    """
    fit = max(1, rows // 2 // (nodes + 1))
    return max(1, min(most, 1 << int(math.log2(fit))))


def by_turns(items: Sequence[Item]) -> list[Item]:
    """The first prompt of each task, then the second of each: so that a part of them is of all tasks."""
    tasks = dict.fromkeys(item.task for item in items)
    columns = [[item for item in items if item.task == task] for task in tasks]
    return [item for turn in zip_longest(*columns) for item in turn if item is not None]


def write(llm: LLM, requests: Sequence[Request], seconds: float | None) -> list[SequenceState]:
    """The sequences of some requests, as far as they came in so many seconds."""
    until = math.inf if seconds is None else perf_counter() + seconds
    llm.driver.expect(requests, rounds=0)
    handles = [llm.driver.submit(request) for request in requests]
    try:
        llm.driver.wait(Waiter(lambda: perf_counter() > until or all(handle.is_finished for handle in handles)))
    finally:
        for handle in handles:
            llm.driver.abort(handle)
    for seq in (handle.seq for handle in handles):
        if seq.error is not None:
            raise seq.error
        if seq.drafting != seq.drafter:
            raise ForerunError(f"the drafter {seq.drafter!r} failed and was switched off: see the log")
    return [handle.seq for handle in handles]


def mean_nodes(seqs: Sequence[SequenceState]) -> float:
    drafted = [one.drafted for seq in seqs for one in seq.rounds if one.drafted]
    return round(sum(drafted) / max(1, len(drafted)), 1)


def by_task(items: Sequence[Item], seqs: Sequence[SequenceState]) -> dict[str, float]:
    """Tokens per round of some texts, in all and of each task; of tasks that were not reached, nothing."""
    counts: dict[str, list[int]] = {"all": [0, 0]}
    for item, seq in zip(items, seqs, strict=True):
        for name in ("all", item.task) if seq.rounds else ():
            pair = counts.setdefault(name, [0, 0])
            pair[0] += sum(one.tokens for one in seq.rounds)
            pair[1] += len(seq.rounds)
    return {name: round(pair[0] / max(1, pair[1]), 3) for name, pair in counts.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m forerun.measure.acceptance", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafters", required=True, help="folders and names, with commas between")
    parser.add_argument("--suite", default="builtin")
    parser.add_argument("--limit", type=int, help="prompts per task")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32, help="at most; fewer where trees would not fit a pass")
    parser.add_argument("--nodes", type=int, default=60, help="of a tree at most")
    parser.add_argument("--length", type=int, default=5, help="of a chain")
    parser.add_argument("--only", choices=["chain"], default="", help="no trees")
    parser.add_argument("--verifiers", nargs="*", default=["exact"], help="exact, typical, ...; above 0 only")
    parser.add_argument("--chosen", action="store_true", help="draft the likeliest at any temperature")
    parser.add_argument("--seconds", type=float, help="that each row may take")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    items = load_suite(given.suite, limit=given.limit, model=given.target)
    plan = Plan(
        given.temperatures, given.verifiers, given.max_tokens, given.length, given.nodes, given.only != "chain",
        given.chosen, given.batch, given.seconds,
    )  # fmt: skip
    rows = []
    for folder in map(Path, given.drafters.split(",")):
        with load(given.target, folder, drafter_of(folder), items, plan, given.device) as llm:
            rows += measure(llm, folder.name, items, plan)
    conditions = {"suite": Path(given.suite).name, "prompts": len(items), "max_tokens": given.max_tokens}
    made = datetime.now(UTC).isoformat(timespec="seconds")
    print(json.dumps({"made": made, "conditions": conditions, "rows": rows}))


if __name__ == "__main__":
    main()
