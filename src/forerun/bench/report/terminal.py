"""The tables that a person reads in a terminal; the JSON line comes after them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from forerun.bench.settings import LLAMA_CPP, PLAIN, TRANSFORMERS
from forerun.bench.stats import Spread

WIDTH = 132  # columns of a table that is not on a terminal


def show(result: Mapping[str, Any]) -> None:
    """Print what a run came to."""
    console = _console()
    tables = [_speed_table(result), _task_table(result), _split_table(result), _cost_table(result["t"])]
    if len(result["cells"]) > 1:
        tables.append(_cell_table(result))
    for table in tables:
        console.print(table)
    total = sum(cell["compared"] for cell in result["cells"])
    wrong = sum(len(cell["differing"]) for cell in result["cells"])
    reference = result["conditions"]["reference"]
    console.print(f"Texts: {total - wrong} of {total} equal what {reference} wrote.")
    for name, found in result["equal_to_own_plain"].items():
        console.print(f"{name}: {found['equal']} of {found['texts']} texts equal those of {found['plain']}.")
    if any(cell["equal"] is None for cell in result["cells"]):
        console.print("Some cells promise the law, not the text, and were not compared.")


def show_modes(result: Mapping[str, Any]) -> None:
    """What a run on a CPU has besides: t(n) by number format, the memory's rate, memory, and the ratios to look for."""
    console = _console()
    if LLAMA_CPP in result["by_task_vs_peers"]:
        console.print(_peer_table(result["by_task_vs_peers"][LLAMA_CPP], LLAMA_CPP))
    if "modes" in result:
        console.print(_mode_table(result["modes"]))
        for name, found in result["modes"].items():
            if found["t"] is None:
                console.print(f"{name} left out: {found['why_not']}")
        rates = ", ".join(f"{name} {rate:g}" for name, rate in result["bandwidth"]["gb_per_s"].items())
        console.print(f"Memory gives, in GB/s: {rates}.")
        held = result["memory"]
        console.print(
            f"A fresh process holds {held['above_torch_mb']:.0f} MB above the interpreter and torch once it has "
            f"written a text, {held['model_mb']:.0f} of them beyond imported code ({held['dtype']})."
        )
    wanted = (f"{PLAIN}_vs_{TRANSFORMERS}", f"{PLAIN}_vs_{LLAMA_CPP}", f"best_vs_{LLAMA_CPP}")
    for name in (*wanted, f"worst_drafter_vs_{PLAIN}", f"worst_task_vs_{PLAIN}"):
        console.print(f"{name}: {number(result['ratios'].get(name))}")


def _peer_table(columns: Mapping[str, Any], base: str) -> Table:
    """Our loop, plain and with every drafter, against a peer's plain one."""
    table = _table(f"By task: x {base} (95% interval)", "", *columns)
    for task in next(iter(columns.values())):
        cells = [column[task] for column in columns.values()]
        table.add_row(task, *(str(Spread(cell["speedup"], cell["low"], cell["high"])) for cell in cells))
    return table


def _mode_table(modes: Mapping[str, Any]) -> Table:
    curves = {name: found["t"] for name, found in modes.items() if found["t"]}
    sizes = list(next(iter(curves.values()), {}))
    table = _table("t(n) in ms by number format; share of the memory's rate at n = 1", "", *sizes, "share")
    for name, curve in curves.items():
        share = modes[name].get("bandwidth_share")
        table.add_row(name, *(f"{1000 * curve[size]:.1f}" for size in sizes), number(share))
    return table


def _console() -> Console:
    wide = Console()
    return wide if wide.is_terminal else Console(width=WIDTH)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    return table


def _speed_table(result: Mapping[str, Any]) -> Table:
    bases = [name for name in (TRANSFORMERS, LLAMA_CPP, PLAIN) if name in result["contenders"]]
    columns = ("tokens/s", "decoding only", "tokens/round", *(f"x {base}" for base in bases))
    table = _table("All tasks", "", *columns)
    for name, figures in result["contenders"].items():
        keys = ("tokens_per_second", "decode_tokens_per_second", "tokens_per_round")
        cells = [number(figures[key]) for key in keys]
        table.add_row(name, *cells, *(_ratio_cell(result, name, base) for base in bases))
    return table


def _ratio_cell(result: Mapping[str, Any], name: str, base: str) -> str:
    key = f"{name}_vs_{base}"
    if key not in result["ratios"]:
        return "1.00" if name == base else ""
    return str(Spread(result["ratios"][key], *result["spread"][key]))


def _task_table(result: Mapping[str, Any]) -> Table:
    table = _table(f"By task: x {PLAIN} (95% interval), tokens/round", "", *result["by_task"])
    for task in result["conditions"]["tasks"]:
        table.add_row(task, *(_task_cell(column[task]) for column in result["by_task"].values()))
    return table


def _task_cell(cell: Mapping[str, Any]) -> str:
    return f"{Spread(cell['speedup'], cell['low'], cell['high'])}  {number(cell['tokens_per_round'])}"


def _split_table(result: Mapping[str, Any]) -> Table:
    parts = ("prompt", "draft", "target", "verify", "host")
    table = _table("Where the time goes, in percent; acceptance at depth 1, 2, 3, 4", "", *parts, "accepted")
    for name, figures in result["contenders"].items():
        if spent := figures["seconds"]:
            whole = sum(spent.values()) or 1.0
            accepted = " ".join(f"{share:.2f}" for share in figures["accepted_per_position"][:4])
            table.add_row(name, *(f"{100 * spent[part] / whole:.1f}" for part in parts), accepted or "-")
    return table


def _cell_table(result: Mapping[str, Any]) -> Table:
    table = _table(f"By conditions: x {PLAIN} (95% interval)", "", *result["by_task"], "texts equal")
    for cell in result["cells"]:
        spreads = [
            str(Spread(found["speedup"], found["low"], found["high"])) for found in cell["speedup"].values()
        ]
        name = f"{cell['verifier']}, temperature {cell['temperature']:g}, batch {cell['batch']}"
        equal = {True: "yes", False: "no", None: "in law"}[cell["equal"]]
        table.add_row(name, *spreads, equal)
    return table


def _cost_table(curve: Mapping[str, float]) -> Table:
    table = _table("t(n): one pass over n nodes", "n", *curve)
    table.add_row("ms", *(f"{1000 * seconds:.1f}" for seconds in curve.values()))
    table.add_row("t(n)/t(1)", *(f"{seconds / curve['1']:.2f}" for seconds in curve.values()))
    return table


def number(value: float | None) -> str:
    """Two decimals, or a dash for what is not known."""
    return "-" if value is None else f"{value:.2f}"
