"""Time of attention in one layer by context and form of trees (`python -m forerun.bench.gpu.attention`).

Trees are planned as those that a head grew on the device, whose single nodes share programs, and once more as trees
that came from the host, whose nodes attend one by one; how many numbers the two do not have in common is printed too.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from itertools import product

import torch

from forerun.bench.gpu.command import SHAPES
from forerun.bench.gpu.rounds import seconds_of
from forerun.bench.gpu.stand_ins import RandomWeights
from forerun.models.config import DecoderConfig
from forerun.models.cuda.graphs import capture
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import Plan, Size, Span, plan_pass, split_of
from forerun.models.cuda.target import CudaDecoder
from forerun.models.pages import PAGE
from forerun.topology import topology_of
from forerun.verify.greedy import device_walk

LAYERS = 4  # whose keys and values are read in turn
REPEATS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--contexts", default="200,330,500,1500")
    parser.add_argument(
        "--trees", default="1x1x1,1x32x6,1x60x7,8x16x6,8x8x4,32x4x3,32x8x4", help="batch x nodes x levels"
    )
    given = parser.parse_args()
    target = _target(given.shape)
    forms = [tuple(int(part) for part in form.split("x")) for form in given.trees.split(",")]
    for context, (batch, nodes, levels) in product([int(one) for one in given.contexts.split(",")], forms):
        plan, grown = plan_of(
            batch, nodes, levels, context, 64 // (target.config.heads // target.config.kv_heads)
        )
        together, apart = (_measure(target, plan, size) for size in (grown, plan.size))
        differ = int((together[1] != apart[1]).sum())
        print(
            f"{context:6d} tokens, {batch:2d} x {nodes:2d} nodes in {levels} levels: {together[0] * 1e6:6.1f} us, "
            f"one by one {apart[0] * 1e6:6.1f} us, {differ} numbers differ",
            flush=True,
        )


def plan_of(batch: int, nodes: int, levels: int, context: int, group: int) -> tuple[Plan, Size]:
    """A pass over trees with so many levels below the root; and its size where they were grown on the device."""
    rng, spans, pages = random.Random(0), list[Span](), (context + nodes) // PAGE + 1
    for i in range(batch):
        parents, depths = [-1], [0]
        while len(parents) < nodes:
            parent = len(parents) - 1 if len(parents) <= levels else rng.randrange(len(parents))
            if depths[parent] < levels:
                parents.append(parent)
                depths.append(depths[parent] + 1)
        spans.append(
            Span(
                [*range(nodes)],
                topology_of(tuple(parents)),
                [*range(1 + i * pages, 1 + (i + 1) * pages)],
                context,
            )
        )
    plan = plan_pass(spans, group)
    if spans[0].shape.is_chain:
        return plan, plan.size
    each = nodes + (-(-nodes // group) if split_of(context) else 0)
    return plan, replace(plan.size, groups=batch * each, trees=batch, lone=nodes)


def _target(name: str) -> CudaDecoder:
    shape, vocab_size = SHAPES[name]
    weights = RandomWeights(replace(shape, layers=LAYERS), vocab_size, name == "135m", "cuda")
    target = CudaDecoder(
        DecoderConfig.from_hf(weights.config),
        weights,
        dtype=torch.bfloat16,
        kv_slots=128_000,
        greedy_walk=device_walk(torch.device("cuda")),
    )
    target.kv.data.normal_()
    target.buffers.queries.normal_()
    return target


def _measure(target: CudaDecoder, plan: Plan, size: Size) -> tuple[float, torch.Tensor]:
    """Seconds of one layer, and what it found."""
    target.buffers.send(plan)
    sent = Run.of(plan.size, target.buffers.ints)
    run, steps = replace(sent, size=size), target.passes.steps
    target.buffers.found.fill_(float("nan"))

    def all_layers() -> None:
        for layer in range(LAYERS):
            steps.attend(run, layer)

    graph = capture(all_layers, target.device, None)
    seconds = seconds_of(graph.replay, REPEATS) / LAYERS
    return seconds, target.buffers.found[: plan.rows].clone()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
