"""Benchmark results as terminal tables; the JSON line comes after them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.measure.bench.figures import CONTEXTS, Spread
from forerun.measure.bench.settings import LLAMA_CPP, PLAIN, TRANSFORMERS
from forerun.measure.report import summary
from forerun.measure.report.tables import figure_table, print_line, print_table

WIDTH = 132  # columns of a table that is not on a terminal
DEPTHS = 6  # of the acceptance table; the document and the page have all


def show(result: Mapping[str, Any]) -> None:
    """Print a run's result: the sentences that the page prints, then the tables."""
    console = wide_console()
    if (said := summary.headline(result)) is not None:
        is_clear = summary.spread_of(next(iter(result["speedup"].values()))).is_clear
        console.print(said, style="bold" if is_clear else None, soft_wrap=not console.is_terminal)
    if (warning := summary.busy_warning(result["conditions"])) is not None:
        console.print(f"Warning: {warning}", style="red", soft_wrap=not console.is_terminal)
    tables = [_speed_table(result), _task_table(result), _split_table(result), _cost_table(result["t"])]
    if any(result["contenders"][name]["accepted_counts"] for name in summary.drafters_of(result)):
        tables.insert(3, _acceptance_table(result))
    if any(result["contenders"][name].get("by_context") for name in summary.drafters_of(result)):
        tables.insert(4, _context_table(result))
    if len(result["cells"]) > 1:
        tables.append(_cell_table(result))
    for table in tables:
        print_table(console, table)
    for line in _closing_lines(result):
        print_line(console, line)


def _closing_lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"Texts: {summary.equality(result)}"
    for name, found in result["equal_to_own_plain"].items():
        yield f"{name}: {found['equal']} of {found['texts']} texts equal those of {found['plain']}."
    if summary.drafters_of(result) and any(cell["equal"] is None for cell in result["cells"]):
        yield "Some cells guarantee the law, not the text, and were not compared."
    yield summary.INTERVALS
    yield from summary.notes(result)  # warnings again, below the tables


def wide_console() -> Console:
    wide = Console()
    return wide if wide.is_terminal else Console(width=WIDTH)


def _speed_table(result: Mapping[str, Any]) -> Table:
    """Ratios come first: they compare within a run, speeds do not compare between runs."""
    bases = [name for name in (PLAIN, TRANSFORMERS, LLAMA_CPP) if name in result["contenders"]]
    columns = (*(f"x {base}" for base in bases), "tokens/s", "decoding only", "tokens/round")
    table = figure_table("All tasks; x plain: times the speed of our plain loop (95% interval)", "", *columns)
    for name, figures in result["contenders"].items():
        keys = ("tokens_per_second", "decode_tokens_per_second", "tokens_per_round")
        ratios = [_ratio_cell(result, name, base) for base in bases]
        table.add_row(name, *ratios, *(number(figures[key]) for key in keys))
    return table


def _ratio_cell(result: Mapping[str, Any], name: str, base: str) -> Text | str:
    found = summary.ratio_over(result, name, base)
    if found is None or name == base:
        return "" if found is None else "1.00"
    return _shown(found)


def ratio(cell: Mapping[str, Any]) -> Text:
    return _shown(summary.spread_of(cell))


def _shown(found: Spread) -> Text:
    """A ratio and its interval; what is not clearly a gain or a loss is dim."""
    return Text(str(found), style="" if found.is_clear else "dim")


def _task_table(result: Mapping[str, Any]) -> Table:
    table = figure_table(f"By task: x {PLAIN} (95% interval), tokens/round", "", *result["by_task"])
    for task in result["conditions"]["tasks"]:
        cells = [column[task] for column in result["by_task"].values()]
        table.add_row(task, *(ratio(cell).append(f"  {number(cell['tokens_per_round'])}") for cell in cells))
    return table


def _split_table(result: Mapping[str, Any]) -> Table:
    parts = ("prompt", "draft", "pass", "verdict", "host")
    table = figure_table("Where the time goes, in percent", "", *parts)
    for name, figures in result["contenders"].items():
        if spent := figures["seconds"]:
            whole = sum(spent.values()) or 1.0
            table.add_row(name, *(f"{100 * spent[part] / whole:.1f}" for part in parts))
    return table


def _acceptance_table(result: Mapping[str, Any]) -> Table:
    """Shares with their counts: 1.00 of two trees says nothing."""
    cells = {name: summary.accepted_cells(result, name)[:DEPTHS] for name in summary.drafters_of(result)}
    depths = range(1, 1 + max(map(len, cells.values()), default=0))
    table = figure_table("Acceptance by depth: share (accepted of drafted)", "", *map(str, depths))
    for name, row in cells.items():
        table.add_row(name, *(row or ["-"]))
    return table


def _context_table(result: Mapping[str, Any]) -> Table:
    found = {name: result["contenders"][name].get("by_context") or {} for name in summary.drafters_of(result)}
    ranges = list(CONTEXTS.values())
    columns = sorted({one for cells in found.values() for one in cells}, key=ranges.index)
    table = figure_table("By context length: tokens/round, acceptance at depth 1", "", *columns)
    for name, cells in found.items():
        table.add_row(name, *(_context_cell(cells.get(column)) for column in columns))
    return table


def _context_cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    kept, drafted = cell["accepted_counts"]
    share = f"{kept / drafted:.2f} ({kept} of {drafted})" if drafted else "nothing drafted"
    return f"{cell['tokens_per_round']:.2f}  {share}"


def _cell_table(result: Mapping[str, Any]) -> Table:
    table = figure_table(f"By conditions: x {PLAIN} (95% interval)", "", *result["by_task"], "texts equal")
    for cell in result["cells"]:
        name = f"{cell['verifier']}, temperature {cell['temperature']:g}, batch {cell['batch']}"
        equal = {True: "yes", False: "no", None: "in law"}[cell["equal"]]
        table.add_row(name, *map(ratio, cell["speedup"].values()), equal)
    return table


def _cost_table(curve: Mapping[str, float]) -> Table:
    table = figure_table("t(n): one pass over n nodes", "n", *curve)
    table.add_row("ms", *(f"{1000 * seconds:.1f}" for seconds in curve.values()))
    table.add_row("t(n)/t(1)", *(f"{seconds / curve['1']:.2f}" for seconds in curve.values()))
    return table


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
