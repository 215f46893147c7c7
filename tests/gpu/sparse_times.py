"""Plain decoding beside sparse_kv, several long texts at once: tokens per second, rounds by part, and equal texts.

Parts of a round are the engine's (engine/stats.py): draft and pass by the clock of the device, verdict what was waited
beyond these, host what no device worked beside. What is counted ends with the first text that does: from then on the
batch is another. A pause in mid-text (something that is compiled or captured) shows as the longest round.

With `--model` a real model goes on with sources of Python's library: real acceptance. With `--shape` weights are random
and `--attention` scales what attention adds to them: what drafts leave out then matters as little as that, so that the
acceptance is one that was chosen, and only times say something.
On a GPU: python -m tests.gpu.sparse_times --model FILE
"""

from __future__ import annotations

import argparse
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from forerun.api.llm import LLM
from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Needs, Request
from forerun.engine.engine import Engine
from forerun.engine.stats import EngineStats
from forerun.models.config import DecoderConfig
from forerun.models.cuda.target import CudaDecoder
from forerun.verify.greedy import device_walk
from lab.gpu.command import SHAPES
from lab.gpu.stand_ins import RandomWeights
from tests.exactness.harness import Letters


class QuietAttention(RandomWeights):
    """Random weights whose attention adds `share` of what it would."""

    share = 1.0

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name).mul_(self.share if name.endswith("o_proj.weight") else 1.0)


Prompts = list[tuple[int, ...]]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="a checkpoint; its own tokenizer reads the sources")
    add("--shape", default="8b", choices=[*SHAPES], help="without --model; default: %(default)s")
    add("--attention", type=float, default=0.02, help="with --shape; default: %(default)s")
    add("--length", type=int, default=30_000, help="tokens of a prompt; default: %(default)s")
    add("--batch", type=int, default=8, help="texts at once; default: %(default)s")
    add("--max-tokens", type=int, default=192)
    add("--context", type=int, default=1024, help="draft_context; default: %(default)s")
    add("--drafts", default="none,2,3,5,adaptive,none", help="tokens a round, none or adaptive; default: %(default)s")
    add("--device", default="cuda")
    given = parser.parse_args()
    started = perf_counter()
    engine, prompts = _real(given) if given.model else _random(given)
    _write(engine, prompts, "none", 8)  # reads the prompts, once
    print(f"loaded, and read the prompts, in {perf_counter() - started:.0f} s", flush=True)
    started = perf_counter()
    engine.captures.up_to(given.batch)
    _write(engine, prompts, "4", 16)
    _write(engine, prompts, "adaptive", 32)
    print(f"captured drafts in {perf_counter() - started:.0f} s", flush=True)
    plain = Written()
    for name in given.drafts.split(","):
        found = _write(engine, prompts, name, given.max_tokens)
        plain = found if not plain.texts else plain
        print(f"{name:>8}: {found.row(plain)}", flush=True)


@dataclass
class Written:
    """Texts, and what writing them took from when all had begun to when the first had ended."""

    texts: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    longest: float = 0.0  # seconds of a step
    parts: dict[str, float] = field(default_factory=dict)

    def row(self, plain: Written) -> str:
        """Of a table; `plain`: without drafts."""
        rate, usual = self.tokens / self.seconds, plain.tokens / plain.seconds
        each = 1e3 / max(1, self.rounds)
        parts = ", ".join(f"{part} {each * spent:.2f}" for part, spent in self.parts.items() if each * spent >= 0.005)
        drafts = f"accepted {self.accepted / max(1, self.drafted):.3f} of {self.drafted}"
        differ = sum(a != b for a, b in zip(plain.texts, self.texts, strict=True))
        return (
            f"{rate:7.0f} tokens/s, {rate / usual:5.3f} x plain; {self.rounds} rounds of {each * self.seconds:.2f} ms "
            f"({parts}; the longest {1e3 * self.longest:.1f}), {self.tokens / max(1, self.rounds):.1f} tokens each; "
            f"{drafts}; {differ} of {len(self.texts)} texts differ"
        )


