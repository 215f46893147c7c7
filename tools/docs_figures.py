"""Tables of measured figures, rendered from the result documents in `benchmarks/`.

A document is one run: the question, command, commit, date, machine, conditions, and tables of numbers. A cell is a
number, a text, `[value, low, high]` for a value with its interval (other lists hold repeats), or a mapping such as
`{"x": 1.2, "tokens_per_round": 1.5}`. `python -m tools.docs_pages` puts the tables between the markers of the pages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tools.docs_supported import table

FOLDER = Path(__file__).parents[1] / "benchmarks"
Documents = Mapping[str, Mapping[str, Any]]
_TASKS = (
    "multi_turn", "translation", "summarization", "qa", "math", "math_reasoning", "rag", "code_edit", "structured",
    "open_chat", "long_answer", "short_answer",
)  # fmt: skip


@cache
def documents() -> Documents:
    """Every result document by its name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def number(value: float, form: str) -> str:
    """A number in the format of its column: `.2fx` has two digits and an x, `,d` commas. Halves are rounded up."""
    spec, unit = re.fullmatch(r"([+,]*(?:\.\d+f|d)?)(.*)", form).groups()  # type: ignore[union-attr]
    if not spec:
        return f"{value}{unit}"
    places = int(re.sub(r"\D", "", spec) or 0)
    rounded = Decimal(str(value)).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)
    return f"{rounded:{'+' if '+' in spec else ''}{',' if ',' in spec else ''}}{unit}"


def cell(value: Any, form: str = "") -> str:
    """One cell of a table as Markdown."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(cell(part, ".2f") for part in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        plain = form.rstrip("x")
        if len(value) == 3 and value[1] <= value[0] <= value[2]:
            return f"{number(value[0], form)} ({number(value[1], plain)}-{number(value[2], plain)})"
        return ", ".join(number(each, form) for each in value)
    return value if isinstance(value, str) else number(value, form)


def figures(name: str, keys: str = "", known: Documents | None = None) -> str:
    """A table of one document, `DOCUMENT/TABLE`, with all of its columns or those named."""
    document, _, part = name.partition("/")
    found = (known or documents())[document]["tables"][part]
    columns: dict[str, list[str]] = found["columns"]
    wanted = keys.split(",") if keys else list(columns)
    rows = [
        [cell(row.get(key), columns[key][1] if len(columns[key]) > 1 else "") for key in wanted]
        for row in found["rows"]
    ]
    return table([columns[key][0] for key in wanted], rows) + sources(found_in=document, known=known)


def sources(*more: str, found_in: str, known: Documents | None = None) -> str:
    """The line below a table: which documents it comes from, with date, commit and machine."""
    found = known or documents()
    said = [
        f"`benchmarks/{name}.json` ({found[name]['date']}, {found[name]['commit']}; {found[name]['machine']})"
        for name in (found_in, *more)
    ]
    return "\n\nFrom " + ", ".join(said) + "."


def row_of(document: str, part: str, known: Documents, **wanted: Any) -> Mapping[str, Any]:
    """The row of a table whose cells are these."""
    rows: list[Mapping[str, Any]] = known[document]["tables"][part]["rows"]
    return next(row for row in rows if all(row.get(key) == value for key, value in wanted.items()))


SPEC_BENCH, BUILT_IN = "Spec-Bench, open half", "built-in suite"


class Gain(NamedTuple):
    """What the default gains over plain decoding, greedy, on a real model."""

    model: str
    machine: str
    prompts: str
    plain: float  # tokens per second
    row: Mapping[str, Any]  # by task


def gains(known: Documents) -> list[Gain]:
    """Every real model and machine: Spec-Bench's open half first, the built-in suite beside it."""
    arm = dict(row_of("cpu-arm-135m", "by_task", known, drafter="auto"))
    arm["all"] = row_of("cpu-arm-135m", "over_prompts", known, drafter="auto")["all"]
    plain = [row["tokens_per_second"] for row in known["cpu-arm-135m"]["tables"]["plain"]["rows"]]
    small, qwen, card = "SmolLM2 135M, Q4_1", "Qwen2.5-Coder 1.5B, Q4_K_M", "Qwen2.5-Coder 1.5B, bf16"
    default = "auto (the default: both)"

    def on_card(suite: str, document: str, drafter: str) -> Gain:
        rate = row_of(document, "rates", known, setup="plain")["tokens_per_second"]
        return Gain(card, "one H200", suite, rate, row_of(document, "by_task", known, drafter=drafter))

    def on_spec_bench(model: str) -> Gain:
        row = row_of("cpu-x86-spec-bench", "by_task", known, model=model)
        return Gain(model, "two x86 cores (no AMX)", SPEC_BENCH, row["plain"], row)

    def of_qwen(machine: str, document: str) -> Gain:
        rate = row_of(document, "by_task", known, drafter="plain")["tokens_per_second"]
        return Gain(qwen, machine, BUILT_IN, rate, row_of(document, "by_task", known, drafter=default))

    rate = known["cpu-x86-135m"]["tables"]["plain"]["rows"][0]["tokens_per_second"]
    return [
        on_card(SPEC_BENCH, "h200-qwen-1.5b-spec-bench", "T=0, first run, the default alone"),
        on_card(BUILT_IN, "h200-qwen-1.5b-builtin", "the default"),
        on_spec_bench(qwen),
        of_qwen("two x86 cores (AMX)", "cpu-x86-qwen-1.5b"),
        of_qwen("two ARM cores", "cpu-arm-qwen-1.5b"),
        on_spec_bench(small),
        Gain(small, "two ARM cores", BUILT_IN, sum(plain) / len(plain), arm),
        Gain(small, "two x86 cores (AMX)", BUILT_IN, rate, row_of("cpu-x86-135m", "by_task", known, drafter="auto")),
    ]


