"""Channel and wire: messages between two processes arrive whole and in order, and mean there what they meant here."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from forerun.api.completion import Ended
from forerun.core import errors
from forerun.core.errors import ForerunError, InvalidInput
from forerun.core.params import SamplingParams
from forerun.core.request import Branch, Budget, Event, Request, TokenLogprob
from forerun.engine.stats import RoundCounts
from forerun.models.load.checkpoint import open_checkpoint
from forerun.server.backends.base import EngineError, EngineHangs
from forerun.server.backends.wire import (
    Channel,
    pack_ended,
    pack_error,
    pack_event,
    pack_request,
    takes_preparing,
    unpack_ended,
    unpack_error,
    unpack_event,
    unpack_request,
)

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    ends = Channel(one), Channel(other)
    yield ends
    for end in ends:
        end.close()
        end.release()


def test_messages_arrive_whole_and_in_order_however_they_are_cut(pair: Pair) -> None:
    one, other = socket.socketpair()
    with one:
        sent = [("texts", [(1, [((5, 6), 1, "Zoë 👩‍👩‍👧", None)], None)]), {"a": 1.5}, [], "x" * 70_000]
        real = Channel(socket.socket(fileno=other.detach()))
        for message in sent:
            pair[0].send(message)
        raw = bytearray()
        while len(raw) < 70_000:
            raw += pair[1]._receive()
        found, taken = [], 0
        for size in [1, 2, 3, 5, 7, 40, 60_000, len(raw)]:  # by the byte, and several at once
            if part := bytes(raw[taken : taken + size]):
                one.sendall(part)
                taken += len(part)
                found += real.receive_ready() or []
        while len(found) < len(sent):
            found += real.receive_ready() or []
        assert found == sent
        real.release()


def test_a_slow_reader_holds_up_no_sender(pair: Pair) -> None:
    """Far more than the system takes: `send` returns at once, and nothing is lost or mixed up."""
    sent = [[i, "y" * 30_000] for i in range(300)]

    def send_all() -> None:
        for message in sent:
            pair[0].send(message)

    sender = threading.Thread(target=send_all)
    sender.start()
    sender.join(20)
    assert not sender.is_alive(), "nobody reads, and it has sent all"
    pair[1]._socket.settimeout(10)  # what was lost does not come
    assert [message for _, message in zip(sent, pair[1].receive(), strict=False)] == sent


def test_nothing_overtakes_what_waits_to_be_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a message is on its way when there is room again: another one must not get in between."""
    monkeypatch.setattr(pair[0], "_have_sent_later", lambda: None)
    pair[0].send("x" * 8_000_000)
    taken = 0
    with suppress(BlockingIOError):
        while part := pair[1]._receive(socket.MSG_DONTWAIT):
            taken += len(part)
    assert 0 < taken < 8_000_000
    pair[0].send("small")
    with pytest.raises(BlockingIOError):
        pair[1]._receive(socket.MSG_DONTWAIT)


def test_who_stops_early_does_not_get_a_message_twice(pair: Pair) -> None:
    for number in range(3):
        pair[0].send(number)
    assert next(pair[1].receive()) == 0
    assert next(pair[1].receive()) == 1


def test_an_end_that_is_closed(pair: Pair) -> None:
    pair[0].send("last")
    pair[0].close()
    assert list(pair[1].receive()) == ["last"]
    assert pair[1].receive_ready() is None
    pair[1].send("nobody reads it")


def test_numbers_of_other_libraries_become_ours(pair: Pair) -> None:
    two, half = np.int64(2), np.float32(0.5)
    entry = TokenLogprob(two, half, (TokenLogprob(two, half),))  # type: ignore[arg-type]
    event = Event(1, (two,), two, "x", (entry,), None, None, (Branch(two, (two,)),))  # type: ignore[arg-type]
    pair[0].send(pack_event(event))
    assert unpack_event(1, next(pair[1].receive())) == event
    rounds = [RoundCounts(two, two, two, two, 0.5)]  # type: ignore[arg-type]
    ended = Ended("x", [two], "stop", 1, rounds, 0.0, "", "", True, None, [entry], 0.0, 0)  # type: ignore[list-item]
    pair[0].send(pack_ended(ended))
    assert unpack_ended(next(pair[1].receive()), [entry]) == ended.completion()


