"""Greedy texts must be the same whatever is drafted, and whoever else is served."""

from __future__ import annotations

import random
from dataclasses import replace

from forerun.referee.ask import Ask
from forerun.referee.suite import Court, Finding, check
from forerun.referee.tables import Rules

# around the sizes of cache blocks and prompt chunks
LENGTHS = (15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513)


@check("greedy.alone", "greedy texts, one request at a time")
def alone(court: Court) -> Finding:
    asks = court.greedy_asks(12, salt=1)
    failed = court.compare(asks, court.alone(asks), "alone")
    return failed or court.passed(f"{len(asks)} texts as due")


@check("greedy.on_off", "greedy texts with speculation and without", needs=("off",))
def on_off(court: Court) -> Finding:
    asks = court.greedy_asks(12, salt=2)
    for ask, on, off in zip(asks, court.alone(asks), court.alone(asks, "off"), strict=True):
        if on.text != off.text and not court.is_tie(ask, on.text, off.text):
            return court.fail("a greedy text changes with speculation", ask, on.text, off.text)
        if on.finish != off.finish and on.text == off.text:
            return court.fail("the finish reason changes with speculation", ask, on.finish, off.finish)
    return court.passed(f"{len(asks)} pairs of texts are equal")


@check("greedy.batch", "greedy texts in batches of 2, 5 and 16")
def batch(court: Court) -> Finding:
    asks = [replace(ask, max_tokens=8 + 5 * (i % 6)) for i, ask in enumerate(court.greedy_asks(23, salt=3))]
    for size, start in ((2, 0), (5, 2), (16, 7)):
        some = asks[start : start + size]
        if failed := court.compare(some, court.ask(some), f"in a batch of {size}"):
            return failed
    return court.passed(f"{len(asks)} texts as due")


@check("greedy.arrival", "greedy texts in shuffled batches, among sampled requests")
def arrival(court: Court) -> Finding:
    asks = court.greedy_asks(8, salt=4)
    others = [Ask(prompt, 5 + 3 * i, Rules()) for i, prompt in enumerate(court.prompts(8, salt=5))]
    for order in range(3):
        mixed = [*asks, *others]
        random.Random(order).shuffle(mixed)
        answers = dict(zip(map(id, mixed), court.ask(mixed), strict=True))
        if failed := court.compare(asks, [answers[id(ask)] for ask in asks], f"arrival order {order}"):
            return failed
    return court.passed(f"{3 * len(asks)} texts as due")


@check("greedy.prefix", "greedy texts of prompts that share prefixes, that come again, that go on")
def prefix(court: Court) -> Finding:
    first = court.greedy_asks(6, salt=6)
    if failed := court.compare(first, court.alone(first), "the first time"):
        return failed
    if failed := court.compare(first, court.alone(first), "the same prompt again"):
        return failed
    long = [ask.prompt * 4 for ask in first[:3]]
    family = [Ask(text[: len(text) * part // 4] + ask.prompt, 24)
              for text, ask in zip(long, first, strict=False) for part in (1, 2, 3, 4)]  # fmt: skip
    if failed := court.compare(family, court.alone(family), "a shared prefix"):
        return failed
    longer = [Ask(ask.prompt + court.reference(ask)[:12], 24) for ask in first]
    failed = court.compare(longer, court.ask(longer), "prompt and answer as a new prompt")
    return failed or court.passed(f"{2 * len(first) + len(family) + len(longer)} texts as due")


@check("greedy.lengths", "greedy texts of prompts whose lengths lie around block and chunk sizes", needs=("table",))
def lengths(court: Court) -> Finding:
    asks = [Ask(court.table.prompts(1, 77 + n, n, n)[0], 16) for n in LENGTHS]
    if failed := court.compare(asks, court.alone(asks), "alone"):
        return failed
    failed = court.compare(asks, court.ask(asks), "together")
    return failed or court.passed(f"{2 * len(asks)} texts as due, prompts of {LENGTHS[0]} to {LENGTHS[-1]} tokens")
