"""A KV cache in 8 bits: near the usual one, exact with respect to itself, and refused where there is none."""

import random
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.build.engine import load_target, make_engine
from forerun.core.errors import InvalidInput, ModelError
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Needs, Request, TreeBatch
from forerun.models import decoder as decoder_module
from forerun.models.config import DecoderConfig
from forerun.models.native.target import NativeDecoder
from forerun.models.pages import PAGE
from forerun.models.slots import reason_against, slot_bytes
from forerun.testing import FakeSeq, path_to, random_tree, tree_of
from tests.engine.test_prefix import llama
from tests.models.tiny_checkpoints import FAMILIES, LATENT, SIZED, VOCAB, make_reference, save
from tests.native.blocks import needs_native

pytestmark = needs_native
LONG = 150  # tokens: three pages


def make(folder: Path, family: str | None = None, kv_dtype: str = "int8", mode: Any = "float32") -> NativeDecoder:
    config, weights = save(llama() if family is None else make_reference(family), folder)
    return NativeDecoder(DecoderConfig.from_hf(config), weights, mode=mode, kv_slots=None, kv_dtype=kv_dtype)


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(40), k=length)


def logits_of(target: NativeDecoder, seq: FakeSeq, tokens: list[int]) -> Tensor:
    return target.score([seq], TreeBatch.chains([tokens]), Needs()).required_logits


def logits_behind(target: NativeDecoder, tokens: list[int], seq_id: int = 0) -> Tensor:
    seq = FakeSeq(seq_id, tokens, max_length=len(tokens) + 8)
    target.prefill([seq], Needs())
    try:
        return logits_of(target, seq, tokens[-1:])
    finally:
        target.release(seq)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(
    "family",
    [
        name
        for name in (*FAMILIES, *SIZED, *LATENT)
        if "yarn" not in name and name not in ("llama-linear", "deepseek_v3-odd", "ernie4_5_moe")
    ],
)
def test_laws_are_near_those_of_floats(family: str, tmp_path: Path) -> None:
    made, found = [make(tmp_path / kind, family, kind) for kind in ("int8", "auto")], list[float]()
    for seed in range(12):
        tokens = [token % VOCAB for token in text(seed, 30)]
        law, wanted = (logits_behind(target, tokens, seed).log_softmax(-1) for target in made)
        found.append(float((wanted.exp() * (wanted - law)).sum()))
    assert min(found) > 0  # zero would be floats
    # not each: a token whose experts are nearly tied has others; Gemma 4 does not scale scores
    assert median(found) < (2e-3 if family in SIZED else 1e-3)


def test_a_token_takes_a_byte_for_each_number_and_a_scale_for_each_head(tmp_path: Path) -> None:
    target = make(tmp_path)
    logits_behind(target, text(1, LONG))
    data, config = target.kv.data, target.config
    assert data.dtype == torch.int8
    assert data.nbytes // data.shape[3] == 2 * config.layers * config.kv_heads * (config.head_dim + 4)
    assert slot_bytes(config, torch.int8) == data.nbytes // data.shape[3]


@pytest.mark.parametrize("mode", ["float32", "q8"])
def test_bits_do_not_depend_on_company(mode: Any, tmp_path: Path) -> None:
    """A node's logits: in a tree of a batch, in a chain of its own path, and as a root after prefill."""
    target, rng = make(tmp_path, mode=mode), random.Random(3)
    seqs = [FakeSeq(b, text(b, n), max_length=LONG + 20) for b, n in enumerate((LONG, 5, 63))]
    target.prefill(seqs, Needs())
    trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], 40, 9) for seq in seqs])
    together = target.score(seqs, trees, Needs()).required_logits
    for b, seq in enumerate(seqs):
        tokens, parents = tree_of(trees, b)
        for i in range(len(tokens)):
            node = together[trees.starts[b] + i]
            path = [tokens[j] for j in path_to(parents, i)]  # without the root
            assert torch.equal(logits_of(target, seq, [seq.tokens[-1], *path])[-1], node)
            assert torch.equal(logits_behind(target, seq.tokens + path, 99)[0], node)


