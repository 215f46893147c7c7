"""What drafting gains on this CPU, against two yardsticks (`make bench-cpu`, python -m forerun.bench.cpu).

In one process, on the same weights and prompts, alternating: transformers' `generate`, plain and with its own
prompt lookup; our loop without a drafter; our loop with each drafter, the controller deciding how much to
draft; and one that drafts blindly, to show what the controller is for. Greedy, float32, batch 1, whole calls
timed. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forerun import registry
from forerun.bench.machine import cores, is_busy, load_average, machine_facts
from forerun.bench.measure import Contender, Prompt, Run, Written, alternate, differences, warm_up
from forerun.bench.report import Ledger, show, summarise
from forerun.bench.suites import Item, load_suite
from forerun.build import check_vocabulary, load_target, make_engine
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.errors import ForerunError, InvalidInput
from forerun.llm import LLM
from forerun.params import EngineConfig, SamplingParams, SpeculativeConfig

PLAIN, TRANSFORMERS, LOOKUP = "plain", "transformers", "transformers_lookup"
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run."""

    model: str = "smollm2"
    draft_model: str | None = None
    drafters: tuple[str, ...] = ("ngram",)
    budget: int = 8
    suite: str | None = None  # a JSONL file; None = built in
    tasks: tuple[str, ...] = ()  # () = all
    limit: int | None = 2  # prompts per task; None = all
    max_tokens: int = 64
    repeats: int = 2
    all_turns: bool = False
    ignore_eos: bool = False
    skip_transformers: bool = False
    threads: int | None = None  # None = one per core

    def __post_init__(self) -> None:
        for name in ("repeats", "max_tokens", "budget"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name}={getattr(self, name)} measures nothing; use 1 or more")
        for name in self.drafters:
            registry.drafters.get(name)

    @property
    def blind(self) -> str:
        """The contender that always drafts the whole budget."""
        return f"{self.drafters[0]}_fixed" if self.drafters else ""


def run(settings: Settings) -> dict[str, Any]:
    """Load everything, measure, and hand back the JSON document."""
    items = load_suite(settings.suite, settings.tasks, settings.limit)
    load = load_average()  # before our own loading adds to it
    torch.set_num_threads(settings.threads or cores())
    with Console(stderr=True).status(f"loading {settings.model}"):
        llm, contenders = load_contenders(settings)
    return measure(llm, contenders, items, settings, load)


def load_contenders(settings: Settings) -> tuple[LLM, list[Contender]]:
    """Our engine and its rivals around one checkpoint; t(n) is measured anew, whatever was kept."""
    from forerun.models.load.checkpoint import open_checkpoint

    config = EngineConfig(dtype="float32", device="cpu")
    checkpoint = open_checkpoint(settings.model)
    draft = None
    if settings.draft_model is not None:
        small = open_checkpoint(settings.draft_model)
        check_vocabulary(checkpoint, small)
        draft = load_target(small, config)
    tokenizer = checkpoint.tokenizer()
    speculative = SpeculativeConfig(draft_model=settings.draft_model, budget=settings.budget)
    target = load_target(checkpoint, config)
    engine = make_engine(target, tokenizer.eos_ids, speculative, config, tokenizer, draft)
    llm = LLM(engine, tokenizer, settings.model)
    rivals = []
    if not settings.skip_transformers:
        from forerun.bench.peers import LOOKUP_TOKENS, load_transformers_model, transformers_contender

        eos_ids = frozenset() if settings.ignore_eos else tokenizer.eos_ids
        model = load_transformers_model(checkpoint, eos_ids, torch.float32)
        rivals.append(transformers_contender(TRANSFORMERS, model))
        rivals.append(transformers_contender(LOOKUP, model, prompt_lookup_num_tokens=LOOKUP_TOKENS))
    return llm, [*rivals, *own_contenders(llm, settings)]


def own_contenders(llm: LLM, settings: Settings) -> list[Contender]:
    """Our loop: plain, with every drafter under the controller, and with the first one drafting blindly."""
    names = [*settings.drafters, *(["draft_model"] if settings.draft_model else [])]
    ours = [_contender(llm, PLAIN, "none", settings)]
    ours += [_contender(llm, name, name, settings) for name in dict.fromkeys(names)]
    if settings.blind:
        ours.append(_contender(llm, settings.blind, settings.drafters[0], settings, settings.budget))
    return ours


