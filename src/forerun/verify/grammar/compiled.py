"""Grammars: compiles what an answer must match, by llguidance; a request that cannot be held to it is refused here.

Compiling takes a millisecond or more, and what a lexer builds while masks are made costs as much again. So the texts of
one structure share a matcher's lexer: copies do. They share the limits on what it may build too; a text that runs into
them goes on with a matcher of its own, which alone decides, and texts that come later start with a new one.

GrammarLaw: holds one text to a grammar, node by node.

The mask after a text is part of the law that the target's token is drawn from. So it is exact under speculation: a node
is judged by the grammar along its own path, and a drafted token that the grammar rules out cannot be accepted.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from forerun.core.errors import GrammarFailed, InvalidInput, MissingDependency, brief
from forerun.core.params import Forces, LawProcessor, Prefix, Structure, Whitespace
from forerun.core.request import Request
from forerun.verify.grammar.thinking import Thinking, ThinkingLaw, Thinks
from forerun.verify.processors import Allowed, Masks

# how llguidance separates the parts of a JSON text: regular expressions, and whether whitespace may be anywhere
_SEPARATORS: dict[Whitespace, dict[str, Any]] = {
    "compact": {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False},
    "none": {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False},
    "any": {"item_separator": ",", "key_separator": ":", "whitespace_flexible": True},
}
# What one text may build of an automaton (some 20 MB), and what may be spent on one mask (some 100 ms).
_LIMITS = {"max_lexer_states": 50_000, "step_lexer_fuel": 1_000_000, "verbose_errors": False}

_LOWEST = -(2.0**63)  # llguidance overflows its stack, which ends the process, where a constant is its lowest integer
_NUMBER = re.compile(r"-\d[\d.eE+-]*")
# llguidance allows a second 60 in any minute, which only a leap second is. What is written here is valid everywhere.
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_FORMATS = {"time": f"^{_TIME}$", "date-time": f"^[0-9]{{4}}-{_DAY}T{_TIME}$"}
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # keys are no keywords
_VALUES = ("const", "enum", "default", "examples")  # hold no schemas
_PROBED = 4  # masks at most, each behind what can only follow the one before
_KEPT = 16  # compiled structures, those used last: a few kilobytes each, and 20 MB where the limits are reached


@runtime_checkable
class WritesJson(Protocol):
    """A tokenizer that other libraries can read."""

    def to_json(self) -> str: ...


class Grammars:
    """Holds requests to their structure, for one tokenizer. Any thread may ask."""

    def __init__(self, tokenizer: object, vocab_size: int, ends: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, frozenset(ends)
        self._known: Any = None  # llguidance's own tokenizer: made once it is needed, in half a second
        self._lock = Lock()
        self._compiled: OrderedDict[Structure, Any] = OrderedDict()  # matchers at the start of a text

    def compile(self, request: Request) -> Request:
        """The request with its structure as a processor, which is for one text; it takes a while.

        Raises where no text can be written: the schema is wrong, has no solution, or is too complex for llguidance.
        """
        params = request.params
        law: LawProcessor | None = None
        if (structure := params.structure) is not None:
            start = self._matcher(structure)
            law = GrammarLaw(start, partial(self._replaced, structure, start), self._ends)
        law = self._behind_thinking(request, law)
        held = replace(
            params,
            response_format=None,
            structured_outputs=None,
            max_thinking_tokens=None,
            processors=(*params.processors, *([] if law is None else [law])),
        )
        return replace(request, params=held)

    def _behind_thinking(self, request: Request, law: LawProcessor | None) -> LawProcessor | None:
        """A law that holds once the model has thought, and the limit on that; the law itself where it does not."""
        budget, thinking = request.params.max_thinking_tokens, self._thinking
        if thinking is None:
            if budget is not None:
                raise InvalidInput(
                    f"max_thinking_tokens={budget} is for models that think, by marks in their chat template; "
                    "this model does not: leave it out"
                )
            return law
        start = thinking.starts(request.prompt)
        return law if start == "none" else ThinkingLaw(thinking, start, budget, law, self._ends)

    @cached_property
    def _thinking(self) -> Thinking | None:
        """How the model marks its thinking, in its tokens; None = it does not think."""
        tokenizer = self._tokenizer
        if not isinstance(tokenizer, Thinks) or tokenizer.thinking is None:
            return None
        return Thinking(tokenizer, tokenizer.thinking, self._vocab_size)

    def warm_up(self) -> None:
        """Do now what the first grammar would wait for."""
        self._vocabulary(_llguidance())

    def _matcher(self, structure: Structure) -> Any:
        """A matcher at the start of a text, which other texts of this structure may have copied too."""
        with self._lock:
            found = self._compiled.get(structure)
        found = found or self._new_matcher(structure)
        with self._lock:
            self._compiled[structure] = found
            self._compiled.move_to_end(structure)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return found

    def _replaced(self, structure: Structure, full: Any) -> Any:
        """A matcher for one text, in place of one whose lexer has reached its limits: nobody else begins with that."""
        with self._lock:
            if self._compiled.get(structure) is full:
                del self._compiled[structure]
        return self._new_matcher(structure)

    def _new_matcher(self, structure: Structure) -> Any:
        """A matcher at the start of a text, from which some token can follow."""
        guidance = _llguidance()
        try:
            grammar = grammar_of(guidance, structure)
        except Exception as error:  # llguidance converts other forms of grammars, which may fail in any way
            raise _refused(structure, brief(error)) from None
        limits = guidance.LLParserLimits(**_LIMITS)
        matcher = guidance.LLMatcher(self._vocabulary(guidance), grammar, log_level=0, limits=limits)
        _check(matcher.deep_copy(), structure)
        return matcher

    def _vocabulary(self, guidance: Any) -> Any:
        with self._lock:
            if self._known is None:
                if not isinstance(self._tokenizer, WritesJson) or not self._ends:
                    raise InvalidInput(
                        "response_format needs a tokenizer with a tokenizer.json and an end-of-text token; "
                        "this model has none"
                    )
                self._known = guidance.LLTokenizer(
                    self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=sorted(self._ends)
                )
            return self._known


def grammar_of(guidance: Any, structure: Structure) -> Any:
    """What must be matched, as llguidance has it."""
    matcher, text = guidance.LLMatcher, structure.text
    _refuse_lowest(structure)
    match structure.kind:
        case "regex":
            return matcher.grammar_from_regex(text)
        case "choice":
            return matcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, json.loads(text)))}")
        case "grammar":  # Lark's own form, or llama.cpp's EBNF, whose rules are written with ::=
            return matcher.grammar_from_lark(guidance.gbnf_to_lark.any_to_lark(text))
        case "structural_tag":
            tags = [
                guidance.StructTag(
                    trigger=tag["trigger"],
                    begin=tag["begin"],
                    grammar=_with_options(_with_patterns(tag["schema"])),
                    end=tag["end"],
                )
                for tag in json.loads(text)
            ]
            return matcher.grammar_from_lark(guidance.StructTag.to_grammar(tags, assume_special=False))
    how = _SEPARATORS[structure.whitespace]
    if not text.startswith("{"):  # true and false are schemas too, and have no place for options
        text = f'{{"anyOf": [{text}]}}'
    if any(f'"{name}"' in text for name in _FORMATS):
        text = json.dumps(_with_patterns(json.loads(text)))
    # what was asked for by name comes before what is in the schema under "x-guidance"
    given = {"defaults" if structure.whitespace == "compact" else "overrides": how}
    return matcher.grammar_from_json_schema(text, **given)


def _refuse_lowest(structure: Structure) -> None:
    """Numbers of a schema that llguidance does not survive; a grammar of Lark's may hold schemas."""
    if structure.kind in ("json_schema", "structural_tag"):
        json.loads(structure.text, parse_int=_survived, parse_float=_survived)
    elif structure.kind == "grammar" and "%json" in structure.text:
        for number in _NUMBER.findall(structure.text):
            _survived(number)


