"""Rounds over recorded texts, on the path of a GPU: the texts come out as recorded, and every round is counted once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forerun.bench.forms.record import CHAINS, NEVER, WIDTHS, RecordedText
from forerun.bench.gpu.recorded_rounds import STOP, measure, renamed
from forerun.drafters.eagle.cuda.draft_graphs import DeviceDraft


def texts(count: int = 6, tokens: int = 40) -> list[RecordedText]:
    """Some of which repeat themselves; trees have the next three tokens right, or none."""
    rng, made = np.random.default_rng(4), list[RecordedText]()
    for i in range(count):
        prompt = rng.integers(10, 400, 30).tolist()
        answer = [*prompt[:20], *rng.integers(10, 400, tokens - 20).tolist()][: tokens - i]
        better = np.full((len(answer), len(WIDTHS), CHAINS, CHAINS), NEVER, dtype=np.int16)
        better[rng.random(len(answer)) < 0.7, :, :, :3] = 0
        made.append(RecordedText("made up", prompt, answer, better))
    return made


@pytest.mark.parametrize("batch", [1, 5])
def test_rounds_are_counted_by_kind(batch: int) -> None:
    row = measure(texts(), batch, 4)  # which raises where other texts are written
    kinds: dict[str, int] = row["kinds"]
    assert sum(kinds.values()) == row["rounds"]
    first = sum(count for kind, count in kinds.items() if kind.endswith("read first"))
    assert first == sum(row["why"].values())
    assert kinds["head's, followed"] > first
    assert row["tokens_per_round"] > 1.5 * min(batch, 3)


def test_what_keeps_rounds_from_following_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a head that never lets a round follow."""

    def refuses(draft: DeviceDraft, *given: Any) -> None:
        return None

    for name in ("follow", "switch"):
        monkeypatch.setattr(DeviceDraft, name, refuses)
    row = measure(texts(), 5, 4)
    assert "head's, followed" not in row["kinds"]
    assert row["why"]["behind head's: follow"] > 5


def test_other_texts_than_the_recorded_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    some = texts()
    monkeypatch.setattr("forerun.bench.gpu.recorded_rounds._after", lambda text, place, count: [7] * count)
    with pytest.raises(RuntimeError, match="other texts"):
        measure(some, 2, 2)


def test_tokens_are_renamed_alike_and_ended_texts_say_so() -> None:
    some = texts(2)
    found, vocabulary = renamed(some, 40)
    assert len({*found[0].prompt}) == len({*some[0].prompt})
    assert found[0].answer[:20] == found[0].prompt[:20]
    assert found[0].answer[-1] != STOP
    assert found[1].answer[-1] == STOP
    assert vocabulary <= 400
