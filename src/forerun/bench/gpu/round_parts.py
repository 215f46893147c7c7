"""Where the time of a drafted round goes on this GPU, kernel by kernel (about a minute).

    python -m forerun.bench.gpu.round_parts [--batches 1,8] [--sizes 1,8,16,24,32,48,64] [--skip-large] [--skip-small]

First passes over trees of several sizes, and their drafts, at the cost of an 8B model with an int8 head of one layer of
its size: what each takes on the device, and what of that products, the LM head, attention, argmax, growth and verdict
are. Then whole rounds of the engine, which follow each other unread: with that head, and in the shape of a 1.5B with
the head of the package at T=0 and T=1, and with a draft model of 0.5B. All weights of targets and draft models are
random, so that hardly anything is accepted: that changes no times. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch

from forerun.bench.gpu.kernel_trace import GAP, Grid, Kernel, cut_up, kind_of, said, traced
from forerun.bench.gpu.rounds import make_drafter, play, random_head
from forerun.bench.gpu.stand_ins import SHAPE_OF_0_5B, SHAPE_OF_1_5B, random_decoder
from forerun.bench.machine import machine_facts
from forerun.build import make_engine
from forerun.control.fixed import ALWAYS, FixedController
from forerun.drafters.base import Drafter, NoDrafter
from forerun.drafters.cuda.model_draft import ModelDraft
from forerun.drafters.cuda.model_drafter import DeviceModelDrafter
from forerun.drafters.eagle.cuda.drafter import DeviceEagle
from forerun.drafters.eagle.files import read_head
from forerun.engine.engine import Engine
from forerun.errors import InvalidInput
from forerun.heads import BOX
from forerun.models.cuda.pass_clock import seconds_of
from forerun.models.cuda.target import CudaDecoder
from forerun.models.inflate import PRESETS
from forerun.offers import Form
from forerun.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.testing import FakeSeq
from forerun.types import Budget, Needs, Request, TreeBatch, Verdict

CONTEXT = 460  # tokens; the split in which trees start has 76 of them
HEAD = BOX / "qwen2.5-coder-1.5b-eagle3"
FORMS = {
    8: Form(7, 5, 3),
    16: Form(15, 6, 5),
    24: Form(23, 6, 6),
    32: Form(31, 6, 8),
    48: Form(47, 7, 8),
    64: Form(63, 7, 10),
}
WARM, TIMED, TRACED = 8, 40, 8  # rounds
REPLAYS = 4
PARTS = ("propose", "score", "verify", "rest")  # of a round, as `play` books them


def product_names(owners: Mapping[str, object]) -> dict[Grid, str]:
    """Tiles and splits of the grids of all products of few rows -> whose they are and which."""
    names: dict[Grid, str] = {}
    if find_spec("triton") is None:
        return names
    from forerun.models.cuda.fused import FusedSteps

    for owner, steps in owners.items():
        if not isinstance(steps, FusedSteps):
            continue
        outputs = {"qkv": steps.qkv_outputs, "gate": 2 * steps.model.config.inner}
        outputs |= {"head": steps.model.head.shape[0], "o": steps.width, "down": steps.width}
        for name, count in outputs.items():
            tile, label = steps.tiles[name], "LM head" if name == "head" else name
            for grid in {(-(-count // size), tile.splits) for size in (tile.outputs, 128)}:
                names[grid] = f"{names[grid]} / {owner} {label}" if grid in names else f"{owner} {label}"
    return names


def measure_trees(
    target: CudaDecoder, drafter: DeviceEagle, batch: int, sizes: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Passes over so many nodes per sequence, and their drafts."""
    names = product_names({"pass": target.passes.steps, "draft": drafter.draft.net.steps})
    tokens = [[(7 * i + j) % 199 for j in range(CONTEXT + 1)] for i in range(batch)]
    seqs = [FakeSeq(i, some, max_length=CONTEXT + 500) for i, some in enumerate(tokens)]
    chains, scores = target.prefill(seqs, drafter.needs)
    drafter.observe(seqs, chains, scores, Verdict.whole_chain(chains, [seq.tokens[-1] for seq in seqs]))
    for size in sizes:
        row: dict[str, Any] = {"batch": batch, "nodes": size}
        if size == 1:
            target.score(seqs, TreeBatch.chains([seq.tokens[-1:] for seq in seqs]), Needs())
        else:
            for _ in range(2):
                play(target, drafter, seqs, Budget(*FORMS[size]), dict.fromkeys(PARTS, 0.0))
            row["draft_us"], row["draft"] = _replayed(drafter.draft.replay_last, target, names)
        row["pass_us"], row["pass"] = _replayed(target.passes.replay_last, target, names)
        yield row
    for seq in seqs:
        target.release(seq)
        drafter.forget(seq)


