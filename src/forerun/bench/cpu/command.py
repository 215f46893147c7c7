"""The CPU benchmark: speed-up of drafting, against transformers and llama.cpp (`make bench-cpu`).

A preset of the general benchmark: transformers' `generate` and llama.cpp on the same file, each plain and with its own
prompt lookup; our loop without a drafter; our loop with each drafter, the controller deciding how much to draft; and
one with a fixed budget, to show what the controller gains. Greedy, batch 1, whole calls timed, all of them
alternating; every peer runs in a process of its own. Before that: t(n) in every number format, and how much of the
memory bandwidth a plain pass uses. Peers that cannot run, or crash, are left out, and a line says why. The last line
of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from forerun import registry
from forerun.bench.bandwidth import METHODS, bandwidth
from forerun.bench.batches.report import draw, table
from forerun.bench.batches.rival import read_rival
from forerun.bench.batches.sweep import SIZES
from forerun.bench.cpu.batches import measure_batches
from forerun.bench.cpu.memory import resident
from forerun.bench.cpu.modes import measure_modes
from forerun.bench.machine import cores, is_busy, load_average
from forerun.bench.measure import ContenderLost
from forerun.bench.peers.process import PeerProcess
from forerun.bench.report.terminal import show, show_modes
from forerun.bench.run import run
from forerun.bench.settings import (
    FIXED_NODES,
    LLAMA_CPP,
    LLAMA_CPP_LOOKUPS,
    LOOKUP,
    PLAIN,
    TRANSFORMERS,
    DrafterSetup,
    Settings,
    parse_setups,
)
from forerun.bench.suites import TASKS, load_suite
from forerun.build import choose_drafter
from forerun.errors import ForerunError, InvalidInput
from forerun.models.load import checkpoint as loading
from forerun.params import SpeculativeConfig

_LLAMA_CPP = "forerun.bench.peers.llama_cpp"
SPEC_BENCH = TASKS[:6]  # the tasks that others report
FULL = {"limit": 2, "repeats": 3, "max_tokens": 64}
QUICK = {"limit": 1, "repeats": 2, "max_tokens": 40}
QUICK_BATCHES = "1,8"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.cpu", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--model", default=defaults.model, help="known name, GGUF file, folder or hub id")
    add("--dtype", default=defaults.dtype, help="auto, gguf, q8, bfloat16 or float32")
    add("--draft-model", help="a second model to draft with; it must share the vocabulary")
    add("--pair", nargs=2, metavar=("TARGET", "DRAFT"), help="the two above in one")
    add("--drafters", type=names, default=("auto", "ngram"), help="by comma; eagle3=FOLDER brings a head")
    add("--budget", type=int, help="drafted nodes per round at most; default: what may pay")
    add("--suite", help="a JSONL file of prompts: Spec-Bench's, or your own chats; default: built in")
    add("--tasks", type=names, help="only these, by comma, or all; default: Spec-Bench's six")
    add("--quick", action="store_true", help="one prompt per task, two repeats, short texts: minutes")
    add("--limit", type=int, help=f"prompts per task; default: {FULL['limit']}")
    add("--max-tokens", type=int, help=f"new tokens per text at most; default: {FULL['max_tokens']}")
    add("--repeats", type=int, help=f"default: {FULL['repeats']}")
    add("--all-turns", action="store_true", help="answer the later turns of a chat too")
    add("--ignore-eos", action="store_true", help="write on after the end of the answer")
    add("--skip-transformers", action="store_true", help="leave transformers out")
    add("--skip-llama-cpp", action="store_true", help="leave llama.cpp out")
    add("--skip-modes", action="store_true", help="no t(n) by number format, no memory of a fresh process")
    add(
        "--batches",
        help="sequences at once, by comma; default: 1 to 128, with --quick 1,8; empty = no batch sweep",
    )
    add(
        "--vllm",
        type=Path,
        metavar="FILE",
        help="another engine's figures by batch size, to show beside ours",
    )
    add(
        "--batch-plot",
        type=Path,
        metavar="PATH",
        help="draw tokens/s and time per token by batch size as a PNG",
    )
    add("--threads", type=int, help="CPU threads; default: one per core")
    add("--require-idle", action="store_true", help="refuse to measure on a busy machine")
    add("--json", type=Path, metavar="PATH", help="write the JSON document there too")
    add("--out", type=Path, metavar="FOLDER", help="keep every round there; the same command resumes")
    add("--plot", type=Path, metavar="PATH", help="draw t(n), tokens/s and the speed-up by task as a PNG")
    flags = parser.parse_args(words)
    for name, value in (QUICK if flags.quick else FULL).items():
        if getattr(flags, name) is None:
            setattr(flags, name, value)
    if flags.batches is None:
        flags.batches = QUICK_BATCHES if flags.quick else ",".join(map(str, SIZES))
    if flags.tasks is None:
        flags.tasks = () if flags.suite else SPEC_BENCH
    elif flags.tasks == ("all",):
        flags.tasks = ()
    return flags


def names(text: str) -> tuple[str, ...]:
    """Names by comma."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def settings_of(flags: argparse.Namespace) -> Settings:
    """What the command line asks for: every drafter under the controller, and n-gram with a fixed budget."""
    model, draft = flags.pair or (flags.model, flags.draft_model)
    setups = (*parse_setups(drafters_of(flags.drafters, model, draft)), fixed_setup(flags))
    given = {name: getattr(flags, name) for name in Settings.__dataclass_fields__ if hasattr(flags, name)}
    given |= {"model": model, "draft_model": draft, "setups": setups, "device": "cpu", "batches": (1,)}
    return Settings(**given, peers=peers_of(flags))


