"""Which replica a request goes to: the one that holds its prompt, its session's, the least loaded."""

from __future__ import annotations

from forerun.server.cluster import placement
from forerun.server.cluster.placement import BLOCK, Placement, blocks_of

LONG = tuple(range(10 * BLOCK))
OTHER = tuple(range(1000, 1000 + 10 * BLOCK))


def test_blocks_name_what_they_hold_and_all_before() -> None:
    whole, longer = blocks_of(LONG), blocks_of((*LONG, 7, 8, 9))
    assert len(whole) == 10
    assert longer == whole  # the last block is not whole
    changed = blocks_of((5, *LONG[1:]))
    assert not set(changed) & set(whole)  # the first token differs: nothing can be shared
    assert blocks_of(LONG, "another caller") != whole


def test_the_replica_that_holds_the_prompt_is_first() -> None:
    table = Placement()
    table.note("a", blocks_of(LONG))
    table.note("b", blocks_of(OTHER))
    loads = {"a": 0.0, "b": 0.0, "c": 0.0}
    assert table.ranked(loads, blocks_of(LONG))[0] == "a"
    assert table.ranked(loads, blocks_of((*OTHER, *LONG)))[0] == "b"
    assert table.ranked({**loads, "a": 1.0, "b": 1.0}, blocks_of((9, *LONG)))[0] == "c"  # held by none


def test_a_cached_prompt_is_worth_texts_by_its_length() -> None:
    table = Placement(batch=8)
    short, long = LONG[:BLOCK], tuple(range(32 * BLOCK))
    table.note("a", blocks_of(short))
    assert table.ranked({"a": 0.0, "b": 0.0}, blocks_of(short))[0] == "a"
    assert table.ranked({"a": 1.0, "b": 0.0}, blocks_of(short))[0] == "b"  # a chat template is soon read
    table.note("a", blocks_of(long))
    assert table.ranked({"a": 1.0, "b": 0.0}, blocks_of(long))[0] == "a"
    assert table.ranked({"a": 3.0, "b": 0.0}, blocks_of(long))[0] == "b"


def test_no_text_waits_while_another_replica_has_a_place() -> None:
    table = Placement(batch=4)
    endless = tuple(range(1000 * BLOCK))
    table.note("a", blocks_of(endless))
    assert table.ranked({"a": 3.0, "b": 0.0}, blocks_of(endless))[0] == "a"
    assert table.ranked({"a": 4.0, "b": 3.0}, blocks_of(endless))[0] == "b"


def test_the_longer_part_wins_and_a_session_is_worth_one_text() -> None:
    table = Placement()
    table.note("a", blocks_of(LONG[: 4 * BLOCK]))
    table.note("b", blocks_of(LONG))
    assert table.ranked({"a": 0.0, "b": 0.0}, blocks_of(LONG))[0] == "b"
    table.note("a", [], session="mine")
    assert table.ranked({"a": 0.5, "b": 0.0}, blocks_of((1, 2, 3)), "mine")[0] == "a"
    assert table.ranked({"a": 0.5, "b": 0.0}, blocks_of((1, 2, 3)), "yours")[0] == "b"


def test_requests_that_come_at_once_are_spread() -> None:
    table = Placement(batch=4)
    table.note("a", blocks_of(LONG[:BLOCK]))  # a template that all share
    chosen = []
    for i in range(6):
        best = table.ranked(table.loads(["a", "b"], f"r{i}", 0.0), blocks_of(LONG[:BLOCK]))[0]
        table.promise(f"r{i}", best, 0.0)
        chosen.append(best)
    assert sorted(chosen) == ["a"] * 3 + ["b"] * 3


def test_a_promise_is_forgotten_and_a_start_is_not() -> None:
    table = Placement()
    table.promise("one", "a", 0.0)
    table.promise("two", "a", 0.0)
    assert table.loads(["a"], "one", 1.0) == {"a": 1.0}  # itself does not count
    table.start("one", "b")
    assert table.loads(["a", "b"], "", 100.0) == {"a": 0.0, "b": 1.0}
    table.end("of somebody else", "b")
    table.end("one", "a")  # turned away there, before it went to b
    assert table.loads(["b"], "", 100.0) == {"b": 1.0}
    table.end("one", "b")
    assert table.loads(["b"], "", 100.0) == {"b": 0.0}
    table.start("three", "b")
    table.forget("b")
    assert table.loads(["b"], "", 100.0) == {"b": 0.0}


def test_replicas_that_are_gone_hold_nothing() -> None:
    table = Placement()
    table.note("a", blocks_of(LONG), "mine")
    table.keep_only(["b"])
    assert table.held("a", blocks_of(LONG)) == 0
    assert table.ranked({"a": 1.0, "b": 0.0}, blocks_of(LONG), "mine") == ["b", "a"]


def test_memory_has_a_limit_and_keeps_what_was_used_last() -> None:
    table = Placement()
    most = placement.MOST_BLOCKS
    for start in range(0, most + BLOCK, BLOCK):
        table.note("a", range(start, start + BLOCK))
        table.note("a", [0])  # used again and again
    assert table.held("a", [0]) == 1
    assert table.held("a", [1]) == 0
