"""The KV store: who owns which slots, and what a commit moves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import InvalidInput
from forerun.models.kv import CHUNK, FreeList, KVStore


def _store(capacity: int | None) -> KVStore:
    return KVStore(2, 3, 4, dtype=torch.float32, device=torch.device("cpu"), capacity=capacity)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60))
def test_runs_never_overlap_and_merge_when_freed(size: int, steps: list[tuple[bool, int]]) -> None:
    slots, taken = FreeList(size), list[tuple[int, int]]()
    for takes, n in steps:
        if takes:
            longest = slots.longest
            base = slots.take(n)
            assert (base is None) == (longest < n)
            if base is not None:
                taken.append((base, n))
        elif taken:
            slots.give(*taken.pop(n % len(taken)))
        owners = [slot for base, length in [*taken, *slots.runs] for slot in range(base, base + length)]
        assert sorted(owners) == list(range(size))  # every slot is owned or free, once
        assert slots.free == size - sum(length for _, length in taken)
        ends = {base + length for base, length in slots.runs}
        assert not ends & {base for base, _ in slots.runs}  # free neighbours are one run
    for run in taken:
        slots.give(*run)
    assert slots.runs == [(0, size)]


def test_the_first_run_that_fits_is_taken() -> None:
    slots = FreeList(10)
    assert [slots.take(3), slots.take(2), slots.take(4)] == [0, 3, 5]
    slots.give(0, 3)
    assert slots.take(2) == 0
    assert slots.take(2) is None
    slots.grow(3)
    assert slots.tail == 4
    assert slots.take(4) == 9


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 700)), min_size=1, max_size=25))
def test_an_unbounded_store_grows_and_keeps_what_it_held(steps: list[tuple[int, int]]) -> None:
    store, held = _store(None), dict[int, float]()
    for mark, (seq_id, size) in enumerate(steps):
        if seq_id in held and size % 2:
            store.release(seq_id)
            del held[seq_id]
            continue
        extent = store.reserve(seq_id, size)
        store.data[:, :, :, extent.base : extent.base + size] = mark
        held[seq_id] = mark
        for other, value in held.items():
            slots = store.table(other)
            assert bool((store.data[:, :, :, slots] == value).all())
    assert store.used == sum(store.extent(seq_id).size for seq_id in held)
    assert store.capacity % CHUNK == 0
    for seq_id in held:
        store.release(seq_id)
    assert store.used == 0


def test_a_bounded_store_refuses() -> None:
    store = _store(100)
    store.reserve(0, 60)
    assert store.has_room(40)
    assert not store.has_room(41)
    with pytest.raises(InvalidInput, match=r"needs 41 KV slots.* of 100 is 40.*kv_slots"):
        store.reserve(1, 41)
    assert store.used == 60
    store.release(1)  # never admitted: nothing to free
    store.release(0)
    store.release(0)
    assert store.used == 0


def test_room_for_two_is_not_room_for_their_sum() -> None:
    store = _store(100)
    for seq_id, size in enumerate((30, 40, 30)):
        store.reserve(seq_id, size)
    store.release(0)
    store.release(2)  # two runs of 30, apart
    assert store.has_room()
    assert store.has_room(30, 30)
    assert store.has_room(20, 20, 10, 10)
    assert not store.has_room(20, 20, 11)
    assert not store.has_room(60)
    assert not store.has_room(1, 30, 30)
    assert store.has_room(30)  # asking has taken nothing


@given(st.lists(st.integers(1, 40), max_size=6), st.lists(st.integers(1, 40), max_size=6), st.data())
def test_what_has_room_can_be_reserved(held: list[int], wanted: list[int], data: st.DataObject) -> None:
    store = _store(100)
    for seq_id, size in enumerate(held):
        if store.has_room(size):
            store.reserve(seq_id, size)
    for seq_id in data.draw(st.sets(st.integers(0, 6))):
        store.release(seq_id)
    promised = store.has_room(*wanted)
    try:
        for seq_id, size in enumerate(wanted, start=10):
            store.reserve(seq_id, size)
    except InvalidInput:
        assert not promised
    else:
        assert promised


@given(st.sets(st.integers(1, 9)), st.integers(0, 4))
def test_a_commit_brings_the_path_next_to_the_root(nodes: set[int], length: int) -> None:
    store, path = _store(64), sorted(nodes)
    store.reserve(0, 5)
    extent = store.reserve(1, 20)
    extent.length = length
    slots = store.table(1)
    store.data[:, :, :, slots] = torch.arange(20.0).view(20, 1)
    before = store.data[:, :, :, :5].clone()
    store.move(store.accept(1, path))
    assert extent.length == length + 1 + len(path)
    wanted = [*range(length + 1), *[length + node for node in path]]
    assert store.data[1, 0, 2, slots[: extent.length], 3].tolist() == wanted
    assert torch.equal(store.data[:, :, :, :5].nan_to_num(), before.nan_to_num())
    store.truncate(1, 2)
    assert extent.length == min(2, length + 1 + len(path))


def test_strangers_are_named() -> None:
    with pytest.raises(InvalidInput, match="sequence 9"):
        _store(None).table(9)