def _replayed(replay: Any, target: CudaDecoder, names: Mapping[Grid, str]) -> tuple[float, dict[str, float]]:
    """Microseconds of a captured graph, and its parts as traced."""

    def several() -> None:
        for _ in range(REPLAYS):
            replay()

    replay()
    whole = seconds_of(several, target.device, 5) / REPLAYS * 1e6
    found = cut_up(traced(several), lambda kernel: kind_of(kernel, names))
    return whole, {name: spent / REPLAYS for name, spent in found.items()}


def make_rounds(target: CudaDecoder, drafters: Mapping[str, Drafter], batch: int) -> Engine:
    """An engine for rounds of fixed forms."""
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=batch, max_length=1000))
    for name, drafter in drafters.items():
        engine.drafters.add(name, drafter)
    return engine


def measure_rounds(
    engine: Engine,
    name: str,
    form: Form | None,
    batch: int,
    temperature: float,
    names: Mapping[Grid, str],
    timed: int = TIMED,
) -> dict[str, Any]:
    """Rounds of one form: microseconds of each, and what the device did in them."""
    budget = Budget(0, 0, repeats=ALWAYS) if form is None else Budget(*form, repeats=ALWAYS)
    controller = FixedController(1)
    controller.budget = budget
    engine.controller = controller
    most = (WARM + timed + TRACED + 4) * (1 + (form.depth if form else 0))
    params = SamplingParams(max_tokens=min(most, 480), temperature=temperature, seed=7, ignore_eos=True)
    prompts = [tuple((7 * i + j) % 199 for j in range(CONTEXT)) for i in range(batch)]
    ids = [engine.submit(Request(prompt, params, drafter=name)) for prompt in prompts]
    _rounds(engine, WARM)
    _wait(engine)
    rounds, tokens = engine.stats.rounds, engine.stats.tokens
    started = perf_counter()
    _rounds(engine, timed)
    _wait(engine)
    seconds, done = perf_counter() - started, engine.stats.rounds - rounds
    written = engine.stats.tokens - tokens
    before = engine.stats.rounds
    kernels: list[Kernel] = traced(lambda: _rounds(engine, TRACED))
    parts = cut_up(kernels, lambda kernel: kind_of(kernel, names))
    several = max(1, engine.stats.rounds - before)
    for seq_id in ids:
        engine.abort(seq_id)
    engine.settle()
    return {
        "drafter": name, "form": form, "batch": batch, "temperature": temperature, "rounds": done,
        "tokens_per_round": written / max(1, done) / batch, "round_us": seconds / max(1, done) * 1e6,
        "kernels": len(kernels) / several, "parts": {name: spent / several for name, spent in parts.items()},
    }  # fmt: skip


def _rounds(engine: Engine, count: int) -> None:
    for _ in range(count):
        if engine.busy:
            engine.step()


def _wait(engine: Engine) -> None:
    if engine.target.device.type == "cuda":
        torch.cuda.synchronize()


