"""Whole texts of an inflated model on a GPU: without drafting and with every kind of draft, at several batch sizes.

The target has the default model's function at the cost of the larger shape, and so has the head: real tokens, real
acceptance, the large model's time. All texts must equal those written plainly at batch 1, token for token; where one
does not, how near the tie was is shown.
"""

from __future__ import annotations

import argparse
import json
from functools import reduce
from pathlib import Path
from typing import Any

from forerun.build.engine import make_engine
from forerun.build.fingerprint import find_head
from forerun.core import registry
from forerun.core.errors import InvalidInput
from forerun.core.params import EngineConfig, SpeculativeConfig
from forerun.core.types import Budget, Needs, TreeBatch
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.heads.eagle_head import read_head
from forerun.engine.engine import Engine
from forerun.measure.bench.batches import PLAIN, Setup, Sweep, parse_batches
from forerun.measure.bench.suites import load_suite
from forerun.models.cuda.target import CudaDecoder
from forerun.models.load.checkpoint import open_checkpoint
from forerun.testing import FakeSeq
from lab.batch_report import say_row
from lab.gpu.rounds import make_drafter
from lab.inflate.heads import INFLATED, OWN, inflate_head, load_inflated
from lab.inflate.model import PRESETS
from lab.peers.transformers_gpu import time_transformers

FEWEST = 24  # texts of a small batch, or all there are
TREES = Budget(nodes=12, depth=6, width=3)
PLACE_SLOTS = 1250  # of the KV cache: a sequence of a thousand tokens with its trees
TRANSFORMERS_PROMPTS = 2


def measure_texts(given: argparse.Namespace) -> dict[str, Any]:
    """Plain and drafted texts of the inflated model; every difference is shown with how near the tie was."""
    checkpoint = open_checkpoint(given.model)
    tokenizer = checkpoint.tokenizer()
    batches = parse_batches(given.batches)
    slots = PLACE_SLOTS * max(8, *batches)
    target, large = load_inflated(checkpoint, given.preset, slots, kind=given.text_weights)
    registry.drafters.register("answer_trees", "lab.gpu.stand_ins:AnswerTrees")
    settings = EngineConfig(max_length=4096, max_batch=max(batches))
    engine = make_engine(target, tokenizer.eos_ids, SpeculativeConfig(drafter="ngram"), settings, tokenizer)
    prompts = [tuple(tokenizer.chat_ids(item.messages)) for item in load_suite(given.suite, limit=given.limit)]
    if given.write_prompts is not None:
        lines = [json.dumps({"token_ids": prompt}) for prompt in dict.fromkeys(prompts)]
        given.write_prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sweep = Sweep(engine, prompts, given.max_tokens)
    sweep.write_plainly()
    found = None if given.head else find_head(checkpoint, "eagle3")
    setups = make_setups(engine, target, sweep, given.head if found is None else found.head.path, given)
    needs = [engine.drafters.get(setup.drafter).needs for setup in setups.values()]
    target.warm_up(reduce(Needs.__or__, needs), max(batches), engine.max_length)
    fewest = min(FEWEST, len(sweep.prompts))
    rows = sweep.measure(setups, batches, lambda b: max(fewest, given.texts_per_place * b), say_row, given.repeats)
    gaps = [_gap(target, prompt, sweep.plain[prompt], other) for prompt, other in sweep.differing]
    result = {"model": "the checkpoint itself" if large is None else INFLATED, "shape": given.preset, "rows": rows}
    result |= {"prompts": len(sweep.prompts), "differing": len(gaps), "gaps": gaps, "max_tokens": given.max_tokens}
    if large is not None and not given.skip_transformers:
        result["transformers_tokens_per_s"] = time_transformers(large, prompts[:TRANSFORMERS_PROMPTS])
        print(f"transformers generate: {result['transformers_tokens_per_s']:.1f} tokens/s")
    return result


def make_setups(
    engine: Engine, target: CudaDecoder, sweep: Sweep, folder: Path | None, given: argparse.Namespace
) -> dict[str, Setup]:
    """Plain, n-gram, the head in every kind and form asked for, and both together, which is the default."""
    setups = {PLAIN: Setup("none"), "ngram": Setup("ngram")}
    if not given.skip_random_trees:
        trees: Any = engine.drafters.get("answer_trees")
        trees.answers = dict(sweep.plain)
        setups["answer_trees"] = Setup("answer_trees", TREES)
    if folder is None:
        return setups
    head = read_head(folder, kind="eagle3")
    if given.preset != OWN:
        head = inflate_head(*head, PRESETS[given.preset], device="cuda")
    for kind in given.head_kinds.split(","):
        drafter = make_drafter(target, head, kind, max(parse_batches(given.batches)), engine.max_length)
        engine.drafters.add(f"head {kind}", drafter)
        for form in given.forms.split(","):
            setups[f"{kind} head, {form}"] = Setup(f"head {kind}", parse_form(form))
        if registry.drafters.spec("eagle3").best != "eagle3":
            engine.drafters.add(f"ngram+head {kind}", HybridDrafter.compose(engine.drafters.get("ngram"), drafter))
            setups[f"ngram+{kind} head"] = Setup(f"ngram+head {kind}")
    default = [*setups][-1]
    chosen = {name: setups[name] for name in (PLAIN, default)} if given.only_default else setups
    mixed = Setup(setups[default].drafter, others=tuple(given.mixed.split(",")))
    return chosen | ({"mixed": mixed} if given.mixed else {})


def parse_form(form: str) -> Budget | None:
    """`adaptive`, or nodes:depth:width; a chain has width 1, which may be left out."""
    if form == "adaptive":
        return None
    try:
        nodes, depth, width = (int(part) for part in f"{form}:1".split(":")[:3])
        return Budget(nodes, depth, width)
    except ValueError:
        raise InvalidInput(f"form {form!r} is not nodes:depth:width, as 32:6:8, nor adaptive") from None


def _gap(target: CudaDecoder, prompt: tuple[int, ...], plain: list[int], other: list[int]) -> float:
    """How far apart the two likeliest tokens are where two texts differ first."""
    at = next((i for i, pair in enumerate(zip(plain, other, strict=False)) if pair[0] != pair[1]), len(plain) - 1)
    seq = FakeSeq(1 << 40, [*prompt, *plain[:at]], max_length=4096)
    target.prefill([seq], Needs())
    logits = target.score([seq], TreeBatch.chains([seq.tokens[-1:]]), Needs()).logits
    target.release(seq)
    assert logits is not None
    best = logits[0].topk(2).values.tolist()
    return float(best[0] - best[1])
