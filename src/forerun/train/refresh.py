"""Train a head further on recorded traffic, compare it with the one before, and publish it where it is better.

The texts of `forerun serve --record` are what the target itself wrote for real prompts: on-policy data. They are read,
freed of repeats and written in shards. A part of the prompts is held back; both heads draft for these in the engine,
and tokens per round decide. Every result is a version of its own (forerun.heads), and a server that follows
the folder swaps it in. Copies of texts are not kept.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.build.engine import load_target, make_engine
from forerun.build.fingerprint import find_head
from forerun.core.errors import InvalidInput
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.drafters.heads.eagle_head import read_head
from forerun.drafters.heads.medusa import read_heads
from forerun.engine.driver import Driver
from forerun.heads import HeadVersions
from forerun.models.base import Target
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.train.data.corpus import Corpus, Text, write_shard
from forerun.train.data.folder import require_recordings
from forerun.train.export import kind_of_head
from forerun.train.loop import Report
from forerun.train.options import TrainOptions, as_method
from forerun.train.run import train

log = logging.getLogger(__name__)
DEFAULTS: Mapping[str, Any] = {"steps": 100, "batch_tokens": 2048, "holdout": 0.2, "save_every": 1 << 30}
# training-time steps of an EAGLE head, and drafted tokens a round when heads are compared
LEVELS, BUDGET = 5, 5
MOST_TEXTS = 48  # held-back ones that are written to compare
RESAMPLES = 2000

Counts = list[tuple[int, int]]  # per text: tokens, rounds


@dataclass(frozen=True, slots=True)
class Refreshed:
    version: str
    former: str
    before: float  # tokens per round of the former head on held-back prompts
    after: float
    low: float  # of after / before, 95%
    high: float
    texts: int  # held back
    published: bool

    def __str__(self) -> str:
        change = f"{self.after / self.before:.3f}x ({self.low:.3f} to {self.high:.3f})"
        found = f"{self.before:.3f} -> {self.after:.3f} tokens per round, {change}, on {self.texts} held-back texts"
        verdict = "published" if self.published else f"not better: {self.former} stays"
        return f"{self.version}: {found}; {verdict}"


def refresh(
    given: Mapping[str, Any], report: Report = lambda progress: None, say: Callable[[str], None] = log.info
) -> Refreshed:
    """`given` has fields of TrainOptions: `data` is a folder of recorded texts, `out` one of versions of a head."""
    versions = HeadVersions(Path(given["out"]))
    checkpoint = open_checkpoint(given["target"])
    former = _former(versions, given.get("init"), checkpoint)
    name = versions.next_name()
    part = versions.folder / f".{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        options = _options(given, former, part)
        recorded = read_recordings(Path(given["data"]), options.max_length)
        say(
            f"{len(recorded.texts)} recorded texts ({recorded.repeats} repeats, {recorded.unreadable} unreadable), "
            f"{recorded.tokens_per_round:.2f} tokens per round as served"
        )
        write_shard(Path(options.data) / "shard-00000.safetensors", recorded.texts)
        train(options, report, say)
        held_back = _held_back(options)
        target = load_target(checkpoint, EngineConfig(device=options.device))
        stops = checkpoint.tokenizer().eos_ids
        counts = [count_rounds(head, target, stops, held_back) for head in (former, part)]
        found = _weigh(name, former.name, *counts)
        shutil.rmtree(options.data)
        shutil.rmtree(part / "checkpoint", ignore_errors=True)
        (part / "refresh.json").write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
        part.rename(versions.folder / name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if found.published:
        versions.publish(name)
    return found


def _former(versions: HeadVersions, init: str | None, checkpoint: Checkpoint) -> Path:
    """The head to start from: the one named, else the current version, else the package's; version 1 where none is."""
    current = versions.current()
    if init is None and current is not None:
        return current
    if init is None:
        boxed = find_head(checkpoint)
        if boxed is None:
            raise InvalidInput(
                f"no head comes with the package for {checkpoint.name}; name one to start from: --init FOLDER"
            )
        init = str(boxed.head.path)
    kind_of_head(Path(init))  # raises where it is none
    if current is not None:
        return Path(init)
    name = versions.next_name()
    shutil.copytree(init, versions.folder / name)  # what a new head is rolled back to
    versions.publish(name)
    return versions.folder / name


