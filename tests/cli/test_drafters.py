"""`forerun drafters`: what --drafter takes, and the heads in the box."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.cli import app, drafters
from forerun.cli.flags import Settings
from forerun.heads import HeadFolder


def test_heads_of_the_box_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    head = HeadFolder(Path("box/quick"), "eagle3", "Tiny-24M", 8, 24, None, 12_300_000)
    monkeypatch.setattr(drafters, "heads_in_the_box", lambda: [head])
    monkeypatch.setattr("sys.argv", ["forerun", "drafters"])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "ngram " in printed
    assert printed.startswith("auto "), "the default is what most look for"
    assert "head quick: eagle3 for Tiny-24M, 12.3 MB" in printed


def test_what_a_folder_is_for_is_found_out_later() -> None:
    assert Settings.of({}).speculative.drafter == "auto"
    assert Settings.of({"draft_model": "folder"}).speculative.drafter == "auto"
    assert Settings.of({"draft_model": "folder", "drafter": "eagle3"}).speculative.drafter == "eagle3"


def test_a_head_of_the_package_is_named_as_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = tmp_path / "quick"
    monkeypatch.setattr(drafters, "heads_in_the_box", lambda: [HeadFolder(box, "eagle3", "Tiny", 8, 24, None, 1)])
    monkeypatch.chdir(tmp_path)
    assert drafters.head_folder(Path("quick")) == box
    assert drafters.head_folder(Path("other")) == Path("other")
    box.mkdir()
    assert drafters.head_folder(Path("quick")) == Path("quick"), "the user's own folder comes first"
