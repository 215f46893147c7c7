"""The training loop: steps, checkpoints, resumption and progress reports; the same for every recipe.

Everything random is a function of the seed and the step, and a checkpoint holds weights and optimiser state in
full, so a run that was killed and resumed has the loss curve of one that was not. With several GPUs (accelerate)
every process takes its own batches and gradients are averaged.

Muon makes a matrix's momentum orthogonal by Newton and Schulz's iteration: every direction that the gradient has,
strong or weak, is then followed alike. Steps have the size of AdamW's (an entry moves by the learning rate, in the root
mean square), so that one learning rate serves matrices and vectors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.train.checkpoint import MOMENT, read_checkpoint, write_checkpoint
from forerun.train.data.corpus import Batches, Corpus
from forerun.train.options import TrainOptions
from forerun.train.recipes.base import Measured, Recipe, loss_of
from forerun.train.simulate import measure, walk

MOMENTUM = 0.95
_ROUNDS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)  # steep at zero: singular values end between 0.7 and 1.2


class Muon(torch.optim.AdamW):
    """Groups with `orthogonal` set are moved by Muon, the others by AdamW."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["orthogonal"]]
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        moved = [(p, g) for g in groups if g["orthogonal"] for p in g["params"] if p.grad is not None]
        for _, alike in groupby(sorted(moved, key=_kind), key=_kind):
            self._move(list(alike))
        return loss

    def _move(self, moved: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Matrices of one shape together: one product instead of many small ones."""
        momenta = []
        for parameter, _ in moved:
            state = self.state[parameter]
            if MOMENT not in state:
                state["step"], state[MOMENT] = torch.zeros(()), torch.zeros_like(parameter)
            state["step"] += 1  # AdamW looks for it when a state is loaded
            state[MOMENT].lerp_(parameter.grad, 1 - MOMENTUM)
            momenta.append(torch.lerp(parameter.grad, state[MOMENT], MOMENTUM))  # type: ignore[arg-type]
        directions = orthogonal(torch.stack(momenta))
        for (parameter, group), direction in zip(moved, directions, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(direction.to(parameter.dtype), alpha=-group["lr"] * max(parameter.shape) ** 0.5)


def _kind(moved: tuple[Tensor, dict[str, Any]]) -> tuple[int, ...]:
    return tuple(moved[0].shape)


def orthogonal(matrices: Tensor) -> Tensor:
    """[N, A, B] with the same singular vectors and singular values near one."""
    wide = matrices.shape[-2] > matrices.shape[-1]
    # many CPUs have no products of 16 bits
    matrices = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x: Tensor = matrices.mT if wide else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = x.mT if wide else x
    return found


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run."""

    step: int  # steps done
    steps: int
    loss: float
    acceptance: float  # mean overlap of the laws at the first level
    lr: float
    tokens_per_second: float
    tokens_per_round: float | None = None  # simulated on held-back text, where it was measured
    tree_tokens_per_round: float | None = None
    walked_tokens_per_round: float | None = None  # chains of 5 through the texts of --measure-on


Report = Callable[[Progress], None]
SAVE_SECONDS = 300.0  # a run saves at least so often: on a CPU --save-every steps may take hours


class Trainer:
    """One run of one recipe."""

    def __init__(
        self, options: TrainOptions, recipe: Recipe, corpus: Corpus, folder: Path, accelerator: Any = None
    ) -> None:
        self.options, self.recipe, self.folder, self.accelerator = options, recipe, folder, accelerator
        self.device = recipe.truth_head().device
        self.batches = Batches(corpus, corpus.training, options.batch_tokens, options.seed)
        self.tests = Batches(corpus, corpus.held_back, options.batch_tokens, options.seed + 1)
        self.walked_texts = _other_texts(options, corpus, recipe.vocabulary.vocab_size)
        self.named = {n: p for n, p in recipe.module().named_parameters() if p.requires_grad}
        self.optimizer = self._make_optimizer()
        self.step = 0

    @property
    def is_main(self) -> bool:
        return self.accelerator is None or bool(self.accelerator.is_main_process)

    def run(self, report: Report) -> Measured:
        """Train from the current step to the last; returns the last measurement."""
        self.resume()
        measured: Measured | None = None
        saved = perf_counter()
        if self.step == 0 and self.walked_texts is not None and self.is_main:
            begun = self.look()
            self._log(begun)
            report(begun)
        while self.step < self.options.steps:
            progress = self.one_step()
            ends = self.step == self.options.steps
            if self.step % self.options.eval_every == 0 or ends:
                measured = self.measure()
                progress = self._with_measured(progress, measured)
            if self.is_main:
                self._log(progress)
                report(progress)
                late = perf_counter() - saved > SAVE_SECONDS
                if self.step % self.options.save_every == 0 or late or ends:
                    self.save()
                    saved = perf_counter()
        return measured or self.measure()

    def one_step(self) -> Progress:
        """One optimiser step."""
        started = perf_counter()
        share, first = (1, 0)
        if self.accelerator is not None:
            share, first = self.accelerator.num_processes, self.accelerator.process_index
        batch = self.batches.at(self.step * share + first).to(self.device)
        noise = torch.Generator(self.device).manual_seed(self.options.seed * 1_000_003 + self.step)
        lr = self._set_rates()
        with self._precision():
            loss, acceptance = loss_of(self.recipe, batch, noise)
        loss.backward()  # type: ignore[no-untyped-call]
        if share > 1:
            for parameter in self.named.values():
                if parameter.grad is not None:
                    parameter.grad = self.accelerator.reduce(parameter.grad, "mean")
        torch.nn.utils.clip_grad_norm_(self.named.values(), self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        said = float(loss.detach())  # waits for the device
        if not math.isfinite(said):
            raise InvalidInput(f"the loss is {said} at step {self.step}; resume with a lower --lr")
        seconds = perf_counter() - started
        speed = batch.tokens.numel() * share / seconds
        return Progress(self.step, self.options.steps, said, float(acceptance), lr, speed)

    def look(self) -> Progress:
        """Where a run stands before its first step, on held-back text."""
        with self._precision(), torch.no_grad():
            loss, acceptance = loss_of(self.recipe, self.tests.at(0).to(self.device), None)
        begun = Progress(self.step, self.options.steps, float(loss), float(acceptance), 0.0, 0.0)
        return self._with_measured(begun, self.measure())

    def walk(self) -> float | None:
        """Tokens per round of chains through the texts of --measure-on, where there are some."""
        texts = self.walked_texts
        if texts is None:
            return None
        with self._precision():
            found = walk(self.recipe, (texts.at(i) for i in range(len(texts))), self.device)
        return None if found is None or not found[1] else found[0] / found[1]

    def measure(self) -> Measured:
        """Simulated tokens per round on held-back text."""
        count = min(self.options.eval_batches, len(self.tests))
        with self._precision():
            return measure(self.recipe, (self.tests.at(i) for i in range(count)), self.device)

    def save(self) -> None:
        """Write a checkpoint, whole or not at all."""
        write_checkpoint(self.folder, self.step, self.options, self.named, self.optimizer)

    def resume(self) -> bool:
        """Go on from the checkpoint in the folder, if there is one of this run."""
        saved = read_checkpoint(self.folder, self.options, self.named)
        if saved is None:
            return False
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(saved.weights[name])
        state = {i: saved.moments[name] for i, name in enumerate(self.named) if name in saved.moments}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.step = saved.step
        self._cut_log()
        return True

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW or Muon, one group per parameter so that a checkpoint can name its state."""
        slow, muon = self.recipe.rates(), self.options.mover == "muon"
        groups = [
            {
                "params": [parameter],
                "share": next((rate for start, rate in slow.items() if name.startswith(start)), 1.0),
                "weight_decay": self.options.weight_decay if parameter.dim() > 1 else 0.0,
                # not tables of tokens, nor what has a single output
                "orthogonal": muon and parameter.dim() == 2 and len(parameter) > 1 and "lm_head" not in name,
            }
            for name, parameter in self.named.items()
        ]
        fused = self.device.type == "cuda"
        return Muon(groups, lr=self.options.rate, betas=(0.9, 0.95), fused=fused)

    def _set_rates(self) -> float:
        """Warmup, then a cosine down to a tenth; parts that learn slower start after the warmup."""
        warm = max(1, int(self.options.warmup * self.options.steps))
        lr = self.options.rate * min(1.0, (self.step + 1) / warm)
        if self.step >= warm:
            done = (self.step - warm) / max(1, self.options.steps - warm)
            lr = self.options.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["share"] * (1.0 if group["share"] == 1.0 or self.step >= warm else 0.0)
        return lr

    def _precision(self) -> Any:
        if self.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return nullcontext()

    def _with_measured(self, progress: Progress, measured: Measured) -> Progress:
        return replace(
            progress,
            tokens_per_round=measured.tokens_per_round,
            tree_tokens_per_round=measured.tree_tokens_per_round,
            walked_tokens_per_round=self.walk(),
        )

    def _log(self, progress: Progress) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(asdict(progress)) + "\n")

    def _cut_log(self) -> None:
        """Steps after the checkpoint will be made again; lines that cannot be read are dropped with them."""
        file = self.folder / "log.jsonl"
        if file.is_file():
            lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
            file.write_text("".join(f"{line}\n" for line in lines if 0 <= _step_of(line) <= self.step))


def _other_texts(options: TrainOptions, corpus: Corpus, vocab_size: int) -> Batches | None:
    """The texts of --measure-on; none of their prompts may be learnt from."""
    if not options.measure_on:
        return None
    others = Corpus(options.measure_on, max_length=options.max_length, holdout=1.0)
    others.must_fit(vocab_size)
    corpus.must_not_hold(others, options.measure_on)
    return Batches(others, others.held_back, options.batch_tokens, options.seed)


def _step_of(line: str) -> int:
    """Which step a line of the log is about; -1 = of none."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return -1
    return step if type(step) is int else -1
