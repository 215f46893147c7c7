"""How fast `forerun data make` writes beside LLM.generate, in one run, alternating, on the same prompts.

    python tools/data_speed.py [--model smollm2] [--texts 32] [--tokens 48] [--repeats 3] [--static]

The last line is one JSON document. `--static` adds the torch batch that data making
used on a CPU before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from time import perf_counter

import torch

from forerun import LLM, SamplingParams
from forerun.core.params import EngineConfig
from forerun.models.load.checkpoint import open_checkpoint
from forerun.train.data.make import writer_for
from forerun.train.data.prompts import Renderer
from forerun.train.data.writer import BatchWriter, Order
from forerun.train.options import DataOptions
from forerun.train.teacher import load_net

THINGS = [
    "rivers",
    "clocks",
    "bread",
    "whales",
    "chess",
    "rain",
    "trains",
    "poems",
    "gold",
    "ants",
    "moons",
    "salt",
    "glass",
    "tides",
    "maps",
    "yeast",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    for name, default in (("texts", 32), ("tokens", 48), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--static", action="store_true", help="the old way too, which takes minutes")
    given = parser.parse_args()
    checkpoint = open_checkpoint(given.model)
    render = Renderer(checkpoint.tokenizer())
    asked = [render(f"Tell me {i + 2} facts about {THINGS[i % len(THINGS)]}.") for i in range(given.texts)]
    longest = max(map(len, asked)) + given.tokens
    orders = [Order(ids, 0.7, len(ids) + given.tokens, i) for i, ids in enumerate(asked)]
    options = DataOptions(
        given.model, "unused", max_prompt=longest - 16, max_length=longest, batch=given.texts, device="cpu"
    )
    write = writer_for(checkpoint, options)
    wide = EngineConfig(device="cpu", max_batch=given.texts)
    llms = {
        "LLM.generate": LLM.load(given.model, device="cpu"),
        "LLM.generate, wide batch": LLM.load(given.model, config=wide),
    }
    params = SamplingParams(max_tokens=given.tokens, temperature=0.7)

    def generated(name: str) -> Callable[[], int]:
        return lambda: sum(completion.tokens for completion in llms[name].generate(asked, params))

    ways: dict[str, Callable[[], int]] = {
        "data make": lambda: sum(len(text.tokens) - len(text.order.prompt) for text in write(orders)),
        **{name: generated(name) for name in llms},
    }
    if given.static:
        net = load_net(checkpoint, torch.device("cpu"))
        old = BatchWriter(net, (), rows=given.texts, max_length=longest)
        ways["static batch"] = lambda: sum(len(t.tokens) - len(t.order.prompt) for t in old.write(orders))
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.repeats):
        for name, run in ways.items():
            started = perf_counter()
            speeds[name].append(run() / (perf_counter() - started))
            print(f"{name}: {speeds[name][-1]:.1f} tokens/s", flush=True)
    conditions = {"threads": torch.get_num_threads(), "load": os.getloadavg()[0], "machine": platform.processor()}
    print(json.dumps({"tokens_per_second": speeds, **vars(given), **conditions}))


if __name__ == "__main__":
    main()
