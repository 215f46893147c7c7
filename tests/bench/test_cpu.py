"""The whole benchmark on a random model of two layers: the document it prints, and texts that are equal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.bench import cpu
from forerun.models.load import checkpoint as loading

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

    def vocabulary(self) -> dict[str, int]:
        return {chr(64 + token): token for token in range(VOCAB)}


def random_weights() -> dict[str, torch.Tensor]:
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
    return weights


@pytest.fixture(autouse=True)
def tiny_checkpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every name opens the tiny model; the number of threads is put back."""
    opened = SimpleNamespace(
        name="tiny", path=Path("tiny"), config=CONFIG, weights=random_weights(), tokenizer=Letters
    )
    monkeypatch.setattr(loading, "open_checkpoint", lambda name: opened)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def suite(tmp_path: Path) -> str:
    rows = [
        {"question_id": 1, "category": "writing", "turns": ["tell tell tell me", "tell me more"]},
        {"question_id": 2, "category": "qa", "turns": ["why why why why?"]},
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    code = cpu.main([*words, "--threads", "1"])
    printed = capsys.readouterr().out
    return code, json.loads(printed.splitlines()[-1]), printed


def test_the_last_line_is_the_document(
    capsys: pytest.CaptureFixture[str], suite: str, tmp_path: Path
) -> None:
    saved = tmp_path / "result.json"
    words = ("--suite", suite, "--max-tokens", "12", "--repeats", "2", "--json", str(saved))
    code, result, printed = bench(capsys, *words, "--pair", "tiny", "tiny")
    assert code == 0, result["differing"]
    assert json.loads(saved.read_text()) == result
    assert result["equal"] is True
    assert result["compared"] == 2 * 2 * 6  # prompts, repeats, contenders
    ours = ["plain", "ngram", "draft_model", "ngram_fixed"]
    assert list(result["contenders"]) == ["transformers", "transformers_lookup", *ours]
    assert set(result["by_task"]) == {"ngram", "draft_model", "ngram_fixed"}
    assert set(result["by_task"]["ngram"]) == {"multi_turn", "qa"}
    assert set(result["by_task"]["ngram"]["qa"]) == {"speedup", "low", "high", "tokens_per_round"}
    assert {"plain_vs_transformers", "worst_drafter_vs_plain", "ngram_vs_plain"} <= set(result["ratios"])
    assert {"1", "2", "64"} <= set(result["t"])
    assert {"cpu", "cores", "threads", "model", "max_tokens", "load_before", "busy"} <= set(
        result["conditions"]
    )
    assert "By task" in printed
    assert "24 of 24" in printed


def test_figures_count_passes_as_they_were(capsys: pytest.CaptureFixture[str], suite: str) -> None:
    _, result, _ = bench(capsys, "--suite", suite, "--max-tokens", "8", "--repeats", "1", "--ignore-eos")
    assert result["contenders"]["plain"]["tokens_per_round"] == 1.0
    assert result["contenders"]["transformers"]["tokens_per_round"] == 1.0
    assert result["contenders"]["ngram_fixed"]["tokens_per_round"] >= 1.0


def test_everybody_ends_on_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = Letters().encode("tell tell tell me")
    _, (first, *_) = cpu.load_contenders(cpu.Settings(ignore_eos=True))
    whole = list(first.write(ids, 12).tokens)
    wanted = whole[: whole.index(whole[-1]) + 1]
    assert 1 < len(wanted) < 12
    monkeypatch.setattr(Letters, "eos_ids", frozenset({wanted[-1]}))
    _, contenders = cpu.load_contenders(cpu.Settings(draft_model="tiny"))
    assert {c.name: list(c.write(ids, 12).tokens) for c in contenders} == {c.name: wanted for c in contenders}


def test_a_wrong_text_turns_the_exit_code(
    capsys: pytest.CaptureFixture[str], suite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = cpu.own_contenders

    def with_a_liar(llm: Any, settings: cpu.Settings) -> list[cpu.Contender]:
        return [
            *honest(llm, settings),
            cpu.Contender("liar", lambda ids, most: cpu.Written([0], 1.0, 1, 1.0)),
        ]

    monkeypatch.setattr(cpu, "own_contenders", with_a_liar)
    code, result, _ = bench(
        capsys, "--suite", suite, "--max-tokens", "4", "--repeats", "1", "--skip-transformers"
    )
    assert code == 1
    assert result["equal"] is False
    assert {row["contender"] for row in result["differing"]} == {"liar"}


def test_later_turns_are_asked_when_wanted(suite: str) -> None:
    settings = cpu.Settings(suite=suite, max_tokens=4, skip_transformers=True, all_turns=True)
    llm, _ = cpu.load_contenders(settings)
    prompts = cpu.tokenise(llm, cpu.load_suite(suite), settings)
    assert [prompt.id for prompt in prompts] == ["1", "1/2", "2"]
    first, second = prompts[0].ids, prompts[1].ids
    assert second[: len(first)] == first
    assert len(second) > len(first) + len("tell me more")


def test_a_plot_is_drawn(capsys: pytest.CaptureFixture[str], suite: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speed.png"
    words = ("--suite", suite, "--max-tokens", "4", "--repeats", "1", "--skip-transformers")
    bench(capsys, *words, "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--repeats", "0"], "repeats=0"),
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--tasks", "poetry"], "unknown task 'poetry'"),
        (["--drafters", "ngran"], "did you mean 'ngram'"),
        (["--suite", "absent.jsonl"], "no prompts at 'absent.jsonl'"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert cpu.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert complaint in lines[-1]


def test_a_busy_machine_can_be_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "load_average", lambda: 1000.0)
    assert cpu.main(["--require-idle"]) == 2
    assert "load average 1000.0" in capsys.readouterr().err
