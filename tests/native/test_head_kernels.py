"""The kernels that draft, by themselves: the best of rows, and the noise."""

import pytest
import torch

from forerun.core.noise import coupling_key, exponential
from forerun.models.native import head_library
from forerun.models.native import library as native_library

needs_head_kernels = pytest.mark.skipif(not native_library.available(), reason="no native kernels that draft")


@needs_head_kernels
@pytest.mark.parametrize(("rows", "size", "count"), [(1, 5, 5), (3, 33, 4), (2, 16384, 10), (9, 5000, 1)])
def test_the_best_of_rows_are_torchs(rows: int, size: int, count: int) -> None:
    torch.manual_seed(size)
    logits = torch.randn(rows, size) * 4
    values, places = head_library.top_rows(logits, count)
    wanted = logits.log_softmax(-1).topk(count)
    assert torch.equal(places, wanted.indices)
    torch.testing.assert_close(values, wanted.values, rtol=1e-5, atol=1e-5)
    raw, again = head_library.top_rows(logits, count, as_log_probs=False)
    assert torch.equal(again, places)
    assert torch.equal(raw, logits.gather(1, places))


@needs_head_kernels
@pytest.mark.parametrize("size", [1, 3, 8, 15, 16, 17, 49152])
def test_the_first_of_the_largest_is_numpys(size: int) -> None:
    torch.manual_seed(size)
    several = torch.randint(-3, 4, (5, size)).float()  # many ties
    several[3] = -torch.inf
    several[4, -1] = 9.0
    found = torch.empty(5, dtype=torch.int32)
    native_library.library().fr_argmax_rows(several.data_ptr(), 5, size, found.data_ptr())
    assert found.tolist() == several.numpy().argmax(-1).tolist()


@needs_head_kernels
@pytest.mark.parametrize("size", [2, 17, 4099])
def test_rows_that_hold_no_numbers_have_no_largest(size: int) -> None:
    """A pass tells them by this: no logit is looked at again."""
    rows = torch.zeros(5, size)
    rows[0, -1] = torch.nan
    rows[1, 0], rows[1, 1] = torch.inf, -torch.inf
    rows[2, -1], rows[3, 0] = torch.inf, -torch.inf  # one kind of infinity is a number to the softmax
    found = torch.empty(5, dtype=torch.int32)
    native_library.library().fr_argmax_rows(rows.data_ptr(), 5, size, found.data_ptr())
    assert found.tolist() == [-1, -1, size - 1, 1, 0]


@needs_head_kernels
def test_ties_go_to_the_smaller_place_and_nothing_is_above_certainty() -> None:
    logits = torch.full((1, 9000), -40.0)
    logits[0, [4, 17, 8191, 8999]] = 60.0
    logits[0, 5] = -torch.inf
    values, places = head_library.top_rows(logits, 6)
    assert places.tolist() == [[4, 17, 8191, 8999, 0, 1]]
    assert float(values.max()) <= 0.0
    torch.testing.assert_close(values[0, :4].exp(), torch.full((4,), 0.25))
    certain, _ = head_library.top_rows(torch.tensor([[0.0, 500.0, 0.0]]), 1)
    assert certain.tolist() == [[0.0]]
    with pytest.raises(ValueError, match="4 best"):
        head_library.top_rows(torch.zeros(1, 3), 4)


@needs_head_kernels
def test_neither_threads_nor_neighbours_matter() -> None:
    torch.manual_seed(0)
    logits, before = torch.randn(7, 20000), torch.get_num_threads()
    wanted = [head_library.top_rows(logits[i : i + 1], 8)[0] for i in range(7)]
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(head_library.top_rows(logits, 8)[0], torch.cat(wanted))
    finally:
        torch.set_num_threads(before)


@needs_head_kernels
def test_noise_is_that_of_the_verifier() -> None:
    ids = torch.tensor([0, 3, 4, 5, 700, 701, 49151], dtype=torch.int32)
    wanted = exponential(seed=11, position=42, size=49152)[ids.long()].log()
    found = torch.empty(len(ids))
    native_library.library().fr_log_noise(ids.data_ptr(), len(ids), *coupling_key(11, 42), found.data_ptr())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    many = torch.arange(100_000, dtype=torch.int32)
    noise = torch.empty(len(many))
    native_library.library().fr_log_noise(many.data_ptr(), len(many), 5, 6, noise.data_ptr())
    assert abs(float(noise.exp().mean()) - 1.0) < 0.02  # a standard exponential
    assert abs(float((noise.exp() > 1.0).float().mean()) - 0.3679) < 0.01
