"""The account: how much drafting may lose against plain decoding, counted in plain rounds.

- No request of 32 tokens or more is slower than 0.92x plain decoding.
- No 20 requests of one drafter in a row are together slower than 0.985x.

A draft is covered if both would still hold if nothing of it were accepted. What a round lost is counted by the time
model (times.py), not by the clock, so that a pause of the machine is not taken for a loss by drafting. Requests that
have gained do not pay for others: gains are not counted over requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from forerun.control.acceptance import WINDOW, Request

REQUEST_LOSS = 0.085  # plain rounds per token that a request may lose: 1 / 0.92 - 1, less noise
WINDOW_LOSS = 0.0135  # plain rounds per token that WINDOW requests may lose together: 1 / 0.985 - 1, the same
STAKE = 0.5  # what may be put at risk, of what is left: times the gain by the worst loss
LEAST_TOKENS = 32  # tokens of a request for which the promise holds


def covered(requests: Sequence[Request], worst: float, gain: float = inf) -> bool:
    """May all of these draft in a round that takes so many plain rounds more, if nothing is accepted?

    The less is left, the more a draft must promise (`gain`, tokens of a sequence) for what it may lose: else doubtful
    drafts, missed one after the other, would use up what is left when a long match comes.
    """
    state = requests[0].drafter
    used = sum([loss for loss, _ in state.ended])
    tokens = sum([count for _, count in state.ended]) + (WINDOW - 1 - len(state.ended)) * LEAST_TOKENS
    risk = 0.0
    for one in requests:
        length = max(one.tokens + 1, LEAST_TOKENS)
        left = REQUEST_LOSS * length - one.loss - one.reserve
        if worst > left or worst * worst > STAKE * gain * left:
            return False
        risk += max(0.0, one.loss + worst)
        tokens += length
    return used + risk <= WINDOW_LOSS * tokens
