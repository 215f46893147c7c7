"""The picture of a run on a CPU: bars, whiskers and curves are those of the document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab import plots
from tests.measure.report.documents import clear_gain, one_prompt, result_of

pytest.importorskip("matplotlib")


@pytest.fixture
def axes() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, found = pyplot.subplots()
    yield found
    pyplot.close(figure)


def test_bars_are_as_high_as_the_speed_ups(axes: Any) -> None:
    result = clear_gain()
    plots._draw_tasks(axes, result["by_task"], result["conditions"]["tasks"])
    heights = [bar.get_height() for bar in axes.patches]
    wanted = [result["by_task"][way][task]["speedup"] for way in ("auto", "ngram:8") for task in ("qa", "rag")]
    assert heights == pytest.approx(wanted)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["qa", "rag"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["auto", "ngram:8"]


def test_whiskers_are_the_interval_cut_where_it_would_flatten_the_bars() -> None:
    assert plots.whisker({"speedup": 1.5, "low": 1.4, "high": 1.7}) == pytest.approx((0.1, 0.2))
    assert plots.whisker({"speedup": 1.5, "low": 0.01, "high": 300.0}) == pytest.approx((1.49, 1.5))
    assert plots.whisker({"speedup": 1.5, "low": None, "high": None}) == (0.0, 0.0)


def test_ours_and_theirs_are_told_apart(axes: Any) -> None:
    result = result_of({"transformers": [4.0, 4.0], "plain": [2.0, 2.0], "auto": [1.0, 1.0]})
    plots._draw_rates(axes, result["contenders"])
    widths, colours = [bar.get_width() for bar in axes.patches], [bar.get_facecolor() for bar in axes.patches]
    assert widths == pytest.approx([10.0, 20.0, 40.0])
    assert colours[0] != colours[1] == colours[2]


def test_curves_are_those_of_the_formats_or_of_the_one_that_ran(axes: Any) -> None:
    result = clear_gain()
    assert plots._curves(result) == {"gguf": result["t"]}
    result["modes"] = {"q8": {"t": {"1": 0.004, "2": 0.006}}, "gguf": {"t": None, "why_not": "absent"}}
    assert list(plots._curves(result)) == ["q8"]
    plots._draw_costs(axes, plots._curves(result))
    (line,) = axes.get_lines()
    assert list(line.get_xdata()) == [1, 2]
    assert list(line.get_ydata()) == pytest.approx([4.0, 6.0])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("result", [clear_gain(), one_prompt()], ids=["intervals", "none"])
def test_the_whole_picture_is_drawn(result: dict[str, Any], tmp_path: Path) -> None:
    plots.plot(result, tmp_path / "all.png")
    data = (tmp_path / "all.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000
