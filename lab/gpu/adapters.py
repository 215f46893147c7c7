"""What LoRA adapters cost: a batch of requests of many adapters beside the same batch of the base.

    python -m lab adapters --shape 8b --adapters 16 --rank 16 --batch 32

Weights are random. The adapters' second matrices are zeros, so that they change no text, and drafts are accepted as
often as the base's, at the cost that any numbers would have. Base and adapters take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request
from forerun.engine.engine import Engine
from forerun.models.config import DecoderConfig
from forerun.models.cuda.target import CudaDecoder
from forerun.models.load.adapter import Adapter
from forerun.verify.greedy import device_walk
from forerun.verify.sampled import SampledTokens
from lab.gpu.rounds import make_drafter, random_head
from lab.gpu.stand_ins import RandomWeights
from lab.inflate.model import PRESETS, Shape
from lab.runner import Document, Run, share

SHAPES = {"tiny": (Shape(64, 2, 4, 2, 16, 96), 200), "1b": (PRESETS["1b"], 49152), "8b": (PRESETS["8b"], 128256)}
HEAD = Budget(4, 4)  # of drafts of the random head, none of which is accepted: what passes over chains cost
Texts = list[list[int]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    share(parser, device="cuda", max_tokens=96, repeats=3)
    add("--shape", choices=[*SHAPES], default="8b")
    add("--adapters", type=int, default=16)
    add("--rank", type=int, default=16)
    add("--batch", type=int, default=32)
    add("--drafters", default="none,ngram,head", help="none, ngram, and head: a random one")


def measure(run: Run) -> Document:
    """Tokens/s of both, and their ratio, with every drafter."""
    flags, rows, equal = run.flags, [], True
    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(flags, Path(folder))
    names = [f"a{i % flags.adapters}" for i in range(flags.batch)] if flags.adapters else []
    for drafter in flags.drafters.split(","):
        found: dict[str, list[float]] = {"base": [], "adapters": []}
        for turn in range(-1, flags.repeats):  # the first captures what was not captured yet
            texts, seconds = dict[str, Texts](), dict[str, float]()
            for kind, own in (("base", [None] * flags.batch), ("adapters", names)):
                texts[kind], seconds[kind] = _write(engine, drafter, own, flags.max_tokens)
                if turn >= 0:
                    found[kind].append(flags.batch * flags.max_tokens / seconds[kind])
            equal &= texts["base"] == texts["adapters"]
        ratios = [mixed / base for base, mixed in zip(found["base"], found["adapters"], strict=True)]
        rows.append({"drafter": drafter, "tokens_per_s": found, "ratios": ratios})
        run.say(
            f"{drafter}: {median(found['adapters']):,.0f} tokens/s with {flags.adapters} adapters, "
            f"{median(found['base']):,.0f} without: {median(ratios):.3f}x ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    return {"rows": rows, "equal": equal}


def _engine(flags: argparse.Namespace, folder: Path) -> Engine:
    shape, vocab_size = SHAPES[flags.shape]
    device = torch.device(flags.device)
    weights = RandomWeights(shape, vocab_size, False, flags.device)
    target = CudaDecoder(
        DecoderConfig.from_hf(weights.config),
        weights,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        device=device,
        kv_slots=64_000,
        greedy_walk=device_walk(device),
        sampling=SampledTokens(),
    )
    pairs = {
        name: (torch.randn(flags.rank, size[1]).bfloat16(), torch.zeros(size[0], flags.rank).bfloat16())
        for name, size in weights.shapes.items()
        if "_proj" in name
    }
    Adapter("random", flags.rank, 1.0, pairs).write(folder)
    folders = {f"a{i}": str(folder) for i in range(flags.adapters)}
    config = EngineConfig(max_batch=flags.batch, max_length=1024, adapters=folders)
    engine = make_engine(target, frozenset(), SpeculativeConfig(drafter="none"), config)
    if "head" in flags.drafters:
        engine.drafters.add("head", make_drafter(target, random_head(target), None))
    return engine


def _write(engine: Engine, drafter: str, own: Sequence[str | None], tokens: int) -> tuple[Texts, float]:
    texts = dict[int, list[int]]()
    for i, adapter in enumerate(own):
        prompt = tuple((7 * i + 3 * j) % 97 for j in range(64))
        params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        budget = HEAD if drafter == "head" else None
        texts[engine.submit(Request(prompt, params, drafter=drafter, budget=budget, adapter=adapter))] = []
    started = perf_counter()
    while engine.busy:
        for event in engine.step():
            texts[event.seq_id] += event.tokens
    return list(texts.values()), perf_counter() - started
