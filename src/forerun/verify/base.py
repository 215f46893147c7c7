"""The Verifier protocol: a pure function from trees and laws to a verdict."""

from __future__ import annotations

from typing import Protocol

from forerun.noise import Noise
from forerun.types import Laws, TreeBatch, Verdict


class Verifier(Protocol):
    """Decides which drafted tokens are accepted. Tensors in, verdict out: no model, no clock, no I/O, no state.

    If `exact`, the tokens it commits have the target's own law, whatever the trees contain.
    """

    @property
    def exact(self) -> bool:
        """False is printed wherever results are shown."""
        ...

    @property
    def shares_noise(self) -> bool:
        """The target's token is a function of (law, seed, position): drafters do best with the same noise."""
        ...

    def verify(self, trees: TreeBatch, laws: Laws, noise: Noise) -> Verdict:
        """Walk every tree from its root; return the accepted path and the bonus token."""
        ...