def _extreme(row: Mapping[str, Any], pick: Any) -> str:
    """A row's best or worst task, with its ratio."""

    def ratio(task: str) -> float:
        value = row[task]
        return float(value[0] if isinstance(value, list) else value)

    task = pick([task for task in _TASKS if task in row], key=ratio)
    return f"{task} {number(ratio(task), '.2fx')}"


_HEAD = ("model", "machine", "prompts", "plain, tokens/s", "default over plain", "best task", "worst task")


def gain_cells(gain: Gain) -> list[str]:
    ratio, form = cell(gain.row["all"], ".2fx"), ".0f" if gain.plain > 100 else ".1f"
    best, worst = _extreme(gain.row, max), _extreme(gain.row, min)
    return [gain.model, gain.machine, gain.prompts, number(gain.plain, form), ratio, best, worst]


def gain_table(known: Documents | None = None) -> str:
    """The README's: real models with both suites, of CPUs without the fastest; then an inflated model."""
    found = known or documents()
    rows = [gain_cells(gain) for gain in gains(found) if gain.machine != "two x86 cores (AMX)"]  # it gained the most
    for batch in (1, 128):
        row = row_of("h200-batches-8b", "batches", found, batch=batch)
        at = "one H200" if batch == 1 else f"one H200, {batch} at once"
        measured = number(row["plain"], ",.0f"), cell(row["gain"], ".2fx")
        rows.append(["135M inflated to an 8B", at, SPEC_BENCH, *measured, "-", "-"])
    return table(_HEAD, rows)


_CPU = ("cpu-x86-135m", "cpu-arm-qwen-1.5b", "cpu-x86-qwen-1.5b", "cpu-x86-spec-bench")


def laptop(known: Documents | None = None) -> str:
    """The gains on CPUs, all of them."""
    rows = [gain_cells(gain) for gain in gains(known or documents()) if gain.machine != "one H200"]
    return table(_HEAD, rows) + sources(*_CPU, found_in="cpu-arm-135m", known=known)


def batch_line(known: Documents | None = None) -> str:
    """The gains of the batch sweep in one line, which `forerun plan` must agree with."""
    rows = (known or documents())["h200-batches-8b"]["tables"]["batches"]["rows"]
    sizes = " / ".join(str(row["batch"]) for row in rows)
    ratios = " / ".join(number(row["gain"][0], ".2f") for row in rows)
    against = " / ".join(number(row["default_over"], ".2f") for row in rows)
    return (
        f"With {sizes} sequences at once the default decodes at {ratios} times the speed of our plain loop, "
        f"and at {against} times the speed of vLLM 0.24 with the same weights, head and prompts on the same card."
    )


