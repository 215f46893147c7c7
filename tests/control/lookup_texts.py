"""Texts that look-ups are simulated on: recorded ones, copied ones, and random ones."""

from __future__ import annotations

import random

from tests.control import record_texts
from tests.control.simulate.history import Text

RECORDED: list[Text] = [*record_texts.read()]
COPYING: list[Text] = [([*prompt, *answer], answer) for prompt, answer in record_texts.read()]


def random_texts(alphabet: int) -> list[Text]:
    """Nothing in them follows from anything; with few letters there are matches all the same, and most are wrong."""
    rng = random.Random(alphabet)
    draw = lambda count: [rng.randrange(alphabet) for _ in range(count)]  # noqa: E731
    return [(draw(200), draw(96)) for _ in range(16)]


TEXTS = {"recorded": RECORDED, "no matches": random_texts(60000), "wrong matches": random_texts(40)}
