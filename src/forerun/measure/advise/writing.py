"""Write prompts plainly and with every drafter, in turn, for `forerun advise`: one prompt after the other.

Machines drift, so what is compared runs next to each other in time. On a CPU a text of a real model takes seconds and
there are many drafters: those that are only replayed write the first few prompts, which shows what their passes cost,
and those that would lose clearly on these at any length write no more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from forerun.measure.bench.alternate import Contender, Group, Run, alternate, warm_up

FEW = 3  # prompts that every drafter writes
progress = logging.getLogger("forerun.progress")  # what the command line shows

Runs = dict[str, list[Run]]  # by contender


def write_in_turn(
    plain: Contender,
    contenders: Sequence[Contender],
    groups: Sequence[Group],
    max_tokens: int,
    goes_on: Callable[[str, Runs], bool],
) -> Runs:
    """The runs of each; after a few prompts, only those go on of whom `goes_on` says so."""
    for number, one in enumerate((plain, *contenders), start=1):
        progress.info("warming up %s, %d of %d", one.name, number, len(contenders) + 1)
        warm_up([one], groups[0], min(8, max_tokens))
    going, runs = list(contenders), Runs({one.name: [] for one in (plain, *contenders)})
    for index, group in enumerate(groups):
        if index == FEW:
            going = [one for one in going if goes_on(one.name, runs)]
        for run in _rotated((plain, *going), index, group, max_tokens):
            runs[run.contender].append(run)
            progress.info("prompt %d of %d, written with %s", index + 1, len(groups), run.contender)
    return runs


def _rotated(contenders: Sequence[Contender], by: int, group: Group, max_tokens: int) -> Iterable[Run]:
    first = by % len(contenders)
    return alternate((*contenders[first:], *contenders[:first]), [group], max_tokens, 1)
