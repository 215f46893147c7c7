"""A server of a small model at the cost of a larger shape: `python -m lab serve-inflated --shape 8b`.

It writes the small model's texts, and its head is accepted as often as the small model's; passes and drafts cost what
those of the larger shape do. Weights are made in memory. `python -m lab serve --shape 8b` starts it, as a
process of its own, in place of `forerun serve`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from forerun.api.llm import LLM
from forerun.server.backends.base import Backend
from forerun.server.backends.start import Loader
from forerun.server.run import address_of, bind, serve
from forerun.server.settings import Front, ServerSettings
from lab.inflate.heads import load_ready
from lab.inflate.model import PRESETS


def work(flags: argparse.Namespace) -> int:
    """Serve until SIGTERM."""
    with TemporaryDirectory() as folder:
        loader = Loader("lab.serve.inflated:load_by_name", {**vars(flags), "folder": folder})
        return serve_for_bench(f"{flags.model}-at-{flags.shape}", flags, loader)


def serve_for_bench(name: str, flags: argparse.Namespace, loader: Loader) -> int:
    """Serve what is loaded until SIGTERM, as the load test expects it: said on stderr."""
    settings = ServerSettings((flags.model,), port=flags.port, max_queue=1024)
    listener = bind(settings)

    def announce(backend: Backend) -> None:
        said = f"serving {name} at {address_of(listener)} (drafter: {backend.drafter})"
        print(said, file=sys.stderr, flush=True)

    serve(loader, settings, listener, announce, front=flags.front)
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default="smollm2", help="the small model")
    add("--shape", default="8b", choices=[*PRESETS], help="what it is to cost")
    add("--device", default="cuda", help="cuda; on a CPU it runs in torch, for tests")
    add("--drafter", help="default: the best for the head that comes with the package")
    add("--max-num-seqs", type=int, default=64)
    add("--max-length", type=int, default=4096)
    add_server_flags(parser)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8000)
    says = "answer HTTP beside the engine's process, or on a thread of it"
    parser.add_argument("--front", default="process", choices=get_args(Front), help=says)


def load_by_name(folder: str, **flags: Any) -> LLM:
    """The same from plain values, for the engine's process."""
    return load(argparse.Namespace(**flags), Path(folder))


def load(flags: argparse.Namespace, folder: Path) -> LLM:
    """The model at that shape, ready to write; its head is written to the folder, from where drafters read it."""
    lengths = flags.max_num_seqs, flags.max_length
    return load_ready(flags.model, flags.shape, *lengths, folder, flags.device, flags.drafter)
