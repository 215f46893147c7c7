"""Times of GGUF weights kept packed: passes and products of an 8B shape in mixtures of types, and texts of a real file.

Weights of the shape are random. A line of the first part is a mixture, with the bytes that a pass reads; `--parts` adds
the products alone, each over the weights of all layers in turn. `--file` writes texts from a file, packed and in bf16.
On a GPU: python -m tests.gpu.gguf_times [--file model.gguf]
"""

from __future__ import annotations

import argparse
import gc
from math import prod
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.cli.bench import words
from forerun.core.types import Needs, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.cuda.cubin import products as cubin
from forerun.models.cuda.cubin.products import Products
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import Strips
from forerun.models.families import FAMILIES
from forerun.models.load.gguf import GgufFile, TensorInfo
from forerun.models.load.gguf_names import Origin
from forerun.models.load.quants import LAYOUTS, Blocks
from forerun.models.load.weights import GgufWeights
from forerun.testing import FakeSeq
from forerun.verify.greedy import device_walk
from lab.gpu.command import SHAPES, copy_rate, measure_prefill, random_target
from lab.gpu.rounds import seconds_of
from lab.gpu.stand_ins import RandomWeights

KINDS = {layout.name: kind for kind, layout in LAYOUTS.items()}
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # places
ROWS = (1, 8, 16, 32, 64, 128)
CONTEXT = 512


class RandomGguf(GgufWeights):
    """Weights of a Llama of some shape in a mixture of types, made on the device: enough to time a pass."""

    def __init__(self, name: str, mixture: str) -> None:
        shape, vocabulary = SHAPES[name]
        shaped = RandomWeights(shape, vocabulary, False, "cuda")
        self.config = shaped.config
        tensors = {
            key: TensorInfo(KINDS[self._type(key, mixture, shape.layers) if len(size) == 2 else "F32"], size, 0, 0)
            for key, size in shaped.shapes.items()
        }
        file = cast(GgufFile, SimpleNamespace(tensors=tensors, path=Path("random.gguf")))
        super().__init__(file, {key: Origin(key) for key in tensors}, FAMILIES["llama"], "cuda")

    @staticmethod
    def _type(name: str, mixture: str, layers: int) -> str:
        """As llama.cpp gives them out: half of some tensors get more bits in a K_M file."""
        if not mixture.endswith("_M"):
            return mixture
        if "lm_head" in name or "embed" in name:
            return "Q6_K"
        index = int(name.split(".")[2])
        more = index < layers // 8 or index >= 7 * layers // 8 or (index - layers // 8) % 3 == 2
        return "Q6_K" if more and ("v_proj" in name or "down_proj" in name) else mixture.removesuffix("_M")

    def on(self, device: torch.device | str) -> RandomGguf:
        return self

    def _packed(self, name: str) -> Blocks:
        info = self.file.tensors[name]
        layout = LAYOUTS[info.kind]
        if layout.name == "F32":
            return Blocks(info.kind, info.shape, torch.ones(info.shape, device="cuda").view(torch.uint8).flatten())
        count = prod(info.shape) // layout.weights
        data = torch.randint(0, 256, (count, layout.bytes), dtype=torch.uint8, device="cuda")
        small = torch.full((1,), 2e-5, dtype=torch.float16, device="cuda").view(torch.uint8)
        for place in SCALES[layout.name]:
            data[:, place : place + 2] = small
        return Blocks(info.kind, info.shape, data.flatten())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", default="8b", choices=[*SHAPES], help="shape of the model; default: %(default)s")
    add("--mixtures", default="bf16,Q4_K_M,Q8_0", help="by comma; default: %(default)s; empty = none")
    add("--parts", action="store_true", help="also the products of one row, each by itself")
    add("--simple", default="", help="another kernel in place of that for one row: 8 or 8_simple")
    add("--file", default="", help="a GGUF file to write texts from")
    add("--drafters", default="none", help="that write from the file, by comma; default: %(default)s")
    add("--tokens", type=int, default=400, help="of a text; default: %(default)s")
    flags = parser.parse_args()
    if flags.simple:
        found = cubin._function
        cubin._function = lambda kind, name: found(kind, flags.simple if name == "1" else name)
    if flags.mixtures:
        rate = copy_rate()
        print(f"copy rate {rate / 1e12:.2f} TB/s")
        for mixture in words(flags.mixtures):
            _passes(flags.shape, mixture, rate, flags.parts)
    for drafter in words(flags.drafters) if flags.file else ():
        for dtype in ("bfloat16", "gguf"):
            _texts(flags.file, dtype, drafter, flags.tokens)


