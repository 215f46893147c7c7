"""What drafting gains on this CPU, against two yardsticks (`make bench-cpu`, python -m forerun.bench.cpu).

A preset of the general benchmark: transformers' `generate`, plain and with its own prompt lookup; our loop without
a drafter; our loop with each drafter, the controller deciding how much to draft; and one that drafts blindly, to
show what the controller is for. Greedy, float32, batch 1, whole calls timed. The last line of stdout is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from forerun.bench.machine import cores, is_busy, load_average
from forerun.bench.report import show
from forerun.bench.run import run
from forerun.bench.settings import LOOKUP, TRANSFORMERS, Settings, Way, ways_of
from forerun.errors import ForerunError, InvalidInput


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.cpu", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--model", default=defaults.model, help="known name, GGUF file, folder or hub id")
    add("--draft-model", help="a second model to draft with; it must share the vocabulary")
    add("--pair", nargs=2, metavar=("TARGET", "DRAFT"), help="the two above in one")
    add("--drafters", type=names, default=("ngram",), help="drafters to measure, by comma")
    add("--budget", type=int, default=defaults.budget, help="drafted nodes per round at most")
    add("--suite", help="a JSONL file of prompts: Spec-Bench's, or your own chats; default: built in")
    add("--tasks", type=names, default=(), help="only these tasks, by comma")
    add("--limit", type=int, default=defaults.limit, help="prompts per task")
    add("--max-tokens", type=int, default=defaults.max_tokens, help="new tokens per text at most")
    add("--repeats", type=int, default=defaults.repeats)
    add("--all-turns", action="store_true", help="answer the later turns of a chat too")
    add("--ignore-eos", action="store_true", help="write on after the end of the answer")
    add("--skip-transformers", action="store_true", help="compare with our plain loop only")
    add("--threads", type=int, help="CPU threads; default: one per core")
    add("--require-idle", action="store_true", help="refuse to measure on a busy machine")
    add("--json", type=Path, metavar="PATH", help="write the JSON document there too")
    add("--plot", type=Path, metavar="PATH", help="draw t(n) and the speed-up by task as a PNG")
    return parser.parse_args(words)


def names(text: str) -> tuple[str, ...]:
    """Names by comma."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def settings_of(flags: argparse.Namespace) -> Settings:
    """What the command line asks for: every drafter under the controller, and the first one blindly."""
    model, draft = flags.pair or (flags.model, flags.draft_model)
    drafters = [*dict.fromkeys([*flags.drafters, *(["draft_model"] if draft else [])])]
    ways = ways_of(drafters)
    if flags.drafters:
        ways = (*ways, Way(blind(flags), flags.drafters[0], max(1, flags.budget)))
    given = {name: getattr(flags, name) for name in Settings.__dataclass_fields__ if hasattr(flags, name)}
    given |= {"model": model, "draft_model": draft, "ways": ways, "dtype": "float32", "device": "cpu"}
    return Settings(**given, peers=() if flags.skip_transformers else (TRANSFORMERS, LOOKUP))


def blind(flags: argparse.Namespace) -> str:
    """The name of the contender that always drafts the whole budget."""
    return f"{flags.drafters[0]}_fixed" if flags.drafters else ""


def warn_if_busy(require_idle: bool) -> None:
    """Say, or refuse, when others are using the machine: the figures would be theirs as much as ours."""
    load, available = load_average(), cores()
    if not is_busy(load, available):
        return
    message = f"load average {load} on {available} cores: the machine is busy and ratios will be noisy"
    if require_idle:
        raise InvalidInput(f"{message}; wait, or drop --require-idle")
    print(f"warning: {message}", file=sys.stderr)


def main(words: Sequence[str] | None = None) -> int:
    """Run, print tables and the JSON line; 1 when a text differs, 2 for a user's error."""
    flags = parse(words)
    try:
        settings = settings_of(flags)
        warn_if_busy(flags.require_idle)
        result = run(settings, name="cpu", blind=blind(flags))
        if flags.plot:
            from forerun.bench.plots import plot

            plot(result, flags.plot)
    except ForerunError as error:
        print(f"forerun: {error}", file=sys.stderr)
        return 2
    show(result)
    document = json.dumps(result)
    if flags.json:
        flags.json.write_text(document + "\n", encoding="utf-8")
    print(document)
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
