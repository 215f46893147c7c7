"""One name for one thing: a flag takes the same kind of value in every command that has it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from forerun.cli.app import make_app
from tests.cli.conftest import Run
from tests.cli.test_errors import only_line


def options(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every option of every command, with the command's name."""
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield path, parameter
    for name, part in command.commands.items() if isinstance(command, TyperGroup) else ():
        yield from options(part, f"{path} {name}".strip())


OPTIONS = list(options(get_command(make_app())))


def kind(option: Any) -> str:
    """What it takes: nothing, a number, or a text, which may be a file or a choice."""
    known = getattr(option, "type_descriptor", None)  # typer 0.29; click's own type before that
    name = option.type.name if known is None else getattr(known.annotation, "__name__", "")
    return "nothing" if option.is_flag else "number" if name in ("int", "integer", "float") else "text"


def test_a_flag_takes_the_same_kind_of_value_everywhere() -> None:
    """`--json` was a switch in some commands and took a file in others."""
    found = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
    for command, option in OPTIONS:
        for spelling in (*option.opts, *option.secondary_opts):
            found[spelling][kind(option)].append(command)
    assert len(found["--json"]["text"]) >= 10
    assert found["--max-tokens"].keys() == {"number"}
    assert found["--raw"].keys() == {"nothing"}
    assert {flag: dict(kinds) for flag, kinds in found.items() if len(kinds) > 1} == {}


def test_a_flag_has_one_long_name() -> None:
    """`--max-length` was `--max-model-len` in serve; `--suite` and `--prompts` were the same file."""
    long = [[name for name in option.opts if name.startswith("--")] for _, option in OPTIONS]
    assert [names for names in long if len(names) > 1] == []
    assert {"--max-model-len", "--suite", "--target-model"}.isdisjoint(name for names in long for name in names)


def test_flags_that_take_several_by_comma_are_plural() -> None:
    by_comma = {option.opts[0] for _, option in OPTIONS if "by comma" in (option.help or "").lower()}
    assert {"--drafters", "--temperatures", "--batches", "--verifiers", "--dtypes", "--features"} <= by_comma
    assert [name for name in sorted(by_comma) if not name.endswith("s")] == []


def test_json_goes_to_a_file_beside_what_is_shown_or_alone_to_standard_output(forerun: Run, tmp_path: Path) -> None:
    plan = ("plan", "--rate", "1", "--prompt", "50", "--answer", "50", "--gpu", "h200")
    for words in (("drafters",), ("models",), plan):
        shown, alone = forerun(*words), forerun(*words, "--json", "-")
        both = forerun(*words, "--json", str(tmp_path / "x.json"))
        assert (tmp_path / "x.json").read_text() == alone.out
        assert json.loads(alone.out)
        assert (both.code, both.out) == (shown.code, shown.out)
        assert both.out != alone.out


@pytest.mark.parametrize(
    ("words", "path"), [(["models", "--json"], "models"), (["generate", "hi", "--max-tokens"], "generate")]
)
def test_a_flag_without_its_value_is_one_line(forerun: Run, words: list[str], path: str) -> None:
    said = only_line(forerun(*words))
    assert said == f"forerun: Option '{words[-1]}' requires an argument. Try `forerun {path} --help`.\n"
