"""A server without a model, for what the host costs: `python -m lab serve-emulated`.

Passes take the time of an 8B model on a GPU and none of the host (lab.simulate.device); HTTP, the engine,
the controller and the detokenizer are real. It answers the built-in prompts of `forerun bench` alone, with pieces of
their own prose. `python -m lab serve --shape emulated` starts it, and reads from /metrics the CPU seconds of
the engine's thread and of the front's. `--pure` answers without httptools, as where it cannot be installed.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from forerun.api.llm import LLM
from forerun.measure.bench.suites import load_suite
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.tokenizer import Tokenizer
from forerun.server.backends.start import Loader
from lab.host import HEAD, Text, make
from lab.serve.inflated import add_server_flags, serve_for_bench
from lab.simulate.speeds import h200

LONGEST = 256  # tokens of an answer


def work(flags: argparse.Namespace) -> int:
    """Serve until SIGTERM."""
    if flags.pure:
        sys.modules["httptools"] = None  # type: ignore[assignment]  # importing it fails from now on
    loader = Loader("lab.serve.emulated:load_by_name", vars(flags))
    return serve_for_bench(f"{flags.model}-emulated", flags, loader)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default="smollm2", help="whose tokenizer and chat template are used")
    add("--max-num-seqs", type=int, default=64)
    add("--at-once", action="store_true", help="passes take no time")
    add("--pure", action="store_true", help="without httptools")
    add_server_flags(parser)


def load_by_name(**flags: Any) -> LLM:
    """The same from plain values, for the engine's process."""
    return load(argparse.Namespace(**flags))


def load(flags: argparse.Namespace) -> LLM:
    """The real engine over the emulated device, with a drafter that is right as often as a trained head."""
    tokenizer = open_checkpoint(flags.model).tokenizer()
    engine = make(HEAD, texts_of(tokenizer), flags.max_num_seqs, None if flags.at_once else h200())
    engine.tokenizer = tokenizer
    return LLM(engine, tokenizer, f"{flags.model}-emulated")


def texts_of(tokenizer: Tokenizer) -> list[Text]:
    """The built-in prompts as chats, each with a piece of their prose as its answer."""
    chats = [list(item.messages) for item in load_suite()]
    prose = tokenizer.encode(" ".join(str(message["content"]) for chat in chats for message in chat))
    starts = [7 * number % (len(prose) - LONGEST) for number in range(len(chats))]
    return [
        (tuple(tokenizer.chat_ids(chat)), prose[start : start + LONGEST])
        for chat, start in zip(chats, starts, strict=True)
    ]
