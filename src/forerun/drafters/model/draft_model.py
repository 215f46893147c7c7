"""ModelDrafter: drafts with a second, smaller model; TextDrafter: the same with another tokenizer, by way of text.

The draft model runs token by token; its KV cache is cut back to the committed sequence before each round. How its
tokens are picked follows the request: greedy sequences take its argmax (chosen), a verifier that couples by noise
takes its token under the *same* noise (chosen, and accepted more often), any other samples from its law, which goes
with the tree so that the verifier can test against exactly what was drawn from. A tree of width w is w siblings at the
root, each the head of a chain.

TextDrafter (string-level exact match, Timor et al. 2025) drafts greedily and puts the text into the target's tokens, so
that the whole vocabulary of the draft model may draft. Committed and drafted text are put into tokens together, because
a word may go on across the seam; if that would change committed tokens, the drafted text is taken alone. The last
token is dropped: more text might have made another one of it.

CascadeDrafter, the composition `a>b`: the draft model b decodes with a as its own drafter.

Each level is lossless for the one above: b verifies what a drafts exactly as the target verifies what b drafts, so
what b hands on has b's own law, and that law goes with the tree. The number of tokens is fixed beforehand: what b
writes beyond it is dropped whatever it is. `a>b>c` has three levels: a drafts for b, both for c, and c for the target
(staged speculation, Spector and Re 2023; cascade drafting, Chen et al. 2023, has the models in such a row too).

Random numbers of a level are keyed by its round as well: a position that is drafted again sees others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.noise import DRAFT, Noise, derived_seed, draw, exponential, uniform
from forerun.core.params import SamplingParams
from forerun.core.tree import topology_of
from forerun.core.types import Budget, Laws, Needs, Offer, PlainSeq, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.base import BaseDrafter, Drafter, Parts
from forerun.drafters.heads.base import Meter
from forerun.drafters.heads.growth import lay_out
from forerun.drafters.model.translated import TranslatedTarget
from forerun.models.base import Target
from forerun.verify.coupled import walk_coupled
from forerun.verify.exact import walk_exactly
from forerun.verify.walk import decide
from forerun.verify.warp import argmax_rows, warp

UNMEASURED = 2e-3  # seconds per level, until the first draft was timed
READING = 0.25  # of a level: what reading a token of a prompt takes, until one was read
CATCH_UP = 8  # tokens; a draft model that is further behind reads them as a prompt, without logits


@dataclass(slots=True, eq=False)
class Branch(PlainSeq):
    """A sequence as the draft model sees it: the committed sequence, and what was drafted on top."""

    committed: int = 0  # length of the committed sequence
    cached: int = -1  # tokens in the draft model's KV cache; -1 = it has not seen the sequence
    foreign: bool = False  # it holds a token outside the draft model's vocabulary


@dataclass(slots=True)
class Growth:
    """The tree of one sequence while it grows: parallel lists of nodes."""

    tokens: list[int]
    parents: list[int]
    rows: list[int]

    def add(self, parent: int, token: int, row: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.rows.append(row)
        return len(self.tokens) - 1


class ModelDrafter:
    needs = Needs()
    adapts = False  # a sequence's adapter changes the draft model too

    def __init__(self, draft: Target, vocab_size: int) -> None:
        self.draft, self.vocab_size = draft, vocab_size
        self._clock = draft.can.clock
        self._meter = Meter(self._clock)
        self._reading = 0.0  # seconds per token of a prompt
        self._branches: dict[int, Branch] = {}

    def offer(self, seq: Seq) -> Offer:
        """A level, and reading the sequence before the first one; a chain that may be sampled, so of fixed length."""
        level = self._meter.seconds or UNMEASURED
        unread = len(seq.tokens) - self.draft.cached_tokens(seq)
        start = unread * (self._reading or READING * level) if unread > CATCH_UP else 0.0
        return Offer((level,), start, chosen=False, key=id(self))

    @classmethod
    def build(cls, parts: Parts) -> Drafter:
        """On the target's device where both models run in our own GPU decoder, else token by token from the host."""
        draft, vocab_size = parts.checkpoint("draft_model"), parts.target.vocab_size
        if draft.can.captures and not parts.by_host:
            from forerun.drafters.device.model import on_device

            length = parts.max_length or parts.target.max_length
            drafter = on_device(parts.target, draft, lambda: cls(draft, vocab_size), parts.max_batch, length)
            if drafter is not None:
                return drafter
        return cls(draft, vocab_size)

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        wanted = [b for b, seq in enumerate(seqs) if self._depth(seq, budgets[b]) > 0]
        if not wanted:
            return TreeBatch.chains([seq.tokens[-1:] for seq in seqs])
        laws: list[Tensor] = []
        trees = [Growth([seq.tokens[-1]], [-1], [-1]) for seq in seqs]
        branches = {b: self._follow(seqs[b]) for b in wanted}
        branches = {b: branch for b, branch in branches.items() if not branch.foreign}
        live = list(branches)
        self._catch_up([b for b in branches.values() if b.cached < 0 or len(b.tokens) - b.cached > CATCH_UP])
        self._meter.start()
        widths = {b: max(1, min(budgets[b].width, budgets[b].nodes)) for b in live}
        first = self._heads(live, branches, widths, trees, laws)
        for rank in range(max(widths.values(), default=0)):
            with_head = [b for b in live if rank < len(first[b])]
            for b in with_head:
                self._rewind(branches[b], first[b][rank][0])
            tips = {b: first[b][rank][1] for b in with_head}
            depths = {b: min(self._depth(seqs[b], budgets[b]), budgets[b].nodes // widths[b]) for b in with_head}
            self._chains(with_head, branches, tips, depths, trees, laws)
        self._meter.stop(max((topology_of(tuple(tree.parents)).deepest for tree in trees), default=0))
        return lay_out([(tree.tokens, tree.parents) for tree in trees], [tree.rows for tree in trees], laws)

    def _catch_up(self, behind: list[Branch]) -> tuple[TreeBatch, Scores] | None:
        """Read what the draft model has not seen of these sequences, as prompts."""
        if not behind:
            return None
        started, unread = self._clock(), sum(len(one.tokens) - max(0, one.cached) for one in behind)
        read = self.draft.prefill(behind, self.needs)
        spent = (self._clock() - started) / unread
        self._reading = spent if self._reading == 0.0 else 0.5 * self._reading + 0.5 * spent
        for branch in behind:
            branch.cached = len(branch.tokens) - 1
        return read

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        pass  # the next proposal compares with the committed sequence itself

    def forget(self, seq: Seq) -> None:
        branch = self._branches.get(seq.id)
        if branch is not None:  # kept until it is released: an interrupted call can be repeated
            self.draft.release(branch)
            self._branches.pop(seq.id, None)

    def rewind(self, seq: Seq, length: int) -> None:
        """Of the sequence as it was, only the first `length` tokens still hold: it was drafted for a draft model."""
        branch = self._branches.get(seq.id)
        if branch is not None:
            branch.committed = min(branch.committed, length)

    def _depth(self, seq: Seq, budget: Budget) -> int:
        """How deep to draft: the budget, within the draft model's own context; 0 if it cannot read the source."""
        rules = self.draft.source_rules
        if rules is not None and len(seq.source) > rules.longest:
            return 0
        return min(budget.depth, budget.nodes, self.draft.max_length - len(seq.tokens) - 1)

    def _follow(self, seq: Seq) -> Branch:
        """Cut the draft model's view back to the committed sequence."""
        branch = self._branches.get(seq.id)
        if branch is None:
            length = min(seq.max_length, self.draft.max_length)
            fields = (seq.prompt_length, seq.params, seq.seed, length, seq.stop_ids, seq.shares_noise)
            branch = Branch(seq.id, [], *fields, cache_salt=seq.cache_salt, source=seq.source, rules=seq.rules)
            branch.adapter = seq.adapter if self.adapts else None
            self._branches[seq.id] = branch
        branch.seed = seq.seed  # that of a cascade's level changes with its rounds
        fresh = seq.tokens[branch.committed :]
        branch.foreign = branch.foreign or max(fresh, default=0) >= self.draft.vocab_size
        agreed = branch.committed
        end = min(len(branch.tokens), len(seq.tokens))
        while agreed < end and branch.tokens[agreed] == seq.tokens[agreed]:
            agreed += 1
        branch.cached = min(branch.cached, agreed, len(seq.tokens) - 1)
        self.draft.truncate(branch, max(0, branch.cached))
        if (reaches := self.draft.reaches((branch,))) is not None and len(seq.tokens) > reaches[0]:
            self.draft.release(branch)
            branch.cached = -1
        # a part of the target has cached what the target has: nothing of it is read again
        branch.cached = self.draft.cached_tokens(branch) or branch.cached
        branch.tokens, branch.committed = list(seq.tokens), len(seq.tokens)
        return branch

    def _rewind(self, branch: Branch, head: int) -> None:
        """Back to the committed sequence, followed by one drafted token."""
        branch.tokens = [*branch.tokens[: branch.committed], head]
        branch.cached = min(branch.cached, branch.committed)
        self.draft.truncate(branch, branch.cached)

    def _heads(
        self,
        live: list[int],
        branches: dict[int, Branch],
        widths: dict[int, int],
        trees: list[Growth],
        laws: list[Tensor],
    ) -> dict[int, list[tuple[int, int]]]:
        """The siblings at every root, as (token, node)."""
        tips = [branches[b] for b in live]
        found = self._picks(tips, self._step(tips), [widths[b] for b in live], laws)
        heads: dict[int, list[tuple[int, int]]] = {}
        for b, (picked, row) in zip(live, found, strict=True):
            heads[b] = [(token, trees[b].add(0, token, row)) for token in picked]
        return heads

    def _chains(
        self,
        live: list[int],
        branches: dict[int, Branch],
        tips: dict[int, int],
        depths: dict[int, int],
        trees: list[Growth],
        laws: list[Tensor],
    ) -> None:
        """Extend one chain per sequence, level by level, all sequences in one pass."""
        for depth in range(1, max(depths.values(), default=0)):
            live = [b for b in live if depth < depths[b]]
            ends = [branches[b] for b in live]
            found = self._picks(ends, self._step(ends), [1] * len(ends), laws)
            for b, (picked, row) in zip(live, found, strict=True):
                if not picked:  # no token is possible here
                    depths[b] = 0
                    continue
                tips[b] = trees[b].add(tips[b], picked[0], row)
                branches[b].tokens.append(picked[0])

    def _step(self, branches: list[Branch]) -> Laws:
        """One pass of the draft model: the law after each branch's last token, in the target's ids."""
        if not branches:
            return Laws(torch.zeros(0, self.vocab_size), ())
        # what the draft model has not seen yet, most often one token, goes through it as one chain
        fresh = [branch.tokens[branch.cached :] for branch in branches]
        for branch in branches:
            # for the draft model, the sequence ends at the chain's root
            del branch.tokens[branch.cached + 1 :]
        chains = TreeBatch.chains(fresh, self.draft.device)
        logits = self.draft.score(branches, chains, self.needs).required_logits
        self.draft.commit(branches, chains, Verdict.whole_chain(chains, [0] * len(branches)))
        for branch, tokens in zip(branches, fresh, strict=True):
            branch.tokens += tokens[1:]
            branch.cached = len(branch.tokens)
        roots = TreeBatch.chains([[branch.tokens[-1]] for branch in branches], self.draft.device)
        last = [end - 1 for end in chains.starts[1:]]
        return warp(fit(logits[last], self.vocab_size), branches, roots)

    def _picks(
        self, branches: Sequence[Branch], step: Laws, widths: Sequence[int], laws: list[Tensor]
    ) -> list[tuple[list[int], int]]:
        """`_pick` for every branch; the likeliest tokens of all are read at once, the lowest id where several are."""
        if step.plain_greedy and max(widths) == 1:
            return [([token], -1) for token in argmax_rows(step.log_weights)]
        each = enumerate(zip(branches, widths, strict=True))
        return [self._pick(branch, step, i, width, laws) for i, (branch, width) in each]

    def _pick(self, branch: Branch, step: Laws, i: int, width: int, laws: list[Tensor]) -> tuple[list[int], int]:
        """Up to `width` tokens to follow a branch, and the row of the law they were drawn from (-1 = chosen)."""
        if i in step.impossible:
            return [], -1
        weights = step.log_weights[i]
        if step.greedy[i] or branch.shares_noise:
            if not step.greedy[i]:
                weights = weights - exponential(branch.seed, len(branch.tokens), len(weights), weights.device).log()
            possible = int((weights > -torch.inf).sum())
            return weights.topk(min(width, possible)).indices.tolist(), -1
        law = weights.softmax(-1)
        laws.append(law)
        rest, picked = law.clone(), list[int]()
        for rank in range(min(width, int((law > 0).sum()))):
            # keyed by the round too: a position drafted again must not see the same numbers again
            index = branch.committed * 64 + rank
            token = draw(rest, uniform(branch.seed, len(branch.tokens), DRAFT, index))
            picked.append(token)
            rest[token] = 0.0
        return picked, len(laws) - 1


def fit(logits: Tensor, vocab_size: int) -> Tensor:
    """Draft logits in the target's vocabulary: padding ids of either model are cut or made impossible."""
    if logits.shape[-1] >= vocab_size:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[-1]), value=-torch.inf)


