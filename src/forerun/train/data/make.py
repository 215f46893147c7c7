"""Make training data: prompts, then the target's own answers at several temperatures, in shards.

Answers must be the target's own: a drafter learns to predict this model, not the language. Long prompts are made of
the answers of an earlier run, which are already written. Two stages: prompts.jsonl, which is written whole, then one
shard after the other; an interrupted run resumes behind its last text. What is dropped is counted and reported;
a run that would leave nothing is an error.

With `ray_writer` many workers on Ray write, and the shards are those that one machine makes from the same seed. A text
is a function of its order: seed, number, prompt and temperature. Workers take the orders in lots, one after the other,
in whatever order they are done; `make_data` sorts what comes back. A lot whose worker dies is written again by another
one. A run that was interrupted goes on behind the last shard, as on one machine.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from forerun.build.engine import load_target, make_engine
from forerun.core.errors import DamagedFile, InvalidInput, MissingDependency, brief
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.engine.driver import Driver
from forerun.engine.engine import Engine
from forerun.models.config import DecoderConfig, supports
from forerun.models.encoder_decoder.config import supports as is_encoder_decoder
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.train.checkpoint import write_provenance
from forerun.train.data.corpus import Text, read_shard, write_shard
from forerun.train.data.folder import keep_settings
from forerun.train.data.prompts import (
    FRAME,
    Chats,
    Novelty,
    Prompt,
    Renderer,
    Sources,
    Tally,
    Wrapper,
    around_user_turn,
    read_passages,
    read_prompts,
)
from forerun.train.data.writer import BatchWriter, Order, Written
from forerun.train.network import is_plain
from forerun.train.options import DataOptions
from forerun.train.teacher import load_net, torch_device

Write = Callable[[Iterable[Order]], Iterator[Written]]
log = logging.getLogger(__name__)
_ALIKE = "are like another"
_LEAST_ROOM = 16  # tokens left for the answer to any prompt
_LEAST_ANSWER = 32  # tokens left for the answer to a prompt made of passages


@dataclass(frozen=True, slots=True)
class DataProgress:
    stage: str  # "prompts", "wrapped" or "answers"
    done: int
    total: int
    tokens: int  # in the answers so far, or in the prompts


Report = Callable[[DataProgress], None]
Say = Callable[[str], None]


def make_data(
    options: DataOptions, report: Report = lambda progress: None, say: Say = log.info, write: Write | None = None
) -> Path:
    """Prompts and answers into `options.out`; `say` is told what was dropped and what was written.

    `write` writes the texts, in any order, instead of this process: `ray_writer` has one for many workers.
    """
    checkpoint = open_checkpoint(options.target)
    tokenizer = _tokenizer(checkpoint, options)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    keep_settings(folder, options)
    write = write or writer_for(checkpoint, options)
    prompts = write_prompts(options, tokenizer, write, folder, report, say)
    started = perf_counter()
    texts, tokens = write_answers(options, tokenizer, write, folder, prompts, report, say)
    seconds = perf_counter() - started
    write_provenance(folder, options, prompts=len(prompts), answer_tokens=tokens)
    say(f"{texts} texts written, {tokens} tokens in their answers, {tokens / seconds:.0f} tokens/s")
    return folder


def _tokenizer(checkpoint: Checkpoint, options: DataOptions) -> Chats:
    """Of a chat model; of a model that continues texts; of an encoder-decoder, which writes no prompts."""
    if not is_encoder_decoder(checkpoint.config):
        tokenizer = checkpoint.tokenizer()
        return tokenizer if tokenizer.has_chat_template else Sources(tokenizer)
    if options.own_prompts or options.passages:
        raise InvalidInput("an encoder-decoder writes no prompts of its own; give --prompts FILE and --own-prompts 0")
    return Sources(checkpoint.tokenizer())


def writer_for(checkpoint: Checkpoint, options: DataOptions, by_order: bool = False) -> Write:
    """On a GPU one static batch where the family is plain; else the engine, which has the native kernels of a CPU.

    `by_order` asks for texts that are a function of their orders alone: by the engine, because the rows of a
    static batch share their random numbers.
    """
    stops, device = checkpoint.tokenizer().eos_ids, torch_device(options.device)
    plain = supports(checkpoint.config) and is_plain(DecoderConfig.from_hf(checkpoint.config))
    if plain and device.type != "cpu" and not by_order:
        net = load_net(checkpoint, device)
        length = options.max_length
        return BatchWriter(net, stops, rows=options.batch, max_length=length, seed=options.seed).write
    target = load_target(checkpoint, EngineConfig(device=str(device)))
    speculative = SpeculativeConfig(drafter="none", verifier="exact", controller="fixed")
    engine = make_engine(target, stops, speculative, EngineConfig(max_batch=options.batch))
    return lambda orders: write_with_engine(engine, orders, options.seed)


def write_with_engine(engine: Engine, orders: Iterable[Order], seed: int = 0) -> Iterator[Written]:
    """Writes with the engine, for any target; an order's text does not depend on what else is in the batch."""
    running = dict[int, tuple[Order, list[int]]]()

    def requests() -> Iterator[Request]:
        for place, order in enumerate(orders):
            running[place] = order, list(order.prompt)
            own = Random(f"{seed}:{order.number}:{order.temperature}:{len(order.prompt)}").getrandbits(62)
            most = order.max_length - len(order.prompt)
            params = SamplingParams(max_tokens=most, temperature=order.temperature, seed=own)
            yield Request(tuple(order.prompt), params)

    for place, event in Driver(engine).stream(requests(), at_once=engine.max_batch):
        order, tokens = running[place]
        tokens += event.tokens
        if event.error is not None:
            raise event.error
        if event.finished:
            del running[place]
            yield Written(order, tokens, event.finished == "stop")


