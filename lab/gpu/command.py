"""Time of passes, rounds and whole texts on this GPU (`make bench-gpu`; needs torch and transformers).

First t(n), the time of one pass over n nodes per sequence, for three shapes with random weights and several batch
sizes, beside the time that reading the weights takes at the measured copy rate; whole rounds with a head of one
layer; and passes behind a long context. Then texts of an inflated model (`gpu/texts.py`), with transformers' `generate`
beside them.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from forerun.cli.bench import words
from forerun.core.errors import InvalidInput
from forerun.core.types import Needs, TreeBatch
from forerun.measure.bench.batches import SIZES, parse_batches
from forerun.models.config import DecoderConfig
from forerun.models.cuda.plan import ROW_SIZES
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import WeightKind
from forerun.testing import FakeSeq
from forerun.verify.greedy import device_walk
from lab.batch_report import read_rival, show_batches
from lab.gpu.rounds import measure_long_context, measure_rounds, seconds_of
from lab.gpu.stand_ins import RandomWeights
from lab.gpu.texts import measure_texts
from lab.inflate.heads import OWN
from lab.inflate.model import PRESETS, Shape
from lab.plots import load_pyplot
from lab.runner import Document, Run, picture, share

SHAPES = {"135m": (Shape(576, 30, 9, 3, 64, 1536), 49152), "1b": (PRESETS["1b"], 49152)}
SHAPES |= {name: (PRESETS[name], 128256) for name in ("8b", "70b")}
NODES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 96, 128, 256)
QUICK_NODES = (1, 8, 32, 64)
BATCHES = (1, 8, 32, 64)
CONTEXT = 512
KINDS: tuple[WeightKind, ...] = ("plain", "int8", "fp8", "w4")  # of weights


def copy_rate() -> float:
    """Bytes per second of a large copy on the device, read and written bytes counted."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    into = torch.empty_like(source)
    into.copy_(source)
    return 2 * source.nbytes / seconds_of(lambda: into.copy_(source), 10)


def random_target(name: str, kind: WeightKind) -> CudaDecoder:
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
    if not given.skip_rounds and kind == "plain":
        result["rounds"] = measure_rounds(target, name, batches=(1,) if given.quick else (1, 8))
    if given.long and name != "135m":
        result["long"] = measure_long_context(target, name)
    del target
    gc.collect()  # graphs and their buffers hold each other
    torch.cuda.empty_cache()
    return result