def _survived(number: str) -> None:
    try:
        value = float(number)
    except ValueError:  # a part of a grammar that looks like one
        return
    if value <= _LOWEST:
        raise ValueError(f"the number {number[:40]} is too low: numbers above {_LOWEST:.0f} can be used")


def _with_patterns(schema: Any) -> Any:
    """A schema with patterns in the place of formats that llguidance reads too widely."""
    if isinstance(schema, list):
        return [_with_patterns(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: {name: _with_patterns(one) for name, one in value.items()}
        if key in _OF_NAMES and isinstance(value, dict)
        else value if key in _VALUES else _with_patterns(value)
        for key, value in schema.items()
    }  # fmt: skip
    pattern = _FORMATS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is not None and "pattern" not in schema:
        del found["format"]
        found["pattern"] = pattern
    return found


def _with_options(schema: Any) -> Any:
    """A schema within a grammar, which is compact unless it says otherwise."""
    return {"x-guidance": _SEPARATORS["compact"], **schema} if isinstance(schema, dict) else {"anyOf": [schema]}


def _check(matcher: Any, structure: Structure) -> None:
    """Raise unless tokens can follow: many schemas turn out to be impossible only by the masks of their first texts."""
    for _ in range(_PROBED):
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _refused(structure, reason_of(matcher))
        if not (forced := matcher.compute_ff_tokens()):
            return
        matcher.consume_tokens(forced)


_NAMES = {"json_schema": "JSON schema", "structural_tag": "structural tag", "choice": "list of choices"}


def _refused(structure: Structure, reason: str) -> InvalidInput:
    what = _NAMES.get(structure.kind, structure.kind)
    return InvalidInput(f"the {what} cannot be used: {reason}; correct or simplify it")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        what = "response_format needs the package llguidance; pip install 'forerun[serve]'"
        raise MissingDependency(what) from None
    return llguidance


_NO_TEXT = "NoExtension"  # llguidance's word where nothing can follow
KEPT = 256  # masks, those of a round among them


class GrammarLaw(Masks, Forces):
    """Implements forerun.core.params.LawProcessor, for the nodes of one text.

    Matchers of llguidance only ever read on, since masks behind a rollback were seen to be wrong: one reads what is
    committed, and a copy of it reads the path of a draft. What a lexer has built for drafts beside the text counts
    against its limits. So where it meets one, a new matcher reads the path alone, and decides: whether a text can go
    on does not depend on what was drafted.
    """

    def __init__(self, start: Any, make: Callable[[], Any], ends: frozenset[int]) -> None:
        self._start, self._make, self._ends = start, make, ends  # copies share a lexer
        self._text, self._draft = _Reader(start), _Reader(start)
        self._known: OrderedDict[tuple[int, ...], Tensor | GrammarFailed] = OrderedDict()  # by output

    def allowed(self, prefix: Prefix) -> Allowed:
        output = prefix.output
        if not self._ends.isdisjoint(output):  # it is complete: whoever ignores the end reads it again
            return sorted(self._ends)
        found = self._mask(output, len(prefix.path))
        if isinstance(found, GrammarFailed):
            raise found.with_traceback(None)
        return found

    def forced(self, prefix: Prefix) -> Sequence[int]:
        output = prefix.output
        return self._read(output, len(prefix.path)).forced() if self._ends.isdisjoint(output) else ()

    def choice(self, prefix: Prefix, top: int) -> int | None:
        """Where tokens are forced, a mask has the first of them alone; elsewhere it has those that can be read."""
        output, drafted = prefix.output, len(prefix.path)
        if not self._ends.isdisjoint(output):
            return None
        reader = self._read(output, drafted)
        token = reader.choice(top)
        if token is None and reader.is_lexer_full():
            self._start_over(self._make())
            token = self._read(output, drafted).choice(top)
        return token

    def _mask(self, output: tuple[int, ...], drafted: int) -> Tensor | GrammarFailed:
        found = self._known.get(output)
        if found is None:
            found = self._known[output] = self._mask_after(output, drafted)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return found

    def _mask_after(self, output: tuple[int, ...], drafted: int) -> Tensor | GrammarFailed:
        """One bit per token [V / 32] int32; or why there is none."""
        reader = self._read(output, drafted)
        if (mask := reader.mask()) is None and reader.is_lexer_full():
            self._start_over(self._make())
            reader = self._read(output, drafted)
            mask = reader.mask()
        if mask is not None:
            return mask
        failed = GrammarFailed(f"the answer cannot go on: {reason_of(reader.matcher)}; simplify what it must match")
        self._start_over(self._make() if reader.is_lexer_full() else self._start)  # an error is for good
        return failed

    def _read(self, output: tuple[int, ...], drafted: int) -> _Reader:
        """A matcher that has read the output, whose last tokens are drafted."""
        text = output[: len(output) - drafted]
        if len(self._text.output) < len(self._draft.output) and self._draft.is_before(text):
            self._text, self._draft = self._draft, self._text  # what was accepted has been read
        if not self._text.is_before(text):
            self._text = _Reader(self._start)
        self._text.read(text)
        if not drafted:
            return self._text
        if not self._draft.is_before(output) or len(self._draft.output) < len(text):
            self._draft = _Reader(self._text.matcher, text)
        self._draft.read(output)
        return self._draft

    def _start_over(self, start: Any) -> None:
        self._start, self._text, self._draft = start, _Reader(start), _Reader(start)


class _Reader:
    """A copy of a matcher, and what it has read of an output."""

    def __init__(self, matcher: Any, output: tuple[int, ...] = ()) -> None:
        self.matcher, self.output = matcher.deep_copy(), output
        self._forced: Sequence[int] | None = None  # behind it; None = not asked

    def is_before(self, output: tuple[int, ...]) -> bool:
        return output[: len(self.output)] == self.output

    def read(self, output: tuple[int, ...]) -> None:
        if len(output) > len(self.output):
            self.matcher.consume_tokens(list(output[len(self.output) :]))
            self.output, self._forced = output, None

    def forced(self) -> Sequence[int]:
        if self._forced is None:
            self._forced = self.matcher.compute_ff_tokens()
        return self._forced

    def choice(self, top: int) -> int | None:
        """As GrammarLaw's; the end of the text is never known without a mask."""
        if forced := self.forced():
            return forced[0]
        return top if self.matcher.validate_tokens([top]) == 1 else None

    def mask(self) -> Tensor | None:
        """None where the matcher failed, which a stopped matcher must not be taken for: that one allows the end."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.int32)
        return None if self.matcher.is_error() else torch.from_numpy(bits.copy())

    def is_lexer_full(self) -> bool:
        """Has the matcher failed by what its lexer has built, for this path and for others?"""
        return str(self.matcher.get_error()).startswith("lexer error")


def reason_of(matcher: Any) -> str:
    told = re.split(r"\s*<(?:state|non-verbose/)>", str(matcher.get_error()))[0]
    return "no text matches the schema" if told.startswith(_NO_TEXT) else brief(told) or "no reason given"
