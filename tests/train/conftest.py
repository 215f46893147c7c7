"""A tiny target on disk that has learnt a language, and texts that it wrote itself: every recipe learns in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.train.data.corpus import Text, write_shard
from forerun.train.data.writer import BatchWriter, Order
from forerun.train.teacher import load_net
from tests.models.tiny_checkpoints import VOCAB, make_reference, save

LENGTH = 48


def speak(count: int, generator: torch.Generator) -> torch.Tensor:
    """[count, 24] sentences: every word has a usual successor and, one time in six, an unusual one."""
    usual, unusual = (torch.randperm(VOCAB - 1, generator=torch.Generator().manual_seed(i)) + 1 for i in (1, 2))
    words = [torch.randint(1, VOCAB, (count,), generator=generator)]
    for _ in range(23):
        rare = torch.rand(count, generator=generator) < 1 / 6
        words.append(torch.where(rare, unusual[words[-1] - 1], usual[words[-1] - 1]))
    return torch.stack(words, 1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A Llama of three layers with tied embeddings, trained for a moment; it has no tokenizer."""
    model, generator = make_reference("smollm2"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.mul_(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        words = speak(32, generator)
        loss = torch.nn.functional.cross_entropy(model(words).logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.8, "the tiny target did not learn its language"
    folder = tmp_path_factory.mktemp("target")
    save(model, folder)
    return open_checkpoint(str(folder))


@pytest.fixture(scope="session")
def texts(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of its own texts, greedy ones and others."""
    folder = tmp_path_factory.mktemp("texts")
    net = load_net(tiny, torch.device("cpu"))
    writer = BatchWriter(net, [0], rows=32, max_length=LENGTH, seed=1)
    orders = [Order([1 + i % (VOCAB - 1), 1 + i // 7 % (VOCAB - 1), 3], (0.0, 1.0)[i % 2], LENGTH) for i in range(160)]
    written = [Text(w.tokens, len(w.order.prompt), w.order.temperature) for w in writer.write(orders)]
    write_shard(folder / "shard-00000.safetensors", written[:90])
    write_shard(folder / "shard-00001.safetensors", written[90:])
    return folder
