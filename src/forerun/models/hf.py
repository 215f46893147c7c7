"""HFTarget: any transformers causal language model as a target; trees through a 4-D mask, positions by depth.

One call of the model per round, for the whole ragged batch. Sliding-window and chunked layers get masks of
their own. Whether a family honours masks and positions of our own does not follow from its configuration: a model is
tested when it is wrapped, with two small trees against plain passes over their paths, and refused where it differs.

The KV cache (`TreeCache`) has one row of slots per sequence and rolls back by length: each layer keeps a slab [rows,
heads, slots, width] of keys and one of values. A pass writes its nodes into the slots after the committed ones; `keep`
moves the path's slots together and counts them, so what was rejected lies past the row's length, where no mask reaches
and the next pass writes. The rows in use are consecutive, so that a pass over the whole batch reads the slab in place
instead of copying the context.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

from forerun.core.errors import DamagedFile, ModelNotFound, UnsupportedModel, brief
from forerun.core.types import Needs, PlainSeq, Prompts, Scores, Seq, TreeBatch, Verdict, first_rows
from forerun.models.base import SharedWeights, Target
from forerun.models.layers import check_numbers
from forerun.models.load.shapes import UNREAD
from forerun.models.slots import UnpagedTarget

SLOT_STEP = 256  # slots that a slab grows by


@dataclass(frozen=True, slots=True)
class Placement:
    rows: Tensor  # [n]
    slots: Tensor  # [n, M] the slot of every node, padding included
    first: int  # lowest row
    end: int  # past the highest row
    width: int  # slots read: the longest row and its nodes


class TreeLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer; the model calls `update`, which returns context and nodes."""

    placement: Placement
    keys: Tensor | None
    values: Tensor | None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _grow(self.keys, key_states, self.placement)
        self.values = _grow(self.values, value_states, self.placement)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.lazy_initialization(key_states, value_states)
        keys, values = self._slabs()
        return _write(keys, key_states, self.placement), _write(values, value_states, self.placement)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.placement.width, 0

    def get_seq_length(self) -> int:
        return self.placement.width - self.placement.slots.shape[1]

    def get_max_length(self) -> int:
        return -1  # transformers' word for "no limit"

    def move(self, rows: Tensor, source: Tensor, destination: Tensor) -> None:
        """Copy slots within rows; the source is read whole before anything is written."""
        for slab in self._slabs():
            at = slab.device
            slab[rows.to(at), :, destination.to(at)] = slab[rows.to(at), :, source.to(at)]

    def copy_row(self, source: int, destination: int) -> None:
        """Copy what a row holds; a pass that failed may not have come to this layer, which then holds nothing of it."""
        for slab in self._slabs():
            if source < len(slab):
                slab[destination] = slab[source]

    def clear(self) -> None:
        self.keys, self.values, self.is_initialized = None, None, False

    def _slabs(self) -> list[Tensor]:
        return [slab for slab in (self.keys, self.values) if slab is not None]


@dataclass(slots=True)
class Row:
    """Where a sequence lies in every slab, and how many of its slots are committed."""

    index: int
    length: int = 0