SEAM = 8  # committed tokens that are put into tokens again, together with the drafted text
_GREEDY = SamplingParams()


class TextDrafter:
    """Drafts text rather than tokens."""

    needs = Needs()

    def __init__(self, draft: Target, vocab_size: int) -> None:
        translated = draft if isinstance(draft, TranslatedTarget) else None
        self.map = None if translated is None else translated.map  # None = one tokenizer
        self.vocab_size = vocab_size
        self._model = ModelDrafter(draft, vocab_size)
        if translated is not None:
            self._model = ModelDrafter(translated.draft, translated.draft.vocab_size)

    @classmethod
    def build(cls, parts: Parts) -> TextDrafter:
        return cls(parts.checkpoint("draft_text"), parts.target.vocab_size)

    def offer(self, seq: Seq) -> Offer:
        """A level of the draft model; tokens are chosen, and their number is fixed beforehand."""
        return self._model.offer(self._view(seq))

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        views = [self._view(seq) for seq in seqs]
        depths = [min(budget.nodes, budget.depth) for budget in budgets]
        # the last is dropped
        asked = [Budget(depth + 1, depth + 1) if depth else Budget(0, 0) for depth in depths]
        drafted = self._model.propose(views, asked)
        tokens, rows = drafted.to_host()[0], []
        for b, seq in enumerate(seqs):
            new = tokens[drafted.starts[b] + 1 : drafted.starts[b + 1]]
            found = self._in_target(seq, new)[: depths[b]]
            ended = next((i for i, token in enumerate(found) if token in seq.stop_ids), len(found))
            rows.append([seq.tokens[-1], *found[: ended + 1]])
        return TreeBatch.chains(rows)

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        pass  # the next proposal compares with the committed sequence itself

    def forget(self, seq: Seq) -> None:
        self._model.forget(seq)

    def _view(self, seq: Seq) -> PlainSeq:
        """The sequence in the draft model's tokens, to be continued greedily."""
        if self.map is None:
            read, ends = list(seq.tokens), seq.stop_ids
        else:
            read, ends = [*self.map.prefix, *self.map.read(seq.tokens)], frozenset(self.map.ends)
        return PlainSeq(seq.id, read, len(read), _GREEDY, seq.seed, self._model.draft.max_length, ends)

    def _in_target(self, seq: Seq, drafted: Sequence[int]) -> list[int]:
        """Drafted tokens as tokens of the target, but the last."""
        if self.map is None:
            return [token for token in drafted if token < self.vocab_size][:-1]
        end = next((i for i, token in enumerate(drafted) if token in self.map.ends), len(drafted))
        text = b"".join(self.map.draft_bytes.get(token, b"") for token in drafted[:end])
        found = self._encode(seq, text)
        return [*found, self.map.ends[drafted[end]]] if end < len(drafted) else found[:-1]

    def _encode(self, seq: Seq, text: bytes) -> list[int]:
        """Text after a sequence, in the target's tokens."""
        assert self.map is not None
        encode, pieces = self.map.encode, self.map.target_bytes
        new = text.decode("utf-8", errors="ignore")
        if encode is None or not new:
            return []
        for size in (SEAM, SEAM // 2, 2):
            tail = seq.tokens[-size:]
            before = b"".join(pieces.get(token, b"\xff") for token in tail)
            try:
                ids = encode(before.decode("utf-8") + new)
            except UnicodeDecodeError:  # it begins inside a character, or with a special token
                continue
            if ids[: len(tail)] == tail:
                return ids[len(tail) :]
        return encode(new)


WORTH_A_ROW = 0.35  # probability of being accepted below which a token is not put to the draft model
UNKNOWN = 4  # tokens of a lower drafter that does not say how far it can be trusted
_ROUNDS = 1 << 40  # seeds of rounds are derived far from those of a prompt's several completions


class CascadeDrafter(ModelDrafter):
    """A draft model that decodes with a drafter of its own; it drafts chains."""

    def __init__(self, lower: Drafter, upper: ModelDrafter) -> None:
        super().__init__(upper.draft, upper.vocab_size)
        self.lower, self.upper = lower, upper

    @classmethod
    def compose(cls, first: Drafter, second: Drafter) -> Drafter:
        """`first>second`; of `a>b>c`, a drafts for b."""
        if isinstance(second, CascadeDrafter):
            return cls(cls.compose(first, second.lower), second.upper)
        if not isinstance(second, ModelDrafter):
            raise InvalidInput("what stands right of '>' must be a draft model; write a>draft_model, or a>layer_skip")
        if first.needs.hidden_layers:
            raise InvalidInput("a head drafts for the target it was trained on; left of '>' it cannot draft")
        if isinstance(first, ModelDrafter) and first.draft is second.draft:
            raise InvalidInput("a draft model cannot draft for itself; name two: draft_model=SMALL,MEDIUM")
        return cls(first, second)

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        laws: list[Tensor] = []
        trees = [Growth([seq.tokens[-1]], [-1], [-1]) for seq in seqs]
        left = {b: self._depth(seq, budgets[b]) for b, seq in enumerate(seqs)}
        branches = {b: self._follow(seqs[b]) for b, depth in left.items() if depth > 0}
        branches = {b: branch for b, branch in branches.items() if not branch.foreign}
        read = branches.values()
        self._catch_up([one for one in read if one.cached < 0 or len(one.tokens) - one.cached > CATCH_UP])
        self._meter.start()
        while live := [b for b in branches if left[b] > 0]:
            self._round(live, branches, left, trees, laws)
        self._meter.stop(max(len(tree.tokens) for tree in trees) - 1)
        return lay_out([(tree.tokens, tree.parents) for tree in trees], [tree.rows for tree in trees], laws)

    def forget(self, seq: Seq) -> None:
        super().forget(seq)
        self.lower.forget(seq)

    def _catch_up(self, behind: list[Branch]) -> tuple[TreeBatch, Scores] | None:
        """As one draft model does; the lower drafter observes it."""
        if (read := super()._catch_up(behind)) is not None:
            self.lower.observe(behind, *read, Verdict.whole_chain(read[0], [one.tokens[-1] for one in behind]))
        return read

    def _follow(self, seq: Seq) -> Branch:
        """The branch of the committed sequence; the lower drafter is rewound to what is left of it."""
        held = self._branches.get(seq.id)
        shown, agreed = (held.tokens, held.committed) if held is not None else ([], 0)
        while agreed < min(len(shown), len(seq.tokens)) and shown[agreed] == seq.tokens[agreed]:
            agreed += 1
        branch = super()._follow(seq)
        if not branch.shares_noise:
            branch.seed = derived_seed(seq.seed, _ROUNDS + len(seq.tokens))
        if agreed < len(shown):
            if isinstance(self.lower, BaseDrafter | ModelDrafter):
                self.lower.rewind(branch, agreed)
            else:
                self.lower.forget(branch)
        return branch

    def _round(
        self,
        live: list[int],
        branches: dict[int, Branch],
        left: dict[int, int],
        trees: list[Growth],
        laws: list[Tensor],
    ) -> None:
        """One pass of the draft model over what the lower drafter drafts."""
        some = [branches[b] for b in live]
        drafted = self._drafted(some, [left[b] for b in live])
        unread = [branch.tokens[branch.cached :] for branch in some]  # most often one token: the root
        seen = [replace(branch, tokens=branch.tokens[: branch.cached + 1]) for branch in some]
        whole, rows = _below_chains(unread, drafted, self.draft.device)
        scores = self.draft.score(seen, whole, self.needs)
        logits = fit(scores.required_logits[rows], self.vocab_size)
        law = warp(logits, some, drafted)
        walks = [_walk(branch, drafted, law, i) for i, branch in enumerate(some)]
        verdict = Verdict.of([path for path, _, _ in walks], [bonus for _, bonus, _ in walks], drafted.device)
        self.lower.observe(some, drafted, Scores(logits), verdict)
        depths = [len(chain) - 1 for chain in unread]
        paths = [
            [*range(1, depth + 1), *(depth + node for node in path)]
            for depth, (path, _, _) in zip(depths, walks, strict=True)
        ]
        self.draft.commit(seen, whole, Verdict.of(paths, [0] * len(paths), whole.device))
        tokens = drafted.to_host()[0]
        for i, (b, (path, bonus, possible)) in enumerate(zip(live, walks, strict=True)):
            start, branch = drafted.starts[i], some[i]
            branch.cached += len(unread[i]) + len(path)
            written = [*(tokens[start + node] for node in path), bonus][: left[b]] if possible else []
            sampled = not (law.greedy[i] or branch.shares_noise)
            for token, node in zip(written, [0, *path], strict=False):
                if sampled:
                    laws.append(law.probs(start + node))
                trees[b].add(len(trees[b].tokens) - 1, token, len(laws) - 1 if sampled else -1)
            branch.tokens += written
            left[b] = left[b] - len(written) if possible else 0

    def _drafted(self, some: Sequence[Branch], left: Sequence[int]) -> TreeBatch:
        """What the lower drafter drafts; nothing where the draft model does not know a token of it."""
        budgets = []
        for branch, most in zip(some, left, strict=True):
            free = self.lower.offer(branch).free
            depth = min(most - 1, sum(share >= WORTH_A_ROW for share in free) if free else UNKNOWN)
            budgets.append(Budget(depth, depth) if depth > 0 else Budget(0, 0))
        trees = self.lower.propose(some, budgets)
        if max(trees.to_host()[0]) < self.draft.vocab_size:
            return trees
        return TreeBatch.chains([branch.tokens[-1:] for branch in some])


def _below_chains(
    chains: Sequence[Sequence[int]], drafted: TreeBatch, device: torch.device
) -> tuple[TreeBatch, list[int]]:
    """Trees hung below chains, at whose last tokens their roots are; and where each of their nodes is."""
    tokens, parents = drafted.to_host()
    made, rows, done = [], list[int](), 0
    for i, chain in enumerate(chains):
        span, depth = slice(drafted.starts[i], drafted.starts[i + 1]), len(chain) - 1
        below = [parent + depth for parent in parents[span][1:]]
        made.append(([*chain, *tokens[span][1:]], [*range(-1, depth), *below]))
        rows += range(done + depth, done + len(made[-1][0]))
        done += len(made[-1][0])
    return TreeBatch.trees(made, device=device), rows


def _walk(branch: Branch, drafted: TreeBatch, law: Laws, i: int) -> tuple[list[int], int, bool]:
    """What the draft model accepts of tree i, its own token after that, and whether any token was possible."""
    start, end = drafted.starts[i], drafted.starts[i + 1]
    if start in law.impossible:
        return [], 0, False
    tree = drafted.select([i])
    if any(node in law.impossible for node in range(start, end)):
        tree, end = TreeBatch.chains([branch.tokens[-1:]]), start + 1
    noise = Noise([branch.seed], [len(branch.tokens)])
    walk = walk_coupled if branch.shares_noise else walk_exactly
    paths, bonus = decide(tree, Laws(law.log_weights[start:end], (law.greedy[i],)), noise, walk).to_host()
    return paths[0], bonus[0], True
