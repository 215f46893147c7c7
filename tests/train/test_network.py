"""The network that trains and writes is the model that decodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun.core.errors import UnsupportedModel
from forerun.core.types import Needs
from forerun.models.config import DecoderConfig
from forerun.testing import FakeSeq
from forerun.train.data.writer import BatchWriter, Order
from forerun.train.network import CausalNet, is_plain
from forerun.train.recipes.draft_model import write_model
from tests.models.tiny_checkpoints import VOCAB, make_decoder, make_reference, save

PLAIN = ["smollm2", "llama2", "llama3.1", "llama-biases", "llama-yarn", "qwen2", "qwen3"]


@pytest.mark.parametrize("name", PLAIN)
def test_rows_are_those_of_transformers_and_of_our_decoder(name: str, tmp_path: Path) -> None:
    model = make_reference(name)
    config, weights = save(model, tmp_path)
    net = CausalNet(DecoderConfig.from_hf(config), weights)
    tokens = torch.randint(VOCAB, (2, 11), generator=torch.Generator().manual_seed(3))
    layers = (0, 1, 2, -1)
    with torch.no_grad():
        kept, last = net(tokens, layers)
        wanted = model(tokens, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(last @ net.head.t(), wanted.logits, rtol=1e-3, atol=1e-3)
    for layer in layers:
        torch.testing.assert_close(kept[layer], wanted.hidden_states[layer], rtol=1e-3, atol=1e-3)
    decoder, seq = make_decoder(config, weights), FakeSeq(0, tokens[0].tolist(), max_length=20)
    _, scores = decoder.prefill([seq], Needs(layers))
    for layer in layers:
        torch.testing.assert_close(scores.hidden[layer], kept[layer][0, :-1], rtol=1e-3, atol=1e-3)


def test_families_with_windows_are_left_to_transformers(tmp_path: Path) -> None:
    config, weights = save(make_reference("mistral"), tmp_path)
    assert not is_plain(DecoderConfig.from_hf(config))
    with pytest.raises(UnsupportedModel, match="transformers"):
        CausalNet(DecoderConfig.from_hf(config), weights)


@pytest.mark.parametrize("name", ["smollm2", "qwen2", "qwen3"])
def test_a_written_model_is_read_back_as_it_was(name: str, tmp_path: Path) -> None:
    config, weights = save(make_reference(name), tmp_path / "a")
    half = {key: weight.to(torch.bfloat16).float() for key, weight in weights.items()}
    net = CausalNet(DecoderConfig.from_hf(config), half, which=[0, 2])
    write_model(tmp_path / "b", net, config)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert again.config.num_hidden_layers == 2
        torch.testing.assert_close(again(tokens).logits, net(tokens)[1] @ net.head.t(), rtol=1e-3, atol=1e-3)


def test_the_writer_writes_what_the_model_says(tmp_path: Path) -> None:
    """Greedy texts of ragged prompts, more than there are rows, against one plain pass per token."""
    config, weights = save(make_reference("smollm2"), tmp_path)
    net = CausalNet(DecoderConfig.from_hf(config), weights)
    orders = [Order([1 + i, *range(2, 2 + i % 4)], 0.0, 14 + i % 5, i) for i in range(9)]
    writer = BatchWriter(net, [5, 17], rows=4, max_length=24)
    written = {w.order.number: w for w in writer.write(orders)}
    assert sorted(written) == list(range(9))
    for order in orders:
        text = list(order.prompt)
        while len(text) < order.max_length:
            with torch.no_grad():
                text.append(int((net(torch.tensor([text]))[1][0, -1] @ net.head.t()).argmax()))
            if text[-1] in (5, 17):
                break
        assert written[order.number].tokens == text
        assert written[order.number].ended == (text[-1] in (5, 17))


@pytest.mark.slow
def test_warm_texts_follow_the_law(tmp_path: Path) -> None:
    """The first token at temperature 1, over many rows, against the model's law."""
    config, weights = save(make_reference("smollm2"), tmp_path)
    net = CausalNet(DecoderConfig.from_hf(config), weights)
    writer = BatchWriter(net, [], rows=64, max_length=8, seed=3)
    count = 1500
    firsts = [w.tokens[2] for w in writer.write(Order([4, 7], 1.0, 3) for _ in range(count))]
    with torch.no_grad():
        law = (net(torch.tensor([[4, 7]]))[1][0, -1] @ net.head.t()).softmax(-1)
    seen = torch.bincount(torch.tensor(firsts), minlength=VOCAB) / count
    assert float((seen - law).abs().sum()) / 2 < 0.08
