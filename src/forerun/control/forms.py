"""FormChooser: one form per round for all sequences that draft together from one menu.

The form that promises most tokens per second is taken, plain decoding being a form of 0 nodes:

    (B + sum of E over the sequences) / (T_pass(rows) + T_overhead(form))

E is what is accepted of that form (`Acceptance`), T_pass the time of a pass, T_overhead what else a round of this form
takes, drafting first of all: what the menu says, then what rounds took (`RoundOverhead`, cost.py). The last form stays
unless another is better by 3%. Now and then a form is tried that might do better than is believed; a trial must be
covered by the allowance (`Allowance`), which bounds what all trials together can lose.

A drafter's files say how many tokens of each form are accepted on average. The text at hand differs from the text of
those files, so `Acceptance` multiplies that number by three factors, each observed over expected: one for all forms,
with a short memory; one for each form, slower and close to 1; one for each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import NamedTuple

from forerun.control.base import WaitingPrompts
from forerun.control.cost import MEMORY, CostModel, Factor, RoundOverhead, presumed_gap
from forerun.control.prices import BEST_ACCEPTANCE, BETTER, Allowance
from forerun.core.types import PLAIN, Form, Menu

# of a plain pass: where plain rounds took more than that beside it, the process had just started
COLD_SHARE = 0.5
ROUNDS_BETWEEN_TRIALS = 64  # rounds: more often, trials would cost what they find
FOLLOWED_ROUND = 0.125  # of a round: what a drafted one that followed counts for, as a trial must be read first
HOPED_TOKENS = 1.2  # times the tokens that are expected of a form, if all goes well
# times the seconds of a form, if all goes well: where rounds have shown them, and where they are a guess
HOPED_SECONDS_KNOWN, HOPED_SECONDS_GUESSED = 0.92, 0.75
ROUNDS_TO_REGAIN = 8  # in which another form must gain as much as is lost by reading one first
ROUNDS_BETWEEN_LOOKS = 4  # overlapping rounds from one comparison of all forms to the next: it takes the host long
# tokens of running sequences that one token of a request in prefill is worth: a user waits for its first token
WAITING_TOKEN_WORTH = 8.0
BURST, BURST_SHARE = 3, 1 / 6  # requests in prefill that make a burst: 3, and a sixth of the running sequences
BURST_ENDS = 1 / 16  # of the running sequences: with fewer requests in prefill the burst is over
REFRESH_ROUNDS = 8  # rounds for which the seconds of all forms are kept: they change little


class Promise(NamedTuple):
    """What a form would give in the coming round."""

    form: Form
    tokens: float  # of the whole batch
    seconds: float
    missed: float = 0.0  # tokens that requests would have written whose prompts are read later for it
    is_trial: bool = False  # it was chosen to learn, not to gain

    @property
    def rate(self) -> float:
        return (self.tokens - self.missed) / self.seconds


class FormChooser:
    """Chooses the form of a whole batch, and learns from its rounds."""

    def __init__(self, menu: Menu, cost: CostModel, allowance: Allowance, nodes: int, width: int) -> None:
        """`nodes` and `width` are the most that the user allows."""
        self.menu, self.cost, self.allowance = menu, cost, allowance
        self.acceptance, self.overhead = Acceptance(), RoundOverhead()
        self.last = PLAIN
        self._priors = {PLAIN: 0.0} | {
            form: menu.expected(form) for form in menu.forms if form.nodes <= nodes and form.width <= width
        }
        self._places = {form: i for i, form in enumerate(self._priors)}
        self._since = 0.0  # rounds since the last trial
        # did the last round, a trial from plain decoding, gain? Then see whether that was chance
        self._paid = False
        self._tried: dict[Form, int] = {}  # the round in which a form last ran
        self._times: dict[tuple[int, int, int], list[float]] = {}  # (drafting, batch, context) -> seconds by form
        self._round = 0
        self._drafted: set[int] = set()  # sequences that had a draft: the first one waits until their prompts are read
        self.prompts = WaitingPrompts()  # that wait for the coming round
        self._burst = False  # were they many, and have some waited ever since?

    def note_waiting(self, prompts: WaitingPrompts) -> None:
        """What waits for the coming round."""
        self.prompts, self._burst = prompts, self._burst and prompts.requests > 0

    def choose(self, ids: Sequence[int], batch: int) -> Promise:
        """The form for these sequences of a batch, the others of which do not draft."""
        if not self._knows_plain(batch):  # drafting is compared with it
            return self.promise_of(PLAIN, batch, batch, batch)._replace(is_trial=True)
        promises = self._promises(ids, batch)
        best = self._best(promises, batch)
        if bool(best.form.nodes) != bool(self.last.nodes):
            self._times.clear()
        self.last = best.form
        paid, self._paid = self._paid, False
        if (self._since >= ROUNDS_BETWEEN_TRIALS or (paid and best.form == PLAIN)) and (
            trial := self._find_trial(promises, batch)
        ) is not None:
            self._since = 0.0
            return trial._replace(is_trial=True)
        return best

    def cancel(self, promise: Promise) -> None:
        """What was chosen was not launched: a trial is due as before."""
        if promise.is_trial:
            self._since = ROUNDS_BETWEEN_TRIALS

    def keeps(self, ids: Sequence[int], batch: int) -> Promise | None:
        """What the last form promises now, unless another is so much better that it pays to read a round first.

        Asked before every round that follows: others are looked at now and then.
        """
        form, times = self.last, self._seconds(len(ids), batch)
        if not form.nodes or not self._knows_plain(batch):
            return None
        tokens = self.acceptance.weight(ids) * self.acceptance.expected(form, self._priors[form])
        last = Promise(form, batch + tokens, times[self._places[form]])
        if not self.allowance.covers(last.seconds / times[0] - 1.0):
            return None
        if self._round % ROUNDS_BETWEEN_LOOKS and not self.prompts.requests:
            return last
        better = max(BETTER, 1.0 + self.gap(batch) / last.seconds / ROUNDS_TO_REGAIN)
        return last if self._best(self._promises(ids, batch), batch, better).form == form else None

    def keeps_plain(self, ids: Sequence[int], batch: int) -> Promise | None:
        """What plain decoding promises, if it was best, is, and no trial is due: asked before every round that follows.

        Others are looked at now and then, as for `keeps`.
        """
        if self.last.nodes or not self._knows_plain(batch):
            return None
        if self._round % ROUNDS_BETWEEN_LOOKS and not self.prompts.requests:
            return self.promise_of(PLAIN, batch, batch, batch)
        promises = self._promises(ids, batch)
        best = self._best(promises, batch)
        if best.form.nodes or (self._since >= ROUNDS_BETWEEN_TRIALS and self._find_trial(promises, batch) is not None):
            return None
        return best

    def _promises(self, ids: Sequence[int], batch: int) -> list[Promise]:
        weight, expected = self.acceptance.weight(ids), self.acceptance.expected
        times = self._seconds(len(ids), batch)
        found = [
            Promise(form, batch + weight * expected(form, prior), seconds)
            for (form, prior), seconds in zip(self._priors.items(), times, strict=True)
        ]
        return self._with_missed(found, len(ids), batch) if self.prompts.requests else found

    def _with_missed(self, promises: Sequence[Promise], drafting: int, batch: int) -> list[Promise]:
        """The same, with what requests miss that wait for their prompts while a round of each form runs.

        Trees take time, and rows of the pass that prompts could have. A request whose prompt is read so much later than
        beside plain rounds writes so much less, at the best rate that one of the batch has. While many wait, and until
        few do, nothing is drafted: whoever is read last waits for all of it.
        """
        plain, prompts = promises[0], self.prompts
        least = BURST_ENDS * batch if self._burst else max(BURST, BURST_SHARE * batch)
        self._burst = prompts.requests >= least
        if self._burst:
            return [plain, *[one._replace(missed=inf) for one in promises[1:]]]
        each = max([one.rate for one in promises]) / batch
        read = max(1, min(prompts.rows, prompts.taken, prompts.room - batch))  # a prompt of one token: 0 rows
        beside = self.cost.whole_seconds(batch + read, batch) + self._overhead(plain.form, drafting, batch)
        found = list[Promise]()
        for one in promises:
            rows = self.rows_of(one.form, drafting, batch)
            some = min(read, max(0, prompts.room - rows))
            seconds = self.cost.whole_seconds(rows + some, batch) + self._overhead(one.form, drafting, batch)
            later = max(0.0, seconds - beside * some / read) if one.form.nodes else 0.0
            found.append(one._replace(missed=WAITING_TOKEN_WORTH * prompts.requests * each * later))
        return found

    def _best(self, promises: Sequence[Promise], batch: int, better: float = BETTER) -> Promise:
        """The best form whose worst case is covered; the last one, where that is nearly as good."""
        plain, better = promises[0], max(better, 1.0 + self._delay(batch) / ROUNDS_TO_REGAIN)
        covered = [
            one for one in promises if not one.form.nodes or self.allowance.covers(one.seconds / plain.seconds - 1.0)
        ]
        best = max(covered, key=lambda one: one.rate, default=plain)
        last = next((one for one in covered if one.form == self.last), plain)
        return last if best.rate < better * last.rate and last.rate >= plain.rate else best

    def observe(
        self,
        promise: Promise,
        ids: Sequence[int],
        accepted: Sequence[int],
        batch: int,
        seconds: Mapping[str, float],
        delayed: bool = False,
        followed: bool = False,
    ) -> None:
        """A round of this form: tokens accepted of each sequence, seconds by part."""
        form = promise.form
        self._round += 1
        self._since += FOLLOWED_ROUND if followed and form.nodes else 1.0
        self._tried[form] = self._round
        if self._round < ROUNDS_BETWEEN_TRIALS or self._round % REFRESH_ROUNDS == 0:
            self._times.clear()
        if not delayed:  # else it waited for a pass of another round
            said = self._said(form, len(ids))
            known = self.overhead.seconds(form, batch, said)
            own = sum(seconds.values()) - seconds["pass"] - seconds.get("prompt", 0.0)
            self.overhead.observe(form, batch, own, known, followed, said)
        if form.nodes:
            self._drafted.update(ids)
            self.acceptance.observe(form, self._priors[form], ids, accepted)
        gained = sum(accepted) / batch + 1.0 - promise.seconds / self.plain_seconds(batch)
        self._paid = promise.is_trial and form.nodes > 0 and self.last == PLAIN and gained > 0.0

    def _delay(self, batch: int) -> float:
        """Plain rounds that are lost where one is read before a draft, and one behind it before plain ones go on."""
        return 0.0 if self.last.nodes else 2.0 * self.gap(batch) / self.plain_seconds(batch)

    def gap(self, batch: int) -> float:
        """Seconds that a round takes longer if the one before it is read first; 0 = that was not seen yet."""
        return self.overhead.gap(batch, presumed_gap(self.plain_seconds(batch)))

    def plain_seconds(self, batch: int) -> float:
        """Seconds of a plain round."""
        return self.cost.pass_seconds(batch, batch) + self.overhead.seconds(PLAIN, batch, 0.0)

    def promise_of(self, form: Form, rows: int, batch: int, tokens: float, drafting: int = 0) -> Promise:
        """A round of this form with `rows` rows, in which `drafting` sequences get a draft of the menu."""
        return Promise(form, tokens, self.cost.pass_seconds(rows, batch) + self._overhead(form, drafting, batch))

    def _overhead(self, form: Form, drafting: int, batch: int) -> float:
        return self.overhead.seconds(form, batch, self._said(form, drafting))

    def _knows_plain(self, batch: int) -> bool:
        return self.overhead.knows_plain(batch, COLD_SHARE * self.cost.pass_seconds(batch, batch))

    def rows_of(self, form: Form, drafting: int, batch: int) -> int:
        """Rows of a pass in which `drafting` sequences of a batch get a draft of the menu."""
        return self.menu.rows(form, drafting) + batch - drafting if form.nodes else batch

    def _seconds(self, drafting: int, batch: int) -> list[float]:
        """Of a round of every form; computed anew every few rounds, or every round while much is new."""
        key = drafting, batch, self.cost.context
        if key not in self._times:
            self._times[key] = [
                self.promise_of(form, self.rows_of(form, drafting, batch), batch, 0.0, drafting).seconds
                for form in self._priors
            ]
        return self._times[key]

    def _said(self, form: Form, drafting: int) -> float:
        """Seconds of drafting, as the menu says."""
        return self.menu.seconds(form, drafting) if form.nodes else 0.0

    def _find_trial(self, promises: Sequence[Promise], batch: int) -> Promise | None:
        """A form other than the last one that could do better, within the allowance: the one not tried for longest.

        While nothing is drafted, the form whose worst case is cheapest: acceptance shows in any of them.
        """
        plain, delay = promises[0], self._delay(batch)
        last = next(each for each in promises if each.form == self.last)
        drafting = [
            each
            for each in promises
            if each.form != last.form
            and self.allowance.covers_trial(each.seconds / plain.seconds - 1.0 + delay)
            and self._hoped_rate(each, batch, idle=last is plain) > BETTER * last.rate
        ]
        if last is plain:
            return min(drafting, key=lambda each: each.seconds, default=None)
        return min(drafting, key=lambda each: self._tried.get(each.form, 0), default=None)

    def _hoped_rate(self, promise: Promise, batch: int, *, idle: bool) -> float:
        """Tokens per second if all goes well."""
        form = promise.form
        hoped = batch + HOPED_TOKENS * (promise.tokens - batch)
        if idle:  # acceptance may have risen to anything since
            best = sum(BEST_ACCEPTANCE**depth for depth in range(1, form.depth + 1))
            hoped = max(hoped, batch * (1.0 + best))
        known = self.overhead.is_known(form, batch)
        return (hoped - promise.missed) / (promise.seconds * (HOPED_SECONDS_KNOWN if known else HOPED_SECONDS_GUESSED))

    def has_drafted(self, ids: Sequence[int]) -> bool:
        """Had each of these sequences a draft before?"""
        return self._drafted.issuperset(ids)

    def forget(self, seq_id: int) -> None:
        self.acceptance.forget(seq_id)
        self._drafted.discard(seq_id)


class _NoForms:
    """Implements forerun.core.types.Menu."""

    forms: tuple[Form, ...] = ()

    def seconds(self, form: Form, batch: int) -> float:
        return 0.0

    def rows(self, form: Form, batch: int) -> int:
        return batch * (1 + form.nodes)

    def expected(self, form: Form) -> float:
        return 0.0


NO_FORMS = _NoForms()
# memory per round: of a form's factor and of the common one of one sequence; of that of a full batch, which shows more
MEMORY_ALONE, MEMORY_IN_BATCH = 0.93, 0.7
LEAST_FACTOR, MOST_FACTOR = 0.02, 4.0  # bounds of the common factor, so that it can return from any text
PRIOR_TOKENS = 2.0  # expected tokens: a prior counts for about one draft
PRIOR_FORM = 12.0  # the same of a form, of one sequence: what all forms share is settled first
LEAST_OF_FORM, MOST_OF_FORM = 0.5, 2.0  # bounds of a form's factor: its files are never further off than that
LEAST_OWN, MOST_OWN = 0.25, 2.0  # bounds of a sequence's factor: it may be much worse than others, and hardly better
FULL_BATCH = 16  # sequences, from which on the memory is that of a batch


@dataclass(slots=True)
class Acceptance:
    """What is accepted of each form, as rounds have shown."""

    overall: float = 1.0
    _forms: dict[Form, Factor] = field(default_factory=dict)
    _counts: Factor = field(default_factory=lambda: Factor(PRIOR_TOKENS))
    _sequences: dict[int, tuple[float, float]] = field(default_factory=dict)  # observed, expected
    _own: dict[int, float] = field(default_factory=dict)  # a sequence's factor

    def expected(self, form: Form, prior: float) -> float:
        """Tokens of one average sequence."""
        return min(prior * self.overall * self._of_form(form), form.depth)

    def _of_form(self, form: Form) -> float:
        own = self._forms.get(form)
        return 1.0 if own is None else min(max(own.value(), LEAST_OF_FORM), MOST_OF_FORM)

    def weight(self, ids: Sequence[int]) -> float:
        """How many average sequences these are together."""
        own = self._own
        return sum([own.get(seq_id, 1.0) for seq_id in ids])

    def observe(self, form: Form, prior: float, ids: Sequence[int], accepted: Sequence[int]) -> None:
        """A round of this form: tokens accepted of each sequence."""
        batch, total, each = len(ids), sum(accepted), self.expected(form, prior)
        memory = max(MEMORY_IN_BATCH, MEMORY_ALONE - (batch - 1) * (MEMORY_ALONE - MEMORY_IN_BATCH) / (FULL_BATCH - 1))
        self._counts.add(total, prior * self._of_form(form) * batch, memory)
        self.overall = min(max(self._counts.value(), LEAST_FACTOR), MOST_FACTOR)
        # a form that runs on and on tends to 1, and leaves the rest to what all share
        of_form = self._forms.setdefault(form, Factor(PRIOR_FORM / sqrt(batch)))
        of_form.add(total / batch, prior * self.overall, MEMORY_ALONE)
        if batch == 1:
            return  # the common factor is its own
        counts, own = self._sequences, self._own
        for seq_id, tokens in zip(ids, accepted, strict=True):  # plain numbers: once per sequence and round
            seen, hoped = counts.get(seq_id, (PRIOR_TOKENS, PRIOR_TOKENS))
            seen, hoped = seen * MEMORY + tokens, hoped * MEMORY + each
            counts[seq_id] = seen, hoped
            own[seq_id] = min(max((seen + PRIOR_TOKENS) / (hoped + PRIOR_TOKENS), LEAST_OWN), MOST_OWN)

    def forget(self, seq_id: int) -> None:
        self._sequences.pop(seq_id, None)
        self._own.pop(seq_id, None)
