"""Sampled tokens on a device: equal to the host's walks to the last token, row by row, in any company."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from forerun.core.noise import (
    ACCEPT,
    DRAW,
    Noise,
    device_keys,
    device_uniform,
    device_uniforms,
    draw,
    mixed_seed,
    uniform,
    uniforms,
)
from forerun.core.params import SamplingParams
from forerun.core.tree import trace
from forerun.core.types import Laws, PlainSeq, TreeBatch, Verdict
from forerun.testing import path_to
from forerun.verify import sampled
from forerun.verify.base import Verifier
from forerun.verify.coupled import CoupledVerifier
from forerun.verify.exact import BlockVerifier, ExactVerifier
from forerun.verify.greedy import walk_by_torch
from forerun.verify.sampled import CHUNK_ENTRIES, Kinds, SampledTokens, decides_alike, kinds_of
from forerun.verify.typical import TypicalVerifier
from forerun.verify.walk import decide_together, drawn_tokens, reads_once
from forerun.verify.warp import warp
from tests.verify.trees import make_tree

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])]
SEEDS = [0, 1, 77, 2**31, 2**63 - 1, 2**64 - 1, 2**70 + 5, -3]
LAWS: list[dict[str, float]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.6, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    {},  # greedy
]
RULE = SampledTokens()


def need(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("device", DEVICES)
def test_the_devices_numbers_are_the_hosts(device: str) -> None:
    need(device)
    seeds = torch.tensor([mixed_seed(seed) for seed in SEEDS], device=device)
    for position in (0, 1, 4095, 2**20):
        at = torch.full_like(seeds, position)
        for purpose in (DRAW, ACCEPT):
            assert device_uniform(seeds, at, purpose).tolist() == [uniform(s, position, purpose) for s in SEEDS]
        tokens = torch.arange(300, dtype=torch.int32, device=device)
        found = device_uniforms(seeds, at, tokens).cpu()
        assert torch.equal(found, torch.stack([uniforms(seed, position, 300) for seed in SEEDS]))


def test_the_kernels_numbers_are_the_hosts() -> None:
    """On a CPU: TRITON_INTERPRET=1 python -m pytest tests/verify/test_sampled.py"""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if find_spec("triton") is None or (device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"):
        pytest.skip("needs a GPU, or Triton's interpreter")
    from forerun.core.noise_kernel import BLOCK, uniforms_by_kernel

    size = 2 * BLOCK + 7
    seeds = torch.tensor([mixed_seed(seed) for seed in SEEDS], device=device)[:, None]
    found = uniforms_by_kernel(
        seeds, torch.tensor([0, 5, 2**20], device=device), torch.arange(size, dtype=torch.int32, device=device)
    )
    for seed, rows in zip(SEEDS, found.cpu(), strict=True):
        for position, row in zip((0, 5, 2**20), rows, strict=True):
            assert torch.equal(row, uniforms(seed, position, size))


def test_numbers_of_other_seeds_positions_and_purposes_differ() -> None:
    seeds = torch.tensor([mixed_seed(seed) for seed in range(50)])[:, None]
    keys = device_keys(seeds, torch.arange(50), DRAW)
    assert len({*keys.flatten().tolist(), *device_keys(seeds, torch.arange(50), ACCEPT).flatten().tolist()}) == 5000


def make_round(
    rng: random.Random, count: int, nodes: int, depth: int, vocab: int, device: str, laws: list[dict[str, float]]
) -> tuple[list[PlainSeq], list[Verifier], TreeBatch, Tensor]:
    trees = [make_tree(rng, nodes, depth, vocab) for _ in range(count)]
    seqs, verifiers = [], list[Verifier]()
    for i, (tokens, _) in enumerate(trees):
        verifiers.append(rng.choice([ExactVerifier(), CoupledVerifier(), BlockVerifier()]))
        text = [rng.randrange(vocab) for _ in range(rng.randint(0, 30))] + tokens[:1]
        params = SamplingParams(**rng.choice(laws))  # type: ignore[arg-type]
        couples = verifiers[-1].shares_noise
        seqs.append(PlainSeq(i, text, params=params, seed=rng.choice(SEEDS), shares_noise=couples))
    noise = torch.Generator().manual_seed(rng.getrandbits(30))
    logits = torch.randn(count * nodes, vocab, generator=noise) * 2
    return seqs, verifiers, TreeBatch.trees(trees, device=device), logits.to(device)


def by_host(seqs: list[PlainSeq], verifiers: list[Verifier], trees: TreeBatch, logits: Tensor) -> list[object]:
    """Each tree by its own verifier, alone."""
    found: list[object] = []
    for b, (seq, verifier) in enumerate(zip(seqs, verifiers, strict=True)):
        one = trees.select([b])
        laws = warp(logits[trees.starts[b] : trees.starts[b + 1]], [seq], one)
        verdict = verifier.verify(one, laws, Noise([seq.seed], [len(seq.tokens)]))
        found.append((verdict.to_host()[0][0], verdict.to_host()[1][0]))
    return found


def by_device(
    seqs: list[PlainSeq], trees: TreeBatch, logits: Tensor, depth: int, kinds: Kinds | None = None
) -> list[object]:
    kinds, count = kinds or kinds_of(seqs), len(seqs)
    assert kinds is not None
    both = torch.stack((trees.tokens, trees.parents)).view(2, count, -1)
    depths, ancestors = trace(both[1], depth)
    table = torch.from_numpy(RULE.settings(seqs, kinds)).to(logits.device)
    roots = torch.tensor([[len(seq.tokens) - 1] for seq in seqs], device=logits.device)
    tokens = RULE.tokens(logits.view(*both.shape[1:], -1), (roots + depths).int(), table, kinds, depth)
    paths = torch.zeros(count, depth, dtype=torch.long, device=logits.device)
    accepted, bonus = torch.zeros(2, count, dtype=torch.long, device=logits.device)
    walk_by_torch(both, ancestors.int(), tokens, paths, accepted, bonus)
    found = Verdict(paths, accepted, bonus).to_host()
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(25))
def test_verdicts_are_those_of_the_verifiers(seed: int, device: str) -> None:
    need(device)
    rng = random.Random(seed)
    depth = rng.randint(1, 5)
    sizes = rng.randint(1, 6), rng.randint(1, 16), depth, rng.choice([5, 8, 64])
    laws = rng.sample(LAWS, rng.randint(1, 4))
    seqs, verifiers, trees, logits = make_round(rng, *sizes, device, laws)
    if kinds_of(seqs) is None:
        assert all(seq.params.is_greedy for seq in seqs)
        return
    assert by_device(seqs, trees, logits, depth) == by_host(seqs, verifiers, trees, logits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("coupled", [True, False])
def test_verdicts_found_at_once_are_those_of_walks(coupled: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of trees of any sizes and laws of any kind, greedy ones among them; rows are cut as memory wants it."""
    need(device)
    rng, verifier, longest = random.Random(4), CoupledVerifier() if coupled else ExactVerifier(), 0
    for _ in range(12):
        shapes = [make_tree(rng, rng.randint(1, 12), 4, 4) for _ in range(rng.randint(1, 5))]
        trees = TreeBatch.trees(shapes, device=device)
        seqs = [PlainSeq(i, [1, 2], params=SamplingParams(**rng.choice(LAWS))) for i in range(len(shapes))]  # type: ignore[arg-type]
        logits = torch.randn(trees.nodes, 4, generator=torch.Generator().manual_seed(rng.getrandbits(30)))
        laws = warp(logits.to(device), seqs, trees)
        assert reads_once(trees, laws) == (device == "cuda" and not all(laws.greedy))
        noise = Noise([rng.choice(SEEDS) for _ in seqs], [rng.randint(0, 50) for _ in seqs])
        found = decide_together(trees, laws, noise, coupled).to_host()
        on_host = Laws(laws.log_weights.cpu(), laws.greedy)
        assert found == verifier.verify(TreeBatch.trees(shapes), on_host, noise).to_host()
        longest = max(longest, *map(len, found[0]))
        with monkeypatch.context() as patch:
            patch.setattr("forerun.verify.walk.CHUNK_ENTRIES", 4 * 3)
            assert decide_together(trees, laws, noise, coupled).to_host() == found
        assert decide_together(trees, laws, noise, not coupled).to_host() != found or trees.nodes < 30
    assert longest > 1


