"""What fails on the device (a kernel that does not compile, a graph that cannot be captured) costs a warning only."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.build.engine import make_engine
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Event, Request, Verdict
from forerun.drafters.device.eagle import on_device
from forerun.drafters.heads.eagle_head import write_head
from forerun.engine.engine import Engine
from forerun.testing import FakeSeq
from tests.drafters.rounds import as_lists
from tests.gpu.heads import both_drafters, make_head
from tests.gpu.tiny import make_target


@pytest.mark.parametrize("place", ["keep", "_draft"])
def test_what_the_device_cannot_do_the_plain_drafter_does(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that does not compile costs one warning, and the drafts of a text whose rows the device has read."""
    target = make_target("llama", "cpu")
    device, plain = both_drafters(target)
    plain_alone = both_drafters(target)[1]
    monkeypatch.setattr(device.draft.rows.reader if place == "keep" else device.draft, place, _fail)
    for text in range(2):
        seq = FakeSeq(text, list(range(20)), max_length=200)
        trees, scores = target.prefill([seq], device.needs)
        for drafter in (device, plain_alone):
            drafter.observe([seq], trees, scores, Verdict.whole_chain(trees, [19]))
        for bonus in (7, 8):
            budgets = [Budget(7, 3, 2)]
            proposed, wanted = device.propose([seq], budgets), plain_alone.propose([seq], budgets)
            lost = text == 0  # its prompt was kept for the device alone
            assert proposed.is_plain() == lost
            assert lost or as_lists(proposed) == as_lists(wanted)
            scores = target.score([seq], proposed, device.needs)
            verdict = Verdict.of([[]], [bonus], "cpu")
            target.commit([seq], proposed, verdict)
            for drafter in (device, plain_alone):
                drafter.observe([seq], proposed, scores, verdict)
            seq.tokens.append(bonus)
        device.forget(seq)
        target.release(seq)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "no such instruction" in caplog.text
    assert device.offer(seq).level == plain.offer(seq).level > 0
    assert device.draft.rows.held == 0


def _fail(*_: object) -> None:
    raise RuntimeError("no such instruction\nin line 7")


@pytest.mark.parametrize("place", ["observe", "decide", "build"])
def test_a_failure_anywhere_on_the_device_leaves_the_text_as_it_is(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = make_target("llama", "cpu")
    drafter = both_drafters(target, borrows=True)[0]
    engine = make_engine(target, frozenset({1}), SpeculativeConfig(drafter="none", controller="fixed"))
    engine.drafters.add("device", drafter)
    texts = []
    if place == "build":
        config, weights = make_head(target, borrows=True)
        write_head(tmp_path / "head", config, weights)
        monkeypatch.setattr("forerun.drafters.device.eagle.make_net", _fail)
        assert on_device(tmp_path / "head", target, lambda: pytest.fail("not asked for")) is None
    elif place == "observe":
        monkeypatch.setattr(drafter.draft.rows, "append_decided", _fail)
    else:
        monkeypatch.setattr(target.grown, "decide", _fail)
    for name in ("none", "device", "device"):
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        engine.submit(Request((3, 4, 5), params, drafter=name, budget=Budget(7, 3, 2)))
        texts.append([token for event in _run_out(engine) for token in event.tokens])
    assert texts[0] == texts[1] == texts[2]
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


def _run_out(engine: Engine) -> Iterator[Event]:
    while engine.busy:
        yield from engine.step()