def test_bits_do_not_depend_on_chunks_and_one_wrong_byte_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, target, results = text(4, LONG), make(tmp_path), list[Tensor]()
    for size in (512, 1, 3, 64):
        monkeypatch.setattr(decoder_module, "CHUNK", size)
        results.append(logits_behind(make(tmp_path), tokens))
        assert torch.equal(results[-1], results[0])
    seq = FakeSeq(0, tokens, max_length=LONG + 8)
    target.prefill([seq], Needs())
    assert torch.equal(logits_of(target, seq, tokens[-1:]), results[0])
    slot = target.kv.extent(0).slots(PAGE + 3, PAGE + 4)[0]
    target.kv.data[0, 1, 0, slot, 2] += 1  # the negative control
    assert not torch.equal(logits_of(target, seq, tokens[-1:]), results[0])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafted_texts_are_the_plain_ones(temperature: float, tmp_path: Path) -> None:
    """Of several texts at once, drafted as chains and as trees, over the ends of pages; floats write others."""
    params = SamplingParams(max_tokens=90, ignore_eos=True, temperature=temperature, seed=5)
    requests = [Request((*text(i, 20), *text(i, 20)), params) for i in range(6)]
    texts = dict[tuple[Any, ...], list[list[int]]]()
    for kind, drafter, width, batch in (
        ("int8", "none", 1, 1), ("int8", "none", 1, 6), ("int8", "ngram", 1, 6), ("int8", "ngram", 3, 4),
        ("int8", "suffix", 2, 2), ("auto", "none", 1, 1),
    ):  # fmt: skip
        settings = SpeculativeConfig(drafter=drafter, budget=6, width=width, controller="fixed")
        target = make(tmp_path, kv_dtype=kind)
        engine = make_engine(target, frozenset(), settings, EngineConfig(max_batch=batch))
        seqs = [engine.find(engine.submit(request)) for request in requests]
        while engine.busy:
            engine.step()
        texts[kind, drafter, width, batch] = [seq.tokens[seq.prompt_length :] for seq in seqs if seq is not None]
        assert (engine.stats.accepted > 0) == (drafter != "none")
    *ours, floats = texts.values()
    assert all(found == ours[0] for found in ours)
    assert floats != ours[0]  # the kind of the cache shows in these texts, so a mixture of kinds would


def test_what_is_not_a_number_is_not_lost(tmp_path: Path) -> None:
    config, weights = save(llama(), tmp_path)
    weights["model.layers.0.self_attn.v_proj.weight"][3] = torch.nan
    target = NativeDecoder(DecoderConfig.from_hf(config), weights, mode="float32", kv_slots=None, kv_dtype="int8")
    with pytest.raises(ModelError, match="NaN"):
        logits_behind(target, text(1, 20))


def test_what_a_device_cannot_do_is_refused_in_one_line(tmp_path: Path) -> None:
    assert reason_against("auto", torch.device("cpu")) is reason_against("int8", torch.device("cpu")) is None
    save(llama(), tmp_path)
    checkpoint = SimpleNamespace(config={"model_type": "t5"}, name="t5")
    for opened, wanted, said in (
        (checkpoint, EngineConfig(kv_dtype="fp8", device="cpu"), "'fp8' needs a GPU; on a CPU use kv_dtype='int8'"),
        (checkpoint, EngineConfig(kv_dtype="int8", device="cpu"), "'t5' is none; use kv_dtype='auto'"),
        (checkpoint, EngineConfig(kv_dtype="int8", device="cpu", tensor_parallel_size=2), "needs tensor_parallel_size"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=said) as error:
            load_target(opened, wanted)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)
    with pytest.raises(InvalidInput, match=r"kv_dtype='int4'.*auto.*int8"):
        EngineConfig(kv_dtype="int4")  # type: ignore[arg-type]
    assert EngineConfig.from_dict({"kv_cache_dtype": "int8"}).kv_dtype == "int8"


LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "capability", "settings", "said"),
    [
        (LLAMA, (8, 0), {"kv_dtype": "fp8"}, "kv_dtype='fp8' needs a GPU of compute capability 8.9, and this one has"),
        (LLAMA, (7, 5), {"kv_dtype": "int8"}, "needs a GPU of compute capability 8.0.*use kv_dtype='auto'"),
        (LLAMA, (9, 0), {"kv_dtype": "fp8", "dtype": "float32"}, "dtype='float32' runs in torch; use kv_dtype='auto'"),
        (LLAMA | {"head_dim": 24}, (9, 0), {"kv_dtype": "int8"}, "head_dim=24 is not one of .*; use kv_dtype='auto'"),
        ({"model_type": "t5"}, (9, 0), {"kv_dtype": "int8"}, "'t5' is none; use kv_dtype='auto'"),
        (LLAMA, (9, 0), {"kv_dtype": "int8", "tensor_parallel_size": 2}, "tensor_parallel_size=1, and it is 2"),
    ],
)  # fmt: skip
def test_what_a_gpu_cannot_do_is_refused_before_weights_are_read(
    config: dict[str, Any],
    capability: tuple[int, int],
    settings: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forerun.build.engine._device", lambda name: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    checkpoint = SimpleNamespace(config=config, name="no weights")  # which would be an error if they were asked for
    with pytest.raises(InvalidInput, match=said) as error:
        load_target(checkpoint, EngineConfig(device="cuda", **settings))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_what_runs_in_torch_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from forerun.models.native.target import native_decoder

    config, weights = save(llama(), tmp_path)
    family = DecoderConfig.from_hf(config)
    assert native_decoder(family, weights, "float32", None, None) is not None
    assert not caplog.records
    assert native_decoder(family, weights, "float16", None, None) is None
    assert "the C kernels have no dtype='float16': it runs in torch" in caplog.text


def test_torch_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.models.native.target import native_decoder

    config, weights = save(llama(), tmp_path)
    family = DecoderConfig.from_hf(config)
    with pytest.raises(InvalidInput, match=r"kv_dtype='int8' needs the native kernels: dtype='float16' runs in torch"):
        native_decoder(family, weights, "float16", None, None, "int8")
    found = native_decoder(family, weights, "auto", None, None, "int8")
    assert found is not None
    assert found.kv.data.dtype == torch.int8
