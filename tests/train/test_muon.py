"""Muon: matrices move alike in all directions, everything else as with AdamW; runs resume; a packed run goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.core.errors import InvalidInput
from forerun.models.load.checkpoint import Checkpoint
from forerun.train.checkpoint import read_checkpoint
from forerun.train.loop import MOMENT, Muon, Progress, orthogonal
from forerun.train.run import train
from tests.train.test_recipes import options_for
from tools.runs import main as pack


@pytest.mark.parametrize("shape", [(3, 24, 40), (2, 40, 24), (1, 16, 16)])
def test_directions_are_nearly_orthogonal_and_keep_singular_vectors(shape: tuple[int, ...]) -> None:
    made = torch.Generator().manual_seed(0)
    given = torch.randn(*shape, generator=made)
    found = orthogonal(given).float()
    u, s, v = torch.linalg.svd(given, full_matrices=False)
    seen = u.mT @ found @ v.mT
    sizes = seen.diagonal(dim1=-2, dim2=-1)
    strong = s > 0.1 * s.amax(-1, keepdim=True)  # five rounds do not lift the weakest all the way
    assert float(sizes[strong].min()) > 0.6
    assert float(sizes.max()) < 1.3
    assert float((seen - torch.diag_embed(sizes)).abs().max()) < 0.1


def test_a_matrix_moves_by_the_learning_rate_and_a_vector_as_with_adamw() -> None:
    made = torch.Generator().manual_seed(0)
    matrix, vector, same = (torch.nn.Parameter(torch.zeros(n)) for n in ((32, 48), (48,), (48,)))
    groups = [{"params": [matrix], "orthogonal": True}, {"params": [vector], "orthogonal": False}]
    ours, theirs = (Muon(groups, lr=0.01, weight_decay=0.0), torch.optim.AdamW([same], lr=0.01, weight_decay=0.0))
    matrix.grad = torch.randn(32, 48, generator=made)
    vector.grad = same.grad = torch.randn(48, generator=made)
    ours.step()
    theirs.step()
    assert float(matrix.detach().square().mean().sqrt()) == pytest.approx(0.01, rel=0.2)
    assert float((matrix.detach() * matrix.grad).sum()) < 0  # downhill
    assert torch.equal(vector, same)
    assert set(ours.state[matrix]) == {MOMENT, "step"}
    assert ours.param_groups[0]["params"][0] is matrix


@pytest.mark.slow
def test_a_run_with_muon_resumes_with_the_losses_of_one_that_was_not_stopped(
    tiny: Checkpoint, texts: Path, tmp_path: Path
) -> None:
    whole, parts = list[Progress](), list[Progress]()
    more = {"layers": 2, "levels": 4, "eval_every": 3, "save_every": 3, "warmup": 0.0}
    options = options_for("dspark", tiny, texts, tmp_path / "a", steps=6, **more)
    train(options, whole.append)
    stopped = [0]

    def stop(progress: Progress) -> None:
        parts.append(progress)
        stopped[0] += 1
        if progress.step == 4 and stopped[0] == 4:
            raise KeyboardInterrupt

    again = replace(options, out=str(tmp_path / "b"))
    with pytest.raises(KeyboardInterrupt):
        train(again, stop)
    train(again, parts.append)
    assert [p.step for p in parts] == [1, 2, 3, 4, 4, 5, 6]
    assert [p.loss for p in parts[4:]] == pytest.approx([p.loss for p in whole[3:]], rel=1e-4)
    with pytest.raises(InvalidInput, match="optimizer="):
        train(replace(again, optimizer="adamw", steps=7))


@pytest.mark.slow
def test_a_packed_run_is_small_and_goes_on_from_its_step(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    options = options_for("mtp", tiny, texts, tmp_path / "run", steps=12, save_every=12)
    train(options, seen.append)
    assert pack(["pack", str(tmp_path / "run"), "--out", str(tmp_path / "packed")]) == 0
    packed = tmp_path / "packed" / "run"

    def size(folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    assert size(packed / "checkpoint") < 0.3 * size(tmp_path / "run" / "checkpoint")
    further = replace(options, out=str(packed), steps=14)
    saved = read_checkpoint(packed, further, {})
    assert saved is not None
    assert (saved.step, saved.moments) == (12, {})
    train(further, seen.append)
    assert [progress.step for progress in seen] == [*range(1, 15)]
    assert seen[12].loss < seen[0].loss - 0.5 * (seen[0].loss - seen[11].loss)  # it did not begin again
    assert pack(["pack", str(tmp_path / "run"), "--heads-only", "--out", str(tmp_path / "heads")]) == 0
    assert (tmp_path / "heads" / "run" / "config.json").is_file()
    assert not (tmp_path / "heads" / "run" / "checkpoint").exists()
    assert pack(["pack", str(tmp_path / "nothing"), "--out", str(tmp_path / "packed")]) == 2
