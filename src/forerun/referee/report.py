"""A run's report: as plain values for JSON, as JUnit for CI, as one HTML page with plots. Needs no library."""

from __future__ import annotations

import html
import math
import platform
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree as xml

from forerun.referee.suite import Report, Result

VERSION = 1  # of the JSON document
_MARKS = {"pass": "passed", "fail": "FAILED", "skip": "skipped"}


def as_document(report: Report) -> dict[str, Any]:
    return {
        "version": VERSION,
        "target": report.target,
        "passed": report.passed,
        "false_alarms": report.false_alarms,
        "budget": {"tokens": report.budget.tokens, "seconds": report.budget.seconds},
        "tokens": report.tokens,
        "seconds": round(report.seconds, 2),
        "command": report.command,
        "versions": {"python": platform.python_version(), **report.versions},
        "checks": [_check(each) for each in report.results],
    }


def _check(each: Result) -> dict[str, Any]:
    found = each.finding
    return {
        "name": each.name, "about": each.about, "status": found.status, "detail": found.detail,
        "p_value": found.p_value, "counterexample": found.counterexample or None, "command": found.command or None,
        "requests": each.requests, "tokens": each.tokens, "seconds": round(each.seconds, 3),
        "bars": [list(bar) for bar in found.bars], "trace": [list(point) for point in found.trace],
    }  # fmt: skip


