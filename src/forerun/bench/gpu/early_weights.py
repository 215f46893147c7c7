"""Passes whose products ask for weights before the kernel ahead has ended, in several ways (about a minute).

    python -m forerun.bench.gpu.early_weights [--rows 1,64]

Time of one pass on the device, for the shapes of an 8B, a 1.5B and a 0.5B with random weights; the fastest way is what
`models/cuda/fused.py` should use.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from forerun.bench.gpu.stand_ins import SHAPE_OF_0_5B, SHAPE_OF_1_5B, random_decoder
from forerun.errors import InvalidInput
from forerun.models.cuda.graphs import Passes
from forerun.models.cuda.pass_clock import seconds_of
from forerun.models.cuda.plan import Span, plan_pass
from forerun.models.cuda.target import CudaDecoder
from forerun.models.inflate import PRESETS
from forerun.testing import FakeSeq
from forerun.topology import chain_of
from forerun.types import Needs

CONTEXT = 460
NODES_AT_ONCE = 8  # of a chain, in one program of attention: what all shapes here allow
WAYS = ((0, False), (1024, False), (1024, True), (4096, True))  # bytes; does the next kernel start soon


def measure_early(name: str, target: CudaDecoder, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Passes whose products ask for weights before the kernel ahead has ended, in several ways."""
    from forerun.models.cuda.fused import FusedSteps

    steps = target.passes.steps
    assert isinstance(steps, FusedSteps)
    seq = FakeSeq(0, [(7 * j) % 199 for j in range(CONTEXT + 1)], max_length=CONTEXT + 100)
    target.prefill([seq], Needs())
    usual = steps.early, steps.soon
    for count in rows:
        span = Span(seq.tokens[:count], chain_of(count), target.kv.grow(seq.id, CONTEXT + 70).pages, CONTEXT)
        plan, wanted = plan_pass([span], NODES_AT_ONCE), torch.empty(0)
        for steps.early, steps.soon in WAYS:
            passes = Passes(target.model, target.buffers, target.grown, steps, target.passes.capture)
            passes.run(plan, (), count)
            logits = target.buffers.logits[:count]
            wanted = wanted if len(wanted) else logits.clone()
            differ = int((logits != wanted).sum())
            passes.replay_last()
            taken = seconds_of(passes.replay_last, target.device, 40) * 1e6
            yield {
                "shape": name,
                "rows": count,
                "early": steps.early,
                "soon": steps.soon,
                "us": taken,
                "differ": differ,
            }
    steps.early, steps.soon = usual
    target.release(seq)


def tell(row: dict[str, Any]) -> None:
    print(
        f"{row['shape']} pass over {row['rows']:2d} rows, {row['early']} bytes asked for early, next kernel "
        f"{'before' if row['soon'] else 'behind'} the product: {row['us']:.0f} us, {row['differ']} logits differ",
        flush=True,
    )


def measure_shapes(rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    """`measure_early` of all shapes."""
    shapes = {
        "8b": (PRESETS["8b"], 49152, False),
        "1.5b": (SHAPE_OF_1_5B, 151936, True),
        "0.5b": (SHAPE_OF_0_5B, 151936, True),
    }
    for name, shape in shapes.items():
        yield from measure_early(name, random_decoder(*shape), rows if name != "0.5b" else [1])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.gpu.early_weights", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rows", default="1,64", help="rows of passes")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise InvalidInput("this benchmark needs a CUDA device and torch sees none")
    for row in measure_shapes([int(one) for one in given.rows.split(",")]):
        tell(row)


if __name__ == "__main__":
    main()
