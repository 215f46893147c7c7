"""An inflated model says what the small one says; transformers agrees; shapes that cannot hold it are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from forerun.core.errors import InvalidInput, UnknownName, UnsupportedModel
from forerun.core.types import Needs, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.testing import FakeSeq
from lab.inflate.model import PRESETS, InflatedWeights, Shape, find_shape, inflate, inflated_config

VOCAB = 71
LARGER = Shape(width=80, layers=5, heads=8, kv_heads=2, head_dim=32, inner=96)
TOKENS = torch.randint(VOCAB, (1, 60), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random Llama with 3 query heads on 1 key-value head, as transformers saves it."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=56, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=True, rms_norm_eps=1e-3,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(float("norm" in name), 0.25)
    folder = tmp_path_factory.mktemp("small")
    model.save_pretrained(folder)
    return model, folder


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS, use_cache=False).logits[0]
    return found


def _opened(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder))


def test_the_folder_has_the_same_function(small: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = small
    (folder / "chat_template.jinja").write_text("hello")
    steps: list[tuple[int, int]] = []
    written = inflate(
        _opened(folder), LARGER, tmp_path / "large", dtype=torch.float32, progress=lambda i, n: steps.append((i, n))
    )
    large = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32).eval()
    assert large.config.hidden_size == 80
    wanted, got = _logits(model), _logits(large)
    assert float((wanted - got).abs().max()) < 1e-4
    assert torch.equal(wanted.argmax(-1), got.argmax(-1))
    assert steps[-1] == (len(steps), len(steps))
    assert json.loads((written / "config.json").read_text())["inflated_from"] == str(folder)
    assert (written / "chat_template.jinja").read_text() == "hello"


def test_our_decoder_runs_the_weights_without_files(small: tuple[Any, Path]) -> None:
    model, folder = small
    checkpoint = _opened(folder)
    weights = InflatedWeights(checkpoint.config, checkpoint.weights, LARGER, dtype=torch.float32)
    config = DecoderConfig.from_hf(weights.config)
    decoder = Decoder(config, weights, dtype=torch.float32, device="cpu", kv_slots=None)
    tokens = TOKENS[0].tolist()
    seq = FakeSeq(1, tokens[:11], max_length=100)
    decoder.prefill([seq], Needs())
    got = decoder.score([seq], TreeBatch.chains([tokens[10:]]), Needs()).logits
    assert got is not None
    assert float((got - _logits(model)[10:]).abs().max()) < 1e-4


def test_what_is_added_is_not_zero_where_it_reads(small: tuple[Any, Path]) -> None:
    _, folder = small
    checkpoint = _opened(folder)
    weights = InflatedWeights(checkpoint.config, checkpoint.weights, LARGER)
    assert len(list(weights)) == len(weights) == 3 + 5 * 9
    added = weights["model.layers.4.mlp.gate_proj.weight"]
    assert float(added.float().std()) == pytest.approx(0.02, rel=0.1)
    assert torch.equal(added, weights["model.layers.4.mlp.gate_proj.weight"])
    assert not weights["model.layers.4.mlp.down_proj.weight"].any()
    assert not weights["model.layers.0.self_attn.o_proj.weight"][48:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 40}, "width=40 is less than the model's own 48"),
        ({"layers": 2}, "layers=2 is less"),
        ({"heads": 4}, "heads per kv_head=2 is less"),
        ({"head_dim": 24}, "must be a multiple of 16"),
    ],
)
def test_shapes_that_cannot_hold_the_model_are_refused(
    small: tuple[Any, Path], change: dict[str, int], message: str
) -> None:
    fields = {name: getattr(LARGER, name) for name in Shape.__dataclass_fields__}
    with pytest.raises(InvalidInput, match=message):
        inflated_config(_opened(small[1]).config, Shape(**{**fields, **change}))


def test_other_families_are_refused(small: tuple[Any, Path]) -> None:
    config = {**_opened(small[1]).config, "attention_bias": True}
    with pytest.raises(UnsupportedModel, match="without biases"):
        inflated_config(config, LARGER)


def test_presets_hold_the_default_model() -> None:
    for shape in PRESETS.values():
        assert shape.layers >= 30
        assert shape.kv_heads >= 3
    with pytest.raises(UnknownName, match="1b, 8b, 70b"):
        find_shape("7b")
