"""Measures an encoder-decoder: our texts against transformers' own, sentence by sentence, and both speeds.

    python -m lab translate opus-en-fr --sentences FILE --count 200 --drafters none,ngram

FILE holds a sentence per line, or JSON lines with `turns`, whose first turn is cut into sentences; without one a few
sentences of our own are translated. `--batch` sentences at a time, every contender in turn, so that what else the
machine does meets all alike; `--shared` lets drafters learn from the sentences before. Seconds are those of whole
calls, from ids to ids.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from forerun.api.llm import LLM
from forerun.cli.bench import words
from forerun.core import registry
from forerun.measure.bench.alternate import in_turn
from forerun.models.load.catalog import find_model
from lab.runner import Document, Run, share

PEER = "transformers"
OWN = (
    "The train to Lyon leaves at eight o'clock, and we must not be late.",
    "Margaret Holloway wrote to the Ministry of Agriculture in March 1987.",
    "If it rains tomorrow, the children will stay at home and paint.",
    "Nobody in the village remembers who built the old bridge.",
    "Please send the invoice to accounts@example.com before Friday.",
    "Our laboratory measured the temperature every ten minutes for a year.",
)
Source = tuple[int, ...]
# sources -> tokens of each, rounds of all
Translate = Callable[[Sequence[Source]], tuple[list[list[int]], int]]


@dataclass(slots=True)
class Tally:
    seconds: list[float] = field(default_factory=list)  # by call
    tokens: int = 0
    rounds: int = 0  # of every sentence
    equal: int = 0  # texts that are those of transformers

    def figures(self, sentences: int) -> dict[str, Any]:
        return {
            "tokens_per_second": round(self.tokens / sum(self.seconds), 2),
            "tokens_per_round": round(self.tokens / self.rounds, 3),
            "milliseconds_per_token": round(1e3 * sum(self.seconds) / self.tokens, 3),
            "equal": self.equal,
            "of": sentences,
        }


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="an encoder-decoder: a known name or a folder")
    parser.add_argument("--sentences", type=Path, help="a sentence per line, or JSON lines with `turns`")
    parser.add_argument("--count", type=int, default=200)
    share(parser, drafters="none,ngram", draft_model=None, dtype="float32", max_tokens=128, threads=None)
    parser.add_argument("--batch", type=int, default=1, help="sentences at once, of every contender")
    parser.add_argument("--shared", action="store_true", help="drafters learn from earlier sentences")


def measure(run: Run) -> Document:
    """Every sentence by every contender, and what it came to."""
    given = run.flags
    if given.threads:
        torch.set_num_threads(given.threads)
    sentences = read_sentences(given.sentences, given.count)
    config = {"dtype": given.dtype, "max_batch": given.batch}
    llms = {
        name: LLM(given.model, drafter=name, speculative_config=_speculative(name, given), config=config)
        for name in words(given.drafters)
    }
    tokenizer = next(iter(llms.values())).tokenizer
    contenders = {PEER: peer_contender(given.model, given.max_tokens)}
    contenders |= {name: our_contender(llm, given.max_tokens) for name, llm in llms.items()}
    sources = [tuple(tokenizer.encode(sentence)) for sentence in sentences]
    for contender in contenders.values():  # what a first call prepares is not measured
        contender([tuple(tokenizer.encode(OWN[0]))])
    tallies = alternate(contenders, sources, given.batch)
    figures = {name: tally.figures(len(sources)) for name, tally in tallies.items()}
    conditions = {
        "model": given.model, "sentences": len(sources), "max_tokens": given.max_tokens, "batch": given.batch,
        "shared": given.shared, "dtype": given.dtype, "threads": torch.get_num_threads(),
    }  # fmt: skip
    equal = all(tally.equal == len(sources) for tally in tallies.values())
    return {"translate": figures, "speedup": speedups(tallies), "equal": equal, "conditions": conditions}


def _speculative(drafter: str, given: argparse.Namespace) -> dict[str, Any]:
    """The settings of a drafter: a head or a second model only where it runs one."""
    needed = registry.drafters.spec(drafter).needs != "nothing"
    return {"shared": given.shared, **({"draft_model": given.draft_model} if needed else {})}


def alternate(contenders: dict[str, Translate], sources: Sequence[Source], batch: int = 1) -> dict[str, Tally]:
    """Every sentence by every contender in turn; texts are compared with those of transformers."""
    tallies = {name: Tally() for name in contenders}
    for number, first in enumerate(range(0, len(sources), batch)):
        texts: dict[str, list[list[int]]] = {}
        for name in in_turn([*contenders], number):
            started = perf_counter()
            texts[name], rounds = contenders[name](sources[first : first + batch])
            tally = tallies[name]
            tally.seconds.append(perf_counter() - started)
            tally.tokens += sum(map(len, texts[name]))
            tally.rounds += rounds
        for name, found in texts.items():
            tallies[name].equal += sum(a == b for a, b in zip(found, texts[PEER], strict=True))
    return tallies


def speedups(tallies: dict[str, Tally]) -> dict[str, dict[str, float]]:
    """Of each over transformers: by all seconds, and the median over sentences, which a busy machine moves less."""
    peer = tallies[PEER]
    found = {}
    for name, tally in tallies.items():
        pairs = zip(peer.seconds, tally.seconds, strict=True)
        found[name] = {
            "of_all": round(sum(peer.seconds) / sum(tally.seconds), 3),
            "median": round(median(theirs / ours for theirs, ours in pairs), 3),
        }
    return found


def read_sentences(file: Path | None, count: int) -> list[str]:
    """The first `count` sentences of a file; of our own without one."""
    if file is None:
        return list(OWN[:count])
    sentences: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["turns"][0] if line.startswith("{") else line
        sentences += [part.strip() for part in re.split(r"(?<=[.?!])\s+", text) if part.strip()]
        if len(sentences) >= count:
            break
    return sentences[:count]


def our_contender(llm: LLM, max_tokens: int) -> Translate:
    def translate(sources: Sequence[Source]) -> tuple[list[list[int]], int]:
        done = llm.generate(list(sources), max_tokens=max_tokens)
        return [one.token_ids for one in done], sum(one.rounds for one in done)

    return translate


def peer_contender(model: str, max_tokens: int) -> Translate:
    """transformers' own generate, greedy, with its KV cache, on the same files."""
    from transformers import AutoModelForSeq2SeqLM

    peer = AutoModelForSeq2SeqLM.from_pretrained(str(find_model(model)), dtype=torch.float32).eval()
    peer.generation_config.max_length = None  # max_new_tokens says it

    pad, end = int(peer.config.pad_token_id), int(peer.generation_config.eos_token_id)

    def translate(sources: Sequence[Source]) -> tuple[list[list[int]], int]:
        longest = max(map(len, sources))
        ids = torch.tensor([[*source, *[pad] * (longest - len(source))] for source in sources])
        mask = torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in sources])
        with torch.inference_mode():
            found = peer.generate(ids, attention_mask=mask, num_beams=1, do_sample=False, max_new_tokens=max_tokens)
        rows = [[int(token) for token in row[1:]] for row in found]
        texts = [row[: row.index(end) + 1] if end in row else row for row in rows]  # pads follow the end
        return texts, sum(map(len, texts))

    return translate


def show(document: Document, flags: argparse.Namespace) -> None:
    print(f"{'':16}{'tokens/s':>10}{'per round':>11}{'speed-up':>10}{'median':>8}{'equal':>12}")
    for name, figures in document["translate"].items():
        ratio = document["speedup"][name]
        print(
            f"{name:16}{figures['tokens_per_second']:>10}{figures['tokens_per_round']:>11}"
            f"{ratio['of_all']:>10}{ratio['median']:>8}{figures['equal']:>6} of {figures['of']}"
        )
