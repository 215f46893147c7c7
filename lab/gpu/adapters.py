"""What LoRA adapters cost: a batch of requests of many adapters beside the same batch of the base.

    python -m lab adapters --shape 8b --adapters 16 --rank 16 --batch 32 --json adapters.json

Weights are random. While it is timed, the adapters' second matrices are zeros: they change no text, and drafts are
accepted as often as the base's, at the cost that any numbers would have. Base and adapters take turns. Then adapters of
random numbers write a mixed batch, whose texts must be those that each adapter writes alone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request
from forerun.engine.engine import Engine
from forerun.models.adapters import Adapter, AdapterPool
from forerun.models.config import DecoderConfig
from forerun.models.cuda.target import CudaDecoder
from forerun.verify.greedy import device_walk
from forerun.verify.sampled import SampledTokens
from lab.gpu.rounds import make_drafter, random_head
from lab.gpu.stand_ins import RandomWeights
from lab.inflate.model import PRESETS, Shape
from lab.runner import Document, Run, share

SHAPES = {"tiny": (Shape(64, 2, 4, 2, 16, 96), 200), "1b": (PRESETS["1b"], 49152), "8b": (PRESETS["8b"], 128256)}
HEAD = Budget(4, 4)  # of drafts of the random head, none of which is accepted: what passes over chains cost
STRONG = 0.3  # adapters of random numbers beside their base: strong enough for other texts
Texts = list[list[int]]
Asked = tuple[int, str | None]  # which prompt, which adapter


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    share(parser, device="cuda", max_tokens=96, repeats=3)
    add("--shape", choices=[*SHAPES], default="8b")
    add("--adapters", type=int, default=16)
    add("--rank", type=int, default=16)
    add("--batch", type=int, default=32)
    add("--drafters", default="none,ngram", help="none, ngram, and head: a random one")


def measure(run: Run) -> Document:
    """Tokens/s of both, and their ratio, with every drafter; and how many texts a mixed batch changes."""
    flags, rows, equal = run.flags, [], True
    target, weights = _target(flags)
    with tempfile.TemporaryDirectory() as folder:
        _adapter(weights, flags.rank, 0, 0.0).write(Path(folder))
        engine = _engine(target, flags, {f"a{i}": folder for i in range(flags.adapters)})
    run.say(f"ready after {perf_counter() - run.started:.0f} s")
    base: list[Asked] = [(i, None) for i in range(flags.batch)]
    mixed: list[Asked] = [(i, f"a{i % flags.adapters}") for i in range(flags.batch)]
    for drafter in flags.drafters.split(","):
        found: dict[str, list[float]] = {"base": [], "adapters": []}
        for turn in range(-1, flags.repeats):  # the first captures what was not captured yet
            texts = dict[str, Texts]()
            for kind, asked in (("base", base), ("adapters", mixed)):
                texts[kind], seconds = _write(engine, drafter, asked, flags.max_tokens)
                if turn >= 0:
                    found[kind].append(flags.batch * flags.max_tokens / seconds)
            equal &= texts["base"] == texts["adapters"]
        ratios = [other / plain for plain, other in zip(found["base"], found["adapters"], strict=True)]
        rows.append({"drafter": drafter, "tokens_per_s": found, "ratios": ratios})
        run.say(
            f"{drafter}: {median(found['adapters']):,.0f} tokens/s with {flags.adapters} adapters, "
            f"{median(found['base']):,.0f} without: {median(ratios):.3f}x ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    differing = _differing(run, engine, weights, mixed)
    return {"rows": rows, "zeros_equal": equal, "differing": differing, "equal": equal and not any(differing.values())}


def _differing(run: Run, engine: Engine, weights: RandomWeights, mixed: Sequence[Asked]) -> dict[str, int]:
    """Texts of a mixed batch, by drafter, that are not those of each adapter's requests alone without drafts."""
    flags, adapters = run.flags, engine.adapters
    assert isinstance(adapters, AdapterPool)
    for i, name in enumerate(adapters.names):  # others take their places: nothing is captured again
        adapters.remove(name)
        with tempfile.TemporaryDirectory() as folder:
            _adapter(weights, flags.rank, i + 1, STRONG).write(Path(folder))
            adapters.add(name, folder)
    alone: Texts = [[] for _ in mixed]
    for name in adapters.names:
        places = [i for i, (_, own) in enumerate(mixed) if own == name]
        texts = _write(engine, "none", [mixed[i] for i in places], flags.max_tokens)[0]
        for place, text in zip(places, texts, strict=True):
            alone[place] = text
    plain = _write(engine, "none", [(prompt, None) for prompt, _ in mixed], flags.max_tokens)[0]
    changed = sum(own != other for own, other in zip(alone, plain, strict=True))
    found = dict[str, int]()
    for drafter in dict.fromkeys(["none", *flags.drafters.split(",")]):
        texts = _write(engine, drafter, mixed, flags.max_tokens)[0]
        found[drafter] = sum(one != other for one, other in zip(texts, alone, strict=True))
        run.say(f"{drafter}: {found[drafter]} of {len(mixed)} texts differ from each adapter alone")
    run.say(f"{changed} of {len(mixed)} texts differ from the base's (they should)")
    assert changed > 0, "the adapters change nothing: the comparison says nothing"
    return found


def _target(flags: argparse.Namespace) -> tuple[CudaDecoder, RandomWeights]:
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
    return target, weights


def _adapter(weights: RandomWeights, rank: int, seed: int, strength: float) -> Adapter:
    """Of numbers that repeat, each matrix from another place on: a billion random ones would take a minute."""
    some = torch.randn(999_983, generator=torch.Generator().manual_seed(seed)).bfloat16()
    pairs = dict[str, tuple[Tensor, Tensor]]()

    def numbers(rows: int, columns: int, factor: float) -> Tensor:
        first = 7919 * len(pairs) % len(some)
        repeats = -(-(first + rows * columns) // len(some))
        return some.repeat(repeats)[first : first + rows * columns].view(rows, columns) * factor

    for name, (outputs, inputs) in ((name, size) for name, size in weights.shapes.items() if "_proj" in name):
        pairs[name] = numbers(rank, inputs, inputs**-0.5), numbers(outputs, rank, strength)
    return Adapter("random", rank, 1.0, pairs)


def _engine(target: CudaDecoder, flags: argparse.Namespace, folders: dict[str, str]) -> Engine:
    config = EngineConfig(max_batch=flags.batch, max_length=1024, adapters=folders)
    engine = make_engine(target, frozenset(), SpeculativeConfig(drafter="none"), config)
    if "head" in flags.drafters:
        engine.drafters.add("head", make_drafter(target, random_head(target), None))
    return engine


def _write(engine: Engine, drafter: str, asked: Sequence[Asked], tokens: int) -> tuple[Texts, float]:
    texts = dict[int, list[int]]()
    for number, adapter in asked:
        prompt = tuple((7 * number + 3 * j) % 97 for j in range(64))
        params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        budget = HEAD if drafter == "head" else None
        texts[engine.submit(Request(prompt, params, drafter=drafter, budget=budget, adapter=adapter))] = []
    started = perf_counter()
    while engine.busy:
        for event in engine.step():
            assert event.error is None, event.error
            texts[event.seq_id] += event.tokens
    return list(texts.values()), perf_counter() - started
