"""What a pass and a text cost on this GPU (`python -m forerun.bench.gpu`; needs torch, transformers and this package).

First t(n), the time of one pass over n nodes per sequence, for three shapes with random weights and several batch
sizes, beside the time that reading the weights takes at the measured copy rate; whole rounds with a head of one
layer; and passes behind a long text. Then texts: an 8B-shaped model with the default model's function (inflated:
same tokens, same acceptance, the cost of the large one) writes the built-in prompts without drafting, with n-gram
drafts, with trees that branch at random and with a trained head (`--head`, inflated like the model), alone and in a
batch; all texts must be equal to the last bit. transformers' own `generate` stands beside it. The last line of stdout
is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from forerun import registry
from forerun.bench.gpu_peer import time_transformers
from forerun.bench.gpu_plot import draw_passes
from forerun.bench.gpu_rounds import FORMS, make_drafter, measure_long_context, measure_rounds, seconds_of
from forerun.bench.gpu_stand_ins import RandomWeights
from forerun.bench.machine import machine_facts
from forerun.bench.suites import load_suite
from forerun.build import make_engine
from forerun.drafters.eagle.files import read_head
from forerun.drafters.eagle.inflate import inflate_head
from forerun.engine.engine import Engine
from forerun.errors import InvalidInput
from forerun.models.config import DecoderConfig
from forerun.models.cuda.packed import WeightKind
from forerun.models.cuda.target import CudaDecoder
from forerun.models.inflate import PRESETS, InflatedWeights, Shape
from forerun.models.load.checkpoint import open_checkpoint
from forerun.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.testing import FakeSeq
from forerun.types import Budget, Needs, Request, TreeBatch

SHAPES = {
    "135m": (Shape(576, 30, 9, 3, 64, 1536), 49152),
    "1b": (PRESETS["1b"], 49152),
    "8b": (PRESETS["8b"], 128256),
}
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
QUICK_NODES = (1, 8, 64)
BATCHES = (1, 8, 32)
CONTEXT = 512
TREES = Budget(nodes=12, depth=6, width=3)
INFLATED = "inflated from smollm2: its tokens and acceptance at the cost of the larger shape"


def copy_rate() -> float:
    """Bytes per second of a large copy on the device, read and written bytes counted."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    into = torch.empty_like(source)
    into.copy_(source)
    return 2 * source.nbytes / seconds_of(lambda: into.copy_(source), 10)


def random_target(name: str, kind: WeightKind) -> CudaDecoder:
    """A target of one shape with random weights."""
    shape, vocab_size = SHAPES[name]
    weights = RandomWeights(shape, vocab_size, name == "135m", "cuda")
    config = DecoderConfig.from_hf(weights.config)
    return CudaDecoder(config, weights, dtype=torch.bfloat16, kv_slots=60_000, weight_kind=kind)


def measure_shape(name: str, kind: WeightKind, rate: float, given: argparse.Namespace) -> dict[str, Any]:
    """Passes, rounds and a long context of one shape."""
    target = random_target(name, kind)
    result = measure_passes(target, name, kind, rate, given.quick)
    if not given.skip_rounds and kind == "plain":
        result["rounds"] = measure_rounds(target, name, batches=(1,) if given.quick else (1, 8))
    if given.long and name != "135m":
        result["long"] = measure_long_context(target, name)
    del target
    gc.collect()  # graphs and their buffers hold each other
    torch.cuda.empty_cache()
    return result