def _target(shape: str, mixture: str) -> CudaDecoder:
    if mixture == "bf16":
        return random_target(shape, "plain")
    weights = RandomGguf(shape, mixture)
    return CudaDecoder(
        DecoderConfig.from_hf(weights.config), weights, dtype=torch.bfloat16, kv_slots=64_000, weight_kind="file",
        greedy_walk=device_walk(torch.device("cuda")),
    )  # fmt: skip


def _passes(shape: str, mixture: str, rate: float, parts: bool) -> None:
    started = perf_counter()
    target = _target(shape, mixture)
    loading = perf_counter() - started
    target.compile_ahead(CONTEXT)  # side by side
    model = target.model
    by_name = {name: [getattr(layer, name) for layer in model.layers] for name in ("qkv", "o", "gate_up", "down")}
    by_name["head"] = [model.head]
    read = sum(weight.nbytes for weights in by_name.values() for weight in weights)
    times = dict[int, float]()
    seq = FakeSeq(1, [(7 * j) % 997 for j in range(CONTEXT + 1)], max_length=900)
    target.prefill([seq], Needs())
    for count in ROWS:
        chain = [seq.tokens[-1], *range(1, count)]
        target.score([seq], TreeBatch.chains([chain]), Needs())
        times[count] = seconds_of(target.passes.replay_last, 20)
    target.release(seq)
    told = ", ".join(f"{count} rows {seconds * 1e3:.3f} ms" for count, seconds in times.items())
    share = read / rate / times[1]
    print(
        f"{mixture}: {read / 1e9:.2f} GB, loaded in {loading:.0f} s: {told}; {share:.0%} of the copy rate", flush=True
    )
    measure_prefill(target, shape)
    if parts and mixture != "bf16":
        for name, weights in by_name.items():
            _product(name, weights, rate)
    del target, model, by_name
    gc.collect()
    torch.cuda.empty_cache()


def _product(name: str, weights: list[Strips], rate: float) -> None:
    products = Products(torch.device("cuda"))
    for count in (1, 64):
        rows = torch.randn(128, weights[0].depth, device="cuda").bfloat16()
        out = torch.empty(128, weights[0].outputs, device="cuda")

        def all_layers(rows: Tensor = rows, out: Tensor = out, count: int = count) -> None:
            for weight in weights:
                products.multiply(weight, rows, count, out)

        all_layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_layers()
        seconds = seconds_of(graph.replay, 10)
        read = sum(weight.nbytes for weight in weights)
        kinds = "/".join(sorted({weight.format for weight in weights}))
        told = f"{seconds / len(weights) * 1e6:.1f} us each, {read / rate / seconds:.0%} of the copy rate"
        print(f"  {name} ({kinds}), {count} rows: {told}", flush=True)


def _texts(file: str, dtype: str, drafter: str, tokens: int) -> None:
    started = perf_counter()
    with LLM(file, device="cuda", dtype=dtype, drafter=drafter) as llm:  # type: ignore[arg-type]
        loading = perf_counter() - started
        for batch in (1, 8, 32):
            prompts = [f"Write a Python class number {i} that parses INI files, with tests.\n" for i in range(batch)]
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            best = 0.0
            for _ in range(3):
                started = perf_counter()
                written = sum(len(done.token_ids) for done in llm.generate(prompts, params))
                best = max(best, written / (perf_counter() - started))
            print(
                f"{file} {dtype} {drafter}, {batch} at once: {best:.0f} tokens/s (loaded in {loading:.0f} s)",
                flush=True,
            )
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
