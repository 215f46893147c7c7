"""The page: what is set in large type, which column comes first, what scrolls, and every count."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.flags import write_file
from forerun.core.errors import InvalidInput
from forerun.measure.report.html import render
from tests.measure.report.documents import clear_gain, no_clear_gain, one_prompt, result_of

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def body(page: str) -> str:
    return page[page.index("<main>") :]


def table(page: str, title: str) -> list[list[str]]:
    """The rows of the table under a heading, as plain texts."""
    part = page[page.index(f"<h2>{title}") :]
    part = part[: part.index("</table>")]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line, re.DOTALL) for line in part.split("<tr>")[1:]]
    return [[re.sub(r"<[^>]+>", "", cell).strip() for cell in cells] for cells in rows]


def test_a_clear_gain_is_set_in_large_type() -> None:
    page = body(render(clear_gain()))
    assert re.search(r'<div class="big">1\.50×</div>', page)
    assert 'class="unsure"' not in page


@pytest.mark.parametrize("result", [no_clear_gain(), one_prompt()], ids=["holds 1", "one prompt"])
def test_a_ratio_that_may_be_none_is_not(result: dict[str, Any]) -> None:
    page = body(render(result))
    assert 'class="big"' not in page
    assert 'class="unsure"' in page
    assert '<dd class="faint">' in page, "nor are the best and the worst task"


def test_bars_have_whiskers_where_there_is_an_interval_and_figures_are_faint_where_it_holds_1() -> None:
    page = body(render(clear_gain()))
    assert page.count("<u style=") == 4  # two tasks, two drafters
    assert "<span>1.46×</span>" in page
    assert "<span>1.54×</span>" in page
    assert re.search(r'<span class="faint">[01]\.\d\d×</span>', page), "ngram:8 gains nothing"
    single = body(render(one_prompt()))
    assert "<u style=" not in single
    assert "rests on one prompt" in single


def test_a_wide_interval_does_not_flatten_the_bars() -> None:
    page = body(render(result_of({"plain": [3.0, 3.0], "auto": [1.0, 2.9]}, tasks=("qa",))))
    width = float(re.search(r'<b class="k0" style="width:([\d.]+)%"', page).group(1))  # type: ignore[union-attr]
    assert width > 50
    for left, wide in re.findall(r'<u style="left:([\d.]+)%;width:([\d.]+)%"', page):
        assert float(left) + float(wide) <= 100


def test_the_column_that_matters_comes_first_and_tables_scroll() -> None:
    result = clear_gain()
    result["cells"].append(copy.deepcopy(result["cells"][0]) | {"batch": 2, "equal": None})
    page = render(result)
    assert table(page, "All contenders")[0] == ["", "over plain", "tokens/s", "decoding only", "tokens/round"]
    assert table(page, "All contenders")[1][:2] == ["plain", "1"]
    assert table(page, "By conditions")[0] == ["conditions", "auto", "ngram:8", "texts equal"]
    assert [row[-1] for row in table(page, "By conditions")[1:]] == ["yes", "law only"]
    assert body(page).count("<table") == body(page).count('<div class="wide"><table')
    assert ".wide { overflow-x: auto; }" in page
    sticky = re.search(r"table\.sticky th:first-child, .*?\{(.*?)\}", page, re.DOTALL)
    assert sticky is not None
    assert "position: sticky" in sticky.group(1)


def test_acceptance_has_its_counts_in_the_table_and_in_the_picture() -> None:
    page = render(clear_gain())
    rows = table(page, "Acceptance by position: counts")
    assert rows[0] == ["drafter", "1", "2", "3", "4"]
    assert rows[1] == ["auto", "0.67 (24 of 36)", "0.67 (24 of 36)", "1.00 (12 of 12)", "0.00 (0 of 12)"]
    assert "auto: 66.7% at 1, 24 of 36 trees" in page
    assert "Acceptance by position" not in render(result_of({"plain": [1.0, 2.0]}))


def test_contenders_carry_their_intervals_and_peers_their_ratio_to_our_plain_loop() -> None:
    result = result_of({"transformers": [8.0, 8.4, 7.6], "plain": [2.0] * 3, "auto": [1.0, 1.1, 0.9]})
    rows = {row[0]: row[1] for row in table(render(result), "All contenders")[1:]}
    low, high = result["intervals"]["auto_vs_plain"]
    assert rows["auto"] == f"2.00× ({low:.2f} to {high:.2f})"
    assert rows["transformers"].startswith("0.25× (0.2")


def test_what_models_write_is_escaped_and_nothing_is_fetched() -> None:
    page = render(clear_gain())
    assert "one &lt;b&gt;" in page
    assert not [word for word in ("http://", "https://", "src=", "@import", "url(") if word in page]


def test_the_warning_is_on_the_page_only_where_it_holds() -> None:
    assert 'class="warn"' in body(render(clear_gain(busy=True, load_before=3.0)))
    assert 'class="warn"' not in body(render(clear_gain()))


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    assert render(clear_gain()).startswith("<!doctype html>")
    with pytest.raises(InvalidInput, match="choose another --html"):
        write_file("--html", tmp_path / "absent" / "report.html", "")


MEASURE = """<!doctype html><body style="margin:0"><iframe style="width:{width}px;height:900px;border:0"></iframe>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  const page = frame.contentDocument, root = page.documentElement;
  const first = page.querySelector("table.sticky tr:nth-child(2) td:nth-child(2)").getBoundingClientRect();
  document.title = [root.scrollWidth, page.querySelector(".wide").scrollWidth > page.querySelector(".wide").clientWidth,
    Math.round(first.right)].join(" ");
}};
frame.srcdoc = {page};
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; install chromium to see the page in a browser")
@pytest.mark.parametrize("width", [400, 1200])
def test_in_a_browser_the_page_never_scrolls_sideways_and_its_tables_do(width: int, tmp_path: Path) -> None:
    file = tmp_path / "frame.html"
    page = json.dumps(render(clear_gain())).replace("</", "<\\/")
    file.write_text(MEASURE.format(width=width, page=page), encoding="utf-8")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom"]
    size = f"--window-size={width},900"
    done = subprocess.run(
        [str(BROWSER), *words, size, file.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    title = re.search(r"<title>(\d+) (true|false) (\d+)</title>", done.stdout)
    assert title is not None, done.stdout[:500]
    whole, scrolls, first = int(title.group(1)), title.group(2) == "true", int(title.group(3))
    assert whole <= width, "the page itself does not scroll"
    assert scrolls is (width == 400)
    assert first <= width, "the first figure is seen without scrolling"
