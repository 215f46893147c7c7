"""The answer of `forerun advise`: a JSON document with the evidence, and the same in sentences.

It says which drafter, from which load on to stop, whether training a head would pay, what to type, here and in vLLM,
and whether the default (`auto`) would do the same. "Do not draft" is an answer like any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from forerun.advise.commands import Setup, forerun_command, vllm_config
from forerun.advise.evidence import BATCHES, WORTH_IT, Evidence, Prospect, accepted, prospects, spread
from forerun.advise.head import head_in_words, head_prospect
from forerun.build import needs_head
from forerun.measure.bench.figures import acceptance_document
from forerun.measure.bench.stats import Spread
from forerun.measure.report.summary import busy_warning
from forerun.models.base import Target

HARMLESS = 0.97  # the least speed-up that other prompts of the kind may have
LEAVE_OUT = "Leave --speculative-config out."
STOP = 1.02  # a drafter that gains less at some batch size need not draft there


def document(evidence: Evidence, setup: Setup, target: Target) -> dict[str, Any]:
    """Everything that is known and what follows from it, as plain JSON values."""
    by_batch = {batch: prospects(evidence, batch) for batch in BATCHES}
    best = by_batch[1][0] if by_batch[1] else None
    pays = best is not None and pays_off(best)
    name = best.drafter if best is not None and pays else "none"
    budget = best.budget if best is not None and pays else 0
    config, note = _for_vllm(evidence, setup, name, by_batch[1]) if pays else (None, LEAVE_OUT)
    return {
        "model": setup.model,
        "recommended": {"drafter": name, "budget": budget},
        "pays": pays,
        "off_from_batch": _off_from(by_batch, name) if pays else 1,
        "auto": compare_with_auto(setup, name, by_batch[1]),
        "by_batch": {str(batch): _by_drafter(found) for batch, found in by_batch.items()},
        **_acceptance(evidence),
        "head": head_prospect(evidence, best, target),
        "t": {str(size): round(seconds, 6) for size, seconds in evidence.costs.target.seconds.items()},
        "plain_tokens_per_second": round(1.0 / evidence.costs.plain_round(1), 3),
        "texts": len(evidence.texts),
        "tokens": sum(len(text.tokens) for text in evidence.texts),
        "forerun": forerun_command(setup, name, budget),
        "vllm": config,
        "vllm_note": note,
    }


def _for_vllm(
    evidence: Evidence, setup: Setup, name: str, found: list[Prospect]
) -> tuple[dict[str, Any] | None, str]:
    """The recommendation in vLLM; where it has no such drafter, the next best that it has, if that pays."""
    config, note = vllm_config(evidence, setup, name)
    if config is not None:
        return config, note
    for other in found:
        if pays_off(other) and (nearest := vllm_config(evidence, setup, other.drafter))[0] is not None:
            said = (
                f"{note} The next best that it has is {other.drafter}, {_times(spread(other.speedup))} here."
            )
            return nearest[0], f"{said} {nearest[1]}".rstrip()
    return None, note


def pays_off(best: Prospect) -> bool:
    """Is a drafter worth setting: a gain that is large enough, and hardly any loss on other prompts?

    Gains that differ much make a wide interval although no prompt loses, so it is also worth it if no prompt loses.
    """
    low = best.speedup.low
    harmless = best.worst >= HARMLESS or (low is not None and low >= HARMLESS)
    return best.speedup.value >= WORTH_IT and harmless


def compare_with_auto(setup: Setup, name: str, found: list[Prospect]) -> dict[str, Any]:
    """Would a user who sets nothing get what is recommended? If not, why."""
    known = next((prospect for prospect in found if prospect.drafter == setup.auto), None)
    here = None if known is None else spread(known.speedup)
    agrees = name == setup.auto
    return {"drafter": setup.auto, "agrees": agrees, "speedup": here, "why": _why(setup, name, known)}


def _why(setup: Setup, name: str, known: Prospect | None) -> str:
    if name == setup.auto:
        return f"The default (auto) drafts with {name} too: nothing needs to be set."
    predicted = "" if known is None else f", predicted at {_times(spread(known.speedup))}"
    default = f"The default (auto) would draft with {setup.auto}{predicted}"
    if name == "none":
        return (
            f"{default}. Its controller drafts only what should pay, so leaving it on costs almost nothing; "
            "none is recommended because no gain of 5% is predicted."
        )
    if known is None:
        return f"{default}, which was not measured here; name it in --drafters too to compare."
    if setup.device == "cpu" and (needs_head(name) or needs_head(setup.auto)):
        return (
            f"{default}: on a CPU it goes by what passes and the head's levels cost and by the acceptance that the "
            f"head's file names. On these prompts {name} is predicted to be faster."
        )
    by = "which checkpoints are there, and without a head by what a plain pass takes,"
    return f"{default}: it chooses by {by} not by prompts. On these prompts {name} is predicted to be faster."


def _off_from(by_batch: Mapping[int, list[Prospect]], name: str) -> int | None:
    """The first batch size at which the drafter no longer gains; None where it always does."""
    for batch, found in by_batch.items():
        here = next((prospect for prospect in found if prospect.drafter == name), None)
        if here is None or here.speedup.value < STOP:
            return batch
    return None


def _by_drafter(found: list[Prospect]) -> dict[str, Any]:
    return {
        prospect.drafter: {
            "speedup": spread(prospect.speedup),
            "budget": prospect.budget,
            "tokens_per_round": round(prospect.tokens_per_round, 3),
            "worst_prompt": round(prospect.worst, 4),
        }
        for prospect in found
    }


def _acceptance(evidence: Evidence) -> dict[str, dict[str, Any]]:
    """Acceptance by position of every drafter, and the counts."""
    rows = {
        name: acceptance_document(accepted(evidence, name)) for name in (*evidence.free, *evidence.draftings)
    }
    keys = ("accepted_per_position", "accepted_counts")
    return {key: {name: row[key] for name, row in rows.items()} for key in keys}


def in_words(found: Mapping[str, Any]) -> list[str]:
    """The answer, one paragraph a line."""
    warning = busy_warning(found.get("conditions", {}))
    said = [*_recommendation(found), *head_in_words(found["head"]), *_what_to_type(found), *_checked(found)]
    return said if warning is None else [f"Warning: {warning}", *said]


def _recommendation(found: Mapping[str, Any]) -> Iterator[str]:
    first, name = found["by_batch"]["1"], found["recommended"]["drafter"]
    if found["pays"]:
        here = first[name]["speedup"]
        yield f"Draft with {name}: expect {_times(here)} the speed of plain decoding on prompts like these."
        off = found["off_from_batch"]
        yield (
            f"From {off} sequences at once on it no longer pays; the adaptive controller stops by itself."
            if off
            else f"It pays at every batch size looked at, up to {max(map(int, found['by_batch']))}."
        )
    else:
        tried = ", ".join(f"{drafter} {_times(row['speedup'])}" for drafter, row in first.items())
        yield f"Do not draft: no drafter tried here is sure to gain 5%. Predicted over plain decoding: {tried}."
    read = found.get("prompts")
    if read is not None and read["read"] < read["given"]:
        yield f"Read {read['read']} of the {read['given']} prompts; --limit 0 reads all."
    if found["texts"] == 1:
        yield "This rests on one prompt, which gives no interval: give more prompts before you rely on it."
    yield found["auto"]["why"]


def _what_to_type(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"Here: {found['forerun']}"
    if found["vllm"] is not None:
        yield f"vLLM: --speculative-config '{json.dumps(found['vllm'])}'"
    if found["vllm_note"]:
        yield f"In vLLM: {found['vllm_note']}"


def _checked(found: Mapping[str, Any]) -> Iterator[str]:
    for batch, check in found.get("check", {}).get("by_batch", {}).items():
        size = "" if batch == "1" else f", {batch} at once, {check['drafter']}"
        yield (
            f"Checked on {_prompts(check['prompts'])} held back{size}: predicted {check['predicted']['value']:.2f}, "
            f"measured {_times(check['measured'])}; {100 * check['error']:+.0f}%."
        )


def _prompts(count: int) -> str:
    return "1 prompt" if count == 1 else f"{count} prompts"


def _times(found: Mapping[str, Any]) -> str:
    known = Spread(found["value"], found["low"], found["high"])
    return f"{known.value:.2f}x ({known.interval or 'one prompt, no interval'})"
