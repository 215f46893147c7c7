"""Files that a command is to write: wrong ones are said at once, in one line, and not after minutes of work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import flags, loading
from forerun.cli.loading import unused_flag
from forerun.core.errors import InvalidInput
from forerun.core.params import SpeculativeConfig
from forerun.measure.plan.advice import Point, Profile
from tests.cli.conftest import Run
from tests.cli.test_errors import only_line

PLAN = ("plan", "--rate", "1", "--prompt", "5", "--answer", "5")


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models need not be there, and no command gets as far as measuring."""
    for check in ("check_model", "check_draft_model"):
        monkeypatch.setattr(loading, check, lambda *given: None)
    for module, work in (
        ("measure.bench.run", "run"),
        ("measure.advise.answer", "run_advisor"),
        ("measure.plan.measure", "measure"),
    ):
        monkeypatch.setattr(f"forerun.{module}.{work}", _never)


def _never(*given: Any, **more: Any) -> None:
    raise AssertionError("the mistake is plain before anything is measured")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["bench"], "--json"),
        (["bench"], "--html"),
        (["advise"], "--json"),
        (["quality"], "--json"),
        ([*PLAN, "--measure"], "--save"),
        (["corpus", "build", "a.txt"], "--out"),
        (["layers", "search"], "--out"),
    ],
)
def test_a_file_that_cannot_be_written_is_said_before_the_work(
    forerun: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], flag: str
) -> None:
    monkeypatch.setattr("forerun.models.load.catalog.find_model", lambda name: None)
    assert "is a folder; name a file in it" in only_line(forerun(*words, flag, str(tmp_path)))
    lost = str(tmp_path / "none" / "x.json")
    assert f"{flag} '{lost}': there is no folder" in only_line(forerun(*words, flag, lost))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    "words",
    [["bench"], ["data", "make", "--target", "smollm2"], ["train", "eagle3", "--target", "smollm2", "--data", "x"]],
)
def test_a_folder_that_cannot_be_made_is_said_before_the_work(
    forerun: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr("forerun.models.load.catalog.find_model", lambda name: None)
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        said = only_line(forerun(*words, "--out", str(out)))
        assert f"--out '{out}': '{tmp_path / 'file'}' is a file" in said


@pytest.mark.parametrize("check", [flags.check_file, flags.check_folder])
def test_what_can_be_written_passes_and_nothing_is_created(
    check: Callable[[str, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check("--out", tmp_path / "new")
    check("--out", Path("new"))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InvalidInput, match="may not be written"):
        check("--out", tmp_path / "new")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("words", [["models", "--json", "-"], ["drafters"]])
def test_a_full_disk_is_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "forerun", *words]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 2
    assert ended.stderr == b"forerun: cannot write: No space left on device\n"


@pytest.mark.usefixtures("no_work")
def test_a_result_that_finds_the_disk_full_names_the_flag(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")
    with pytest.raises(InvalidInput, match=r"cannot write '/dev/full': No space .* choose another --out"):
        flags.write_file("--out", Path("/dev/full"), "text")


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied", "x"), IsADirectoryError(21, "Is", "x")])
def test_errors_of_files_are_one_line(forerun: Run, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def fails(*given: str) -> None:
        raise error

    monkeypatch.setattr("forerun.cli.doctor.examine", fails)
    assert only_line(forerun("doctor")) == f"forerun: 'x': {error.strerror}; check the path\n"


def test_other_errors_of_the_system_keep_their_traceback(forerun: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are ours: nobody can find a bug in `Invalid argument`."""

    def fails(*given: str) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("forerun.cli.doctor.examine", fails)
    with pytest.raises(OSError, match="Invalid argument"):
        forerun("doctor")


@pytest.mark.parametrize("group", ["corpus", "data", "layers"])
def test_a_group_without_a_command_shows_its_help_alone(forerun: Run, group: str) -> None:
    ran = forerun(group)
    assert f"Usage: forerun {group}" in ran.out + ran.err
    assert "Try `forerun" not in ran.out + ran.err


@pytest.mark.parametrize(
    ("given", "drafter", "said"),
    [
        ({"corpus": "x"}, "ngram", "--corpus does nothing with the drafter ngram; it is for --drafter suffix"),
        ({"shared": True}, "ngram+eagle3", "--shared does nothing with the drafter ngram+eagle3"),
        ({"draft_layers": "3"}, "ngram", "--draft-layers does nothing"),
        ({"corpus": "x", "shared": True}, "suffix+eagle3", None),
        ({"draft_model": "x"}, "ngram", "--draft-model does nothing with the drafter ngram; leave --drafter out"),
        ({"draft_model": "x"}, "ngram+draft_model", None),
        ({}, "ngram", None),
    ],
)
def test_a_flag_that_the_drafter_does_not_read_is_said(given: dict[str, Any], drafter: str, said: str | None) -> None:
    found = unused_flag(SpeculativeConfig(**given), drafter)
    assert found is None if said is None else said in (found or "")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpu", "h200", "--save", "x.json"], "--save keeps what --measure finds; add --measure"),
        (["--gpu", "h200", "--price", "inf"], "--price inf is out of range: a number above 0"),
        (["--gpu", "h200", "--rate", "inf"], "--rate inf is out of range: a number above 0"),
        (["--gpu", "h200", "--answer", "-2"], "--answer -2 is out of range: a number above 0"),
        (["--gpu", "h200", "--first-seconds", "nan"], "--first-seconds nan is out of range"),
        (["--file", "none.json"], "cannot read 'none.json': No such file or directory; make one with"),
    ],
)
def test_what_a_plan_cannot_use(forerun: Run, flags: list[str], said: str) -> None:
    assert said in only_line(forerun(*PLAN, *flags))


def test_a_plan_says_what_a_drafter_saves_and_how_much_sooner_it_answers(forerun: Run) -> None:
    ran = forerun(*PLAN, "--gpu", "h200")
    assert ran.code == 0
    assert "Take 1 replica with the drafter ngram+eagle3, adaptive" in ran.out
    found = re.search(
        r"answer in (\S+) s\. Plain decoding: 1 replica, \S+ machine hours, an answer in (\S+) s\.", ran.out
    )
    assert found is not None
    assert float(found[1]) < float(found[2])


def test_a_plan_that_needs_no_drafter_says_so_once(forerun: Run, tmp_path: Path) -> None:
    points = [
        Point(setup, batch, seconds / batch, 1e-4, 1.0, 0.0, 100.0)
        for setup, seconds in (("plain", 0.01), ("slow", 0.03))
        for batch in (1, 8)
    ]
    (tmp_path / "here.json").write_text(Profile("m", "x", "made up", tuple(points)).to_json())
    ran = forerun(*PLAN, "--file", str(tmp_path / "here.json"))
    assert ran.code == 0
    assert "Take 1 replica with no speculation" in ran.out
    assert "no drafter serves this load with less, or as cheaply and sooner." in ran.out
    assert "what plain decoding writes" not in ran.out
