"""Half precision as a GPU has it, on a CPU: a bfloat16 teacher, autocast, float32 parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.models.config import DecoderConfig
from forerun.models.load.checkpoint import Checkpoint
from forerun.train.data.corpus import Corpus
from forerun.train.loop import Trainer
from forerun.train.network import CausalNet
from forerun.train.options import Method
from forerun.train.run import make_recipe
from forerun.train.teacher import NetTeacher
from tests.train.test_recipes import FOR_DECODERS, options_for


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("method", FOR_DECODERS)
def test_every_recipe_steps_under_autocast(method: Method, tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    more = {"vocab": 40} if method == "eagle3" else {}
    extra = {"fc_norm": True, "norm_output": True} if method == "eagle3" else {}
    options = options_for(method, tiny, texts, tmp_path, steps=2, batch_tokens=96, eval_batches=1, **more, **extra)
    corpus = Corpus(texts, max_length=48, holdout=0.15)

    def trainer_with(dtype: torch.dtype) -> Trainer:
        net = CausalNet(DecoderConfig.from_hf(tiny.config), tiny.weights, dtype=dtype)
        torch.manual_seed(0)
        return Trainer(options, make_recipe(options, tiny, NetTeacher(net), corpus), corpus, tmp_path)

    trainer, full = trainer_with(torch.bfloat16), trainer_with(torch.float32)
    trainer._precision = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # type: ignore[method-assign]
    assert all(parameter.dtype == torch.float32 for parameter in trainer.named.values())
    before = {name: parameter.detach().clone() for name, parameter in trainer.named.items()}
    losses = [trainer.one_step().loss for _ in range(2)]
    assert losses == pytest.approx([full.one_step().loss for _ in range(2)], rel=0.05)
    moved = [name for name, parameter in trainer.named.items() if not torch.equal(parameter, before[name])]
    assert moved == list(before)
    assert trainer.measure().tokens_per_round == pytest.approx(full.measure().tokens_per_round, rel=0.1)
