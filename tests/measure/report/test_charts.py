"""Line charts: where points land, what stands beside them, and round numbers on the axes."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from forerun.measure.report.html import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Dot, Line, ticks


def chart(*lines: Line, **more: object) -> ET.Element:
    drawn = Chart("A title", "across", lines, [1, 2, 4], [0, 1, 2], unit="×", **more)  # type: ignore[arg-type]
    return ET.fromstring(drawn.svg())


def places(root: ET.Element) -> list[tuple[float, float]]:
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter("circle")]


def test_points_land_where_the_axes_say() -> None:
    root = chart(Line("a", 0, [Dot(1, 0), Dot(4, 2)]))
    assert places(root) == [(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, TOP)]


def test_a_logarithmic_axis_puts_2_in_the_middle_of_1_and_4() -> None:
    ((straight, _),) = places(chart(Line("a", 0, [Dot(2, 1)])))
    ((logarithmic, _),) = places(chart(Line("a", 0, [Dot(2, 1)]), log_x=True))
    assert logarithmic == pytest.approx((LEFT + WIDTH - RIGHT) / 2)
    assert straight < logarithmic


def test_what_is_beyond_the_axis_stays_in_the_picture() -> None:
    (above, below) = places(chart(Line("a", 0, [Dot(1, 99), Dot(2, -99)])))
    assert above[1] == TOP
    assert below[1] == HEIGHT - BOTTOM


def test_intervals_are_drawn_where_they_are_known() -> None:
    root = chart(Line("a", 0, [Dot(1, 1, 0.5, 1.5), Dot(2, 1)]))
    whiskers = [line for line in root.iter("line") if line.attrib["class"] == "line c0"]
    assert len(whiskers) == 1
    low, high = float(whiskers[0].attrib["y1"]), float(whiskers[0].attrib["y2"])
    assert low - high == pytest.approx((HEIGHT - TOP - BOTTOM) / 2, abs=0.2)


def test_a_reference_line_has_no_points_and_the_mark_is_drawn() -> None:
    root = chart(Line("n passes", None, [Dot(1, 1), Dot(4, 2)]), mark=1.0)
    assert places(root) == []
    assert [line for line in root.iter("polyline") if "ref" in line.attrib["class"]]
    assert [line for line in root.iter("line") if line.attrib["class"] == "mark"]


def test_points_say_what_they_are_and_names_are_escaped() -> None:
    root = chart(Line("a<b", 0, [Dot(2, 0.5, note="3 of 6 trees"), Dot(4, 1)]))
    assert [title.text for title in root.iter("title")] == ["a<b: 0.5× at 2, 3 of 6 trees", "a<b: 1× at 4"]
    assert root.attrib["aria-label"] == "A title"


@pytest.mark.parametrize("highest", [0.03, 0.9, 1.2, 4.7, 30, 256, 4000])
def test_ticks_are_round_few_and_reach_beyond(highest: float) -> None:
    found = ticks(highest)
    assert found[0] == 0
    assert found[-1] >= highest - 1e-6
    assert 2 <= len(found) <= 8
    assert float(f"{found[1]:e}".partition("e")[0]) in (1, 2, 5)
