"""Recurrent hybrids in the GPU decoder: states of any node, whatever it shares its pass with and however it is read."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.offer import Form
from forerun.core.tree import topology_of
from forerun.core.types import Needs, TreeBatch, TreeForm, Verdict
from forerun.models.config import DecoderConfig
from forerun.models.cuda.hybrid import CudaHybrid
from forerun.models.cuda.states import Nodes, windows_of
from forerun.models.pages import PAGE
from forerun.testing import FakeSeq, check_target, extend, random_tree, random_verdict
from forerun.verify.greedy import device_walk
from forerun.verify.sampled import SampledTokens
from tests.gpu.test_following import CHAIN, WIDE, Forms, Watched, plain_texts, requests, write
from tests.gpu.test_following import make as make_following
from tests.gpu.test_plain_rounds import _engine, _requests, _write
from tests.gpu.tiny import VOCAB, fused_on_a_cpu, need_cuda, where_kernels_run
from tests.models.tiny_checkpoints import make_reference, reference_logits

KINDS = ["lfm2"]
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
_known: dict[str, tuple[Any, DecoderConfig, dict[str, Tensor]]] = {}


def reference(name: str) -> tuple[Any, DecoderConfig, dict[str, Tensor]]:
    if name not in _known:
        model = make_reference(name, SIZES)
        values = {**model.config.to_dict(), "model_type": model.config.model_type}
        _known[name] = model, DecoderConfig.from_hf(values), dict(model.state_dict())
    return _known[name]


def make(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> CudaHybrid:
    config = reference(name)[1]
    weights = {key: one.clone() for key, one in reference(name)[2].items()}  # tests change them
    return CudaHybrid(
        config, weights, dtype=dtype, device=device, kv_slots=20_000, greedy_walk=device_walk(torch.device(device)),
        sampling=SampledTokens(),
    )  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_transformers(name: str) -> None:
    model, target = reference(name)[0], make(name)
    tokens = random.Random(1).choices(range(VOCAB), k=150)
    wanted = reference_logits(model, tokens)
    for cached in (1, 70, 149):
        seq = FakeSeq(cached, tokens[:cached], max_length=400)
        target.prefill([seq], Needs())
        got = target.score([seq], TreeBatch.chains([tokens[cached - 1 :]]), Needs()).required_logits
        torch.testing.assert_close(got, wanted[cached - 1 :], atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", KINDS)
def test_hybrids_are_targets(name: str) -> None:
    check_target(lambda: make(name), vocab_size=VOCAB, needs=Needs((-1, 1)), nodes=9, atol=2e-4)


def on_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> CudaHybrid:
    """On a GPU in bfloat16, or on a CPU in Triton's interpreter."""
    device = where_kernels_run()
    if device.type == "cuda":
        return make(name, torch.bfloat16, "cuda")
    target = make(name)
    assert fused_on_a_cpu(target, monkeypatch) is target
    return target


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_hybrids_are_targets_to_the_bit_on_a_gpu(name: str) -> None:
    need_cuda()
    check_target(lambda: make(name, torch.bfloat16, "cuda"), vocab_size=VOCAB, needs=Needs((-1, 1)), nodes=20, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_captured_texts_are_those_of_plain_decoding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_cuda()
    target, some = willing(name, torch.bfloat16, "cuda"), requests(9, 3)
    wanted, watched = plain_texts(target, some), Watched(monkeypatch)
    texts, accepted = write(make_following(target, Forms([CHAIN, WIDE, None], 6), follows=True), some, 5)
    assert texts == wanted
    assert watched.followed > 10
    assert sum(map(sum, accepted)) > 20
    assert _write(_engine(target, "ngram"), _requests()) == _write(_engine(target, follows=False), _requests())


@pytest.mark.gpu
def test_a_convolution_has_the_bits_of_its_own_path() -> None:
    """Of a tree's node, of a chain that is read in two pieces, beside others."""
    device, channels, taps, layers, layer = where_kernels_run(), 40, 4, 2, 1
    from forerun.models.cuda.kernels import recurrent as kernels

    draws, parents = torch.Generator().manual_seed(1), [-1, 0, 1, 1, 0, 4, 5, 6, 3]
    nodes, dtype = len(parents), torch.float32 if device.type == "cpu" else torch.bfloat16
    sums = torch.randn(2, nodes, 3 * channels, generator=draws).to(device)
    factors, weights = torch.rand(nodes, generator=draws), torch.randn(taps, channels, generator=draws)
    bias = torch.randn(channels, generator=draws)
    start = torch.randn(taps - 1, channels, generator=draws).to(device, dtype)
    factors, weights, bias = (one.to(device) for one in (factors, weights, bias))
    states = torch.zeros(9, layers, taps - 1, channels, dtype=dtype, device=device)

    def run(rows: list[int], above: list[int], keeps: list[int]) -> tuple[Tensor, Tensor]:
        """Outputs and inputs of some rows; parents below 0 are places."""
        given, factor = sums[:, rows].contiguous(), factors[rows].contiguous()
        links = torch.full((4, 16), -1, dtype=torch.int32)
        links[0, : len(rows)], links[1, : len(rows)] = torch.tensor(above), torch.tensor(keeps)
        found, joined = (torch.zeros(len(rows), channels, dtype=dtype, device=device) for _ in range(2))
        kernels.short_conv[len(rows), 2](
            given, factor, given, links.to(device), weights, bias, joined, states, found, len(rows), 1e-6, 0, 16,
            states.stride(0), layer, C=channels, BLOCK=32, K=taps, WIDTH=64, PIECES=0, PARTS=2, BIAS=True, PDL=False,
        )  # fmt: skip
        return found, joined

    states[3, layer] = start
    found, joined = run([*range(nodes)], [-4 if one < 0 else one for one in parents], [-1] * nodes)
    whole = torch.zeros_like(states)
    whole[:, layer] = states[:, layer]
    paths = topology_of(tuple(parents)).paths
    above = torch.tensor([-4 if one < 0 else one for one in parents], device=device)
    windows = windows_of(joined, above, whole[:, layer])
    behind = (sums.sum(0) * factors[:, None])[:, channels : 2 * channels]
    wanted = behind * ((windows.float() * weights).sum(1) + bias)
    torch.testing.assert_close(found.float(), wanted, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=0.02)
    for node, path in enumerate(paths):
        states.zero_()
        states[3, layer] = start
        for first, end, before, after in ((0, len(path) // 2, 3, 5), (len(path) // 2, len(path), 5, 6)):
            before = 3 if first == 0 else before
            if first < end:
                some = list(path[first:end])
                keeps = [-1] * (len(some) - 1) + [after]
                alone, _ = run(some, [-1 - before, *range(len(some) - 1)], keeps)
        assert torch.equal(alone[-1], found[node])
        assert torch.equal(states[6, layer], windows[node, 1:])
    states.zero_()
    states[3, layer] = start
    kept = torch.tensor([3, 8, 7], device=device), torch.tensor([4, -1, 8], device=device)
    both = torch.stack((torch.zeros_like(joined), joined))
    numbers = above.int()
    kernels.keep_inputs[3, layers, 2](
        both, numbers, *kept, states, both.stride(0), states.stride(0), C=channels, BLOCK=32, K=taps
    )
    assert torch.equal(states[4, layer], windows[3, 1:])
    assert torch.equal(states[8, layer], windows[7, 1:])
    assert not states[[0, 1, 2, 5, 6, 7]].any()


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_kernels_agree_with_the_plain_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, plain, rng = on_kernels(name, monkeypatch), make(name), random.Random(1)
    seqs = [FakeSeq(b, rng.choices(range(VOCAB), k=n), max_length=400) for b, n in enumerate((9, 1, 30))]
    tolerance = 1e-3 if target.device.type == "cpu" else 0.3
    for one in (target, plain):
        one.prefill(seqs, Needs())
    for _ in range(3):
        trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 6) for seq in seqs], device=target.device)
        got, wanted = (one.score(seqs, trees, Needs()).required_logits.cpu() for one in (target, plain))
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=0)
        verdict = random_verdict(rng, trees, VOCAB)
        for one in (target, plain):
            one.commit(seqs, trees, verdict)
        extend(seqs, trees, verdict)


