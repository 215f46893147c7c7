"""Scenarios: an engine's settings, requests, and when they come, are dropped, or something fails; made from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from forerun.core.params import Prefix, SamplingParams
from forerun.core.types import Budget, Request

VOCAB = 120
STOP = 1  # the token that ends a text
LONGEST = 900  # tokens of prompt and text
PAGE = 64

FOLLOW = ("eagle3", "narrow", "eagle", "ngram+eagle3", "ngram+narrow")  # drafts start before a round was read
DEVICE = (*FOLLOW, "draft_model", "ngram+draft_model")  # grow their trees there
SPARSE = ("sparse_kv", "ngram+sparse_kv")  # there too, if asked for: most texts are too short to leave much out
OTHERS = ("ngram", "suffix", "medusa", "hydra", "dflash", "dspark", "plain-eagle3", "recycling", "none")
DRAFTERS = (*DEVICE, *OTHERS)
SHAPES = ("llama", "qwen2", "qwen2", "mistral")
FORMS = ((3, 3, 1), (5, 5, 1), (1, 1, 1), (6, 3, 3), (11, 4, 4))  # nodes, depth, width
PLAIN = (0, 0, 1)
LARGE = ((20, 6, 6), (47, 7, 8), (90, 5, 10))
PLACES = (
    "propose", "observe", "drafter-propose", "drafter-observe", "append", "draft", "grown", "trees", "prefill",
    "prompts", "verdict", "commit", "outcome", "controller", "plan", "sampled", "keep", "move",
)  # fmt: skip

Controlled = Literal["forms", "mixed", "adaptive", "switching"]


@dataclass(frozen=True)
class Setting:
    """An engine."""

    seed: int
    target: str = "twin"  # of the GPU decoder | native
    shape: str = "llama"
    words: int = 6  # tokens that the target likes to say
    drafters: tuple[str, ...] = ("eagle3",)
    controller: Controlled = "forms"
    forms: tuple[tuple[int, int, int], ...] = ((3, 3, 1),)  # nodes, depth, width; (0, 0, 1) = plain
    repeats: int = 6
    batch: int = 4
    pages: int = 200
    most_rows: int = 1024  # of a pass
    prompt_rows: tuple[int, ...] = (16,)
    follows: bool = True
    captures: bool = False
    is_even: bool = False  # most requests are such that the device decides
    late: bool = False  # drafters are built when they are first asked for
    context: int = 2048  # positions of the model


@dataclass(frozen=True)
class Order:
    """Something that happens before a step."""

    kind: Literal["submit", "abort", "fault", "settle"]
    which: int = 0  # request
    place: str = ""
    interrupt: bool = False


@dataclass(frozen=True)
class Scenario:
    """What happens before every step of an engine."""

    setting: Setting
    requests: tuple[Request, ...]
    steps: tuple[tuple[Order, ...], ...]

    def __str__(self) -> str:
        lines = [f"setting = {self.setting!r}", "requests = ("]
        lines += [f"    {one!r},  # {i}" for i, one in enumerate(self.requests)]
        lines += [")", "steps = ("]
        lines += [f"    {orders!r}," for orders in self.steps]
        return "\n".join([*lines, ")"])


@dataclass(frozen=True)
class Allowed:
    """A grammar of sorts: behind a token only some others may follow."""

    step: int

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        last = prefix.path[-1] if prefix.path else prefix.committed[-1]
        banned = torch.arange(len(logits)) % self.step == last % self.step
        banned[STOP] = False
        logits[banned] = -torch.inf
        return logits


def make_scenario(seed: int, drafters: Sequence[str] = DRAFTERS, target: str | None = None) -> Scenario:
    """Any scenario, always the same for a seed; in most of them rounds can follow each other unread."""
    rng = random.Random(f"forerun {seed}")
    follow = [name for name in drafters if name in FOLLOW] or [name for name in drafters if name in (*DEVICE, *SPARSE)]
    if follow and target != "native" and rng.random() < 0.75:
        setting = replace(_setting(rng, seed, follow[:1], "twin"), drafters=(rng.choice(follow),), is_even=True)
    else:
        setting = _setting(rng, seed, drafters, target)
    if setting.controller == "forms" and seed % 4 == 1:
        setting = replace(setting, controller="switching", forms=(*FORMS, PLAIN, PLAIN))
    count = rng.choice((2, 4, 7, 10)) if setting.batch < 12 else rng.choice((10, 18))
    texts = _Texts(rng, setting)
    requests = [texts.request() for _ in range(count)]
    return Scenario(setting, tuple(requests), _steps(rng, count, setting))


def _setting(rng: random.Random, seed: int, drafters: Sequence[str], target: str | None) -> Setting:
    target = target or rng.choice(("twin",) * 5 + ("native",))
    names = [name for name in drafters if target == "twin" or name not in DEVICE or name == "eagle3"]
    picked = rng.sample(names, min(len(names), rng.choice((1, 1, 2, 3))))
    forms = rng.sample(FORMS if rng.random() < 0.9 else LARGE, rng.choice((1, 1, 2)))
    return Setting(
        seed=seed,
        target=target,
        shape=rng.choice(SHAPES),
        words=rng.choice((3, 4, 6, 12)),
        drafters=tuple(picked),
        controller=rng.choice(("forms", "forms", "mixed", "adaptive")),
        forms=(*forms, PLAIN) if rng.random() < 0.3 else tuple(forms),
        repeats=rng.choice((0, 2, 6, 9, 20, 60)),
        batch=rng.choice((1, 2, 3, 3, 4, 4, 5, 6, 6, 8, 9, 13, 24)),
        pages=rng.choice((200, 200, 40, 14, 8, 7)),
        most_rows=rng.choice((1024, 256, 128, 96)),
        prompt_rows=rng.choice(((16,), (64,), (256,), (1, 16, 256, 1024), (512, 1024))),
        follows=rng.random() < 0.95,
        captures=rng.random() < 0.5,
        late=rng.random() < 0.3,
        context=rng.choice((2048, 2048, 2048, 140, 330)),
    )


def _steps(rng: random.Random, count: int, setting: Setting) -> tuple[tuple[Order, ...], ...]:
    """Requests in order, in bursts or one by one; some are dropped later; in some scenarios something fails."""
    steps: list[list[Order]] = [[] for _ in range(120)]
    at, pace = 0, rng.choice((0, 1, 3, 6))
    for i in range(count):
        steps[min(at, 99)].append(Order("submit", i))
        at += rng.randint(0, pace)
        if rng.random() < 0.12:
            steps[min(119, at + rng.randint(0, 14))].append(Order("abort", i))
    if rng.random() < 0.35:
        for _ in range(rng.choice((1, 1, 2, 3))):
            fault = Order("fault", place=rng.choice(PLACES), interrupt=rng.random() < 0.3)
            steps[rng.randrange(0, 30)].append(fault)
    if rng.random() < 0.1:
        steps[rng.randrange(0, 30)].append(Order("settle"))
    last = max(i for i, orders in enumerate(steps) if orders)
    return tuple(tuple(orders) for orders in steps[: last + 1])


class _Texts:
    """Requests of one scenario: prompts that share starts, repeat, or are alone."""

    def __init__(self, rng: random.Random, setting: Setting) -> None:
        self.rng, self.setting = rng, setting
        # what fits if it is alone
        self.longest = min(LONGEST, PAGE * setting.pages - PAGE, setting.context + 20)
        self.starts = [self._tokens(rng.choice((3, 40, 64, 65, 90, 130, 130, 300))) for _ in range(3)]
        self.plain = setting.is_even
        self.rare = 0.1 if setting.is_even else 1.0  # how often something is asked for that the host decides
        self.cuts = [{"top_k": 5, "min_p": 0.02}, {"top_p": 0.8}] if setting.is_even else []
        self.short = setting.pages <= 16 and rng.random() < 0.6  # prompts, and long texts: pages run out
        self.made: list[Request] = []

    def request(self) -> Request:
        rng, setting = self.rng, self.setting
        if self.made and rng.random() < 0.1:  # once more
            one = rng.choice(self.made)
        else:
            prompt = self._prompt()
            names = (
                setting.drafters
                if self.plain and rng.random() < 0.98
                else (*setting.drafters, *setting.drafters, "none")
            )
            drafter = rng.choice(names)
            one = Request(
                tuple(prompt),
                self._params(len(prompt)),
                drafter=drafter,
                verifier=self._verifier(drafter),
                budget=self._budget(),
                shows_rejected=rng.random() < 0.1,
                cache_salt=rng.choice(("", "", "", "a", None)),
            )
        self.made.append(one)
        return one

    def _tokens(self, count: int) -> list[int]:
        low = self.rng.choice((2, 2, VOCAB - 12))  # a few different ones: n-gram finds matches
        return [self.rng.randrange(low, VOCAB) for _ in range(count)]

    def _prompt(self) -> list[int]:
        rng = self.rng
        kind = rng.random()
        if kind < 0.15:
            prompt = self._tokens(rng.choice((1, 1, 2, 3)))
        elif kind < 0.5:
            start = rng.choice(self.starts)
            prompt = start[: rng.randint(1, len(start))] + self._tokens(rng.choice((0, 1, 5, 70)))
        elif kind < 0.65:
            cycle = self._tokens(rng.randint(1, 6))
            prompt = cycle * rng.randint(1, 20)
        else:
            prompt = self._tokens(rng.choice((4, 9, 20, 63, 64, 65, 100, 129, 250)))
        return prompt[: 50 if self.short else min(self.longest - 80, self.setting.context - 1)]

    def _params(self, prompt: int) -> SamplingParams:
        rng, more = self.rng, dict[str, Any]()
        most = min(rng.choice((30, 60, 90) if self.short else (1, 2, 3, 8, 16, 24)), self.longest - prompt)
        if rng.random() < 0.5:
            more |= {"temperature": rng.choice((0.3, 0.7, 1.0, 1.0, 1.6)), "seed": rng.randrange(1 << 40)}
            if self.cuts and rng.random() < 0.3:
                more |= rng.choice(self.cuts)
            elif not self.cuts and rng.random() < 0.5:
                more |= {"top_k": rng.choice((0, 1, 5, 30)), "top_p": rng.choice((1.0, 0.9, 0.5))}
                more |= {"min_p": rng.choice((0.0, 0.02))}
        if rng.random() < 0.3:
            more["stop_token_ids"] = tuple(rng.sample(range(2, 12), rng.choice((1, 2))))
        more["ignore_eos"] = rng.random() < 0.6
        if rng.random() < 0.1:
            more["min_tokens"] = rng.randint(0, most)
        if rng.random() < 0.15:
            more["stop"] = rng.choice((("b c",), ("c d e", "zz"), ("d d",), (" e",)))
        if rng.random() < 0.12 * self.rare:
            more["logprobs"] = rng.choice((0, 1, 4))
        if rng.random() < 0.3 * self.rare:
            more |= rng.choice(_LAWS)
        return SamplingParams(max_tokens=most, **more)

    def _verifier(self, drafter: str) -> str:
        """What the host drafts with a draft model is drawn from it, so that only shared noise fixes the text."""
        verifier = self.rng.choice(("coupled", "coupled", "exact", "auto"))
        return "coupled" if "draft_model" in drafter or "sparse_kv" in drafter else verifier

    def _budget(self) -> Budget | None:
        rng = self.rng
        if rng.random() < (0.95 if self.plain else 0.75):
            return None
        budgets = [(0, 0), (1, 1), (4, 4), (5, 2, 3), (30, 5, 6), (250, 3, 12)]
        # a tree fits a pass
        return Budget(*rng.choice([one for one in budgets if one[0] < self.setting.most_rows]))


_LAWS: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"logit_bias": {3: 2.0, 4: -3.0, 60: float("-inf")}},
    {"bad_words": ((2,), (3, 4))},
    {"processors": (Allowed(3),)},
    {"processors": (Allowed(2),)},
)


def without_drafts(request: Request) -> Request:
    """The same, as it is asked for alone."""
    return replace(request, drafter="none", budget=None, cache_salt=None, shows_rejected=False)


def with_predictions(scenario: Scenario) -> Scenario:
    """Some of its requests predict their texts, rightly or not; all else is as it was."""
    made = list[Request]()
    for i, one in enumerate(scenario.requests):
        rng, prompt = random.Random(f"{i} {one.prompt}"), one.prompt
        kinds = (prompt, prompt[len(prompt) // 2 :], (rng.randrange(2, VOCAB),) * 9)
        made.append(replace(one, prediction=rng.choice(kinds)) if rng.random() < 0.4 else one)
    return replace(scenario, requests=tuple(made))
