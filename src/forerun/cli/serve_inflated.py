"""A server of a small model at the cost of a larger shape: `python -m forerun.cli.serve_inflated --shape 8b`.

It writes the small model's texts, and its head is accepted as often as the small model's; passes and drafts cost what
those of the larger shape do. Weights are made in memory. `python -m forerun.bench.serve --shape 8b` starts it, as a
process of its own, in place of `forerun serve`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch

from forerun.bench.gpu.inflated import load_inflated
from forerun.build import make_engine
from forerun.drafters.eagle.inflate_head import inflate_head_folder
from forerun.errors import ForerunError, InvalidInput
from forerun.heads import find_head
from forerun.llm import LLM
from forerun.models.inflate import PRESETS, find_shape
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.params import EngineConfig, SpeculativeConfig
from forerun.server.backend import Backend
from forerun.server.engine_process.loader import Loader
from forerun.server.run import address_of, bind, serve
from forerun.server.settings import Front, ServerSettings

PLACE_SLOTS = 1024  # of the KV cache for each sequence: prompt, answer and a tree


def main(words: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM."""
    flags = parse(words)
    with TemporaryDirectory() as folder:
        loader = Loader("forerun.cli.serve_inflated:load_by_name", {**vars(flags), "folder": folder})
        return serve_for_bench(f"{flags.model}-at-{flags.shape}", flags, loader)


def serve_for_bench(name: str, flags: argparse.Namespace, loader: Loader) -> int:
    """Serve what is loaded until SIGTERM, as the load test expects it: said on stderr, errors in one line."""
    try:
        settings = ServerSettings((flags.model,), port=flags.port, max_queue=1024)
        listener = bind(settings)

        def announce(backend: Backend) -> None:
            said = f"serving {name} at {address_of(listener)} (drafter: {backend.drafter})"
            print(said, file=sys.stderr, flush=True)

        serve(loader, settings, listener, announce, front=flags.front)
    except ForerunError as error:
        print(f"bench serve: {error}", file=sys.stderr)
        return 2
    return 0


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m forerun.cli.serve_inflated")
    add = parser.add_argument
    add("model", nargs="?", default="smollm2", help="the small model")
    add("--shape", default="8b", choices=[*PRESETS], help="what it is to cost")
    add("--device", default="cuda", help="cuda; on a CPU it runs in torch, for tests")
    add("--drafter", help="default: the best for the head that comes with the package")
    add("--max-num-seqs", type=int, default=64)
    add("--max-model-len", type=int, default=4096)
    add_server_flags(parser)
    return parser.parse_args(words)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """What servers for benchmarks have in common."""
    parser.add_argument("--port", type=int, default=8000)
    says = "answer HTTP beside the engine's process, or on a thread of it"
    parser.add_argument("--front", default="process", choices=get_args(Front), help=says)


def load_by_name(folder: str, **flags: Any) -> LLM:
    """The same from plain values, for the engine's process."""
    return load(argparse.Namespace(**flags), Path(folder))


def load(flags: argparse.Namespace, folder: Path) -> LLM:
    """The model at that shape, ready to write; its head is written to the folder, from where drafters read it."""
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("a larger shape needs a GPU, and torch sees none")
    checkpoint = open_checkpoint(flags.model)
    tokenizer = checkpoint.tokenizer()
    slots = PLACE_SLOTS * (flags.max_num_seqs + 1)
    target, _ = load_inflated(checkpoint, flags.shape, slots, flags.device)
    settings = EngineConfig(max_batch=flags.max_num_seqs, max_length=flags.max_model_len, device=flags.device)
    speculative = _inflated_head(checkpoint, flags, folder)
    engine = make_engine(target, tokenizer.eos_ids, speculative, settings, tokenizer)
    if target.device.type == "cuda":
        drafter = engine.drafters.get(engine.default_drafter)  # captures its graphs
        target.warm_up(drafter.needs, engine.max_batch, engine.max_length)
    return LLM(engine, tokenizer, f"{flags.model}-at-{flags.shape}")


def _inflated_head(checkpoint: Checkpoint, flags: argparse.Namespace, folder: Path) -> SpeculativeConfig:
    """Drafting with the package's head for this model, written to a folder at the larger shape."""
    found = find_head(checkpoint.config, (checkpoint.name, checkpoint.path.name), "eagle3")
    if found is None:
        return SpeculativeConfig(drafter=flags.drafter or "ngram")
    written = inflate_head_folder(found.path, find_shape(flags.shape), folder / "head")
    return SpeculativeConfig(drafter=flags.drafter or found.drafter, draft_model=str(written))


if __name__ == "__main__":
    sys.exit(main())
