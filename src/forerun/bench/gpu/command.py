"""Time of passes, rounds and whole texts on this GPU (`python -m forerun.bench.gpu`; needs torch and transformers).

First t(n), the time of one pass over n nodes per sequence, for three shapes with random weights and several batch
sizes, beside the time that reading the weights takes at the measured copy rate; whole rounds with a head of one
layer; and passes behind a long context. Then texts of an inflated model (`gpu/texts.py`), with transformers' `generate`
beside them. The last line of stdout is one JSON document, or, where that goes to a file, a table by batch size.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from forerun.bench.batches.report import draw, table
from forerun.bench.batches.rival import RivalRow, read_rival
from forerun.bench.batches.sweep import SIZES, parse_batches
from forerun.bench.gpu.inflated import OWN
from forerun.bench.gpu.plot import draw_passes
from forerun.bench.gpu.rounds import measure_long_context, measure_rounds, seconds_of
from forerun.bench.gpu.stand_ins import RandomWeights
from forerun.bench.gpu.texts import measure_texts
from forerun.bench.machine import machine_facts
from forerun.errors import InvalidInput
from forerun.models.config import DecoderConfig
from forerun.models.cuda.packed import WeightKind
from forerun.models.cuda.plan import ROW_SIZES
from forerun.models.cuda.target import CudaDecoder
from forerun.models.inflate import PRESETS, Shape
from forerun.testing import FakeSeq
from forerun.types import Needs, TreeBatch
from forerun.verify.greedy import device_walk

SHAPES = {
    "135m": (Shape(576, 30, 9, 3, 64, 1536), 49152),
    "1b": (PRESETS["1b"], 49152),
    "8b": (PRESETS["8b"], 128256),
}
NODES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 96, 128, 256)
QUICK_NODES = (1, 8, 64)
BATCHES = (1, 8, 32, 64)
CONTEXT = 512


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
    return CudaDecoder(
        config,
        weights,
        dtype=torch.bfloat16,
        kv_slots=64_000,
        weight_kind=kind,
        greedy_walk=device_walk(torch.device("cuda")),
    )


def measure_shape(name: str, kind: WeightKind, rate: float, given: argparse.Namespace) -> dict[str, Any]:
    """Passes, rounds and a long context of one shape."""
    target = random_target(name, kind)
    result = measure_passes(target, name, kind, rate, given.quick)
    result["prefill"] = measure_prefill(target, name)
    if given.products and kind == "plain":
        from forerun.bench.gpu.products import measure_products  # needs triton

        result["products"] = measure_products(target, name, given.sweep)
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
    numbers = sum(tensor.shape.numel() for tensor in (*layers, target.model.head))
    rows = []
    for batch in BATCHES[: 1 if quick else None]:
        seqs = [
            FakeSeq(i, [(7 * i + j) % 997 for j in range(CONTEXT + 1)], max_length=700) for i in range(batch)
        ]
        target.prefill(seqs, Needs())
        for nodes in [n for n in (QUICK_NODES if quick else NODES) if n * batch in ROW_SIZES]:
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
            flops = 2.0 * numbers * batch * nodes
            row |= {"share_of_copy_rate": read / rate / device, "tflops": flops / device / 1e12}
            rows.append(row)
            print(
                f"{name:>5} {kind} batch {batch:2d} x {nodes:3d} nodes: {device * 1e3:7.3f} ms, with the host "
                f"{whole * 1e3:7.3f} ms, {read / rate / device:4.0%} of the copy rate, {row['tflops']:4.0f} TFLOP/s",
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


def measure_prefill(target: CudaDecoder, name: str, texts: int = 8, length: int = 1500) -> dict[str, Any]:
    """Time of prefilling several prompts in one batch."""
    seqs = [
        FakeSeq(i, [(7 * i + j) % 997 for j in range(length + 1)], max_length=length + 2)
        for i in range(texts)
    ]
    seconds = 0.0
    for _ in range(2):  # the first time captures
        torch.cuda.synchronize()
        started = perf_counter()
        target.prefill(seqs, Needs())
        torch.cuda.synchronize()
        seconds = perf_counter() - started
        for seq in seqs:
            target.release(seq)
    rate = texts * length / seconds
    print(
        f"{name:>5} prefill of {texts} x {length} tokens: {seconds * 1e3:.1f} ms, {rate:,.0f} tokens/s",
        flush=True,
    )
    return {"texts": texts, "length": length, "ms": seconds * 1e3, "tokens_per_s": rate}


def _add_text_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", default="smollm2", help="checkpoint to inflate; empty = no texts")
    group.add_argument("--preset", default="8b", choices=[*PRESETS, OWN], help="shape to inflate it to")
    group.add_argument(
        "--head", type=Path, help="folder of its EAGLE-3 head; default: the one in the package"
    )
    group.add_argument("--head-kinds", default="int8", help="kinds of the head's weights: plain, int8")
    group.add_argument(
        "--forms", default="adaptive", help="drafts of the head: adaptive, or nodes:depth:width, by comma"
    )
    group.add_argument("--suite", default="builtin", help="prompts: builtin, or a JSONL file")
    group.add_argument("--limit", type=int, default=8, help="prompts per task")
    group.add_argument("--max-tokens", type=int, help="new tokens per text; default: 96, with --quick 64")
    group.add_argument("--batches", default=",".join(map(str, SIZES)), help="sequences at once")
    group.add_argument("--texts-per-place", type=int, default=8, help="texts per place in the batch")
    group.add_argument(
        "--vllm", type=Path, metavar="FILE", help="another engine's figures, to show beside ours"
    )
    group.add_argument(
        "--write-prompts", type=Path, metavar="FILE", help="write the prompts' token ids there, as JSONL"
    )
    group.add_argument(
        "--batch-plot",
        type=Path,
        metavar="FILE",
        help="draw tokens/s and time per token by batch size, as PNG",
    )
    group.add_argument("--only-default", action="store_true", help="plain and the default drafter alone")
    group.add_argument("--skip-random-trees", action="store_true", help="no trees that branch at random")
    group.add_argument("--skip-transformers", action="store_true")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.gpu", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shapes", default="135m,1b,8b", help="shapes to time passes of; empty = none")
    parser.add_argument("--weights", default="plain", help="kinds of weights: plain, int8, fp8")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few sizes of passes; texts shorter, without random trees and transformers",
    )
    parser.add_argument("--long", action="store_true", help="passes behind 32k tokens too")
    parser.add_argument("--products", action="store_true", help="every product by number of rows")
    parser.add_argument("--sweep", action="store_true", help="with --products: try other tiles")
    parser.add_argument("--skip-rounds", action="store_true", help="no rounds with a head")
    parser.add_argument("--json", type=Path, help="where to write the document, too")
    parser.add_argument("--plot", type=Path, help="where to draw t(n), as PNG")
    _add_text_flags(parser.add_argument_group("texts"))
    given = parser.parse_args()
    given.max_tokens = given.max_tokens or (64 if given.quick else 96)
    given.skip_transformers = given.skip_transformers or given.quick
    given.skip_random_trees = given.skip_random_trees or given.quick
    # a mistake there shows before minutes are spent
    rival = [] if given.vllm is None else read_rival(given.vllm)
    parse_batches(given.batches)
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
        if rival:
            document["texts"]["rival"] = [asdict(row) for row in rival]
    finish(document, given, rival)


def finish(document: dict[str, Any], given: argparse.Namespace, rival: Sequence[RivalRow]) -> None:
    """Write and draw what was asked for. The last lines are the table, or, where no file was named, the document."""
    if given.plot is not None:
        draw_passes(document, given.plot)
    rows = document.get("texts", {}).get("rows", [])
    if given.batch_plot is not None and rows:
        facts = document["machine"]
        title = f"{given.preset} shape on {facts['gpu']}, {facts['date'][:10]}, commit {facts['commit']}"
        draw(rows, given.batch_plot, title, rival)
    if given.json is not None:
        given.json.write_text(json.dumps(document), encoding="utf-8")
    else:
        print(json.dumps(document))
    if rows and given.json is not None:
        print(table(rows, rival))