def measure_passes(
    target: CudaDecoder, name: str, kind: WeightKind, rate: float, quick: bool
) -> dict[str, Any]:
    """t(n) of one shape: the pass on the device, and the whole call of `score` with the argmax on the host."""
    layers = [
        tensor for layer in target.model.layers for tensor in (layer.qkv, layer.o, layer.gate_up, layer.down)
    ]
    read = sum(tensor.nbytes for tensor in (*layers, target.model.head))
    rows = []
    for batch in BATCHES[: 1 if quick else None]:
        seqs = [
            FakeSeq(i, [(7 * i + j) % 997 for j in range(CONTEXT + 1)], max_length=700) for i in range(batch)
        ]
        target.prefill(seqs, Needs())
        for nodes in [n for n in (QUICK_NODES if quick else NODES) if n * batch <= 512]:
            trees = TreeBatch.chains([[seq.tokens[-1], *range(nodes - 1)] for seq in seqs])
            target.score(seqs, trees, Needs())
            device = seconds_of(target.passes.replay_last, 20)
            started = perf_counter()
            for _ in range(10):
                logits = target.score(seqs, trees, Needs()).logits
                assert logits is not None
                logits.argmax(-1).tolist()
            whole = (perf_counter() - started) / 10
            row = {"batch": batch, "nodes": nodes, "pass_ms": device * 1e3, "score_ms": whole * 1e3}
            rows.append({**row, "share_of_copy_rate": read / rate / device})
            print(
                f"{name:>5} {kind} batch {batch:2d} x {nodes:3d} nodes: {device * 1e3:7.3f} ms, with the host "
                f"{whole * 1e3:7.3f} ms, {read / rate / device:4.0%} of the copy rate",
                flush=True,
            )
        for seq in seqs:
            target.release(seq)
    return {
        "shape": name,
        "weights": kind,
        "weights_ms": read / rate * 1e3,
        "weight_bytes": read,
        "passes": rows,
    }


def write(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    drafter: str,
    batch: int,
    tokens: int,
    budget: Budget | None = None,
) -> tuple[list[list[int]], dict[str, float]]:
    """All texts, `batch` at a time, and what they took."""
    engine.max_batch = batch
    params = SamplingParams(max_tokens=tokens)
    torch.cuda.synchronize()
    started = perf_counter()
    requests = [Request(prompt, params, drafter=drafter, budget=budget) for prompt in prompts]
    ids = [engine.submit(request) for request in requests]
    texts: dict[int, list[int]] = {seq_id: [] for seq_id in ids}
    rounds = 0
    while engine.busy:
        for event in engine.step():
            texts[event.seq_id] += event.tokens
            rounds += 1
    seconds = perf_counter() - started
    count = sum(map(len, texts.values()))
    figures = {
        "tokens": count,
        "seconds": seconds,
        "tokens_per_s": count / seconds,
        "tokens_per_round": count / rounds,
    }
    return [texts[seq_id] for seq_id in ids], figures


def measure_texts(given: argparse.Namespace) -> dict[str, Any]:
    """Plain and drafted texts of the inflated model; every difference is shown with how near the tie was."""
    checkpoint = open_checkpoint(given.model)
    tokenizer = checkpoint.tokenizer()
    weights = InflatedWeights(checkpoint.config, checkpoint.weights, PRESETS["8b"], device="cuda")
    target = CudaDecoder(
        DecoderConfig.from_hf(weights.config), weights, dtype=torch.bfloat16, kv_slots=60_000
    )
    registry.drafters.register("answer_trees", "forerun.bench.gpu_stand_ins:AnswerTrees")
    speculative = SpeculativeConfig(drafter="ngram", budget=16)
    engine = make_engine(target, tokenizer.eos_ids, speculative, EngineConfig(max_length=4096), tokenizer)
    prompts = [tuple(tokenizer.chat_ids(item.messages)) for item in load_suite(limit=given.limit)]
    ways: dict[str, tuple[str, Budget | None]] = {"none": ("none", None), "ngram": ("ngram", None)}
    ways["answer_trees"] = "answer_trees", TREES
    if given.head is not None:
        config, small = read_head(given.head, kind="eagle3")
        head = inflate_head(config, small, PRESETS["8b"], device="cuda")
        for kind in given.head_kinds.split(","):
            engine.drafters.add(f"head {kind}", make_drafter(target, head, kind))
            ways |= {f"{kind} head, {label}": (f"head {kind}", budget) for label, budget in FORMS.items()}
    plain, runs, differing = _write_all(engine, prompts, given.max_tokens, ways)
    gaps = [_gap(target, prompts[i], plain[i], other) for i, other in differing]
    result = {
        "model": INFLATED,
        "prompts": len(prompts),
        "runs": runs,
        "differing": len(differing),
        "gaps": gaps,
    }
    if not given.skip_transformers:
        result["transformers_tokens_per_s"] = time_transformers(weights, prompts[:2])
        print(f"transformers generate: {result['transformers_tokens_per_s']:.1f} tokens/s")
    return result