class TreeCache(Cache):  # type: ignore[misc]
    """All layers' slabs, and which row is whose.

    Rows change owners in one step, after all that can fail: an interrupted call can be repeated.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[TreeLayer() for _ in range(layers)])
        self.rows: dict[int, Row] = {}  # sequence id -> row; their indices are 0, 1, ...

    @property
    def used(self) -> int:
        return sum(row.length for row in self.rows.values())

    def length(self, seq_id: int) -> int:
        return self.rows[seq_id].length if seq_id in self.rows else 0

    def admit(self, seq_id: int) -> None:
        """Give a sequence a row, unless it has one."""
        if seq_id not in self.rows:
            self.rows[seq_id] = Row(len(self.rows))

    def place(self, seq_ids: list[int], nodes: int, device: torch.device) -> Placement:
        """Aim the next pass, of `nodes` nodes a row, at these sequences, given in the order of their rows."""
        rows = [self.rows[seq_id].index for seq_id in seq_ids]
        lengths = [self.rows[seq_id].length for seq_id in seq_ids]
        slots = torch.tensor(lengths, device=device)[:, None] + torch.arange(nodes, device=device)
        placement = Placement(torch.tensor(rows, device=device), slots, rows[0], rows[-1] + 1, max(lengths) + nodes)
        for layer in self.layers:
            layer.placement = placement
        return placement

    def keep(self, seq_ids: list[int], paths: list[list[int]]) -> None:
        """Commit root and path of the nodes written last."""
        moves: list[tuple[int, int, int]] = []
        for seq_id, path in zip(seq_ids, paths, strict=True):
            row = self.rows[seq_id]
            places = enumerate(path, 1)
            moves += [(row.index, row.length + node, row.length + i) for i, node in places if node != i]
        if moves:
            rows, source, destination = torch.tensor(moves).unbind(1)
            for layer in self.layers:
                layer.move(rows, source, destination)
        for seq_id, path in zip(seq_ids, paths, strict=True):
            self.rows[seq_id].length += 1 + len(path)

    def truncate(self, seq_id: int, length: int) -> None:
        row = self.rows.get(seq_id)
        if row is not None:
            row.length = min(row.length, length)

    def release(self, seq_id: int) -> None:
        """Free a row; the last one moves into it, so that the rows in use stay consecutive."""
        if seq_id not in self.rows:
            return
        free, last = self.rows[seq_id].index, len(self.rows) - 1
        rest = {other: row for other, row in self.rows.items() if other != seq_id}
        if free != last:
            mover = next(other for other, row in rest.items() if row.index == last)
            for layer in self.layers:
                layer.copy_row(last, free)
            rest[mover] = Row(free, rest[mover].length)
        self.rows = rest
        if not rest:
            for layer in self.layers:
                layer.clear()


def _grow(slab: Tensor | None, like: Tensor, place: Placement) -> Tensor:
    """The slab, or a larger one with the same contents, so that the placement fits."""
    if slab is None:
        slab = like.new_zeros(0, like.shape[1], 0, like.shape[3])
    if slab.shape[0] >= place.end and slab.shape[2] >= place.width:
        return slab
    rows = max(slab.shape[0], place.end)
    slots = max(slab.shape[2], -(-place.width // SLOT_STEP) * SLOT_STEP)
    larger = like.new_zeros(rows, like.shape[1], slots, like.shape[3])  # zeros: a masked NaN would spread
    larger[: slab.shape[0], :, : slab.shape[2]] = slab
    return larger


def _write(slab: Tensor, new: Tensor, place: Placement) -> Tensor:
    """Put the nodes [n, H, M, D] into the slab; return what the pass reads, a view where that is possible."""
    rows, slots = place.rows.to(slab.device), place.slots.to(slab.device)
    slab[rows[:, None], :, slots] = new.transpose(1, 2)
    if place.end - place.first == len(rows):
        return slab[place.first : place.end, :, : place.width]
    return slab[rows, :, : place.width]


CHUNK = 512  # tokens of a prompt per pass: bounds the mask, and the logits that some families always compute
SHORT = 15  # tokens; prompts up to about this length share a pass
NO_LIMIT = 1 << 20  # context of families that state none (ALiBi)
MASKED_ATTENTION = ("eager", "sdpa")  # the implementations that take a mask of our own


class HFTarget(UnpagedTarget):
    """A transformers model that scores trees; it is put into evaluation mode, on eager or SDPA attention."""

    def __init__(self, model: Any, *, kv_slots: int | None = None) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config(decoder=True)
        self._accepts = arguments(model)
        refuse_by_shape(model, self._accepts)
        if model.config._attn_implementation not in MASKED_ATTENTION:
            model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        self._kinds = _mask_kinds(self.config, self.family)
        self._cache = TreeCache(self.config.num_hidden_layers)
        self.slots, self._promised = kv_slots, 0  # slots for the trees of the coming round
        self.vocab_size = int(self.config.vocab_size)
        self.vocab_size = check_trees(self, model)

    @classmethod
    def load(
        cls, path: str | Path, dtype: torch.dtype, device: torch.device | str, kv_slots: int | None = None
    ) -> HFTarget:
        """Load a checkpoint directory, or a name that transformers has already fetched; never a pickle."""
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                str(path), dtype=dtype, use_safetensors=True, output_loading_info=True
            )
        except OSError as error:
            raise ModelNotFound(f"transformers cannot load {str(path)!r}: {brief(error)}; check the path") from error
        except Exception as error:  # no such causal model, or any error from a damaged config or file
            raise UnsupportedModel(f"transformers cannot run {str(path)!r}: {brief(error)}") from error
        surplus = [name for name in found["unexpected_keys"] if not UNREAD.search(name)]
        for names, what in ((found["missing_keys"], "lacks"), (surplus, "has surplus")):
            if names:  # transformers would draw the first at random, and leave the others unread
                raise DamagedFile(
                    f"{str(path)!r} {what} {len(names)} weights, such as {sorted(names)[0][:80]!r}: is its config "
                    "another model's?"
                )
        return cls(model.to(device), kv_slots=kv_slots)

    @property
    def family(self) -> str:
        return str(self.config.model_type)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def max_length(self) -> int:
        length = getattr(self.config, "max_position_embeddings", None) or NO_LIMIT
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") in ("dynamic", "longrope"):
            # past this length the longest sequence of a batch would change the angles of all
            length = min(length, rope.get("original_max_position_embeddings") or length)
        return int(length)

    @property
    def used_slots(self) -> int:
        return self._cache.used

    def shared(self) -> SharedWeights | None:
        """None where the model has no table to look tokens up in, or no LM head of rows."""
        model, embedding, head = (self.model, self.model.get_input_embeddings(), self.model.get_output_embeddings())
        if not isinstance(embedding, torch.nn.Embedding) or not isinstance(head, torch.nn.Linear):
            return None
        return SharedWeights(
            embed=lambda ids: embedding(ids.to(self.device)),
            head_rows=lambda ids: head.weight[ids.to(self.device)],
            vocab_size=self.vocab_size,
            width=embedding.embedding_dim,
            dtype=embedding.weight.dtype,
            layers=_layers_of(model, self.config.num_hidden_layers),
        )

    @property
    def pass_rows(self) -> int:
        return CHUNK

    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        fresh = [seq.tokens[self._cache.length(seq.id) : -1] for seq in seqs]
        if rows is not None:
            fresh = first_rows(fresh, rows)
        hidden = self._cache_chains([seq.id for seq in seqs], fresh, needs)
        return TreeBatch.chains(fresh, self.device), Scores(None, hidden)

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        """Prompts get a pass of their own: in one pass all rows would be padded to the longest chunk."""
        read = None if prompts is None else self.prefill(prompts.seqs, needs, prompts.rows)
        return replace(self._pass([seq.id for seq in seqs], trees, needs), read=read)

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        self._cache.keep([seq.id for seq in seqs], verdict.to_host()[0])
        self._promised = 0

    def truncate(self, seq: Seq, length: int) -> None:
        self._cache.truncate(seq.id, length)

    def cached_tokens(self, seq: Seq) -> int:
        return self._cache.length(seq.id)

    def release(self, seq: Seq) -> None:
        self._cache.release(seq.id)

    def _cache_chains(self, ids: Sequence[int], rows: Sequence[Sequence[int]], needs: Needs) -> dict[int, Tensor]:
        """Cache tokens behind what is cached, in several passes; their hidden rows, laid end to end."""
        for seq_id in ids:
            self._cache.admit(seq_id)
        empty = torch.zeros(0, self.config.hidden_size, device=self.device, dtype=self.model.dtype)
        parts: dict[int, list[list[Tensor]]] = {layer: [[empty] for _ in ids] for layer in needs.hidden_layers}
        for first, which in _alike([len(row) for row in rows]):
            chains = TreeBatch.chains([rows[b][first : first + CHUNK] for b in which], self.device)
            scores = self._pass([ids[b] for b in which], chains, needs, logits=False)
            self._cache.keep([ids[b] for b in which], [list(range(1, size)) for size in chains.sizes()])
            for layer, columns in parts.items():
                for b, part in zip(which, torch.split(scores.hidden[layer], chains.sizes()), strict=True):
                    columns[b].append(part)
        return {layer: torch.cat([part for column in columns for part in column]) for layer, columns in parts.items()}

    @torch.no_grad()
    def _pass(self, ids: Sequence[int], trees: TreeBatch, needs: Needs, logits: bool = True) -> Scores:
        """One call of the model, batched in the order of the rows; nodes are padded to the largest tree."""
        for seq_id in ids:
            self._cache.admit(seq_id)
        order = sorted(range(len(ids)), key=lambda b: self._cache.rows[ids[b]].index)
        sizes = trees.sizes()
        widest = max(sizes)
        place = self._cache.place([ids[b] for b in order], widest, self.device)
        # pads repeat their tree's root, at the root's position
        index = [[trees.starts[b] + (i if i < sizes[b] else 0) for i in range(widest)] for b in order]
        nodes = torch.tensor(index, device=self.device)  # [n, M]
        positions = place.slots[:, :1] + trees.depths().to(self.device)[nodes]
        # what is drafted past the context is never accepted
        positions = positions.clamp_(max=self.max_length - 1)
        shapes = trees.topology()
        ancestors = torch.eye(widest, dtype=torch.bool).repeat(len(ids), 1, 1)  # a pad sees itself
        for row, b in enumerate(order):
            ancestors[row, : sizes[b], : sizes[b]] = torch.from_numpy(shapes[b].ancestors)
        options: dict[str, Any] = {"position_ids": positions, "output_hidden_states": bool(needs.hidden_layers)}
        if not logits:
            options["logits_to_keep"] = 1
        options = {name: value for name, value in options.items() if name in self._accepts}
        key_positions = _key_positions(place, positions)
        with _alibi_at(self.model.base_model, key_positions):
            out = self.model(
                input_ids=trees.tokens.to(self.device)[nodes],
                attention_mask=self._mask(place, ancestors.to(self.device), positions, key_positions),
                past_key_values=self._cache,
                use_cache=True,
                **options,
            )
        starts = {b: row * widest for row, b in enumerate(order)}
        flat = [starts[b] + i for b in range(len(ids)) for i in range(sizes[b])]
        real = torch.tensor(flat, device=self.device)  # [M]
        hidden = {i: out.hidden_states[i].flatten(0, 1)[real] for i in needs.hidden_layers}
        return Scores(check_numbers(out.logits.flatten(0, 1)[real].float()) if logits else None, hidden)

    def _mask(
        self, place: Placement, ancestors: Tensor, positions: Tensor, key_positions: Tensor
    ) -> Tensor | dict[str, Tensor]:
        """[n, 1, M, S] per kind of layer: a node sees its row's committed slots, its ancestors and itself."""
        slots = place.slots
        committed = torch.arange(place.width, device=slots.device) < slots[:, :1]  # [n, S]
        seen = committed[:, None].expand(-1, slots.shape[1], -1).clone()  # [n, M, S]
        seen.scatter_(2, slots[:, None].expand_as(ancestors), ancestors)
        masks = {}
        for kind, limit in self._kinds.items():
            mask, query, key = seen, positions[:, :, None], key_positions[:, None]
            if limit and kind == "chunked_attention":
                mask = mask & (key // limit == query // limit)
            elif limit:
                mask = mask & (key > query - limit)
            masks[kind] = self._in_the_models_terms(mask[:, None])
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _in_the_models_terms(self, mask: Tensor) -> Tensor:
        if self.model.config._attn_implementation == "sdpa":
            return mask
        dtype = self.model.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _layers_of(model: Any, count: int) -> Sequence[torch.nn.Module]:
    """The decoder layers: the first list of modules that has as many members as the config says there are."""
    lists = (part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    return list(next((part for part in lists if len(part) == count), ()))


def _mask_kinds(config: Any, family: str) -> dict[str, int | None]:
    """Which masks the layers need: kind -> window or chunk, None = all of the context."""
    limits = {
        "full_attention": None,
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(kinds - set(limits)):
        raise UnsupportedModel(f"{family} has layers of type {unknown[0]!r}, which no tree mask can serve")
    if not kinds:  # one mask for all layers
        kinds = {next((kind for kind, limit in limits.items() if limit), "full_attention")}
    return {kind: limits[kind] for kind in sorted(kinds)}


def _alike(lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Prompts in passes: from which token on, and whose. All are padded to the longest, so they are of like lengths."""
    for first in range(0, max(lengths, default=0), CHUNK):
        sizes = [max(0, min(CHUNK, length - first)) for length in lengths]
        for step in sorted({_step_of(size) for size in sizes if size}):
            yield first, [b for b, size in enumerate(sizes) if size and _step_of(size) == step]


def _step_of(size: int) -> int:
    """Sizes that are padded to each other: the very short, and beyond them by powers of two."""
    return max(SHORT, size - 1).bit_length()


def _key_positions(place: Placement, positions: Tensor) -> Tensor:
    """[n, S] the position of every slot: committed ones by slot, nodes by depth."""
    slots = torch.arange(place.width, device=positions.device).repeat(len(positions), 1)
    return slots.scatter_(1, place.slots, positions)


@contextmanager
def _alibi_at(model: Any, key_positions: Tensor) -> Iterator[None]:
    """Let BLOOM bias keys by our positions: it counts them off a 2-D mask, which cannot describe a tree."""
    build = getattr(model, "build_alibi_tensor", None)
    if build is None:
        yield
        return

    def by_position(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        ones = mask.new_ones(1, key_positions.shape[1], dtype=torch.long)
        bias: Tensor = build(ones, heads, dtype)[:, 0]  # [H, S]
        return bias[:, key_positions].transpose(0, 1).reshape(-1, 1, key_positions.shape[1])  # [n * H, 1, S]

    try:
        model.build_alibi_tensor = by_position  # on the instance only, for this pass only
        yield
    finally:
        vars(model).pop("build_alibi_tensor", None)


ADVICE = "run it with transformers alone"


def arguments(model: Any) -> frozenset[str]:
    """The names that the model's forward takes; models that take **kwargs also return hidden states."""
    parameters = inspect.signature(model.forward).parameters
    more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return frozenset(parameters) | ({"output_hidden_states"} if more else frozenset())


def refuse_by_shape(model: Any, accepts: frozenset[str]) -> None:
    """Refuse what cannot work whatever it computes."""
    family = model.config.model_type
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{family} has an encoder and Forerun runs decoder-only models; {ADVICE}")
    if "past_key_values" not in accepts or getattr(model, "_is_stateful", False):
        raise UnsupportedModel(f"{family} keeps a state that cannot be rolled back; {ADVICE}")
    if "position_ids" not in accepts and not hasattr(model.base_model, "build_alibi_tensor"):
        raise UnsupportedModel(f"{family} takes no positions, which a tree needs; {ADVICE}")
    if "local" in (getattr(model.config, "attention_layers", None) or ()):
        raise UnsupportedModel(f"{family} limits its attention by slot, not by position; {ADVICE}")


def check_trees(target: Target, model: Any) -> int:
    """Score two small trees after sequences of unlike length and compare; returns the number of logits."""
    family, rng = model.config.model_type, torch.Generator().manual_seed(0)

    def words(count: int) -> list[int]:
        drawn: list[int] = torch.randint(target.vocab_size, (count,), generator=rng).tolist()
        return drawn

    probes = [PlainSeq(-1, words(6), max_length=64), PlainSeq(-2, words(3), max_length=64)]
    shapes = [-1, 0, 0, 0, 1, 2], [-1, 0, 0]
    trees = TreeBatch.trees(
        [([probe.tokens[-1], *words(len(shape) - 1)], shape) for probe, shape in zip(probes, shapes, strict=True)],
        device=target.device,
    )
    try:
        target.prefill(probes, Needs())
        logits = target.score(probes, trees, Needs()).logits
        assert logits is not None
        errors = torch.tensor([e for b in range(2) for e in _errors(model, probes[b].tokens, trees, b, logits)])
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedModel(f"{family} cannot score trees ({reason}); {ADVICE}") from error
    finally:
        for probe in probes:
            target.release(probe)
    # in 16 bits an expert's router may flip at one node; a mask that is ignored shows at nearly all of them
    worst, limit = (errors.max(), 1e-3) if model.dtype == torch.float32 else (errors.median(), 0.1)
    if not worst <= limit:  # a NaN is refused too
        found = f"off by {float(worst):.2g} of the logits' spread, limit {limit:g}"
        raise UnsupportedModel(f"{family} scores trees unlike text ({found}); {ADVICE}")
    return int(logits.shape[-1])


@torch.no_grad()
def _errors(model: Any, tokens_before: list[int], trees: TreeBatch, b: int, logits: Tensor) -> Iterator[float]:
    """For every leaf of tree b: how far its logits are from a plain pass over its path, in their spread."""
    first, end = trees.starts[b], trees.starts[b + 1]
    tokens, parents = trees.tokens[first:end].tolist(), trees.parents[first:end].tolist()
    for leaf in sorted(set(range(end - first)) - set(parents)):
        path, node = list[int](), leaf
        while node > 0:  # the root is the last of the tokens before
            path.insert(0, tokens[node])
            node = parents[node]
        plain = model(input_ids=torch.tensor([tokens_before + path], device=logits.device), use_cache=False)
        wanted = plain.logits[0, -1].float()
        yield float((logits[first + leaf] - wanted).norm() / (wanted - wanted.mean()).norm())
