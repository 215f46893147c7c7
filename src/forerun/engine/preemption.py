"""Who goes on when the KV cache is full: the youngest sequences give their slots to the others.

A sequence that was sent back keeps its tokens and its events, and continues with the same text: the engine reads it
again like a prompt, of which the prefix cache may still have the start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from forerun.engine.sequence import Advance, SequenceState
from forerun.errors import InvalidInput
from forerun.models.base import Target
from forerun.types import Budget

log = logging.getLogger(__name__)

NO_ROOM = "does not fit the KV cache; raise kv_slots or kv_memory, or lower max_tokens"


def no_room_for(seq: SequenceState) -> Advance:
    """What ends a sequence that cannot be read, whoever else leaves."""
    return seq.ended("error", InvalidInput(f"a request of {seq.max_length} tokens {NO_ROOM}"))


def find_room(
    target: Target,
    seqs: Sequence[SequenceState],
    budgets: Sequence[Budget],
    readers: Sequence[SequenceState],
    send_back: Callable[[SequenceState], None],
) -> tuple[list[SequenceState], list[Budget]]:
    """Room for a round of as many as fit, the oldest first, with what those whose prompts are being read give back.

    One that is alone does without a draft if it must.
    """
    left, others = dict(zip(seqs, budgets, strict=True)), list(readers)
    while not target.make_room(list(left), [1 + budget.nodes for budget in left.values()]):
        if others or len(left) > 1:
            youngest = max(others or left, key=lambda seq: seq.id)
            others = [seq for seq in others if seq is not youngest]
            left.pop(youngest, None)
            send_back(youngest)
            log.info("the KV cache is full: sequence %d waits, and is read again", youngest.id)
        elif any(budget.nodes for budget in left.values()):
            left = {seq: replace(budget, nodes=0, depth=0) for seq, budget in left.items()}
        else:
            raise InvalidInput(f"a sequence {NO_ROOM}")
    return list(left), list(left.values())
