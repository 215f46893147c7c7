"""The small hybrid that is made of another model: what it takes over, what it learns, and that we compute the same."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from forerun.models.load.checkpoint import open_checkpoint
from forerun.train.data.corpus import Batch
from forerun.train.teacher import load_net
from tests.gpu.small_hybrid import distance, make_hybrid
from tests.models.tiny_checkpoints import VOCAB, make_decoder, make_reference, reference_logits, save, score_chain


def test_a_hybrid_takes_weights_over_learns_and_is_computed_as_transformers_does(tmp_path: Path) -> None:
    source = make_reference("smollm2")
    save(source, tmp_path / "teacher")
    checkpoint, folder = open_checkpoint(str(tmp_path / "teacher")), tmp_path / "hybrid"
    teacher, model = load_net(checkpoint, torch.device("cpu")), make_hybrid(checkpoint, 3, folder)
    theirs, ours = source.model.layers[2], model.model.layers[2]
    assert torch.equal(ours.self_attn.q_proj.weight, theirs.self_attn.q_proj.weight)
    assert torch.equal(ours.feed_forward.w2.weight, theirs.mlp.down_proj.weight)
    assert model.config.layer_types == ["conv", "conv", "full_attention"]
    tokens = torch.randint(VOCAB, (4, 24), generator=torch.Generator().manual_seed(1))
    learnt = torch.ones_like(tokens, dtype=torch.bool)
    learnt[:, 20:] = False  # padding
    batch, optimizer, losses = Batch(tokens, learnt), torch.optim.AdamW(model.parameters(), lr=3e-3), list[float]()
    for _ in range(12):
        loss = distance(model, teacher, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % VOCAB
    with torch.no_grad():
        assert float(distance(model, teacher, Batch(changed, learnt))) == float(distance(model, teacher, batch))
    model.eval().save_pretrained(folder)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    text = tokens.flatten()[:30].tolist()
    found = score_chain(make_decoder(config, weights), text, 13, len(text))
    assert float((found - reference_logits(model, text)[13:]).abs().max()) < 1e-4
    again = make_hybrid(checkpoint, 3, folder)
    assert torch.equal(again.model.layers[0].conv.in_proj.weight, model.model.layers[0].conv.in_proj.weight)
