"""Planted: a small speculative engine over a Table, right by default, with published faults that can be switched on.

It is the referee's own test: `forerun verify self-test` must find every fault of `BUGS` and none in the right engine.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from forerun.core.errors import InvalidInput
from forerun.referee.ask import Answer, Ask, Mode, Refused, TokenLogprob
from forerun.referee.tables import FAR, Contexts, Floats, Pair, Rules, Table, make_pair

BUGS = {  # the check that must find it, and what is wrong
    "residual_from_target": ("law.temperature_1", "a rejected draft is replaced by the target's law, not the residual"),
    "draws_per_row": ("law.temperature_1", "a drafted token is tested once per branch that holds it, not once"),
    "draft_temperature": ("law.temperature_1", "drafts are drawn at another temperature than they are tested with"),
    "top_p_one_side": ("law.top_p", "drafts are drawn with top-p and tested against the law without it"),
    "argmax_as_drawn": ("law.temperature_1", "the drafter's likeliest token is tested as if it had been drawn"),
    "relaxed_acceptance": ("law.temperature_1", "any drafted token that is likely enough is accepted"),
    "bonus_off_by_one": ("logprobs.law", "the token behind an accepted draft comes from the row before"),
    "first_token_greedy": ("law.temperature_1", "the token of the prompt's pass ignores the temperature"),
    "rejected_kv_kept": ("greedy.alone", "the cache keeps the entries of rejected tokens"),
    "batch_rows_mixed": ("greedy.batch", "with several requests at once the cache is read one place off"),
    "prefix_cache_corrupt": ("greedy.prefix", "a prompt found in the prefix cache lacks its last entry"),
    "chunk_border": ("greedy.lengths", "prompts whose length is a multiple of 16 lose an entry"),
    "noise_repeated": ("law.temperature_1", "every round begins with the same random numbers"),
    "noise_shared": ("seeds.differ", "requests without a seed share their random numbers"),
    "seed_ignored": ("seeds.repeat", "the seed has no effect"),
    "penalties_from_root": ("law.frequency", "penalties are those of the round's first token for the whole draft"),
    "min_p_ignored": ("law.min_p", "min-p is not applied to drafted places"),
    "bias_ignored": ("law.bias", "the logit bias is not applied to drafted places"),
    "stop_inside_rounds": ("stop.strings", "a stop string that spans two rounds is missed"),
    "end_inside_draft": ("limits.end_of_text", "an end-of-text token inside an accepted draft does not end the text"),
    "limit_overrun": ("limits.max_tokens", "an accepted draft runs over max_tokens"),
    "grammar_not_rolled_back": ("structure.json", "the grammar's state keeps rejected tokens"),
    "logprobs_of_drafter": ("logprobs.law", "the log-probabilities of accepted tokens are the drafter's"),
    "usage_counts_drafts": ("usage.counts", "completion tokens count rejected drafts"),
    "accepts_nothing": ("metrics.acceptance", "a head that does not fit drafts nothing but unlikely tokens"),
    "metrics_double": ("metrics.acceptance", "accepted tokens are counted twice"),
    "slow_under_load": ("speed.load", "with several requests at once drafting costs more than it saves"),
}
_PASS_SECONDS, _SLOW_SECONDS = 0.0005, 0.05  # of a pass of the target; of drafting, where that is slow


@dataclass
class _State:
    ask: Ask
    tokens: list[int]  # prompt and output
    start: int  # of the output
    cache: list[int]  # the symbols that attention finds; the tokens, unless a fault is planted
    rng: np.random.Generator
    strings: list[str] | None  # what a schema allows
    grammar: str = ""  # its state
    logprobs: list[TokenLogprob] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.start :]


@dataclass
class Planted:
    """A Target: the engine with these faults. Drafts are chains of `depth` drawn tokens."""

    pair: Pair = field(default_factory=make_pair)
    bugs: frozenset[str] = frozenset()
    depth: int = 4
    seed: int = 0
    name: str = "planted"

    modes: tuple[Mode, ...] = ("on", "off")

    def __post_init__(self) -> None:
        if unknown := self.bugs - BUGS.keys():
            raise InvalidInput(f"no planted bug {sorted(unknown)[0]!r}; there are {', '.join(BUGS)}")
        self._rng = np.random.default_rng(self.seed)
        self._laws: dict[tuple[Any, ...], Floats] = {}
        self._seen: set[str] = set()
        self._lock, self._now = threading.Lock(), 0.0

    def answer(self, asks: Sequence[Ask], mode: Mode = "on") -> list[Answer]:
        done = [self.one(ask, mode, len(asks) > 1) for ask in asks]
        self._now += self.seconds(max(each.rounds or 0 for each in done), mode, len(asks) > 1)
        return done

    def clock(self) -> float:
        """Simulated seconds, so that no verdict hangs on how busy a machine is."""
        return self._now

    def seconds(self, rounds: int, mode: Mode, crowded: bool) -> float:
        """What a target's passes take."""
        slow = "slow_under_load" in self.bugs and mode == "on" and crowded
        return _PASS_SECONDS * rounds + (_SLOW_SECONDS if slow else 0.0)

    def command(self, ask: Ask, mode: Mode = "on") -> str:
        return f"forerun verify self-test {' '.join(f'--bug {bug}' for bug in sorted(self.bugs))}".strip()

    def one(self, ask: Ask, mode: Mode, crowded: bool) -> Answer:
        """Answer one request; `crowded` = others are under way."""
        state = self._begin(ask, mode, crowded)
        finish: str | None = None
        while finish is None:
            committed = len(state.tokens)
            self._round(state, mode)
            finish = self._end(state, committed)
        return self._finished(state, finish)

    def _begin(self, ask: Ask, mode: Mode, crowded: bool) -> _State:
        table, bugs = self.pair.target, self.bugs if mode == "on" else frozenset()
        tokens = table.encode(ask.prompt)
        cache = list(tokens)
        with self._lock:
            number, known = int(self._rng.integers(1 << 62)), ask.prompt in self._seen
            self._seen.add(ask.prompt)
        if "batch_rows_mixed" in bugs and crowded:
            cache = [cache[0], *cache[:-1]]
        if "prefix_cache_corrupt" in bugs and known:
            cache[-2] = table.other
        if "chunk_border" in bugs and len(tokens) % 16 == 0:
            cache[-2] = cache[-8] = table.other
        seed = 7 if "noise_shared" in bugs else number
        if ask.seed is not None and "seed_ignored" not in bugs:
            seed = ask.seed
        rng = np.random.default_rng([seed, len(tokens)])
        strings = None if ask.schema is None else [*strings_of(ask.schema)]
        return _State(ask, tokens, len(tokens), cache, rng, strings)

    def _round(self, state: _State, mode: Mode) -> None:
        bugs = self.bugs if mode == "on" else frozenset()
        state.rounds += 1
        if mode == "off" or not state.output:
            rules = state.ask.rules
            if "first_token_greedy" in bugs:
                rules = replace(rules, temperature=0.0)
            law = self._law(state, [], rules)
            self._commit(state, self._draw(state, law), law)
            return
        if "noise_repeated" in bugs:
            state.rng = np.random.default_rng([state.ask.seed or 5, state.start])
        drafts, laws = self._draft(state, bugs)
        state.drafted += len(drafts)
        root = len(state.tokens)
        for i, (token, q) in enumerate(zip(drafts, laws, strict=True)):
            p = self._node_law(state, drafts[:i], root, bugs)
            if not self._accepts(state, p, q, token, bugs):
                kept = state.cache
                left = np.maximum(p - q, 0.0)
                wrong = "residual_from_target" in bugs or left.sum() <= 0
                self._commit(state, self._draw(state, p if wrong else left / left.sum()), p)
                if "rejected_kv_kept" in bugs:
                    kept[-1] = token
                if "grammar_not_rolled_back" in bugs:
                    state.grammar += self.pair.target.decode([token])
                return
            state.accepted += 1 + ("metrics_double" in bugs)
            self._commit(state, token, q if "logprobs_of_drafter" in bugs else p, root)
        path = drafts[:-1] if "bonus_off_by_one" in bugs else drafts
        p = self._node_law(state, path, root, bugs)
        self._commit(state, self._draw(state, p), p, root)

    def _draft(self, state: _State, bugs: frozenset[str]) -> tuple[list[int], list[Floats]]:
        """A chain of tokens, and the laws that they are tested with. Drafts know no penalties, bias or grammar."""
        asked = state.ask.rules
        rules = Rules(asked.temperature, asked.top_k, asked.top_p, asked.min_p)
        tokens, drafts, laws = list(state.tokens), [], []
        for _ in range(self.depth):
            last = tokens[-1]
            tested = drawn = self._table_law(self.pair.draft, (last, last, last), rules)
            if "draft_temperature" in bugs and rules.temperature > 0:
                drawn = self._table_law(
                    self.pair.draft, (last,) * 3, replace(rules, temperature=0.6 * rules.temperature)
                )
            if "top_p_one_side" in bugs:
                tested = self._table_law(self.pair.draft, (last,) * 3, replace(rules, top_p=1.0))
            if "argmax_as_drawn" in bugs or "accepts_nothing" in bugs:
                drawn = np.eye(len(tested))[int(drawn.argmin() if "accepts_nothing" in bugs else drawn.argmax())]
            if "accepts_nothing" in bugs:
                tested = drawn
            drafts.append(self._draw(state, drawn))
            laws.append(tested)
            tokens.append(drafts[-1])
        return drafts, laws

    def _accepts(self, state: _State, p: Floats, q: Floats, token: int, bugs: frozenset[str]) -> bool:
        if "relaxed_acceptance" in bugs and p[token] > 0.06:
            return True
        tries = 2 if "draws_per_row" in bugs else 1
        return any(state.rng.random() * q[token] < p[token] for _ in range(tries))

    def _node_law(self, state: _State, drafts: Sequence[int], root: int, bugs: frozenset[str]) -> Floats:
        """The target's law after the drafts, which are committed already up to here."""
        rules = state.ask.rules
        if drafts and "min_p_ignored" in bugs:
            rules = replace(rules, min_p=0.0)
        if drafts and "bias_ignored" in bugs:
            rules = replace(rules, bias={})
        back = len(state.tokens) - root - len(drafts)  # 1 where the bonus comes from the row before
        counted = root if "penalties_from_root" in bugs else len(state.tokens)
        return self._law(state, (), rules, counted, back)

    def _law(self, state: _State, _: Sequence[int], rules: Rules, counted: int | None = None, back: int = 0) -> Floats:
        at = len(state.tokens) - 1 - back
        last = (state.tokens[at], state.cache[at - 1], state.cache[at - FAR])
        table = self.pair.target
        if rules.counts:
            used = state.tokens[state.start : counted]
            counts = np.bincount(used, minlength=table.size)[: table.size].astype(float)
            seen = np.bincount(state.tokens[:counted], minlength=table.size)[: table.size] > 0
            p = table.laws(Contexts(np.array([last]), counts[None], seen[None]), rules)[0][0]
        else:
            p = self._table_law(table, last, rules)
        return p if state.strings is None else self._held(state, state.strings, p)

    def _held(self, state: _State, strings: list[str], p: Floats) -> Floats:
        """The law held to what the schema's grammar allows next."""
        table, have = self.pair.target, state.grammar
        allowed = np.zeros(table.size)
        for each in strings:
            if each.startswith(have):
                allowed[table.encode(each[len(have)])[0] if len(each) > len(have) else table.end] = 1.0
        if not allowed.any():  # only a broken state gets here
            return p
        held = np.maximum(p, 1e-30) * allowed
        return np.asarray(held / held.sum())

    def _table_law(self, table: Table, last: tuple[int, ...], rules: Rules) -> Floats:
        key = (id(table), last, repr(rules))
        if key not in self._laws:
            nothing = np.zeros((1, table.size))
            contexts = Contexts(np.array([last]), nothing, nothing > 0)
            self._laws[key] = table.laws(contexts, rules)[0][0]
        return self._laws[key]

    def _draw(self, state: _State, law: Floats) -> int:
        return min(int(np.searchsorted(law.cumsum(), state.rng.random(), side="right")), len(law) - 1)

    def _commit(self, state: _State, token: int, law: Floats, root: int | None = None) -> None:
        state.tokens.append(token)
        state.cache.append(token)
        if state.strings is not None and token != self.pair.target.end:
            state.grammar += self.pair.target.decode([token])
        if state.ask.logprobs is not None:
            logs = np.log(np.maximum(law, 1e-30))
            best = (-logs).argsort()[: state.ask.logprobs]
            top = {self._spelt(int(i)): float(logs[i]) for i in best}
            state.logprobs.append(TokenLogprob(self._spelt(token), float(logs[token]), top))

    def _spelt(self, token: int) -> str:
        return "" if token == self.pair.target.end else self.pair.target.decode([token])

    def _end(self, state: _State, committed: int) -> str | None:
        """Cut what was committed beyond the end, a stop string or the limit; why it ended, if it did."""
        table, ask, bugs = self.pair.target, state.ask, self.bugs
        out = state.output
        if "end_inside_draft" in bugs and table.end in out[:-1]:
            out = state.tokens[state.start :] = [token for token in out[:-1] if token != table.end] + out[-1:]
        if table.end in out:
            out = out[: out.index(table.end) + 1]
        text = table.decode([token for token in out if token != table.end])
        seen = text[max(0, committed - state.start) :] if "stop_inside_rounds" in bugs else text
        found = [len(text) - len(seen) + seen.index(stop) for stop in ask.stop if stop in seen]
        most = ask.max_tokens + (self.depth if "limit_overrun" in bugs else 0)
        if found and min(found) <= most:
            state.tokens[state.start :] = out[: min(found)]
            return "stop"
        state.tokens[state.start :] = out[:most]
        if table.end in out[: ask.max_tokens]:
            return "stop"
        return "length" if len(out) >= ask.max_tokens else None

    def _finished(self, state: _State, finish: str) -> Answer:
        out, end = state.output, self.pair.target.end
        used = len(out) + (state.drafted - state.accepted if "usage_counts_drafts" in self.bugs else 0)
        return Answer(
            text=self.pair.target.decode([token for token in out if token != end]),
            finish=finish,
            prompt_tokens=state.start,
            completion_tokens=used,
            total_tokens=state.start + used,
            logprobs=state.logprobs[: len(out)] if state.ask.logprobs is not None else None,
            drafted=state.drafted,
            accepted=state.accepted,
            rounds=state.rounds,
        )


def strings_of(schema: Mapping[str, Any]) -> list[str]:
    """All compact texts that match an object of enumerations."""
    fields = schema.get("properties", {})
    if any("enum" not in each for each in fields.values()):
        raise Refused("this engine knows objects of enumerations only")
    choices = itertools.product(*(each["enum"] for each in fields.values()))
    return [json.dumps(dict(zip(fields, each, strict=True)), separators=(",", ":")) for each in choices]
