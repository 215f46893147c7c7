"""Native experts: the same bits alone and in any company, and each expert that is picked is read once."""

import hashlib
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.core.types import Needs, Prompts, TreeBatch
from forerun.models import decoder as decoder_module
from forerun.models.config import DecoderConfig
from forerun.models.native.target import Mode, NativeDecoder
from forerun.testing import FakeSeq, path_to, random_tree, tree_of
from tests.models.tiny_checkpoints import make_decoder, save, score_chain
from tests.native.blocks import needs_native

pytestmark = needs_native

VOCAB, LENGTH = 97, 80
SIZES = {  # multiples of a block, so that all weights are packed
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
KINDS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64, "mlp_only_layers": [],
    },
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9},
}  # fmt: skip


def _text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **SIZES, **KINDS[request.param]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.2).add_(1.0 if "norm" in name else 0.0)
    path = tmp_path_factory.mktemp("experts")
    save(model.float(), path)
    return path


def _load(folder: Path, mode: Mode) -> NativeDecoder:
    from forerun.models.load.checkpoint import open_checkpoint

    opened = open_checkpoint(str(folder))
    return NativeDecoder(DecoderConfig.from_hf(opened.config), opened.weights, mode=mode, kv_slots=None)


def _hash(row: Tensor) -> str:
    return hashlib.sha256(row.numpy().tobytes()).hexdigest()


def _root(target: NativeDecoder, tokens: list[int]) -> str:
    """The hash of the logits behind these tokens, in a pass of one row."""
    seq = FakeSeq(900, tokens, max_length=LENGTH)
    target.prefill([seq], Needs(), 1)
    while target.cached_tokens(seq) < len(tokens) - 1:  # token by token: no row has company
        target.prefill([seq], Needs(), 1)
    logits = target.score([seq], TreeBatch.chains([tokens[-1:]]), Needs()).logits
    assert logits is not None
    target.release(seq)
    return _hash(logits[0])


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "q8"])
def test_a_row_has_its_bits_in_any_company(folder: Path, mode: Mode) -> None:
    """Alone; in trees of a few and of many nodes, in a batch; beside chunks of a prompt."""
    target, rng = _load(folder, mode), random.Random(3)
    alone = _load(folder, mode)  # of its own, so that no prefix is found
    seqs = [FakeSeq(b, _text(b, n), max_length=LENGTH) for b, n in enumerate((12, 5, 33))]
    target.prefill(seqs, Needs())
    for nodes, beside in ((1, 0), (3, 0), (8, 17), (40, 0)):
        trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, nodes) for seq in seqs])
        prompt = FakeSeq(50 + nodes, _text(nodes, beside + 1), max_length=LENGTH)
        prompts = Prompts([prompt], beside) if beside else None
        logits = target.score(seqs, trees, Needs(), prompts).logits
        assert logits is not None
        for b, seq in enumerate(seqs):
            tokens, parents = tree_of(trees, b)
            for i in rng.sample(range(len(tokens)), min(3, len(tokens))):
                path = [tokens[j] for j in path_to(parents, i)]  # without the root
                assert _root(alone, seq.tokens + path) == _hash(logits[trees.starts[b] + i])
                assert _root(alone, [*seq.tokens, *path, 1]) != _hash(logits[trees.starts[b] + i])


