"""The Verifier protocol, a pure function from trees and laws to a verdict; and what an engine asks of verifiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forerun.core.noise import Noise
from forerun.core.params import SamplingParams
from forerun.core.request import LawRules, Request
from forerun.core.types import DecidedSeq, Laws, Scores, Seq, TokenLogprob, Traits, TreeBatch, Verdict

Logprobs = tuple[TokenLogprob, ...]


class Verifier(Protocol):
    """Decides which drafted tokens are accepted. Tensors in, verdict out: no model, no clock, no I/O, no state.

    If `exact`, the tokens it commits have the target's own law, whatever the trees contain.
    """

    @property
    def exact(self) -> bool:
        """False is printed wherever results are shown."""

    @property
    def shares_noise(self) -> bool:
        """The target's token is a function of (law, seed, position): drafters do best with the same noise."""

    def verify(self, trees: TreeBatch, laws: Laws, noise: Noise) -> Verdict:
        """Walk every tree from its root; return the accepted path and the bonus token."""


class Verifiers(Protocol):
    """What an engine asks of the verifiers of its sequences."""

    def get(self, name: str) -> Verifier: ...

    def decide(self, seqs: Sequence[DecidedSeq], trees: TreeBatch, scores: Scores) -> tuple[Laws, Verdict]:
        """Laws and verdict of a round."""

    def device_decides(self, seqs: Sequence[DecidedSeq]) -> bool:
        """Does a device that samples decide about all of these sequences, some of which are sampled?"""

    def is_exact(self, name: str) -> bool: ...

    def traits(self, params: SamplingParams, rules: LawRules | None, verifier: str, has_budget: bool) -> Traits:
        """The constants of a new sequence."""

    def reads_largest_only(self, seqs: Sequence[Seq]) -> bool:
        """Do their laws depend on the largest logit alone, and on what the model's own rules force or ban?"""

    def send_logprobs(self, seqs: Sequence[DecidedSeq], trees: TreeBatch, scores: Scores) -> Scores:
        """The scores with log-probabilities on their way, where a device has decided and a sequence wants them."""

    def logprobs(self, laws: Laws, seq: Seq, first: int, nodes: Sequence[int], tokens: Sequence[int]) -> Logprobs:
        """Of tokens[i] under the law after nodes[i] of its tree, which starts at `first`; and of the likeliest."""

    def prompt_logprobs(self, scores: Scores, seq: Seq, tokens: Sequence[int]) -> Logprobs:
        """Of tokens[i] of its prompt, under the model's own law at node i of a chain; and of the likeliest."""


class CompilesGrammars(Protocol):
    """What an engine asks for where an answer must match a structure."""

    def compile(self, request: Request) -> Request:
        """The request with its structure as a processor of its law; raises where no text can match it."""

    def warm_up(self) -> None:
        """Do now what the first grammar would wait for."""