def test_walks_go_somewhere_and_every_rule_occurs() -> None:
    """The negative control of the test above, and of the numbers: other seeds or positions give other verdicts."""
    rng, lengths, other = random.Random(5), list[int](), 0
    for _ in range(40):
        seqs, _, trees, logits = make_round(rng, 4, 12, 4, 5, "cpu", LAWS[:2])
        found = by_device(seqs, trees, logits, 4)
        lengths += [len(path) for path, _ in found]  # type: ignore[misc]
        for seq in seqs:
            seq.tokens = [0, *seq.tokens]
        other += by_device(seqs, trees, logits, 4) != found
    assert sum(length > 1 for length in lengths) > 10
    assert other > 30


def test_tokens_do_not_depend_on_company_or_on_how_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    seqs, _, trees, logits = make_round(rng, 6, 7, 3, 97, "cpu", LAWS[:6])
    together = by_device(seqs, trees, logits, 3)
    kinds = kinds_of(seqs)
    rows = logits.view(6, 7, -1)
    alone = [by_device([seq], trees.select([b]), rows[b], 3, kinds)[0] for b, seq in enumerate(seqs)]
    assert alone == together
    monkeypatch.setattr("forerun.verify.sampled.CHUNK_ENTRIES", 7 * 97 * 2)
    assert CHUNK_ENTRIES > 7 * 97 * 2
    assert by_device(seqs, trees, logits, 3) == together


