"""Options of training runs and data runs: frozen, checked when made; no torch here, so that --help is fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, TypeVar, cast, get_args, get_type_hints

from forerun.core.errors import InvalidInput

T = TypeVar("T")
Method = Literal[
    "medusa", "hydra", "eagle", "eagle3", "hass", "mtp", "dflash", "dflash2", "dspark", "peagle", "specdec",
    "draft-model", "early-exit",
]  # fmt: skip
METHODS: tuple[Method, ...] = get_args(Method)
EAGLES: tuple[Method, ...] = ("eagle", "eagle3", "hass", "mtp")
BLOCKS: tuple[Method, ...] = ("dflash", "dflash2", "dspark", "peagle")  # block drafters
_RATES: dict[str, float] = {
    "medusa": 1e-3, "hydra": 1e-3, "eagle": 3e-4, "eagle3": 3e-4, "hass": 3e-4, "draft-model": 2e-4,
    "early-exit": 2e-3, "mtp": 1e-3, "specdec": 5e-4, **dict.fromkeys(BLOCKS, 1e-3),
}  # fmt: skip
_STEPS: dict[str, int] = {
    "medusa": 4, "hydra": 4, "eagle": 1, "eagle3": 7, "hass": 3, "draft-model": 1, "early-exit": 1, "mtp": 4,
    "specdec": 6, **dict.fromkeys(BLOCKS, 8),
}  # fmt: skip
_LAYERS: dict[str, int] = {"draft-model": 4, "specdec": 4, **dict.fromkeys(BLOCKS, 4)}
_MOVERS: dict[str, str] = dict.fromkeys(BLOCKS, "muon")
_RANKS: dict[str, int] = {"early-exit": 128, "dflash2": 64, "dspark": 64, "medusa": 16}
_ZERO = {  # what 0 means
    "vocab": "all of the target's", "inner": "the target's", "levels": "the recipe's", "layers": "the recipe's",
    "rank": "the recipe's", "exit": "two thirds of the layers", "cut_loops": "never", "window": "all positions",
}  # fmt: skip
WIDTHS = 16  # the width of a head is a multiple of this


def as_method(name: str) -> Method:
    if name in METHODS:
        return name
    raise InvalidInput(f"there is no method {name!r} to train; use one of {', '.join(METHODS)}")


def in_tuple(owner: type[Any], name: str, given: Sequence[str]) -> tuple[Any, ...]:
    """The values of a flag that takes several: numbers by comma, texts and files one each time that it is given."""
    kind = get_args(get_type_hints(owner)[name])[0]
    if kind is str:
        return tuple(given)
    try:
        return tuple(kind(part) for text in given for part in text.split(","))
    except ValueError:
        raise InvalidInput(f"{name}={','.join(given)} is not a list of numbers; write 0,1") from None


def _check_device(device: str) -> None:
    kind, colon, number = device.partition(":")
    known = device == "auto" or (kind in ("cpu", "cuda") and (number.isdigit() or not colon))
    _check(known, "device", device, "auto, cpu, cuda, or one of several: cuda:1")


def _check(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise InvalidInput(f"{name}={value!r} is out of range: {limit}")


def told(default: T, words: str) -> T:
    """A field with what the command line says of its flag."""
    made: Any = field(default=default, metadata={"help": words})
    return cast(T, made)


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """One training run. None and 0 mean what the method's own recipe says."""

    method: Method
    target: str = field(
        metadata={"help": "The model to draft for: a known name, a .gguf file, a Hugging Face folder, or a hub id."}
    )
    # or several, with commas between
    data: str = field(metadata={"help": "A folder that `forerun data make` filled."})
    out: str = field(metadata={"help": "Where the drafter goes; an interrupted run resumes there."})
    hottest: float | None = told(None, "Leave out texts that were written at a higher temperature.")
    cut_loops: int = told(
        0, "Cut answers that repeat themselves so many tokens behind the first repetition; 0 is never."
    )
    measure_on: str = told(
        "", "A folder of greedy texts of other prompts: rounds through them are counted, the best evaluation is kept."
    )
    patience: int = told(0, "Stop after so many evaluations in a row that --measure-on found no better; 0 is never.")
    init: str = told("", "The folder of a finished head of the same method and shape to start from.")
    steps: int = told(2000, "Optimiser steps in all.")
    batch_tokens: int = told(16384, "Tokens per step.")
    max_length: int = told(512, "Longer sequences are cut.")
    packed: bool = told(
        False, "Fill rows of --max-length with several texts, end to end: long contexts out of short texts."
    )
    lr: float | None = told(None, "Highest learning rate; default: the recipe's.")
    optimizer: Literal["adamw", "muon"] | None = told(None, "adamw or muon; default: muon for block drafters.")
    warmup: float = told(0.04, "Share of the steps over which the rate rises.")
    clip: float = told(0.5, "Largest norm of a gradient.")
    weight_decay: float = told(0.0, "Of matrices.")
    seed: int = told(0, "Of weights, order and noise.")
    vocab: int = told(0, "Size of the draft vocabulary; 0 is all of the target's.")
    levels: int = told(
        0, "Heads of Medusa and Hydra, training-time steps of EAGLE and MTP, tokens of a block; 0 is the recipe's."
    )
    blocks: int = told(1, "Blocks per Medusa or Hydra head.")
    layers: int = told(0, "Layers of a draft model, taken from the target; of a block drafter.")
    exit: int = told(0, "Layers in front of an exit adapter; 0 is two thirds of the target's.")
    rank: int = told(
        0, "Rank of an exit adapter, a Markov head, a path selector, or the LoRA of --joint; 0 is the recipe's."
    )
    decay: float = told(0.8, "Weight of each level relative to the one before.")
    loss: Literal["kl", "lk_hybrid"] = told("kl", "Distance between laws.")
    train_head: bool = told(True, "An LM head of its own; otherwise the target's rows are used and not stored.")
    width: int = told(0, "Width of an EAGLE-3 head; 0 = the target's; narrower ones have an LM head of their own.")
    one_byte: bool | None = told(
        None, "EAGLE-3: write matrices as one byte per weight; default: as the head of --init has them."
    )
    inner: int = told(0, "Width of the MLP of an EAGLE, MTP or block drafter's layer; 0 = the target's.")
    features: tuple[int, ...] = told(
        (), "Hidden layers that EAGLE-3 (default: three) or a block drafter (default: five) reads, by comma."
    )
    fc_norm: bool = told(False, "EAGLE-3.1: norm every feature before they are fused.")
    norm_output: bool = told(False, "EAGLE-3.1: feed the normed output back.")
    joint: bool = told(False, "Medusa-2: a LoRA on the target is trained too, and written as another target.")
    positions: Literal["survival", "decay"] = told(
        "survival", "How a block's positions weigh: by how far its draft gets, or by --decay."
    )
    causal: bool = told(False, "A block's rows see only the rows before them, as in JetSpec.")
    window: int = told(
        0, "Positions that the layers of an EAGLE or MTP head, or all but a block drafter's last, see; 0 is all."
    )
    anchors: float = told(0.5, "Share of the answers' tokens at which blocks start, per step.")
    stored: Literal["bfloat16", "int8"] = told("bfloat16", "How a block drafter's matrices are written.")
    holdout: float = told(0.02, "Share of the prompts that are held back, one at least.")
    eval_every: int = told(200, "Steps between simulations on held-back text.")
    eval_batches: int = told(4, "Batches per simulation.")
    save_every: int = told(200, "Steps between checkpoints.")
    compile: bool = told(False, "Compile the target's pass.")
    device: str = told("auto", "auto, cpu, cuda or one of several: cuda:1.")

    def __post_init__(self) -> None:
        _check(self.method in METHODS, "method", self.method, ", ".join(METHODS))
        for name in ("steps", "eval_every", "eval_batches", "save_every", "blocks"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("clip", *(("lr",) if self.lr is not None else ())):
            _check(0 < getattr(self, name) < inf, name, getattr(self, name), "a number above 0")
        _check(0 <= self.weight_decay < inf, "weight_decay", self.weight_decay, "0 or more")
        _check(0 < self.decay < inf, "decay", self.decay, "a number above 0")
        for name, zero in _ZERO.items():
            _check(getattr(self, name) >= 0, name, getattr(self, name), f"0 ({zero}) or more")
        _check_device(self.device)
        _check(self.max_length >= 16, "max_length", self.max_length, "at least 16 tokens")
        _check(self.batch_tokens >= 16, "batch_tokens", self.batch_tokens, "at least 16")
        _check(0 < self.holdout < 1, "holdout", self.holdout, "above 0, below 1")
        _check(0 <= self.warmup < 1, "warmup", self.warmup, "0 up to 1")
        _check(0 < self.anchors <= 1, "anchors", self.anchors, "above 0, up to 1")
        fresh = self.method in ("draft-model", "early-exit", "specdec")
        _check(not self.init or not fresh, "init", self.init, f"not for {self.method}")
        _check(not self.causal or self.method in BLOCKS, "causal", self.causal, f"only for {', '.join(BLOCKS)}")
        windowed = (*EAGLES, *BLOCKS)
        _check(not self.window or self.method in windowed, "window", self.window, f"only for {', '.join(windowed)}")
        _check(not self.packed or self.method != "specdec", "packed", self.packed, "not for specdec")
        _check(self.patience >= 0, "patience", self.patience, "0 (never) or more")
        _check(not self.patience or bool(self.measure_on), "patience", self.patience, "0, or give --measure-on DIR")
        _check(not self.joint or self.method == "medusa", "joint", self.joint, "only for medusa")
        _check(self.width >= 0 and self.width % WIDTHS == 0, "width", self.width, f"multiples of {WIDTHS}")
        _check(not self.width or self.method == "eagle3", "width", self.width, "only for eagle3")
        _check(not self.width or self.train_head, "width", self.width, "with an LM head of its own: --train-head")
        _check(not self.one_byte or self.method == "eagle3", "one_byte", self.one_byte, "only for eagle3")

    @property
    def own_rank(self) -> int:
        """Of what has low rank in this recipe."""
        return self.rank or _RANKS.get(self.method, 0)

    @property
    def own_layers(self) -> int:
        """Of what is trained."""
        return self.layers or _LAYERS.get(self.method, 1)

    @property
    def mover(self) -> str:
        return self.optimizer or _MOVERS.get(self.method, "adamw")

    @property
    def rate(self) -> float:
        return _RATES[self.method] if self.lr is None else self.lr

    @property
    def depth(self) -> int:
        return self.levels or _STEPS[self.method]


@dataclass(frozen=True, slots=True)
class DataOptions:
    target: str = field(
        metadata={"help": "The model that writes: a known name, a .gguf file, a Hugging Face folder, or a hub id."}
    )
    out: str = field(metadata={"help": "Where the shards go; an interrupted run resumes there."})
    prompts: tuple[str, ...] = told((), "A file of prompts (.txt lines, or .jsonl); may be given several times.")
    passages: tuple[str, ...] = told(
        (), "A folder filled earlier, whose answers long prompts are made of; may be given several times."
    )
    wrapped: int = told(0, "How many prompts to make of passages at most (0: one of each).")
    own_prompts: int = told(1000, "How many prompts the target is asked to write itself.")
    openings: tuple[str, ...] = told(
        ("",), "How these begin, in turn; may be given several times; default: the target's choice."
    )
    temperatures: tuple[float, ...] = told(
        (0.0, 0.7, 1.0), "Each prompt is answered once at each, by comma; default: 0,0.7,1."
    )
    max_prompt: int = told(
        0, "Tokens of a prompt at most, template included; 0 is 160, or half of --max-length if that is less."
    )
    max_length: int = told(512, "Tokens of prompt and answer at most.")
    max_answer: int = told(0, "Tokens of an answer at most; 0 is what --max-length leaves.")
    batch: int = told(64, "Sequences written at once.")
    shard_tokens: int = told(2_000_000, "Tokens per shard.")
    seed: int = told(0, "Seed of all random draws.")
    device: str = told("auto", "auto, cpu, cuda or one of several: cuda:1.")

    def __post_init__(self) -> None:
        _check(bool(self.temperatures), "temperatures", self.temperatures, "at least one")
        _check(all(0 <= t < inf for t in self.temperatures), "temperatures", self.temperatures, "0 or more")
        _check(self.max_length >= 16, "max_length", self.max_length, "at least 16 tokens")
        if not self.max_prompt:
            object.__setattr__(self, "max_prompt", min(160, self.max_length // 2))
        most = f"8 to {self.max_length - 1}, one less than max_length={self.max_length}"
        _check(8 <= self.max_prompt < self.max_length, "max_prompt", self.max_prompt, most)
        _check(self.batch >= 1, "batch", self.batch, "at least 1")
        _check(self.shard_tokens >= 1, "shard_tokens", self.shard_tokens, "at least 1")
        _check_device(self.device)
        _check(self.own_prompts >= 0, "own_prompts", self.own_prompts, "0 or more")
        _check(self.max_answer >= 0, "max_answer", self.max_answer, "0 (no other limit) or more")
        _check(self.wrapped >= 0, "wrapped", self.wrapped, "0 or more")
        _check(not self.wrapped or bool(self.passages), "wrapped", self.wrapped, "0, or give --passages DIR")
        _check(self.out not in self.passages, "passages", self.passages, "folders other than out")
        sources = self.own_prompts > 0 or bool(self.prompts) or bool(self.passages)
        _check(sources, "own_prompts", 0, "above 0, or give --prompts FILE or --passages DIR")
