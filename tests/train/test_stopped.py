"""A training that is stopped leaves the drafter of its last checkpoint, and goes on from there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from forerun.cli.app import app
from forerun.core.errors import DamagedFile, InvalidInput
from forerun.models.load.checkpoint import Checkpoint
from forerun.train.checkpoint import read_checkpoint, write_checkpoint
from forerun.train.loop import Progress
from forerun.train.options import Method, TrainOptions
from forerun.train.run import train
from tests.train.test_recipes import options_for, tokens_per_round


def stopped(options: TrainOptions, step: int) -> list[str]:
    """Interrupted in this step; what was said meanwhile."""
    said: list[str] = []

    def stop(progress: Progress) -> None:
        if progress.step == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(options, stop, said.append)
    return said


@pytest.mark.slow
@pytest.mark.parametrize(("method", "drafter"), [("eagle3", "eagle3"), ("dflash", "dflash")])
def test_what_was_learnt_until_then_can_be_used(
    method: Method, drafter: str, tiny: Checkpoint, texts: Path, tmp_path: Path
) -> None:
    options = options_for(method, tiny, texts, tmp_path / "a", steps=9, save_every=3, eval_every=9)
    said = stopped(options, 5)
    assert "step 3" in said[-1]
    made = json.loads((tmp_path / "a" / "provenance.json").read_text())
    assert (made["step"], made["arguments"]["steps"]) == (3, 9)
    assert tokens_per_round(tiny, drafter, tmp_path / "a") >= 1.0
    at_three = load_file(tmp_path / "a" / "model.safetensors")
    train(options)
    assert json.loads((tmp_path / "a" / "provenance.json").read_text())["step"] == 9
    train(replace(options, out=str(tmp_path / "b")))
    ended, whole = (load_file(tmp_path / one / "model.safetensors") for one in ("a", "b"))
    assert any(not torch.equal(at_three[name], ended[name]) for name in whole)
    for name in whole:
        assert torch.allclose(ended[name].float(), whole[name].float(), atol=1e-3), name


def test_other_settings_are_refused_before_the_target_is_loaded(
    tiny: Checkpoint, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for("medusa", tiny, texts, tmp_path / "a", steps=2, save_every=1, batch_tokens=256)
    train(options)

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("a large target takes minutes")

    monkeypatch.setattr("forerun.train.run.load_teacher", loaded)
    with pytest.raises(InvalidInput, match=r"a run with batch_tokens=256, not 512; .*another --out"):
        train(replace(options, batch_tokens=512))
    (tmp_path / "a" / "checkpoint" / "run.json").write_text("{")
    with pytest.raises(DamagedFile, match="is damaged"):
        train(options)
    with pytest.raises(AssertionError, match="takes minutes"):  # another folder goes on to load it
        train(replace(options, out=str(tmp_path / "b")))


def test_a_kill_while_a_checkpoint_takes_the_place_of_another_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    named, options = {"weight": weight}, TrainOptions(method="medusa", target="t", data="d", out=str(tmp_path))
    optimizer = torch.optim.AdamW([weight])
    write_checkpoint(tmp_path, 1, options, named, optimizer)

    def killed(path: Path, target: Path, replace: Callable[[Path, Path], Path] = Path.replace) -> Path:
        if path.name == "checkpoint.part":
            raise SystemExit
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(SystemExit):
            write_checkpoint(tmp_path, 2, options, named, optimizer)
    assert not (tmp_path / "checkpoint").exists()  # the moment that was lost before
    saved = read_checkpoint(tmp_path, options, named)
    assert saved is not None
    assert saved.step == 1
    write_checkpoint(tmp_path, 3, options, named, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_nothing_is_written_where_nothing_was_saved(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    options = options_for("mtp", tiny, texts, tmp_path / "a", steps=9, save_every=5)
    said = stopped(options, 2)
    assert not any("stopped" in one for one in said)
    assert not (tmp_path / "a" / "config.json").exists()


def test_the_command_ends_with_the_code_of_an_interrupt(
    tiny: Checkpoint, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("forerun.train.run.train", interrupted)
    words = ["train", "mtp", "--target", str(tiny.path), "--data", str(texts), "--out", str(tmp_path)]
    ended = CliRunner().invoke(app, words)
    assert (ended.exit_code, "the same command resumes" in ended.output) == (130, True)
