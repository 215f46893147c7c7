"""Texts that the target wrote itself: prompts, then answers at several temperatures, in shards.

Answers must be the target's own: a drafter learns to guess this model, not the language. Long prompts are made of
the answers of an earlier run, which cost nothing to write again. Two stages, each of which picks up where an
interrupted run stopped: prompts.jsonl first, then one shard after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from forerun.build import load_target, make_engine
from forerun.engine.driver import Driver
from forerun.engine.engine import Engine
from forerun.models.config import DecoderConfig, supports
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.train.data.corpus import Text, write_shard
from forerun.train.data.passages import read_passages
from forerun.train.data.prompts import Chats, Novelty, Prompt, Renderer, around_user_turn, read_prompts
from forerun.train.data.wrap import FRAME, Wrapper
from forerun.train.data.writer import BatchWriter, Order, Written
from forerun.train.network import is_plain
from forerun.train.options import DataOptions
from forerun.train.provenance import write_provenance
from forerun.train.teacher import device_of, load_net
from forerun.types import Request

Write = Callable[[Iterable[Order]], Iterator[Written]]
_LEAST_ANSWER = 32  # tokens left for the answer to a prompt made of passages


@dataclass(frozen=True, slots=True)
class DataProgress:
    """Where a run is."""

    stage: str  # "prompts", "wrapped" or "answers"
    done: int
    total: int
    tokens: int  # in the answers so far, or in the prompts


Report = Callable[[DataProgress], None]


def make_data(options: DataOptions, report: Report = lambda progress: None) -> Path:
    """Prompts and answers into `options.out`."""
    checkpoint = open_checkpoint(options.target)
    tokenizer = checkpoint.tokenizer()
    write = _writer(checkpoint, options)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    prompts = write_prompts(options, tokenizer, write, folder, report)
    tokens = write_answers(options, tokenizer, write, folder, prompts, report)
    write_provenance(folder, options, prompts=len(prompts), answer_tokens=tokens)
    return folder


def _writer(checkpoint: Checkpoint, options: DataOptions) -> Write:
    """One static batch for the plain families; the engine, without drafting, for all others."""
    stops, device = checkpoint.tokenizer().eos_ids, device_of(options.device)
    if supports(checkpoint.config) and is_plain(DecoderConfig.from_hf(checkpoint.config)):
        net = load_net(checkpoint, device)
        length = options.max_length
        return BatchWriter(net, stops, rows=options.batch, max_length=length, seed=options.seed).write
    target = load_target(checkpoint, EngineConfig(device=str(device)))
    speculative = SpeculativeConfig(drafter="none", verifier="exact", controller="fixed")
    engine = make_engine(target, stops, speculative, EngineConfig(max_batch=options.batch))
    return lambda orders: write_with_engine(engine, orders)


def write_with_engine(engine: Engine, orders: Iterable[Order]) -> Iterator[Written]:
    """Texts by way of the engine: any target, at the pace of a loop on the host."""
    running = dict[int, tuple[Order, list[int]]]()

    def requests() -> Iterator[Request]:
        for place, order in enumerate(orders):
            running[place] = order, list(order.prompt)
            most = order.max_length - len(order.prompt)
            params = SamplingParams(max_tokens=most, temperature=order.temperature)
            yield Request(tuple(order.prompt), params)

    for place, event in Driver(engine).stream(requests(), at_once=engine.max_batch):
        order, tokens = running[place]
        tokens += event.tokens
        if event.error is not None:
            raise event.error
        if event.finished:
            del running[place]
            yield Written(order, tokens, event.finished == "stop")


def write_prompts(
    options: DataOptions, tokenizer: Chats, write: Write, folder: Path, report: Report
) -> list[Prompt]:
    """The prompts of all files, those that the target writes, and those made of passages; no two alike."""
    kept = folder / "prompts.jsonl"
    if kept.is_file():
        return [json.loads(line) for line in kept.read_text(encoding="utf-8").split("\n") if line]
    novelty = Novelty()
    prompts: list[Prompt] = [
        text for text in read_prompts(map(Path, options.prompts)) if novelty.is_new(text)
    ]
    wrapped = _wrapped(options, tokenizer, report)  # first: a folder that will not do should be known at once
    before, _ = around_user_turn(tokenizer) if options.own_prompts else ("", "")
    starts = [tokenizer.encode(before + opening, add_special=False) or [0] for opening in options.openings]
    turns = len(tokenizer.encode(before, add_special=False))
    orders = (Order(starts[i % len(starts)], 1.0, options.max_prompt, i) for i in range(options.own_prompts))
    tokens = 0
    for done, written in enumerate(write(orders) if options.own_prompts else (), start=1):
        text = tokenizer.decode(written.tokens[turns:]).strip()
        tokens += len(written.tokens) - len(written.order.prompt)
        whole = written.ended or bool(options.openings[written.order.number % len(starts)])
        if whole and len(text) > 8 and novelty.is_new(text):  # a passage may be cut, a question may not
            prompts.append(text)
        report(DataProgress("prompts", done, options.own_prompts, tokens))
    prompts += wrapped
    part = kept.with_suffix(".part")
    part.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    part.replace(kept)
    return prompts


def _wrapped(options: DataOptions, tokenizer: Chats, report: Report) -> list[Prompt]:
    """Prompts made of the answers of earlier runs."""
    if not options.passages:
        return []
    limit = min(options.max_prompt, options.max_length - _LEAST_ANSWER)
    most = limit - Renderer(tokenizer).frame - FRAME
    passages = read_passages(options.passages, tokenizer, most=most, count=options.wrapped, seed=options.seed)
    total, tokens = options.wrapped or len(passages), 0
    prompts = list[Prompt]()
    for wrapped in Wrapper(tokenizer, passages, limit, options.seed).wrap(total):
        prompts.append(wrapped.prompt)
        tokens += wrapped.length
        report(DataProgress("wrapped", len(prompts), total, tokens))
    return prompts


def write_answers(
    options: DataOptions,
    tokenizer: Chats,
    write: Write,
    folder: Path,
    prompts: Sequence[Prompt],
    report: Report,
) -> int:
    """Every prompt once at each temperature, shard by shard; what earlier runs left in shards is not written again."""
    shards = sorted(folder.glob("shard-*.safetensors"))
    known = {n for file in shards for n in load_file(file)["numbers"].tolist()}
    orders = (order for order in _orders(options, tokenizer, prompts) if order.number not in known)
    total = len(prompts) * len(options.temperatures)
    texts: list[Text] = []
    tokens = held = 0
    for done, written in enumerate(write(orders), start=len(known) + 1):
        order, answer = written.order, len(written.tokens) - len(written.order.prompt)
        texts.append(Text(written.tokens, len(order.prompt), order.temperature, order.number))
        tokens, held = tokens + answer, held + len(written.tokens)
        report(DataProgress("answers", done, total, tokens))
        if held >= options.shard_tokens:
            write_shard(folder / f"shard-{len(shards):05}.safetensors", texts)
            shards.append(folder)
            texts, held = [], 0
    if texts:
        write_shard(folder / f"shard-{len(shards):05}.safetensors", texts)
    return tokens


def _orders(options: DataOptions, tokenizer: Chats, prompts: Iterable[Prompt]) -> Iterator[Order]:
    heats, render = options.temperatures, Renderer(tokenizer)
    for i, prompt in enumerate(prompts):
        asked = render(prompt)
        if len(asked) <= options.max_length - 16:
            for j, heat in enumerate(heats):
                yield Order(asked, heat, options.max_length, i * len(heats) + j)
