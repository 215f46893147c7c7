"""Measures what agents ask of a server: predicted outputs, structured output, thinking, and the server itself.

    python -m lab agents prediction --model FILE.gguf --max-tokens 640 --limit 4 --repeats 2 --json FILE
    python -m lab agents structure | schemas | thinking | server

Contenders take turns, text by text, and every ratio is of two contenders on the same texts: of wall-clock seconds, and
of CPU seconds, which the machine's other work changes less. The spread is that of the repeats.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

from forerun.api.completion import Completion
from forerun.api.llm import LLM
from forerun.measure.bench.alternate import in_turn
from forerun.models.load.checkpoint import open_checkpoint
from lab.runner import Document, Run, share

EDITS = (
    "Rename the function {0} to {0}_of everywhere it is used.",
    "Add a one-line docstring to the first function or method.",
    "Add a comment line `# checked` at the top of the file.",
)
FILES = {each.__name__: inspect.getsource(each) for each in (textwrap.dedent, shutil.which, statistics.quantiles)}
USELESS = "It was the best of times, it was the worst of times, it was the age of wisdom. "
Contender = Callable[[int], Sequence[Completion]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=["prediction", "structure", "schemas", "thinking", "server"])
    share(parser, model="smollm2", repeats=3, max_tokens=160, threads=None, limit=None, device="auto", dtype="auto")
    parser.add_argument("--schemas", type=int, default=1000, help="generated schemas that texts must match")


def measure(run: Run) -> Document:
    parts: dict[str, Callable[[Run], Document]] = {
        "prediction": prediction, "structure": structure, "schemas": schemas, "thinking": thinking, "server": server,
    }  # fmt: skip
    return parts[run.flags.part](run)


def prediction(run: Run) -> Document:
    """Code edits with the file as prediction, beside plain decoding, look-ups alone and a useless prediction."""
    flags = run.flags
    llm = LLM(flags.model, threads=flags.threads, max_batch=1, device=flags.device, dtype=flags.dtype)
    asked = [
        (f"{edit.format(name)} Answer with the whole file and nothing else.\n\n```python\n{file}```", file)
        for edit in EDITS
        for name, file in FILES.items()
    ][: flags.limit]

    def contender(**options: Any) -> Contender:
        return lambda i: [llm.chat(asked[i][0], max_tokens=flags.max_tokens, **options)]

    contenders = {
        "plain": contender(drafter="none"),
        "default": contender(),
        "ngram": contender(drafter="ngram"),
        "useless": contender(prediction=20 * USELESS),
        "prediction": lambda i: [llm.chat(asked[i][0], max_tokens=flags.max_tokens, prediction=asked[i][1])],
    }
    times, tokens, equal, per_round = alternate(run, contenders, len(asked))
    pairs = {f"{one} over plain": ("plain", one) for one in ("prediction", "default", "ngram")}
    pairs["useless over default"] = "default", "useless"
    found = {"drafter": llm.engine.default_drafter, "texts": len(asked), "tokens": tokens}
    found |= {"tokens per round": per_round, "speedups": ratios(times, pairs)}
    return {"prediction": found, "equal": equal}


def structure(run: Run) -> Document:
    """Texts with a JSON schema and as many tokens without one, in batches of 1 and 32."""
    known, flags, found = import_module("tests.structure.answers").SCHEMAS, run.flags, dict[str, Any]()
    pairs = [(schema, text) for schema, texts in known.values() for text in texts]
    for batch in (1, 32):
        llm = LLM(flags.model, threads=flags.threads, max_batch=batch, max_length=1024)
        lengths = dict[int, list[int]]()

        def write(name: str, i: int, llm: LLM = llm, batch: int = batch, lengths: Any = lengths) -> Any:
            some = [pairs[(i * batch + k) % len(pairs)] for k in range(batch)]
            chats = [[{"role": "user", "content": f"{text} Answer in JSON."}] for _, text in some]
            if name == "free":  # as long as the structured texts, which are written first
                return llm.chat(chats, [{"max_tokens": length, "ignore_eos": True} for length in lengths[i]])
            done = llm.chat(chats, [{"json_schema": schema, "max_tokens": 200} for schema, _ in some])
            lengths[i] = [one.tokens for one in done]
            return done

        count = (flags.limit or 24) if batch == 1 else 2
        for i in range(count):
            write("schema", i)
        contenders: dict[str, Contender] = {name: partial(write, name) for name in ("schema", "free")}
        times, tokens, _, per_round = alternate(run, contenders, count)
        speeds = ratios(times, {"schema over free": ("free", "schema")})
        found[f"batch {batch}"] = {"tokens": tokens, "tokens per round": per_round, **speeds}
        run.say(f"batch {batch}: {found[f'batch {batch}']}")
    return {"structure": found}


def schemas(run: Run) -> Document:
    """Generated schemas, by a random network with a real tokenizer: is every text valid, and drafted as plain?"""
    made, flags = import_module("tests.structure.generated"), run.flags
    tokenizer = open_checkpoint(flags.model).tokenizer()
    fixed = {"controller": "fixed", "budget": 6}  # drafts in every round
    with TemporaryDirectory() as folder:
        small = made.small_model(Path(folder), tokenizer)
        llm = LLM(small, threads=flags.threads, max_batch=16, max_length=1024, speculative_config=fixed)
    found = dict.fromkeys(("texts", "valid", "cut", "equal", "tokens", "accepted"), 0)
    for first in range(0, flags.schemas, 16):
        seeds = range(first, min(first + 16, flags.schemas))
        kinds, prompts = [made.schema_of(seed) for seed in seeds], [f"Form {seed}." for seed in seeds]
        each = [made.settings_of(kind, seed, tokenizer) for seed, kind in zip(seeds, kinds, strict=True)]
        plain = llm.generate(prompts, each, drafter="none")
        drafted = llm.generate(prompts, each, drafter=("ngram", "recycling")[first // 16 % 2])
        for seed, kind, one, other in zip(seeds, kinds, plain, drafted, strict=True):
            same = one.token_ids == other.token_ids
            for name, more in {"texts": 1, "equal": same, "tokens": one.tokens, "accepted": other.accepted}.items():
                found[name] += more
            found["cut"] += one.finish_reason == "length"  # a random network need not end a string
            try:
                found["valid"] += made.check(one.text, kind) is None
            except ValueError as error:
                run.say(f"not valid: seed {seed}: {one.finish_reason}, {error}; {one.text[:200]!r}")
        run.save({"schemas": found})
    return {"schemas": found, "equal": found["texts"] == found["valid"] + found["cut"] == found["equal"]}


def thinking(run: Run) -> Document:
    """Budgets, and schemas behind thinking, under every drafter: how many texts break them?"""
    drafters, told = import_module("tests.exactness.harness").DRAFTERS, import_module("tests.structure.test_thinking")
    texts = broken = differ = 0
    for drafter in drafters:
        for temperature, kinds in ((0.0, ("many tokens", "harmony")), (1.0, ("one token", "overrunning"))):
            for kind in kinds:
                wanted, tokens = (told.written(kind, name, temperature)[0] for name in ("none", drafter))
                for request, plain, text in zip(told.requests(kind, temperature), wanted, tokens, strict=True):
                    texts, differ = texts + 1, differ + (plain != text)
                    try:
                        told.check(kind, request, text)
                    except (AssertionError, ValueError) as error:
                        broken += 1
                        run.say(f"{drafter}, {kind}: {error}")
        run.say(f"{drafter}: {texts} texts so far, {broken} broken, {differ} differ from plain's")
    found = {"drafters": [*drafters], "texts": texts, "violations": broken, "differ": differ}
    return {"thinking": found, "equal": not (broken or differ)}


def server(run: Run) -> Document:
    """One client of a server beside the library: the same texts, in turn."""
    flags, topics = run.flags, ("Tell a story.", "Explain rain.", "Describe a city.")
    asked = [f"{topic} Write at length." for topic in topics]
    llm = LLM(flags.model, threads=flags.threads, max_batch=1, max_length=1024)
    options = {"max_tokens": flags.max_tokens, "temperature": 0, "ignore_eos": True}
    texts: dict[tuple[str, int], str] = {}

    def library(i: int) -> Sequence[Completion]:
        done = llm.chat(asked[i], **options)
        texts["library", i] = done.text
        return [done]

    with served(flags) as http:

        def streamed(i: int) -> Sequence[Completion]:
            body = {"messages": [{"role": "user", "content": asked[i]}], **options, "stream": True}
            with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
            texts["stream", i] = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
            return []

        times, _, _, _ = alternate(run, {"library": library, "stream": streamed}, len(asked))
    equal = all(texts["library", i] == texts["stream", i] for i in range(len(asked)))
    pairs = {"stream over library": ("library", "stream")}
    return {"server": {"texts": len(asked), "seconds": ratios(times, pairs, cpu=False, slower=True)}, "equal": equal}


@contextmanager
def served(flags: argparse.Namespace) -> Iterator[Any]:
    import httpx

    from forerun.server.backends.start import LOAD_LLM, Loader
    from forerun.server.settings import ServerSettings

    start_process = import_module("tests.server.conftest").start_process
    engine = {"max_batch": 1, "max_length": 1024, "threads": flags.threads}
    loader = Loader(LOAD_LLM, {"model": flags.model, "engine": engine, "drafting": {}})
    made, thread, url = start_process(loader, ServerSettings(("model",)))
    with httpx.Client(base_url=url, timeout=600) as http:
        yield http
    made.should_exit = True
    thread.join(30)


Times = dict[tuple[str, str], float]  # of a contender: "wall" and "cpu" seconds


def alternate(
    run: Run, contenders: dict[str, Contender], texts: int
) -> tuple[list[Times], int, bool, dict[str, float]]:
    """Every text by every contender in turn: seconds by repeat, tokens of one, are texts equal, tokens per round."""
    repeats, tokens, equal = list[Times](), 0, True
    written, rounds = dict.fromkeys(contenders, 0), dict.fromkeys(contenders, 0)
    for contender in contenders.values():
        contender(0)  # what a first call prepares is not measured
    for repeat in range(run.flags.repeats):
        times: Times = {(name, kind): 0.0 for name in contenders for kind in ("wall", "cpu")}
        tokens = 0
        for i in range(texts):
            found = dict[str, list[list[int]]]()
            for name in in_turn([*contenders], i + repeat):
                wall, cpu = perf_counter(), process_time()
                done = contenders[name](i)
                times[name, "wall"] += perf_counter() - wall
                times[name, "cpu"] += process_time() - cpu
                found[name] = [one.token_ids for one in done]
                written[name] += sum(one.tokens for one in done)
                rounds[name] += sum(one.rounds for one in done)
            first = next(iter(found.values()))
            tokens += sum(map(len, first))
            equal = equal and all(other == first for other in found.values())
        repeats.append(times)
        run.say(", ".join(f"{name} {times[name, 'wall']:.1f} s" for name in contenders))
    return repeats, tokens, equal, {name: round(written[name] / (rounds[name] or 1), 3) for name in contenders}


def ratios(
    times: Sequence[Times], pairs: dict[str, tuple[str, str]], cpu: bool = True, slower: bool = False
) -> dict[str, Any]:
    """The second's speed over the first's (`slower`: its seconds over the first's): median, least and most."""
    found: dict[str, Any] = {}
    for says, (one, two) in pairs.items():
        for kind in ("wall", "cpu") if cpu else ("wall",):
            each = [t[two, kind] / t[one, kind] if slower else t[one, kind] / t[two, kind] for t in times]
            found[f"{says}, {kind}"] = [round(value, 3) for value in (median(each), min(each), max(each))]
    return found