@pytest.mark.parametrize("mode", ["float32", "q8"])
def test_chunks_of_a_prompt_change_no_bits(folder: Path, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    seq, found = FakeSeq(0, _text(4, 70), max_length=LENGTH), set[str]()
    for chunk in (512, 33, 7, 1):
        monkeypatch.setattr(decoder_module, "CHUNK", chunk)
        _, scores = _load(folder, mode).prefill([seq], Needs((-1,)))
        found.add(_hash(scores.hidden[-1]))
    assert len(found) == 1


def test_packed_experts_come_near_torch(folder: Path) -> None:
    from forerun.models.load.checkpoint import open_checkpoint

    opened = open_checkpoint(str(folder))
    wanted = score_chain(make_decoder(opened.config, dict(opened.weights)), _text(1, 60), 20, LENGTH)
    for mode, most in (("float32", 1e-5), ("bfloat16", 0.03), ("q8", 0.1)):
        found = score_chain(_load(folder, mode), _text(1, 60), 20, LENGTH)  # type: ignore[arg-type]
        errors = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert float(errors.median()) < most  # a row whose routing is a near-tie may pick another expert


def test_stacked_experts_are_the_same(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = DecoderConfig.from_hf(model.config.to_dict())
    weights = {name: weight.float() for name, weight in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in weights)
    stacked = NativeDecoder(config, weights, mode="q8", kv_slots=None)
    got = [score_chain(target, _text(2, 20), 5, LENGTH) for target in (stacked, _load(folder, "q8"))]
    assert torch.equal(got[0], got[1])


def test_active_experts_are_counted(folder: Path) -> None:
    """One row activates as many as it picks, the same row again no more, and no pass more than there are."""
    target = _load(folder, "q8")
    moe = target.config.moe
    assert moe is not None
    seqs = [FakeSeq(b, [5, 6, 7], max_length=LENGTH) for b in range(6)]
    target.prefill(seqs, Needs())
    target.score(seqs[:1], TreeBatch.chains([[7]]), Needs())
    assert target.active_experts == [moe.per_token] * target.config.layers
    target.score(seqs, TreeBatch.chains([[7]] * 6), Needs())
    assert target.active_experts == [moe.per_token] * target.config.layers
    target.score(seqs[:1], TreeBatch.chains([_text(3, 40)]), Needs())
    assert all(moe.per_token < active <= moe.experts for active in target.active_experts)


def test_a_pass_over_one_node_reads_its_experts_only(folder: Path) -> None:
    target = _load(folder, "float32")
    moe, config = target.config.moe, target.config
    assert moe is not None
    every = sum(tensor.nbytes for tensor in target._kept if isinstance(tensor, Tensor))
    idle = (moe.experts - moe.per_token) * 3 * moe.inner * config.width * 4 * config.layers
    assert target.weight_bytes == every - idle


def test_numbers_that_are_not_finite_pick_experts_all_the_same(folder: Path) -> None:
    from forerun.core.errors import ForerunError
    from forerun.models.load.checkpoint import open_checkpoint

    opened = open_checkpoint(str(folder))
    weights = dict(opened.weights)
    name = next(key for key in weights if key.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight")))
    weights[name] = torch.full_like(weights[name], float("nan"))
    target = NativeDecoder(DecoderConfig.from_hf(opened.config), weights, mode="float32", kv_slots=None)
    seq = FakeSeq(0, [1, 2], max_length=LENGTH)
    target.prefill([seq], Needs())
    with pytest.raises(ForerunError):
        target.score([seq], TreeBatch.chains([[2, 3, 4]]), Needs())


def test_gguf_files_of_experts_run_natively_in_their_own_types(tmp_path: Path) -> None:
    from forerun.build.engine import load_target
    from forerun.core.params import EngineConfig
    from forerun.models.load.checkpoint import open_checkpoint
    from tests.models.tiny_gguf import write_tiny

    opened = open_checkpoint(str(write_tiny(tmp_path / "tiny.gguf", "qwen2_moe")))
    target, alone = (load_target(opened, EngineConfig(device="cpu")) for _ in range(2))
    assert isinstance(target, NativeDecoder)
    assert isinstance(alone, NativeDecoder)
    assert target.mode == "gguf"
    rng = random.Random(1)
    seq = FakeSeq(0, [rng.randrange(24) for _ in range(9)], max_length=LENGTH)
    target.prefill([seq], Needs())
    chain = [seq.tokens[-1], *(rng.randrange(24) for _ in range(19))]
    logits = target.score([seq], TreeBatch.chains([chain]), Needs()).required_logits
    for node in (0, 5, 19):
        assert _root(alone, seq.tokens[:-1] + chain[: node + 1]) == _hash(logits[node])
