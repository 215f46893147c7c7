"""What the benchmark of attention plans; its times need a GPU."""

from forerun.bench.gpu.attention import plan_of


def test_trees_are_planned_with_all_groups_of_grown_ones() -> None:
    plan, grown = plan_of(batch=3, nodes=20, levels=5, context=300, group=16)
    assert (grown.trees, grown.lone, grown.groups) == (3, 20, 3 * (2 + 20))
    positions = plan.ints[plan.size.rows : plan.size.rows + plan.rows]
    assert (positions.min(), positions.max()) == (300, 305)


def test_short_contexts_share_nothing_and_chains_have_no_lone_nodes() -> None:
    assert plan_of(batch=2, nodes=20, levels=5, context=100, group=16)[1].groups == 2 * 20
    plan, grown = plan_of(batch=2, nodes=4, levels=3, context=300, group=16)
    assert grown == plan.size
