"""The clock of a target. Engine, controller, drafters and simulations read this clock and no other.

A target states its clock (`Abilities.clock`): a real one has WALL, a simulated device counts its own seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

Clock = Callable[[], float]  # seconds since some start
WALL: Clock = perf_counter
