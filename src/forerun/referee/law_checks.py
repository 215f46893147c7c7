"""Greedy texts must be the same whatever is drafted; sampled tokens must follow the stated law, each given the last."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from forerun.referee.ask import Answer, Ask
from forerun.referee.evidence import Bettor, Drawn, Evidence, Law, Rival, TwoSamples, smallest_found, usual_bettors
from forerun.referee.suite import Court, Finding, check
from forerun.referee.tables import Contexts, Floats, Pair, Rules, Table

# around the sizes of cache blocks and prompt chunks
LENGTHS = (15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513)


@check("greedy.alone", "greedy texts, one request at a time")
def alone(court: Court) -> Finding:
    asks = court.greedy_asks(12, salt=1)
    failed = court.compare(asks, court.alone(asks), "alone")
    return failed or court.passed(f"{len(asks)} texts as due")


@check("greedy.on_off", "greedy texts with speculation and without", needs=("off",))
def greedy_on_off(court: Court) -> Finding:
    asks = court.greedy_asks(12, salt=2)
    for ask, on, off in zip(asks, court.alone(asks), court.alone(asks, "off"), strict=True):
        if on.text != off.text and not court.is_tie(ask, on.text, off.text):
            return court.fail("a greedy text changes with speculation", ask, on.text, off.text)
        if on.finish != off.finish and on.text == off.text:
            return court.fail("the finish reason changes with speculation", ask, on.finish, off.finish)
    return court.passed(f"{len(asks)} pairs of texts are equal")


@check("greedy.batch", "greedy texts in batches of 2, 5 and 16")
def batch(court: Court) -> Finding:
    asks = [replace(ask, max_tokens=8 + 5 * (i % 6)) for i, ask in enumerate(court.greedy_asks(23, salt=3))]
    for size, start in ((2, 0), (5, 2), (16, 7)):
        some = asks[start : start + size]
        if failed := court.compare(some, court.ask(some), f"in a batch of {size}"):
            return failed
    return court.passed(f"{len(asks)} texts as due")


@check("greedy.arrival", "greedy texts in shuffled batches, among sampled requests")
def arrival(court: Court) -> Finding:
    asks = court.greedy_asks(8, salt=4)
    others = [Ask(prompt, 5 + 3 * i, Rules()) for i, prompt in enumerate(court.prompts(8, salt=5))]
    for order in range(3):
        mixed = [*asks, *others]
        random.Random(order).shuffle(mixed)
        answers = dict(zip(map(id, mixed), court.ask(mixed), strict=True))
        if failed := court.compare(asks, [answers[id(ask)] for ask in asks], f"arrival order {order}"):
            return failed
    return court.passed(f"{3 * len(asks)} texts as due")


@check("greedy.prefix", "greedy texts of prompts that share prefixes, that come again, that go on")
def prefix(court: Court) -> Finding:
    first = court.greedy_asks(6, salt=6)
    if failed := court.compare(first, court.alone(first), "the first time"):
        return failed
    if failed := court.compare(first, court.alone(first), "the same prompt again"):
        return failed
    long = [ask.prompt * 4 for ask in first[:3]]
    family = [Ask(text[: len(text) * part // 4] + ask.prompt, 24)
              for text, ask in zip(long, first, strict=False) for part in (1, 2, 3, 4)]  # fmt: skip
    if failed := court.compare(family, court.alone(family), "a shared prefix"):
        return failed
    longer = [Ask(ask.prompt + court.reference(ask)[:12], 24) for ask in first]
    failed = court.compare(longer, court.ask(longer), "prompt and answer as a new prompt")
    return failed or court.passed(f"{2 * len(first) + len(family) + len(longer)} texts as due")


@check("greedy.lengths", "greedy texts of prompts whose lengths lie around block and chunk sizes", needs=("table",))
def lengths(court: Court) -> Finding:
    asks = [Ask(court.table.prompts(1, 77 + n, n, n)[0], 16) for n in LENGTHS]
    if failed := court.compare(asks, court.alone(asks), "alone"):
        return failed
    failed = court.compare(asks, court.ask(asks), "together")
    return failed or court.passed(f"{2 * len(asks)} texts as due, prompts of {LENGTHS[0]} to {LENGTHS[-1]} tokens")


LENGTH, BATCH = 24, 16  # tokens of a text; texts at once
BIAS = {"a": 2.0, "b": -3.0, "e": 1.0}


def drawn_from(pair: Pair, asks: Sequence[Ask], answers: Sequence[Answer]) -> tuple[Drawn, list[int]]:
    """The sampled tokens of texts, with their laws, and which text each token is of."""
    table, parts, texts = pair.target, [], []
    for i, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        output = symbols_of(table, ask, answer)
        contexts = table.contexts(table.encode(ask.prompt), output).take(slice(0, len(output)))
        parts.append((contexts, np.array(output, dtype=np.int64)))
        texts += [i] * len(output)
    contexts = Contexts(*(np.concatenate([getattr(c, name) for c, _ in parts]) for name in ("last", "used", "seen")))
    tokens = np.concatenate([output for _, output in parts])
    position = np.concatenate([np.arange(len(output)) for _, output in parts])
    rules = asks[0].rules
    laws, draft = table.laws(contexts, rules)[0], pair.draft.laws(contexts, rules)[0]
    below = (laws.cumsum(-1) - laws / 2)[np.arange(len(tokens)), np.minimum(tokens, table.end)]
    before = np.where(position > 0, np.roll(below, 1), 0.5)
    return Drawn(contexts, laws, draft, tokens, position, before), texts


def symbols_of(table: Table, ask: Ask, answer: Answer) -> list[int]:
    """The tokens of an answer; the end-of-text token is the last one where the text ended by itself."""
    output = table.encode(answer.text)[: ask.max_tokens]
    ended = answer.ended or (answer.finish is None and len(output) < ask.max_tokens)
    return [*output, table.end] if ended and len(output) < ask.max_tokens else output


def law_check(court: Court, law: LawCheck) -> Finding:
    """Sample until the evidence suffices for a failure or the check's share of the budget is spent."""
    assert court.pair is not None
    rules, evidence = law.rules, Evidence(bettors_of(court, law.rules))
    observed, due = np.zeros(court.table.size), np.zeros(court.table.size)
    batch = 0
    while evidence.tokens < court.tokens and not court.late:
        asks = [Ask(prompt, LENGTH, rules, seed=batch * BATCH + i if law.seeded else None)
                for i, prompt in enumerate(court.prompts(BATCH, salt=1000 + batch))]  # fmt: skip
        answers = court.ask(asks)
        batch += 1
        if not any(answer.text or answer.ended for answer in answers):
            return court.fail("sampled texts are empty", asks[0], answers[0].text)
        drawn, texts = drawn_from(court.pair, asks, answers)
        strange = np.flatnonzero(drawn.tokens > court.table.end)
        if len(strange):
            i = texts[strange[0]]
            return court.fail("a character outside the alphabet was sampled", asks[i], answers[i].text)
        clear = court.table.laws(drawn.contexts, rules)[1]
        evidence.take(drawn, clear)
        if evidence.impossible is not None:
            return _impossible(court, drawn, asks, answers, evidence.impossible, texts)
        rank = (-drawn.laws).argsort(-1)
        place = (rank == drawn.tokens[:, None]).argmax(-1)
        observed += np.bincount(place, minlength=len(observed))
        due += np.take_along_axis(drawn.laws, rank, -1).sum(0)
        if evidence.p_value <= court.alarms:
            break
    return _verdict(court, evidence, observed, due, rules)


