"""Passes and prompts behind contexts of several lengths, and attention alone in every way it may be shared out.

Weights are random. A row of the first table is a context; columns are one node, chains and trees. `--ways` times
attention of one layer behind long contexts under each number of rows, warps and stages, and says which are not of the
same bits as a pass that is not tiled.
On a GPU: python -m tests.gpu.attention_times
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.cli.bench import words
from forerun.core.tree import Topology, chain_of, topology_of
from forerun.core.types import Needs, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.cuda.compile.together import starts_early
from forerun.models.cuda.network import Run as Integers
from forerun.models.cuda.plan import MAX_ROWS, Plan, Size, Span, nodes_per_group, plan_pass
from forerun.models.cuda.steps.plain import in_bytes
from forerun.models.cuda.steps.tiles import Sharing, power_of_two, tiled_sharing
from forerun.models.cuda.target import CudaDecoder
from forerun.models.pages import PAGE
from forerun.models.slots import KV_DTYPES
from forerun.testing import FakeSeq
from forerun.verify.greedy import device_walk
from lab.gpu.command import SHAPES
from lab.gpu.rounds import seconds_of
from lab.gpu.stand_ins import RandomWeights

if TYPE_CHECKING:
    from forerun.models.cuda.steps.attention import Attention  # needs Triton

ROOM = 2048  # positions behind the longest context
TREES: dict[str, tuple[int, ...]] = {  # parents
    "1 node": (-1,),
    **{f"chain of {n}": (-1, *range(n - 1)) for n in (16, 64)},
    **{f"tree of {n}": (-1, *((i - 1) // 2 for i in range(1, n))) for n in (16, 64)},
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", default="8b", choices=[*SHAPES], help="shape of the model; default: %(default)s")
    add("--lengths", default="512,32000,128000", help="tokens of context, by comma; default: %(default)s")
    add("--prompts", default="32000", help="contexts whose prompts are read twice, and timed the second time")
    add("--kv-dtype", default="auto", choices=["auto", *KV_DTYPES], help="of the KV cache; default: %(default)s")
    add("--ways", action="store_true", help="time attention alone in every way, and no passes")
    flags = parser.parse_args()
    lengths = [int(word) for word in words(flags.lengths)]
    shape, vocabulary = SHAPES[flags.shape]
    weights = RandomWeights(shape, vocabulary, flags.shape == "135m", "cuda")
    weights.config["max_position_embeddings"] = max(lengths) + ROOM
    config = DecoderConfig.from_hf(weights.config)
    if flags.ways:
        for length in lengths:
            _ways(config, length, KV_DTYPES.get(flags.kv_dtype))
        return
    target = CudaDecoder(
        config, weights, dtype=torch.bfloat16, kv_slots=max(*lengths, 64 * 1024) + 2 * ROOM,
        kv_dtype=KV_DTYPES.get(flags.kv_dtype), greedy_walk=device_walk(torch.device("cuda")),
    )  # fmt: skip
    print(f"KV cache: {flags.kv_dtype}")
    _passes(target, lengths, [int(word) for word in words(flags.prompts)])


def _passes(target: CudaDecoder, lengths: list[int], prompts: list[int]) -> None:
    """A row for each context."""
    for length in sorted(lengths):
        seq = FakeSeq(length, [(7 * j) % 199 for j in range(length + 1)], max_length=length + 512)
        times = dict[str, float]()
        for timed in (False, True) if length in prompts else (True,):  # the first time captures
            torch.cuda.synchronize()
            started = perf_counter()
            target.prefill([seq], Needs())
            torch.cuda.synchronize()
            times["prompt"] = (perf_counter() - started) * 1e3
            if not timed:
                target.release(seq)
        for name, parents in TREES.items():
            tokens = [seq.tokens[-1], *range(len(parents) - 1)]
            chain = topology_of(parents).is_chain
            trees = TreeBatch.chains([tokens]) if chain else TreeBatch.trees([(tokens, list(parents))])
            target.score([seq], trees, Needs())
            times[name] = seconds_of(target.passes.replay_last, 20) * 1e3
        target.release(seq)
        if length <= 1024:
            times |= {f"{batch} roots": _roots(target, batch, length) for batch in (32, 64)}
        row = "  ".join(f"{name} {ms:.3f}" for name, ms in times.items())
        print(f"behind {length} tokens, ms:  {row}", flush=True)


def _roots(target: CudaDecoder, batch: int, length: int) -> float:
    """Milliseconds of a plain pass over so many sequences."""
    seqs = [FakeSeq(i, [(7 * i + j) % 199 for j in range(length + 1)], max_length=length + 8) for i in range(batch)]
    target.prefill(seqs, Needs())
    target.score(seqs, TreeBatch.chains([seq.tokens[-1:] for seq in seqs]), Needs())
    found = seconds_of(target.passes.replay_last, 20) * 1e3
    for seq in seqs:
        target.release(seq)
    return found


def _ways(config: DecoderConfig, length: int, kept: torch.dtype | None) -> None:
    """Attention of one layer in all ways: microseconds, and whether its bits are those of the first."""
    from forerun.models.cuda.steps.attention import Attention

    shape_of = config.heads, config.kv_heads, config.head_dim
    torch.manual_seed(0)
    pages = torch.randperm(length // PAGE + 40).tolist()
    kv = torch.randn(2, config.kv_heads, (length // PAGE + 40) * PAGE, config.head_dim, device="cuda").bfloat16()
    scales: Tensor | None = None
    if kept is not None:
        kv, scales = in_bytes(kv.float(), kept)
    queries = torch.randn(MAX_ROWS, config.heads * config.head_dim, device="cuda")
    queries = queries.bfloat16() if kept is None else queries.half()
    attention = Attention(config, length + ROOM, torch.device("cuda"), 0, starts_early(torch.device("cuda")))
    shapes = {name: topology_of(parents) for name, parents in TREES.items()}
    shapes |= {"prompt": chain_of(MAX_ROWS)}
    for name, shape in shapes.items():
        span, tiled_nodes = _span(shape, pages, length), nodes_per_group(*shape_of, tiled=True)
        plan = plan_pass([span], nodes_per_group(*shape_of))
        micros, wanted = _time(attention, plan, queries, kv, scales, None)
        print(f"{length:>7} {name:>11}: {micros:8.1f} us  not tiled", flush=True)
        plan = plan_pass(
            [span], nodes_per_group(*shape_of), lambda need: need.exactly(1, 0, 0), tiled_nodes=tiled_nodes
        )
        given = plan.size, power_of_two(config.heads // config.kv_heads), config.kv_heads, config.head_dim
        usual, old = (
            tiled_sharing(*given, attention.processors, kept_in_bytes=known) for known in (kept is not None, False)
        )
        others = _other(plan.size, usual) if kept is None else [old]
        for how in dict.fromkeys((usual, *others)):
            micros, out = _time(attention, plan, queries, kv, scales, how)
            flag = "" if torch.equal(out[: plan.rows], wanted[: plan.rows]) else "  BITS DIFFER"
            print(f"{length:>7} {name:>11}: {micros:8.1f} us  {_words(how)}{flag}", flush=True)


def _span(shape: Topology, pages: list[int], length: int) -> Span:
    count = len(shape.depths)
    return Span([1] * count, shape, pages[: (length + count) // PAGE + 1], length)


def _words(how: Sharing) -> str:
    kind = f"walked {how.walked}" if how.walked else "parts"
    most = f", at most {how.registers} registers" if how.registers else ""
    most += ", spread" * how.spread + ", copied" * how.copied
    return f"{how.rows} rows, {how.warps} warps, {how.stages} stages, {how.programs} programs, {kind}{most}"


def _other(size: Size, usual: Sharing) -> list[Sharing]:
    if size.rows >= 512:
        small = replace(usual, rows=64, warps=4, narrow=False)
        return [replace(usual, stages=2), replace(usual, stages=4), small, replace(small, stages=2),
                replace(usual, narrow=False), replace(usual, copied=False)]  # fmt: skip
    ways = [replace(usual, rows=rows, warps=warps, stages=stages, registers=None, narrow=False)
            for rows, warps in ((16, 4), (64, 4)) for stages in (2, 3, 4)
            if rows <= 4 * usual.rows and rows * 8 >= usual.rows]  # fmt: skip
    if usual.rows == 128:
        ways += [replace(usual, stages=2), replace(usual, stages=4)]
    return ways


def _time(
    attention: Attention, plan: Plan, queries: Tensor, kv: Tensor, scales: Tensor | None, how: Sharing | None
) -> tuple[float, Tensor]:
    """Microseconds of a replay, and what was found; keys and values of eight layers, so that none stay in the cache."""
    ints = torch.cat((torch.arange(MAX_ROWS, dtype=torch.int32), torch.from_numpy(plan.ints))).cuda()
    run, out = Integers.of(plan.size, ints), torch.zeros_like(queries)
    layers = [kv, *(kv.clone() for _ in range(7))] if plan.rows < 512 else [kv]
    attention.attend(run, queries, kv, out, 0, how=how, scales=scales)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            attention.attend(run, queries, layer, out, 0, how=how, scales=scales)
    return seconds_of(graph.replay, 5) * 1e6 / len(layers), out


if __name__ == "__main__":
    main()