def willing(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> CudaHybrid:
    """Says few different tokens, so that much of what is drafted is accepted."""
    target = make(name, dtype, device)
    target.model.head[5:] = 0.0
    target.model.head[1] = 0.0
    return target


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("forms", [[CHAIN], [WIDE], [CHAIN, WIDE, None]])
def test_texts_are_those_of_plain_decoding_where_rounds_follow_unread_ones(
    forms: list[Form | None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, some = willing(name), requests(9, 3)
    wanted, watched = plain_texts(target, some), Watched(monkeypatch)
    texts, accepted = write(make_following(target, Forms(forms, 6), follows=True), some, 5)
    assert texts == wanted
    assert watched.followed > 10
    assert sum(map(sum, accepted)) > 20, "something is accepted"
    assert not target._written
    kept = sum(len(state) for state in target._states._kept.values())
    assert target.places.free == target.places.size - 1 - kept, "places that nobody gives back"


def wrong_end(self: CudaHybrid, form: TreeForm) -> None:
    """States behind roots, whatever was accepted."""
    rows = torch.arange(0, form.rows, form.nodes)
    self._keep(self.places.trace(form.rows), rows, self.places.links[3, : form.trees])


def not_rolled_back(self: CudaHybrid, seqs: Any, trees: TreeBatch, verdict: Verdict) -> None:
    """Of every tree the state behind its last node, with the accepted path's keys and values."""
    for seq, size, path in zip(seqs, trees.sizes(), verdict.to_host()[0], strict=True):
        made = self._states.nodes[seq.id][0][0]
        if isinstance(made, Nodes):
            self._make_states(made.trace, [(made, size - 1)])
            made[[0, *path][-1]] = made[size - 1]
    commit(self, seqs, trees, verdict)


commit = CudaHybrid.commit


@pytest.mark.parametrize("name", KINDS)
def test_a_device_that_keeps_wrong_states_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, some = make(name), requests(9, 3)
    target.model.head[9:] = 0.0
    wanted = plain_texts(target, some)
    monkeypatch.setattr(CudaHybrid, "_decided", wrong_end)
    assert write(make_following(target, Forms([WIDE], 6), follows=True), some, 5)[0] != wanted


@pytest.mark.parametrize("name", KINDS)
def test_a_state_that_is_not_rolled_back_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaHybrid, "commit", not_rolled_back)
    with pytest.raises(AssertionError):
        check_target(lambda: make(name), vocab_size=VOCAB, nodes=9, atol=2e-4)


@pytest.mark.parametrize("name", KINDS)
def test_turns_start_where_texts_ended_and_pages_are_found_with_their_states(name: str) -> None:
    target, plain, rng = make(name), make(name), random.Random(5)
    seqs = [
        FakeSeq(b, rng.choices(range(VOCAB), k=n), max_length=400, cache_salt="") for b, n in enumerate((50, 61, 3))
    ]
    target.prefill(seqs, Needs())
    for _ in range(6):
        trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 7) for seq in seqs])
        target.score(seqs, trees, Needs())
        verdict = random_verdict(rng, trees, VOCAB)
        target.commit(seqs, trees, verdict)
        extend(seqs, trees, verdict)
    for seq in seqs:
        target.release(seq)
    for seq in seqs:
        for tokens in (seq.tokens, seq.tokens[: PAGE + 1], seq.tokens[: PAGE - 1]):
            again = FakeSeq(seq.id + 10, [*tokens, 5], max_length=400, cache_salt="")
            target.prefill([again], Needs())
            whole = PAGE if len(tokens) > PAGE else 0
            assert target.reused_tokens(again) == (len(tokens) - 1 if tokens == seq.tokens else whole)
            fresh = FakeSeq(99, again.tokens, max_length=400)
            plain.prefill([fresh], Needs())
            root = TreeBatch.chains([[5]])
            got, wanted = (
                one.score([own], root, Needs()).required_logits for one, own in ((target, again), (plain, fresh))
            )
            torch.testing.assert_close(got, wanted, atol=2e-4, rtol=0)
            target.kv.release(again.id)
            plain.release(fresh)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("name", KINDS)
def test_plain_rounds_follow_unread_ones_and_look_ups_are_rolled_back(name: str, drafter: str) -> None:
    target = willing(name)
    wanted = _write(_engine(target, follows=False), _requests())
    assert target.plain.followed == 0
    assert _write(_engine(target, drafter), _requests()) == wanted
    assert target.plain.followed > 20 or drafter != "none"