def load_table(known: Documents | None = None) -> str:
    """What the default gains by batch size in the newest run, beside the run in which vLLM was timed."""
    found = known or documents()
    newest, beside = (found[name]["commit"] for name in ("h200-mixtures-8b", "h200-batches-8b"))
    rows = []
    for then in found["h200-batches-8b"]["tables"]["batches"]["rows"]:
        runs = found["h200-mixtures-8b"]["tables"]["mixtures"]["rows"]
        now = next(row for row in runs if row["batch"] == then["batch"] and row["code"].startswith(newest))
        whole = [then[key] for key in ("plain", "default", "vllm_plain", "vllm_head")]
        ratios = [cell(then[key], ".2fx") for key in ("gain", "plain_over", "default_over")]
        first = [number(then["batch"], "d"), number(now["plain"], ",d"), number(now["default"], ".2fx")]
        rows.append([*first, *(number(value, ",d") for value in whole), *ratios])
    head = ["batch", f"{newest}: plain, tokens/s", f"{newest}: default, x plain"]
    head += [f"{beside}: plain, tokens/s", "default, tokens/s", "vLLM plain", "vLLM with the head"]
    head += [f"{beside}: default, x plain", "plain over vLLM's", "default over vLLM's"]
    return table(head, rows) + sources("h200-batches-8b", found_in="h200-mixtures-8b", known=known)


def methods(known: Documents | None = None) -> list[dict[str, Any]]:
    """Every drafter on Spec-Bench at the cost of an 8B, each from its newest run, the fastest first."""
    found = known or documents()
    newest: dict[str, dict[str, Any]] = {}
    for document, part, prompts in (
        ("h200-spec-bench-heads", "t0", "18"),
        ("h200-spec-bench-all", "t0", "6 to 7"),
        ("h200-spec-bench-default", "t0", "18"),
    ):
        for row in found[document]["tables"][part]["rows"]:
            name = _name(row["method"])
            before = newest.get(name, {})
            newest[name] = {**before, **row, "method": name, "prompts": prompts, "commit": found[document]["commit"]}
    for row in found["h200-spec-bench-all"]["tables"]["t1"]["rows"]:
        newest[_name(row["method"])]["t1"] = row["all"]
    for row in found["h200-spec-bench-default"]["tables"]["t1"]["rows"]:
        newest[_name(row["method"])]["t1"] = row["all"]
    cold, warm = found["h200-spec-bench-mtp"]["tables"]["methods"]["rows"]
    mtp = {"prompts": "13", "commit": found["h200-spec-bench-mtp"]["commit"], "t1": warm["all"]}
    newest["mtp"] = {**cold, **mtp}
    return sorted(newest.values(), key=lambda row: -(row["all"][0]))


def _name(method: str) -> str:
    """A method without what its table says beside it."""
    return re.split(r" \(|,", method)[0]


def method_table(known: Documents | None = None) -> str:
    rows = [
        [
            f"`{row['method']}`",
            cell(row["all"], ".2fx"),
            cell(row["tokens_per_round"], ".2f"),
            cell(row.get("t1"), ".2fx"),
            cell(row.get("minutes"), ".1f"),
            row["prompts"],
            row["commit"],
        ]
        for row in methods(known)
        if row["method"] != "plain"
    ]
    head = ("drafter", "T=0, x plain", "tokens per round", "T=1, x plain", "training, min", "prompts", "T=0 at")
    runs = ("h200-spec-bench-all", "h200-spec-bench-heads", "h200-spec-bench-mtp")
    return table(head, rows) + sources(*runs, found_in="h200-spec-bench-default", known=known)


RACE = "train-methods"


def race_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every method with its curve, `[minutes, tokens per round]` at each evaluation, the best at the end first."""
    rows = [
        row
        | {"curve": [[row[key]["minutes"], row[key]["tokens_per_round"]] for key in row if re.fullmatch(r"at\d+", key)]}
        for row in found["tables"]["curve"]["rows"]
    ]
    return sorted(rows, key=lambda row: -row["curve"][-1][1])


def race(known: Documents | None = None) -> str:
    """Tokens per round by minutes of training, of every method; nothing while there is no such document."""
    those = known or documents()
    if RACE not in those:
        return ""
    rows = race_rows(found := those[RACE])
    most = max(len(row["curve"]) for row in rows)
    ends = [[row["curve"][i][0] for row in rows if i < len(row["curve"])] for i in range(most)]
    head = ["method", "parameters", "steps", *(f"after {number(sum(m) / len(m), '.2f')} min" for m in ends)]
    cells = [
        [
            f"`{row['method']}`",
            number(row["parameters"], ",d"),
            number(row["steps"], ",d"),
            *(number(row["curve"][i][1], ".2f") if i < len(row["curve"]) else "-" for i in range(most)),
        ]
        for row in rows
    ]
    intro = "### Methods at equal minutes\n\nTokens per round by minutes of training. " + found["conditions"]
    picture = f"![Tokens per round by training minutes](assets/{RACE}.svg)"
    return "\n\n".join([intro, picture, table(head, cells) + sources(found_in=RACE, known=known)])