SHAPES = [(-1,), (-1, 0), (-1, 0, 0), (-1, 0, 1), (-1, 0, 0, 1), (-1, 0, 1, 1)]


def committed_law(seed: int, parents: tuple[int, ...], choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The law of the next two tokens, by taking every token after every node; and the target's own.

    A round that commits one token is completed with the target's law, which by induction the next round has.
    """
    vocab, nodes, rng = 3, len(parents), torch.Generator().manual_seed(seed)
    table = torch.rand(1 + vocab, vocab, generator=rng, dtype=torch.float64) + 0.05
    first, then = (table / table.sum(-1, keepdim=True)).split([1, vocab])
    paths = [path_to(parents, node) for node in range(nodes)]
    # siblings differ
    taken = [sum(parents[i] == parents[node] for i in range(node)) for node in range(nodes)]
    tokens = [0, *((seed + taken[node]) % vocab for node in range(1, nodes))]
    laws = [[first[0], *then][1 + tokens[path[0]] if path else 0] for path in paths]
    laws = [law if len(path) < 2 else torch.ones(vocab).double() / vocab for law, path in zip(laws, paths, strict=True)]
    branches = torch.tensor(list(itertools.product(range(vocab), repeat=nodes)))
    weights = torch.stack([choose(law)[branches[:, node]] for node, law in enumerate(laws)]).prod(0)
    both = torch.tensor([tokens, list(parents)])[:, None].expand(2, len(branches), nodes).contiguous()
    out = torch.zeros(len(branches), 3, dtype=torch.long), *torch.zeros(2, len(branches), dtype=torch.long)
    walk_by_torch(both, trace(both[1], 3)[1].int(), branches, *out)
    found = torch.zeros(vocab, vocab, dtype=torch.float64)
    for weight, path, length, bonus in zip(weights.tolist(), *(part.tolist() for part in out), strict=True):
        said = [*(tokens[node] for node in path[:length]), bonus]
        if len(said) > 1:
            found[said[0], said[1]] += weight
        else:
            found[said[0]] += weight * then[said[0]]
    return found, first[0][:, None] * then


@pytest.mark.parametrize("parents", SHAPES)
def test_what_is_committed_has_the_targets_law(parents: tuple[int, ...]) -> None:
    """By enumeration; the negative control takes the likeliest token after every node."""
    for seed in range(6):
        found, wanted = committed_law(seed, parents, lambda law: law)
        assert (found - wanted).abs().max() < 1e-12
        greedy, _ = committed_law(seed, parents, lambda law: (law == law.max()).double())
        assert (greedy - wanted).abs().max() > 0.05


def test_quantiles_of_a_law_have_its_masses() -> None:
    laws = torch.tensor([[3.0, 0.0, 1.0, 4.0], [1.0, 1.0, 0.0, 6.0]])[None] / 8
    u = (torch.arange(8 * 64, dtype=torch.float64) + 0.5) / (8 * 64)
    found = drawn_tokens(laws.expand(len(u), -1, -1), u[:, None].expand(-1, 2))
    for row, law in enumerate(laws[0]):
        assert found[:, row].bincount(minlength=4).tolist() == (law * 8 * 64).tolist()


def test_draws_never_name_an_impossible_token() -> None:
    laws = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    for u in (0.0, 0.3, 0.5, 0.75, 1.0 - 2.0**-53, 1.0):
        found = drawn_tokens(laws[None], torch.full((1, 3), u, dtype=torch.float64))[0].tolist()
        assert found == [draw(law, u) for law in laws]


def test_what_the_host_must_decide() -> None:
    sampled = PlainSeq(0, [1], params=SamplingParams(temperature=1.0))
    greedy = PlainSeq(1, [1])
    biased = PlainSeq(2, [1], params=SamplingParams(temperature=1.0, logit_bias={3: 1.0}))
    penalised = PlainSeq(3, [1], params=SamplingParams(repetition_penalty=1.2))
    cut = [PlainSeq(4, [1], params=SamplingParams(temperature=1.0, top_k=k)) for k in range(2, 8)]
    assert kinds_of([greedy]) is None
    assert kinds_of([sampled, greedy]) == Kinds(False, True, ())
    assert kinds_of([sampled, biased]) is None
    assert kinds_of([sampled, penalised]) is None
    assert kinds_of(cut[:4]) is not None
    assert kinds_of(cut) is None
    assert all(map(decides_alike, [ExactVerifier(), BlockVerifier(), CoupledVerifier()]))
    assert not decides_alike(TypicalVerifier())


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [300, 4096, 9001])
def test_the_kernels_tokens_are_those_of_torch(vocab: int) -> None:
    """On a GPU to the last token. On a CPU: TRITON_INTERPRET=1, whose functions round otherwise than torch's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if find_spec("triton") is None or (device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"):
        pytest.skip("needs a GPU, or Triton's interpreter")
    from forerun.verify.kernels import coupled_by_kernels

    seqs = [
        PlainSeq(i, [1], params=SamplingParams(temperature=hot), seed=seed, shares_noise=True)
        for i, (hot, seed) in enumerate([(1.0, 3), (0.0, 4), (0.7, 2**63 - 1), (1.4, -9)])
    ]
    kinds, nodes, numbers = Kinds(True, False, ()), 6, torch.Generator().manual_seed(vocab)
    assert kinds_of(seqs) == kinds
    logits = (3.0 * torch.randn(len(seqs), nodes, vocab, generator=numbers)).to(device)
    logits[:, 1] = logits[:, 1].round()  # the same logit often
    logits[:, 2, 7:] = float("-inf")
    positions = torch.randint(0, 2**20, (len(seqs), nodes), generator=numbers, dtype=torch.int32).to(device)
    positions[:, 1:] = positions[:, :1] + torch.tensor([1, 1, 2, 3, 3], device=device)
    table = torch.from_numpy(RULE.settings(seqs, kinds)).to(device)
    wide = torch.zeros(4, 9, dtype=torch.long, device=device)  # a part of what was sent for more
    wide[:, : len(seqs)] = table
    found = coupled_by_kernels(logits, positions, wide[:, : len(seqs)], 1)
    wanted = sampled._tokens(logits, positions.long(), table, kinds, 3)
    assert torch.equal(found, wanted)
    assert torch.equal(found[1], logits[1].argmax(-1))
    others = coupled_by_kernels(logits, positions + 1, table, 1)
    assert not torch.equal(found[0], others[0])
    assert torch.equal(found[1], others[1])


def test_positions_of_padding_may_be_any() -> None:
    """A form may be captured while positions of a plain pass lie there: none of them may reach out of the noise."""
    noise = torch.randn(2, 4, 5)
    depths = torch.tensor([[0, 1, 3], [0, -147, 90]])
    found = sampled._by_depth(noise, depths)
    assert found[0].equal(noise[0, [0, 1, 3]])
    assert found[1].equal(noise[1, [0, 0, 3]])
