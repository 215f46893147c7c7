"""Keys and values on pages: commits move the path next to its root, cuts never lengthen, growing keeps what is held."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.errors import InvalidInput
from forerun.models.pages import PAGE, PagedKV, slots_of


def store(capacity: int | None = None) -> PagedKV:
    return PagedKV(2, 3, 4, dtype=torch.float32, device=torch.device("cpu"), capacity=capacity)


@given(st.sets(st.integers(1, 9)), st.integers(0, PAGE + 4))
def test_a_commit_brings_the_path_next_to_the_root(nodes: set[int], length: int) -> None:
    kv, path, room = store(), sorted(nodes), length + 12
    kv.admit(0, [1], None, ())
    kv.grow(0, 5)
    extent = kv.admit(1, [1], None, ())
    kv.grow(1, room)
    extent.length = length
    slots = slots_of(extent.pages, 0, room)
    kv.data[:, :, :, slots] = torch.arange(float(room)).view(room, 1)
    other = slots_of(kv.extent(0).pages, 0, PAGE)
    before = kv.data[:, :, :, other].clone()
    kv.move(kv.accept(1, path))
    assert extent.length == length + 1 + len(path)
    wanted = [*range(length + 1), *[length + node for node in path]]
    assert kv.data[1, 0, 2, slots[: extent.length], 3].tolist() == wanted
    assert torch.equal(kv.data[:, :, :, other].nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(("cut", "left"), [(2, 2), (0, 0), (70, 70), (99, 70)])
def test_a_cut_never_lengthens(cut: int, left: int) -> None:
    kv = store()
    extent = kv.admit(1, [1], None, ())
    kv.grow(1, 80)
    extent.length = 70
    kv.truncate(1, cut)
    assert extent.length == left
    kv.truncate(5, 1)  # a stranger


def test_a_store_that_grows_keeps_what_it_holds() -> None:
    kv = store()
    extent = kv.admit(1, [1], None, ())
    kv.grow(1, PAGE)
    slots = slots_of(extent.pages, 0, PAGE)
    kv.data[:, :, :, slots] = torch.arange(float(PAGE)).view(PAGE, 1)
    for other in range(2, 40):
        kv.admit(other, [1], None, ())
        kv.grow(other, PAGE)
    assert kv.data[1, 1, 2, slots, 3].tolist() == list(range(PAGE))


def test_strangers_are_named() -> None:
    with pytest.raises(InvalidInput, match="sequence 9"):
        store().extent(9)


@pytest.mark.parametrize(("pages", "found"), [(3, 2 * PAGE), (4, 2 * PAGE + 38)])
def test_a_text_that_fills_the_store_can_come_again(pages: int, found: int) -> None:
    """Its last page is copied only where there is one more: before, nothing was left for the copy, and it failed."""
    kv, tokens = store(pages * PAGE), list(range(2 * PAGE + 38))
    extent = kv.admit(1, tokens, b"", ())
    kv.grow(1, len(tokens))
    extent.length = len(tokens)
    kv.keep(1, tokens, ended=True)
    kv.release(1)
    assert kv.admit(2, tokens, b"", ()).length == found
    kv.grow(2, 3 * PAGE)
    assert kv.used == 3 * PAGE