def _impossible(
    court: Court, drawn: Drawn, asks: Sequence[Ask], answers: Sequence[Answer], row: int, texts: Sequence[int]
) -> Finding:
    i, place = texts[row], int(drawn.position[row])
    said = f"{answers[i].text!r}: the token at place {place + 1} has probability 0"
    allowed = [court.table.alphabet[s] for s in np.flatnonzero(drawn.laws[row][:-1] > 0)]
    return court.fail(
        "a token was sampled that the parameters exclude", asks[i], said, f"one of {allowed}", p_value=0.0
    )


def _verdict(court: Court, evidence: Evidence, observed: Floats, due: Floats, rules: Rules) -> Finding:
    n = max(1, evidence.tokens)
    bars = [(f"{i + 1}", float(observed[i] / n), float(due[i] / n)) for i in range(min(8, len(observed)))]
    p_value = evidence.p_value
    smallest = smallest_found(n, court.alarms, len(evidence.bettors))
    if p_value <= court.alarms:
        said = (
            f"{evidence.richest}: after {evidence.tokens} tokens; the likeliest symbol came in "
            f"{observed[0] / n:.2%} of the places, {due[0] / n:.2%} were due"
        )
        found = court.fail(said, Ask(court.prompts(1, salt=1000)[0], LENGTH, rules), got=f"{observed[0] / n:.4f}",
                           due=f"{due[0] / n:.4f}", p_value=p_value, bars=bars, trace=evidence.trace)  # fmt: skip
        return replace(found, command=f"{found.command}  # many times, with other prompts")
    if evidence.tokens < 200:
        return Finding("skip", f"{evidence.tokens} tokens are too few; give --tokens or --seconds more")
    said = f"{evidence.tokens} tokens fit; would show a bias of {smallest:.1%} (total variation)"
    return court.passed(said, p_value=p_value, bars=bars, trace=evidence.trace)


