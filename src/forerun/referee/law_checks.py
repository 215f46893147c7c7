"""The checks: greedy texts whatever is drafted, sampled tokens by the stated law, and what the API promises besides."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from forerun.referee.ask import Answer, Ask, CountsDrafts, Mode, Refused
from forerun.referee.evidence import (
    Bettor,
    Coin,
    Drawn,
    Evidence,
    Law,
    Rival,
    TwoSamples,
    smallest_found,
    usual_bettors,
)
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


LOGPROB_ERROR = 0.03  # nats: half precision stays below it
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"enum": ["abc", "bcd", "cde", "0", "12"]},
        "b": {"enum": ["dab", "eab", "f1", "k"]},
        "c": {"enum": ["l", "lk", "g0g"]},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
_FEW = 0.01  # of drafted tokens: fewer are accepted by chance alone
_MOST_DRAFTED = 16  # tokens that a round may accept beyond the end of a text, where these are counted


@check("seeds.repeat", "a seed gives the same text again, alone and among other requests")
def repeat(court: Court) -> Finding:
    asks = [Ask(prompt, LENGTH, Rules(), seed=40 + i) for i, prompt in enumerate(court.prompts(6, salt=21))]
    first = court.alone(asks)
    for how, again in (("alone", court.alone(asks)), ("among others", court.ask(asks))):
        for ask, one, other in zip(asks, first, again, strict=True):
            if one.text != other.text:
                return court.fail(f"seed {ask.seed} gives another text {how}", ask, other.text, one.text)
    return court.passed(f"{len(asks)} seeds repeat their texts")


@check("logprobs.law", "log-probabilities are those of the law, and fit the sampled tokens", needs=("table",))
def logprobs(court: Court) -> Finding:
    table, places = court.table, 0
    asks = [Ask(prompt, 16, Rules(), logprobs=3) for prompt in court.prompts(8, salt=22)]
    for ask, answer in zip(asks, court.ask(asks), strict=True):
        if answer.logprobs is None:
            raise Refused("no log-probabilities in the answer")
        spelt = "".join(each.text for each in answer.logprobs if each.text in table.alphabet)
        if not spelt.startswith(answer.text) or len(spelt) > len(answer.text):
            return court.fail("the tokens of the log-probabilities are not the text", ask, spelt, answer.text)
        output = symbols_of(table, ask, answer)
        laws = table.laws(table.contexts(table.encode(ask.prompt), output), Rules())[0]
        for place, (entry, token) in enumerate(zip(answer.logprobs, output, strict=False)):
            due = math.log(max(float(laws[place][token]), 1e-30))
            wrong = [(entry.text, entry.logprob, due)]
            for text, value in entry.top.items():
                if len(text) == 1 and text in table.alphabet:
                    wrong.append((text, value, math.log(max(float(laws[place][table.alphabet.index(text)]), 1e-30))))
            for text, value, right in wrong:
                if abs(value - right) > LOGPROB_ERROR:
                    said = f"place {place + 1}, {text!r}: {value:.4f}"
                    return court.fail("a log-probability is not that of the law", ask, said, f"{right:.4f}")
            places += 1
    return court.passed(f"{places} log-probabilities within {LOGPROB_ERROR} nats")


@check("stop.strings", "texts end before a stop string, wherever drafted rounds end")
def stop_strings(court: Court) -> Finding:
    asks, count = court.greedy_asks(6, 40, salt=23), 0
    for ask in asks:
        whole = court.reference(ask)
        for start in range(1, min(len(whole) - 3, 14)):
            for size in (1, 2, 3):
                stop = whole[start : start + size]
                cut = Ask(ask.prompt, ask.max_tokens, stop=(stop,))
                answer = court.ask([cut])[0]
                due, count = whole[: whole.index(stop)], count + 1
                if answer.text != due and not court.is_tie(cut, answer.text, due):
                    return court.fail(f"the stop string {stop!r} does not end the text", cut, answer.text, due)
                if answer.finish not in (None, "stop"):
                    return court.fail("the finish reason of a stop string", cut, answer.finish, "stop")
        if count >= 60 or court.late:
            break
    return court.passed(f"{count} texts end where they should")


@check("limits.max_tokens", "texts of exactly max_tokens tokens", needs=("table",))
def max_tokens(court: Court) -> Finding:
    asks = [Ask(prompt, n) for n, prompt in enumerate(court.prompts(16, salt=24), start=1)]
    for ask, answer in zip(asks, court.alone(asks), strict=True):
        due = court.reference(ask)
        if len(answer.text) > ask.max_tokens:
            return court.fail(f"more than {ask.max_tokens} tokens", ask, answer.text, due)
        if answer.text != due and not court.is_tie(ask, answer.text, due):
            return court.fail(f"not the text of {ask.max_tokens} tokens", ask, answer.text, due)
        if len(due) == ask.max_tokens and answer.finish not in (None, "length"):
            return court.fail("the finish reason at the limit", ask, answer.finish, "length")
    return court.passed(f"{len(asks)} limits are kept")


@check("limits.end_of_text", "an end-of-text token ends the text, also inside a draft", needs=("table",))
def end_of_text(court: Court) -> Finding:
    table, asks = court.table, []
    for prompt in court.prompts(60, salt=25):
        out = table.greedy(table.encode(prompt), 40)
        if out[-1] == table.end and len(out) > 1:
            asks.append(Ask(prompt, len(out) + 12))
    for ask, answer in zip(asks[:16], court.alone(asks[:16]), strict=True):
        due = court.reference(ask)
        if answer.text != due and not court.is_tie(ask, answer.text, due):
            return court.fail("a text does not end at its end-of-text token", ask, answer.text, due)
        if answer.finish not in (None, "stop"):
            return court.fail("the finish reason of an ended text", ask, answer.finish, "stop")
    return court.passed(f"{min(16, len(asks))} texts end by themselves")


@check("structure.json", "answers held to a JSON schema match it while drafts are rejected")
def structure(court: Court) -> Finding:
    asks = [Ask(prompt, 120, Rules(), schema=SCHEMA) for prompt in court.prompts(24, salt=26)]
    for ask, answer in zip(asks, court.ask(asks), strict=True):
        if answer.finish == "length":
            return court.fail("the answer does not come to its end", ask, answer.text, "an object of the schema")
        try:
            if fault := _fault(json.loads(answer.text)):
                return court.fail(fault, ask, answer.text, "an object of the schema")
        except json.JSONDecodeError as error:
            return court.fail(f"no JSON: {error}", ask, answer.text, "an object of the schema")
    return court.passed(f"{len(asks)} answers match")


def _fault(value: object) -> str | None:
    fields = SCHEMA["properties"]
    assert isinstance(fields, dict)
    if not isinstance(value, dict) or sorted(value) != sorted(fields):
        return "not the fields of the schema"
    return next(
        (f"field {name!r} has no allowed value" for name in fields if value[name] not in fields[name]["enum"]), None
    )


@check("usage.counts", "usage counts the tokens of prompt and text", needs=("table",))
def usage(court: Court) -> Finding:
    asks = [Ask(prompt, 30, Rules(), seed=i) for i, prompt in enumerate(court.prompts(12, salt=27))]
    added: set[int] = set()
    for ask, answer in zip(asks, court.ask(asks), strict=True):
        if answer.completion_tokens is None or answer.prompt_tokens is None:
            raise Refused("no usage in the answer")
        length = len(answer.text)
        allowed = (length, length + 1) if answer.ended else (length,)
        if answer.completion_tokens not in allowed:
            return court.fail("completion_tokens is not the length of the text", ask, answer.completion_tokens, allowed)
        if answer.total_tokens is not None and answer.total_tokens != answer.prompt_tokens + answer.completion_tokens:
            due = answer.prompt_tokens + answer.completion_tokens
            return court.fail("total_tokens is not the sum", ask, answer.total_tokens, due)
        added.add(answer.prompt_tokens - len(ask.prompt))
    if len(added) > 1 or not added <= {0, 1}:
        return court.fail(
            "prompt_tokens is not the length of the prompt", asks[0], f"{sorted(added)} more", "0 or 1 more"
        )
    return court.passed(f"{len(asks)} answers count right")


@check("metrics.acceptance", "drafting figures add up, and drafts are accepted")
def acceptance(court: Court) -> Finding:
    asks = [Ask(prompt, 60, Rules()) for prompt in court.prompts(16, salt=28)]
    counted = court.target.drafting if isinstance(court.target, CountsDrafts) else (lambda: None)
    before, answers, after = counted(), court.ask(asks), counted()
    drafted, accepted = sum(a.drafted or 0 for a in answers), sum(a.accepted or 0 for a in answers)
    if all(answer.drafted is None for answer in answers):
        if before is None or after is None:
            raise Refused("no drafting figures in the answers, and none in /metrics")
        drafted, accepted = after[0] - before[0], after[1] - before[1]
        if accepted > drafted:
            return court.fail("more accepted than drafted", asks[0], accepted, f"at most {drafted}")
    for ask, answer in zip(asks, answers, strict=True):
        if answer.drafted is None or answer.accepted is None:
            continue
        tokens = answer.completion_tokens or len(answer.text)
        if answer.accepted > answer.drafted:
            return court.fail("more accepted than drafted", ask, answer.accepted, f"at most {answer.drafted}")
        if answer.accepted > tokens + _MOST_DRAFTED:
            return court.fail("more accepted than generated", ask, answer.accepted, f"at most {tokens}")
        if answer.rounds is not None and not -1 <= answer.accepted + answer.rounds - tokens <= _MOST_DRAFTED:
            said = f"{answer.accepted} accepted and {answer.rounds} rounds"
            return court.fail("accepted tokens and rounds do not come to the text", ask, said, f"{tokens} tokens")
    if drafted >= 200 and accepted < _FEW * drafted:
        said = f"{accepted} of {drafted} drafted tokens were accepted: does the drafter fit the target?"
        return court.fail(said, asks[0], accepted, f"at least {_FEW:.0%}")
    if not drafted:
        return Finding("skip", "nothing was drafted for these requests")
    rate = f"{accepted / drafted:.1%}"
    return court.passed(f"{accepted} of {drafted} drafted tokens accepted ({rate})")


@check("speed.load", "drafting is not much slower than plain decoding, alone and with 8 requests", ("off",), 0.2, True)
def load(court: Court) -> Finding:
    ratios = []
    for at_once in (1, 8):
        coin, spent = Coin(), {"on": 0.0, "off": 0.0}
        for trial in range(26):
            seconds = {}
            order: tuple[Mode, Mode] = ("on", "off") if trial % 2 else ("off", "on")
            for mode in order:
                asks = [Ask(prompt, 16) for prompt in court.prompts(at_once, salt=300 + trial)]
                started = court.clock()
                court.ask(asks, mode)
                seconds[mode] = court.clock() - started
                spent[mode] += seconds[mode]
            coin.take(seconds["on"] > court.slowest * seconds["off"])
            if 2 * coin.p_value <= court.alarms or (coin.hits == 0 and trial >= 5) or court.late:
                break
        times = f"{spent['on'] / max(spent['off'], 1e-9):.2f} times"
        ratios.append(f"{times} with {at_once} at once (slower in {coin.hits} of {coin.trials} trials)")
        if 2 * coin.p_value <= court.alarms:
            said = f"drafting takes more than {court.slowest:g} times as long in {coin.hits} of {coin.trials} trials"
            return court.fail(f"{said}, {at_once} at once", Ask(court.prompts(1)[0], 16), ratios[-1],
                              f"at most {court.slowest:g}", p_value=2 * coin.p_value)  # fmt: skip
    return court.passed(f"drafting takes {', '.join(ratios)} as long as plain decoding")
