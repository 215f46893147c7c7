"""The advisor's answer: a document with the evidence, and the same in plain words.

It says which drafter, from which load on to stop, whether training a head would pay, and what to type, here and in
vLLM. "Do not draft" is an answer like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forerun.advise.evidence import (
    BATCHES,
    WORTH_IT,
    Evidence,
    Prospect,
    acceptance,
    fixed_chain,
    fixed_lookup,
    prospects,
    spread,
)
from forerun.advise.predict import Costs, at_acceptance
from forerun.build import needs_head
from forerun.models.config import DecoderConfig

HARMLESS = 0.97  # what other prompts of the kind may cost at worst
HEAD_ACCEPTANCE = (0.55, 0.7)  # what small heads reach on a text they were not, and were, trained for
HEAD_VOCABULARY = 16384  # tokens that a draft head needs to rank
HEAD_TOKENS = 2_000_000  # of the target's own answers, to train one
HEAD_SHARE = 0.1  # of a plain pass, where the model's shape is not known
_VLLM = {
    "draft_model": "draft_model",
    "medusa": "medusa",
    "eagle": "eagle",
    "eagle2": "eagle",
    "eagle3": "eagle3",
}


def document(evidence: Evidence, model: str, draft_model: str | None, target: object) -> dict[str, Any]:
    """Everything that is known and what follows from it, as plain JSON values."""
    by_batch = {batch: prospects(evidence, batch) for batch in BATCHES}
    best = by_batch[1][0] if by_batch[1] else None
    pays = best is not None and best.speedup.value >= WORTH_IT and best.speedup.low >= HARMLESS
    name = best.drafter if best is not None and pays else "none"
    curve = {batch: next((p for p in found if p.drafter == name), None) for batch, found in by_batch.items()}
    off = next((b for b, p in curve.items() if pays and (p is None or p.speedup.value < 1.02)), None)
    return {
        "model": model,
        "recommended": {"drafter": name, "budget": best.budget if best is not None and pays else 0},
        "pays": pays,
        "off_from_batch": off if pays else 1,
        "by_batch": {
            str(batch): {
                prospect.drafter: {
                    "speedup": spread(prospect.speedup),
                    "budget": prospect.budget,
                    "tokens_per_round": round(prospect.tokens_per_round, 3),
                }
                for prospect in found
            }
            for batch, found in by_batch.items()
        },
        "accepted_per_position": {
            drafter: [round(share, 4) for share in acceptance(evidence, drafter)]
            for drafter in (*evidence.free, *evidence.draftings)
        },
        "head": _head(evidence, best, target),
        "t": {str(size): round(seconds, 6) for size, seconds in evidence.costs.target.seconds.items()},
        "plain_tokens_per_second": round(1.0 / evidence.costs.plain_round(1), 3),
        "texts": len(evidence.texts),
        "tokens": sum(len(text.tokens) for text in evidence.texts),
        "forerun": _flags(model, draft_model, name),
        "vllm": _vllm(evidence, name, draft_model) if pays else None,
    }


def _flags(model: str, draft_model: str | None, name: str) -> str:
    words = ["forerun", "serve", "--model", model, "--drafter", name]
    if draft_model is not None and name not in ("none", "ngram"):
        words += ["--draft-model", draft_model]
    return " ".join(words)


def _vllm(evidence: Evidence, name: str, draft_model: str | None) -> dict[str, Any] | None:
    """The nearest `--speculative-config`: a fixed budget, by batch size where it should change."""
    if name in evidence.free:
        budgets, shortest = fixed_lookup(evidence, name)
        if not budgets[1]:
            return None  # only a drafter that weighs its matches pays here
        config: dict[str, Any] = {
            "method": "ngram",
            "num_speculative_tokens": budgets[1],
            "prompt_lookup_min": shortest,
            "prompt_lookup_max": max(5, shortest),
        }
    else:
        method = _VLLM.get(name.removeprefix("hybrid_"))  # it has no hybrids: the part that is dearer to miss
        budgets = fixed_chain(evidence, name)
        if method is None or draft_model is None or not budgets[1]:
            return None
        config = {"method": method, "model": draft_model, "num_speculative_tokens": budgets[1]}
    if len(set(budgets.values())) > 1:
        config["num_speculative_tokens_per_batch_size"] = _ranges(budgets)
    return config


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


def _head(evidence: Evidence, best: Prospect | None, target: object) -> dict[str, Any]:
    """Would a one-layer head pay, if it got the acceptance that such heads get?"""
    share = _head_share(target)
    gains = [at_acceptance(rate, share, evidence.costs, 1, evidence.nodes)[0] for rate in HEAD_ACCEPTANCE]
    today = best.speedup.value if best is not None else 1.0
    hours = HEAD_TOKENS / evidence.prompt_rate / 3600 if evidence.prompt_rate else None
    return {
        "trained": [name for name in evidence.draftings if needs_head(name)],
        "level_share": round(share, 4),
        "acceptance": list(HEAD_ACCEPTANCE),
        "speedup": [round(gain, 4) for gain in gains],
        "break_even": _break_even(evidence.costs, share, evidence.nodes),
        "pays": gains[0] > max(WORTH_IT, 1.05 * today),
        "tokens": HEAD_TOKENS,
        "capture_hours": None if hours is None else round(hours, 2),
    }


def _head_share(target: object) -> float:
    """What one level of a one-layer head with a trimmed vocabulary costs, in plain passes, by bytes read."""
    config = getattr(target, "config", None)
    if not isinstance(config, DecoderConfig) or config.moe is not None:
        return HEAD_SHARE
    layer = (
        config.width * config.head_dim * 2 * (config.heads + config.kv_heads)
        + 3 * config.width * config.inner
    )
    whole = config.layers * layer + config.vocab_size * config.width
    return (layer + min(config.vocab_size, HEAD_VOCABULARY) * config.width) / whole


def _break_even(costs: Costs, share: float, nodes: int) -> float | None:
    """The acceptance above which a head gains anything; None where not even a perfect one does."""
    rates = [rate / 100 for rate in range(1, 101)]
    return next((rate for rate in rates if at_acceptance(rate, share, costs, 1, nodes)[1]), None)


def in_words(found: Mapping[str, Any]) -> list[str]:
    """The answer, one paragraph a line."""
    first = found["by_batch"]["1"]
    name = found["recommended"]["drafter"]
    lines = []
    if found["pays"]:
        here = first[name]["speedup"]
        lines.append(
            f"Draft with {name}: expect {_times(here)} the speed of plain decoding on prompts like these."
        )
        off = found["off_from_batch"]
        lines.append(
            f"From {off} texts at once on it no longer pays; the adaptive controller stops by itself."
            if off
            else f"It pays at every batch size looked at, up to {max(map(int, found['by_batch']))}."
        )
    else:
        tried = ", ".join(f"{drafter} {_times(row['speedup'])}" for drafter, row in first.items())
        lines.append(
            f"Do not draft: nothing tried here would gain 5%. Predicted over plain decoding: {tried}."
        )
    head = found["head"]
    if head["trained"]:
        lines.append(f"A trained head is there already, and was measured: {', '.join(head['trained'])}.")
    elif head["break_even"] is None:
        lines.append("Training a head would not pay: not even a perfect one would, at what passes cost here.")
    else:
        low, high = head["speedup"]
        verdict = "would pay" if head["pays"] else "would not pay enough to bother"
        lines.append(
            f"Training a head {verdict}: {low:.2f} to {high:.2f} times plain at an acceptance of "
            f"{head['acceptance'][0]} to {head['acceptance'][1]}; it breaks even at {head['break_even']:.2f}."
        )
        if head["pays"] and head["capture_hours"] is not None:
            lines.append(
                f"It takes {head['tokens']:,} tokens of the model's own answers: about "
                f"{head['capture_hours']:.1f} hours of passes on this machine, and as long again to train."
            )
    lines.append(f"Here: {found['forerun']}")
    if found["vllm"] is not None:
        lines.append(f"vLLM: --speculative-config '{json.dumps(found['vllm'])}'")
    if check := found.get("check"):
        lines.append(
            f"Checked on {check['prompts']} prompts held back: predicted {check['predicted']['value']:.2f}, "
            f"measured {_times(check['measured'])}; {100 * check['error']:+.0f}%."
        )
    return lines


def _times(found: Mapping[str, float]) -> str:
    return f"{found['value']:.2f}x ({found['low']:.2f} to {found['high']:.2f})"
