"""May a call of the target run passes of later rounds too? Only for one greedy sequence that is alone.

Then nothing is decided between plain rounds, unless somebody drafts: a look-up where the last tokens came before
(`Needs.match_length`), or a head whenever the controller lets it run (`Budget.repeats` says for how long it does not).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from forerun.engine.sequence import SequenceState
from forerun.types import Needs

LONG = 16  # rounds of rest: more are not told apart


def alone(needs: Needs, seq: SequenceState, rests: int) -> Needs:
    """What a drafter needs of a text that is alone in its round; its head does not run for so many further ones."""
    # is its next token always where the logits are largest, whatever the text says by then?
    is_settled = seq.traits.is_plain_greedy and not seq.params.stop
    if not is_settled or (needs.may_run and not rests):
        return _asked_each_round(needs)
    return _while_it_rests(needs, min(rests, LONG)) if needs.may_run else needs


@lru_cache(maxsize=64)
def _asked_each_round(needs: Needs) -> Needs:
    """The same, and no pass is run ahead."""
    return replace(needs, match_length=None, may_run=False)


@lru_cache(maxsize=256)
def _while_it_rests(needs: Needs, rounds: int) -> Needs:
    """The same of a head that does not run for so many further rounds."""
    return replace(needs, may_run=False, rests=rounds)
