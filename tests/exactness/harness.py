"""What the exactness tests share: engines around a TableLM, and an oracle that knows nothing of speculation.

Every drafter of the registry is covered by being registered: the harness builds it as `forerun.build.engine` does,
with a second TableLM as the draft model, and with a folder of random weights where it is a head.
"""

from __future__ import annotations

import atexit
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import torch

from forerun.build.engine import make_engine
from forerun.core import registry
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request, TreeBatch
from forerun.engine.engine import Engine
from forerun.testing import FakeSeq, TableLM
from forerun.verify.warp import warp
from tests.drafters.tiny_heads import save_head
from tests.exactness.partial_table import with_layers

# beside those that the registry calls best
COMPOSED = ("ngram>draft_model", "ngram>layer_skip", "suffix+draft_model")
DRAFTERS = sorted(
    {
        *COMPOSED,
        *(name for spec in registry.drafters.specs() if not spec.reads_source for name in (spec.name, spec.best)),
    }
)
VERIFIERS = [name for name in registry.verifiers.names() if registry.verifiers.get(name)().exact]
SHAPES = {"chain": (4, 1), "tree": (6, 2)}  # name -> nodes, width
SETTINGS = {
    "greedy": SamplingParams(max_tokens=24),
    "greedy+penalties": SamplingParams(
        max_tokens=24, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, min_tokens=6
    ),
    "T=0.8": SamplingParams(max_tokens=24, temperature=0.8, seed=11),
    "top-p": SamplingParams(max_tokens=24, temperature=1.1, top_p=0.8, top_k=7, min_p=0.02, seed=12),
    "penalties": SamplingParams(
        max_tokens=24,
        temperature=0.9,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={3: 1.5, 4: -2.0},
        bad_words=((1, 2), (5,)),
        min_tokens=5,
        seed=13,
    ),
    "stop-strings": SamplingParams(max_tokens=24, temperature=1.0, stop=("b c", "zz"), min_tokens=3, seed=14),
}


class Letters:
    """A tokenizer for tests: token i is a letter, with a space after it."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f"{chr(97 + i % 26)} " for i in ids)


def table(vocab: int, seed: int = 0) -> TableLM:
    """A target with a cache of its own; its rows depend on nothing else, so they are worked out once."""
    return TableLM(vocab_size=vocab, order=2, seed=seed, sharpness=1.6, _rows=_rows_of(vocab, seed))


@cache
def _rows_of(vocab: int, seed: int) -> dict[tuple[object, ...], torch.Tensor]:
    return {}


class Alike(TableLM):
    """A draft model that often agrees with the TableLM of seed 0: their logits are averaged."""

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        own = self._row("logits", tokens, self.vocab_size)
        return (own * 0.6 + table(self.vocab_size)._row("logits", tokens, self.vocab_size)) * self.sharpness


@cache
def head_folder(drafter: str, vocab: int) -> str | None:
    """A folder with random weights for a drafter that is a head of TableLM; None for any other."""
    spec = registry.drafters.spec(drafter)
    if spec.needs != "head":
        return None
    folder = mkdtemp(prefix="forerun-head-")
    atexit.register(rmtree, folder, ignore_errors=True)
    return str(save_head(spec.formats[0], Path(folder), vocab))


def engine_for(
    drafter: str, verifier: str, shape: str, vocab: int, stop_ids: frozenset[int] = frozenset({0}), batch: int = 64
) -> Engine:
    nodes, width = SHAPES[shape]
    speculative = SpeculativeConfig(
        drafter=drafter,
        draft_model=head_folder(drafter, vocab),
        verifier=verifier,
        budget=nodes,
        width=width,
        controller="fixed",
    )
    return make_engine(
        with_layers(table(vocab)),
        stop_ids,
        speculative,
        EngineConfig(max_batch=batch),
        tokenizer=Letters(),
        draft_target=Alike(vocab_size=vocab, order=2, seed=1, sharpness=1.6),
    )


def run(engine: Engine, requests: Sequence[Request]) -> tuple[list[list[int]], list[str]]:
    """New tokens and texts, in the order of the requests; none finds what another has read."""
    ids = [engine.submit(replace(request, cache_salt=None)) for request in requests]
    tokens: dict[int, list[int]] = {seq_id: [] for seq_id in ids}
    texts = dict.fromkeys(ids, "")
    while engine.busy:
        for event in engine.step():
            tokens[event.seq_id] += event.tokens
            texts[event.seq_id] += event.text
    return [tokens[seq_id] for seq_id in ids], [texts[seq_id] for seq_id in ids]


def law_after(lm: TableLM, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> torch.Tensor:
    """[V] the law of the next token by the definition: warp at a lone root, one context at a time."""
    seq = FakeSeq(0, [*prompt, *output], prompt_length=len(prompt), params=params, stop_ids=frozenset({0}))
    laws = warp(lm.logits(seq.tokens)[None], [seq], TreeBatch.chains([[seq.tokens[-1]]]))
    if laws.greedy[0]:
        return torch.nn.functional.one_hot(laws.log_weights[0].argmax(), lm.vocab_size).double()
    return laws.log_weights[0].double().softmax(-1)


def joint_law(lm: TableLM, prompt: Sequence[int], params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """The probability of every text of so many tokens, by multiplying conditional laws."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for text, mass in texts.items():
            for token, p in enumerate(law_after(lm, prompt, text, params).tolist()):
                if p > 0:
                    grown[*text, token] = mass * p
        texts = grown
    return texts


def sample_texts(engine: Engine, prompt: Sequence[int], params: SamplingParams, count: int) -> Counter[tuple[int, ...]]:
    """Texts written under `count` different seeds."""
    requests = [Request(tuple(prompt), replace(params, seed=seed, ignore_eos=True)) for seed in range(count)]
    return Counter(tuple(tokens) for tokens in run(engine, requests)[0])


def chi_square_p(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """How likely counts at least this far from the law are under it; texts too rare to test are pooled."""
    from scipy.stats import chi2

    total = sum(counts.values())
    if any(text not in law for text in counts):
        return 0.0  # something impossible was written
    cells = sorted(law.items(), key=lambda item: -item[1])
    pooled = [(counts[text], mass * total) for text, mass in cells if mass * total >= 8]
    rest = [(counts[text], mass * total) for text, mass in cells if mass * total < 8]
    if rest:
        pooled.append((sum(seen for seen, _ in rest), sum(expected for _, expected in rest)))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in pooled if expected > 0)
    return float(chi2.sf(statistic, max(1, len(pooled) - 1)))


PRODUCT = list(itertools.product(DRAFTERS, VERIFIERS, SHAPES))