def in_order(written: Iterable[Written], orders: Iterable[Order]) -> Iterator[Written]:
    """What was written, in the order of the orders: so folders do not depend on which text ended first."""
    waiting, wanted = dict[int, Written](), iter([order.number for order in orders])
    number = next(wanted, None)
    for each in written:
        waiting[each.order.number] = each
        while number is not None and number in waiting:
            yield waiting.pop(number)
            number = next(wanted, None)
    assert not waiting, "a text was written that nobody had ordered"


def write_prompts(
    options: DataOptions, tokenizer: Chats, write: Write, folder: Path, report: Report, say: Say = log.info
) -> list[Prompt]:
    """The prompts of all files, those that the target writes, and those made of passages; no two alike."""
    kept = folder / "prompts.jsonl"
    if known := _read_kept(kept):
        say(f"{len(known)} prompts are in {kept} already")
        return known
    novelty, tally = Novelty(), Tally()
    given = read_prompts(map(Path, options.prompts))
    prompts: list[Prompt] = [text for text in given if tally.count(None if novelty.is_new(text) else _ALIKE)]
    wrapped = _wrapped(options, tokenizer, report)  # first, so that an unusable folder is reported early
    prompts += _own_prompts(options, tokenizer, write, novelty, tally, report) if options.own_prompts else ()
    tally.seen += len(wrapped)
    prompts += wrapped
    if not prompts:
        raise InvalidInput(f"no prompt is left to answer: {tally.in_words}; {_next_step(options)}")
    say(tally.in_words)
    part = kept.with_suffix(".part")
    part.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    part.replace(kept)
    return prompts


def _read_kept(kept: Path) -> list[Prompt]:
    if not kept.is_file():
        return []
    try:
        return [json.loads(line) for line in kept.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFile(f"{kept} is damaged ({brief(error)}); remove it to write the prompts again") from None


def _own_prompts(
    options: DataOptions, tokenizer: Chats, write: Write, novelty: Novelty, tally: Tally, report: Report
) -> Iterator[Prompt]:
    """What the target writes when it is given an empty user turn, or one with an opening."""
    before, _ = around_user_turn(tokenizer)
    starts = [tokenizer.encode(before + opening, add_special=False) or [0] for opening in options.openings]
    turns = len(tokenizer.encode(before, add_special=False))
    if (longest := max(map(len, starts))) >= options.max_prompt:
        raise InvalidInput(
            f"max_prompt={options.max_prompt} leaves no room for a prompt: the chat template and the opening take "
            f"{longest} tokens; raise --max-prompt"
        )
    orders = [Order(starts[i % len(starts)], 1.0, options.max_prompt, i) for i in range(options.own_prompts)]
    tokens, unfinished = (0, f"did not end within --max-prompt {options.max_prompt} ({turns} of it the template)")
    for done, written in enumerate(in_order(write(orders), orders), start=1):
        text = tokenizer.decode(written.tokens[turns:]).strip()
        tokens += len(written.tokens) - len(written.order.prompt)
        opened = bool(options.openings[written.order.number % len(starts)])
        reason = None
        may_be_cut = opened or isinstance(tokenizer, Sources)  # a passage, but not a question
        if not (written.ended or may_be_cut):
            reason = unfinished
        elif len(text) <= 8:
            reason = "hold no more than 8 letters"
        elif not novelty.is_new(text):
            reason = _ALIKE
        if tally.count(reason):
            yield text
        report(DataProgress("prompts", done, options.own_prompts, tokens))


def _next_step(options: DataOptions) -> str:
    return "raise --max-prompt or --own-prompts" if options.own_prompts else "give other --prompts"


def _wrapped(options: DataOptions, tokenizer: Chats, report: Report) -> list[Prompt]:
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
    say: Say = log.info,
) -> tuple[int, int]:
    """Every prompt once at each temperature, shard by shard; what earlier runs left in shards is not written again.

    How many texts were written, and how many tokens are in their answers.
    """
    shards = sorted(folder.glob("shard-*.safetensors"))
    known = {n for file in shards for n in read_shard(file)["numbers"].tolist()}
    ordered = _orders(options, tokenizer, prompts, say)
    orders = [order for order in ordered if order.number not in known]
    texts: list[Text] = []
    tokens = held = 0
    try:
        for done, written in enumerate(in_order(write(orders), orders), start=1):
            order, answer = written.order, len(written.tokens) - len(written.order.prompt)
            texts.append(Text(written.tokens, len(order.prompt), order.temperature, order.number))
            tokens, held = tokens + answer, held + len(written.tokens)
            report(DataProgress("answers", len(ordered) - len(orders) + done, len(ordered), tokens))
            if held >= options.shard_tokens:
                write_shard(folder / f"shard-{len(shards):05}.safetensors", texts)
                shards.append(folder)
                texts, held = [], 0
    finally:  # what an interrupted run has written is kept: a shard may be hours of work on a CPU
        if texts:
            write_shard(folder / f"shard-{len(shards):05}.safetensors", texts)
    return len(orders), tokens


