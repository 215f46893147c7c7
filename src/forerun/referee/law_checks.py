"""Sampled tokens must follow the stated law: first tokens, and every later one given those before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from forerun.referee.ask import Answer, Ask
from forerun.referee.evidence import Bettor, Drawn, Evidence, Law, Rival, TwoSamples, smallest_found, usual_bettors
from forerun.referee.suite import Court, Finding, check
from forerun.referee.tables import Contexts, Floats, Pair, Rules, Table

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


def law_check(court: Court, rules: Rules, more: Sequence[Bettor] = (), seeded: bool = False) -> Finding:
    """Sample until the evidence suffices for a failure or the check's share of the budget is spent."""
    assert court.pair is not None
    evidence = Evidence([*usual_bettors(), *more])
    observed, due = np.zeros(court.table.size), np.zeros(court.table.size)
    batch = 0
    while evidence.tokens < court.tokens and not court.late:
        asks = [Ask(prompt, LENGTH, rules, seed=batch * BATCH + i if seeded else None)
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


def _rivals(court: Court, rules: Rules) -> list[Bettor]:
    plain = Rules(rules.temperature)
    found: list[Bettor] = [Rival("the parameter is ignored", _other_rules(court, plain), share) for share in (0.2, 0.9)]
    if rules.temperature != 1:
        found.append(Rival("the temperature is ignored", _other_rules(court, replace(rules, temperature=1.0))))
    if rules.presence_penalty or rules.frequency_penalty:
        found += [Rival("the penalty misses the last tokens", _from_earlier(court, rules, back), share)
                  for back in (1, 2) for share in (0.4, 0.9)]  # fmt: skip
    if rules.presence_penalty:
        found.append(Rival("the penalty counts the prompt as well", _counting_prompt(court, rules)))
    return found


def _register(name: str, about: str, rules: Rules, share: float = 1.0, seeded: bool = False) -> None:
    def run(court: Court) -> Finding:
        return law_check(court, rules, _rivals(court, rules), seeded)

    check(f"law.{name}", about, needs=("table",), share=share, bets=True)(run)


_register("temperature_1", "law of sampled tokens at temperature 1", Rules(), share=3.0)
_register("temperature_0.7", "law at temperature 0.7", Rules(0.7), share=1.5)
_register("seeded", "law over requests with seeds 0, 1, 2, ...", Rules(), seeded=True)
_register("top_k", "law with top-k 5", Rules(top_k=5))
_register("top_p", "law with top-p 0.8", Rules(top_p=0.8), share=1.5)
_register("min_p", "law with min-p 0.1", Rules(min_p=0.1))
_register("presence", "law with a presence penalty of 1.2", Rules(presence_penalty=1.2))
_register("frequency", "law with a frequency penalty of 1.2", Rules(frequency_penalty=1.2), share=1.5)
_register("repetition", "law with a repetition penalty of 1.3", Rules(repetition_penalty=1.3))
_register("bias", "law with logit biases", Rules(bias=BIAS))


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