def _write_all(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    ways: Mapping[str, tuple[str, Budget | None]],
) -> tuple[list[list[int]], list[dict[str, Any]], list[tuple[int, list[int]]]]:
    """Every way of writing, twice: the first time captures graphs. All are compared with plain texts, alone."""
    plain, _ = write(engine, prompts, "none", 1, tokens)
    trees: Any = engine.drafters.get("answer_trees")
    trees.answers = dict(zip(prompts, plain, strict=True))
    runs, differing = [], []
    for batch in (1, 8):
        for label, (drafter, budget) in ways.items():
            write(engine, prompts, drafter, batch, tokens, budget)
            texts, figures = write(engine, prompts, drafter, batch, tokens, budget)
            off = [(i, text) for i, text in enumerate(texts) if text != plain[i]]
            differing += off
            runs.append({"drafter": label, "batch": batch, "differing": len(off), **figures})
            print(
                f"8b {label:>20} batch {batch}: {figures['tokens_per_s']:7.1f} tokens/s, "
                f"{figures['tokens_per_round']:.2f} tokens per round, {len(off)} of {len(prompts)} texts differ",
                flush=True,
            )
    return plain, runs, differing


def _gap(target: CudaDecoder, prompt: tuple[int, ...], plain: list[int], other: list[int]) -> float:
    """How far apart the two likeliest tokens are where two texts part."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.gpu", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shapes", default="135m,1b,8b", help="shapes to time passes of; empty = none")
    parser.add_argument("--weights", default="plain", help="kinds of weights: plain, int8, fp8")
    parser.add_argument("--quick", action="store_true", help="few sizes, batch 1")
    parser.add_argument("--long", action="store_true", help="passes behind 32k tokens too")
    parser.add_argument("--skip-rounds", action="store_true", help="no rounds with a head")
    parser.add_argument("--model", default="smollm2", help="checkpoint to inflate; empty = no texts")
    parser.add_argument("--head", type=Path, help="folder of a trained EAGLE-3 head of that checkpoint")
    parser.add_argument("--head-kinds", default="int8", help="kinds of the head's weights")
    parser.add_argument("--limit", type=int, default=2, help="prompts per task")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--json", type=Path, help="where to write the document, too")
    parser.add_argument("--plot", type=Path, help="where to draw t(n), as PNG")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise InvalidInput("this benchmark needs a CUDA device and torch sees none; use forerun.bench.cpu")
    facts = {**machine_facts(), "gpu": torch.cuda.get_device_name()}
    rate = copy_rate()
    print(f"{facts['gpu']}: copies {rate / 1e12:.2f} TB/s; rows in bf16, {CONTEXT} tokens of context")
    document: dict[str, Any] = {"machine": facts, "copy_tb_per_s": rate / 1e12, "context": CONTEXT}
    document["shapes"] = [
        measure_shape(name, kind, rate, given)
        for name in given.shapes.split(",")
        for kind in given.weights.split(",")
        if name
    ]
    if given.model:
        document["texts"] = measure_texts(given)
    if given.json is not None:
        given.json.write_text(json.dumps(document), encoding="utf-8")
    if given.plot is not None:
        draw_passes(document, given.plot)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