def tell(row: Mapping[str, Any]) -> None:
    """One line per pass, draft or round."""
    if "nodes" in row:
        label = f"batch {row['batch']} x {row['nodes']:2d} nodes"
        for part in ("draft", "pass"):
            if part in row:
                print(
                    f"{label} {part:>5} {row[part + '_us']:6.0f} us: {said(row[part], 1)}",
                    flush=True,
                )
        return
    form = "plain" if row["form"] is None else ":".join(map(str, row["form"]))
    busy = sum(spent for name, spent in row["parts"].items() if name != GAP)
    print(
        f"{row['drafter']} {form} T={row['temperature']:g} batch {row['batch']}: round {row['round_us']:.0f} us, "
        f"{row['tokens_per_round']:.2f} tokens, {row['kernels']:.0f} kernels, traced busy {busy:.0f}, "
        f"gap {row['parts'].get(GAP, 0.0):.0f}: {said(row['parts'], 1, 3.0)}",
        flush=True,
    )


def measure_large(batches: Sequence[int], sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """At the cost of an 8B model."""
    target = random_decoder(PRESETS["8b"], 49152, False)
    drafter = make_drafter(target, random_head(target), "int8")
    for batch in batches:
        yield from measure_trees(target, drafter, batch, sizes)
    engine = make_rounds(target, {"head": drafter}, max(batches))
    names = product_names({"pass": target.passes.steps, "draft": drafter.draft.net.steps})
    for batch, form in ((1, None), (1, Form(23, 6, 6)), (1, Form(59, 7, 10)), (8, None), (8, Form(15, 6, 5))):
        if batch in batches:
            yield measure_rounds(engine, "none" if form is None else "head", form, batch, 0.0, names)


def measure_small(batches: Sequence[int], sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """In the shapes of Qwen2.5-Coder 1.5B and 0.5B."""
    target, draft = random_decoder(SHAPE_OF_1_5B, 151936, True), random_decoder(SHAPE_OF_0_5B, 151936, True)
    head = make_drafter(target, read_head(HEAD), None)
    yield from measure_trees(target, head, 1, sizes)
    model = DeviceModelDrafter(ModelDraft(draft, target.vocab_size, target.grown.last), NoDrafter)
    owners = {"pass": target.passes.steps, "head": head.draft.net.steps, "draft": draft.passes.steps}
    names, engine = product_names(owners), make_rounds(target, {"head": head, "draft": model}, max(batches))
    cases = [("none", None), ("head", Form(31, 6, 8)), ("head", Form(59, 7, 10))]
    for name, form in cases:
        for temperature in (0.0, 1.0):
            yield measure_rounds(engine, name, form, 1, temperature, names)
    for batch in batches:
        bucket = model.draft.graphs.time(batch)  # captured here, as all else when it is first needed
        yield {"drafter": "draft passes", "form": None, "batch": batch, "temperature": 0.0, "rounds": 1,
               "tokens_per_round": 0.0, "round_us": sum(bucket) * 1e6, "kernels": 0,
               "parts": {"first": bucket[0] * 1e6, "further": bucket[1] * 1e6}}  # fmt: skip
        for depth in (2, 4, 6):
            yield measure_rounds(engine, "draft", Form(depth, depth, 1), batch, 0.0, names)
    yield measure_rounds(engine, "draft", Form(4, 4, 1), 1, 1.0, names)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.gpu.round_parts", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--batches", default="1,8", help="sequences at once")
    parser.add_argument("--sizes", default="1,8,16,24,32,48,64", help="nodes of trees, roots included")
    parser.add_argument("--skip-large", action="store_true", help="nothing at the cost of an 8B model")
    parser.add_argument("--skip-small", action="store_true", help="nothing in the shape of a 1.5B")
    given = parser.parse_args()
    batches, sizes = ([int(one) for one in part.split(",")] for part in (given.batches, given.sizes))
    if not torch.cuda.is_available():
        raise InvalidInput("this benchmark needs a CUDA device and torch sees none")
    document: dict[str, Any] = {"machine": {**machine_facts(), "gpu": torch.cuda.get_device_name()}}
    document["rows"] = []
    works = [measure_large(batches, sizes)] * (not given.skip_large)
    works += [measure_small(batches, sizes)] * (not given.skip_small)
    for work in works:
        try:
            for row in work:
                tell(row)
                document["rows"].append(row)
        except RuntimeError as error:  # of the driver or of Triton: the other models can still be measured
            print(f"failed: {error!r}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(document))


if __name__ == "__main__":
    main()