def _real(given: argparse.Namespace) -> tuple[Engine, Prompts]:
    """A model and sources of Python's library, each text from another file on."""
    longest, speculative = (
        given.length + given.max_tokens + 64,
        SpeculativeConfig("sparse_kv", draft_context=given.context),
    )
    config = EngineConfig(
        device=given.device, max_batch=given.batch, max_length=longest, kv_slots=given.batch * (longest + 256)
    )
    llm = LLM.load(given.model, config=config, speculative_config=speculative)
    return llm.engine, source_prompts(llm, given.length, given.batch)


def source_prompts(llm: LLM, length: int, count: int) -> Prompts:
    """So many prompts of so many tokens, each from other files of Python's library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: -path.stat().st_size)
    prompts, tokens = Prompts(), list[int]()
    for file in files:
        tokens += llm.encode(file.read_text(encoding="utf-8", errors="ignore"))
        if len(tokens) >= length:
            prompts.append(tuple(tokens[:length]))
            tokens = []
        if len(prompts) == count:
            return prompts
    raise SystemExit(f"the library's sources make {len(prompts)} prompts of {length} tokens; ask for fewer or shorter")


def _random(given: argparse.Namespace) -> tuple[Engine, Prompts]:
    shape, vocabulary = SHAPES[given.shape]
    weights = QuietAttention(shape, vocabulary, given.shape == "135m", given.device)
    weights.share, longest = given.attention, given.length + given.max_tokens + 64
    weights.config["max_position_embeddings"] = longest + 512
    target = CudaDecoder(
        DecoderConfig.from_hf(weights.config), weights, dtype=torch.bfloat16, device=given.device,
        kv_slots=given.batch * (longest + 256), greedy_walk=device_walk(torch.device(given.device)),
    )  # fmt: skip
    if given.device == "cuda":
        target.warm_up(Needs(), given.batch, longest)
    speculative = SpeculativeConfig("sparse_kv", draft_context=given.context)
    config = EngineConfig(max_batch=given.batch, max_length=longest)
    made = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, vocabulary, (given.batch, given.length), generator=made).tolist()
    return make_engine(target, frozenset(), speculative, config, Letters()), [tuple(one) for one in prompts]


def _write(engine: Engine, prompts: Prompts, name: str, tokens: int) -> Written:
    """Write all texts at once."""
    params, budget = (
        SamplingParams(max_tokens=tokens, ignore_eos=True),
        Budget(int(name), int(name)) if name.isdigit() else None,
    )
    drafter, stats = "none" if name == "none" else "sparse_kv", engine.stats
    ids = [engine.submit(Request(one, params, drafter=drafter, budget=budget)) for one in prompts]
    texts: dict[int, list[int]] = {seq_id: [] for seq_id in ids}
    before, after = None, None
    longest = 0.0
    while engine.busy:
        started = perf_counter()
        for event in engine.step():
            texts[event.seq_id] += event.tokens
        if before and not after:
            longest = max(longest, perf_counter() - started)
        if not before and all(texts.values()):
            before = _Counts.of(stats, texts)
        if before and not after and any(len(text) >= tokens for text in texts.values()):
            after = _Counts.of(stats, texts)
    assert before, "every text had a token"
    assert after, "every text ended"
    return Written(
        texts=[texts[seq_id] for seq_id in ids],
        seconds=after.at - before.at,
        tokens=after.tokens - before.tokens,
        rounds=after.rounds - before.rounds,
        drafted=after.drafted - before.drafted,
        accepted=after.accepted - before.accepted,
        longest=longest,
        parts={part: spent - before.parts[part] for part, spent in after.parts.items()},
    )


@dataclass(frozen=True)
class _Counts:
    at: float
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    parts: dict[str, float]

    @classmethod
    def of(cls, stats: EngineStats, texts: dict[int, list[int]]) -> _Counts:
        written = sum(map(len, texts.values()))
        return cls(perf_counter(), written, stats.rounds, stats.drafted, stats.accepted, dict(stats.seconds))


if __name__ == "__main__":
    main()
