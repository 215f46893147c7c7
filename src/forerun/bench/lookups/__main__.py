"""Which look-up pays where: `ngram` against `suffix` on texts of a model, with the times of other machines counted.

    python -m forerun.bench.lookups record --model M --suite spec_bench_open.jsonl --limit 3 --max-tokens 256 --out FILE
    python -m forerun.bench.lookups replay FILE [--worlds "8B on a GPU,arm CPU"] [--head] [--passes-ms 2,3] [--table 0]
    python -m forerun.bench.lookups cost FILE

`record` writes greedy texts and reads what the model tends to write after their tokens. `replay` then counts rounds
of the real drafters and controller: x plain by task, with a controller and a drafter of its own for every text (first),
and with one for all (in a row); `--head`: beside a head whose acceptance is drawn. `cost` times the look-ups
themselves. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun.bench.lookups.cost import CHAIN, TREE, measure
from forerun.bench.lookups.record import Recording, load, record, save
from forerun.bench.lookups.replay import DRAFT, Speed, make_drafter, worlds
from forerun.bench.machine import machine_facts
from forerun.bench.recording_flags import add_recording_flags
from forerun.bench.suites import load_suite
from forerun.drafters.suffix.successors import READ

DRAFTERS = ("ngram", "suffix")


def replay(recording: Recording, names: Sequence[str], **given: Any) -> list[dict[str, Any]]:
    """Both drafters in every world; prints one line for each. `given`: as `worlds` takes it."""
    rows = list[dict[str, Any]]()
    known = worlds(**given)
    for world in names or known:
        for in_a_row in (False, True):
            found = {name: known[world](recording, name, in_a_row=in_a_row) for name in DRAFTERS}
            order = "in a row" if in_a_row else "first"
            rows += [_row(world, order, name, speeds) for name, speeds in found.items()]
            print(
                f"{world}, {order}: " + ", ".join(_task(task, found) for task in found["ngram"]), flush=True
            )
    return rows


def _task(task: str, found: dict[str, dict[str, Speed]]) -> str:
    ngram, suffix = (found[name][task].times_plain for name in DRAFTERS)
    return f"{task} {ngram:.2f} / {suffix:.2f} ({suffix / ngram:.2f})"


def _row(world: str, order: str, name: str, speeds: dict[str, Speed]) -> dict[str, Any]:
    tasks = {task: [round(value, 3) for value in speed] for task, speed in speeds.items()}
    return {"world": world, "order": order, "drafter": name, "times_plain, tokens_per_round": tasks}


def costs(recording: Recording) -> list[dict[str, Any]]:
    """Both drafters, as on a CPU (chains) and as on a GPU (trees, with the table of successors)."""
    rows = list[dict[str, Any]]()
    for name in DRAFTERS:
        for kind, budget in (("chain", CHAIN), ("tree", TREE)):
            found = measure(
                make_drafter(name, recording, READ if kind == "tree" else 0), recording.texts, budget
            )
            print(
                f"{name:>7} {kind}: no match {found.no_match:.1f}, draft {found.draft:.1f} microseconds",
                flush=True,
            )
            rows.append({"drafter": name, "kind": kind, "draft": round(found.draft, 2), **found._asdict()})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.lookups", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add_recording_flags(commands.add_parser("record"))
    replaying = commands.add_parser("replay")
    replaying.add_argument("file", type=Path)
    replaying.add_argument("--worlds", default="", help=f"by comma; all of {', '.join(worlds())}")
    replaying.add_argument("--head", action="store_true", help="beside a head, on a GPU")
    replaying.add_argument(
        "--passes-ms", default="", help="plain passes of other GPUs, by comma; these alone"
    )
    replaying.add_argument(
        "--draft-us", type=float, default=1e6 * DRAFT, help="microseconds of a draft, on a GPU"
    )
    replaying.add_argument(
        "--table", type=int, default=READ, help="tokens that suffix knows the successors of"
    )
    costing = commands.add_parser("cost")
    costing.add_argument("file", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "record":
        made = record(given.model, load_suite(given.suite, limit=given.limit), given.max_tokens)
        save(made, given.out)
        print(json.dumps({"texts": len(made.texts), "tokens": sum(len(one.answer) for one in made.texts)}))
        return
    texts = load(given.file)
    if given.command == "replay":
        passes = [1e-3 * float(one) for one in given.passes_ms.split(",") if one]
        names = [f"{1e3 * one:g} ms on a GPU" for one in passes] or given.worlds.split(",")
        times = {"passes": passes, "draft": 1e-6 * given.draft_us, "table": given.table}
        rows = replay(texts, [one for one in names if one], head=given.head, **times)
    else:
        rows = costs(texts)
    print(
        json.dumps(
            {"machine": machine_facts(), "model": texts.model, "texts": len(texts.texts), "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
