"""Trees that only the device knows: their pass, their verdict and their commit are those of trees the host knows."""

import functools
import random

import numpy as np
import pytest
import torch

from forerun.core.noise import Noise
from forerun.core.tree import trace
from forerun.core.types import CUT, Needs, Prompts, TreeBatch, TreeForm
from forerun.models.cuda.device_trees import GrownBuffers, Place, plan_grown
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.pages import PAGE, slots_of
from forerun.testing import FakeSeq, path_to
from forerun.verify.exact import ExactVerifier
from forerun.verify.greedy import walk_by_torch
from forerun.verify.warp import warp
from tests.gpu.heads import settled
from tests.gpu.test_plan import slots_seen
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda, where_kernels_run


def _random_trees(rng: random.Random, form: TreeForm, real: int | None = None) -> list[tuple[list[int], list[int]]]:
    """As many as the form has, or fewer: the others are padding."""
    trees = []
    for _ in range(real or form.trees):
        parents, depths = [-1], [0]
        while len(parents) < form.nodes:
            parent = len(parents) - 1 if form.chain else rng.randrange(len(parents))
            if depths[parent] < form.depth:
                parents.append(parent)
                depths.append(depths[parent] + 1)
        trees.append((rng.sample(range(VOCAB), form.nodes), parents))
    return trees


def _grown(trees: list[tuple[list[int], list[int]]], form: TreeForm, device: str) -> TreeBatch:
    both = [[x for tree in trees for x in tree[i]] for i in (0, 1)]
    tokens, parents = torch.tensor(both, device=device)
    return TreeBatch(tokens, parents, form.starts(len(trees)), form=form)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("group_nodes", [1, 16, 64])