def drafters_of(named: Sequence[str], model: str, draft: str | None) -> list[str]:
    """Those named, and those that run the second model given, or a head that comes with the package."""
    wish = SpeculativeConfig(drafter="ngram+eagle3" if draft is None else "auto", draft_model=draft)
    settled = choose_drafter(wish, loading.open_checkpoint(model))
    more: list[str] = []
    if settled.draft_model is not None:
        spec = registry.drafters.spec(settled.drafter)
        alone = next((member for member in spec.members if member.needs != "nothing"), spec)
        more = [alone.name, alone.best]
    return [*dict.fromkeys([*named, *more])]


def fixed_setup(flags: argparse.Namespace) -> DrafterSetup:
    """The contender that always drafts the whole budget."""
    return DrafterSetup("ngram_fixed", "ngram", max(1, flags.budget or FIXED_NODES))


def peers_of(flags: argparse.Namespace) -> tuple[str, ...]:
    """Those that were not left out on the command line."""
    found: tuple[str, ...] = () if flags.skip_transformers else (TRANSFORMERS, LOOKUP)
    lookups = [*LLAMA_CPP_LOOKUPS][: 1 if flags.quick else None]
    return found if flags.skip_llama_cpp else (*found, LLAMA_CPP, *lookups)


def without_llama_cpp(settings: Settings) -> tuple[Settings, dict[str, str]]:
    """The settings without llama.cpp where it cannot run, and why not, which is said once."""
    if LLAMA_CPP not in settings.peers:
        return settings, {}
    reason = why_not_llama_cpp(loading.open_checkpoint(settings.model).path)
    if reason is None:
        return settings, {}
    print(f"left out: {reason}", file=sys.stderr)
    peers = tuple(name for name in settings.peers if not name.startswith(LLAMA_CPP))
    return replace(settings, peers=peers), {LLAMA_CPP: reason}


def why_not_llama_cpp(file: Path) -> str | None:
    """Why llama.cpp cannot run this file here; asked in a process of its own, since importing it may end one."""
    try:
        with PeerProcess() as process:
            reason: str | None = process.call(f"{_LLAMA_CPP}:why_not", model=str(file))
            return reason
    except ContenderLost as lost:
        return f"llama.cpp: {lost}"


def llama_cpp_curve(file: Path, threads: int) -> dict[str, Any]:
    """t(n) of llama.cpp, measured in a process of its own; null and the reason where it crashes."""
    try:
        with PeerProcess() as process:
            curve = process.call(f"{_LLAMA_CPP}:pass_seconds", file=str(file), threads=threads)
    except ContenderLost as lost:
        return {"t": None, "why_not": str(lost)}
    return {"t": {size: round(spent, 6) for size, spent in curve.items()}}


def measure_formats(settings: Settings) -> dict[str, Any]:
    """t(n) by number format and of llama.cpp, memory bandwidth, and the memory of a fresh process."""
    threads = settings.threads or cores()
    torch.set_num_threads(threads)
    rates = bandwidth()
    found = {
        "bandwidth": {"way": METHODS, "gb_per_s": {name: round(rate, 1) for name, rate in rates.items()}},
        "modes": measure_modes(settings.model, rates["best"]),
        "memory": {"dtype": settings.dtype, **resident(settings.model, settings.dtype, threads)},
    }
    if LLAMA_CPP in settings.peers:
        file = loading.open_checkpoint(settings.model).path
        found["modes"][LLAMA_CPP] = llama_cpp_curve(file, threads)
    return found


