"""A training that is stopped leaves the drafter of its last checkpoint, and goes on from there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from forerun.cli.app import app
from forerun.core.errors import DamagedFile, InvalidInput
from forerun.models.load.checkpoint import Checkpoint
from forerun.train.checkpoint import read_checkpoint, write_checkpoint
from forerun.train.loop import Progress, Trainer
from forerun.train.options import Method, TrainOptions
from forerun.train.run import train
from tests.train.test_recipes import options_for, tokens_per_round
from tests.train.test_walk import others
from tools.runs import pack_run

__all__ = ["others"]  # texts of prompts that are not learnt


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


def walks(monkeypatch: pytest.MonkeyPatch, found: dict[int, float]) -> None:
    """Tokens per round through other texts at these steps; 1.0 elsewhere."""
    monkeypatch.setattr(Trainer, "walk", lambda trainer: found.get(trainer.step, 1.0))


def record(options: TrainOptions) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((Path(options.out) / "provenance.json").read_text())
    return made


def test_the_head_that_got_furthest_through_other_texts_is_written(
    tiny: Checkpoint, texts: Path, others: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks(monkeypatch, {2: 1.5, 4: 1.5, 6: 1.4})
    options = options_for("eagle", tiny, texts, tmp_path / "a", measure_on=str(others), eval_every=2, save_every=3)
    said: list[str] = []
    measured = train(replace(options, steps=6), say=said.append)
    made = record(options)
    assert (made["step"], made["best"]["step"], made["best"]["tokens_per_round"]) == (6, 2, 1.5)
    assert "step 2 of 6 is written: 1.500" in said[-1]
    two = replace(options, out=str(tmp_path / "b"), measure_on="", steps=6, save_every=2)
    stopped(two, 3)
    best, second = (load_file(tmp_path / one / "model.safetensors") for one in ("a", "b"))
    assert all(torch.equal(best[name], second[name]) for name in second)
    assert record(two)["measured"]["tokens_per_round"] == pytest.approx(measured.tokens_per_round)
    # a packed run keeps it, and goes on from the last step; with other texts the kept one is no best
    pack_run(tmp_path / "a", tmp_path / "packed")
    for folder, measure_on, expected in (("packed/a", others, 2), ("a", None, 8)):
        further = replace(options, out=str(tmp_path / folder), measure_on=str(measure_on or ""), steps=8)
        seen: list[Progress] = []
        train(further, seen.append)
        assert [progress.step for progress in seen] == [7, 8]
        assert record(further).get("best", {"step": 8})["step"] == expected


def test_a_run_without_gain_ends_and_stays_at_its_end(
    tiny: Checkpoint, texts: Path, others: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One evaluation without gain is forgiven at step 2; the second in a row ends the run, killed before or not."""
    walks(monkeypatch, {0: 1.2, 2: 1.1, 4: 1.3, 6: 1.3, 8: 1.2})
    options = options_for(
        "medusa", tiny, texts, tmp_path / "a", measure_on=str(others), eval_every=2, save_every=5, patience=2, steps=20
    )
    seen: list[Progress] = []
    train(options, seen.append)
    train(options, seen.append)
    assert [progress.step for progress in seen] == list(range(9))
    assert (record(options)["step"], record(options)["best"]["step"]) == (8, 4)
    killed = replace(options, out=str(tmp_path / "b"))
    stopped(killed, 7)
    assert record(killed)["best"]["step"] == 4  # of the checkpoint of step 5
    train(killed, seen.append)
    assert [progress.step for progress in seen[9:]] == [6, 7, 8]
    for once, again in zip(seen[6:9], seen[9:], strict=True):  # both have seen the same texts
        assert 0 < seen[5].tokens < once.tokens == again.tokens
        assert seen[5].trained_seconds < once.trained_seconds
    at_seven = [json.loads(line) for line in (tmp_path / "b" / "log.jsonl").read_text().splitlines()][7]
    assert at_seven["trained_seconds"] > seen[10].seconds + seen[9].seconds  # those before the kill too
    train(replace(killed, patience=3), seen.append)
    assert seen[-1].step == 10


def test_best_weights_that_are_damaged_are_said_to_be(
    tiny: Checkpoint, texts: Path, others: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks(monkeypatch, {})
    options = options_for("medusa", tiny, texts, tmp_path / "a", measure_on=str(others), steps=2, save_every=1)
    train(options)
    kept = tmp_path / "a" / "checkpoint"
    known = json.loads((kept / "run.json").read_text())
    for wrong in ({"step": "2"}, {"texts": None}, "best"):
        best = wrong if isinstance(wrong, str) else known["best"] | wrong
        (kept / "run.json").write_text(json.dumps(known | {"best": best}))
        with pytest.raises(DamagedFile, match="is damaged"):
            train(options)
    for wrong in ({"tokens": -1}, {"tokens": "9"}, {"seconds": float("nan")}, {"seconds": None}):
        (kept / "run.json").write_text(json.dumps(known | wrong))
        with pytest.raises(DamagedFile, match=r"is damaged \(it was saved after"):
            train(options)
    (kept / "run.json").write_text(json.dumps(known))
    (kept / "best.safetensors").write_bytes(b"")
    with pytest.raises(DamagedFile, match="is damaged"):
        train(options)


def test_patience_needs_texts_to_measure_on() -> None:
    for wrong in ({"patience": 1}, {"patience": -1, "measure_on": "texts"}):
        with pytest.raises(InvalidInput, match="patience"):
            TrainOptions(method="medusa", target="t", data="d", out="o", **wrong)  # type: ignore[arg-type]
