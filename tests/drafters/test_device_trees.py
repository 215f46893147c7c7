"""Trees grown on a device: the plain torch form against brute force, and the integers that a draft is told with."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.control.cost import WIDE
from forerun.core.types import Form
from forerun.drafters.device.growth import Frontier, HeadOutput, Pool, complete, cut_trees, grow_level
from forerun.drafters.device.plan import (
    BUCKETS,
    FORMS,
    ROWS,
    DraftForm,
    DraftMenu,
    Lane,
    aligned,
    bucket_of,
    contexts_of,
    extent_of,
    forms_for,
    plan_draft,
)
from forerun.models.cuda.device_trees import LastRound
from forerun.models.cuda.plan import FIELDS, MAX_ROWS, ROW_SIZES, round_up, splits_to
from forerun.models.pages import Ints

VOCAB, WIDTH, DEPTH = 11, 3, 3
IDS = torch.arange(VOCAB) * 2 + 5  # the target's ids of a draft vocabulary
CPU = torch.device("cpu")
Path = tuple[int, ...]


def logits_after(tree: int, path: Path) -> Tensor:
    """[Vd] what a head would say there: any function of tree and path."""
    seed = hash((tree, path)) % (1 << 31)
    return 2.0 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def grow(trees: int, nodes: int, width: int = WIDTH, output: HeadOutput | None = None) -> Tensor:
    """[2, B, nodes + 1] drafted level by level, as the device does it."""
    output = output or HeadOutput(IDS)
    pool, frontier = Pool(trees, width, width, DEPTH, CPU), Frontier.of_roots(trees, CPU)
    paths: list[list[Path]] = [[()] for _ in range(trees)]
    for level in range(DEPTH):
        rows = [logits_after(b, path) for b in range(trees) for path in paths[b]]
        into = None
        if level + 1 < DEPTH:
            into = (
                torch.empty(trees * width, dtype=torch.long),
                torch.empty(trees * width * (level + 1), dtype=torch.long),
            )
        wide = frontier.log_survivals.shape[1]
        frontier = grow_level(pool, frontier, torch.stack(rows), output, into)
        above = frontier.parents.view(trees, -1) - torch.arange(trees)[:, None] * wide
        tokens = frontier.tokens.tolist()
        paths = [
            [(*paths[b][parent], token) for parent, token in zip(above[b].tolist(), tokens[b], strict=True)]
            for b in range(trees)
        ]
        if into is not None:
            assert into[0].tolist() == frontier.tokens.flatten().tolist()
            assert into[1].tolist() == frontier.ancestors.flatten().tolist()
    both = torch.empty(2, trees, nodes + 1, dtype=torch.long)
    cut_trees(pool, torch.arange(trees), nodes, both)
    return both


def brute_force(tree: int, nodes: int, width: int = WIDTH, power: float = 1.0, scale: float = 0.0) -> set[Path]:
    """The paths of the best nodes, of all that frontiers of this width put forward."""
    frontier: list[tuple[float, Path]] = [(0.0, ())]
    found: list[tuple[float, Path]] = []
    for _ in range(DEPTH):
        level = []
        for score, path in frontier:
            law = logits_after(tree, path).log_softmax(-1)
            for token in law.topk(width).indices.tolist():
                gain = min(float(law[token]) * power + scale, 0.0)
                level.append((score + gain, (*path, int(IDS[token]))))
        found += level
        frontier = sorted(level, reverse=True)[:width]
    return {path for _, path in sorted(found, reverse=True)[:nodes]}


def paths_of(tokens: list[int], parents: list[int]) -> set[Path]:
    paths: list[Path] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


@pytest.mark.parametrize("nodes", [1, 4, 9, 15])
def test_trees_are_those_of_brute_force(nodes: int) -> None:
    both = grow(3, nodes)
    for b in range(3):
        tokens, parents = both[0, b].tolist(), both[1, b].tolist()
        assert tokens[0] == b
        assert parents[0] == -1
        assert all(0 <= parent < i for i, parent in enumerate(parents) if i)
        assert paths_of(tokens, parents) == brute_force(b, nodes)


def test_a_chain_is_cut_from_its_start() -> None:
    tokens, parents = grow(2, 2, width=1)
    assert parents.tolist() == [[-1, 0, 1]] * 2
    for b in range(2):
        assert paths_of(tokens[b].tolist(), parents[b].tolist()) == brute_force(b, 2, width=1)


def test_calibrated_confidences_choose_other_nodes() -> None:
    sharp = HeadOutput(IDS, log_scale=math.log(0.5), power=0.3)
    tokens, parents = grow(1, 8, output=sharp)
    found = paths_of(tokens[0].tolist(), parents[0].tolist())
    assert found == brute_force(0, 8, power=0.3, scale=math.log(0.5))
    assert found != brute_force(0, 8)
    assert HeadOutput(IDS).log_confidence(torch.tensor([0.3, -1.0])).tolist() == [0.0, -1.0]


def test_ancestors_lead_from_the_first_level_to_the_node() -> None:
    pool, frontier = Pool(1, WIDTH, WIDTH, DEPTH, CPU), Frontier.of_roots(1, CPU)
    first = grow_level(pool, frontier, logits_after(0, ())[None], HeadOutput(IDS))
    assert first.ancestors.tolist() == [[[0], [1], [2]]]
    rows = torch.stack([logits_after(0, (token,)) for token in first.tokens[0].tolist()])
    second = grow_level(pool, first, rows, HeadOutput(IDS))
    for node, (above, own) in enumerate(second.ancestors[0].tolist()):
        assert above == int(second.parents[node])
        assert own == WIDTH + node


GROUP = 16  # nodes of an attention group
PAGES = [np.array(pages, dtype=np.int32) for pages in ([9], [5, 2], [7], [3])]
LANES = [Lane(11, [4, 5], PAGES[0], 7, 48), Lane(12, [6], PAGES[1], 62, 72)]
OTHERS = [Lane(5, [1], PAGES[2], 20, 0), Lane(6, [2, 3], PAGES[3], 23, 24)]
NINE, FIVE, TWO = (64 * page for page in (9, 5, 2))  # first slots


def drafted(lanes: list[Lane], shape: Form, last: LastRound | None = None, **more: int) -> tuple[DraftForm, Ints]:
    """The plan as the device completes it."""
    form, sent = plan_draft(lanes, shape, GROUP, **more)
    at = MAX_ROWS + form.sent_at
    ints = torch.zeros(at + len(sent), dtype=torch.int32)
    ints[at:] = torch.from_numpy(sent)
    complete(ints, form, last or LastRound(CPU))
    return form, ints[MAX_ROWS:].numpy()


@pytest.mark.parametrize("shape", [Form(4, 4, 1), Form(8, 3, 3), Form(1, 1, 1)])
def test_a_draft_behind_an_unread_round_is_the_one_behind_that_round_read(shape: Form) -> None:
    last = LastRound(CPU)
    last.accepted[1], last.accepted[2] = 1, 0
    last.tokens[1, :2], last.tokens[2, :1] = torch.tensor([4, 5]), torch.tensor([6])
    known = [LANES[0]._replace(root=5), LANES[1]._replace(root=6)]
    unread = [lane._replace(root=0, tokens=(), follows=tree) for lane, tree in zip(known, (1, 2), strict=True)]
    one, wanted = drafted(known, shape, last)
    other, found = drafted(unread, shape, last)
    assert one == other
    end = one.sent_at
    assert np.array_equal(found[:end], wanted[:end])
    last.accepted[1] = 0
    assert not np.array_equal(drafted(unread, shape, last)[1][:end], wanted[:end]), "a path not so long is another"


@pytest.mark.parametrize("shape", [Form(1, 1, 1), Form(4, 2, 3)])
def test_behind_a_deeper_tree_a_draft_starts_with_the_last_rows(shape: Form) -> None:
    """Another draft has read those before them."""
    last, said = LastRound(CPU), [8, 7, 6, 5, 4]
    last.accepted[1], last.tokens[1, :5] = 4, torch.tensor(said)
    kept = shape.depth + 1
    known = Lane(4, said[-kept:], PAGES[1], 60 + 5 - kept, 72)
    one, wanted = drafted([known], shape)
    other, found = drafted([Lane(0, (), PAGES[1], 60, 72, 1)], shape, last)
    assert one == other
    end = one.sent_at
    assert np.array_equal(found[:end], wanted[:end])
    all_rows = drafted([Lane(0, (), PAGES[1], 60, 72, 1)], Form(4, 4, 1), last)[1]
    assert all_rows[:5].tolist() == said, "the negative control: a draft as deep as the tree"


@pytest.mark.parametrize("shape", [Form(4, 4, 1), Form(8, 3, 3), Form(1, 1, 1)])
def test_the_integers_of_a_draft(shape: Form) -> None:
    form, ints = drafted(LANES, shape)
    assert (form.sequences, form.shape, form.behind) == (2, shape, shape.depth + 1)
    rows = aligned(2 * form.behind)
    tokens, positions, slots, sources = ints[: 4 * rows].reshape(4, rows)[:, : 2 * form.behind]
    mine, other = slice(0, 2), form.behind
    assert tokens[mine].tolist() == [4, 5]
    assert positions[mine].tolist() == [7, 8]
    assert slots[mine].tolist() == [NINE + 7, NINE + 8]
    assert sources[mine].tolist() == [48 + 7, 48 + 8]
    assert (tokens[other], positions[other], slots[other], sources[other]) == (6, 62, FIVE + 62, 72 + 62 % 24)
    pads = [slots[b * other + i] for b, lane in enumerate(LANES) for i in range(len(lane.tokens), other)]
    assert set(pads) <= {-1}  # nothing is written there
    at, count = form.last_at, aligned(2)
    roots, ends, last = ints[at : at + 3 * count].reshape(3, count)[:, :2].tolist()
    assert (roots, ends, last) == ([11, 12], [1, form.behind], [8, 62])
    groups = ints[at + 3 * count :][: 2 * FIELDS].reshape(2, FIELDS).tolist()
    pages = form.pages_at
    assert ints[pages:].tolist() == [9, 5, 2]
    tables = MAX_ROWS + pages, MAX_ROWS + pages + 1
    assert groups == [[0, 1, 0, 1, 0, 9, 0, tables[0]], [0, 1, 1, 1, 0, 63, 0, tables[1]]]
    for level in range(shape.depth - 1):
        size, first, width = form.level, form.level_at(level), shape.width
        own = ints[first : first + extent_of(size)]
        rows = aligned(size.rows)
        assert own[rows : rows + 2 * width].tolist() == [9 + level] * width + [63 + level] * width
        at = [level * width + i for i in range(width)]
        behind = [*(NINE + 9 + i for i in at), *(FIVE + 63 if i == 0 else TWO + i - 1 for i in at)]
        assert own[2 * rows : 2 * rows + 2 * width].tolist() == behind, "the second goes on, on its next page"
        owners = own[3 * rows :].reshape(2, -1, FIELDS)
        assert (owners[0, :, 7] == tables[0]).all()
        assert (owners[1, :, 7] == tables[1]).all()


def test_feature_rows_are_used_again() -> None:
    form, ints = drafted(OTHERS, Form(2, 2, 1))
    first = form.sources_at + form.behind
    assert ints[first : first + 2].tolist() == [24 + 23, 24 + 0]


def test_drafts_that_agree_in_form_are_replays_of_one_graph() -> None:
    one, ints = drafted(LANES, Form(8, 3, 3))
    other, others = drafted(OTHERS, Form(8, 3, 3))
    assert one == other
    pages = one.pages_at
    assert len(ints) - pages == 3
    assert len(others) - pages == 2, "what is behind may be longer: only the groups know where it starts"
    assert not np.array_equal(ints[:pages], others[:pages])
    assert plan_draft(LANES, Form(8, 4, 3), GROUP)[0] != one
    assert plan_draft(LANES, Form(8, 3, 3), GROUP, farthest=5000)[0] != one, "longer contexts take more splits"


def test_levels_do_not_overlap() -> None:
    form, ints = drafted(LANES, Form(24, 5, 6))
    size, depth = form.level, form.shape.depth
    starts = [form.level_at(level) for level in range(depth - 1)]
    sizes = {later - earlier for earlier, later in itertools.pairwise(starts)}
    assert sizes == {3 * aligned(size.rows) + FIELDS * size.groups}
    ancestors = [form.ancestors_at(level) for level in range(depth - 1)]
    assert ancestors[0] == starts[-1] + extent_of(size)
    room = [later - earlier for earlier, later in itertools.pairwise(ancestors)]
    assert room == [aligned(size.rows) * (level + 1) for level in range(depth - 2)]
    assert all(value % 4 == 0 for value in (*starts, *ancestors, form.last_at, form.sources_at))
    assert len(ints) == form.pages_at + 3


def test_the_largest_drafts_fit_the_integers() -> None:
    for bucket in BUCKETS:
        for shape in forms_for(bucket):
            form, _ = plan_draft([LANES[0]] * bucket, shape, 4)
            assert MAX_ROWS + form.ancestors_at(shape.depth) < 1 << 17
            assert form.unread <= MAX_ROWS
            assert form.level.rows <= MAX_ROWS


def test_every_batch_has_a_bucket_and_a_menu() -> None:
    assert [bucket_of(batch) for batch in (1, 3, 8, 9, 33, 128)] == [1, 4, 8, 12, 40, 128]
    for bucket in BUCKETS:
        forms = forms_for(bucket)
        assert FORMS[0] in forms, "one more token is always to be had"
        assert all(bucket * (form.nodes + 1) <= ROWS for form in forms)
    assert {form for bucket in BUCKETS for form in forms_for(bucket)} == set(FORMS)


def test_trees_fill_the_passes_that_they_pay_for() -> None:
    """A tree of 16 nodes would cost a batch of 8 a pass of 160 rows, for 136."""
    for bucket in BUCKETS:
        trees = [bucket * (form.nodes + 1) for form in forms_for(bucket) if form.width > 1]
        assert all(rows >= 0.9 * round_up(rows, ROW_SIZES) for rows in trees), bucket
    assert {form.nodes for form in forms_for(8) if form.width > 1} == {7, 11, 15, 23, 31, 47}
    assert Form(15, 6, 5) in forms_for(1)
    assert Form(23, 6, 6) not in forms_for(1), "32 rows would be computed for 24"


def test_a_gpu_is_measured_where_its_passes_differ() -> None:
    assert WIDE == ROW_SIZES


def test_a_menu_says_what_was_timed() -> None:
    menu, form = DraftMenu(((0.6, 0.2), (0.5, 0.1))), Form(3, 3, 1)
    assert menu.forms == FORMS
    assert 0.0 < menu.seconds(form, 8) < math.inf, "a guess before the first measurement"
    menu.note(8, form, 0.5)
    menu.note(16, form, 0.7)
    assert menu.seconds(form, 5) == menu.seconds(form, 8) == 0.5
    assert menu.seconds(form, 9) == menu.seconds(form, 16) == 0.7
    assert menu.seconds(FORMS[-1], 64) == math.inf, "not on the menu of so many"
    assert menu.seconds(form, 1000) == math.inf
    assert menu.expected(Form(2, 2, 1)) == pytest.approx(0.6 + 0.3)


@pytest.mark.parametrize("max_length", [300, 1000, 1020, 1024, 8192, 100_000])
def test_what_is_captured_covers_every_context(max_length: int) -> None:
    """No text that is written up to its end, with any form behind it, needs a graph that is not there."""
    captured = {
        (form, splits_to(reach + form.depth))
        for _, form, reaches, _ in DraftMenu().jobs(1, max_length)
        for reach in reaches
    }
    for form in forms_for(1):
        for length in {0, 500, 1000, 1017, 1018, 1023, max_length // 2, max_length - 1}:
            if length < max_length:
                assert (form, splits_to(length + form.depth)) in captured, length
    assert len(contexts_of(max_length)) <= 4


def test_batches_larger_than_asked_for_are_not_captured() -> None:
    assert {job.bucket for job in DraftMenu().jobs(8, 500)} == {1, 2, 4, 8}
    assert {job.bucket for job in DraftMenu().jobs(9, 500)} == {1, 2, 4, 8, 12}
    assert max(job.bucket for job in DraftMenu().jobs(1000, 500)) == 128
