"""Training curves: read from the log, smoothed by a known mean, drawn where the numbers are."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from forerun.core.errors import InvalidInput
from forerun.train import curves
from forerun.train.curves import SMOOTH, draw, main, places, read_curve, smoothed
from tests.readme.pages import ROOT
from tools import runs
from tools.docs_figures import RACE, documents, figures, race
from tools.docs_pages import pages
from tools.docs_plots import plots


def run_folder(folder: Path, acceptances: Sequence[float], tested: dict[int, tuple[float, float]]) -> Path:
    """A run's log: acceptance at every step, tokens per round of chain and tree at some."""
    folder.mkdir()
    rows = []
    for step, acceptance in enumerate(acceptances):
        chain, tree = tested.get(step, (None, None))
        row = {"step": step, "acceptance": acceptance, "tokens_per_round": chain, "tree_tokens_per_round": tree}
        row |= {"tokens": 1000 * step, "trained_seconds": 30.0 * step}
        rows.append(json.dumps(row))
    (folder / "log.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def test_a_running_mean_starts_at_the_first_value_and_follows() -> None:
    assert smoothed([0.5]) == [pytest.approx(0.5)]
    assert smoothed([1.0, 0.0]) == [pytest.approx(1.0), pytest.approx(SMOOTH)]
    assert smoothed([0.25] * 10) == pytest.approx([0.25] * 10)
    assert smoothed([0.0, *[1.0] * 300])[-1] == pytest.approx(1.0, abs=1e-3)


def test_a_log_is_read_line_by_line(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "eagle3", [0.1, 0.2, 0.4], {2: (1.5, 2.5)})
    rows = read_curve(folder)
    assert [row["acceptance"] for row in rows] == [0.1, 0.2, 0.4]
    assert [row["tokens_per_round"] for row in rows] == [None, None, 1.5]


@pytest.mark.slow
def test_lines_are_where_the_numbers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    folders = [
        run_folder(tmp_path / "one", [0.1, 0.3], {0: (1.1, 1.4), 1: (1.6, 2.2)}),
        run_folder(tmp_path / "two", [0.2, 0.2], {1: (1.2, 1.3)}),
    ]
    draw(folders, tmp_path / "curves.png")
    monkeypatch.undo()
    (figure,) = kept
    left, right = figure.axes
    assert [line.get_label() for line in left.get_lines()] == ["one", "two"]
    assert list(left.get_lines()[0].get_ydata()) == pytest.approx(smoothed([0.1, 0.3]))
    chain, tree, second, _ = right.get_lines()
    assert (list(chain.get_xdata()), list(chain.get_ydata())) == ([0, 1], [1.1, 1.6])
    assert list(tree.get_ydata()) == [1.4, 2.2]
    assert list(second.get_xdata()) == [1], "steps that were not tested have no point"
    pyplot.close(figure)
    for by, unit in (("tokens", 1e-6), ("minutes", 1 / 60)):
        with monkeypatch.context() as patched:
            patched.setattr(pyplot, "close", kept.append)
            draw(folders, tmp_path / "curves.png", by)
        left, right = kept[-1].axes
        scale = {"tokens": 1000, "minutes": 30.0}[by] * unit
        assert list(left.get_lines()[0].get_xdata()) == pytest.approx([0, scale])
        assert list(right.get_lines()[2].get_xdata()) == pytest.approx([scale])
        assert by in left.get_xlabel()
        pyplot.close(kept[-1])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_says_where_the_picture_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(curves, "draw", lambda *given: drawn.append(given))
    main(["runs/a", "runs/b", "--by", "tokens", "--plot", str(tmp_path / "x.png")])
    assert drawn == [([Path("runs/a"), Path("runs/b")], tmp_path / "x.png", "tokens")]
    assert capsys.readouterr().out == f"{tmp_path / 'x.png'}\n"
    with pytest.raises(SystemExit):
        main(["runs/a"])


def test_a_log_without_tokens_is_plotted_by_steps_alone(tmp_path: Path) -> None:
    rows = [{"step": 3}, {"step": 4, "tokens": 8}]  # an old run that was resumed
    assert places(tmp_path, rows, "step") == [3, 4]
    assert places(tmp_path, rows[1:], "tokens") == pytest.approx([8e-6])
    with pytest.raises(InvalidInput, match=r"older version, without 'tokens'; use --by step"):
        places(tmp_path, rows, "tokens")


def test_a_race_has_minutes_and_tokens_of_every_run(tmp_path: Path) -> None:
    """Step 1 compiled: it counts as no more than three usual steps."""
    for name, seconds in (("quick", 30.0), ("slow", 60.0)):
        folder = tmp_path / name
        folder.mkdir()
        rows = [
            {"step": step, "seconds": 500.0 if step == 1 else seconds, "loss": 1.0, "lr": 0.1, "tokens_per_round": 1.5,
             "tokens": 300 * step, "tree_tokens_per_round": 2.0, "walked_tokens_per_round": 1.0 + step / 10}
            for step in range(5)
        ]  # fmt: skip
        (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        made = {"made": "2026-11-19T05:00:00", "commit": "abcdefghij", "parameters": 7, "device": "a card"}
        (folder / "provenance.json").write_text(json.dumps(made | {"versions": {"torch": "2.11.0"}}))
    runs.main(["race", str(tmp_path / "quick"), str(tmp_path / "slow"), "--out", str(tmp_path / "methods.json")])
    found = json.loads((tmp_path / "methods.json").read_text())
    assert [set(documents()["acceptance-heads"]) - set(found), found["commit"]] == [set(), "abcdefg"]
    quick, slow = found["tables"]["curve"]["rows"]
    assert quick["at0"] == {"minutes": 0.0, "tokens_per_round": 1.0}
    assert quick["at4"] == pytest.approx({"minutes": 0.5 * (3 + 3), "tokens_per_round": 1.4})
    assert slow["minutes"] == pytest.approx(3 + 3)
    text = figures("race/curve", known={"race": found})
    assert "| quick | 7 | 4 | 3.0 | 1,200 |" in text
    assert all(set(row) <= set(found["tables"]["curve"]["columns"]) for row in (quick, slow))


def test_a_race_has_a_section_and_a_plot_once_it_was_run() -> None:
    curves = {"dflash2": [1.0, 2.0, 3.25], "eagle3": [1.0, 2.5, 2.75], "medusa": [1.0, 1.5, 2.71]}
    rows = [
        {"method": method, "parameters": 7000, "steps": 40, "minutes": 1.0}
        | {f"at{i}": {"minutes": i / 2, "tokens_per_round": value} for i, value in enumerate(curve)}
        for method, curve in reversed(curves.items())
    ]
    facts = {"date": "2026-11-20", "commit": "abcdefg", "machine": "a card", "conditions": "Same texts."}
    known = {**documents(), RACE: {**facts, "tables": {"curve": {"rows": rows}}}}
    without = {name: found for name, found in documents().items() if name != RACE}
    text = race(known)
    assert "| method | parameters | steps | after 0.00 min | after 0.50 min | after 1.00 min |" in text
    methods = re.findall(r"^\| `(\w+)` \| 7,000 \| 40 \| 1.00 \| \S+ \| (\S+) \|$", text, re.MULTILINE)
    assert methods == [("dflash2", "3.25"), ("eagle3", "2.75"), ("medusa", "2.71")]
    assert (race(without), "`benchmarks/train-methods.json` (2026-11-20, abcdefg" in text) == ("", True)
    page = ROOT / "docs" / "train-a-drafter.md"
    assert ("## Methods at equal minutes" in pages(known)[page], "equal minutes" in pages(without)[page]) == (
        True,
        False,
    )
    (new,) = plots(known).keys() - plots(without).keys()
    assert f"(assets/{new.name})" in text
    drawn = ElementTree.fromstring(plots(known)[new])
    space = "{http://www.w3.org/2000/svg}"
    lines = [line.attrib["points"].split() for line in drawn.iter(f"{space}polyline")]
    heights = [[float(point.split(",")[1]) for point in line] for line in lines]
    assert all(line == sorted(line, reverse=True) for line in heights), "more tokens are higher"
    assert [line[-1] for line in heights] == sorted(line[-1] for line in heights)
    names = [(said.text, float(said.attrib["y"])) for said in drawn.iter(f"{space}text") if said.text in curves]
    assert [name for name, _ in names] == list(curves)
    flat = [
        row | {f"at{i}": {"minutes": i / 2, "tokens_per_round": 1.0} for i in range(3)} for row in rows
    ]  # nothing learnt yet
    assert plots({**known, RACE: {**facts, "tables": {"curve": {"rows": flat}}}})[new].count("<polyline") == 3
    assert all(below - above >= 14 for (_, above), (_, below) in pairwise(names)), "names do not cover each other"


def test_a_run_that_has_not_begun_has_learnt_for_no_time() -> None:
    assert runs.minutes_at([{"step": 0, "seconds": 9.0}]) == {0: 0.0}
    assert runs.minutes_at([{"step": 0, "seconds": 9.0}, {"step": 1, "seconds": 60.0}]) == {0: 0.0, 1: 1.0}
