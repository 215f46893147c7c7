"""Tokens per round (acceptance) of drafters over a suite, without timing.

    python -m forerun.bench.acceptance --target M --suite builtin --drafters runs/eagle3,suffix,recycling

A drafter is named by the folder of its head or draft model, or by its name where it needs none. Each drafts a chain of
five (`--length`) and a tree of at most 60 nodes (`--nodes`; a draft model only chains), at the temperatures given, in
batches; verdicts are the exact verifier's, and those of others with `--verifiers exact typical`: such a row says
`"exact": false`, its texts have not the target's law. Above temperature 0 heads draw what they draft from their own
law; with `--chosen` they draft the likeliest there too. No timing is taken, so it may share its machine.
The last line is one JSON document. It needs torch and transformers only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from forerun import registry
from forerun.bench.suites import Item, load_suite
from forerun.heads import open_head
from forerun.llm import LLM, Completion
from forerun.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.types import Budget

SEED = 20261115


def drafter_of(folder: Path) -> str:
    """The drafter for the trained head or draft model in a folder; one that needs neither is named itself."""
    if str(folder) in registry.drafters.names():
        return str(folder)
    head = open_head(folder)
    return "draft_model" if head is None else registry.drafters.running(head.kind)[0].name


def measure(
    target: str,
    folder: Path,
    items: Sequence[Item],
    temperatures: Sequence[float],
    tokens: int,
    config: EngineConfig,
    chosen: bool = False,
    only: str = "",
    nodes: int = 60,
    length: int = 5,
    verifiers: Sequence[str] = ("exact",),
) -> list[dict[str, Any]]:
    """One row per shape, temperature and verifier: tokens per round by task and in all."""
    drafter = drafter_of(folder)
    fixed = SpeculativeConfig(
        controller="fixed", drafter=drafter, draft_model=str(folder) if folder.is_dir() else None, verifier="exact",
        draft_sample_method="greedy" if chosen else "probabilistic",
    )  # fmt: skip
    llm = LLM.load(target, speculative_config=fixed, config=config)
    chains = only == "chain" or drafter == "draft_model"
    shapes = {f"chain of {length}": Budget(length, length, 1)}
    if not chains:
        shapes[f"tree of {nodes}"] = Budget(nodes, max(7, length), 10)
    rows = []
    for heat, (shape, budget), verifier in product(temperatures, shapes.items(), verifiers):
        if not heat and verifier != verifiers[0]:
            continue  # all follow the likeliest there
        params = SamplingParams(max_tokens=tokens, temperature=heat, seed=SEED if heat else None)
        asked = [list(item.messages) for item in items]
        done = llm.generate(asked, params, budget=budget, verifier=verifier)
        row = {
            "folder": folder.name,
            "drafter": drafter,
            "temperature": heat,
            "chosen": chosen or not heat,
            "shape": shape,
            "verifier": verifier,
            "exact": registry.verifiers.get(verifier)().exact or not heat,
            **by_task(items, done),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def by_task(items: Sequence[Item], done: Sequence[Completion]) -> dict[str, float]:
    """Tokens per round of some texts, in all and of each task."""
    counts: dict[str, list[int]] = {"all": [0, 0]}
    for item, text in zip(items, done, strict=True):
        for name in ("all", item.task):
            pair = counts.setdefault(name, [0, 0])
            pair[0] += round(text.tokens_per_round * text.rounds)  # the prompt's own token is not a round's
            pair[1] += text.rounds
    return {name: round(pair[0] / max(1, pair[1]), 3) for name, pair in counts.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; the last line is the document."""
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.acceptance", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafters", required=True, help="folders and names, with commas between")
    parser.add_argument("--suite", default="builtin")
    parser.add_argument("--limit", type=int, help="prompts per task")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--nodes", type=int, default=60, help="of a tree at most")
    parser.add_argument("--length", type=int, default=5, help="of a chain")
    parser.add_argument("--only", choices=["chain"], default="", help="no trees")
    parser.add_argument("--verifiers", nargs="*", default=["exact"], help="exact, typical, ...; above 0 only")
    parser.add_argument("--chosen", action="store_true", help="draft the likeliest at any temperature")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    items = load_suite(given.suite, limit=given.limit)
    config = EngineConfig(device=given.device, max_batch=given.batch)
    rows = []
    for folder in map(Path, given.drafters.split(",")):
        rows += measure(
            given.target,
            folder,
            items,
            given.temperatures,
            given.max_tokens,
            config,
            given.chosen,
            given.only,
            given.nodes,
            given.length,
            given.verifiers,
        )
    conditions = {"suite": Path(given.suite).name, "prompts": len(items), "max_tokens": given.max_tokens}
    made = datetime.now(UTC).isoformat(timespec="seconds")
    print(json.dumps({"made": made, "conditions": conditions, "rows": rows}))


if __name__ == "__main__":
    main()
