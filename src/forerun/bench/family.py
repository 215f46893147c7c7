"""Every drafter that needs no trained head, by task, in one table: `python -m forerun.bench.family`.

    python -m forerun.bench.family --suites builtin,SPEC_BENCH.jsonl --layers PLAN --json family.json

A preset of the general benchmark: greedy, batch 1, the controller deciding how much to draft, whole calls timed, all
drafters alternating with the plain loop on the same prompts. Prints one table per suite in Markdown: times the plain
loop's speed with its 95% interval, and tokens per round; below it, suffix against n-gram task by task, and each cascade
against its parts. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.bench.run import run
from forerun.bench.settings import Settings, parse_setups
from forerun.bench.stats import Spread
from forerun.bench.suites import load_suite
from forerun.errors import ForerunError, InvalidInput

LOOKUPS = ("ngram", "suffix", "recycling", "lookahead")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.family", description=(__doc__ or "").split("\n")[0]
    )
    add, defaults = parser.add_argument, Settings()
    add("--model", default=defaults.model, help="known name, GGUF file, folder or hub id")
    add("--suites", default="builtin", help="by comma: builtin, or JSONL files such as Spec-Bench's")
    add("--tasks", default="", help="only these tasks, by comma")
    add("--layers", help="a plan for layer_skip (`forerun layers search`); default: two thirds of the layers")
    add("--draft-models", default="", help="second models, smallest first, by comma: one or two")
    add("--drafters", default="", help="only these, by comma, as `forerun bench` names them")
    add("--limit", type=int, default=2, help="prompts per task")
    add("--max-tokens", type=int, default=64, help="new tokens per text at most")
    add("--repeats", type=int, default=2, help="how often each prompt is measured")
    add("--dtype", default=defaults.dtype, help="auto, gguf, q8, bfloat16 or float32")
    add("--device", default="cpu", help="cpu or cuda")
    add("--threads", type=int, help="CPU threads; default: one per core")
    add("--json", type=Path, metavar="PATH", help="write the JSON document there too")
    return parser.parse_args(words)


def contenders_of(layers: str | None, drafts: Sequence[str]) -> list[str]:
    """The drafters of a table: look-ups, layers of the target, second models, and cascades of two and three levels."""
    plan = f"={layers}" if layers else ""
    found = [*LOOKUPS, f"layer_skip{plan}", f"ngram>layer_skip{plan}"]
    for name in drafts:
        found += [f"{drafter}={name}" for drafter in ("draft_model", "draft_text", "ngram>draft_model")]
    if len(drafts) == 2:
        both = ";".join(drafts)
        found += [f"draft_model>draft_model={both}", f"ngram>draft_model>draft_model={both}"]
    return found


def settings_of(flags: argparse.Namespace, suite: str) -> Settings:
    drafts = _names(flags.draft_models)
    if len(drafts) > 2:
        raise InvalidInput(f"--draft-models names {len(drafts)} models; give one, or two, the smaller first")
    named = _names(flags.drafters) or contenders_of(flags.layers, drafts)
    return Settings(
        model=flags.model, suite=suite, tasks=_names(flags.tasks), setups=parse_setups(named), limit=flags.limit,
        max_tokens=flags.max_tokens, repeats=flags.repeats, dtype=flags.dtype, device=flags.device,
        threads=flags.threads,
    )  # fmt: skip


def table_of(result: Mapping[str, Any]) -> Iterator[str]:
    """One suite as lines of Markdown: a row for each drafter, a column for each task."""
    tasks = result["conditions"]["tasks"]
    yield "| drafter | all tasks | " + " | ".join(tasks) + " |"
    yield "|---" * (2 + len(tasks)) + "|"
    for name, by_task in result["by_task"].items():
        per_round = result["contenders"][name]["tokens_per_round"]
        whole = _cell({**result["speedup"][name], "tokens_per_round": per_round})
        yield f"| `{name}` | {whole} | " + " | ".join(_cell(by_task[task]) for task in tasks) + " |"


def comparisons(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Speed by task of one drafter over another: suffix over n-gram, and each cascade over itself less one level."""
    by_task = result["by_task"]
    pairs = [("suffix", "ngram"), *((name, part) for name in by_task for part in parts_of(name))]
    return {
        f"{one} / {other}": {
            task: round(cell["speedup"] / by_task[other][task]["speedup"], 3)
            for task, cell in by_task[one].items()
        }
        for one, other in pairs
        if one in by_task and other in by_task
    }


def parts_of(name: str) -> list[str]:
    """A cascade's name without one of its levels, each in turn; its files go with their levels, its budget stays."""
    drafters, _, files = name.partition("=")
    drafters, colon, nodes = drafters.partition(":")
    levels = drafters.split(">")
    if len(levels) < 2:
        return []
    given = iter(files.split(";"))
    pairs = [(level, "" if level in LOOKUPS else next(given, "")) for level in levels]
    found = []
    for i in range(len(pairs)):
        left = pairs[:i] + pairs[i + 1 :]
        kept = ";".join(file for _, file in left if file)
        found.append(">".join(level for level, _ in left) + colon + nodes + (f"={kept}" if kept else ""))
    return found


def _cell(found: Mapping[str, Any]) -> str:
    spread = Spread(found["speedup"], found["low"], found["high"])
    per_round = found["tokens_per_round"]
    return f"{spread}, {'-' if per_round is None else format(per_round, '.2f')}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def main(words: Sequence[str] | None = None) -> int:
    """Run every suite, print its table; 1 when a text differs, 2 for a user's error."""
    flags = parse(words)
    results: dict[str, Any] = {}
    try:
        suites = {suite: settings_of(flags, suite) for suite in _names(flags.suites)}
        for settings in suites.values():  # a mistake there shows before minutes are spent
            load_suite(settings.suite, settings.tasks, settings.limit)
        for suite, settings in suites.items():
            name = Path(suite).stem
            result = results[name] = run(settings, name="family")
            result["comparisons"] = comparisons(result)
            _show(name, result)
    except ForerunError as error:
        print(f"forerun: {error}", file=sys.stderr)
        return 2
    document = json.dumps({"benchmark": "family", "suites": results})
    if flags.json:
        flags.json.parent.mkdir(parents=True, exist_ok=True)
        flags.json.write_text(document + "\n", encoding="utf-8")
    print(document)
    return 0 if all(result["equal"] for result in results.values()) else 1


def _show(name: str, result: Mapping[str, Any]) -> None:
    facts = result["conditions"]
    busy = " (BUSY: ratios are noisy)" if facts["busy"] else ""
    print(
        f"\n{name}: {facts['model']}, {facts['cpu']}, {facts['threads']} threads, {facts['date']}, commit "
        f"{facts['commit']}, {facts['prompts']} prompts, {facts['max_tokens']} tokens, {facts['repeats']} repeats, "
        f"{facts['seconds']:.0f} s{busy}; x plain (95% interval), tokens per round\n"
    )
    print("\n".join(table_of(result)))
    for pair, ratios in result["comparisons"].items():
        print(f"\n{pair}: " + ", ".join(f"{task} {ratio:.2f}" for task, ratio in ratios.items()))


if __name__ == "__main__":
    sys.exit(main())