def _contender(llm: LLM, name: str, drafter: str, settings: Settings, budget: int | None = None) -> Contender:
    spent = llm.engine.stats.seconds  # by part of a round; prompts are prefilled outside of it

    def write(ids: Sequence[int], max_tokens: int) -> Written:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=settings.ignore_eos)
        before, started = sum(spent.values()), perf_counter()
        text = llm.generate(list(ids), params, drafter=drafter, budget=budget)
        seconds = perf_counter() - started
        return Written(text.token_ids, seconds, text.rounds, sum(spent.values()) - before)

    return Contender(name, write)


def measure(
    llm: LLM,
    contenders: Sequence[Contender],
    items: Sequence[Item],
    settings: Settings,
    load_before: float | None = None,
) -> dict[str, Any]:
    """Alternate over the prompts and sum up."""
    facts = machine_facts()
    controller = llm.engine.controller
    known = controller.cost if isinstance(controller, AdaptiveController) else None
    cost = known or CostModel.measure(llm.engine.target)
    curve = {
        str(size): round(seconds, 6) for size, seconds in cost.seconds.items()
    }  # before rounds correct it
    prompts = tokenise(llm, items, settings)
    warm_up(contenders, prompts[0], min(WARM_UP_TOKENS, settings.max_tokens))
    started = perf_counter()
    runs = _with_progress(contenders, prompts, settings)
    ledger = Ledger(runs)
    found = differences(runs, contenders)
    conditions = {
        **facts,
        **asdict(settings),
        "threads": torch.get_num_threads(),
        "tasks": ledger.tasks,
        "dtype": "float32",
        "sampling": "greedy",
        "batch": 1,
        "timed": "whole calls, prompt included; drafters keep what they learnt between prompts",
        "reference": contenders[0].name,
        "prompts": len(prompts),
        "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),
        "load_before": load_before,
        "load_after": load_average(),
        "busy": is_busy(load_before, facts["cores"]),
        "seconds": round(perf_counter() - started, 1),
    }
    return {
        "benchmark": "cpu",
        "t": curve,
        **summarise(ledger, contenders, found, PLAIN, settings.blind),
        "conditions": conditions,
    }


def tokenise(llm: LLM, items: Sequence[Item], settings: Settings) -> list[Prompt]:
    """Prompts as tokens; later turns, if asked for, follow on the answer of our plain loop, untimed."""
    prompts = []
    for item in items:
        messages = [dict(message) for message in item.messages]
        later = item.later_turns if settings.all_turns else ()
        prompts.append(Prompt(item.id, item.task, _ids(llm, messages)))
        for number, turn in enumerate(later, start=2):
            params = SamplingParams(max_tokens=settings.max_tokens)
            answer = llm.generate(list(prompts[-1].ids), params, drafter="none").text
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
            prompts.append(Prompt(f"{item.id}/{number}", item.task, _ids(llm, messages)))
    return prompts


def _ids(llm: LLM, messages: list[dict[str, str]]) -> tuple[int, ...]:
    if llm.tokenizer.has_chat_template:
        return llm.encode(messages)
    return llm.encode("\n\n".join(message["content"] for message in messages))


def _with_progress(
    contenders: Sequence[Contender], prompts: Sequence[Prompt], settings: Settings
) -> list[Run]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    total = len(contenders) * len(prompts) * settings.repeats
    runs = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("texts", total=total)
        for done in alternate(contenders, prompts, settings.max_tokens, settings.repeats):
            runs.append(done)
            progress.update(bar, advance=1, description=f"{done.task}: {done.contender}")
    return runs


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
    add("--drafters", type=_names, default=defaults.drafters, help="drafters to measure, by comma")
    add("--budget", type=int, default=defaults.budget, help="drafted nodes per round at most")
    add("--suite", help="a JSONL file of prompts: Spec-Bench's, or your own chats; default: built in")
    add("--tasks", type=_names, default=(), help="only these tasks, by comma")
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


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def settings_of(flags: argparse.Namespace) -> Settings:
    """What the command line asks for."""
    model, draft = flags.pair or (flags.model, flags.draft_model)
    given = {name: getattr(flags, name) for name in Settings.__dataclass_fields__ if hasattr(flags, name)}
    return Settings(**{**given, "model": model, "draft_model": draft})


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
        result = run(settings)
        if flags.plot:
            from forerun.bench.plots import plot

            plot(result, flags.plot)
    except ForerunError as error:
        print(f"forerun: {error}", file=sys.stderr)
        return 2
    show(result, PLAIN)
    document = json.dumps(result)
    if flags.json:
        flags.json.write_text(document + "\n", encoding="utf-8")
    print(document)
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
