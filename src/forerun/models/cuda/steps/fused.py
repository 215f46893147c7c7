"""The steps of a pass as Triton kernels: five launches per layer, and one before and one after all layers.

Into how many splits a product's depth is cut is decided here, from the weight's shape alone and never from the number
of rows: that is half of why a row's bits do not depend on its neighbours (the other half is in the kernels). More than
64 rows are multiplied by other kernels where the GPU has them (wide.py), in the same order of sums.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from forerun.models.cuda.adapters import PARTS, RANKS, Adapted, AdapterStacks, Shape, depth_of, splits_of
from forerun.models.cuda.compile.together import starts_early
from forerun.models.cuda.kernels import adapters as kernels
from forerun.models.cuda.kernels import linear as kernels_linear
from forerun.models.cuda.kernels import rows as kernels_rows
from forerun.models.cuda.network import Buffers, Model, Run, shaped, store_of, turned, written_sizes
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.cuda.steps.attention import Attention
from forerun.models.cuda.steps.finish import After, HandedOn, InBytes, Sums, finish_qkv, finish_residual, or_unused
from forerun.models.cuda.steps.tiles import (
    ALL_SHARED,
    Tile,
    choose_tile,
    outputs_per_tile,
    power_of_two,
    rows_per_tile,
    stages_of,
)
from forerun.models.cuda.weights import Strips, Weight
from forerun.models.pages import PAGE

if TYPE_CHECKING:
    from forerun.models.cuda.steps.wide import WideProducts


LARGEST_HEAD = 128  # whose norm may end its product: a program has all of a head
NORM_COLUMNS = 32  # at least: a sum over fewer would be laid out differently for few rows and for many
QKV, GATED, RESIDUAL, LOGITS = range(4)  # as in kernels_linear
BESIDE = 150 << 10  # bytes of shared memory of such a program where adapters' programs run beside it


class Product(NamedTuple):
    """Rows times a weight, and the steps that are fused into it."""

    name: str
    mode: int
    rows: Tensor
    weight: Weight
    out: Tensor
    norm: Tensor | None = None
    layer: int = 0
    normed: bool = False  # the rows come with their norm applied, and not as x times its weight
    change: Change | None = None  # what adapters add
    after: Tensor | None = None  # the norm of what is added to the residual stream
    heads: int | None = None  # of queries, where the weight has others than the model


class FusedSteps:
    """Implements forerun.models.cuda.network.Steps."""

    def __init__(self, model: Model, buffers: Buffers, kv: Tensor, scales: Tensor | None = None) -> None:
        self.model, self.buffers, self.kv = model, buffers, kv  # kv [L, 2, Hkv, S, D]
        self.scales = scales  # [L, 2, Hkv, S] of keys and values of 8 bits
        config, device = model.config, model.device
        tile = outputs_per_tile(model)
        last, self.width = model.attending, config.width
        heads, inner, self.qkv_outputs = last.o.shape[1], config.inner_of(len(model.layers) - 1), last.qkv.shape[0]
        # products whose rows are finished whole: norms behind them need all of a row, and so may norms of large heads
        after = model.layers[-1].after_attention_norm is not None
        self.apart = frozenset(("o", "down") if after else ())
        by_row = after or config.head_dim > LARGEST_HEAD
        if config.qk_norm == "all" or (by_row and config.qk_norm) or config.latent is not None or scales is not None:
            self.apart |= {"qkv"}
        self.bare = config.norms.before_attention is None  # rows enter attention and feed-forward layers as they are
        by_head = config.head_dim if config.qk_norm and "qkv" not in self.apart else tile
        wide = 64 if config.vocab_size >= 1 << 14 else tile
        self.whole = model.whole
        self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=model.dtype))
        self.room = MAX_ROWS if self.whole else 0  # rows from a byte to the other byte of the same number
        self.tiles = {
            "qkv": choose_tile(self.qkv_outputs, last.qkv.shape[1], by_head, self.whole),
            "o": choose_tile(self.width, heads, tile, self.whole),
            "gate": choose_tile(2 * inner, self.width, tile, self.whole),
            "down": choose_tile(self.width, inner, tile, self.whole),
            "head": choose_tile(config.vocab_size, self.width, wide, self.whole),
        }
        first = model.layers[0].qkv.shape[1]
        if first != model.layers[-1].qkv.shape[1]:  # a head's first layer reads wider rows than the others
            self.tiles["entering"] = choose_tile(self.qkv_outputs, first, by_head, self.whole)
        if model.entry is not None:
            self.tiles["entry"] = choose_tile(self.width, model.entry.shape[1], tile, self.whole)
        self.others = self._other_weights()
        self.tiles |= {
            name: choose_tile(weight.shape[0], weight.shape[1], tile) for name, weight in self.others.items()
        }
        self.apart |= {name for name in self.others if " " not in name}
        self.norm_tile = tile
        self.pdl = starts_early(device)
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        large = torch.cuda.get_device_capability(device)[0] in (9, 10)
        # shared memory of a program that has a multiprocessor for itself
        self.alone = ALL_SHARED if large else 0
        self.norm_tiles = self.width // tile
        self.norm_columns = max(NORM_COLUMNS, power_of_two(self.norm_tiles))
        self.squares = torch.zeros(MAX_ROWS, self.norm_columns, dtype=torch.float64, device=device)
        self.lifts = torch.ones(MAX_ROWS, device=device)
        self._described: dict[tuple[int, ...], Any] = {}
        self.attention = self._make_attention(model)
        most = max(self._partials(name) for name in self.tiles)
        self.partial = torch.empty(max(1, most), device=device)
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)
        self.inverses = torch.empty(MAX_ROWS, device=device)  # factors of the next norm, for wide products
        self.norms = HandedOn(self.inverses, self.squares, pdl=self.pdl)
        # as products of few rows hand them on, unless those that add to the residual stream finish whole rows
        self.norms_by_tile = self.norms if "down" in self.apart else replace(self.norms, pieces=self.norm_columns)
        most = max(self.qkv_outputs, self.width, *(weight.shape[0] for weight in self.others.values()))
        self.sums = torch.empty(MAX_ROWS * most if self.apart else 1, device=device)
        self.gelu = config.activation == "gelu_tanh"
        self.wide = self._wide_products()

    def _make_attention(self, model: Model) -> Attention:
        return Attention(model.config, model.max_length, model.device, self.room, self.pdl)

    def _other_weights(self) -> dict[str, Weight]:
        """Weights of other shapes than the last layer's, and of other products."""
        return {}

    def _wide_products(self) -> WideProducts | None:
        """None where this GPU, or this model, has only the kernels for few rows."""
        hopper = torch.cuda.get_device_capability(self.model.device)[0] == 9
        if not hopper or self.whole or importlib.util.find_spec("triton.experimental.gluon") is None:
            return None
        from forerun.models.cuda.steps.wide import WideProducts, fits

        layer, last = self.model.layers[-1], self.model.attending
        weights = {"qkv": last.qkv, "o": last.o, "gate": layer.gate_up, "down": layer.down}
        weights |= {"head": self.model.head, "entering": self.model.layers[0].qkv}
        if self.model.entry is not None:
            weights["entry"] = self.model.entry
        weights = {name: weights[name] for name in self.tiles if name not in self.others} | self.others
        if not fits(weights, self.tiles):
            return None
        return WideProducts(self.tiles, weights, self.inverses, self.gelu)

    def _partials(self, name: str) -> int:
        """Numbers that the splits of one product leave for the last of them."""
        config, tile = self.model.config, self.tiles[name]
        sizes = dict.fromkeys(("qkv", "entering"), self.qkv_outputs)
        sizes |= {"gate": 2 * config.inner_of(config.layers - 1), "head": config.vocab_size}
        sizes |= {other: weight.shape[0] for other, weight in self.others.items()}
        tiles = -(-sizes.get(name, self.width) // tile.outputs)
        return tiles * tile.outputs * MAX_ROWS * tile.splits if tile.splits > 1 else 0

    def embed(self, run: Run) -> None:
        self._embed(run, self.model.layers[0].attention_norm)

    def _embed(self, run: Run, norm: Tensor) -> None:
        if (turns := self.buffers.page_turns) is not None:
            kernels_rows.turn[(run.size.rows,)](run.positions, run.slots, turns, self.buffers.turned, PAGE, num_warps=1)
        kernels_rows.embed[(run.size.rows,)](
            run.tokens, self.model.embedding, self.buffers.x, self.buffers.rows, self.squares, self.inverses,
            norm, self.model.config.norm_eps, self.embedding_scale, WIDTH=self.width,
            UP=power_of_two(self.width), BN=self.norm_tile, TILES_UP=self.norm_columns,
            SCALED=self.embedding_scale != 1.0, PDL=self.pdl, num_warps=8, enable_fp_fusion=False,
            launch_pdl=self.pdl,
        )  # fmt: skip

    def qkv(self, run: Run, layer: int) -> None:
        weights = self.model.layers[layer]
        change = self._change(run, layer, "qkv", self.buffers.rows)
        given, out = self.buffers.rows, self.buffers.queries
        self._linear(run, Product("qkv", QKV, given, weights.qkv, out, layer=layer, normed=self.bare, change=change))

    def leave_attention(self, run: Run, layer: int) -> None:
        weights = self.model.layers[layer]
        found, rows = shaped(self.buffers.found, weights.o.shape[1]), self.buffers.rows
        change = self._change(run, layer, "o", found)
        after = weights.after_attention_norm
        self._linear(
            run, Product("o", RESIDUAL, found, weights.o, rows, norm=weights.mlp_norm, change=change, after=after)
        )

    def gate(self, run: Run, layer: int) -> None:
        weights = self.model.layers[layer]
        change = self._change(run, layer, "gate", self.buffers.rows)
        given, out = self.buffers.rows, shaped(self.buffers.inner, weights.down.shape[1])
        self._linear(run, Product("gate", GATED, given, weights.gate_up, out, normed=self.bare, change=change))

    def leave_mlp(self, run: Run, layer: int) -> None:
        weights, norm = self.model.layers[layer], self.model.next_norm(layer)
        inner = shaped(self.buffers.inner, weights.down.shape[1])
        change = self._change(run, layer, "down", inner)
        rows, after = self.buffers.rows, weights.after_mlp_norm
        self._linear(run, Product("down", RESIDUAL, inner, weights.down, rows, norm=norm, change=change, after=after))

    def normalise(self, run: Run, into: Tensor) -> None:
        config = self.model.config
        kernels_rows.normalise[(run.size.rows,)](
            self.buffers.x, self.model.final_norm, into, config.norm_eps, WIDTH=self.width,
            UP=power_of_two(self.width), PDL=self.pdl, num_warps=8, launch_pdl=self.pdl,
        )  # fmt: skip

    def head(self, run: Run) -> None:
        self._linear(run, Product("head", LOGITS, self.buffers.rows, self.model.head, self.buffers.logits))
        self._finish_logits(run)

    def head_of_normed(self, run: Run) -> None:
        self._linear(run, Product("head", LOGITS, self.buffers.rows, self.model.head, self.buffers.logits, normed=True))
        self._finish_logits(run)

    def _finish_logits(self, run: Run) -> None:
        config = self.model.config
        cap, scale, vocab = config.logit_softcap, config.logit_scale, config.vocab_size
        if cap is not None or scale != 1.0:
            kernels_rows.finish_logits[(run.size.rows, -(-vocab // 4096))](
                self.buffers.logits, scale, cap or 1.0, VOCAB=vocab, COLUMNS=4096, CAPPED=cap is not None,
                PDL=self.pdl, num_warps=8, enable_fp_fusion=False, launch_pdl=self.pdl,
            )  # fmt: skip

    def on(self, model: Model) -> FusedSteps:
        steps = copy.copy(self)
        steps.model = model
        return steps

    def active_experts(self) -> list[int]:
        return []

    def _linear(self, run: Run, product: Product) -> None:
        """One product with the steps fused into it; pointers that a mode does not use are placeholders."""
        if self.wide is not None and self.wide.takes(run.size.rows):
            self._wide_linear(self.wide, run, product)
            return
        if product.name not in self.apart:
            self._narrow_linear(run, product)
            return
        self._narrow_linear(run, product._replace(out=self.sums))
        sums = Sums(self.sums, 1, run.size.rows)
        if product.mode == RESIDUAL:
            assert product.norm is not None
            self._finish_residual(sums, run.size.rows, product.out, product.norm, after=product.after)
        else:
            self._finish_qkv(sums, run, product.layer, product.out, product.normed, norms=self.norms_by_tile)

    def _narrow_linear(self, run: Run, product: Product) -> None:
        """By the kernel for few rows."""
        name, mode, rows, weight, out, norm, layer, normed, change, _, heads = product
        config, place = self.model.config, self.model.layers[layer]
        heads = config.heads if heads is None else heads
        head_norm = None if place.qk_norm is None else place.qk_norm[config.heads - heads :]
        outputs, depth = weight.shape
        wide = rows_per_tile(run.size.rows, self.whole)
        tile, kv = self._tile(self._named(name, weight), wide), store_of(self.kv, config, layer)
        unused = self.squares
        grid = -(-run.size.rows // wide), -(-outputs // tile.outputs), tile.splits
        assert not isinstance(weight, Strips), "products compiled ahead are those of compiled.py"
        data, scales = (weight, unused) if isinstance(weight, Tensor) else (weight.data, weight.scales)
        stage = tile.depth * (data.element_size() * tile.outputs + 2 * wide)  # bytes
        # as many bytes in flight
        deep = tile.stages if self.whole else tile.stages * 2 // data.element_size()
        alone = self.alone if math.prod(grid) <= self.processors else 0
        if change is not None:
            alone = min(alone, BESIDE)
        stages = stages_of(tile, depth, stage, alone, deep)
        left: Any = data
        right: Any = rows
        # fewer rows are fetched as fast without it
        tma = self.pdl and tile.outputs >= 64 and wide >= 64 and not self.whole
        if tma:
            left = self._describe(data, tile.outputs, tile.depth)
            right = self._describe(rows, wide, tile.depth)
        settings: dict[str, Any] = {"num_warps": tile.warps, "num_stages": stages, "launch_pdl": self.pdl}
        kernels_linear.linear[grid](
            right, data, left, scales, out, self.buffers.x, self.squares, self.lifts, or_unused(norm, unused),
            kv[0], kv[-1], or_unused(place.qkv_bias, unused), or_unused(head_norm, unused),
            or_unused(place.rope, unused), turned(self.buffers, run), run.slots, self.partial, self.counters,
            *(NO_CHANGE * [unused] if change is None else change.given),
            run.size.rows, config.norm_eps, kv.stride(1),
            N=outputs, K=depth, MODE=mode, BN=tile.outputs, BK=tile.depth, SPLIT=tile.splits, MT=wide,
            TILES=self.norm_tiles, TILES_UP=self.norm_columns, H=heads, HKV=config.kv_heads,
            D=config.head_dim, ROT=0 if place.rope is None else place.rope.shape[1],
            BIAS=place.qkv_bias is not None, HEAD_NORM=place.qk_norm is not None, ROPE=place.rope is not None,
            TMA=tma, PDL=self.pdl, W8=data is not weight, NORMED=normed, ROOM=self.room,
            RANK=0 if change is None else change.rank, ADAPTED_ROOM=MAX_ROWS, GELU=self.gelu, SUMS=name in self.apart,
            SHARE=config.residual_scale, enable_fp_fusion=False, **settings,
        )  # fmt: skip

    def _wide_linear(self, wide: WideProducts, run: Run, product: Product) -> None:
        """The same by the kernels for many rows."""
        name, mode, rows, weight, out, norm, layer, normed, change, after, _ = product
        assert isinstance(weight, Tensor)
        count, delta = run.size.rows, None if change is None else change.delta()
        if mode == GATED:
            wide.gated(self._named(name, weight), count, rows, weight, out, delta, normed)
        elif mode == LOGITS:
            wide.logits(count, rows, weight, out, normed)
        elif mode == RESIDUAL:
            assert norm is not None
            sums = wide.sums(self._named(name, weight), count, rows, weight)
            self._finish_residual(sums, count, out, norm, delta=delta, after=after)
        else:
            sums = wide.sums(self._named(name, weight), count, rows, weight)
            self._finish_qkv(sums, run, layer, out, normed, delta)

    def _sums_of(self, run: Run, name: str, rows: Tensor, weight: Weight) -> Sums:
        """A product whose sums are finished by other kernels."""
        if self.wide is not None and self.wide.takes(run.size.rows):
            assert isinstance(weight, Tensor)
            return self.wide.sums(self._named(name, weight), run.size.rows, rows, weight)
        self._narrow_linear(run, Product(name, RESIDUAL, rows, weight, self.sums, normed=True))
        return Sums(self.sums, 1, run.size.rows)

    def _finish_residual(
        self,
        sums: Sums,
        count: int,
        out: Tensor,
        norm: Tensor,
        in_bytes: InBytes | None = None,
        delta: Tensor | None = None,
        after: Tensor | None = None,
        times: float = 1.0,
    ) -> None:
        config, own = self.model.config, None if after is None else After(after, self.norm_tile)
        share, x = config.residual_scale, self.buffers.x
        finish_residual(sums, self.norms, count, x, out, norm, config.norm_eps, in_bytes, delta, own, share, times)

    def _finish_qkv(
        self,
        sums: Sums,
        run: Run,
        layer: int,
        out: Tensor,
        normed: bool,
        delta: Tensor | None = None,
        norms: HandedOn | None = None,
    ) -> None:
        config, place, scales = self.model.config, self.model.layers[layer], self._scales_of(layer)
        sizes, kv = written_sizes(config, layer), store_of(self.kv, config, layer)
        turns = turned(self.buffers, run)
        finish_qkv(sums, norms or self.norms, run, turns, config, place, sizes, kv, out, normed, delta, scales)

    def _scales_of(self, layer: int) -> Tensor | None:
        return None if self.scales is None else self.scales[layer]

    def _change(self, run: Run, layer: int, product: str, rows: Tensor) -> Change | None:
        """What adapters add to a product of these rows; None where no row has one."""
        if run.adapted is None:
            return None
        return Change(self.buffers.adapters, run.adapted, layer, product, rows, self.pdl)

    def _tile(self, name: str, wide: int) -> Tile:
        """64 rows are worth larger tiles, of products that have many.

        Their steps are half as deep, so that more of them are on their way at once.
        """
        tile = self.tiles[name]
        if wide < 64 or tile.outputs < 64 or self.whole or tile.depth % 64:
            return tile
        doubled = tile.outputs == 64 and name.startswith(("gate", "head"))
        return Tile(128 if doubled else tile.outputs, 64, tile.splits, 6, tile.warps)

    def _named(self, product: str, weight: Weight) -> str:
        """The name of a product in `tiles`, which says its shape where layers differ."""
        name = sized_name(product, weight)
        return name if name in self.others else product

    def _describe(self, tensor: Tensor, rows: int, columns: int) -> Any:
        """What the copy engine needs to know of a matrix to fetch tiles of it."""
        key = tensor.data_ptr(), tensor.stride(0), rows, columns
        if key not in self._described:
            self._described[key] = kernels_linear.describe(tensor, rows, columns)
        return self._described[key]

    def attend(self, run: Run, layer: int) -> None:
        place, found = self.model.layers[layer], self.buffers.found
        queries, kv, scales = self.buffers.queries, store_of(self.kv, self.model.config, layer), self._scales_of(layer)
        self.attention.attend(run, queries, kv, found, place.window, place.sinks, scales=scales)


def sized_name(product: str, weight: Weight) -> str:
    return f"{product} {weight.shape[0]}x{weight.shape[1]}"


OUTPUTS = 128  # of a tile of what is added before a wide product
ENOUGH = 1024  # programs that multiply the second matrices before a wide product: about eight to a multiprocessor
NO_CHANGE = 7  # tensors that `given` has


class Change:
    """What adapters add to one product: the first matrices are multiplied where this is made."""

    def __init__(
        self, stacks: AdapterStacks, adapted: Adapted, layer: int, product: str, rows: Tensor, pdl: bool
    ) -> None:
        self.stacks, self.adapted, self.pdl = stacks, adapted, pdl
        self.stack, self.shape, self.rank = stacks.layers[layer][product], stacks.shapes[product], stacks.rank
        shape, stack, splits = self.shape, self.stack, splits_of(self.shape.inputs)
        self.which = [*PARTS].index(product)
        kernels.down[(adapted.units, shape.parts * self.rank // RANKS, splits)](
            adapted.table, stack.ranks, stacks.scales, rows, stack.down, stacks.middle, stacks.partial,
            stacks.counters, stacks.begun, WHICH=self.which, K=shape.inputs, PARTS=shape.parts, RANK=self.rank,
            BK=depth_of(shape.inputs), SPLIT=splits, ROOM=MAX_ROWS, PDL=pdl, num_warps=4, num_stages=2,
            enable_fp_fusion=False, launch_pdl=pdl,
        )  # fmt: skip

    @property
    def given(self) -> tuple[Tensor, ...]:
        """What a product reads that multiplies the second matrices itself."""
        adapted, stack, begun = self.adapted, self.stack, self.stacks.begun[self.which * RANKS :]
        return begun, adapted.count, adapted.owners, adapted.chosen, stack.ranks, self.stacks.middle, stack.up

    def delta(self) -> Tensor:
        """[rows, N] fp32, parts one after another; for products that only add it."""
        shape, stack, stacks = self.shape, self.stack, self.stacks
        steps = steps_of(shape, self.adapted.units)
        tiles = sum(-(-outputs // (OUTPUTS * steps)) for outputs in shape.outputs)
        kernels.up[(self.adapted.units, tiles)](
            self.adapted.table, stack.ranks, stacks.middle, stack.up, stacks.delta, N=sum(shape.outputs),
            N0=shape.outputs[0], N1=shape.outputs[-1], PARTS=shape.parts, RANK=self.rank, BN=OUTPUTS, STEPS=steps,
            ROOM=MAX_ROWS, PDL=self.pdl, num_warps=4, num_stages=2, enable_fp_fusion=False, launch_pdl=self.pdl,
        )  # fmt: skip
        return stacks.delta


def steps_of(shape: Shape, units: int) -> int:
    """Tiles of what is added that one program takes, one after another."""
    tiles = units * sum(-(-outputs // OUTPUTS) for outputs in shape.outputs)
    return next((steps for steps in (8, 4, 2) if tiles >= ENOUGH * steps // 2), 1)
