"""TextDrafter: a draft model with another tokenizer writes text, which is put into the target's tokens.

String-level exact match (Timor et al. 2025): nothing of the draft model's law is used, so its whole vocabulary may
draft, not only what the two share. It drafts greedily. The tokens are *chosen*: the verifier follows them where the
target writes them itself. Where drafted text meets the committed text, both are put into tokens together, because a
word may go on across the seam; if that would change committed tokens, the drafted text is taken alone. The last token
is dropped: more text might have made another one of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.drafters.base import Parts
from forerun.drafters.draft_model import ModelDrafter
from forerun.drafters.translated import TranslatedTarget
from forerun.models.base import Target
from forerun.offers import Offer
from forerun.params import SamplingParams
from forerun.types import Budget, Needs, PlainSeq, Scores, Seq, TreeBatch, Verdict

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