def _other_rules(court: Court, rules: Rules) -> Law:
    """The law of other parameters, within what the stated law allows."""

    def law(drawn: Drawn) -> Floats:
        other = np.where(drawn.laws > 1e-12, court.table.laws(drawn.contexts, rules)[0], 0.0)
        return np.asarray(other / np.maximum(other.sum(-1, keepdims=True), 1e-300))

    return law


def _counting_prompt(court: Court, rules: Rules) -> Law:
    """Presence penalties that count the prompt as well."""

    def law(drawn: Drawn) -> Floats:
        contexts = replace(drawn.contexts, used=np.maximum(drawn.contexts.used, drawn.contexts.seen))
        return court.table.laws(contexts, rules)[0]

    return law


def _from_earlier(court: Court, rules: Rules, back: int) -> Law:
    """Presence and frequency penalties that miss the last tokens, as those of a round's first token do."""

    def law(drawn: Drawn) -> Floats:
        ones, used = np.eye(court.table.other + 1)[:, : court.table.size], drawn.contexts.used
        for place in range(back):
            used = used - ones[drawn.contexts.last[:, place]] * (drawn.position > place)[:, None]
        return court.table.laws(replace(drawn.contexts, used=used), rules)[0]

    return law


def bettors_of(court: Court, rules: Rules) -> list[Bettor]:
    """The usual ones, and those that bet on a fault of these parameters."""
    plain = Rules(rules.temperature)
    found = usual_bettors()
    found += [Rival("the parameter is ignored", _other_rules(court, plain), share) for share in (0.2, 0.9)]
    if rules.temperature != 1:
        found.append(Rival("the temperature is ignored", _other_rules(court, replace(rules, temperature=1.0))))
    if rules.presence_penalty or rules.frequency_penalty:
        found += [Rival("the penalty misses the last tokens", _from_earlier(court, rules, back), share)
                  for back in (1, 2) for share in (0.4, 0.9)]  # fmt: skip
    if rules.presence_penalty:
        found.append(Rival("the penalty counts the prompt as well", _counting_prompt(court, rules)))
    return found


@dataclass(frozen=True)
class LawCheck:
    """A law that is sampled: its parameters, and its share of the tokens."""

    about: str
    rules: Rules
    share: float = 1.0
    seeded: bool = False


