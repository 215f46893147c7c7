"""`forerun advise`: `run_advisor` runs it; its answer is a JSON document with the evidence, and the same in sentences.

It says which drafter, from which load on to stop, whether training a head would pay, what to type, here and in vLLM,
and whether the default (`auto`) would do the same. "Do not draft" and "cannot tell" are answers like any
other: a gain whose interval reaches below plain decoding may be chance, and so may be the lead of one drafter over
another. Only drafters whose own interval is above plain decoding are recommended. Of those that cannot be told apart
the default is taken, so that nothing needs to be set, else the simplest one; and none is set in place of a default from
which it cannot be told. Whether training a head would pay is predicted too, with the assumptions of the prediction.

A run loads, gathers evidence and concludes; and, if asked to, compares the prediction with a measurement on prompts
that it was not made from.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from forerun.api.llm import LLM
from forerun.build.engine import choose_drafter, needs_head
from forerun.build.fingerprint import FoundHead, find_head
from forerun.control.cost import CostModel
from forerun.core import registry
from forerun.core.errors import InvalidInput
from forerun.core.params import SpeculativeConfig
from forerun.measure.advise.evidence import (
    BATCHES,
    Evidence,
    Fixed,
    Prospect,
    accepted,
    at_acceptance,
    fixed_chain,
    fixed_lookup,
    gather,
    prospects,
)
from forerun.measure.bench.alternate import Group, Prompt, alternate, warm_up
from forerun.measure.bench.contenders import load, own_contender
from forerun.measure.bench.figures import Figures, Spread, acceptance_by_context, acceptance_document
from forerun.measure.bench.run import tokenise
from forerun.measure.bench.settings import PLAIN, Cell, DrafterSetup, Settings
from forerun.measure.bench.suites import load_suite, suite_size
from forerun.measure.machine import is_busy, load_average, machine_facts
from forerun.measure.report.summary import busy_warning, counted
from forerun.models.base import Target
from forerun.models.load import checkpoint as loading

Verdict = Literal["draft", "do not draft", "cannot tell"]

WORTH_IT = 1.05  # a predicted gain below this is not worth a setting
STOP = 1.02  # a drafter that gains less at some batch size need not draft there


@dataclass(frozen=True, slots=True)
class Decision:
    """What is recommended for one sequence at a time, and for how many at once that holds."""

    verdict: Verdict
    best: Prospect | None = None  # what is recommended; None = nothing
    equals: tuple[Prospect, ...] = ()  # others that pay and cannot be told from it, or from the default
    by_batch: Mapping[int, Verdict] | None = None  # of what is recommended

    @property
    def off_from(self) -> int | None:
        """The first batch size for which it is not recommended; None = there is none."""
        sizes = self.by_batch or {1: self.verdict}
        return next((batch for batch, verdict in sizes.items() if verdict != "draft"), None)


def judge(found: Prospect, least: float = WORTH_IT) -> Verdict:
    """Does a drafter gain at least so much, and is it sure to gain anything?"""
    gain = found.speedup
    if found.rests or (gain.high is not None and gain.high < least):
        return "do not draft"
    if gain.low is not None and gain.low >= 1.0 and gain.value >= least:
        return "draft"
    return "cannot tell"


def decide(by_batch: Mapping[int, Sequence[Prospect]], auto: str) -> Decision:
    """From the prospects of every batch size, of which 1 is the first; `auto` is the default drafter."""
    found = by_batch[1]
    sure = [one for one in found if judge(one) == "draft"]
    if not sure:
        unsure = any(judge(one) == "cannot tell" for one in found)
        return Decision("cannot tell" if unsure else "do not draft")
    fastest = sure[0]  # they are sorted
    default = next((one for one in found if one.drafter == auto), None)
    if default is not None and default not in sure and not _is_slower(default, fastest):
        return Decision("cannot tell", equals=tuple(sure))  # nothing to set: the default may be as fast
    equals = [one for one in sure if not _is_slower(one, fastest)]
    best = min(equals, key=lambda one: (one.drafter != auto, _parts(one.drafter)))
    by_size = {
        batch: judge(next(one for one in some if one.drafter == best.drafter), WORTH_IT if batch == 1 else STOP)
        for batch, some in by_batch.items()
    }
    return Decision("draft", best, tuple(one for one in equals if one is not best), by_size)


def _is_slower(one: Prospect, other: Prospect) -> bool:
    """Clearly, by the same prompts?"""
    high = one.over(other).high
    return one is not other and high is not None and high < 1.0


def _parts(drafter: str) -> tuple[bool, int, str]:
    """What must be there for it: a checkpoint, and how many drafters; by name where that is the same."""
    spec = registry.drafters.spec(drafter)
    return spec.needs != "nothing", len(spec.members), drafter


ACCEPTANCE = (0.55, 0.7)  # what small heads reach on text unlike, and like, their training data
VOCABULARY = 16384  # tokens that a draft head needs to rank
TOKENS = 2_000_000  # of the target's own answers, to train one
SHARE = 0.1  # of a plain pass, where the model's shape is not known


def head_prospect(evidence: Evidence, setup: Setup, best: Prospect | None, target: Target) -> dict[str, Any]:
    """What a one-layer head would gain, if it got the acceptance that such heads get; and the head that is there."""
    share = _level_share(target)
    gains = [at_acceptance(rate, share, evidence.costs, 1, evidence.nodes)[0] for rate in ACCEPTANCE]
    today = best.speedup.value if best is not None else 1.0
    hours = TOKENS / evidence.prompt_rate / 3600 if evidence.prompt_rate else None
    rates = [rate / 100 for rate in range(1, 101)]
    gaining = (rate for rate in rates if at_acceptance(rate, share, evidence.costs, 1, evidence.nodes)[1])
    return {
        "trained": [name for name in evidence.draftings if needs_head(name)],
        "shipped": _shipped(setup),
        "level_share": round(share, 4),
        "acceptance": list(ACCEPTANCE),
        "speedup": [round(gain, 4) for gain in gains],
        "break_even": next(gaining, None),  # the acceptance above which it gains; None = not even a perfect one does
        "pays": setup.shipped is None and gains[0] > max(WORTH_IT, 1.05 * today),
        "tokens": TOKENS,
        "capture_hours": None if hours is None else round(hours, 2),
    }


def _shipped(setup: Setup) -> dict[str, Any] | None:
    """The head that comes with the package for this model, and whether a user who names none drafts with it."""
    if setup.shipped is None:
        return None
    head, likeness = setup.shipped
    in_use = setup.draft_model is None and needs_head(setup.auto)
    return {"name": head.path.name, "drafter": head.drafter, "target": head.target, "likeness": likeness,
            "in_use": in_use}  # fmt: skip


def _level_share(target: Target) -> float:
    """What one level of a one-layer head with a trimmed vocabulary costs, in plain passes, by bytes read."""
    shared = target.shared()
    config = None if shared is None else shared.config
    if config is None or config.moe is not None:
        return SHARE
    layer = config.width * config.head_dim * 2 * (config.heads + config.kv_heads) + 3 * config.width * config.inner
    whole = config.layers * layer + config.vocab_size * config.width
    return (layer + min(config.vocab_size, VOCABULARY) * config.width) / whole


def head_in_words(found: Mapping[str, Any]) -> Iterator[str]:
    head, auto = found["head"], found["auto"]["drafter"]
    if head["trained"]:
        yield f"A trained head exists already and was measured: {', '.join(head['trained'])}."
        return
    if head["shipped"] is not None:
        yield from _shipped_in_words(head["shipped"], auto)
        return
    if head["break_even"] is None:
        yield "Training a head would not pay: even a perfect one would not, at what passes cost here."
        return
    low, high = head["speedup"]
    verdict = "would pay" if head["pays"] else "would gain less than 5%"
    yield (
        f"Training a head {verdict}: {low:.2f} to {high:.2f} times plain at an acceptance of "
        f"{head['acceptance'][0]} to {head['acceptance'][1]}; it breaks even at {head['break_even']:.2f}."
    )
    if head["pays"] and head["capture_hours"] is not None:
        yield (
            f"It takes {head['tokens']:,} tokens of the model's own answers: about "
            f"{head['capture_hours']:.1f} hours of passes on this machine, and as long again to train."
        )


def _shipped_in_words(shipped: Mapping[str, Any], auto: str) -> Iterator[str]:
    if shipped["likeness"] == "same":
        yield f"{shipped['name']} comes with the package for this model: no head needs to be trained from scratch."
    else:
        yield (
            f"{shipped['name']} comes with the package. It was trained for {shipped['target']}, of which this model "
            "looks like a fine-tune: `forerun train refresh` trains it further, on this model's own texts."
        )
    measures = f"--drafters {shipped['drafter']} measures it"
    if shipped["in_use"]:
        yield f"The default (auto) drafts with it, as {auto}; it was not measured here: {measures}."
    elif registry.drafters.spec(auto).needs == "nothing":
        yield f"The default (auto) leaves it out on this machine, where it is not expected to pay; {measures}."
    else:
        yield f"Here --draft-model takes its place; without that, {measures}."


PROMPT = "Your prompt"
# methods whose heads `forerun drafters export` writes for vLLM
EXPORTED = ("eagle", "eagle3", "dflash", "dspark")


@dataclass(frozen=True, slots=True)
class Setup:
    model: str
    auto: str  # the drafter of a user who names none
    draft_model: str | None = None  # as given: a second model or the folder of a head
    # of drafters whose head comes with the package
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    shipped: FoundHead | None = None  # of those heads, the one for this model
    flags: tuple[str, ...] = ()  # of the machine, where they are not the defaults
    device: str = "cpu"


def costly_part(drafter: str) -> str:
    """The part of a composition that must run to draft; itself for all others."""
    spec = registry.drafters.spec(drafter)
    return next((part.name for part in spec.members if part.needs != "nothing"), spec.name)


def forerun_command(setup: Setup, drafter: str | None, budget: int | None) -> str:
    """A command that runs as it is printed; without a drafter, with the default one."""
    words = ["forerun", "generate", PROMPT, "--model", setup.model]
    words += [] if drafter is None else ["--drafter", drafter]
    needs = setup.auto if drafter is None else drafter
    if setup.draft_model is not None and registry.drafters.spec(needs).needs != "nothing":
        words += ["--draft-model", setup.draft_model]
    if budget:
        words += ["--budget", str(budget)]
    return shlex.join([*words, *setup.flags])


def vllm_config(
    evidence: Evidence, setup: Setup, drafter: str, off_from: int | None = None
) -> tuple[dict[str, Any] | None, str]:
    """The configuration, and what must be said with it; None only where vLLM cannot do it, and then why.

    `off_from`: the batch size from which on nothing is to be drafted, whatever a fixed budget would gain.
    """
    method = registry.drafters.spec(drafter).vllm  # of a composition, that of the part that costs something
    if method is None:
        return None, f"vLLM has no drafter like {drafter!r}."
    config: dict[str, Any]
    exported = ""
    if drafter in evidence.free:
        fixed = fixed_lookup(evidence, drafter)
        config = {"method": method}
        if method == "ngram":
            config |= {"prompt_lookup_min": fixed.shortest, "prompt_lookup_max": max(5, fixed.shortest)}
    else:
        checkpoint = setup.draft_model or setup.checkpoints.get(drafter)
        if checkpoint is None:
            return None, f"vLLM needs the checkpoint that {drafter!r} drafts with, which is not a file here."
        alone = costly_part(drafter)
        fixed = fixed_chain(evidence, alone if alone in evidence.draftings else drafter)
        config = {"method": method, "model": checkpoint}
        if method in EXPORTED:  # second models and other heads are read as they are, or not at all
            words = ["forerun", "drafters", "export", checkpoint, "for-vllm", "--to", "vllm", "--target", setup.model]
            exported = f"A head that was trained here is first written as vLLM reads it: {shlex.join(words)}"
    budgets = {batch: budget if off_from is None or batch < off_from else 0 for batch, budget in fixed.budgets.items()}
    config["num_speculative_tokens"] = max(budgets.values()) or fixed.lengths[1]
    if any(budgets.values()) and len(set(budgets.values())) > 1:
        config["num_speculative_tokens_per_batch_size"] = _ranges(budgets)
    return config, " ".join(filter(None, [_note(drafter, method, fixed), exported]))


def _note(drafter: str, method: str, fixed: Fixed) -> str:
    """Where vLLM would do less than we do."""
    said = []
    if registry.drafters.spec(drafter).members:
        said.append(f"vLLM composes no drafters: this is the {method!r} part alone.")
    if not fixed.budgets[1]:
        said.append(
            f"With a fixed budget, as vLLM has it, {fixed.gains[1]:.2f}x plain is predicted: "
            "it is drafting only where it should pay that gains here."
        )
    return " ".join(said)


def _ranges(budgets: Mapping[int, int]) -> list[list[int]]:
    """[[first batch, last batch, budget], ...]: each budget holds until the next size that was looked at."""
    rows: list[list[int]] = []
    for batch, budget in budgets.items():
        if rows:
            rows[-1][1] = batch - 1
        if not rows or rows[-1][2] != budget:
            rows.append([batch, batch, budget])
        rows[-1][1] = batch
    return rows


LEAVE_OUT = "Leave --speculative-config out."
UNTIL_SURE = "Leave --speculative-config out until a drafter is known to pay."


def document(evidence: Evidence, setup: Setup, target: Target) -> dict[str, Any]:
    by_batch = {batch: prospects(evidence, batch) for batch in BATCHES}
    made = decide(by_batch, setup.auto)
    config, note = _for_vllm(evidence, setup, made, by_batch[1])
    recommended = _recommended(made)
    return {
        "model": setup.model,
        "verdict": made.verdict,
        "recommended": recommended,
        "equals": [one.drafter for one in made.equals],
        "pays": {"draft": True, "do not draft": False, "cannot tell": None}[made.verdict],
        "off_from_batch": made.off_from,
        "verdict_by_batch": {str(batch): verdict for batch, verdict in (made.by_batch or {}).items()},
        "auto": compare_with_auto(setup, made, by_batch[1]),
        "by_batch": {str(batch): {one.drafter: _told(one) for one in found} for batch, found in by_batch.items()},
        **_acceptance(evidence),
        "by_context": {name: _by_context(evidence, name) for name in evidence.draftings},
        "head": head_prospect(evidence, setup, made.best or next(iter(by_batch[1]), None), target),
        "t": {str(size): round(seconds, 6) for size, seconds in evidence.costs.target.seconds.items()},
        "plain_tokens_per_second": round(1.0 / evidence.costs.plain_round(1), 3),
        "texts": len(evidence.texts),
        "tokens": sum(len(text.tokens) for text in evidence.texts),
        "forerun": forerun_command(setup, recommended["drafter"], recommended["budget"]),
        "vllm": config,
        "vllm_note": note,
    }


def _recommended(made: Decision) -> dict[str, Any]:
    """A drafter and its budget; no drafter where nobody can tell: then nothing is set."""
    if made.best is not None:
        return {"drafter": made.best.drafter, "budget": made.best.budget}
    return {"drafter": "none", "budget": 0} if made.verdict == "do not draft" else {"drafter": None, "budget": None}


def _for_vllm(
    evidence: Evidence, setup: Setup, made: Decision, found: list[Prospect]
) -> tuple[dict[str, Any] | None, str]:
    """The recommendation in vLLM; where it has no such drafter, the next best that it has, if that pays."""
    if made.best is None:
        return None, LEAVE_OUT if made.verdict == "do not draft" else UNTIL_SURE
    config, note = vllm_config(evidence, setup, made.best.drafter, made.off_from)
    if config is not None:
        return config, note
    for other in found:
        if judge(other) != "draft":
            continue
        nearest = vllm_config(evidence, setup, other.drafter, made.off_from)
        if nearest[0] is not None:
            said = f"{note} The next best that it has is {other.drafter}, {_times(other.speedup.as_document())} here."
            return nearest[0], f"{said} {nearest[1]}".rstrip()
    return None, note


def compare_with_auto(setup: Setup, made: Decision, found: list[Prospect]) -> dict[str, Any]:
    """Would a user who sets nothing get what is recommended? If not, why."""
    known = next((prospect for prospect in found if prospect.drafter == setup.auto), None)
    here = None if known is None else known.speedup.as_document()
    agrees = made.best is not None and made.best.drafter == setup.auto
    return {"drafter": setup.auto, "agrees": agrees, "speedup": here, "why": _why(setup, made, known)}


def _why(setup: Setup, made: Decision, known: Prospect | None) -> str:
    predicted = "" if known is None else f", predicted at {_times(known.speedup.as_document())}"
    default = f"The default (auto) would draft with {setup.auto}{predicted}"
    careful = "Its controller drafts only what should pay, so leaving it on costs almost nothing"
    if made.best is None:
        not_yet = "none is recommended because no gain of 5% is predicted."
        return f"{default}. {careful}{'.' if made.verdict == 'cannot tell' else f'; {not_yet}'}"
    name = made.best.drafter
    if name == setup.auto:
        return f"The default (auto) drafts with {name} too: nothing needs to be set."
    if known is None:
        return f"{default}, which was not measured here; name it in --drafters too to compare."
    if setup.device == "cpu" and (needs_head(name) or needs_head(setup.auto)):
        return (
            f"{default}: on a CPU it goes by what passes and the head's levels cost and by the acceptance that the "
            f"head's file names. On these prompts {name} is predicted to be faster."
        )
    by = "which checkpoints are there, and without a head by what a plain pass takes,"
    return f"{default}: it chooses by {by} not by prompts. On these prompts {name} is predicted to be faster."


def _told(one: Prospect) -> dict[str, Any]:
    rate, worst = round(one.tokens_per_round, 3), round(one.worst, 4)
    return {"speedup": one.speedup.as_document(), "budget": one.budget, "tokens_per_round": rate, "worst_prompt": worst}


def _acceptance(evidence: Evidence) -> dict[str, dict[str, Any]]:
    rows = {name: acceptance_document(accepted(evidence, name)) for name in evidence.draftings}
    keys = ("accepted_per_position", "accepted_counts")
    return {key: {name: row[key] for name, row in rows.items()} for key in keys}


def _by_context(evidence: Evidence, name: str) -> dict[str, dict[str, Any]]:
    rounds = evidence.draftings[name].rounds
    return acceptance_by_context([(len(text.prompt), some) for text, some in zip(evidence.texts, rounds, strict=False)])


def in_words(found: Mapping[str, Any]) -> list[str]:
    warning = busy_warning(found.get("conditions", {}))
    said = [*_recommendation(found), *head_in_words(found), *_what_to_type(found), *_checked(found)]
    return said if warning is None else [f"Warning: {warning}", *said]


def _recommendation(found: Mapping[str, Any]) -> Iterator[str]:
    first, name = found["by_batch"]["1"], found["recommended"]["drafter"]
    tried = ", ".join(f"{drafter} {_times(row['speedup'])}" for drafter, row in first.items())
    if found["verdict"] == "draft":
        here = first[name]["speedup"]
        yield f"Draft with {name}: expect {_times(here)} the speed of plain decoding on prompts like these."
        if found["equals"]:
            yield f"Not to be told from it on these prompts: {', '.join(found['equals'])}."
        yield _loads(found)
    elif found["verdict"] == "cannot tell":
        yield f"Cannot tell whether drafting pays here; measure longer. Over plain decoding: {tried}."
        if found["equals"]:
            yield f"Faster than plain, and not to be told from the default: {', '.join(found['equals'])}."
        yield (
            "An answer needs an interval that is wholly above 1.00, or below 1.05: "
            "give more prompts (--limit), longer texts (--max-tokens), or an idle machine."
        )
    else:
        yield f"Do not draft: no drafter tried here gains 5%. Over plain decoding: {tried}."
    for drafter, contexts in found.get("by_context", {}).items():
        if contexts and drafter in (name, *[*first][:1]):
            parts = ", ".join(f"{cell['tokens_per_round']:.2f} at {one}" for one, cell in contexts.items())
            yield f"Tokens per round of {drafter} by tokens of context: {parts}."
    read = found.get("prompts")
    if read is not None and read["read"] < read["given"]:
        yield f"Read {read['read']} of the {read['given']} prompts; --limit 0 reads all."
    if found["texts"] == 1:
        yield "This rests on one prompt, which gives no interval: give more prompts."
    yield found["auto"]["why"]


def _loads(found: Mapping[str, Any]) -> str:
    """From how many sequences at once on it is not recommended."""
    off, verdicts = found["off_from_batch"], found["verdict_by_batch"]
    if off is None:
        return f"It pays at every batch size looked at, up to {max(map(int, verdicts))}."
    unsure = [batch for batch, verdict in verdicts.items() if verdict == "cannot tell"]
    if not unsure:
        return f"From {off} sequences at once on it no longer pays; the adaptive controller stops by itself."
    which = f"with {' or '.join(unsure)} it cannot be told whether it pays"
    return f"Sure with fewer than {off} sequences at once; {which}. The adaptive controller stops by itself."


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
            f"Checked on {counted(check['prompts'], 'prompt')} held back{size}: "
            f"predicted {check['predicted']['value']:.2f}, "
            f"measured {_times(check['measured'])}; {100 * check['error']:+.0f}%."
        )


def _times(found: Mapping[str, Any]) -> str:
    known = Spread(found["value"], found["low"], found["high"])
    return f"{known.value:.2f}x ({known.interval or 'one prompt, no interval'})"


def run_advisor(settings: Settings, with_check: bool = False) -> dict[str, Any]:
    limit = settings.limit if not with_check or settings.limit is None else 2 * settings.limit
    items = load_suite(settings.suite, settings.tasks, limit, settings.model)
    given = suite_size(settings.suite, settings.tasks)
    before = load_average()
    llm, cost = load(settings)
    found = conclude(llm, cost, tokenise(llm, items, settings), settings, with_check)
    facts = machine_facts()
    load_now = {"load_before": before, "busy": is_busy(before, facts["cores"])}
    found["prompts"] = {"read": len(items), "given": given}
    return {**found, "conditions": {**facts, **settings.as_document(), **load_now}}


def conclude(
    llm: LLM, cost: CostModel, prompts: Sequence[Prompt], settings: Settings, with_check: bool
) -> dict[str, Any]:
    started = perf_counter()
    used, held_back = split(prompts) if with_check else (list(prompts), [])
    evidence = gather(llm, cost, used, settings)
    found = document(evidence, setup_of(llm, evidence, settings), llm.engine.target)
    if with_check:
        by_batch = {batch: check(llm, evidence, held_back, settings, batch) for batch in settings.batches}
        found["check"] = {
            **by_batch[settings.batches[0]],
            "by_batch": {str(batch): one for batch, one in by_batch.items()},
        }
    return {**found, "seconds": round(perf_counter() - started, 1)}


def setup_of(llm: LLM, evidence: Evidence, settings: Settings) -> Setup:
    """What was measured, as a user would ask for it; `auto` is what the engine does where nothing is named."""
    given = (("dtype", "auto"), ("device", "auto"), ("threads", None))
    values = settings.as_document()
    flags = [word for key, default in given if values[key] != default for word in (f"--{key}", str(values[key]))]
    return Setup(
        settings.model,
        llm.engine.default_drafter,
        settings.draft_model,
        heads_in_use(settings.model, evidence) if settings.draft_model is None else {},
        shipped_head(settings.model),
        tuple(flags),
        llm.engine.target.device.type,
    )


def shipped_head(model: str) -> FoundHead | None:
    """The head that comes with the package for this model."""
    return find_head(loading.open_checkpoint(model))


def heads_in_use(model: str, evidence: Evidence) -> dict[str, str]:
    """The folders of the heads that come with the package, by the drafters that ran them."""
    found = {}
    for name in filter(needs_head, evidence.draftings):
        chosen = choose_drafter(SpeculativeConfig(drafter=name), loading.open_checkpoint(model))
        if chosen.draft_model is not None:
            found[name] = chosen.draft_model
    return found


def split(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Every other prompt of each task is held back."""
    used, held_back = [], []
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        mine = [prompt for prompt in prompts if prompt.task == task]
        used += mine[::2]
        held_back += mine[1::2]
    if not held_back:
        raise InvalidInput(f"{len(prompts)} prompts leave none to check with; give two or more of a task")
    return used, held_back


