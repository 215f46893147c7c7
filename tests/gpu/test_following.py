"""Rounds that start before the last one was read: same texts, same trees, whoever joins, ends or fails meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Form, Request, Round, Seq, TokenLogprob, TreeBatch
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device import drafter as device_drafter
from forerun.drafters.device.eagle import HeadDraft
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.engine import engine as engine_module
from forerun.engine.engine import Engine
from forerun.engine.round import LaunchedRound
from forerun.engine.scheduler import PrefillRows, Scheduler
from forerun.engine.sequence import SequenceState
from forerun.models.base import ON_CPU
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.cuda.target import CudaDecoder
from forerun.verify.decide import VerifierPool
from tests.gpu.heads import both_drafters
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda


class Forms:
    """A controller whose form changes now and then, and whose plans stand for a few rounds."""

    def __init__(self, forms: Sequence[Form | None], repeats: int, seed: int = 0) -> None:
        self.forms, self.repeats, self.rng = forms, repeats, random.Random(seed)

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        form = self.rng.choice(self.forms)
        budget = Budget(0, 0) if form is None else Budget(*form.sizes, repeats=self.rng.randint(0, self.repeats))
        return [budget] * len(seqs)

    def observe(self, outcome: Round) -> None:
        pass

    def forget(self, seq: Seq) -> None:
        pass


class Watched:
    """Counts the rounds that were launched behind an unread one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.followed = self.asked = 0
        real = Engine._next_round

        def next_round(engine: Engine, last: LaunchedRound) -> LaunchedRound | None:
            self.asked += 1
            found = real(engine, last)
            self.followed += found is not None
            return found

        monkeypatch.setattr(Engine, "_next_round", next_round)


def make(
    target: CudaDecoder, forms: Forms, *, follows: bool, batch: int = 4, lookup: bool = False, layers: int = 1
) -> Engine:
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    config = EngineConfig(max_batch=batch)
    engine = make_engine(target, frozenset({1}), speculative, config)
    drafter = both_drafters(target, borrows=True, depth=layers)[0]
    engine.drafters.add("device", HybridDrafter(NgramDrafter(), drafter) if lookup else drafter)
    engine.controller, engine.prefill_rows = forms, PrefillRows(ON_CPU.prefill, target.pass_rows, 16)
    engine.timeline.depth = 2 * follows
    return engine


def requests(count: int, draw: int, drafter: str = "device", **params: object) -> list[Request]:
    rng = random.Random(draw)
    made = []
    for _ in range(count):
        prompt = [rng.randrange(2, VOCAB) for _ in range(rng.choice((1, 3, 20, 70)))]
        made.append(Request(prompt, SamplingParams(max_tokens=rng.randint(1, 40), **params), drafter=drafter))
    return made


def write(
    engine: Engine, some: Sequence[Request], seed: int, at_once: bool = False
) -> tuple[list[list[int]], list[list[int]]]:
    """Texts, and the accepted nodes of each round; requests come at any time, or all of them at first."""
    rng, waiting = random.Random(seed), list(some)
    texts, accepted = dict[int, list[int]](), dict[int, list[int]]()
    while waiting or engine.busy:
        for _ in range(len(waiting) if at_once else rng.choice((0, 0, 1, 2)) if engine.busy else 1):
            if waiting:
                number = engine.submit(waiting.pop(0))
                texts[number], accepted[number] = [], []
        for event in engine.step():
            assert event.error is None
            texts[event.seq_id] += event.tokens
            accepted[event.seq_id].append(event.accepted)
    assert engine.timeline.is_idle
    assert engine.target.used_slots == 0
    return [texts[key] for key in sorted(texts)], [accepted[key] for key in sorted(accepted)]


def plain_texts(target: CudaDecoder, some: Sequence[Request]) -> list[list[int]]:
    return write(make(target, Forms([None], 0), follows=False), some, 0)[0]


