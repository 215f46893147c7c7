"""Mistakes to make on purpose: random loads must find each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from forerun.core.types import first_rows
from forerun.engine.engine import Engine
from forerun.engine.round import LaunchedRound, Timeline
from forerun.engine.routing import DrafterPool
from forerun.models.cuda import target as target_module
from forerun.models.cuda.after_pass import AfterPass
from forerun.models.cuda.device_trees import GrownBuffers
from forerun.models.cuda.plain_rounds import PlainResults
from forerun.models.cuda.plan import rows_of
from forerun.models.cuda.target import CudaDecoder
from forerun.models.pages import PagedKV, PagePool
from tests.fuzz import world
from tests.gpu.test_captured import Recorded

Damage = Callable[[pytest.MonkeyPatch], None]


def prompts_beside_trees_without_limit(patch: pytest.MonkeyPatch) -> None:
    """More rows than a pass has, so that trees behind an unread round took the path of the host."""
    real = CudaDecoder._score_trees

    def score(self: Any, seqs: Any, trees: Any, layers: Any, chunks: Any) -> Any:
        if trees.form is not None and trees.form.rows + rows_of(chunks) > target_module.MAX_ROWS:
            trees.follows = None
        return real(self, seqs, trees, layers, chunks)

    patch.setattr(CudaDecoder, "_score_trees", score)
    patch.setattr(target_module, "beside_trees", lambda fresh, trees, rows: first_rows(fresh, rows))


def captures_that_run_twice(patch: pytest.MonkeyPatch) -> None:
    def record(work: Callable[[], None], device: object, pool: object) -> Recorded:
        work()
        work()
        return Recorded(work)

    patch.setattr(world, "record", record)


def roots_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    """Every row of a plain pass follows the first of the last."""
    real = PlainResults.follow

    def follow(self: PlainResults, tokens: Any, step: Any) -> None:
        real(self, tokens.clamp_(min=-1), step)

    patch.setattr(PlainResults, "follow", follow)


def paths_that_are_not_moved(patch: pytest.MonkeyPatch) -> None:
    def nothing(self: AfterPass) -> None:
        self.grown.moved = self.grown.passes

    patch.setattr(AfterPass, "move_decided", nothing)


def rounds_that_are_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """A round that failed keeps what it had cached."""
    real = Timeline._undo

    def roll_back(self: Timeline, seqs: Sequence[Any]) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "_forget", lambda seq: None)
            real(self, seqs)

    patch.setattr(Timeline, "_undo", roll_back)


def only_those_who_go_on_are_asked(patch: pytest.MonkeyPatch) -> None:
    """Whether the device decides was once asked of the next round's sequences, not of the last one's."""
    real = Engine._device_decides

    def may(engine: Any, seqs: Sequence[Any], sampled: bool) -> bool:
        return real(engine, [seq for seq in seqs if len(seq.tokens) + 1 < seq.max_length], sampled)

    patch.setattr(Engine, "_device_decides", may)
    patch.setattr(LaunchedRound, "loses_logprobs", False)


def shared_pages_that_are_written(patch: pytest.MonkeyPatch) -> None:
    def own(self: PagedKV, extent: Any, index: int) -> None:
        self._find_room(extent.id, 1)
        self.pool.replace(extent.id, index)  # and nothing is copied

    patch.setattr(PagedKV, "_own", own)


def pages_found_by_one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    real = PagePool._longest

    def longest(self: PagePool, before: bytes, tokens: Sequence[int], layers: frozenset[int]) -> tuple[int, int]:
        page, part = real(self, before, tokens, layers)
        return page, min(part + 1, len(tokens)) if part else part

    patch.setattr(PagePool, "_longest", longest)


def positions_of_an_unread_round(patch: pytest.MonkeyPatch) -> None:
    """Trees are placed as if nothing had been accepted of the round before them."""
    real = GrownBuffers.fill

    def fill(self: GrownBuffers, ints: Any, size: Any, form: Any) -> None:
        kept = self.last.accepted.clone()
        self.last.accepted.zero_()
        real(self, ints, size, form)
        self.last.accepted.copy_(kept)

    patch.setattr(GrownBuffers, "fill", fill)


def drafters_that_are_built_meanwhile(patch: pytest.MonkeyPatch) -> None:
    """Their graphs are captured in the buffers of a round that is under way."""
    patch.setattr(DrafterPool, "has", lambda self, name: True)


DAMAGES: tuple[Damage, ...] = (
    prompts_beside_trees_without_limit, captures_that_run_twice, paths_that_are_not_moved,
    rounds_that_are_not_rolled_back, only_those_who_go_on_are_asked, shared_pages_that_are_written,
    pages_found_by_one_token_too_many, positions_of_an_unread_round,
    drafters_that_are_built_meanwhile,
)  # fmt: skip