def check(
    llm: LLM, evidence: Evidence, held_back: Sequence[Prompt], settings: Settings, batch: int = 1, repeats: int = 2
) -> dict[str, Any]:
    """The prediction for a batch size, made without these prompts, against what is measured on them."""
    best = prospects(evidence, batch)[0]
    cell = Cell(temperature=settings.temperatures[0], batch=batch)
    setup = DrafterSetup(best.drafter, best.drafter, best.budget or None)
    contenders = [own_contender(llm, settings, cell, one) for one in (DrafterSetup(PLAIN, "none"), setup)]
    groups = in_batches(held_back, batch)
    warm_up(contenders, groups[0], min(8, settings.max_tokens))
    figures = Figures(list(alternate(contenders, groups, settings.max_tokens, repeats)))
    measured = figures.speedup(setup.name, PLAIN)
    base = {run.key[1:]: run.texts for run in figures.of(PLAIN)}
    return {
        "batch": batch,
        "drafter": best.drafter,
        "budget": best.budget,
        "prompts": len(held_back),
        "predicted": best.speedup.as_document(),
        "measured": measured.as_document(),
        "error": round(best.speedup.value / measured.value - 1.0, 4),
        "equal": all(run.texts == base[run.key[1:]] for run in figures.of(setup.name)),
    }


def in_batches(prompts: Sequence[Prompt], batch: int) -> list[Group]:
    """Groups of so many prompts each; where they do not suffice, the first ones come again."""
    rounds = -(-len(prompts) // batch)
    again = [prompts[i % len(prompts)] for i in range(rounds * batch)]
    return [Group.of(again[first : first + batch]) for first in range(0, len(again), batch)]
