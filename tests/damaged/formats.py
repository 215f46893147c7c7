"""The file formats that Forerun reads: how each is damaged, and what is then done with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.damaged.mutations import damage_bytes, damage_json

PROMPT = [3, 4, 5, 3, 4]
HEADS = ("medusa", "hydra", "eagle", "eagle3", "dflash", "dspark", "peagle", "mtp")


@dataclass(frozen=True)
class Format:
    """Files of one kind. `variants` are folders under the material; `use` gives what came of the files in one."""

    variants: tuple[str, ...]
    damage: Callable[[Path, Random], None]
    use: Callable[[Path, str], list[Any]]
    exact: bool = False  # damage may be refused, but must never change what comes out
    heals: bool = False  # damage is not even refused: what was kept is made again


def damage_one(*patterns: str, focus: int = 1500) -> Callable[[Path, Random], None]:
    """Damage one of the files that fit: JSON by its values, others by their bytes."""

    def damage(folder: Path, dice: Random) -> None:
        files = sorted(file for pattern in patterns for file in folder.glob(pattern))
        file = dice.choice(files)
        if file.suffix == ".json":
            file.write_text(damage_json(file.read_text("utf-8"), dice), "utf-8", errors="surrogatepass")
        else:
            file.write_bytes(damage_bytes(file.read_bytes(), dice, focus))

    return damage


def write_text(folder: Path, variant: str) -> list[Any]:
    """A few tokens after a few ids, and after a text where there is a tokenizer."""
    from forerun import LLM, SamplingParams

    file = next(folder.glob("*.gguf"), folder)
    llm = LLM.load(str(file), drafter="none")
    params = SamplingParams(max_tokens=4)
    written = [llm.generate(PROMPT, params), llm.generate("ab cd", params)]
    warm = SamplingParams(max_tokens=4, temperature=0.8, seed=1)
    written.append(llm.generate(PROMPT, warm))
    for completion in written:
        ids, size = completion.token_ids, llm.engine.target.vocab_size
        assert all(0 <= token < size for token in ids), f"ids {ids} outside a vocabulary of {size}"
    return [completion.token_ids for completion in written]


def write_cached(folder: Path, variant: str) -> list[Any]:
    """The same with a cache that lies beside the model."""
    os.environ["FORERUN_CACHE"] = str(folder / "cache")
    return write_text(folder, variant)


def damage_cache(folder: Path, dice: Random) -> None:
    """Fill the cache, then damage it."""
    write_cached(folder, "")
    damage_one("cache/tokenizers/*", focus=3000)(folder, dice)


def draft(folder: Path, variant: str) -> list[Any]:
    """The same with a head; half of the time it is left to the package which drafter runs it."""
    from forerun import LLM, SamplingParams

    settings: dict[str, Any] = {"drafter": variant, "draft_model": str(folder / "head"), "budget": 6}
    chosen = len((folder / "head" / "config.json").read_bytes()) % 2
    if chosen:
        settings["drafter"] = "auto"
    llm = LLM.load(str(folder / "target"), speculative_config={**settings, "controller": "fixed", "width": 2})
    return [llm.generate(PROMPT, SamplingParams(max_tokens=12)).token_ids]


def resume(folder: Path, variant: str) -> list[Any]:
    """A training run that goes on from its checkpoint: the losses of the last steps."""
    from forerun.train.run import train

    losses: list[float] = []
    with chdir(folder):  # a run is known by the names it was given
        train(train_options(steps=4), lambda at: losses.append(round(at.loss, 4)))
    return losses


def train_options(steps: int) -> Any:
    """A run in the working directory."""
    from forerun.train.options import TrainOptions

    return TrainOptions(
        "medusa", "target", "texts", "run", steps=steps, levels=2, batch_tokens=128,
        max_length=32, holdout=0.3, save_every=2, eval_every=100, eval_batches=1, device="cpu", measure_on="others",
    )  # fmt: skip


FAMILIES = ("llama3.1", "llama-yarn", "qwen2-window", "smollm3", "gemma3", "phi3-longrope", "mixtral", "qwen2_moe")
FORMATS = {
    "gguf": Format(("gguf-llama", "gguf-qwen2_moe", "gguf-gemma3_text", "gguf-phi3"), damage_one("*.gguf"), write_text),
    "safetensors": Format(("folder", "shards"), damage_one("*.safetensors", "*.index.json"), write_text),
    "cache": Format(("gguf-llama",), damage_cache, write_cached, exact=True, heals=True),
    "config": Format(tuple(f"family-{name}" for name in FAMILIES), damage_one("config.json"), write_text),
    "tokenizer": Format(
        ("folder",),
        damage_one("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
        write_text,
    ),
    **{
        f"head-{name}": Format((name,), damage_one("head/config.json", "head/*.safetensors"), draft, exact=True)
        for name in HEADS
    },
    "run": Format(
        ("run",), damage_one("run/checkpoint/*.json", "run/checkpoint/*.safetensors", "run/log.jsonl"), resume
    ),
    "texts": Format(("run",), damage_one("texts/*.safetensors"), resume),
}