def as_junit(report: Report) -> str:
    skipped = sum(each.status == "skip" for each in report.results)
    counts = {"tests": len(report.results), "failures": len(report.failed), "skipped": skipped}
    numbers = {name: str(value) for name, value in counts.items()} | {"time": f"{report.seconds:.3f}"}
    suites = xml.Element("testsuites", numbers)
    suite = xml.SubElement(suites, "testsuite", {"name": f"forerun verify {report.target}", **numbers})
    for each in report.results:
        group, _, name = each.name.partition(".")
        case = xml.SubElement(suite, "testcase", {"classname": group, "name": name, "time": f"{each.seconds:.3f}"})
        if each.status == "fail":
            xml.SubElement(case, "failure", {"message": _clean(each.finding.detail)}).text = _clean(told(each))
        elif each.status == "skip":
            xml.SubElement(case, "skipped", {"message": _clean(each.finding.detail)})
    xml.indent(suites)
    return xml.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _clean(text: str) -> str:
    """Without characters that XML cannot hold."""
    return "".join(c if c in "\t\n" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" else "?" for c in text)


def told(each: Result) -> str:
    """A failure in full: what, how sure, a counterexample, the command that shows it again."""
    found = each.finding
    lines = [f"{each.name}: {found.detail}"]
    if found.p_value is not None:
        lines.append(f"  p-value {found.p_value:.2g}")
    lines += [f"  {name}: {value!r}" for name, value in found.counterexample.items()]
    if found.command:
        lines.append(f"  again: {found.command}")
    return "\n".join(lines)


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;padding:0 1rem;color:#1b2328;background:#fff}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #dde3e6;
vertical-align:top}.pass{color:#0a7a4b}.fail{color:#b3261e;font-weight:600}.skip{color:#6b7780}
pre{background:#f3f6f7;padding:.7rem;overflow-x:auto;white-space:pre-wrap;overflow-wrap:anywhere}
td:nth-child(3),th:nth-child(3){white-space:nowrap}
figure{display:inline-block;margin:.5rem 1rem .5rem 0}figcaption{font-size:13px}
svg text{font:11px system-ui,sans-serif;fill:#43505a}
@media(prefers-color-scheme:dark){body{color:#dfe6ea;background:#14191c}td,th{border-color:#2c363c}
pre{background:#1f272b}svg text{fill:#aab6bd}.pass{color:#4cc38a}.fail{color:#ff8a80}}
"""


def as_html(report: Report) -> str:
    """One page that needs nothing else."""
    failed = report.failed
    rows = "".join(_row(each) for each in report.results)
    failures = "".join(f"<pre>{html.escape(told(each))}</pre>" for each in failed)
    limit = -math.log10(report.false_alarms / max(1, sum(bool(each.finding.trace) for each in report.results)))
    plots = "".join(_plots(each, limit) for each in report.results if each.finding.bars)
    parts = [
        f"<h1>forerun verify: {html.escape(report.target)}</h1>",
        f"<p class={'pass' if report.passed else 'fail'}>{html.escape(report.verdict)}</p>",
        f"<p>{report.tokens} tokens in {report.seconds:.0f} s. A right engine fails in at most "
        f"{report.false_alarms:g} of such runs, over all checks together.</p>",
        f"<h2>Failures</h2>{failures}" if failed else "",
        f"<h2>Checks</h2><table><tr><th>check<th>result<th>p-value<th>tokens<th>found</tr>{rows}</table>",
        f"<h2>Laws</h2><p>Left: how often the likeliest, second, ... symbol was sampled (bars) and was due (lines). "
        f"Right: evidence against the law in powers of ten, by tokens; the red line is a failure.</p>{plots}"
        if plots
        else "",
    ]
    title = f"<title>forerun verify: {html.escape(report.target)}</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}<style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _row(each: Result) -> str:
    p_value = "" if each.finding.p_value is None else f"{each.finding.p_value:.2g}"
    return (
        f"<tr><td title='{html.escape(each.about, quote=True)}'>{html.escape(each.name)}"
        f"<td class={each.status}>{_MARKS[each.status]}<td>{p_value}<td>{each.tokens}"
        f"<td>{html.escape(each.finding.detail)}</tr>"
    )


def _plots(each: Result, limit: float) -> str:
    drawn = _bars(each.finding.bars) + _trace(each.finding.trace, limit)
    return f"<figure>{drawn}<figcaption>{html.escape(each.name)}</figcaption></figure>"


def _bars(bars: Sequence[tuple[str, float, float]]) -> str:
    width, height, step = 260, 120, 30
    top = max([max(seen, due) for _, seen, due in bars] + [1e-9])
    parts = []
    for i, (label, seen, due) in enumerate(bars):
        x, tall, line = 10 + i * step, 100 * seen / top, 110 - 100 * due / top
        parts.append(f'<rect x="{x}" y="{110 - tall:.1f}" width="20" height="{tall:.1f}" fill="#3b9fa8"/>')
        parts.append(f'<path d="M{x - 3} {line:.1f}h26" stroke="#d9822b" stroke-width="2"/>')
        parts.append(f'<text x="{x + 7}" y="{height + 2}">{html.escape(label)}</text>')
    return _svg(width, height + 8, parts, "sampled and due, by rank")


def _trace(trace: Sequence[tuple[int, float]], limit: float) -> str:
    width, height = 260, 120
    if not trace:
        return ""
    points = [(tokens, log / math.log(10)) for tokens, log in trace if math.isfinite(log)]
    low, high = min([-2.0, *(y for _, y in points)]), max([limit + 1, *(y for _, y in points)])

    def place(tokens: float, y: float) -> str:
        return f"{10 + 240 * tokens / trace[-1][0]:.1f},{110 - 100 * (y - low) / (high - low):.1f}"

    line, alarm = " ".join(place(*point) for point in points), place(0, limit).split(",")[1]
    parts = [
        f'<path d="M10 {alarm}h240" stroke="#b3261e" stroke-dasharray="4 3"/>',
        f'<polyline points="{line}" fill="none" stroke="#3b9fa8" stroke-width="1.5"/>',
        f'<text x="10" y="122">0</text><text x="190" y="122">{trace[-1][0]} tokens</text>',
    ]
    return _svg(width, height + 8, parts, "evidence against the law, by tokens")


def _svg(width: int, height: int, parts: Sequence[str], label: str) -> str:
    opened = f'<svg role="img" aria-label="{label}" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    return f"{opened}{''.join(parts)}</svg>"
