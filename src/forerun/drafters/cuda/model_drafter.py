"""DeviceModelDrafter: a draft model on the GPU; its chains are drafted on the device, without the host in between."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from forerun.drafters.cuda.chain_menu import forms_for
from forerun.drafters.cuda.chain_plan import BUCKETS, MOST
from forerun.drafters.cuda.model_draft import ModelDraft
from forerun.drafters.cuda.model_views import NEEDS
from forerun.drafters.eagle.cuda.capture import contexts_of
from forerun.drafters.eagle.cuda.drafter import DeviceDrafter
from forerun.errors import ForerunError
from forerun.models.base import Target
from forerun.models.cuda.plan import round_up
from forerun.models.cuda.target import CudaDecoder
from forerun.types import Seq, TreeForm
from forerun.verify.warp import adjusts

if TYPE_CHECKING:
    from forerun.drafters.base import Drafter

log = logging.getLogger(__name__)
progress = logging.getLogger("forerun.progress")


class DeviceModelDrafter(DeviceDrafter[ModelDraft]):
    """Implements forerun.drafters.base.Drafter over a draft model on the device.

    It drafts its likeliest tokens, or, where the verifier couples by noise, those that the same noise draws. Sequences
    with penalties, bans or processors are drafted for by the host, which applies these to the draft model's law too.
    """

    def _grows(self, seq: Seq) -> bool:
        return not adjusts(seq)


def on_device(
    target: Target, draft: Target, make_plain: Callable[[], Drafter], max_batch: int, max_length: int
) -> DeviceModelDrafter | None:
    """A drafter on the device, where both models run there in our own decoder; its graphs are captured here."""
    if not (isinstance(target, CudaDecoder) and isinstance(draft, CudaDecoder)):
        return None
    if target.device != draft.device:
        return None
    try:
        model = ModelDraft(draft, target.vocab_size, target.grown.last)
        capture_chains(model, target, max_batch, max_length)
    except ForerunError:
        raise
    except Exception as error:  # no memory, no working Triton: neither stops generation
        log.warning("no drafts on the device, so the host drafts: %s: %s", type(error).__name__, error)
        return None
    return DeviceModelDrafter(model, make_plain)


def capture_chains(draft: ModelDraft, target: CudaDecoder, max_batch: int, max_length: int) -> float:
    """Capture all passes of both models that drafts take, and time them; seconds that it took, 0 = nothing to do.

    With each chain goes the target's pass over it, in contexts of every length that graphs are captured for.
    """
    if not draft.graphs.replays.capture:
        return 0.0
    started, reaches = perf_counter(), contexts_of(min(max_length, draft.model.max_length))
    buckets = [bucket for bucket in BUCKETS if bucket <= round_up(min(max_batch, MOST), BUCKETS)]
    draft.model.passes.warm_up((), min(max_length, draft.model.max_length), prompts_only=True)
    for i, bucket in enumerate(buckets):
        progress.info("capturing drafts of the draft model: %d of %d batch sizes", i + 1, len(buckets))
        for farthest in reaches:
            draft.graphs.rehearse(bucket, farthest)
            for form in forms_for(bucket):
                target.rehearse(TreeForm(bucket, form.nodes + 1, form.depth, chain=True), NEEDS, farthest)
        for form in forms_for(bucket):
            draft.graphs.rehearse_trees(bucket, form.depth)
            draft.note_captured(bucket, form)
        draft.menu.note(bucket, *draft.graphs.time(bucket))
    draft.complete_to = buckets[-1]
    spent = perf_counter() - started
    log.info("captured the draft model's passes for %d batch sizes in %.1f s", len(buckets), spent)
    return spent
