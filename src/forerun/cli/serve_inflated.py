"""A server of a small model at the cost of a larger shape: `python -m forerun.cli.serve_inflated --shape 8b`.

It writes the small model's texts, and its head is accepted as often as the small model's; passes and drafts cost what
those of the larger shape do. Weights are made in memory. `python -m forerun.bench.serve --shape 8b` starts it, as a
process of its own, in place of `forerun serve`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from forerun.bench.gpu.inflated import load_inflated
from forerun.build import make_engine
from forerun.cli.loading import without_collector
from forerun.drafters.eagle.inflate_head import inflate_head_folder
from forerun.errors import ForerunError, InvalidInput
from forerun.heads import find_head
from forerun.llm import LLM
from forerun.models.inflate import PRESETS, find_shape
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.params import EngineConfig, SpeculativeConfig
from forerun.server.run import address_of, bind, import_application, serve
from forerun.server.settings import ServerSettings

PLACE_SLOTS = 1024  # of the KV cache for each sequence: prompt, answer and a tree


def main(words: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM."""
    flags = parse(words)
    with TemporaryDirectory() as folder:
        return serve_for_bench(flags.model, flags.port, lambda: load(flags, Path(folder)))


def serve_for_bench(model: str, port: int, load: Callable[[], LLM]) -> int:
    """Serve what `load` makes until SIGTERM, as the load test expects it: said on stderr, errors in one line."""
    try:
        settings = ServerSettings((model,), port=port, max_queue=1024)
        listener = bind(settings)
        with without_collector():
            llm = load()
            import_application()
        said = f"serving {llm.name} at {address_of(listener)} (drafter: {llm.engine.default_drafter})"
        serve(llm, settings, listener, lambda: print(said, file=sys.stderr, flush=True))
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
    add("--port", type=int, default=8000)
    return parser.parse_args(words)


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
