"""What the host tells the device: every node's positions, in order, through the groups that attention works on."""

import random

import pytest

from forerun.core.tree import chain_of, topology_of
from forerun.models.cuda.plan import (
    FIELDS,
    MAX_ROWS,
    ROW_SIZES,
    Need,
    Plan,
    Size,
    Span,
    plan_pass,
    round_up,
    split_of,
    split_start,
)
from forerun.models.pages import PAGE, slots_of
from forerun.testing import path_to, random_tree


def test_splits_cover_positions_in_order() -> None:
    starts = [split_start(s) for s in range(60)]
    assert starts == sorted(set(starts))
    for position in [0, 127, 128, 1023, 1024, 1279, 1280, 4095, 4096, 5119, 5120, 32_767]:
        split = split_of(position)
        assert split_start(split) <= position < split_start(split + 1)


def test_a_pass_has_few_rows_more_than_it_needs() -> None:
    for rows in range(1, 257):
        assert round_up(rows, ROW_SIZES) - rows < max(32, rows)
    assert round_up(257, ROW_SIZES) == 384
    assert ROW_SIZES[-1] == MAX_ROWS


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("group_nodes", [1, 16, 64])
@pytest.mark.parametrize("tiled", [False, True])
def test_every_node_sees_its_text_and_its_ancestors(
    seed: int, group_nodes: int, tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.models.cuda.plan.SHORT", 0 if tiled else 32)
    rng = random.Random(seed)
    spans, wanted = [], []
    for b in range(3):
        length, pages = (rng.choice([0, 5, 127, 128, 1020, 4090]), rng.sample(range(1000 * b, 1000 * b + 99), 70))
        tokens, parents = random_tree(rng, 1, 50, rng.randint(0, 30))
        spans.append(Span(tokens, topology_of(tuple(parents)) if b else chain_of(len(tokens)), pages, length))
        for node in range(len(tokens)):
            path = [0, *path_to(parents, node)] if b else list(range(node + 1))
            slots = slots_of(pages, 0, 70 * PAGE)
            wanted.append([*slots[:length], *(slots[length + i] for i in path)])
    plan = plan_pass(spans, 16, tiled_nodes=group_nodes) if tiled else plan_pass(spans, group_nodes)
    assert (plan.size.tiled, plan.size.lone > 0) == (tiled, tiled)
    assert slots_seen(plan)[: plan.rows] == wanted
    positions = plan.ints[plan.size.rows : plan.size.rows + plan.rows].tolist()
    assert positions == [len(slots) - 1 for slots in wanted]
    written = plan.ints[2 * plan.size.rows : 3 * plan.size.rows].tolist()
    assert written[: plan.rows] == [
        slot for span in spans for slot in slots_of(span.pages, span.length, span.length + len(span.tokens))
    ]
    assert all(slot == -1 for slot in written[plan.rows :])
    assert plan.size.splits > split_of(max(positions))


def test_passes_behind_long_contexts_are_tiled_and_no_others() -> None:
    """Whichever of their sequences is long; all others are laid out as if there was no such thing."""
    far, tree = 16_384, topology_of((-1, 0, 0, 1))
    for length, tiled in ((0, False), (far - 3, False), (far - 2, True), (far, True)):
        spans = [Span([1] * 4, tree, [*range(300)], at) for at in (5, length)]
        plan = plan_pass(spans, 16, tiled_nodes=32)
        assert plan.size.tiled == tiled
        if not tiled:
            plain = plan_pass(spans, 16)
            assert (plan.size, plan.ints.tolist()) == (plain.size, plain.ints.tolist())
    assert plan_pass([], 16, roots=[(1, [0] * 300, far)], tiled_nodes=32).size == Size(1, 1, 96, tiled=True)
    assert plan_pass([], 16, roots=[(1, [0] * 300, far - 8)], added=8, tiled_nodes=32).size.tiled
    assert not plan_pass([], 16, roots=[(1, [0] * 300, far)]).size.tiled, "heads have passes of the other kind"


def test_a_pass_takes_no_size_of_the_other_kind() -> None:
    tiled, chains = Need(4, 2, 20_000, True, True), Need(4, 2, 20_000, True)
    assert tiled.rounded() == Size(4, 6, 96, lone=4, tiled=True)
    assert chains.rounded() == Size(4, 2, 96, tiled=True)
    for need, fits in (
        (tiled, [True, False, False]),
        (chains, [False, True, False]),
        (Need(4, 2, 9), [False] * 2 + [True]),
    ):
        sizes = Size(8, 10, 96, lone=8, tiled=True), Size(8, 8, 96, tiled=True), Size(8, 8, 96)
        assert [need.fits(size) for size in sizes] == fits
    assert not Need(4, 3, 20_000, True, True).fits(tiled.rounded()), "lone groups are not for others"


def slots_seen(plan: Plan, filled: object = None) -> list[list[int]]:
    """[rows] the slots each row sees, by position, walked as the kernel walks them."""
    size, ints = plan.size, plan.ints if filled is None else filled
    everything, rows, groups = [*range(MAX_ROWS), *ints.tolist()], size.rows, size.groups  # type: ignore[attr-defined]
    positions = everything[MAX_ROWS + rows : MAX_ROWS + 2 * rows]
    first = MAX_ROWS + 3 * rows
    seen: list[dict[int, int]] = [{} for _ in range(rows)]
    for g in range(groups):
        group = everything[first + FIELDS * g : first + FIELDS * (g + 1)]
        low, high, row, count, base, length, ancestors, pages = group
        start, end, base, branches = split_start(low), split_start(high), base * (not size.tiled), base
        if size.tiled and g >= size.shared:
            assert not count or (g - size.shared, count) == (row, 1), "a single node is not where its row looks for it"
            start, end = length // PAGE * PAGE, length + MAX_ROWS
        elif size.tiled and branches:
            end = min(end, length // PAGE * PAGE)
        for r in range(row, row + count if end > start else row):
            for p in range(start, min(end, positions[r] + 1)):
                assert p not in seen[r], "a position was seen twice"
                at = p if p < length else length + everything[ancestors + p - length]
                seen[r][p] = everything[pages + at // PAGE] * PAGE + at % PAGE if pages else base + at
    assert all(sorted(row) == list(range(len(row))) for row in seen)
    return [[row[p] for p in range(len(row))] for row in seen]


@pytest.mark.parametrize("chunks", [0, 2])
@pytest.mark.parametrize("count", [1, 2, 37])
def test_lone_roots_are_laid_out_like_chains_of_one_node(count: int, chunks: int) -> None:
    """They are written all at once, whatever follows them in the pass."""
    rng = random.Random(count)
    spans, free = list[Span](), iter(rng.sample(range(1000), 1000))
    for i in range(count + chunks):
        length, size = rng.randrange(0, 1500), 1 if i < count else rng.randrange(1, 30)
        pages = [next(free) for _ in range((length + size - 1) // PAGE + rng.randrange(1, 3))]
        tokens = [rng.randrange(-9, 500) for _ in range(size)]  # below 0: a row of the last pass
        spans.append(Span(tokens, chain_of(size), pages, length))
    roots = [(span.tokens[0], span.pages, span.length) for span in spans[:count]]
    one, other = plan_pass(spans, 16), plan_pass(spans[count:], 16, roots=roots)
    assert (one.size, one.rows) == (other.size, other.rows)
    assert one.ints.tolist() == other.ints.tolist()
