"""Launches the kernels of attention, and holds the memory in which programs leave parts for others to add up."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from forerun.models.config import DecoderConfig
from forerun.models.cuda.kernels import attention as kernels_attention
from forerun.models.cuda.kernels import few as kernels_few
from forerun.models.cuda.kernels import kv_bytes
from forerun.models.cuda.kernels import tiled as kernels_tiled
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import FIELDS, MAX_ROWS, PAGES, split_of
from forerun.models.cuda.steps.tiles import Sharing, power_of_two, sharing_for, tiled_sharing
from forerun.models.pages import PAGE

SPREADING = 64  # programs to a group and head that write keys and values of 8 bits as numbers of 16
COMBINING = 1024  # programs that look for parts to add up, at most
PROMPT_STAGES = {64: 6, 128: 4}  # pages that are on their way at once, by the width of heads
_FORMATS = {torch.int8: kv_bytes.INT8.value, torch.float8_e4m3fn: kv_bytes.E4M3.value}


def stores_of(kv: Tensor, scales: Tensor | None) -> tuple[Any, Any, int]:
    """What kernels are given of the keys and the values [2, Hkv, S, D] of a layer, and their FORMAT.

    `scales` [2, Hkv, S]: of numbers of 8 bits.
    """
    if scales is None:
        return kv[0], kv[1], kv_bytes.PLAIN.value
    numbers = kv.view(torch.int8)
    return (numbers[0], scales[0]), (numbers[1], scales[1]), _FORMATS[kv.dtype]


class Attention:
    """The attention of one model on its device."""

    def __init__(self, config: DecoderConfig, max_length: int, device: torch.device, room: int, pdl: bool) -> None:
        self.config, self.room, self.pdl = config, room, pdl
        self.processors, self.hopper = 1, False
        if device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
            self.hopper = torch.cuda.get_device_capability(device)[0] == 9
        self.split_stride = MAX_ROWS * config.heads
        rows = self.split_stride * (split_of(max_length + MAX_ROWS) + 1)
        widest = max(config.kv_sizes(layer)[1] for layer in range(config.layers))
        self.parts = torch.empty(rows * widest, device=device)
        self.tops, self.sums = (torch.empty(rows, device=device) for _ in range(2))
        self.numbers = self.parts.view(torch.float16)  # keys and values of 8 bits, as a pass reads them: see _spread
        self._described = dict[int, tuple[Any, Any]]()  # keys and values of layers, for the copy engine
        self.in_order = torch.arange(PAGES, dtype=torch.int32, device=device)

    def attend(
        self,
        run: Run,
        queries: Tensor,
        kv: Tensor,
        out: Tensor,
        window: int,
        sinks: Tensor | None = None,
        how: Sharing | None = None,
        scales: Tensor | None = None,
    ) -> None:
        """What all rows find in the keys and values [2, Hkv, S, D] of a layer, whose heads may have sinks [H].

        `scales` [2, Hkv, S]: of keys and values of 8 bits, which queries in float16 ask.
        """
        config, size = self.config, run.size
        if size.tiled:
            self._attend_tiled(run, queries, kv, out, window, sinks, how, scales)
            return
        cap, kv_heads, dim = config.attention_softcap or 0.0, kv.shape[1], kv.shape[3]
        scale = config.attention_scale / (cap or math.log(2))  # scores are exponents of 2
        each = power_of_two(config.heads // kv_heads)
        how = how or sharing_for(size, each, kv_heads, dim, self.processors, self.hopper)
        settings: dict[str, Any] = {"enable_fp_fusion": False, "launch_pdl": self.pdl}
        limit = {} if how.registers is None else {"maxnreg": how.registers}
        grid, each_tree = (size.attending(how.programs), kv_heads, 1), size.groups // size.trees
        if how.walked:  # one group after another, whichever tree they are of
            assert not size.lone, "no program has all splits of a tree's single nodes"
            grid, each_tree = (size.groups, kv_heads, how.programs), size.groups
        keys, values, kept_as = stores_of(kv, scales)
        kernels_attention.attend[grid](
            queries, keys, values, run.ints, run.groups, run.positions, out, self.parts, self.tops, self.sums,
            self.tops if sinks is None else sinks, scale, kv.stride(1), self.split_stride, each_tree, size.lone,
            how.programs, how.walked, H=config.heads, HKV=kv_heads, EACH=each, D=dim, SIDE=kv.stride(2) // dim,
            WINDOW=window, CAP=cap / math.log(2), SINKS=sinks is not None, TREES=size.lone > 0, WALKS=how.walked > 0,
            NARROW=how.narrow, STAGES=how.stages, ROOM=self.room, PDL=self.pdl, FORMAT=kept_as, num_warps=how.warps,
            num_stages=how.stages, **limit, **settings,
        )  # fmt: skip
        self._combine(run, dim, out, window, sinks, how.walked > 0, 4 if size.splits <= 8 else 8, settings)

    def _attend_tiled(
        self,
        run: Run,
        queries: Tensor,
        kv: Tensor,
        out: Tensor,
        window: int,
        sinks: Tensor | None,
        how: Sharing | None,
        scales: Tensor | None,
    ) -> None:
        """The same in a tiled pass, behind long contexts."""
        config, size, cap = self.config, run.size, self.config.attention_softcap or 0.0
        scale = config.attention_scale / (cap or math.log(2))
        each = power_of_two(config.heads // config.kv_heads)
        shapes = each, config.kv_heads, config.head_dim
        how = how or tiled_sharing(size, *shapes, self.processors, self.hopper, scales is not None)
        settings: dict[str, Any] = {"enable_fp_fusion": False, "launch_pdl": self.pdl}
        if how.copied and not window and not cap and sinks is None:
            self._attend_prompts(run, queries, kv, out, scale, each, settings)
            return
        limit = {} if how.registers is None else {"maxnreg": how.registers}
        keys, values, kept_as = stores_of(kv, scales)
        shape: dict[str, Any] = {
            "H": config.heads, "HKV": config.kv_heads, "EACH": each, "D": config.head_dim, "WINDOW": window,
            "CAP": cap / math.log(2), "SINKS": sinks is not None, "ROOM": self.room, "PDL": self.pdl,
            "FORMAT": kept_as,
        }  # fmt: skip
        own = self.tops if sinks is None else sinks
        if how.warps == 1:
            kernels_few.attend_few[size.shared, config.kv_heads, how.programs](
                queries, keys, values, run.ints, run.groups, run.positions, self.parts, self.tops, self.sums, scale,
                kv.stride(1), self.split_stride, how.programs, H=config.heads, HKV=config.kv_heads, EACH=each,
                D=config.head_dim, WINDOW=window, CAP=cap / math.log(2), SIZE=how.rows,
                PDL=self.pdl, FORMAT=kept_as, num_warps=1, num_stages=1, **settings,
            )  # fmt: skip
        else:
            first_page, most, spread = 0, 0, scales is not None and how.spread
            if spread:
                first_page, most = self._spread(run, keys, values, kv, kept_as, each, window, settings)
            kernels_tiled.attend[size.shared, config.kv_heads, how.programs](
                queries, keys, values, run.ints, run.groups, run.positions, out, self.parts, self.tops, self.sums, own,
                scale, kv.stride(1), self.split_stride, how.programs, how.walked, self.numbers, self.in_order,
                first_page, most, SIZE=how.rows, WALKS=how.walked > 0, NARROW=how.narrow, STAGES=how.stages,
                SPREAD=spread, num_warps=how.warps, num_stages=how.stages, **shape, **limit, **settings,
            )  # fmt: skip
        if not size.lone:
            self._combine(run, config.head_dim, out, window, sinks, how.walked > 0, 16, settings)
            return
        kernels_tiled.combine_trees[size.rows, config.kv_heads](
            out, queries, keys, values, run.ints, run.groups[size.shared :], run.positions, self.parts, self.tops,
            self.sums, own, scale, kv.stride(1), self.split_stride, STEP=8, SKIPS=how.walked > 0,
            num_warps=4 if config.head_dim <= 128 else 8, **shape, **settings,
        )  # fmt: skip

    def _attend_prompts(
        self, run: Run, queries: Tensor, kv: Tensor, out: Tensor, scale: float, each: int, settings: dict[str, Any]
    ) -> None:
        """Where there are no trees that branch, and each group has a program: nothing is left to add up."""
        from forerun.models.cuda.kernels.hopper import prompts

        heads, dim = kv.shape[1], kv.shape[3]
        described = self._described.get(kv.data_ptr())
        if described is None:
            described = self._described[kv.data_ptr()] = prompts.describe(kv[0]), prompts.describe(kv[1])
        prompts.attend[run.size.shared, heads](
            queries, *described, run.ints, run.groups, run.positions, out, scale, kv.stride(1) // dim,
            H=self.config.heads, HKV=heads, EACH=each, D=dim, STAGES=PROMPT_STAGES[dim], ROOM=self.room, num_warps=4,
            **settings,
        )  # fmt: skip

    def _spread(
        self, run: Run, keys: Any, values: Any, kv: Tensor, kept_as: int, each: int, window: int,
        settings: dict[str, Any],
    ) -> tuple[int, int]:  # fmt: skip
        """Write what large groups see as numbers of 16 bits. Where its pages start among `run.ints`, and how many fit.

        They lie where programs leave parts: where a program has all splits of a group, none leaves any.
        """
        size, heads, dim = run.size, kv.shape[1], kv.shape[3]
        first_page = MAX_ROWS + 3 * size.rows + FIELDS * size.groups
        most = min(self.numbers.numel() // (2 * heads * PAGE * dim), len(self.in_order))
        kernels_tiled.spread[size.shared, heads, SPREADING](
            keys, values, run.ints, run.groups, run.positions, self.numbers, kv.stride(1), first_page, most,
            EACH=each, D=dim, WINDOW=window, PDL=self.pdl, FORMAT=kept_as, num_warps=4, **settings,
        )  # fmt: skip
        return first_page, most

    def _combine(
        self,
        run: Run,
        dim: int,
        out: Tensor,
        window: int,
        sinks: Tensor | None,
        skips: bool,
        step: int,
        settings: dict[str, Any],
    ) -> None:
        """Add up what programs left, `step` splits at a time.

        By few programs where most rows may have nothing left to add up.
        """
        config, rows = self.config, run.size.rows
        heads = math.gcd(config.heads, 4)
        programs = min(rows, max(1, COMBINING * heads // config.heads)) if skips else rows
        kernels_attention.combine[programs, config.heads // heads](
            out, run.positions, self.parts, self.tops, self.sums,
            self.tops if sinks is None else sinks, self.split_stride, rows, H=config.heads, D=dim,
            HEADS=heads, WINDOW=window, SINKS=sinks is not None, STEP=step, SKIPS=skips,
            MOST=power_of_two(-(-rows // programs)), ROOM=self.room, PDL=self.pdl, num_warps=heads, **settings,
        )  # fmt: skip
