"""Commands for a recommendation: a forerun command, and the nearest `--speculative-config` of vLLM.

vLLM drafts a fixed number of tokens, at most one number per batch size, where our controller decides every round. So
its configuration is the best fixed budget by this machine's t(n): a first setting to try there, not a prediction.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.core import registry
from forerun.measure.advise.evidence import Evidence, Fixed, fixed_chain, fixed_lookup

PROMPT = "Your prompt"
# methods whose heads `forerun drafters export` writes for vLLM
EXPORTED = ("eagle", "eagle3", "dflash", "dspark")


@dataclass(frozen=True, slots=True)
class Setup:
    """What was measured, as its user would ask for it."""

    model: str
    auto: str  # the drafter of a user who names none
    draft_model: str | None = None  # as given: a second model or the folder of a head
    # of drafters whose head comes with the package
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()  # of the machine, where they are not the defaults
    device: str = "cpu"

    def checkpoint_of(self, drafter: str) -> str | None:
        """What a drafter loads: what the user gave, or the head that comes with the package."""
        return self.draft_model or self.checkpoints.get(drafter)


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
        checkpoint = setup.checkpoint_of(drafter)
        if checkpoint is None:
            return None, f"vLLM needs the checkpoint that {drafter!r} drafts with, which is not a file here."
        alone = costly_part(drafter)
        fixed = fixed_chain(evidence, alone if alone in evidence.draftings else drafter)
        config = {"method": method, "model": checkpoint}
        exported = _export_first(setup, method, checkpoint)
    budgets = {batch: budget if off_from is None or batch < off_from else 0 for batch, budget in fixed.budgets.items()}
    config["num_speculative_tokens"] = max(budgets.values()) or fixed.lengths[1]
    if any(budgets.values()) and len(set(budgets.values())) > 1:
        config["num_speculative_tokens_per_batch_size"] = _ranges(budgets)
    return config, " ".join(filter(None, [_note(drafter, method, fixed), exported]))


def _export_first(setup: Setup, method: str, checkpoint: str) -> str:
    """How a head becomes one that vLLM reads; second models and other heads are read as they are, or not at all."""
    if method not in EXPORTED:
        return ""
    words = ["forerun", "drafters", "export", checkpoint, "for-vllm", "--to", "vllm", "--target", setup.model]
    return f"A head that was trained here is first written as vLLM reads it: {shlex.join(words)}"


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
