"""The CPU benchmark: speed-up of drafting, against transformers and llama.cpp (`make bench-cpu`).

A preset of the general benchmark: transformers' `generate` and llama.cpp on the same file, each plain and with its own
prompt lookup; our loop without a drafter; our loop with each drafter, the controller deciding how much to draft; and
one with a fixed budget, to show what the controller gains. Greedy, batch 1, whole calls timed, all of them
alternating; every peer runs in a process of its own. Before that: t(n) in every number format, and how much of the
memory bandwidth a plain pass uses. Peers that cannot run, or crash, are left out, and a line says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from forerun.build.engine import choose_drafter
from forerun.cli.bench import words
from forerun.control.cost import CONTEXT, STRIDE, CostModel
from forerun.control.cost import SIZES as PASS_SIZES
from forerun.core import registry
from forerun.core.errors import InvalidInput
from forerun.core.params import SpeculativeConfig
from forerun.measure.bench import run as bench
from forerun.measure.bench.alternate import ContenderLost
from forerun.measure.bench.batches import SIZES, Setup, Sweep, parse_batches
from forerun.measure.bench.contenders import load
from forerun.measure.bench.figures import Spread
from forerun.measure.bench.run import tokenise
from forerun.measure.bench.settings import (
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
from forerun.measure.bench.suites import TASKS, load_suite
from forerun.measure.machine import SIZE, cores, is_busy, load_average, rate, weight_bytes
from forerun.measure.memory import resident
from forerun.measure.peers.llama_cpp import load_model
from forerun.measure.peers.process import PeerProcess
from forerun.measure.quality import MODES, load_mode
from forerun.measure.report import terminal
from forerun.measure.report.tables import figure_table, print_table
from forerun.measure.report.terminal import number, ratio, wide_console
from forerun.models.load import checkpoint as loading
from lab.batch_report import read_rival, say_row, show_batches
from lab.plots import plot
from lab.runner import Document, Run, picture, share

if TYPE_CHECKING:
    from forerun.core.params import Dtype


_WIDTH = 4096
METHODS = "the best of a copy (bytes read and written), a sum and a matrix by a vector (bytes read), 128 MiB float32"


def bandwidth(repeats: int = 5) -> dict[str, float]:
    source = torch.ones(SIZE // 4 // _WIDTH, _WIDTH)
    into, vector = torch.empty_like(source), torch.ones(_WIDTH)
    found = {
        "copy": rate(lambda: into.copy_(source), 2 * SIZE, repeats),
        "sum": rate(source.sum, SIZE, repeats),
        "matrix_by_vector": rate(lambda: torch.mv(source, vector), SIZE, repeats),
    }
    return {**found, "best": max(found.values())}


def measure_modes(model: str, gb_per_second: float, names: Sequence[Dtype] = MODES) -> dict[str, Any]:
    """t(n) of every format, the bytes a plain pass reads, and the share of the memory bandwidth that this is."""
    found: dict[str, Any] = {}
    for name in names:
        target = load_mode(loading.open_checkpoint(model), name)
        if isinstance(target, str):
            found[name] = {"t": None, "why_not": target}
            continue
        cost, read = CostModel.measure(target), weight_bytes(target)
        share = None if read is None else round(read / cost.pass_seconds(1) / 1e9 / gb_per_second, 3)
        curve = {str(size): round(seconds, 6) for size, seconds in cost.seconds.items()}
        found[name] = {"t": curve, "weight_bytes": read, "bandwidth_share": share}
    return found


def llama_cpp_seconds(
    file: str | Path, threads: int, sizes: Sequence[int] | None = None, repeats: int = 3
) -> dict[int, float]:
    """t(n) of llama.cpp, as ours is measured: n tokens behind a short context, logits of every row, best of a few."""
    sizes = sizes or PASS_SIZES
    model = load_model(file, CONTEXT + max(sizes) + 1, threads, all_logits=True)
    vocabulary = model.n_vocab()
    fastest = dict.fromkeys(sizes, float("inf"))
    model.eval([1] * CONTEXT)
    for repeat in range(repeats + 1):
        for size in sizes:
            model.n_tokens = CONTEXT  # what is beyond is dropped by the next call
            started = perf_counter()
            model.eval([(1 + STRIDE * i) % vocabulary for i in range(size)])
            if repeat:  # the first round warms up
                fastest[size] = min(fastest[size], perf_counter() - started)
    model.close()
    return fastest


def show_modes(result: Mapping[str, Any]) -> None:
    """What a CPU run adds: t(n) by number format, memory bandwidth, resident memory, and the named ratios."""
    console = wide_console()
    if LLAMA_CPP in result["by_task_vs_peers"]:
        print_table(console, _peer_table(result["by_task_vs_peers"][LLAMA_CPP], LLAMA_CPP))
    if "modes" in result:
        print_table(console, _mode_table(result["modes"]))
        for name, found in result["modes"].items():
            if found["t"] is None:
                console.print(f"{name} left out: {found['why_not']}")
        rates = ", ".join(f"{name} {rate:g}" for name, rate in result["bandwidth"]["gb_per_s"].items())
        console.print(f"Memory bandwidth in GB/s: {rates}.")
        held = result["memory"]
        console.print(
            f"A fresh process holds {held['above_torch_mb']:.0f} MB above the interpreter and torch once it has "
            f"written a text, {held['model_mb']:.0f} of them beyond imported code ({held['dtype']})."
        )
    wanted = (f"{PLAIN}_vs_{TRANSFORMERS}", f"{PLAIN}_vs_{LLAMA_CPP}", f"best_vs_{LLAMA_CPP}")
    for name in (*wanted, f"worst_drafter_vs_{PLAIN}", f"worst_task_vs_{PLAIN}"):
        console.print(f"{name}: {_named_ratio(result, name)}")


def _named_ratio(result: Mapping[str, Any], name: str) -> str:
    """A ratio of the document by its name, with its interval where that is known."""
    value = result["ratios"].get(name)
    low, high = result["intervals"].get(name) or (None, None)
    return "-" if value is None else str(Spread(value, low, high))


def _peer_table(columns: Mapping[str, Any], base: str) -> Table:
    """Our loop, plain and with every drafter, against a peer's plain one."""
    table = figure_table(f"By task: x {base} (95% interval)", "", *columns)
    for task in next(iter(columns.values())):
        table.add_row(task, *(ratio(column[task]) for column in columns.values()))
    return table