def add_headline(result: dict[str, Any]) -> None:
    """The ratios that a reader looks for first, null where a contender was absent, and without prompts too."""
    rates = {name: figures["tokens_per_second"] for name, figures in result["contenders"].items()}
    theirs = [name for name in rates if name.startswith(LLAMA_CPP)]
    ours = list(result["speedup"])
    ratios, intervals = result["ratios"], result["intervals"]
    for name in (f"{PLAIN}_vs_{TRANSFORMERS}", f"{PLAIN}_vs_{LLAMA_CPP}", f"worst_drafter_vs_{PLAIN}"):
        ratios.setdefault(name, None)
    result["best"] = dict.fromkeys(("drafter", LLAMA_CPP))
    ratios[f"best_vs_{LLAMA_CPP}"] = None
    if ours:
        result["best"]["drafter"] = max(ours, key=rates.__getitem__)
    if ours and theirs:
        result["best"][LLAMA_CPP] = max(theirs, key=rates.__getitem__)
        pair = f"{result['best']['drafter']}_vs_{result['best'][LLAMA_CPP]}"
        ratios[f"best_vs_{LLAMA_CPP}"] = ratios[pair]
        intervals[f"best_vs_{LLAMA_CPP}"] = intervals[pair]
    decoding = {n: figures["decode_tokens_per_second"] for n, figures in result["contenders"].items()}
    result["decode_ratios"] = {
        f"{PLAIN}_vs_{base}": round(decoding[PLAIN] / decoding[base], 4)
        for base in (TRANSFORMERS, LLAMA_CPP)
        if decoding.get(base)
    }


def warn_if_busy(require_idle: bool) -> None:
    """Warn, or refuse, when other processes use the machine: they would affect the figures."""
    load, available = load_average(), cores()
    if not is_busy(load, available):
        return
    message = f"load average {load} on {available} cores: the machine is busy and ratios will be noisy"
    if require_idle:
        raise InvalidInput(f"{message}; wait, or drop --require-idle")
    print(f"warning: {message}", file=sys.stderr)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one document."""
    warn_if_busy(flags.require_idle)
    settings = settings_of(flags)
    # a mistake there shows before minutes are spent
    load_suite(settings.suite, settings.tasks, settings.limit)
    settings, left_out = without_llama_cpp(settings)
    formats: dict[str, Any] = {}
    if not flags.skip_modes:
        with Console(stderr=True).status("t(n) by number format"):
            formats = measure_formats(settings)
    result = run(settings, flags.out, name="cpu", fixed=fixed_setup(flags).name)
    result["conditions"]["left_out"] |= left_out
    add_headline(result)
    if flags.batches:
        result["batches"] = measure_batches(settings, flags)
        result["equal"] = result["equal"] and not any(row["differing"] for row in result["batches"]["rows"])
    return result | formats


def main(words: Sequence[str] | None = None) -> int:
    """Run, print tables and the JSON line; 1 when a text differs, 2 for a user's error."""
    flags = parse(words)
    try:
        rival = [] if flags.vllm is None else read_rival(flags.vllm)
        result = measure(flags)
        if flags.batch_plot and "batches" in result:
            flags.batch_plot.parent.mkdir(parents=True, exist_ok=True)
            facts = result["conditions"]
            title = f"{facts['model']}, {facts['cpu']}, {facts['date'][:10]}, commit {facts['commit']}"
            draw(result["batches"]["rows"], flags.batch_plot, title, rival)
        if flags.plot:
            from forerun.bench.report.plots import plot

            flags.plot.parent.mkdir(parents=True, exist_ok=True)
            plot(result, flags.plot)
    except ForerunError as error:
        print(f"forerun: {error}", file=sys.stderr)
        return 2
    show(result)
    show_modes(result)
    if "batches" in result:
        print(table(result["batches"]["rows"], rival))
    document = json.dumps(result)
    if flags.json:
        flags.json.parent.mkdir(parents=True, exist_ok=True)
        flags.json.write_text(document + "\n", encoding="utf-8")
    print(document)
    return 0 if result["equal"] else 1