def _orders(options: DataOptions, tokenizer: Chats, prompts: Iterable[Prompt], say: Say) -> list[Order]:
    """What is to be written: each prompt that leaves room for an answer, at each temperature."""
    heats, render, tally = options.temperatures, Renderer(tokenizer), Tally()
    most = options.max_length - _LEAST_ROOM
    too_long = f"leave less than {_LEAST_ROOM} tokens of --max-length {options.max_length} for an answer"
    orders: list[Order] = []
    for i, prompt in enumerate(prompts):
        asked = render(prompt)
        if tally.count(None if len(asked) <= most else too_long):
            longest = len(asked) + (options.max_answer or options.max_length)
            ends = min(options.max_length, longest)
            orders += [Order(asked, heat, ends, i * len(heats) + j) for j, heat in enumerate(heats)]
    if tally.dropped:
        say(tally.in_words)
    if not orders:
        raise InvalidInput(f"no prompt is left to answer: {tally.in_words}; raise --max-length")
    return orders


AHEAD = 2  # lots that a worker has at hand, so that it never waits
TRIES = 4  # times that a lot is written anew where its worker died


class Worker:
    def __init__(self, options: dict[str, Any], threads: int) -> None:
        import torch

        from forerun.models.load.checkpoint import open_checkpoint

        torch.set_num_threads(threads)
        self._options = DataOptions(**options)
        self._write = writer_for(open_checkpoint(self._options.target), self._options, by_order=True)

    def write(self, orders: Sequence[Order]) -> list[Written]:
        return list(self._write(orders))


@contextmanager
def ray_writer(options: DataOptions, workers: int, gpus: float = 0.0) -> Iterator[Write]:
    """A `Write` over so many workers; joins the cluster of RAY_ADDRESS, else starts one on this machine."""
    if workers < 1:
        raise InvalidInput(f"workers={workers} is out of range: 1 or more")
    try:
        import ray
    except ImportError:
        raise MissingDependency("--ray needs ray; pip install 'forerun[ray]'") from None
    started = not ray.is_initialized()
    if started:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        alone = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": max(workers, os.cpu_count() or 1)}
        ray.init(log_to_driver=False, include_dashboard=False, **alone)
    threads = max(1, (os.cpu_count() or 1) // workers)
    actor: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1, max_task_retries=TRIES)(Worker)
    crew = [actor.remote(asdict(options), threads) for _ in range(workers)]
    try:
        yield lambda orders: write_with_workers(ray, crew, orders, options.batch)
    finally:
        for worker in crew:
            ray.kill(worker)
        if started:
            ray.shutdown()


def write_with_workers(ray: Any, crew: Sequence[Any], orders: Iterable[Order], lot: int) -> Iterator[Written]:
    """Every order, written by whichever worker is free."""
    left = iter(orders)
    running: dict[Any, Any] = {}

    def start(worker: Any) -> None:
        if some := list(islice(left, lot)):
            running[worker.write.remote(some)] = worker

    for worker in [each for _ in range(AHEAD) for each in crew]:
        start(worker)
    while running:
        done, _ = ray.wait(list(running), num_returns=1)
        for ref in done:
            start(running.pop(ref))
            yield from ray.get(ref)