REQUESTS = [
    Request((1, 2, 3)),
    Request((4,), SamplingParams(max_tokens=9, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=2**63 - 1)),
    Request((4,), SamplingParams(logit_bias={7: -math.inf, 8: 1.5}, bad_words=[[1, 2], [3]], stop=["a", "\n"])),
    Request((4,), SamplingParams(min_tokens=3, stop_token_ids=[5], ignore_eos=True, logprobs=4)),
    Request((4,), SamplingParams(repetition_penalty=1.2, presence_penalty=-1, frequency_penalty=0.3)),
    Request((9, 9), drafter="ngram", verifier="coupled", shows_rejected=True, cache_salt=None),
    Request((9,), budget=Budget(8, 4, 2, price=(0.1, 0.2), level=0.5, source="free", repeats=3), cache_salt="k"),
    Request((9,), prediction=(1, 2), adapter="a", pooling="mean", priority=-(2**40)),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_requests_cross(request_: Request, pair: Pair) -> None:
    pair[0].send(pack_request(request_))
    assert unpack_request(next(pair[1].receive())) == request_


def test_schemas_cross_in_their_order_and_processors_do_not(pair: Pair) -> None:
    schema = {"properties": {"b": {"minimum": 2**70}, "a": {"enum": ["\u00e9", None, 1.5]}}, "required": ["b"]}
    params = SamplingParams.from_dict({"json_schema": schema, "structured_outputs": {"disable_any_whitespace": False}})
    packed = pack_request(Request((1,), params))
    assert takes_preparing(packed)
    pair[0].send(packed)
    made = unpack_request(next(pair[1].receive())).params.structure
    assert made == params.structure
    assert made is not None
    assert (json.loads(made.text), made.whitespace) == (schema, "any")
    assert made.text.index('"b"') < made.text.index('"a"')
    assert not takes_preparing(pack_request(REQUESTS[1]))
    assert takes_preparing(pack_request(replace(REQUESTS[1], adapter="one")))
    with pytest.raises(InvalidInput, match="cannot leave this process"):
        pack_request(Request((1,), SamplingParams(processors=[lambda prefix, logits: logits])))


def test_events_and_endings_cross(pair: Pair) -> None:
    entries = (TokenLogprob(5, -0.25, (TokenLogprob(5, -0.25), TokenLogprob(6, -2.0))), TokenLogprob(7, -math.inf))
    for event in (
        Event(3, (5, 7), 1, "ab"),
        Event(3, (), 0, "", (), "length"),
        Event(3, (5, 7), 1, "ab", entries, None, None, (Branch(1, (8, 9)),)),
    ):
        pair[0].send(pack_event(event))
        assert unpack_event(3, next(pair[1].receive())) == event
    rounds = [RoundCounts(2, 4, 3, 1, 0.5), RoundCounts(1, 0, 0, 0, 0.25)]
    ended = Ended("ab", [5, 7], "stop", 12, rounds, 0.1, "ngram", "exact", True, None, [*entries], 0.2, 4)
    pair[0].send(pack_ended(ended))
    found = unpack_ended(next(pair[1].receive()), entries)  # which came with events
    assert found == ended.completion()
    assert (found.rounds, found.drafted, found.kept, found.seconds) == (2, 4, [1, 0, 0], pytest.approx(0.85))


def test_errors_cross_as_what_they_are() -> None:
    ours = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ForerunError)]
    assert len(ours) > 10
    for kind in ours:
        found = unpack_error(pack_error(kind("why")))
        assert (type(found), str(found)) == (kind, "why")
    assert type(unpack_error(pack_error(EngineHangs()))) is ForerunError, "the nearest one that all know"
    assert type(unpack_error(pack_error(TypeError("no such option")))) is InvalidInput
    other = unpack_error(pack_error(RuntimeError("CUDA")))
    assert isinstance(other, EngineError)
    assert (other.kind, str(other)) == ("RuntimeError", "CUDA")
    fake = unpack_error(("brief", "a name that is no error", True))
    assert isinstance(fake, EngineError)


def test_a_tokenizer_in_parts_is_the_same() -> None:
    one = open_checkpoint("smollm2").tokenizer()
    other = one.parts().tokenizer()
    chat = [{"role": "user", "content": "Grüße 👩‍👩‍👧\n"}]
    assert other.chat_ids(chat) == one.chat_ids(chat)
    assert (other.eos_ids, other.bos_id, other.vocab_size) == (one.eos_ids, one.bos_id, one.vocab_size)
    assert other.decode(one.chat_ids(chat)) == one.decode(one.chat_ids(chat))
