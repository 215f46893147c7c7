"""The GPU decoder under the contract of every target, and against transformers; its plain steps on a CPU too."""

import pytest
import torch

from forerun.core.errors import InvalidInput, UnsupportedModel
from forerun.core.types import Needs, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.cuda.network import check_supported
from forerun.models.moe import MoeConfig
from forerun.testing import FakeSeq, check_target
from tests.gpu.tiny import (
    SHAPES,
    SMALL,
    VOCAB,
    fused_on_a_cpu,
    make_reference,
    make_target,
    need_cuda,
    rounding,
    weights_of,
    where_kernels_run,
)

ON_A_CPU = [(name, "cpu") for name in SMALL]
ON_A_GPU = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in SHAPES if name != "large"]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", SMALL)
def test_plain_steps_make_a_target(name: str) -> None:
    check_target(lambda: make_target(name, "cpu"), vocab_size=VOCAB, needs=Needs((-1, 0, 1)), seed=len(name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_make_a_target(name: str, dtype: torch.dtype) -> None:
    need_cuda()
    # bits do not depend on company, so the tolerance is zero
    check_target(
        lambda: make_target(name, "cuda", dtype, "triton"),
        vocab_size=VOCAB,
        rounds=4,
        nodes=12,
        needs=Needs((-1, 1)),
        seed=len(name),
        atol=0.0,
    )


@pytest.mark.parametrize(("name", "device"), [*ON_A_CPU, *ON_A_GPU])
def test_logits_are_those_of_transformers(name: str, device: str) -> None:
    need_cuda(device)
    model = make_reference(name)
    tokens = torch.randint(VOCAB, (1, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(tokens, use_cache=False).logits[0, 139:]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    target = make_target(name, device, dtype)
    seq = FakeSeq(1, tokens[0, :140].tolist())
    target.prefill([seq], Needs())
    got = target.score([seq], TreeBatch.chains([tokens[0, 139:].tolist()]), Needs()).logits
    assert got is not None
    off = float((got.cpu() - wanted).abs().max())
    spread = float(wanted.std())
    most = 1e-4 * spread if device == "cpu" else max(0.1 * spread, 1.25 * rounding(name, tokens, 11))
    assert off < most, f"off by {off:.3g}, at most {most:.3g}, at a spread of {spread:.3g}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_kernels_in_the_interpreter_say_what_transformers_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if where_kernels_run().type == "cuda":
        pytest.skip("the test above does this on a GPU, in 16 bits")
    tokens = torch.randint(VOCAB, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = make_reference(name)(tokens, use_cache=False).logits[0, 22:]
    target = fused_on_a_cpu(make_target(name, "cpu"), monkeypatch)
    seq = FakeSeq(1, tokens[0, :23].tolist())
    target.prefill([seq], Needs())
    got = target.score([seq], TreeBatch.chains([tokens[0, 22:].tolist()]), Needs()).required_logits
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_more_nodes_than_one_pass_takes_are_scored_in_several() -> None:
    target = make_target("llama", "cpu")
    seqs = [FakeSeq(i, [i + 1, 5, 7]) for i in range(4)]
    target.prefill(seqs, Needs())
    trees = TreeBatch.chains([[7, *range(150)] for _ in seqs])
    together = target.score(seqs, trees, Needs((-1,)))
    alone = target.score(seqs[3:], trees.select([3]), Needs((-1,)))
    assert together.logits is not None
    assert alone.logits is not None
    torch.testing.assert_close(together.logits[-151:], alone.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together.hidden[-1][-151:], alone.hidden[-1], atol=1e-5, rtol=1e-5)


def test_a_tree_that_is_too_large_is_refused() -> None:
    target = make_target("llama", "cpu")
    seq = FakeSeq(1, [3, 4])
    target.prefill([seq], Needs())
    with pytest.raises(InvalidInput, match="at most 257 nodes"):
        target.score([seq], TreeBatch.chains([[4] * 258]), Needs())


def test_a_pool_that_is_full_says_so_and_stays_usable() -> None:
    target = make_target("llama", "cpu", kv_slots=192)
    first = FakeSeq(1, [1, 2, 3], max_length=100)
    target.prefill([first], Needs())
    with pytest.raises(InvalidInput, match="raise kv_slots"):
        target.prefill([FakeSeq(2, [1, 2], max_length=50), FakeSeq(3, [1] * 90, max_length=90)], Needs())
    assert target.used_slots == 64
    target.prefill([FakeSeq(2, [1, 2], max_length=50)], Needs())


def test_what_it_cannot_run_is_refused() -> None:
    config, _ = weights_of(make_reference("llama"))
    with pytest.raises(UnsupportedModel, match="head_dim=24"):
        check_supported(_changed(config, head_dim=24))
    with pytest.raises(UnsupportedModel, match="or scaled residuals"):
        check_supported(_changed(config, residual_scale=0.5, moe=MoeConfig(4, 2, 16, True, None)))
    with pytest.raises(UnsupportedModel, match="its experts have GeGLU"):
        check_supported(_changed(config, activation="gelu_tanh", moe=MoeConfig(4, 2, 16, True, None)))


def _changed(config: DecoderConfig, **values: object) -> DecoderConfig:
    fields = {name: getattr(config, name) for name in DecoderConfig.__dataclass_fields__}
    return DecoderConfig(**{**fields, **values})  # type: ignore[arg-type]


def test_memory_that_was_never_written_does_not_matter() -> None:
    """The KV pool is not cleared when it is made: whatever it holds, a pass sees only what was written."""
    target = make_target("llama", "cpu")
    target.kv.data.fill_(float("nan"))
    seqs = [FakeSeq(0, [3, 4, 5]), FakeSeq(1, [5, 6, 7, 8, 9])]
    target.prefill([FakeSeq(2, [2]), *seqs], Needs())
    assert target.kv.pool.held[2] == (0,), "the first page, of one who is not in the pass"
    trees = TreeBatch.trees([([5, 1, 2], [-1, 0, 0]), ([9, 1], [-1, 0])])
    assert target.score(seqs, trees, Needs()).required_logits.isfinite().all()
