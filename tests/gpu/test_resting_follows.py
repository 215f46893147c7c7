"""A drafter that does not pay rests, and plain rounds then follow each other unread: idle it costs next to nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from forerun.build.engine import make_engine
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.control.per_sequence import SequencePlanner
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Offer, Request, Round, Seq, TreeBatch
from forerun.drafters.base import BaseDrafter
from forerun.engine.scheduler import PrefillRows
from forerun.models.base import ON_CPU
from forerun.models.cuda.target import CudaDecoder
from tests.gpu.test_following import Forms, make, willing_target, write

WRONG = 60  # a token that the target never writes


class Wrong(BaseDrafter):
    """Chains of what is never written; as Medusa's heads it knows no confidence, and has no menu of forms."""

    def offer(self, seq: Seq) -> Offer:
        return Offer((1e-3,), chosen=True)

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return TreeBatch.chains(
            [[seq.tokens[-1], *[WRONG] * budget.depth] for seq, budget in zip(seqs, budgets, strict=True)]
        )


class Counted(AdaptiveController):
    """Counts rounds by what was drafted, and by whether they followed an unread one."""

    kinds: Counter[tuple[bool, bool]]

    def observe(self, outcome: Round) -> None:
        self.kinds[any(outcome.drafted), outcome.followed] += 1
        seconds = dict.fromkeys(outcome.seconds, 0.0) | {"pass": 4e-3, "draft": 1e-3 * any(outcome.drafted)}
        super().observe(
            Round(outcome.seqs, outcome.drafted, outcome.depths, outcome.accepted, seconds,
                  followed=outcome.followed)
        )  # fmt: skip


def endless_target() -> CudaDecoder:
    target = willing_target()
    target.model.head[1] = 0.0  # texts go on
    return target


def rounds_of(tokens: int) -> tuple[list[int], Counter[tuple[bool, bool]]]:
    """A text, which must be plain's, and its rounds by kind."""
    target = endless_target()
    config = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset({1}), config, EngineConfig(max_batch=1))
    engine.drafters.add("wrong", Wrong())
    cost = CostModel({1: 4e-3, 8: 4.1e-3, 64: 5e-3})
    controller = Counted(cost, 24, 1, engine.drafters.offer, engine.drafters.looks_up, follows=True)
    controller.kinds = Counter()
    engine.controller, engine.prefill_rows = controller, PrefillRows(ON_CPU.prefill, target.pass_rows, 16)
    engine.timeline.depth = 2
    request = Request((5, 6, 7), SamplingParams(max_tokens=tokens, ignore_eos=True), drafter="wrong")
    (text,), _ = write(engine, [request], 0)
    plain = Request((5, 6, 7), SamplingParams(max_tokens=tokens, ignore_eos=True))
    (wanted,), _ = write(make(endless_target(), Forms([None], 0), follows=False), [plain], 0)
    assert text == wanted
    return text, controller.kinds


@pytest.mark.slow
def test_plain_rounds_of_a_drafter_that_never_pays_follow_each_other() -> None:
    text, kinds = rounds_of(300)
    drafted, followed, first = kinds[True, False], kinds[False, True], kinds[False, False]
    assert len(text) == drafted + followed + first == 300
    assert 2 < drafted < 40
    assert followed > 0.65 * 300


@pytest.mark.slow
def test_negative_control_without_a_rest_every_round_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SequencePlanner, "rests", lambda *_: False)
    assert rounds_of(120)[1][False, True] == 0
