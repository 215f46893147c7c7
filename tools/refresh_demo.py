"""Shows what `forerun train refresh` gains on shifted traffic: `python -m tools.refresh_demo FOLDER`.

The traffic is of one narrow kind, which the head that comes with the package was not trained for: descriptions of
products, 96 tokens each, greedy. They are written by the default model and recorded as a server would; then the head is
trained further on four fifths of the prompts and compared on the others. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from forerun import LLM
from forerun.server.service import Recorder
from forerun.train.refresh import refresh

COLOURS = ["red", "blue", "green", "black", "white", "yellow", "grey", "brown"]
MATERIALS = ["wooden", "metal", "glass", "cotton", "leather", "paper", "plastic", "woollen"]
THINGS = ["chair", "lamp", "bag", "table", "clock", "box", "cup", "coat"]


def prompts(count: int) -> list[str]:
    """Requests of one kind, in an order that is always the same."""
    kinds = [(colour, stuff, thing) for colour in COLOURS for stuff in MATERIALS for thing in THINGS]
    chosen = random.Random(0).sample(kinds, count)
    return [f"Write a product description for a {' '.join(words)} in our shop." for words in chosen]


def record(folder: Path, count: int, tokens: int) -> float:
    """Write the traffic; tokens per round as served."""
    llm = LLM("smollm2", drafter="eagle3")
    recorder = Recorder(folder)
    chats = [[{"role": "user", "content": text}] for text in prompts(count)]
    done = llm.chat(chats, max_tokens=tokens, temperature=0)
    for chat, completion in zip(chats, done, strict=True):
        recorder.write(llm.encode(chat), completion, 0.0)
    recorder.close()
    return sum(each.tokens for each in done) / sum(each.rounds for each in done)


def main() -> None:
    """Record, refresh, report."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-4)
    given = parser.parse_args()
    traffic, versions = given.folder / "traffic", given.folder / "heads"
    started = perf_counter()
    served = record(traffic, given.texts, given.tokens) if not any(traffic.glob("*.jsonl")) else None
    recorded = perf_counter()
    found = refresh(
        {
            "target": "smollm2", "data": str(traffic), "out": str(versions), "steps": given.steps,
            "batch_tokens": given.batch_tokens, "lr": given.lr,
        },
        lambda at: logging.info("step %d/%d, loss %.3f", at.step, at.steps, at.loss),
    )  # fmt: skip
    print(found)
    seconds = {"recording": recorded - started, "refresh": perf_counter() - recorded}
    print(json.dumps({**asdict(found), "served": served, "seconds": seconds}))


if __name__ == "__main__":
    main()
