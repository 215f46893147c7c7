"""The kernels between two passes of a drafted round do what their torch twins do, to the last integer.

They run on a GPU, or on a CPU in Triton's interpreter, where that is installed:
TRITON_INTERPRET=1 python -m pytest tests/gpu/test_draft_kernels.py
"""

import math
import random
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.core.request import best_count
from forerun.core.types import CUT, Budget, Form, TreeForm, Verdict
from forerun.drafters.device import eagle as draft_runner
from forerun.drafters.device import features as feature_rows
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.eagle import PRICED, HeadDraft
from forerun.drafters.device.growth import (
    DraftNoise,
    Frontier,
    HeadOutput,
    Pool,
    complete,
    cut_trees,
    grow_level,
    grow_plainly,
)
from forerun.drafters.device.head import append_decided, make_net, pick_fused, pick_plainly
from forerun.drafters.device.plan import BUCKETS, Lane, plan_draft
from forerun.models.cuda.after_pass import AfterPass
from forerun.models.cuda.device_trees import STEPS, LastRound
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import MAX_ROWS, Plan, Size
from forerun.testing import FakeSeq
from tests.drafters.rounds import as_lists
from tests.gpu.heads import agree, make_head, plain_drafter, settled
from tests.gpu.tiny import VOCAB, make_target, where_kernels_run

SHAPES = [Form(1, 1, 1), Form(5, 5, 1), Form(16, 16, 1), Form(8, 3, 3), Form(59, 6, 10), Form(20, 2, 17)]


