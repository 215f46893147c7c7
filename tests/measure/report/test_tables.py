"""No figure of a table is cut off, however narrow the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from forerun.measure.report.tables import print_line, print_table

SIZES = ("1", "2", "4", "8", "16", "32")


def made() -> Table:
    table = Table(title="Predicted speed-up", box=None)
    for header in ("", *SIZES):
        table.add_column(header, justify="right")
    for drafter in ("ngram", "suffix"):
        table.add_row(drafter, *(f"1.{size} (0.98-1.57)" for size in SIZES))
    return table


def printed(width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    print_table(console, made())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [120, 60, 30])
def test_every_figure_is_whole(width: int) -> None:
    text = printed(width)
    assert "…" not in text
    assert all(text.count(f"1.{size} (0.98-1.57)") == 2 for size in SIZES)


def test_a_table_that_is_too_wide_is_turned() -> None:
    wide, narrow = printed(200).splitlines(), printed(60).splitlines()
    assert len(wide) == 2 + 2  # title and header, two drafters
    assert len(narrow) == 2 + len(SIZES)
    assert max(map(len, narrow)) <= 60
    assert narrow[1].split() == ["ngram", "suffix"]


def test_a_row_is_a_list_where_neither_form_fits() -> None:
    lines = printed(25).splitlines()
    assert max(map(len, lines)) <= 25
    assert lines[2:4] == ["ngram", "  1: 1.1 (0.98-1.57)"]


def test_sentences_wrap_between_words_and_commands_do_not() -> None:
    sentence, command = ("The default would draft with ngram here. " * 3, "Here: forerun generate --model " + "m" * 70)
    for terminal in (True, False):
        console = Console(width=40, file=io.StringIO(), force_terminal=terminal)
        print_line(console, sentence.strip())
        print_line(console, command)
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert lines[-1] == command
        assert (len(lines) > 2) is terminal
        assert " ".join(line.strip() for line in lines[:-1]) == sentence.strip()


def test_the_usual_way_of_printing_would_cut_figures_off() -> None:
    console = Console(width=60, file=io.StringIO())
    console.print(made())
    assert isinstance(console.file, io.StringIO)
    assert "1.32 (0.98-1.57)" not in console.file.getvalue()