@pytest.mark.parametrize("pads", [0, 1, 5])
@pytest.mark.parametrize("tiled", [False, True])
def test_the_device_completes_what_the_host_lays_out(
    seed: int, group_nodes: int, pads: int, tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.models.cuda.plan.SHORT", 0 if tiled else 32)
    rng, count = random.Random(seed), 3 + pads
    form = TreeForm(count, rng.randint(2, 30), rng.randint(5, 8)) if seed else TreeForm(count, 7, 6, width=1)
    trees = _random_trees(rng, form, 3)
    lengths = [rng.choice([0, 5, 127, 128, 1020, 4090]) for _ in range(3)]
    places = [Place(rng.sample(range(1000 * b, 1000 * b + 99), 70), length) for b, length in enumerate(lengths)]
    nodes, tiled_nodes = (16, group_nodes) if tiled else (group_nodes, 0)
    plan = plan_grown(places, form, nodes, tiled_nodes=tiled_nodes)
    assert plan.size.tiled == tiled
    ints = torch.from_numpy(np.concatenate((np.arange(MAX_ROWS, dtype=np.int32), plan.ints)))
    buffers = GrownBuffers(torch.device("cpu"), walk_by_torch, nodes, tiled_nodes=tiled_nodes)
    buffers.take(_grown(trees, form, "cpu"), form)
    buffers.fill(ints, plan.size, form)
    buffers.fill(ints, plan.size, form)  # a replay: nothing may add up
    wanted = []
    for (pages, length, _), (_, parents) in zip(places, trees, strict=True):
        slots = slots_of(pages, 0, 70 * PAGE)
        for node in range(form.nodes):
            path = [0, *path_to(parents, node)]
            wanted.append([*slots[:length], *(slots[length + i] for i in path)])
    filled, real = ints[MAX_ROWS:].numpy(), 3 * form.nodes
    seen = slots_seen(plan, filled)
    assert seen[:real] == wanted
    assert not any(seen[real:]), "padding attends to nothing"
    assert filled[:real].tolist() == [token for tokens, _ in trees for token in tokens]
    written = filled[2 * plan.size.rows : 3 * plan.size.rows].tolist()
    assert written[:real] == [way[-1] for way in wanted], "a node is written where it sees itself"
    assert all(slot == -1 for slot in written[real:])


@pytest.mark.parametrize("chain", [False, True])
def test_trees_behind_an_unread_round_lie_where_they_would_if_it_had_been_read(chain: bool) -> None:
    """The host gives lengths before that round, and its trees: the device adds root and path."""
    rng, form = random.Random(7), TreeForm(4, 6, 5 if chain else 3, width=1 if chain else 2)
    trees, accepted = _random_trees(rng, form, 4), [0, 2, 3, 1]
    lengths, follows = [5, 126, 1021, 4094], [2, -1, 0, 1]
    pages = [rng.sample(range(1000 * b, 1000 * b + 99), 70) for b in range(4)]
    known = [n + (accepted[tree] + 1 if tree >= 0 else 0) for n, tree in zip(lengths, follows, strict=True)]
    found = []
    for at, behind in ((lengths, follows), (known, [-1] * 4), (lengths, [-1] * 4)):
        plan = plan_grown([Place(*one) for one in zip(pages, at, behind, strict=True)], form, 16, farthest=5000)
        ints = torch.from_numpy(np.concatenate((np.arange(MAX_ROWS, dtype=np.int32), plan.ints)))
        buffers = GrownBuffers(torch.device("cpu"), walk_by_torch, 16)
        buffers.last.accepted[:4] = torch.tensor(accepted)
        buffers.take(_grown(trees, form, "cpu"), form)
        buffers.fill(ints, plan.size, form)
        found.append(ints[: -3 * 4 - 4 * 70].tolist())  # all but what the host has sent
    assert found[0] == found[1]
    assert found[0] != found[2], "a round that adds nothing is another"


def test_what_a_round_decided_is_kept_for_the_next() -> None:
    form, buffers = TreeForm(2, 4, 3), GrownBuffers(torch.device("cpu"), walk_by_torch, 16)
    trees = _grown([([9, 5, 6, 7], [-1, 0, 0, 2]), ([8, 5, 6, 7], [-1, 0, 1, 0])], form, "cpu")
    plan = plan_grown([Place([7, 2], 62), Place([3], 4)], form, 16)
    ints = torch.from_numpy(np.concatenate((np.arange(MAX_ROWS, dtype=np.int32), plan.ints)))
    buffers.take(trees, form)
    buffers.fill(ints, plan.size, form)
    logits = torch.zeros(form.rows, 10)
    logits[0, 6] = logits[2, 7] = logits[3, 1] = logits[4, 4] = 1.0
    buffers.decide(ints, plan.size, form, logits)
    last = buffers.last
    assert last.accepted[:2].tolist() == [2, 0]
    assert last.tokens[0, :3].tolist() == [6, 7, 1], "the path, then the bonus"
    assert last.tokens[1, :1].tolist() == [4]
    assert last.rows[0, :3].tolist() == [0, 2, 3]
    assert last.rows[1, :1].tolist() == [4]
    first = buffers.send(form)
    second = buffers.send(form)
    assert settled_tokens(buffers, trees, form, first) == settled_tokens(buffers, trees, form, second) == [1, 4]
    buffers.send(form)
    with pytest.raises(RuntimeError, match="overwritten"):
        buffers.read(trees, form, first)


def _cut_some(trees: TreeBatch, form: TreeForm, rng: random.Random) -> None:
    """Single nodes, with all that is below them."""
    tokens, parents = (part.view(-1, form.nodes) for part in (trees.tokens, trees.parents))
    for own, above in zip(tokens, parents.tolist(), strict=True):
        for node in range(1, form.nodes):
            if rng.random() < 0.15 or (above[node] and own[above[node]] == CUT):
                own[node] = CUT


def settled_tokens(buffers: GrownBuffers, trees: TreeBatch, form: TreeForm, number: int) -> list[int]:
    return buffers.read(trees, form, number).to_host()[1]


def test_ways_lead_from_the_root() -> None:
    depths, ancestors = trace(torch.tensor([[-1, 0, 0, 1, 3, 2]]), 4)
    assert depths.tolist() == [[0, 1, 1, 2, 3, 2]]
    assert ancestors[0, 4].tolist() == [0, 1, 3, 4, 4]
    assert ancestors[0, 0].tolist() == [0, 0, 0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tiled", [False, True])
def test_kernels_do_what_torch_does(seed: int, tiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = where_kernels_run()
    monkeypatch.setattr("forerun.models.cuda.plan.SHORT", 0 if tiled else 32)
    from forerun.verify.kernels import walk_by_kernel

    rng = random.Random(seed)
    form = TreeForm(4, rng.randint(2, 60), rng.randint(3, 9)) if seed else TreeForm(4, 6, 5, width=1)
    real = rng.randint(1, 4)
    trees = _grown(_random_trees(rng, form, real), form, str(device))
    plan = plan_grown(
        [Place([9 - b, b, 20 + b, 11 * b, 77 - b, 50 + b, 99 - b], 100 * b + 7, b % 3 - 1) for b in range(real)],
        form,
        16,
        tiled_nodes=32,
    )
    assert plan.size.tiled == tiled
    _cut_some(trees, form, rng)
    logits = torch.randn(form.rows, VOCAB, device=device)
    for b in range(real):  # some of what the target says is there
        for node in range(1, form.nodes):
            row = b * form.nodes + node
            if rng.random() < 0.6 and trees.tokens[row] != CUT:
                logits[b * form.nodes + int(trees.parents[row]), int(trees.tokens[row])] = 9.0 + rng.random()
    found = []
    for fused in (False, True):
        buffers = GrownBuffers(device, walk_by_kernel if fused else walk_by_torch, 16, fused, tiled_nodes=32)
        ints = torch.cat((torch.arange(MAX_ROWS, dtype=torch.int32), torch.from_numpy(plan.ints))).to(device)
        buffers.take(trees, form)
        buffers.last.accepted[:3] = torch.tensor([1, 0, 2])
        buffers.fill(ints, plan.size, form)  # two of them follow the last round
        buffers.decide(ints, plan.size, form, logits)
        last = buffers.last
        found.append((ints, buffers.outcome, buffers.moves, last.accepted, last.tokens, last.rows))
    names = "ints", "outcome", "moves", "accepted", "tokens", "rows"
    for name, plain, by_kernel in zip(names, *found, strict=True):
        assert torch.equal(plain, by_kernel), name


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("cpu", "llama"),
        *(pytest.param("cuda", f"llama{kept}", marks=[pytest.mark.gpu]) for kept in ("", "+int8", "+fp8")),
    ],
)
@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize(("count", "tiled"), [(2, False), (4, False), (2, True), (4, True)])
def test_a_round_on_the_device_is_a_round(
    device: str, name: str, chain: bool, count: int, tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same logits, same verdict, and the same logits once more after the commit, several rounds long.

    Two trees are put to passes of as many, and of four: padding takes part in none of it. Tiled passes, of which those
    that are compared with have none, change nothing either.
    """
    need_cuda(device)
    rng = random.Random(3)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    ours, theirs = [make_target(name, device, dtype) for _ in range(2)]
    monkeypatch.setattr("forerun.models.cuda.plan.SHORT", 0 if tiled else 32)
    theirs._tiled_nodes = 0
    seqs = [FakeSeq(b, [rng.randrange(VOCAB) for _ in range(n)], max_length=400) for b, n in enumerate((3, 130))]
    for target in (ours, theirs):
        target.prefill(seqs, Needs())
    needs, accepted = Needs((-1, 1)), 0
    for turn in range(6):
        form = TreeForm(count, 6, 5, width=1) if chain else TreeForm(count, 9, 4)
        trees = _random_trees(rng, form, 2)
        for b, (tokens, parents) in enumerate(trees):
            tokens[0] = seqs[b].tokens[-1]
            if turn % 3:
                _plant(theirs, seqs[b], tokens, parents, rng)
        plain = TreeBatch.trees(trees)
        wanted = theirs.score(seqs, plain, needs)
        grown = _grown(trees, form, device)
        got = ours.score(seqs, grown, needs)
        atol = 1e-4 if device == "cpu" else 0.0
        torch.testing.assert_close(got.required_logits, wanted.required_logits, atol=atol, rtol=0.0)
        torch.testing.assert_close(got.hidden[1][: len(wanted.hidden[1])], wanted.hidden[1], atol=atol, rtol=0.0)
        noise = Noise([0, 0], [1, 1])
        verdict = settled(got)
        assert verdict.outcome is not None
        known = ExactVerifier().verify(plain, warp(wanted.required_logits, seqs, plain), noise)
        assert verdict.to_host() == known.to_host()
        assert grown.to_host() == plain.to_host()
        ours.commit(seqs, grown, verdict)
        theirs.commit(seqs, plain, known)
        paths, bonus = known.to_host()
        for b, seq in enumerate(seqs):
            seq.tokens += [*(trees[b][0][node] for node in paths[b]), bonus[b]]
            accepted += len(paths[b])
    assert accepted > 6, "paths must be long enough to be moved"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chain", [False, True])
def test_a_prompt_is_read_in_the_pass_over_grown_trees(device: str, chain: bool) -> None:
    """Chunks behind the trees: what they cache, the trees' logits and verdict are those of separate passes."""
    need_cuda(device)
    rng = random.Random(8)
    dtype, atol = (torch.float32, 1e-4) if device == "cpu" else (torch.bfloat16, 0.0)
    ours, theirs = [make_target("llama", device, dtype) for _ in range(2)]
    seqs = [FakeSeq(b, [rng.randrange(VOCAB) for _ in range(n)], max_length=400) for b, n in enumerate((3, 130))]
    joins = [FakeSeq(7, [rng.randrange(VOCAB) for _ in range(150)], max_length=400), FakeSeq(8, [5, 6, 7, 8])]
    needs = Needs((-1, 1))
    for target in (ours, theirs):
        target.prefill(seqs, needs)
    while theirs.cached_tokens(joins[1]) < 3:
        form = TreeForm(2, 6, 5, width=1) if chain else TreeForm(2, 9, 4)
        trees = _random_trees(rng, form)
        for b, (tokens, _) in enumerate(trees):
            tokens[0] = seqs[b].tokens[-1]
        grown, plain = _grown(trees, form, device), TreeBatch.trees(trees)
        got = ours.score(seqs, grown, needs, Prompts(joins, 70))
        assert got.read is not None  # about as many rows as asked for: they fill a pass
        chains, read = theirs.prefill(joins, needs, got.read[0].nodes)
        wanted = theirs.score(seqs, plain, needs)
        assert got.read[0].to_host() == chains.to_host()
        close = functools.partial(torch.testing.assert_close, atol=atol, rtol=0.0)
        close(got.required_logits, wanted.required_logits)
        for layer in needs.hidden_layers:
            close(got.hidden[layer], wanted.hidden[layer])
            close(got.read[1].hidden[layer], read.hidden[layer])
        verdict = settled(got)
        known = ExactVerifier().verify(plain, warp(wanted.required_logits, seqs, plain), Noise([0, 0], [1, 1]))
        assert verdict.to_host() == known.to_host()
        ours.commit(seqs, grown, verdict)
        theirs.commit(seqs, plain, known)
        for b, (path, token) in enumerate(zip(*known.to_host(), strict=True)):
            seqs[b].tokens += [*(trees[b][0][node] for node in path), token]
    every = [*seqs, *joins]
    roots = TreeBatch.chains([seq.tokens[-1:] for seq in every])
    close(ours.score(every, roots, needs).required_logits, theirs.score(every, roots, needs).required_logits)


def _plant(target: object, seq: FakeSeq, tokens: list[int], parents: list[int], rng: random.Random) -> None:
    """Write what the target will say along one path of the tree, found node by node."""
    node = 0
    for _ in range(3):
        tree = TreeBatch.trees([(tokens, parents)])
        logits = target.score([seq], tree, Needs()).required_logits  # type: ignore[attr-defined]
        children = [i for i, parent in enumerate(parents) if parent == node]
        if not children:
            return
        top = int(logits[node].argmax())
        if any(tokens[i] == top for i in children):
            return
        node = rng.choice(children)
        tokens[node] = top


def test_padding_moves_no_slot_of_others() -> None:
    """What is decided about padding is nobody's path: its moves repeat those of the first tree, or change nothing."""
    form, buffers = TreeForm(3, 4, 3), GrownBuffers(torch.device("cpu"), walk_by_torch, 16)
    tokens, parents = [9, 5, 6, 7], [-1, 0, 0, 2]
    for places in ([Place([7, 2], 62)], []):  # two nodes on each of two pages
        plan = plan_grown(places, form, 16)
        ints = torch.cat((torch.arange(MAX_ROWS, dtype=torch.int32), torch.from_numpy(plan.ints)))
        if places:
            buffers.take(_grown([(tokens, parents)], form, "cpu"), form)
        else:
            buffers.take_padding(form)
        buffers.fill(ints, plan.size, form)
        logits = torch.zeros(form.rows, 10)
        logits[:: form.nodes, 6] = logits[2 :: form.nodes, 7] = 1.0  # along the second child, in padding too
        buffers.decide(ints, plan.size, form, logits)
        moves = buffers.moves[:, :9].view(2, 3, 3).tolist()
        if places:
            assert moves == [[[128, 129, 129]] * 3, [[511, 128, 129]] * 3]
        else:
            assert moves[0] == moves[1] == [[0, 0, 0]] * 3