def measure_passes(target: CudaDecoder, name: str, kind: WeightKind, rate: float, quick: bool) -> dict[str, Any]:
    """t(n) of one shape: the pass on the device, and the whole call of `score` with the argmax on the host."""
    layers = [tensor for layer in target.model.layers for tensor in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    read = sum(tensor.nbytes for tensor in (*layers, target.model.head))
    numbers = sum(tensor.shape.numel() for tensor in (*layers, target.model.head))
    rows = []
    for batch in BATCHES[: 1 if quick else None]:
        seqs = [FakeSeq(i, [(7 * i + j) % 997 for j in range(CONTEXT + 1)], max_length=700) for i in range(batch)]
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
    return {"shape": name, "weights": kind, "weights_ms": read / rate * 1e3, "weight_bytes": read, "passes": rows}


def measure_prefill(target: CudaDecoder, name: str, texts: int = 8, length: int = 1500) -> dict[str, Any]:
    """Time of prefilling several prompts in one batch."""
    seqs = [FakeSeq(i, [(7 * i + j) % 997 for j in range(length + 1)], max_length=length + 2) for i in range(texts)]
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
    print(f"{name:>5} prefill of {texts} x {length} tokens: {seconds * 1e3:.1f} ms, {rate:,.0f} tokens/s", flush=True)
    return {"texts": texts, "length": length, "ms": seconds * 1e3, "tokens_per_s": rate}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", default="135m,1b,8b", help="shapes to time passes of; empty = none")
    add("--weights", default="plain", help="kinds of weights: plain, int8, fp8, w4")
    add("--quick", action="store_true", help="few sizes of passes; texts shorter, no random trees, no transformers")
    add("--long", action="store_true", help="passes behind 32k tokens too")
    add("--skip-rounds", action="store_true", help="no rounds with a head")
    share(parser, plot=None)
    group = parser.add_argument_group("texts")
    share(group, model="smollm2", suite="builtin", limit=8, max_tokens=None, repeats=1)
    share(group, batches=",".join(map(str, SIZES)))
    add = group.add_argument
    add("--preset", default="8b", choices=[*PRESETS, OWN], help="shape to inflate the model to")
    add("--text-weights", default="plain", choices=[*KINDS, "file"], help="of the target; file: as it has them")
    add("--head", type=Path, help="folder of its EAGLE-3 head; default: the one in the package")
    add("--head-kinds", default="int8", help="kinds of the head's weights: plain, int8, fp8, w4")
    add("--forms", default="adaptive", help="drafts of the head: adaptive, or nodes:depth:width, by comma")
    add("--texts-per-place", type=int, default=8, help="texts per place in the batch")
    add("--vllm", type=Path, metavar="FILE", help="another engine's figures, to show beside ours")
    add("--write-prompts", type=Path, metavar="FILE", help="write the prompts' token ids there, as JSONL")
    add("--batch-plot", type=Path, metavar="PATH", help="draw tokens/s and time per token by batch size, as PNG")
    add("--only-default", action="store_true", help="plain and the default drafter alone")
    add("--mixed", default="", help="drafters of every third request, by comma: a setup beside the default")
    add("--skip-random-trees", action="store_true", help="no trees that branch at random")
    add("--skip-transformers", action="store_true")


def settle(flags: argparse.Namespace) -> None:
    flags.max_tokens = flags.max_tokens or (64 if flags.quick else 96)
    flags.skip_transformers = flags.skip_transformers or flags.quick
    flags.skip_random_trees = flags.skip_random_trees or flags.quick


def measure(run: Run) -> Document:
    flags = run.flags
    # a mistake there shows before minutes are spent
    rival = [] if flags.vllm is None else read_rival(flags.vllm)
    parse_batches(flags.batches)
    kinds = [kind for kind in KINDS if kind in words(flags.weights)]
    if not torch.cuda.is_available():
        raise InvalidInput("this benchmark needs a CUDA device and torch sees none; use `python -m lab cpu`")
    rate = copy_rate()
    print(f"{run.facts['gpu']}: copies {rate / 1e12:.2f} TB/s; rows in bf16, {CONTEXT} tokens of context")
    found: Document = {"copy_tb_per_s": rate / 1e12, "context": CONTEXT}
    found["shapes"] = [measure_shape(name, kind, rate, flags) for name in words(flags.shapes) for kind in kinds]
    if flags.model:
        found["texts"] = measure_texts(flags) | {"rival": [asdict(row) for row in rival]}
        found["equal"] = not found["texts"]["differing"]
    return found


def show(document: Document, flags: argparse.Namespace) -> None:
    """The table of texts, and plots where they were asked for."""
    if (file := picture(flags.plot)) is not None:
        draw_passes(document, file)
    if "texts" in document:
        facts = document["conditions"]
        title = f"{flags.preset} shape on {facts['gpu']}, {facts['date'][:10]}, commit {facts['commit']}"
        show_batches(document["texts"], picture(flags.batch_plot), title)


def draw_passes(document: Mapping[str, Any], file: Path) -> None:
    """One panel per shape, one line per batch size and kind; dotted: reading the weights at the copy rate."""
    pyplot = load_pyplot()
    names = list(dict.fromkeys(shape["shape"] for shape in document["shapes"]))
    if not names:
        return
    figure, panels = pyplot.subplots(1, len(names), figsize=(4.6 * len(names), 3.8), squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        for shape in (shape for shape in document["shapes"] if shape["shape"] == name):
            for batch in dict.fromkeys(row["batch"] for row in shape["passes"]):
                rows = [row for row in shape["passes"] if row["batch"] == batch]
                label = f"{shape['weights']} weights, batch {batch}"
                panel.plot([row["nodes"] for row in rows], [row["pass_ms"] for row in rows], marker="o", label=label)
            panel.axhline(shape["weights_ms"], linestyle=":", color="grey", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        panel.set(title=f"{name} shape", xlabel="nodes per sequence", ylabel="ms per pass")
        panel.legend(fontsize=7)
    gpu = document["conditions"].get("gpu", "")
    figure.suptitle(f"One pass on {gpu}, {document['context']} tokens of context", fontsize=10)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
