"""Options of training runs and data runs: frozen, checked when made; no torch here, so that --help is fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, get_args, get_type_hints

from forerun.core.errors import InvalidInput

Method = Literal[
    "medusa", "hydra", "eagle", "eagle3", "hass", "mtp", "dflash", "dflash2", "dspark", "peagle", "specdec",
    "draft-model", "early-exit",
]  # fmt: skip
METHODS: tuple[Method, ...] = get_args(Method)
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
WIDTHS = 16  # the width of a head is a multiple of this


def as_method(name: str) -> Method:
    for method in METHODS:
        if method == name:
            return method
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


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """One training run. None and 0 mean what the method's own recipe says."""

    method: Method
    target: str
    data: str  # one folder of `forerun data make`, or several with commas between
    out: str
    hottest: float | None = None  # texts that were written at a higher temperature are not learnt from
    # an answer that repeats itself is cut so many tokens behind the first repetition; 0 = never
    cut_loops: int = 0
    measure_on: str = ""  # greedy texts of other prompts: rounds through them are counted at every evaluation
    init: str = ""  # a finished head of the same method and shape to start from
    steps: int = 2000  # optimiser steps in all
    batch_tokens: int = 16384  # per step
    max_length: int = 512  # longer sequences are cut
    lr: float | None = None
    optimizer: Literal["adamw", "muon"] | None = None  # muon moves matrices along orthogonalised momentum
    warmup: float = 0.04  # share of the steps
    clip: float = 0.5
    weight_decay: float = 0.0
    seed: int = 0
    vocab: int = 0  # size of the draft vocabulary; 0 = all of the target's
    levels: int = 0  # heads of Medusa and Hydra, training-time steps of EAGLE and MTP, tokens of a block
    blocks: int = 1  # per Medusa or Hydra head
    layers: int = 0  # of a draft model, pruned from the target; of a block drafter; of an EAGLE-3 head
    width: int = 0  # of an EAGLE-3 head; 0 = the target's. A narrower one has an LM head of its own
    exit: int = 0  # layers in front of an exit adapter; 0 = two thirds of the target's
    # of an exit adapter, of DSpark's Markov head, of DFlash 2's selector, of the LoRA of `joint`; 0 = the recipe's
    rank: int = 0
    inner: int = 0  # width of the MLP of an EAGLE, MTP or block drafter's layer; 0 = the target's
    # hidden layers that EAGLE-3 reads, none named = three; a block drafter, none named = five
    features: tuple[int, ...] = ()
    decay: float = 0.8  # weight of each level relative to the one before
    loss: Literal["kl", "lk_hybrid"] = "kl"
    train_head: bool = True  # an LM head of its own; False = the target's rows, stored nowhere
    # EAGLE-3: matrices are written as one byte per weight; None = as those of `init` are
    one_byte: bool | None = None
    fc_norm: bool = False  # EAGLE-3.1
    norm_output: bool = False  # EAGLE-3.1
    joint: bool = False  # Medusa-2: a LoRA on the target is trained with the heads
    # how a block's positions weigh: by how far its draft gets, or by `decay`
    positions: Literal["survival", "decay"] = "survival"
    causal: bool = False  # a block's rows see only those before them, as in JetSpec
    window: int = 0  # positions that all layers of a block drafter but the last see; 0 = all positions
    anchors: float = 0.5  # share of the answers' tokens at which blocks start, per step
    stored: Literal["bfloat16", "int8"] = "bfloat16"  # how a block drafter is written
    holdout: float = 0.02  # share of the prompts that are held back, one at least
    eval_every: int = 200
    eval_batches: int = 4
    save_every: int = 200
    compile: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        _check(self.method in METHODS, "method", self.method, ", ".join(METHODS))
        for name in ("steps", "eval_every", "eval_batches", "save_every", "blocks"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("clip", *(("lr",) if self.lr is not None else ())):
            _check(0 < getattr(self, name) < inf, name, getattr(self, name), "a number above 0")
        _check(0 <= self.weight_decay < inf, "weight_decay", self.weight_decay, "0 or more")
        _check(0 < self.decay < inf, "decay", self.decay, "a number above 0")
        _check(self.vocab >= 0, "vocab", self.vocab, "0 (all of the target's) or more")
        _check(self.inner >= 0, "inner", self.inner, "0 (the target's) or more")
        _check_device(self.device)
        _check(self.max_length >= 16, "max_length", self.max_length, "at least 16 tokens")
        _check(self.batch_tokens >= 16, "batch_tokens", self.batch_tokens, "at least 16")
        _check(0 < self.holdout < 1, "holdout", self.holdout, "above 0, below 1")
        _check(0 <= self.warmup < 1, "warmup", self.warmup, "0 up to 1")
        _check(self.levels >= 0, "levels", self.levels, "0 (the recipe's) or more")
        _check(self.exit >= 0, "exit", self.exit, "0 (two thirds of the layers) or more")
        _check(self.rank >= 0, "rank", self.rank, "0 (the recipe's) or more")
        _check(self.cut_loops >= 0, "cut_loops", self.cut_loops, "0 (never) or more")
        _check(0 < self.anchors <= 1, "anchors", self.anchors, "above 0, up to 1")
        _check(self.layers >= 0, "layers", self.layers, "0 (the recipe's) or more")
        fresh = self.method in ("draft-model", "early-exit", "specdec")
        _check(not self.init or not fresh, "init", self.init, f"not for {self.method}")
        _check(self.window >= 0, "window", self.window, "0 (all positions) or more")
        for name in ("causal", "window"):
            given = getattr(self, name)
            _check(not given or self.method in BLOCKS, name, given, f"only for {', '.join(BLOCKS)}")
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
    target: str
    out: str
    prompts: tuple[str, ...] = ()  # files of the user's own: .txt lines or .jsonl with "prompt" or "turns"
    passages: tuple[str, ...] = ()  # folders of earlier runs, whose answers long prompts are made of
    wrapped: int = 0  # how many of these; 0 = one per passage
    own_prompts: int = 1000  # how many the target is asked to write itself
    openings: tuple[str, ...] = ("",)  # how these begin, in turn; "" = the target's choice
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)  # each prompt is answered once at each
    # tokens of a prompt, template included; 0 = 160, or half of max_length if that is less
    max_prompt: int = 0
    max_length: int = 512  # prompt and answer
    max_answer: int = 0  # tokens of an answer; 0 = what max_length leaves
    batch: int = 64  # sequences written at once
    shard_tokens: int = 2_000_000
    seed: int = 0
    device: str = "auto"

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
