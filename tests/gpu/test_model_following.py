"""A draft model's rounds that start before the last one was read: same texts, same chains, whoever joins or ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SpeculativeConfig
from forerun.core.types import Form, Request, Round
from forerun.drafters.base import Drafter
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.model import ModelDraft, over_model
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.drafters.model.draft_model import ModelDrafter
from forerun.engine.engine import Engine
from forerun.engine.scheduler import PrefillRows, Scheduler
from forerun.models.base import ON_CPU
from forerun.models.cuda import graphs
from forerun.models.cuda.target import CudaDecoder
from tests.gpu.test_captured import record
from tests.gpu.test_following import Forms, Watched, dtype_on, plain_texts, requests, sampled, willing_target, write
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda

SHORT, LONG = Form(2, 2, 1), Form(5, 5, 1)


class Noted(Forms):
    """Notes what was accepted of whole chains, by sequence and position; shorter ones are cut at the end of a text."""

    def __init__(self, forms: Sequence[Form | None], repeats: int) -> None:
        super().__init__(forms, repeats)
        self.accepted: dict[tuple[int, int], int] = {}

    def observe(self, outcome: Round) -> None:
        for seq, drafted, accepted in zip(outcome.seqs, outcome.drafted, outcome.accepted, strict=True):
            if drafted == LONG.depth and seq.max_length - len(seq.tokens) > LONG.depth:
                self.accepted[seq.id, len(seq.tokens) - accepted] = accepted


def _draft_model(device: str = "cpu", blur: float = 0.0, words: int = 8) -> CudaDecoder:
    """The target's own weights, but for its LM head; it says few different tokens too."""
    draft = make_target("llama", device, dtype_on(device))
    head, noise = draft.model.head, torch.Generator().manual_seed(3)
    head += blur * head.std() * torch.randn(head.shape, generator=noise).to(head)
    head[words:] = 0.0
    return draft


def _engine(
    target: CudaDecoder, draft: CudaDecoder, forms: Forms, *, follows: bool = True, lookup: bool = False
) -> tuple[Engine, OnDevice[ModelDraft]]:
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset({1}), speculative, EngineConfig(max_batch=4))
    model = ModelDraft(draft, VOCAB, target.grown.last)
    if target.device.type == "cuda":
        model.rehearse(target, 4, 256)
    drafter = over_model(model, lambda: ModelDrafter(draft, VOCAB))
    both: Drafter = HybridDrafter(NgramDrafter(), drafter) if lookup else drafter
    engine.drafters.add("device", both)
    engine.controller, engine.prefill_rows = forms, PrefillRows(ON_CPU.prefill, target.pass_rows, 16)
    engine.timeline.depth = 2 * follows
    return engine, drafter


def _is_clean(drafter: OnDevice[ModelDraft]) -> bool:
    """Nothing is held, nothing has failed."""
    model = drafter.draft
    return model.model.used_slots == 0 and not model._proposed and not drafter._failed


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verifier", [None, "coupled", "exact"])
@pytest.mark.parametrize("forms", [[LONG], [SHORT, LONG, None]])
def test_texts_are_those_of_plain_decoding(
    device: str, verifier: str | None, forms: Sequence[Form | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    need_cuda(device)
    target = willing_target(device, dtype=dtype_on(device))
    some: list[Request] = requests(9, 6) if verifier is None else sampled(9, 6, verifier)
    wanted, watched = plain_texts(target, some), Watched(monkeypatch)
    engine, drafter = _engine(target, _draft_model(device), Forms(forms, 6))
    assert write(engine, some, 5)[0] == wanted
    assert 7 < watched.followed < watched.asked
    assert _is_clean(drafter)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("blur", [0.0, 0.5])
@pytest.mark.parametrize("coupled", [False, True])
def test_chains_are_those_of_rounds_that_were_read(blur: float, coupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a draft model reads next follows from what the device has decided: else less would be accepted.

    The target's own weights draft chains that are accepted whole: then two tokens are read first, not one.
    """
    monkeypatch.setattr(Scheduler, "starters", lambda *_: [])  # else who has a plain round depends on company
    target = willing_target(words=5)
    target.model.head[1] = 0.0  # texts go on
    some = sampled(7, 4, "coupled") if coupled else requests(7, 4)
    some, watched = [one for one in some if len(one.prompt) > 1], Watched(monkeypatch)
    draft = _draft_model(blur=blur, words=5)
    draft.model.head[1] = 0.0
    texts, found = [], []
    for follows in (False, True):
        noted = Noted([LONG], 9)
        engine, drafter = _engine(target, draft, noted, follows=follows)
        texts.append(write(engine, some, 6)[0])
        found.append(noted.accepted)
        assert _is_clean(drafter)
    assert texts[0] == texts[1]
    assert watched.followed > 8
    both = found[0].keys() & found[1].keys()
    assert len(both) > 5, both
    assert [found[0][key] for key in both] == [found[1][key] for key in both]
    counts = {found[1][key] for key in both}
    assert counts == {LONG.depth} if not blur and not coupled else len(counts) > 2


@pytest.mark.slow
def test_a_token_outside_the_draft_models_vocabulary_ends_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes as a bonus that the host has not seen when the next draft starts."""
    target, some = willing_target(words=8), requests(6, 3)
    wanted, watched, draft = plain_texts(target, some), Watched(monkeypatch), _draft_model(words=4)
    draft.vocab_size = 4
    draft.model.embedding = draft.model.embedding[:4].clone()  # an id beyond it cannot be looked up
    some = [replace(one, prompt=[2 + token % 2 for token in one.prompt]) for one in some]
    wanted = plain_texts(target, some)
    assert any(token >= 4 for text in wanted for token in text)
    engine, drafter = _engine(target, draft, Forms([SHORT], 9))
    assert write(engine, some, 5)[0] == wanted
    assert watched.followed > 3
    assert _is_clean(drafter)


@pytest.mark.slow
def test_texts_stay_beside_look_ups_and_under_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is recorded by name, as graphs are, and done again."""
    target, some = willing_target(), sampled(9, 3, "coupled")
    wanted = plain_texts(target, some)
    monkeypatch.setattr(graphs, "capture", record)
    watched = Watched(monkeypatch)
    engine, drafter = _engine(target, _draft_model(), Forms([SHORT, LONG], 6), lookup=True)
    target.passes.capture = target.after.replays.capture = drafter.draft.graphs.replays.capture = True
    for depth in (SHORT.depth, LONG.depth):
        for bucket in (1, 2, 4):
            drafter.draft.menu.note_captured(bucket, Form(depth, depth, 1))
    assert write(engine, some, 5)[0] == wanted
    assert watched.followed > 8
    assert target.passes.captured_grown > 0
    assert _is_clean(drafter)
