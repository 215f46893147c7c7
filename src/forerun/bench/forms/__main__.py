"""What a head's forms bring on an H200 at 8B cost, in simulation with real acceptance.

    python -m forerun.bench.forms record --suite spec_bench_open.jsonl --limit 3 --max-tokens 128 --out FILE
    python -m forerun.bench.forms simulate FILE [--batches 1,8,32] [--forms 47:6:10,63:10:8]

`record` drafts along the greedy texts of a model with the head of the box, on this machine, and keeps which of its
tree would be accepted at every place, whatever the form (a second for ten tokens). `simulate` then counts rounds: every
form of the menu alone, others that are named, the best of these for each text in hindsight, and the controller, the
first time and later. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun.bench.forms.record import RecordedText, load, record, save
from forerun.bench.forms.simulation import Outcome, Simulation, fixed_forms, in_turn, make_controller
from forerun.bench.gpu.texts import parse_form
from forerun.bench.recording_flags import add_recording_flags
from forerun.bench.suites import load_suite
from forerun.drafters.eagle.cuda.draft_plan import bucket_of
from forerun.drafters.eagle.files import read_head
from forerun.heads import BOX
from forerun.models.cuda.plan import MAX_ROWS
from forerun.offers import Form

FEWEST, TIMES = 24, 3  # texts of a small batch, and of each place in a large one
REPEATS, NOISE = 3, 0.01
HEAD = "smollm2-135m-eagle3"


def simulate(
    texts: Sequence[RecordedText], batch: int, others: Sequence[Form], rates: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Tokens per second over plain decoding's."""
    order = in_turn(texts, max(FEWEST, len(texts), TIMES * batch))
    plain = Simulation(texts, batch).run(order)

    def row(name: str, outcome: Outcome) -> dict[str, Any]:
        forms = {
            "plain" if form is None else _label(form): count for form, count in outcome.forms.most_common(4)
        }
        found = {
            "batch": batch, "what": name, "x_plain": round(outcome.rate / plain.rate, 3),
            "tokens_per_round": round(outcome.tokens_per_round, 2), "forms": forms,
            "read_first": round(outcome.read_first / outcome.forms.total(), 3),
        }  # fmt: skip
        print(f"batch {batch:3d} {name:24s} {found['x_plain']:.3f}x, {found['tokens_per_round']:.2f} tokens per round, "
              f"{found['read_first']:.3f} read first", flush=True)  # fmt: skip
        return found

    fitting = [form for form in others if bucket_of(batch) * (form.nodes + 1) <= MAX_ROWS]
    forms = dict.fromkeys((*fixed_forms(batch), *fitting))
    rows = [row(f"fixed {_label(form)}", Simulation(texts, batch, form=form).run(order)) for form in forms]
    if batch == 1:
        rows.append(row("best form of each text", _hindsight(texts, order, list(forms))))
    controller = make_controller(rates)
    for i in range(REPEATS):
        run = Simulation(texts, batch, controller=controller, noise=NOISE, seed=i).run(order)
        rows.append(row("controller, first time" if not i else f"controller, time {i + 1}", run))
    return {"batch": batch, "plain_tokens_per_s": round(plain.rate), "rows": rows}


def _hindsight(texts: Sequence[RecordedText], order: Sequence[int], forms: Sequence[Form]) -> Outcome:
    total = Outcome()
    for text in order:
        runs = [Simulation(texts, 1, form=form).run([text]) for form in forms]
        best = min(runs, key=lambda one: one.seconds)
        total.tokens, total.rounds = total.tokens + best.tokens, total.rounds + best.rounds
        total.seconds, total.read_first = total.seconds + best.seconds, total.read_first + best.read_first
        total.forms += best.forms
    return total


def _label(form: Form) -> str:
    return f"{form.nodes}:{form.depth}:{form.width}"


def _parse_forms(text: str) -> list[Form]:
    budgets = [parse_form(one) for one in text.split(",") if one]
    return [Form(one.nodes, one.depth, one.width) for one in budgets if one is not None]


def _rates() -> Sequence[Sequence[float]]:
    """How often the ranks of the head of the box are accepted, as its files say."""
    return read_head(BOX / HEAD, kind="eagle3")[0].rates


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.forms", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add_recording_flags(commands.add_parser("record"))
    simulating = commands.add_parser("simulate")
    simulating.add_argument("file", type=Path)
    simulating.add_argument("--batches", default="1")
    simulating.add_argument(
        "--forms", default="", help="nodes:depth:width by comma, beside those of the menu"
    )
    given = parser.parse_args(arguments)
    if given.command == "record":
        texts = record(given.model, load_suite(given.suite, limit=given.limit), given.max_tokens)
        save(texts, given.out)
        print(json.dumps({"texts": len(texts), "tokens": sum(len(one.answer) for one in texts)}))
        return
    texts, others, rates = load(given.file), _parse_forms(given.forms), _rates()
    found = [simulate(texts, int(batch), others, rates) for batch in given.batches.split(",")]
    print(json.dumps({"what": "simulated forms", "texts": len(texts), "batches": found}))


if __name__ == "__main__":
    main()