def _options(given: Mapping[str, Any], head: Path, out: Path) -> TrainOptions:
    """A run that starts from this head, in its shape."""
    kind, shape = kind_of_head(head), dict[str, Any]()
    if kind in ("medusa", "hydra"):
        heads, _ = read_heads(head, "medusa" if kind == "medusa" else "hydra")
        shape = {"levels": heads.count, "blocks": heads.blocks}
    else:
        config, weights = read_head(head)
        shape = {
            "fc_norm": config.fc_norm, "norm_output": config.norm_output, "features": config.layers,
            "train_head": "lm_head.weight" in weights, "levels": LEVELS if kind == "eagle3" else 0,
        }  # fmt: skip
    wanted = {**DEFAULTS, **shape, **given}
    wanted |= {"method": as_method(kind), "init": str(head), "data": str(out / "data"), "out": str(out)}
    wanted.setdefault("eval_every", wanted["steps"])
    options = TrainOptions(**wanted)
    if "lr" not in given:  # a third of the recipe's: the head is finished already
        options = TrainOptions(**{**wanted, "lr": options.rate / 3})
    return options


def _held_back(options: TrainOptions) -> list[tuple[tuple[int, ...], int]]:
    """Prompts that were not learnt from, each with the length of its answer."""
    corpus = Corpus(options.data, max_length=options.max_length, holdout=options.holdout)
    spans = random.Random(options.seed).sample(corpus.held_back, min(MOST_TEXTS, len(corpus.held_back)))
    return [(tuple(corpus.tokens[first:answer].tolist()), end - answer) for first, end, answer in spans]


def count_rounds(
    head: Path, target: Target, stops: frozenset[int], prompts: Sequence[tuple[tuple[int, ...], int]]
) -> Counts:
    """Tokens and rounds of each prompt's greedy answer, drafted by this head in chains of a fixed length."""
    speculative = SpeculativeConfig(
        drafter=kind_of_head(head), draft_model=str(head), budget=BUDGET, controller="fixed"
    )
    engine = make_engine(target, stops, speculative, EngineConfig(max_batch=8))
    requests = [Request(prompt, SamplingParams(max_tokens=length, temperature=0)) for prompt, length in prompts]
    return [(seq.stats.tokens, seq.stats.rounds) for seq in Driver(engine).write(requests)]


def _weigh(version: str, former: str, before: Counts, after: Counts) -> Refreshed:
    """Tokens per round of both, and the interval of their ratio: texts are drawn again and again, in pairs."""
    chance, texts = random.Random(0), range(len(before))
    ratios = []
    for _ in range(RESAMPLES):
        drawn = chance.choices(texts, k=len(before))
        ratios.append(_rate([after[i] for i in drawn]) / _rate([before[i] for i in drawn]))
    ratios.sort()
    low, high = ratios[RESAMPLES // 40], ratios[-RESAMPLES // 40]
    better = low > 1.0 and len(before) > 1  # one text gives no interval
    return Refreshed(version, former, _rate(before), _rate(after), low, high, len(before), better)


def _rate(counts: Counts) -> float:
    return sum(tokens for tokens, _ in counts) / max(1, sum(rounds for _, rounds in counts))


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded: texts without repeats, and how well drafting went when they were written."""

    texts: list[Text]
    unreadable: int  # lines
    repeats: int
    tokens_per_round: float  # of all texts, as served; 0.0 where no rounds were noted


def read_recordings(folder: Path, max_length: int) -> Recorded:
    """All texts of a folder; a prompt and its answer that occur again count once."""
    files = require_recordings(folder)
    texts, seen = list[Text](), set[tuple[int, ...]]()
    unreadable = repeats = tokens = rounds = 0
    for line in _lines(files):
        text = _text_of(line, len(texts), max_length)
        if text is None:
            unreadable += 1
            continue
        tokens, rounds = tokens + len(line["tokens"]), rounds + _whole(line.get("rounds"))
        if tuple(text.tokens) in seen:
            repeats += 1
        else:
            seen.add(tuple(text.tokens))
            texts.append(text)
    if not texts:
        raise InvalidInput(f"{folder} holds {unreadable} lines and no text that can be read; record again")
    return Recorded(texts, unreadable, repeats, tokens / rounds if rounds else 0.0)


def _lines(files: list[Path]) -> Iterator[Any]:
    """Every line, parsed; None where it cannot be: a server may have been killed while it wrote."""
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as opened:
            for line in opened:
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError):
                    yield None


def _text_of(line: Any, number: int, max_length: int) -> Text | None:
    """A line as a text, cut to the length that is trained on; None where it is none."""
    if not isinstance(line, dict):
        return None
    names = "prompt", "tokens", "temperature"
    prompt, tokens, temperature = (line.get(name, 0) for name in names)
    if not (_are_ids(prompt) and _are_ids(tokens) and tokens) or len(prompt) >= max_length:
        return None
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    return Text([*prompt, *tokens][:max_length], len(prompt), float(temperature) if is_number else 1.0, number)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)


def _whole(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
