"""Hashed noise: uniform, independent across everything it is hashed from, and the draws made with it.

Nothing here is random: the hash gives the same numbers each time; the limits are chi-square's with margins.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from forerun.core.noise import (
    ACCEPT,
    BLOCK,
    DRAFT,
    DRAW,
    Noise,
    _hash32,
    draw,
    exponential,
    fresh_seed,
    uniform,
    uniforms,
)

PURPOSES = (DRAW, ACCEPT, BLOCK, DRAFT)


def deviations(counts: Sequence[int], expected: Sequence[float]) -> float:
    """Chi-square in standard deviations from its mean."""
    total = sum((seen - mean) ** 2 / mean for seen, mean in zip(counts, expected, strict=True))
    freedom = len(counts) - 1
    return (total - freedom) / (2 * freedom) ** 0.5


def spread(numbers: Sequence[float], cells: int = 64) -> float:
    counts = Counter(int(u * cells) for u in numbers)
    return deviations([counts[i] for i in range(cells)], [len(numbers) / cells] * cells)


def joint(first: Sequence[float], second: Sequence[float], cells: int = 8) -> float:
    """Of pairs over a grid: dependence and unevenness both show."""
    counts = Counter((int(u * cells), int(v * cells)) for u, v in zip(first, second, strict=True))
    grid = list(itertools.product(range(cells), repeat=2))
    return deviations([counts[cell] for cell in grid], [len(first) / len(grid)] * len(grid))


@pytest.mark.parametrize("purpose", PURPOSES)
def test_uniform_is_uniform_along_positions_seeds_and_indices(purpose: int) -> None:
    assert spread([uniform(7, i, purpose) for i in range(8000)]) < 5
    assert spread([uniform(i, 7, purpose) for i in range(8000)]) < 5
    assert spread([uniform(7, 7, purpose, i) for i in range(8000)]) < 5
    assert all(0.0 <= uniform(i, i, purpose) < 1.0 for i in range(1000))


def test_uniform_is_independent_across_positions_purposes_seeds_and_indices() -> None:
    base = [uniform(11, i, DRAW) for i in range(8000)]
    others = {
        "next position": base[1:] + base[:1],
        "purpose": [uniform(11, i, ACCEPT) for i in range(8000)],
        "seed": [uniform(12, i, DRAW) for i in range(8000)],
        "index": [uniform(11, i, DRAW, 1) for i in range(8000)],
        "swapped": [uniform(i, 11, DRAW) for i in range(8000)],
    }
    assert {name: joint(base, other) < 5 for name, other in others.items()} == dict.fromkeys(others, True)
    assert joint(base, base) > 100  # the check can fail


def test_seeds_of_any_size_and_sign_are_different_seeds() -> None:
    seeds = [0, 1, -1, 2**31, 2**32, 2**63, 2**64 - 2, fresh_seed()]
    assert len({uniform(seed, 0, DRAW) for seed in seeds}) == len(set(seeds))


def test_exponential_is_exponential_in_every_direction() -> None:
    along_tokens = 1 - (-exponential(3, 5, 20000)).exp().double()
    assert spread(along_tokens.clamp(max=1 - 1e-9).tolist()) < 5
    along_positions = torch.stack([exponential(3, i, 4) for i in range(1500)])
    along_seeds = torch.stack([exponential(i, 3, 4) for i in range(1500)])
    for rows in (along_positions, along_seeds):
        columns = (1 - (-rows.double()).exp()).clamp(max=1 - 1e-9).T.tolist()
        assert all(spread(column) < 5 for column in columns)
        assert all(joint(one, two) < 5 for one, two in itertools.combinations(columns, 2))
        assert joint(columns[0], columns[0][1:] + columns[0][:1]) < 5


def test_exponential_is_positive_and_the_same_for_any_vocabulary_size() -> None:
    noise = exponential(1, 2, 150_000)
    assert bool((noise > 0).all())
    assert torch.equal(noise[:100], exponential(1, 2, 100))
    assert not torch.equal(noise[:100], exponential(1, 3, 100))


def test_argmin_of_noise_over_law_is_a_draw_from_the_law() -> None:
    law = torch.tensor([0.05, 0.5, 0.0, 0.15, 0.3])
    for rows in ([exponential(9, i, 5) for i in range(1500)], [exponential(i, 9, 5) for i in range(1500)]):
        tokens = (torch.stack(rows) / law).argmin(-1).tolist()
        assert tokens.count(2) == 0
        possible = [0, 1, 3, 4]
        expected = [1500 * float(law[t]) for t in possible]
        assert deviations([tokens.count(t) for t in possible], expected) < 4


def test_argmin_at_one_position_does_not_depend_on_the_next() -> None:
    tokens = [int(exponential(4, i, 8).argmin()) for i in range(2500)]
    assert joint([t / 8 for t in tokens[:-1]], [t / 8 for t in tokens[1:]]) < 5


def test_draw_is_the_quantile_of_the_law() -> None:
    law = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    cases = {0.0: 1, 0.2499: 1, 0.25: 3, 0.7499: 3, 0.75: 4, 1 - 2.0**-53: 4}
    assert {u: draw(law, u) for u in cases} == cases
    assert {u: draw(law * 8, u) for u in cases} == cases  # unnormalised


def test_draw_never_gives_an_impossible_token() -> None:
    law = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    law[law < 0.5] = 0.0
    law[-1] = law[0] = 0.0
    for u in [0.0, *(i / 997 for i in range(997)), 1 - 2.0**-53]:
        assert law[draw(law, u)] > 0


@pytest.mark.parametrize("law", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_a_law_without_mass_is_refused(law: list[float]) -> None:
    with pytest.raises(ValueError, match="no token is possible"):
        draw(torch.tensor(law), 0.5)


def test_noise_is_keyed_by_seed_and_absolute_position() -> None:
    noise = Noise([5, 6], [10, 20])
    assert noise.uniform(1, 2, ACCEPT, 3) == uniform(6, 22, ACCEPT, 3)
    assert torch.equal(noise.uniforms(0, 4, torch.zeros(9)), uniforms(5, 14, 9))
    assert noise.select([1]) == Noise([6], [20])
    assert noise.uniform(0, 3, DRAW) == Noise([5], [13]).uniform(0, 0, DRAW)


def test_numpy_and_torch_hash_alike() -> None:
    """A CPU hashes in numpy (uint32), a GPU in torch (int32): the bits must be the same."""
    ours = _hash32(np.arange(5000, dtype=np.uint32) * np.uint32(2654435761))
    theirs = _hash32(torch.from_numpy((np.arange(5000, dtype=np.uint32) * np.uint32(2654435761)).view(np.int32)))
    assert np.array_equal(ours.view(np.int32), theirs.numpy())
