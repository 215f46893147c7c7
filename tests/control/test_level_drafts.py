"""Drafts whose levels take a third of a pass, as those of sparse_kv behind 30,000 tokens: they pay or cost little.

An H200 is simulated, with eight texts of a 1.5B at once: a plain pass takes 3.3 ms there and a level about one. The
cost model was measured in short contexts, where a pass takes 1.2 ms.
"""

from __future__ import annotations

import pytest

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.types import Form, Offer
from forerun.drafters.device.model import ACCEPTED
from forerun.drafters.device.plan import CHAINS, forms_for
from lab.simulate.speeds import Speeds, accepted_of
from tests.simulate import head as simulated_head
from tests.simulate.head import SimulatedForms, SimulatedHead
from tests.simulate.load import Ask, SimulatedServer

SHORT = {1: 1.1, 8: 1.2, 16: 1.25, 32: 1.3, 64: 1.5, 128: 1.9, 256: 3.0, 512: 5.6, 1024: 11.0}  # rows -> ms
LONGER = 2.1  # ms that reading 240,000 tokens takes
TEXTS = [Ask(400, 192)] * 8


class Chains(SimulatedForms):
    @property
    def forms(self) -> tuple[Form, ...]:
        return CHAINS

    def expected(self, form: Form) -> float:
        return accepted_of(form, ACCEPTED)


def tokens_per_second(drafts: bool, rate: float) -> float:
    """Of the second eight texts."""
    passes = {rows: (ms + LONGER * (rows <= 128)) / 1e3 for rows, ms in SHORT.items()}
    speeds = Speeds(passes, level=1e-3, slope=0.0)
    server = SimulatedServer(drafts, places=8, speeds=speeds, rate=rate)
    head = server.engine.drafters.get("head")
    assert isinstance(head, SimulatedHead)
    head.menu = Chains(speeds, rate)
    head._offer = Offer(menu=head.menu)
    if drafts:
        cost = CostModel({rows: ms / 1e3 for rows, ms in SHORT.items()})
        server.engine.controller = AdaptiveController(cost, 60, 10, head.offer)
    server.serve(TEXTS, 8)
    return server.serve(TEXTS, 8).rate


@pytest.mark.parametrize(("rate", "least"), [(0.83, 1.3), (0.5, 0.985), (0.2, 0.985), (0.0, 0.985)])
def test_drafts_pay_or_cost_little(rate: float, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_head, "forms_for", lambda bucket: forms_for(bucket, CHAINS))
    monkeypatch.setattr(SimulatedHead, "_read", lambda *_: None)  # the target has read all prompts
    plain, drafted = (tokens_per_second(drafts, rate) for drafts in (False, True))
    assert drafted > least * plain
    assert rate or drafted < plain, "it has tried"
