"""Tiny models: a random transformer behind every model's name or in a folder, and a table behind an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forerun.api.llm import LLM
from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SpeculativeConfig
from forerun.models.load import catalog
from forerun.models.load import checkpoint as loading
from forerun.testing import TableLM

VOCAB = 64
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


class Letters:
    """A tokenizer of one token per character."""

    eos_ids = frozenset({1})
    bos_id = None
    vocab_size = VOCAB
    has_chat_template = False

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [2 + ord(letter) % (VOCAB - 2) for letter in text]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(chr(64 + token) for token in ids)

    def token_text(self, index: int) -> str:
        return self.decode([index])

    def token_bytes(self, index: int) -> bytes:
        return self.token_text(index).encode()

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode(" ".join(message["content"] for message in messages))

    def vocabulary(self) -> dict[str, int]:
        return {chr(64 + token): token for token in range(VOCAB)}


class HeldWeights(dict[str, torch.Tensor]):
    """Weights in memory that say their shapes, as a checkpoint's do."""

    quantization = None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def packed_kinds(self) -> set[int]:
        return set()


def random_weights() -> HeldWeights:
    rng = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng) / shape[-1] ** 0.5

    shapes = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
    }
    weights = {"model.embed_tokens.weight": draw(VOCAB, 32), "model.norm.weight": torch.ones(32)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": draw(*shape) for name, shape in shapes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        weights |= {f"{prefix}.{name}.weight": torch.ones(32) for name in norms}
    return HeldWeights(weights)


@pytest.fixture
def tiny_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Every name opens the tiny model; the number of threads is put back."""
    file = tmp_path / "tiny"
    file.touch()
    opened = SimpleNamespace(name="tiny", path=file, config=CONFIG, weights=random_weights(), tokenizer=Letters)
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "open_checkpoint", lambda name: opened)
    monkeypatch.setattr(catalog, "find_draft_model", lambda name: file)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same random transformer as a Hugging Face folder, which other processes can load too."""
    from safetensors.torch import save_file
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    letters = ["<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz ?.,ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"][:VOCAB]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(random_weights(), folder / "model.safetensors")
    config = {**CONFIG, "architectures": ["LlamaForCausalLM"], "eos_token_id": 1, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"}))
    return str(folder)


def table_llm(drafter: str = "ngram", controller: str = "fixed", budget: int = 4, order: int = 1) -> LLM:
    """A model that goes round in circles, and its draft model: the same table, a little blurred."""
    speculative = SpeculativeConfig(drafter, budget=budget, controller=controller)
    target, draft = (TableLM(VOCAB, order=order, seed=18, sharpness=sharp) for sharp in (3.0, 2.5))
    config = EngineConfig(max_batch=8)
    engine = make_engine(target, Letters.eos_ids, speculative, config, Letters(), draft)
    return LLM(engine, Letters(), "table")  # type: ignore[arg-type]


@pytest.fixture
def suite(tmp_path: Path) -> str:
    rows = [
        {"question_id": 1, "category": "writing", "turns": ["tell tell tell me", "tell me more"]},
        {"question_id": 2, "category": "qa", "turns": ["why why why why?"]},
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)
