"""Write training texts with the target in one static batch: one token per row and step, no row waits for another.

Texts to train on need no drafting and no stream, only throughput, which a loop on the host would limit. So the
whole step, sampling included, runs on the device over a static cache (captured as a graph on a GPU); the host
looks every few steps which texts have ended and puts the next ones in their rows. A prompt is fed through the same
step, token by token, so there is one shape. Texts are drawn from the target's own law at their temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.train.network import CausalNet

LOOK_EVERY = 8  # steps between two checks for rows that have ended


@dataclass(frozen=True, slots=True)
class Order:
    prompt: Sequence[int]
    temperature: float
    max_length: int  # prompt included
    number: int = 0  # the caller's own


@dataclass(frozen=True, slots=True)
class Written:
    order: Order
    tokens: list[int]  # prompt included
    ended: bool  # by one of the stop ids, which is the last token


@dataclass(frozen=True, slots=True)
class Look:
    done: Tensor  # [rows]
    places: Tensor  # [rows]
    text: Tensor  # [rows, max_length]
    made: Any  # a CUDA event to wait for
    turns: list[int]  # which text each row was at

    def ended(self, turns: Sequence[int]) -> list[int]:
        """Rows whose text has ended and not been taken yet: a row taken since is at another turn."""
        if self.made is not None:
            self.made.synchronize()
        found = self.done.nonzero()[:, 0].tolist()
        return [row for row in found if self.turns[row] == turns[row]]


class BatchWriter:
    """Rows of one batch, each at its own position in its own sequence."""

    def __init__(self, net: CausalNet, stop_ids: Iterable[int], *, rows: int, max_length: int, seed: int = 0) -> None:
        self.net, self.rows, self.max_length = net, rows, max_length
        config, device = net.config, net.device
        self.device = device
        shape = (config.layers, 2, rows, config.kv_heads, max_length, config.head_dim)
        self._cache = torch.zeros(shape, dtype=net.embedding.dtype, device=device)
        self._text = torch.zeros(rows, max_length, dtype=torch.long, device=device)
        self._places = torch.zeros(rows, dtype=torch.long, device=device)  # of the token to be fed next
        self._prompts = torch.ones(rows, dtype=torch.long, device=device)
        self._limits = torch.ones(rows, dtype=torch.long, device=device)
        self._heat = torch.zeros(rows, device=device)
        self._done = torch.ones(rows, dtype=torch.bool, device=device)
        self._stop_ids = frozenset(stop_ids)
        self._stops = torch.tensor(sorted(self._stop_ids) or [-1], device=device)
        self._noise = torch.Generator(device).manual_seed(seed)
        self._orders: list[Order | None] = [None] * rows
        self._rotation_table = [0] * rows
        self._step: Callable[[], None] = self._advance
        if device.type == "cuda":
            self._step = self._captured()

    @torch.inference_mode()
    def write(self, orders: Iterable[Order]) -> Iterator[Written]:
        """Every text, in the order in which they end."""
        waiting = iter(orders)
        self._fill(waiting, range(self.rows))
        seen: Look | None = None
        while any(order is not None for order in self._orders):
            for _ in range(LOOK_EVERY):
                self._step()
            before, seen = seen, self._look()  # the device continues while the host works on the last copy
            if before is not None:
                ended = [row for row in before.ended(self._rotation_table) if self._orders[row] is not None]
                yield from self._collect(before, ended)
                self._fill(waiting, ended)

    def _fill(self, waiting: Iterator[Order], free: Iterable[int]) -> None:
        rows = list(free)
        orders = list(islice(waiting, len(rows)))
        for row, order in zip(rows, orders, strict=False):
            if not 1 <= len(order.prompt) < min(order.max_length, self.max_length):
                raise InvalidInput(f"a prompt of {len(order.prompt)} tokens leaves no room to {order.max_length}")
            self._orders[row] = order
        if orders:
            index = torch.tensor(rows[: len(orders)], device=self.device)
            lengths = [len(order.prompt) for order in orders]
            padded = [[*order.prompt, *[0] * (max(lengths) - len(order.prompt))] for order in orders]
            self._text[index, : max(lengths)] = torch.tensor(padded, device=self.device)
            limits = [min(order.max_length, self.max_length) for order in orders]
            self._places[index] = 0
            self._prompts[index] = torch.tensor(lengths, device=self.device)
            self._limits[index] = torch.tensor(limits, device=self.device)
            self._heat[index] = torch.tensor([order.temperature for order in orders], device=self.device)
            self._done[index] = False

    def _look(self) -> Look:
        """A copy of the batch as it is after the steps ordered so far; reading it waits for these only."""
        done, places, text = (self._copied(part) for part in (self._done, self._places, self._text))
        made: Any = None
        if self.device.type == "cuda":
            make_event: Any = torch.cuda.Event
            made = make_event()
            made.record()
        return Look(done, places, text, made, [*self._rotation_table])

    def _copied(self, source: Tensor) -> Tensor:
        kept = torch.empty(source.shape, dtype=source.dtype, pin_memory=self.device.type == "cuda")
        return kept.copy_(source, non_blocking=True)

    def _collect(self, look: Look, rows: Sequence[int]) -> Iterator[Written]:
        for row in rows:
            order = self._orders[row]
            assert order is not None
            self._orders[row] = None
            self._rotation_table[row] += 1
            tokens = look.text[row, : int(look.places[row]) + 1].tolist()
            yield Written(order, tokens, tokens[-1] in self._stop_ids)

    def _advance(self) -> None:
        """Feed one token per row and note the next: the prompt's, or one drawn from the target's law."""
        rows = torch.arange(self.rows, device=self.device)
        last = self._net_step(rows)
        logits = (last @ self.net.head.t()).float()
        heat = self._heat[:, None]
        noise = torch.empty_like(logits).exponential_(generator=None if self._graphed else self._noise).log_()
        drawn = torch.where(heat > 0, logits / heat.clamp(min=1e-6) - noise, logits).argmax(-1)
        after = self._places + 1
        given = after < self._prompts
        inside = after.clamp(max=self.max_length - 1)
        token = torch.where(given, self._text[rows, inside], drawn)
        token = torch.where(self._done, self._text[rows, inside], token)
        self._text[rows, inside] = token
        stops = (token[:, None] == self._stops).any(-1) & ~given
        places = torch.where(self._done, self._places, inside)
        self._done |= stops | (after + 1 >= self._limits)
        self._places.copy_(places)

    def _net_step(self, rows: Tensor) -> Tensor:
        return self.net.step(self._text[rows, self._places], self._places, self._cache)

    _graphed = False

    def _captured(self) -> Callable[[], None]:
        """The step as one CUDA graph: at this size the launches would cost more than the arithmetic."""
        self._graphed = True
        torch.cuda.manual_seed(self._noise.initial_seed())
        make_stream: Any = torch.cuda.Stream
        side = make_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(side):
            for _ in range(3):
                self._advance()
        torch.cuda.current_stream().wait_stream(side)
        graph: Any = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            self._advance()
        self._done.fill_(True)

        def replay() -> None:
            graph.replay()

        return replay
