"""Evidence that a test knows: costs without noise, so that intervals are over prompts alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.measure.advise.evidence import Evidence, priced


def complete(found: Evidence) -> Evidence:
    """The same with what look-ups did, as they are replayed, and without each prompt."""
    ran = {name: priced(found, name, 1)(found, None) for name in found.free if name not in found.draftings}
    whole = replace(found, draftings={**ran, **found.draftings})
    if len(whole.texts) < 2:
        return whole
    without = [
        replace(
            whole,
            texts=[*whole.texts[:i], *whole.texts[i + 1 :]],
            draftings={name: drafting.without(i) for name, drafting in whole.draftings.items()},
        )
        for i in range(len(whole.texts))
    ]
    return replace(whole, left_out=tuple(without))


def changed(found: Evidence, **fields: Any) -> Evidence:
    """Other evidence: look-ups are replayed anew, and other drafters are those that are given."""
    return complete(replace(found, **{"draftings": {}, "left_out": (), **fields}))
