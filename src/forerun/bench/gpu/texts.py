"""Whole texts of an inflated model on a GPU: without drafting and with every kind of draft, at several batch sizes.

The target has the default model's function at the cost of the larger shape, and so has the head: real tokens, real
acceptance, the large model's time. All texts must equal those written plainly at batch 1, token for token; where one
does not, how near the tie was is shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from forerun import registry
from forerun.bench.gpu.rounds import make_drafter
from forerun.bench.peers.transformers_gpu import time_transformers
from forerun.bench.suites import load_suite
from forerun.build import make_engine
from forerun.drafters.eagle.files import read_head
from forerun.drafters.eagle.inflate_head import inflate_head
from forerun.engine.driver import Driver
from forerun.engine.engine import Engine
from forerun.errors import InvalidInput
from forerun.heads import find_head
from forerun.models.config import DecoderConfig
from forerun.models.cuda.target import CudaDecoder
from forerun.models.inflate import PRESETS, InflatedWeights
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.testing import FakeSeq
from forerun.types import Budget, Needs, Request, TreeBatch
from forerun.verify.greedy import device_walk

OWN = "own"  # not inflated
TREES = Budget(nodes=12, depth=6, width=3)
RATES = ("tokens_per_s", "decoding_per_s")  # whole calls, and without reading prompts
INFLATED = "inflated from smollm2: its tokens and acceptance at the cost of the larger shape"

Setup = tuple[str, Budget | None]  # a drafter, and the shape of its drafts; None = the controller decides


def measure_texts(given: argparse.Namespace) -> dict[str, Any]:
    """Plain and drafted texts of the inflated model; every difference is shown with how near the tie was."""
    checkpoint = open_checkpoint(given.model)
    tokenizer = checkpoint.tokenizer()
    large: InflatedWeights | None = None
    if given.preset != OWN:
        large = InflatedWeights(checkpoint.config, checkpoint.weights, PRESETS[given.preset], device="cuda")
    config = DecoderConfig.from_hf(checkpoint.config if large is None else large.config)
    target = CudaDecoder(
        config,
        large or checkpoint.weights,
        dtype=torch.bfloat16,
        kv_slots=60_000,
        greedy_walk=device_walk(torch.device("cuda")),
    )
    registry.drafters.register("answer_trees", "forerun.bench.gpu.stand_ins:AnswerTrees")
    speculative = SpeculativeConfig(drafter="ngram")
    engine = make_engine(target, tokenizer.eos_ids, speculative, EngineConfig(max_length=4096), tokenizer)
    items = load_suite(given.suite, limit=given.limit)
    prompts = [tuple(tokenizer.chat_ids(item.messages)) for item in items]
    setups: dict[str, Setup] = {"none": ("none", None), "ngram": ("ngram", None)}
    if not given.skip_random_trees:
        setups["answer_trees"] = "answer_trees", TREES
    folder = given.head or _in_the_box(checkpoint)
    if folder is not None:
        setups |= _add_heads(engine, target, folder, given)
    batches = [int(size) for size in given.batches.split(",")]
    texts = Texts(engine, prompts, [item.task for item in items], given.max_tokens)
    runs = texts.write_all(setups, batches)
    gaps = [_gap(target, prompts[i], texts.plain[i], other) for i, other in texts.differing]
    model = "the checkpoint itself" if large is None else INFLATED
    result = {"model": model, "shape": given.preset, "prompts": len(prompts), "runs": runs}
    result |= {"differing": len(gaps), "gaps": gaps}
    if large is not None and not given.skip_transformers:
        result["transformers_tokens_per_s"] = time_transformers(large, prompts[:2])
        print(f"transformers generate: {result['transformers_tokens_per_s']:.1f} tokens/s")
    return result


def _in_the_box(checkpoint: Checkpoint) -> Path | None:
    found = find_head(checkpoint.config, (checkpoint.name, checkpoint.path.name), "eagle3")
    return None if found is None else found.path


def _add_heads(
    engine: Engine, target: CudaDecoder, folder: Path, given: argparse.Namespace
) -> dict[str, Setup]:
    """The trained head, inflated like the target, in every kind of weights and every form of draft asked for."""
    head = read_head(folder, kind="eagle3")
    if given.preset != OWN:
        head = inflate_head(*head, PRESETS[given.preset], device="cuda")
    setups: dict[str, Setup] = {}
    for kind in given.head_kinds.split(","):
        most = max(int(size) for size in given.batches.split(","))
        engine.drafters.add(f"head {kind}", make_drafter(target, head, kind, most, engine.max_length))
        for form in given.forms.split(","):
            setups[f"{kind} head, {form}"] = f"head {kind}", parse_form(form)
    return setups


def parse_form(form: str) -> Budget | None:
    """`adaptive`, or nodes:depth:width; a chain has width 1, which may be left out."""
    if form == "adaptive":
        return None
    try:
        nodes, depth, width = (int(part) for part in f"{form}:1".split(":")[:3])
        return Budget(nodes, depth, width)
    except ValueError:
        raise InvalidInput(f"form {form!r} is not nodes:depth:width, as 32:6:8, nor adaptive") from None


class Texts:
    """The same prompts, written with many drafters."""

    def __init__(
        self, engine: Engine, prompts: Sequence[tuple[int, ...]], tasks: Sequence[str], tokens: int
    ) -> None:
        self.engine, self.prompts, self.tasks, self.tokens = engine, prompts, tasks, tokens
        self.driver = Driver(engine)
        self.plain: list[list[int]] = []
        self.differing: list[tuple[int, list[int]]] = []

    def write_all(self, setups: Mapping[str, Setup], batches: Sequence[int]) -> list[dict[str, Any]]:
        """Every setup, twice: the first time captures graphs. All are compared with plain texts at batch 1."""
        self.plain, _ = self.write(("none", None), 1)
        if "answer_trees" in setups:
            trees: Any = self.engine.drafters.get("answer_trees")
            trees.answers = dict(zip(self.prompts, self.plain, strict=True))
        runs = []
        for batch in batches:
            plain: dict[str, Any] = {}
            for label, setup in setups.items():
                if (label, batch) != ("none", 1):  # which was written before
                    self.write(setup, batch)
                texts, figures = self.write(setup, batch)
                plain = figures if label == "none" else plain
                off = [(i, text) for i, text in enumerate(texts) if text != self.plain[i]]
                self.differing += off
                ratios = {f"{name}_x": figures[name] / plain[name] for name in RATES}
                runs.append({"drafter": label, "batch": batch, "differing": len(off), **figures, **ratios})
                _print_run(runs[-1], len(texts))
        return runs

    def write(self, setup: Setup, batch: int) -> tuple[list[list[int]], dict[str, Any]]:
        """All texts, `batch` at a time, and what they took; at batch 1, by task as well."""
        drafter, budget = setup
        self.engine.max_batch = batch
        params = SamplingParams(max_tokens=self.tokens)
        _wait()
        requests = [Request(prompt, params, drafter=drafter, budget=budget) for prompt in self.prompts]
        texts: list[list[int]] = [[] for _ in requests]
        spent = dict.fromkeys(self.tasks, 0.0)
        rounds, before = 0, dict(self.engine.stats.seconds)
        started = at = perf_counter()
        for place, event in self.driver.stream(requests):
            texts[place] += event.tokens
            rounds += 1
            if event.finished is not None:
                now = perf_counter()
                spent[self.tasks[place]] += now - at
                at = now
        seconds = perf_counter() - started
        count = sum(map(len, texts))
        figures: dict[str, Any] = {"tokens": count, "seconds": seconds, "tokens_per_s": count / seconds}
        parts = {name: total - before.get(name, 0.0) for name, total in self.engine.stats.seconds.items()}
        figures |= {"decoding_per_s": count / sum(parts.values()), "tokens_per_round": count / rounds}
        figures["ms_per_round"] = {name: 1e3 * batch * spent / rounds for name, spent in parts.items()}
        if batch == 1:
            written = dict.fromkeys(self.tasks, 0)
            for task, text in zip(self.tasks, texts, strict=True):
                written[task] += len(text)
            figures["by_task"] = {task: written[task] / spent[task] for task in written}
        return texts, figures


def _print_run(run: dict[str, Any], texts: int) -> None:
    parts = ", ".join(f"{name} {spent:.2f}" for name, spent in run["ms_per_round"].items())
    print(
        f"{run['drafter']:>20} batch {run['batch']}: {run['tokens_per_s']:7.1f} tokens/s, "
        f"{run['tokens_per_s_x']:.2f}x plain ({run['decoding_per_s_x']:.2f}x without prompts), "
        f"{run['tokens_per_round']:.2f} tokens per round ({parts} ms), "
        f"{run['differing']} of {texts} texts differ",
        flush=True,
    )


def _gap(target: CudaDecoder, prompt: tuple[int, ...], plain: list[int], other: list[int]) -> float:
    """How far apart the two likeliest tokens are where two texts differ first."""
    at = next(
        (i for i, pair in enumerate(zip(plain, other, strict=False)) if pair[0] != pair[1]), len(plain) - 1
    )
    seq = FakeSeq(1 << 40, [*prompt, *plain[:at]], max_length=4096)
    target.prefill([seq], Needs())
    logits = target.score([seq], TreeBatch.chains([seq.tokens[-1:]]), Needs()).logits
    target.release(seq)
    assert logits is not None
    best = logits[0].topk(2).values.tolist()
    return float(best[0] - best[1])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
