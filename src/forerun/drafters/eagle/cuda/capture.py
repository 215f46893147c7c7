"""Captures all graphs of drafts before texts are written: every form of the menu, for every batch size up to a largest.

With each draft go the target's pass over its trees, the commit of the path and the copy of its hidden rows. A graph
holds for contexts up to a length, so there are two of each where contexts may be long. Nothing is captured while texts
are written, unless a budget asks for a form that is not on the menu.
"""

from __future__ import annotations

import logging
from time import perf_counter

from forerun.drafters.eagle.cuda.draft_graphs import DeviceDraft
from forerun.drafters.eagle.cuda.draft_plan import BUCKETS, MOST, bucket_of
from forerun.drafters.eagle.cuda.feature_rows import DEEPEST
from forerun.drafters.eagle.cuda.menu import forms_for
from forerun.models.cuda.plan import SPLIT_SIZES, split_start, splits_to
from forerun.models.cuda.target import CudaDecoder
from forerun.offers import Form
from forerun.types import Needs

log = logging.getLogger(__name__)
progress = logging.getLogger("forerun.progress")  # what the command line shows while a model is loaded


def capture_menu(
    draft: DeviceDraft, target: CudaDecoder, needs: Needs, max_batch: int, max_length: int
) -> float:
    """Seconds that it took; 0 where nothing is captured. Progress is logged."""
    if not draft.replays.capture:
        return 0.0
    started, jobs = perf_counter(), jobs_of(max_batch, max_length)
    target.passes.compile(min(max_length, target.max_length))  # passes over trees share most of these kernels
    draft.rows.rehearse_reading()
    for i, (bucket, form, farthest) in enumerate(jobs):
        progress.info("capturing drafts for batches of %d: %d of %d", bucket, i + 1, len(jobs))
        trees = draft.rehearse(form, bucket, farthest)
        draft.rows.rehearse(target.rehearse(trees, needs, farthest), trees)
    draft.complete_to = jobs[-1][0]
    spent = perf_counter() - started
    log.info("captured %d drafts and the passes over their trees in %.1f s", len(jobs), spent)
    return spent


def jobs_of(max_batch: int, max_length: int) -> list[tuple[int, Form, int]]:
    """What is captured: batch sizes, forms, and the contexts that they hold for, the shortest last.

    The time of a draft is noted each time it is captured, so the last one, in a short context, counts.
    """
    reaches = contexts_of(max_length)[::-1]
    buckets = [bucket for bucket in BUCKETS if bucket <= bucket_of(min(max_batch, MOST))]
    return [(bucket, form, reach) for bucket in buckets for form in forms_for(bucket) for reach in reaches]


def contexts_of(max_length: int) -> list[int]:
    """One length for each number of splits that a pass may have."""
    found: dict[int, int] = {}
    for splits in SPLIT_SIZES:
        length = min(max_length + DEEPEST, split_start(splits) - 2 * DEEPEST)
        found.setdefault(splits_to(length), length)
    return list(found.values())
