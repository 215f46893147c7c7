"""Time of attention in one layer by context and form of trees (`python -m forerun.bench.gpu.attention`).

Trees are planned as those that a head grew on the device, whose single nodes share programs, and once more as trees
that came from the host, whose nodes attend one by one. Chunks of prompts (`--prompts`), and lone roots or trees beside
them (`--beside`), are measured as passes are run, and with every group's splits shared out among programs and added up
by a second kernel. How many numbers the two ways do not have in common is printed too. `--sweep` tries other settings.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, cast

import torch

from forerun.bench.gpu.command import SHAPES
from forerun.bench.gpu.rounds import seconds_of
from forerun.bench.gpu.stand_ins import RandomWeights
from forerun.models.config import DecoderConfig
from forerun.models.cuda.graphs import capture
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import MAX_ROWS, Need, Plan, Size, Span, plan_pass, split_of
from forerun.models.cuda.sharing import Sharing, shared_out, sharing_for
from forerun.models.cuda.target import CudaDecoder
from forerun.models.pages import PAGE
from forerun.topology import chain_of, topology_of
from forerun.verify.greedy import device_walk

if TYPE_CHECKING:
    from forerun.models.cuda.fused import FusedSteps  # needs Triton

LAYERS = 4  # whose keys and values are read in turn
REPEATS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--contexts", default="200,330,500,1500")
    parser.add_argument(
        "--trees",
        default="1x1x1,64x1x1,128x1x1,1x32x6,1x60x7,8x16x6,8x8x4,32x4x3,32x8x4",
        help="batch x nodes x levels",
    )
    parser.add_argument(
        "--prompts", default="", help="rows x context x prompts that share the rows, e.g. 1024x0x4"
    )
    parser.add_argument(
        "--beside", default="", help="lone roots or trees, as --trees, in the passes of --prompts"
    )
    parser.add_argument("--sweep", action="store_true", help="also other settings of the kernel")
    given = parser.parse_args()
    target = _target(given.shape)
    group = 64 // (target.config.heads // target.config.kv_heads)
    contexts = [int(one) for one in given.contexts.split(",")]
    for context, (batch, nodes, levels) in product(contexts, _numbers(given.trees)):
        plan, grown = plan_of(batch, nodes, levels, context, group)
        say = f"{context:6d} tokens, {batch:3d} x {nodes:2d} nodes in {levels} levels"
        if nodes > 1:
            together, apart = (_measure(target, plan, size) for size in (grown, plan.size))
            print(
                f"{say}: {together[0] * 1e6:6.1f} us, one by one {_compared(apart, together[1])}", flush=True
            )
        else:
            _compare(target, plan, say, given.sweep)
    for rows, context, prompts in _numbers(given.prompts):
        say = f"{rows:4d} rows of {prompts} prompts behind {context:5d} tokens"
        chunks = chunks_of(rows, context, prompts)
        _compare(target, plan_pass(chunks, group, _prompt_size), say, given.sweep)
        for behind, (batch, nodes, levels) in product(contexts, _numbers(given.beside)):
            spans = [*trees_of(batch, nodes, levels, behind), *chunks]
            if batch * nodes + rows > MAX_ROWS:
                continue
            beside = f"{say}, beside {batch} x {nodes} nodes in {levels} levels behind {behind} tokens"
            _compare(target, plan_pass(_on_own_pages(spans), group), beside, given.sweep)


def _numbers(forms: str) -> list[tuple[int, int, int]]:
    parts = ([*map(int, form.split("x")), 1] for form in forms.split(",") if form)
    return [(first, second, third) for first, second, third, *_ in parts]


def _prompt_size(need: Need) -> Size:
    """As passes without logits are captured (models/cuda/graphs.py: menu)."""
    size = need.rounded()
    return replace(size, groups=max(16, size.rows // 8, need.groups))


def _compare(target: CudaDecoder, plan: Plan, say: str, sweep: bool) -> None:
    """As it is run, and with all splits shared out."""
    config, size, steps = target.config, plan.size, cast("FusedSteps", target.passes.steps)
    out = shared_out(size, config.kv_heads, config.head_dim, steps.processors)
    own = sharing_for(size, config.kv_heads, config.head_dim, steps.processors)
    wanted = _measure(target, plan, size, out)
    print(f"{say}: shared out {wanted[0] * 1e6:6.1f} us, {out}", flush=True)
    for how in [own, *(_variants(size, out) if sweep else ())]:
        name = "as it is run" if how is own else "instead"
        print(f"    {name} {_compared(_measure(target, plan, size, how), wanted[1])}, {how}", flush=True)


def _variants(size: Size, out: Sharing) -> Iterator[Sharing]:
    """Settings that might be better."""
    for programs in dict.fromkeys((1, 2, 4, out.programs)):
        yield replace(out, programs=programs, narrow=True)
    for programs, stages in ((1, 3), (4, 3), (1, 2)):
        yield Sharing(programs, size.splits, stages, narrow=True)


def _compared(found: tuple[float, torch.Tensor], wanted: torch.Tensor) -> str:
    return f"{found[0] * 1e6:6.1f} us, {int((found[1] != wanted).sum())} numbers differ"


def plan_of(batch: int, nodes: int, levels: int, context: int, group: int) -> tuple[Plan, Size]:
    """A pass over trees with so many levels below the root; and its size where they were grown on the device."""
    spans = trees_of(batch, nodes, levels, context)
    plan = plan_pass(spans, group)
    if spans[0].shape.is_chain:
        return plan, plan.size
    each = nodes + (-(-nodes // group) if split_of(context) else 0)
    return plan, replace(plan.size, groups=batch * each, trees=batch, lone=nodes)


def trees_of(batch: int, nodes: int, levels: int, context: int) -> list[Span]:
    rng, spans = random.Random(0), list[Span]()
    for _ in range(batch):
        parents, depths = [-1], [0]
        while len(parents) < nodes:
            parent = len(parents) - 1 if len(parents) <= levels else rng.randrange(len(parents))
            if depths[parent] < levels:
                parents.append(parent)
                depths.append(depths[parent] + 1)
        spans.append(Span([*range(nodes)], topology_of(tuple(parents)), [], context))
    return _on_own_pages(spans)


def chunks_of(rows: int, context: int, prompts: int) -> list[Span]:
    """So many rows of prompts, as even as may be, each behind so many tokens that were read before."""
    counts = [rows // prompts + (i < rows % prompts) for i in range(prompts)]
    return _on_own_pages([Span([*range(count)], chain_of(count), [], context) for count in counts])


def _on_own_pages(spans: list[Span]) -> list[Span]:
    first, placed = 1, list[Span]()
    for span in spans:
        behind = first + (span.length + len(span.tokens)) // PAGE + 1
        placed.append(replace(span, pages=[*range(first, behind)]))
        first = behind
    return placed


def _target(name: str) -> CudaDecoder:
    shape, vocab_size = SHAPES[name]
    weights = RandomWeights(replace(shape, layers=LAYERS), vocab_size, name == "135m", "cuda")
    target = CudaDecoder(
        DecoderConfig.from_hf(weights.config),
        weights,
        dtype=torch.bfloat16,
        kv_slots=260_000,
        greedy_walk=device_walk(torch.device("cuda")),
    )
    target.kv.data.normal_()
    target.buffers.queries.normal_()
    return target


def _measure(
    target: CudaDecoder, plan: Plan, size: Size, how: Sharing | None = None
) -> tuple[float, torch.Tensor]:
    """Seconds of one layer, and what it found."""
    target.buffers.send(plan)
    sent = Run.of(plan.size, target.buffers.ints)
    run, buffers = replace(sent, size=size), target.buffers
    steps = cast("FusedSteps", target.passes.steps)
    buffers.found.fill_(float("nan"))

    def all_layers() -> None:
        for layer in range(LAYERS):
            steps.attention.attend(run, buffers.queries, steps.kv[layer], buffers.found, 0, how)

    graph = capture(all_layers, target.device, None)
    seconds = seconds_of(graph.replay, REPEATS) / LAYERS
    return seconds, buffers.found[: plan.rows].clone()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