def _mode_table(modes: Mapping[str, Any]) -> Table:
    curves = {name: found["t"] for name, found in modes.items() if found["t"]}
    sizes = list(next(iter(curves.values()), {}))
    table = figure_table("t(n) in ms by number format; share of the memory bandwidth at n = 1", "", *sizes, "share")
    for name, curve in curves.items():
        share = modes[name].get("bandwidth_share")
        table.add_row(name, *(f"{1000 * curve[size]:.1f}" for size in sizes), number(share))
    return table


_LLAMA_CPP = "forerun.measure.peers.llama_cpp"
SPEC_BENCH = TASKS[:6]  # the tasks that others report
SHORT = {"limit": 1, "repeats": 2, "max_tokens": 48, "batches": "1,8"}  # within five minutes on two cores
FULL = {"limit": 2, "repeats": 3, "max_tokens": 64, "batches": ",".join(map(str, SIZES))}
LEAST_TEXTS = 8  # of a batch size


def add_flags(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, Settings()
    share(parser, model=defaults.model, dtype=defaults.dtype, draft_model=None, suite=None, threads=None)
    share(parser, drafters="auto,ngram", tasks=None, limit=None, max_tokens=None, repeats=None, batches=None)
    share(parser, plot=None)
    add("--pair", nargs=2, metavar=("TARGET", "DRAFT"), help="model and draft model in one")
    add("--budget", type=int, help="drafted nodes per round at most; default: what may pay")
    add("--full", action="store_true", help="more prompts, repeats and batch sizes: a quarter of an hour")
    add("--all-turns", action="store_true", help="answer the later turns of a chat too")
    add("--ignore-eos", action="store_true", help="write on after the end of the answer")
    add("--skip-transformers", action="store_true", help="leave transformers out")
    add("--skip-llama-cpp", action="store_true", help="leave llama.cpp out")
    add("--skip-modes", action="store_true", help="no t(n) by number format, no memory of a fresh process")
    add("--vllm", type=Path, metavar="FILE", help="another engine's figures by batch size, to show beside ours")
    add("--batch-plot", type=Path, metavar="PATH", help="draw tokens/s and time per token by batch size as PNG")
    add("--require-idle", action="store_true", help="refuse to measure on a busy machine")
    add("--out", type=Path, metavar="FOLDER", help="keep every round there; the same command resumes")


def settle(flags: argparse.Namespace) -> None:
    """What was not said: few prompts and batch sizes, or many with --full; Spec-Bench's six tasks."""
    for name, value in (FULL if flags.full else SHORT).items():
        if getattr(flags, name) is None:
            setattr(flags, name, value)
    flags.drafters = words(flags.drafters)
    flags.tasks = words(flags.tasks or "") or (() if flags.suite else SPEC_BENCH)
    flags.tasks = () if flags.tasks == ("all",) else flags.tasks


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
    return DrafterSetup("ngram_fixed", "ngram", max(1, flags.budget or FIXED_NODES))


def peers_of(flags: argparse.Namespace) -> tuple[str, ...]:
    found: tuple[str, ...] = () if flags.skip_transformers else (TRANSFORMERS, LOOKUP)
    return found if flags.skip_llama_cpp else (*found, LLAMA_CPP, *LLAMA_CPP_LOOKUPS)


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
            curve = process.call("lab.cpu:llama_cpp_seconds", file=str(file), threads=threads)
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


def measure_batches(settings: Settings, flags: argparse.Namespace) -> dict[str, Any]:
    """A row for every batch size and drafter; here a place in the batch is filled once, with eight texts at least."""
    sizes = parse_batches(flags.batches)
    llm, _ = load(settings)
    prompts = tokenise(llm, load_suite(settings.suite, settings.tasks, settings.limit, settings.model), settings)
    setups = {PLAIN: Setup("none")}
    setups |= {
        one.name: Setup(one.name if one.head is not None else one.drafter or llm.engine.default_drafter)
        for one in settings.setups
        if one.budget is None
    }
    sweep = Sweep(llm.engine, [prompt.ids for prompt in prompts], settings.max_tokens, ignore_eos=settings.ignore_eos)
    rows = sweep.measure(setups, sizes, lambda batch: max(LEAST_TEXTS, batch), say_row)
    return {"prompts": len(sweep.prompts), "default": llm.engine.default_drafter, "rows": rows}


def measure(run: Run) -> Document:
    flags = run.flags
    rival = [] if flags.vllm is None else read_rival(flags.vllm)
    warn_if_busy(flags.require_idle)
    settings = settings_of(flags)
    # a mistake there shows before minutes are spent
    load_suite(settings.suite, settings.tasks, settings.limit, settings.model)
    settings, left_out = without_llama_cpp(settings)
    formats: dict[str, Any] = {}
    if not flags.skip_modes:
        with Console(stderr=True).status("t(n) by number format"):
            formats = measure_formats(settings)
    result = bench.run(settings, flags.out, name="cpu", fixed=fixed_setup(flags).name)
    result["conditions"]["left_out"] |= left_out
    add_headline(result)
    if flags.batches:
        result["batches"] = measure_batches(settings, flags) | {"rival": [asdict(row) for row in rival]}
        result["equal"] = result["equal"] and not any(row["differing"] for row in result["batches"]["rows"])
    return result | formats


def show(result: Document, flags: argparse.Namespace) -> None:
    facts = result["conditions"]
    title = f"{facts['model']}, {facts['cpu']}, {facts['date'][:10]}, commit {facts['commit']}"
    if (file := picture(flags.plot)) is not None:
        plot(result, file)
    terminal.show(result)
    show_modes(result)
    if "batches" in result:
        show_batches(result["batches"], picture(flags.batch_plot), title)
