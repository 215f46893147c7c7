"""What coupled verification costs against exact: ratios are paired by prompt, both verifiers really run."""

from __future__ import annotations

import pytest

from forerun.bench.suites import Item
from forerun.bench.verifiers import SEED, measure, ratio
from forerun.params import SamplingParams
from forerun.types import Budget, Event
from tests.test_llm import make


def test_a_ratio_is_paired_and_has_an_interval() -> None:
    middle, low, high = ratio([2.0, 8.0], [1.0, 4.0])
    assert (middle, low, high) == (2.0, 2.0, 2.0)  # the prompts differ fourfold, their ratios do not
    middle, low, high = ratio([2.0, 4.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    assert middle == pytest.approx(8**0.5, abs=1e-3)
    assert low < middle < high
    assert ratio([3.0], [1.0])[1:] == [0.0, float("inf")]


def test_both_verifiers_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, asked = make(), list[str]()
    stream = llm.stream
    monkeypatch.setattr(llm, "stream", lambda *a, **k: (asked.append(k["verifier"]), stream(*a, **k))[1])
    items = [
        Item(str(i), "qa", ({"role": "user", "content": text},)) for i, text in enumerate(["abcabc", "xyz"])
    ]
    row = measure(llm, "ngram", items, 1.0, 12, Budget(3, 3))
    assert asked == ["coupled", "exact", "exact", "coupled"]
    for name in ("exact", "coupled"):  # the same texts again, with their events counted
        rates = []
        for i, item in enumerate(items):
            params = SamplingParams(max_tokens=12, temperature=1.0, seed=SEED + i, ignore_eos=True)
            parts = stream(list(item.messages), params, drafter="ngram", verifier=name, budget=Budget(3, 3))
            rates.append(12 / sum(isinstance(part, Event) for part in parts))
        assert row[f"tokens_per_round_{name}"] == pytest.approx(sum(rates) / len(rates), abs=1e-3)
    assert all(value > 0 for value in row["cpu_time_ratio"])
