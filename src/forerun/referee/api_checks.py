"""What the API promises besides the law: seeds, log-probabilities, ends, structure, counts, and time."""

from __future__ import annotations

import json
import math

from forerun.referee.ask import Ask, CountsDrafts, Mode, Refused
from forerun.referee.evidence import Coin
from forerun.referee.law_checks import LENGTH, symbols_of
from forerun.referee.suite import Court, Finding, check
from forerun.referee.tables import Rules

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