def _lanes(rng: random.Random, count: int, pads: int, behind: int) -> list[Lane]:
    """Sequences that were read, some that were not, and padding, which is one sequence of one row."""
    found = []
    for b in range(count - pads):
        first = rng.choice([0, 1, 61, 127, 1020, 4090, rng.randrange(6000)])
        pages = np.array(rng.sample(range(1, 1 << 20), (first + 400) // 64), dtype=np.int32)
        tokens = [rng.randrange(1 << 17) for _ in range(rng.randint(1, behind))]
        follows = rng.choice([-1, rng.randrange(MAX_ROWS // behind)])
        if follows >= 0:
            tokens = []
        found.append(Lane(rng.randrange(1 << 17), tokens, pages, first, 24 * b, follows))
    padding = Lane(0, (0,), np.array([3, 4, 5, 6, 7], dtype=np.int32), 0, 24 * 128)
    return [*found, *[padding] * pads]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("count", "pads", "group_nodes"), [(1, 0, 16), (2, 1, 4), (4, 0, 16), (12, 3, 64)])
@pytest.mark.parametrize("attends", [False, True])
def test_the_plan_of_a_draft(shape: Form, count: int, pads: int, group_nodes: int, attends: bool) -> None:
    device, deepest = where_kernels_run(), STEPS - 1 if attends else shape.depth  # behind deeper trees too
    assert count in BUCKETS
    rng = random.Random(f"{shape} {count}")
    last = LastRound(device)
    last.accepted.copy_(torch.tensor([rng.randrange(deepest + 1) for _ in range(MAX_ROWS)]))
    last.tokens.copy_(torch.tensor([rng.randrange(1 << 17) for _ in range(MAX_ROWS * STEPS)]).view(-1, STEPS))
    lanes = _lanes(rng, count, pads, shape.depth + 1)
    form, sent = plan_draft(lanes, shape, group_nodes, attends=attends)
    at = MAX_ROWS + form.sent_at
    start = torch.zeros(at + len(sent), dtype=torch.int32, device=device)
    start[at:] = torch.from_numpy(sent)
    plain, by_kernel = start.clone(), start.clone()
    for _ in range(2):  # a replay: nothing may add up
        complete(plain, form, last, fused=False)
        complete(by_kernel, form, last, fused=True)
        differs = (plain != by_kernel).nonzero().flatten().tolist()
        assert not differs, differs[:10]
    last.accepted.add_(1).remainder_(deepest + 1)
    complete(by_kernel, form, last, fused=True)
    follows = sent[5 * count : 6 * count]
    assert torch.equal(plain, by_kernel) == bool((follows < 0).all()), "another path is another plan"


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "vocab"), [(1, 200), (3, 5000), (10, 16384), (8, 32000)])
def test_kernels_grow_what_torch_grows(width: int, vocab: int) -> None:
    device = where_kernels_run()
    torch.manual_seed(width)
    trees, depth = 3, 4
    ids = torch.randperm(vocab, device=device).sort().values + 7
    head_output = HeadOutput(ids, -0.1, 0.9)
    pools = [Pool(trees, width, width, depth, device) for _ in range(2)]
    frontiers = [Frontier.of_roots(trees, device)] * 2
    for level in range(depth):
        rows = trees * (width if level else 1)
        logits = 3 * torch.randn(rows, vocab, device=device)
        frontiers = [
            grow_level(pools[0], frontiers[0], logits, head_output, fused=True),
            grow_plainly(pools[1], frontiers[1], logits, head_output),
        ]
        for name in ("tokens", "places", "parents", "ancestors"):
            assert torch.equal(getattr(frontiers[0], name), getattr(frontiers[1], name)), (level, name)
        torch.testing.assert_close(frontiers[0].log_survivals, frontiers[1].log_survivals, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pools[0].scores, pools[1].scores, atol=1e-4, rtol=1e-4)
    assert torch.equal(pools[0].tokens, pools[1].tokens)
    assert torch.equal(pools[0].parents, pools[1].parents)


def _pool(rng: random.Random, form: Form, trees: int, device: torch.device) -> Pool:
    """Candidates whose scores fall from parent to child, with many ties and some that are impossible."""
    pool = Pool(trees, form.width, form.width, form.depth, device)
    size = pool.scores.shape[1]
    scores, parents = torch.zeros(trees, size), torch.zeros(trees, size, dtype=torch.long)
    for b in range(trees):
        levels = [[-1]]
        while sum(map(len, levels)) <= size:
            frontier = levels[-1] if len(levels) < 3 else rng.sample(levels[-1], form.width)
            made = sum(map(len, levels)) - 1
            levels.append(list(range(made, made + form.width * len(frontier))))
            for place in levels[-1]:
                above = frontier[(place - made) // form.width]
                fall = rng.choice([0.0, -0.0, -0.25, -1.0, -rng.random(), -math.inf])
                parents[b, place], scores[b, place] = above, fall + (scores[b, above] if above >= 0 else 0.0)
    pool.scores.copy_(scores)
    pool.parents.copy_(parents)
    pool.tokens.copy_(torch.tensor([[rng.randrange(1 << 17) for _ in range(size)] for _ in range(trees)]))
    return pool


@pytest.mark.gpu
@pytest.mark.parametrize("form", [*SHAPES[:5], Form(4, 3, 3), Form(90, 6, 16)])
def test_the_cut_of_a_pool(form: Form) -> None:
    device, rng, trees = where_kernels_run(), random.Random(str(form)), 3
    pool = _pool(rng, form, trees, device)
    roots = torch.tensor([5, 1 << 16, 0], dtype=torch.int32, device=device)
    buffers = torch.full((2, 2, 1000), -7, device=device)
    for fused, buffer in zip((False, True), buffers, strict=True):
        rows = trees * (form.nodes + 1)
        cut_trees(pool, roots, form.nodes, buffer[:, :rows].view(2, trees, -1), fused=fused)
    assert torch.equal(*buffers)
    assert buffers[0, 1].max() < form.nodes
    if form.nodes < PRICED:
        _cut_by_prices(pool, roots, form, buffers)


def _cut_by_prices(pool: Pool, roots: Tensor, form: Form, buffers: Tensor) -> None:
    """As many of the best nodes keep their tokens as heads on the host would draft; the kernel agrees."""
    trees, kept, rows = len(roots), set(), len(roots) * (form.nodes + 1)
    whole = buffers[0, :, :rows].view(2, trees, -1).clone()
    # sums of few binary digits: no order of adding them up matters
    pool.scores.copy_((pool.scores.exp() * 256).round().div(256).clamp(min=2.0**-20).log())
    cut_trees(pool, roots, form.nodes, whole, fused=False)
    for each in (0.01, 0.2, 0.5, 2.0, -1.0):
        price = [round(64 * each * nodes**0.8) / 64 + 1 / 512 for nodes in range(PRICED)]
        for fused, buffer in zip((False, True), buffers, strict=True):
            into, prices = buffer[:, :rows].view(2, trees, -1), torch.tensor(price, device=roots.device)
            cut_trees(pool, roots, form.nodes, into, fused=fused, prices=prices)
        assert torch.equal(*buffers)
        for b in range(trees):
            tokens, parents = buffers[0, :, :rows].view(2, trees, -1)[:, b].tolist()
            best = pool.scores[b].sort(descending=True).values[: form.nodes].exp()
            wanted = best_count(best.tolist(), price)
            left = [i for i, token in enumerate(tokens) if token != CUT]
            assert len(left) == 1 + wanted
            assert all(parents[i] in left for i in left[1:]), "what lies below a node that was cut is cut"
            assert all(tokens[i] == whole[0, b, i] for i in left)
            assert parents == whole[1, b].tolist()
            kept.add(wanted)
    assert {0, form.nodes} <= kept


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [1, 3])
def test_rows_of_decided_paths(layers: int) -> None:
    device, form, width = where_kernels_run(), TreeForm(5, 9, 4), 48
    last = LastRound(device)
    last.accepted[:5] = torch.tensor([0, 4, 2, 1, 4], device=device)
    last.rows[:5, :5] = torch.arange(45, device=device).view(5, 9)[:, [0, 2, 3, 5, 8]]
    sent = torch.tensor([[24, 0, -1, 72, 48], [23, 22, -1, 700, 5]], device=device)  # nobody owns the third
    hidden = [torch.randn(45, width, device=device) for _ in range(layers)]
    rows = torch.zeros(2, 4 * 24 + 2, layers * width, device=device)
    for fused, into in zip((False, True), rows, strict=True):
        append_decided(into, hidden, sent, last, form, fused=fused)
    assert torch.equal(*rows[:, :-1]), "the last row is never read"
    assert int((rows[1] != 0).any(-1).sum()) == 1 + 5 + 2 + 5


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_rows_that_a_head_goes_on_with(count: int) -> None:
    """A row may go where another one has not left yet."""
    device, rng, behind = where_kernels_run(), random.Random(count), 6
    lasts = [b * behind + rng.randrange(behind) for b in range(count)]
    rows = torch.tensor(lasts, dtype=torch.int32, device=device)
    plain = [torch.randn(256, *more, device=device) for more in ((96,), (1040,), ())]
    picked = [buffer.clone() for buffer in plain]
    pick_plainly(plain, rows)
    pick_fused(*picked, rows)
    for one, other in zip(plain, picked, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_level_reads_the_rows_of_its_parents(dtype: torch.dtype) -> None:
    """The same bits as from rows that were brought into order before."""
    device, rows, width = where_kernels_run(), 6, 48
    from forerun.drafters.device import kernels as kernels_head

    parents = torch.tensor([0, 3, 0, 1, 3, 5], device=device)
    tokens = torch.tensor([4, 4, 9, 0, 11, 2], dtype=torch.int32, device=device)
    table, carried = torch.randn(12, width, device=device), torch.randn(rows, width, device=device).to(dtype)
    norms = torch.rand(2, width, device=device)
    found = []
    for sources in (None, parents):
        entered, x = (torch.zeros(rows, n * width, device=device) for n in (2, 1))
        kernels_head.enter[(rows,)](
            tokens, table, carried[parents] if sources is None else carried, tokens if sources is None else sources,
            *norms, entered, x, x, 1.0, 0.0, 1e-5, WIDTH=width, UP=64, START=0, ROOM=0,
            IN_ORDER=sources is None, PDL=False,
        )  # fmt: skip
        found.append((entered, x))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(x, carried[parents].float())


def _after_pass(device: torch.device, fused: bool) -> AfterPass:
    """A small target's, with hidden rows of two layers, and numbers that tell slots apart."""
    target = make_target("smollm2", str(device), torch.bfloat16, "torch", kv_slots=640)
    after = target.after
    after.fused = fused
    for layer in (0, 2):
        target.buffers.hidden(layer).copy_(_numbers(target.buffers.hidden(layer)) + layer)
        rows = after.kv.rows_of(layer, target.config.width, torch.bfloat16)
        rows.copy_(_numbers(rows) - layer)
    after.kv.data.copy_(_numbers(after.kv.data))
    return after


def _numbers(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.gpu
@pytest.mark.parametrize("real", [0, 1, 3])
def test_paths_move_to_their_places(real: int) -> None:
    """Steps that stay, steps onto places that later ones leave, and padding, which repeats the first tree."""
    device, form = where_kernels_run(), TreeForm(5, 9, 4)
    first = [65, 120, 300]  # slots of the roots
    paths = [[2, 3, 4, 5], [1, 3, 7, 4], [8, 2, 3, 4]][:real]
    moves = [([a + n for n in path], [a + n for n in range(1, 5)]) for a, path in zip(first, paths, strict=False)]
    moves += [moves[0] if moves else ([0] * 4, [0] * 4)] * (5 - real)
    found = []
    for fused in (False, True):
        after = _after_pass(device, fused)
        before = after.kv.data.clone()
        table = torch.tensor(moves, device=device).transpose(0, 1).reshape(2, -1)
        after.grown.moves[:, : table.shape[1]] = table
        after._move(form)
        found.append((after.kv.data, *after.kv.hidden.values()))
        assert torch.equal(before, after.kv.data) == (real == 0)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_hidden_rows_are_kept_at_their_slots() -> None:
    device, size = where_kernels_run(), Size(8, 8, 8)
    slots = torch.tensor([9, -1, 0, 639, 70, 71, -1, -1], dtype=torch.int32, device=device)
    found = []
    for fused in (False, True):
        after = _after_pass(device, fused)
        after.buffers.ints[MAX_ROWS + 16 : MAX_ROWS + 24] = slots
        before = after.kv.hidden[0].clone()
        after.keep_rows(Plan(size, 8, np.zeros(0, dtype=np.int32)), (0, 2))
        found.append([rows[:-1] for rows in after.kv.hidden.values()])  # the last belongs nowhere
        assert int((before != after.kv.hidden[0])[:-1].any(-1).sum()) == 5
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"draft_vocab": 130, "norm_output": True},
        {"eagle": "eagle"},
        {"depth": 2, "fc_norm": True, "norm_output": True},
        {"eagle": "mtp"},
        {"eagle": "mtp", "norm_output": True, "qk_norm": True},
        {"window": 5, "windowed": (True,)},
        {"depth": 2, "window": 66, "windowed": (True, False), "longest": 69},
    ],
)
def test_whole_drafts_by_kernels(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the interpreter runs them, in fp32: trees of the head as everywhere, over rounds, paths of any length."""
    if where_kernels_run().type == "cuda":
        pytest.skip("tests/gpu/test_draft.py does this on a GPU, in 16 bits")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: processors)
    for module, name in (
        (draft_runner, "complete"), (draft_runner, "cut_trees"), (draft_runner, "grow_level"),
        (feature_rows, "append_decided"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, partial(vars(module)[name], fused=True))
    target, rng = make_target("llama", "cpu"), random.Random(3)
    config, weights = make_head(target, **more)
    plain = plain_drafter(target, config, weights)
    target.kernels, target.after.fused = "triton", True
    draft = HeadDraft(*make_net(config, weights, target), capture=False, cuts=True)  # but nodes have no price
    drafter = OnDevice(draft, lambda: plain)
    seqs = [FakeSeq(b, [rng.randrange(VOCAB) for _ in range(n)], max_length=900) for b, n in enumerate((2, 70))]
    trees, scores = target.prefill(seqs, drafter.needs)
    for one in (drafter, plain):
        one.observe(seqs, trees, scores, Verdict.whole_chain(trees, [seq.tokens[-1] for seq in seqs]))
    longest = 0
    for budget in [Budget(9, 3, 3)] * 3 + [Budget(3, 3)]:
        grown, wanted = (one.propose(seqs, [budget] * 2) for one in (drafter, plain))
        assert as_lists(grown) == as_lists(wanted)
        agree(target, grown, rng, monkeypatch)
        scores = target.score(seqs, grown, drafter.needs)
        verdict = settled(scores)
        target.commit(seqs, grown, verdict)
        for one in (drafter, plain):
            one.observe(seqs, grown, scores, verdict)
        for seq, (tokens, _), path, bonus in zip(seqs, as_lists(wanted), *verdict.to_host(), strict=True):
            seq.tokens += [*(tokens[node] for node in path), bonus]
            longest = max(longest, len(path))
    assert longest > 1, "paths must be long enough to matter"
    assert type(drafter.draft.net.steps).__name__ == "FusedHeadSteps"
    assert not drafter._failed


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "int8"])
@pytest.mark.parametrize("more", [{}, {"depth": 2}, {"eagle": "mtp", "qk_norm": True}])
def test_keys_and_values_without_queries_are_those_beside_queries(
    more: dict[str, Any], kind: Literal["plain", "int8"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit; no query is written, and keys of one head are not those of another."""
    device = where_kernels_run()
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
        processors = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: processors)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    target, count = make_target("large", device.type, dtype), 37
    target.kernels = "triton"
    config, weights = make_head(target, **more)
    net, fusion = make_net(config, weights, target, kind)[:2]
    assert net.model.whole == (kind == "int8")
    rows = torch.arange(64, device=device)
    ints = torch.cat((rows * 7 % VOCAB, rows + 5, torch.where(rows < count, 70 + rows, -1)))
    ints = torch.cat((torch.arange(MAX_ROWS, device=device), ints)).int()
    run, features = Run.of(Size(64, 0, 0), ints), torch.randn(64, fusion.feature_width, device=device).to(dtype)
    last, found = len(net.model.layers) - 1, list[torch.Tensor]()
    net.buffers.rows.zero_()  # what goes into a second layer is not asked about here
    for alone in (False, True):
        net.kv.zero_()
        net.buffers.queries.fill_(9.0)
        net.steps.enter(run, fusion.fuse(features))
        (net.steps.keys_and_values if alone else net.steps.qkv)(run, last)
        assert bool((net.buffers.queries[:count] == 9.0).all()) == (alone and getattr(net.steps, "wide", None) is None)
        found.append(net.kv[last, :, :, 70 : 70 + count].clone())
    assert torch.equal(*found)
    if not last:
        assert not torch.equal(found[0][:, 0], found[0][:, 1])
        assert not torch.equal(*found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [1, 3])
@pytest.mark.parametrize("beyond", [0, 5])
def test_noise_by_a_kernel_is_that_of_torch(wide: int, beyond: int) -> None:
    """Also for the first columns of wider rows: a draft model may know more tokens than the target."""
    device = where_kernels_run()
    ids = torch.randperm(5000, generator=torch.Generator().manual_seed(1))[:1300].sort().values.to(device)
    settings = [(12345, 1.3), None, (-(2**60), 0.7)]
    positions = torch.tensor([3, 70_000, 511], dtype=torch.int32, device=device)
    made = torch.randn(3 * wide, len(ids) + beyond, generator=torch.Generator().manual_seed(2))
    logits = made.to(device)[:, : len(ids)]
    found = []
    for fused in (True, False):
        noise = DraftNoise(ids, fused)
        noise.send(settings)
        noised = noise.of(positions, 4)
        found.append(torch.stack([noised(logits, level) for level in (0, 3)]))
    torch.testing.assert_close(*found, atol=2e-3, rtol=1e-4)
    assert torch.equal(found[0][:, wide : 2 * wide], logits[wide : 2 * wide].expand(2, -1, -1))
    assert not torch.allclose(found[0][0, :wide], found[0][1, :wide])