def willing_target(device: str = "cpu", words: int = 8, **more: Any) -> CudaDecoder:
    """A target that says few different tokens, so that much of what is drafted is accepted; 1 ends a text."""
    target = make_target("llama", device, **more)
    target.model.head[words:] = 0.0
    return target


def dtype_on(device: str) -> torch.dtype:
    """One that has kernels and graphs on a GPU."""
    return torch.float32 if device == "cpu" else torch.bfloat16


CHAIN, TREE, WIDE = Form(3, 3, 1), Form(8, 3, 3), Form(20, 4, 6)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("forms", [[CHAIN], [WIDE], [CHAIN, TREE, WIDE, None]])
def test_texts_are_those_of_plain_decoding(
    device: str, forms: list[Form | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    need_cuda(device)
    target, some = willing_target(device, dtype=dtype_on(device)), requests(9, 3)
    wanted, watched = plain_texts(target, some), Watched(monkeypatch)
    assert write(make(target, Forms(forms, 6), follows=True), some, 5)[0] == wanted
    assert 10 < watched.followed < watched.asked


@pytest.mark.slow
@pytest.mark.parametrize(("form", "layers"), [(CHAIN, 1), (WIDE, 1), (CHAIN, 2), (WIDE, 2)])
def test_drafts_are_those_of_rounds_that_were_read(form: Form, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, positions and slots of a head follow from what the device has decided: else less would be accepted."""
    monkeypatch.setattr(Scheduler, "starters", lambda *_: [])  # else who has a plain round depends on company
    target, some = willing_target(words=5), [one for one in requests(9, 4) if len(one.prompt) > 1]
    target.model.head[1] = 0.0  # texts go on
    watched = Watched(monkeypatch)
    engines = [make(target, Forms([form], 9), follows=follows, layers=layers) for follows in (False, True)]
    found = [write(engine, some, 6) for engine in engines]
    assert found[0][0] == found[1][0]
    apart = [[one[:-1] for one in accepted] for _, accepted in found]  # a draft is cut at the end of its text
    assert apart[0] == apart[1]
    assert watched.followed > 20
    assert sum(map(sum, found[0][1])) > 20, "something is accepted"


@pytest.mark.slow
@pytest.mark.parametrize("form", [CHAIN, WIDE])
def test_trees_of_another_draft_than_the_last_are_followed(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft was made for more than have stayed, or first for some and then for those who joined."""
    parts, behind = list[int](), Counter[tuple[bool, bool]]()
    rearrange, follow = HeadDraft._rearrange, HeadDraft._follow

    def rearranged(draft: HeadDraft, known: Any, seqs: Sequence[Any], form: Form) -> frozenset[int]:
        parts.append(sum((seq.id, seq.tokens[-1]) not in known for seq in seqs))
        return rearrange(draft, known, seqs, form)

    def followed(draft: HeadDraft, *given: Any) -> TreeBatch | None:
        found = follow(draft, *given)
        if parts:
            behind[parts[-1] > 0, found is not None] += 1
        parts.clear()
        return found

    monkeypatch.setattr(HeadDraft, "_rearrange", rearranged)
    monkeypatch.setattr(HeadDraft, "_follow", followed)
    monkeypatch.setattr(device_drafter, "_goes_on", lambda *_: True)  # also for sequences that end now
    monkeypatch.setattr(Scheduler, "starters", lambda *_: [])  # else who has a plain round depends on company
    target, some = willing_target(words=5), [one for one in requests(30, 4) if len(one.prompt) > 1]
    target.model.head[1] = 0.0  # texts go on
    found = []
    for follows in (False, True):
        engine = make(target, Forms([form], 2, seed=2), follows=follows, batch=8)
        engine.scheduler.reads_early = True  # prompts, before there are places: the others' draft has no such trees
        found.append(write(engine, some, 6, at_once=True))
    assert found[0][0] == found[1][0] == plain_texts(target, some)
    apart = [[one[:-1] for one in accepted] for _, accepted in found]
    assert apart[0] == apart[1]
    assert behind[True, True]
    assert behind[False, True]
    assert behind.total() == behind[True, True] + behind[False, True]


@pytest.mark.slow
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_composition_follows_too_in_a_batch(heat: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target, some = willing_target(), requests(10, 4, temperature=heat, seed=3)
    wanted, watched = plain_texts(target, some), Watched(monkeypatch)
    assert write(make(target, Forms([WIDE, CHAIN], 5), follows=True, lookup=True), some, 5)[0] == wanted
    assert watched.followed > 10


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "more", [{"temperature": 1.0, "seed": 3, "presence_penalty": 0.5}, {"min_tokens": 1}, {"logit_bias": {5: 1.0}}]
)
def test_what_the_device_does_not_decide_is_read_first(
    more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, some = willing_target(), requests(5, 4, **more)
    wanted, watched = plain_texts(target, some), Watched(monkeypatch)
    assert write(make(target, Forms([CHAIN], 9), follows=True), some, 5)[0] == wanted
    assert watched.asked > 0
    assert watched.followed == 0


LAWS = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {}, {"temperature": 1.2, "top_k": 5, "min_p": 0.02}]


def sampled(count: int, draw: int, verifier: str) -> list[Request]:
    """Seeded requests of several laws, greedy ones among them."""
    made = []
    for i, one in enumerate(requests(count, draw)):
        more = LAWS[i % len(LAWS)]
        params = replace(one.params, seed=40 + i if more else None, **more)
        made.append(replace(one, params=params, verifier=verifier))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("verifier", "forms"), [("coupled", [WIDE]), *((name, [CHAIN, TREE, WIDE, None]) for name in ("coupled", "exact"))]
)
def test_sampled_texts_are_those_of_the_host(
    device: str, verifier: str, forms: list[Form | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a seed, in any company: plain and alone by the host's verifiers, then drafted, decided, followed here."""
    need_cuda(device)
    dtype, some = dtype_on(device), sampled(9, 3, verifier)
    by_host = willing_target(device, samples=False, dtype=dtype)
    wanted = write(make(by_host, Forms([None], 0), follows=False, batch=1), some, 0)[0]
    watched, target = Watched(monkeypatch), willing_target(device, dtype=dtype)
    texts, accepted = write(make(target, Forms(forms, 6), follows=True), some, 5)
    assert texts == wanted
    assert 15 < watched.followed < watched.asked
    assert sum(map(sum, accepted)) > (20 if verifier == "coupled" else 2), "something is accepted"
    other = [replace(one, params=replace(one.params, seed=7)) for one in some[:2]]
    assert write(make(target, Forms(forms, 6), follows=True), other, 5)[0] != wanted[:2]


@pytest.mark.slow
@pytest.mark.parametrize("form", [CHAIN, WIDE])
def test_sampled_drafts_are_those_of_rounds_that_were_read(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of positions that the host does not know yet: else less would be accepted."""
    monkeypatch.setattr(Scheduler, "starters", lambda *_: [])  # else who has a plain round depends on company
    target = willing_target(words=5)
    some = [one for one in sampled(9, 4, "coupled") if len(one.prompt) > 1]
    target.model.head[1] = 0.0  # texts go on
    found = [write(make(target, Forms([form], 9), follows=follows), some, 6) for follows in (False, True)]
    assert found[0][0] == found[1][0]
    apart = [[one[:-1] for one in accepted] for _, accepted in found]
    assert apart[0] == apart[1]


@pytest.mark.slow
def test_whoever_the_host_decides_about_ends_it_for_sampled_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    target = willing_target()
    typical = [replace(one, verifier="typical") for one in requests(1, 5, temperature=0.5, seed=1)]
    penalised = requests(1, 6, temperature=0.9, seed=1, presence_penalty=0.5)
    some = [*sampled(4, 4, "coupled"), *penalised, *typical, *sampled(4, 6, "coupled")]
    ours = [i for i in range(10) if i != 5]
    wanted, watched = plain_texts(target, some), Watched(monkeypatch)
    texts = write(make(target, Forms([TREE], 9), follows=True), some, 5)[0]
    assert [texts[i] for i in ours] == [wanted[i] for i in ours]
    assert 0 < watched.followed < watched.asked


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("place", ["draft", "score", "verdict", "observe"])
def test_a_failure_leaves_sampled_texts_as_they_are(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, some = willing_target(), sampled(5, 8, "coupled")
    wanted = plain_texts(target, some)
    for count in (2, 7):
        engine, left = make(target, Forms([TREE], 9), follows=True), [count]
        target._takes_grown = True
        owner, name = {
            "draft": (engine.drafters.get("device").draft, "_draft_for"), "score": (target.sampler, "_decide_grown"),
            "verdict": (target.grown, "read"), "observe": (engine.drafters, "observe"),
        }[place]  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(getattr(owner, name), left, RuntimeError))
            texts = write_through(engine, some)
        assert left[0] <= 0, f"it has not failed: {left}"
        assert texts == wanted
        assert target.used_slots == 0


def test_one_request_among_greedy_ones_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    target = willing_target()
    some = [*requests(4, 4), *requests(2, 5, presence_penalty=0.1), *requests(4, 6)]
    wanted, watched = plain_texts(target, some), Watched(monkeypatch)
    assert write(make(target, Forms([TREE], 9), follows=True), some, 5)[0] == wanted
    assert 0 < watched.followed < watched.asked


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [True, False])
def test_whoever_is_about_to_end_counts_too(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last round is not the device's to decide, though the round behind it would be."""
    target, more = willing_target(), {"temperature": 1.0} if sampled else {"logprobs": 2, "presence_penalty": 0.1}
    rng, long = (
        random.Random(3),
        [one for one in requests(40, 9) if one.params.max_tokens > 20 and len(one.prompt) > 1][:5],
    )
    short = [
        Request(
            [rng.randrange(2, VOCAB) for _ in range(9)],
            SamplingParams(max_tokens=count, **more),
            drafter="device",
            verifier="exact",
        )
        for count in (1, 1, 2, 1, 1, 1)
    ]
    texts, watched = [], Watched(monkeypatch)
    for forms in (Forms([None], 0), Forms([WIDE], 9)):
        engine = make(target, forms, follows=True, batch=6)
        seqs = [engine.find(engine.submit(one)) for one in (*long, *short)]
        while engine.busy:
            engine.step()
        texts.append([(seq.tokens, _logprobs(seq)) for seq in seqs if seq is not None])
    assert texts[0][:5] == texts[1][:5]
    assert sampled or texts[0] == texts[1]
    assert watched.followed > 0


def entries_of(engine: Engine, some: Sequence[Request]) -> list[list[TokenLogprob]]:
    seqs = [engine.find(engine.submit(one)) for one in some]
    while engine.busy:
        engine.step()
    return [[one for event in seq.events for one in event.logprobs] for seq in seqs if seq is not None]


def are_alike(some: Sequence[TokenLogprob], others: Sequence[TokenLogprob], within: float = 1e-3) -> bool:
    """The same tokens, with the same log-probabilities and as likely rivals: passes of other widths may round."""
    if [one.token for one in some] != [one.token for one in others]:
        return False
    values, wanted = ([value for one in each for value in (one, *one.top)] for each in (some, others))
    pairs = [(one.logprob, other.logprob) for one, other in zip(values, wanted, strict=True)]
    return all(abs(one - other) < within for one, other in pairs)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("forms", [[CHAIN], [WIDE], [CHAIN, TREE, WIDE, None]])
@pytest.mark.parametrize("law", ["greedy", "coupled", "exact"])
def test_log_probabilities_come_with_the_round_and_none_is_read_first(
    law: str, forms: list[Form | None], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of up to 20 likeliest tokens, beside texts that want none: those of plain rounds that are read one by one."""
    need_cuda(device)
    target = willing_target(device, dtype=dtype_on(device))
    plain = requests(9, 4) if law == "greedy" else sampled(9, 4, law)
    some = [replace(one, params=replace(one.params, logprobs=(0, None, 5, 20)[i % 4])) for i, one in enumerate(plain)]
    wanted = entries_of(make(target, Forms([None], 0), follows=False, batch=1), some)
    watched = Watched(monkeypatch)
    found = entries_of(make(target, Forms(forms, 6), follows=True), some)
    within = 1e-3 if device == "cpu" else 0.1  # bfloat16
    assert all(are_alike(one, other, within) for one, other in zip(found, wanted, strict=True))
    assert [len(entries) for entries in found][1] == 0
    assert watched.followed > 10


def test_negative_control_logits_that_were_overwritten_give_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    target = willing_target()
    some = [replace(one, params=replace(one.params, logprobs=3)) for one in requests(6, 4)]
    wanted = entries_of(make(target, Forms([None], 0), follows=False, batch=1), some)
    monkeypatch.setattr(VerifierPool, "send_logprobs", lambda pool, seqs, trees, scores: scores)
    watched = Watched(monkeypatch)
    found = entries_of(make(target, Forms([CHAIN], 6), follows=True), some)
    assert all(map(are_alike, found, wanted)), "rounds whose log-probabilities were not sent are read first"
    assert watched.followed == 0
    monkeypatch.setattr(LaunchedRound, "loses_logprobs", False)
    found = entries_of(make(target, Forms([CHAIN], 6), follows=True), some)
    assert watched.followed > 0
    assert not all(map(are_alike, found, wanted))


def _logprobs(seq: SequenceState) -> list[list[tuple[int, float]]]:
    """The likeliest tokens at each place, rounded: passes of other widths may round otherwise."""
    found = [one for event in seq.events for one in event.logprobs]
    return [[(one.token, round(one.logprob, 3))] for one in found]


PLACES = ["propose", "append", "draft", "score", "prompts", "verdict", "commit", "observe", "outcome", "controller"]


def short_requests() -> list[Request]:
    """For faults that come in one of the first rounds: what is written long after them says nothing more."""
    return [
        replace(one, params=replace(one.params, max_tokens=min(one.params.max_tokens, 16))) for one in requests(5, 8)
    ]


@cache
def short_texts() -> list[list[int]]:
    return plain_texts(willing_target(), short_requests())


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_a_failure_anywhere_leaves_texts_as_they_are(
    place: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round that was not read, the one that follows it, or both are computed again."""
    target, wanted = willing_target(), short_texts()
    for count in (1, 2) if place in ("propose", "prompts") else (2, 7):
        engine, left = make(target, Forms([TREE], 9), follows=True), [count]
        target._takes_grown = True  # until a pass over grown trees fails
        drafter = engine.drafters.get("device")
        owner, name = {
            "propose": (engine.drafters, "propose"), "append": (drafter.draft.rows, "append_decided"),
            "draft": (drafter.draft, "_draft_for"), "score": (target, "_score_grown"),
            "prompts": (engine, "_observe_prompts"), "verdict": (target.grown, "read"), "commit": (target, "commit"),
            "observe": (engine.drafters, "observe"), "outcome": (engine_module, "outcome_of"),
            "controller": (engine.controller, "observe"),
        }[place]  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(getattr(owner, name), left, kind))
            texts = write_through(engine, short_requests())
        assert left[0] <= 0, f"it has not failed: {left}"
        assert texts == wanted
        assert target.used_slots == 0


def failing(real: Callable[..., object], left: list[int], kind: type[BaseException]) -> Callable[..., object]:
    """The same, but for one call."""

    def call(*args: object, **more: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            raise kind("in a test")
        return real(*args, **more)

    return call


def write_through(engine: Engine, some: Sequence[Request]) -> list[list[int]]:
    """All at once; an interrupt is raised, and the next call goes on."""
    seqs = [engine.find(engine.submit(one)) for one in some]
    while engine.busy:
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    return [seq.tokens[seq.prompt_length :] for seq in seqs if seq is not None]


@pytest.mark.slow
def test_whoever_is_aborted_leaves_a_round_that_follows() -> None:
    target, some = willing_target(), requests(6, 8)
    wanted = plain_texts(target, some)
    for steps in range(1, 14, 3):
        engine = make(target, Forms([TREE], 9), follows=True)
        seqs = [engine.find(engine.submit(one)) for one in some]
        for _ in range(steps):
            engine.step()
        engine.abort(2)
        while engine.busy:
            engine.step()
        texts = [seq.tokens[seq.prompt_length :] for seq in seqs if seq is not None]
        assert [text for i, text in enumerate(texts) if i != 2] == [text for i, text in enumerate(wanted) if i != 2]
        assert texts[2] == wanted[2][: len(texts[2])]
        assert target.used_slots == 0


@pytest.mark.slow
def test_a_store_that_is_full_is_no_reason_to_write_over_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pages are short, sequences are sent back and read again; no round follows into pages that are not there."""
    some = requests(9, 11)
    wanted = plain_texts(willing_target(), some)
    target, watched = willing_target(kv_slots=64 * 9), Watched(monkeypatch)
    engine = make(target, Forms([WIDE], 9), follows=True, batch=6)
    assert write(engine, some, 5)[0] == wanted
    assert watched.followed > 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [600, MAX_ROWS - 9, MAX_ROWS + 300])
def test_prompts_that_do_not_fit_beside_trees_wait_for_the_next_pass(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass has so many rows; trees behind an unread round can be in no other, so prompts take what is left."""
    target, rng = willing_target(kv_slots=40_000), random.Random(2)
    target.model.head[1] = 0.0  # texts go on

    def request(length: int, tokens: int) -> Request:
        prompt = [rng.randrange(2, VOCAB) for _ in range(length)]
        return Request(prompt, SamplingParams(max_tokens=tokens), drafter="device", cache_salt=None)

    some, late = [request(9, 40) for _ in range(3)], request(size, 6)

    def texts(engine: Engine) -> list[list[int]]:
        engine.prefill_rows = PrefillRows(ON_CPU.prefill, target.pass_rows, MAX_ROWS)
        found = {engine.submit(one): list[int]() for one in some}
        for _ in range(4):
            for event in engine.step():
                found[event.seq_id] += event.tokens
        found[engine.submit(late)] = []
        while engine.busy:
            for event in engine.step():
                assert event.error is None
                found[event.seq_id] += event.tokens
        return [*found.values()]

    wanted = texts(make(target, Forms([None], 0), follows=False))
    watched = Watched(monkeypatch)
    assert texts(make(target, Forms([CHAIN], 9), follows=True)) == wanted
    assert watched.followed > 5


@pytest.mark.slow
def test_trees_too_large_to_lie_behind_each_other_are_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And others follow afterwards: such a tree, which any request may ask for, is no failure."""
    target, rng = willing_target(), random.Random(4)
    target.model.head[1] = 0.0  # texts go on
    prompts = [[rng.randrange(2, VOCAB) for _ in range(9)] for _ in range(2)]
    params, watched = SamplingParams(max_tokens=12), Watched(monkeypatch)
    large, small = (
        [Request(one, params, drafter="device", budget=budget) for one in prompts]
        for budget in (Budget(254, 4, 10), Budget(8, 3, 3))
    )
    wanted = plain_texts(target, small)
    engine = make(target, Forms([TREE], 9), follows=True, batch=2)
    assert write_through(engine, large) == wanted
    assert engine.timeline.depth > 1
    before = watched.followed
    assert write_through(engine, small) == wanted
    assert watched.followed > before + 3