LAWS = {
    "law.temperature_1": LawCheck("law of sampled tokens at temperature 1", Rules(), share=3.0),
    "law.temperature_0.7": LawCheck("law at temperature 0.7", Rules(0.7), share=1.5),
    "law.seeded": LawCheck("law over requests with seeds 0, 1, 2, ...", Rules(), seeded=True),
    "law.top_k": LawCheck("law with top-k 5", Rules(top_k=5)),
    "law.top_p": LawCheck("law with top-p 0.8", Rules(top_p=0.8), share=1.5),
    "law.min_p": LawCheck("law with min-p 0.1", Rules(min_p=0.1)),
    "law.presence": LawCheck("law with a presence penalty of 1.2", Rules(presence_penalty=1.2)),
    "law.frequency": LawCheck("law with a frequency penalty of 1.2", Rules(frequency_penalty=1.2), share=1.5),
    "law.repetition": LawCheck("law with a repetition penalty of 1.3", Rules(repetition_penalty=1.3)),
    "law.bias": LawCheck("law with logit biases", Rules(bias=BIAS)),
}
for _name, _law in LAWS.items():
    check(_name, _law.about, ("table",), _law.share, bets=True)(partial(law_check, law=_law))


@check("law.on_off", "first and second tokens, with speculation against without", ("off",), 0.5, True)
def on_off(court: Court) -> Finding:
    """Needs no known law: pairs of texts, one of each mode, that might as well have come the other way round."""
    tests = [TwoSamples(), TwoSamples()]  # of one prompt each
    prompts, start = court.prompts(2, salt=9), court.spent
    while court.spent - start < court.tokens and not court.late:
        for prompt, test in zip(prompts, tests, strict=True):
            asks = [Ask(prompt, 2, Rules())] * 16
            for on, off in zip(court.ask(asks), court.ask(asks, "off"), strict=True):
                test.take(on.text, off.text)
        p_value = min(1.0, len(tests) * min(test.p_value for test in tests))
        if p_value <= court.alarms:
            worst = min(tests, key=lambda test: test.p_value)
            ask = Ask(prompts[tests.index(worst)], 2, Rules())
            most_on, most_off = (max(counts, key=lambda text: counts[text]) for counts in worst.counts)
            return court.fail(f"the laws differ after {worst.pairs} pairs", ask, most_on, most_off, p_value=p_value)
    pairs = sum(test.pairs for test in tests)
    if pairs < 64:
        return Finding("skip", f"{pairs} pairs are too few; give --tokens or --seconds more")
    p_value = min(1.0, len(tests) * min(test.p_value for test in tests))
    return court.passed(f"{pairs} pairs of texts look alike", p_value=p_value)


@check("seeds.differ", "texts of other seeds, or of none, are drawn anew", ("table",), bets=True)
def differ(court: Court) -> Finding:
    """Bets that a text repeats an earlier one of the same prompt, token by token until the two part."""
    rules, worst, wealth = Rules(), None, 0.0
    for round_, prompt in enumerate(court.prompts(6, salt=11)):
        for seeds in ((None, None), (round_, round_ + 100)):
            asks = [Ask(prompt, LENGTH, rules, seed) for seed in seeds]
            first, second = court.alone(asks)
            gained = _copied(court, asks[0], first, second)
            wealth += math.log(0.9 + 0.1 * math.exp(min(gained, 600.0)))
            if worst is None or gained > worst[0]:
                worst = (gained, asks[1], second.text, first.text, seeds)
    assert worst is not None
    p_value = min(1.0, math.exp(-max(0.0, wealth)))
    if p_value <= court.alarms:
        how = "without seeds" if worst[4][0] is None else f"with seeds {worst[4][0]} and {worst[4][1]}"
        return court.fail(f"two texts {how} repeat each other", worst[1], worst[2], "another text", p_value=p_value)
    return court.passed("12 pairs of texts part as they should", p_value=p_value)


def _copied(court: Court, ask: Ask, first: Answer, second: Answer) -> float:
    """Log of the winnings of betting nine tenths on a repetition as long as there is one."""
    a, b = symbols_of(court.table, ask, first), symbols_of(court.table, ask, second)
    contexts = court.table.contexts(court.table.encode(ask.prompt), b)
    laws, gained = court.table.laws(contexts, ask.rules)[0], 0.0
    for place, (one, other) in enumerate(zip(a, b, strict=False)):
        gained += math.log(0.1 + (0.9 / max(float(laws[place][other]), 1e-9) if one == other else 0.0))
        if one != other:
            break
    return gained
