"""The training loop: steps, checkpoints, resumption and progress reports; the same for every recipe.

Everything random is a function of the seed and the step, and a checkpoint holds weights and optimiser state in
full, so a run that was killed and resumed has the loss curve of one that was not. With several GPUs (accelerate)
every process takes its own batches and gradients are averaged.

Muon makes a matrix's momentum orthogonal by Newton and Schulz's iteration: every direction that the gradient has,
strong or weak, is then followed alike. Steps have the size of AdamW's (an entry moves by the learning rate, in the root
mean square), so that one learning rate serves matrices and vectors.

Tokens per round are simulated on held-back text, which counts as the target's output. A draft started at row t is
accepted as long as each drafted token equals the text's: then the next level saw exactly what it would see in a real
round, so the count is what a chain would have had (and, with any of the likeliest few instead of the first, an upper
bound for a tree). That is a mean over all rows. A decoder starts a round behind what the last one accepted, so hard
places count more: `walk` goes through greedy text in this way and finds what decoding it would have counted. With
--measure-on that count, never the loss, decides which weights are written and (--patience) when a run ends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.drafters.heads.base import Calibration
from forerun.train.checkpoint import MOMENT, Best, read_checkpoint, write_checkpoint
from forerun.train.data.corpus import Batch, Batches, Corpus, hash_of
from forerun.train.options import TrainOptions
from forerun.train.recipes.base import Measured, Recipe, loss_of, shifted

RANKS = 10
CHAIN = 5  # tokens drafted in a round that is walked through; a block drafter drafts its whole block


@torch.no_grad()
def measure(recipe: Recipe, batches: Iterable[Batch], device: torch.device, chunk: int = 4096) -> Measured:
    ranks, sure = [], []
    for batch in batches:
        found = _ranks(recipe, batch.to(device), chunk)
        ranks.append(found.ranks)
        sure.append(found.sure)
    return summarise(torch.cat(ranks), torch.cat(sure))


@torch.no_grad()
def walk(recipe: Recipe, batches: Iterable[Batch], device: torch.device, chunk: int = 4096) -> tuple[int, int] | None:
    """Tokens and rounds of chains of 5, or of whole blocks, through greedy texts; None where rows were left out."""
    tokens = rounds = 0
    for batch in batches:
        found = _ranks(recipe, batch.to(device), chunk)
        if not found.every_row:
            return None
        more = walk_rows(batch.learnt, found.usable.cpu(), found.ranks.cpu(), found.shift, found.chain)
        tokens, rounds = tokens + more[0], rounds + more[1]
    return tokens, rounds


def walk_rows(learnt: Tensor, usable: Tensor, ranks: Tensor, shift: int, chain: int = CHAIN) -> tuple[int, int]:
    """Tokens and rounds through sequences [B, T], each round from where the one before ended.

    `learnt` are the answers' tokens, `usable` the rows that have ranks [N, levels]; the first level of row t predicts
    token t + shift + 1, behind a root at t + shift. A text starts with its answer's first token as the root: the
    prompt's own pass gave that (on a CPU in a drafted round, which is not walked). It ends where a row has no ranks.
    """
    accepted = torch.full(learnt.shape, -1)
    accepted[usable] = (ranks[:, :chain] == 0).long().cumprod(1).sum(1)
    tokens = rounds = 0
    for row, first in zip(accepted.tolist(), learnt.int().argmax(1).tolist(), strict=True):
        place = max(0, first - shift)
        while place < len(row) and row[place] >= 0:
            tokens, rounds, place = tokens + 1 + row[place], rounds + 1, place + 1 + row[place]
    return tokens, rounds


def summarise(ranks: Tensor, sure: Tensor) -> Measured:
    """From ranks [N, levels] (RANKS = not among the likeliest) and the likeliest token's probabilities [N, levels]."""
    levels = ranks.shape[1]
    chain, tree = 1.0, 1.0
    alive = torch.ones(len(ranks), dtype=torch.bool, device=ranks.device)
    near = alive.clone()
    rates: list[tuple[float, ...]] = []
    for level in range(levels):
        rank = ranks[:, level]
        base = near.sum().clamp(min=1)
        rates.append(tuple(float((near & (rank == r)).sum() / base) for r in range(RANKS)))
        alive &= rank == 0
        near &= rank < RANKS
        chain += float(alive.float().mean()) if len(ranks) else 0.0
        tree += float(near.float().mean()) if len(ranks) else 0.0
    return Measured(chain, tree, tuple(rates), fit_calibration(sure.flatten(), (ranks == 0).flatten()))


def fit_calibration(probabilities: Tensor, accepted: Tensor) -> Calibration:
    """scale * q^power with the least squared error; the scale makes the mean right."""
    q, hits = probabilities.double().clamp(1e-6, 1.0), accepted.double()
    best, best_error = Calibration(), float("inf")
    if not len(q) or not float(hits.sum()):
        return best
    for power in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5):
        raised = q**power
        scale = min(float(hits.mean() / raised.mean()), 2.0)
        error = float((((raised * scale).clamp(max=1.0) - hits) ** 2).mean())
        if error < best_error:
            best, best_error = Calibration(round(scale, 4), power), error
    return best


@dataclass(frozen=True, slots=True)
class _Ranks:
    ranks: Tensor  # [N, levels]; RANKS = not among the likeliest
    sure: Tensor  # [N, levels] probability of the likeliest token
    usable: Tensor  # [B, T] which rows these are
    every_row: bool  # False: the recipe drafts from some rows only
    shift: int  # of the first level
    chain: int  # tokens of a draft


def _ranks(recipe: Recipe, batch: Batch, chunk: int) -> _Ranks:
    """Of every row whose levels lie within the answer: where the true token ranked, level by level."""
    outputs = list(recipe.outputs(batch, recipe.read(batch), None))
    inside = torch.stack([shifted(batch.learnt, output.shift + 1) for output in outputs]).all(0)  # [B, T]
    usable = inside.to(batch.tokens.device)
    if outputs[0].at is not None:  # a recipe that names its rows names the same ones for every level
        kept = torch.zeros_like(usable.flatten())
        kept[outputs[0].at] = True
        usable = usable & kept.view(usable.shape)
    head, ids = recipe.lm_head(), recipe.vocabulary.ids.to(batch.tokens.device)
    ranks, sure = [], []
    for output in outputs:
        rows = output.rows[usable] if output.at is None else output.rows[usable.flatten()[output.at]]
        truth = shifted(batch.tokens, output.shift + 1)[usable]
        parts = []
        for low in range(0, len(rows), chunk):
            logits = (rows[low : low + chunk].to(head.dtype) @ head.t()).float()
            top = logits.topk(min(RANKS, logits.shape[-1]))
            hit = ids[top.indices] == truth[low : low + chunk, None]
            rank = torch.where(hit.any(-1), hit.int().argmax(-1), RANKS)
            parts.append((rank, (top.values[:, 0] - logits.logsumexp(-1)).exp()))
        empty = (truth.new_zeros(0), rows.new_zeros(0))
        ranks.append(torch.cat([rank for rank, _ in parts] or [empty[0]]))
        sure.append(torch.cat([q.float() for _, q in parts] or [empty[1].float()]))
    first = outputs[0]
    chain = CHAIN if first.at is None else len(outputs)
    every_row = bool(usable.sum() == inside.sum())
    return _Ranks(torch.stack(ranks, 1), torch.stack(sure, 1), usable, every_row, first.shift, chain)


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
    step: int  # steps done
    steps: int
    loss: float
    acceptance: float  # mean overlap of the laws at the first level
    lr: float
    tokens_per_second: float
    tokens_per_round: float | None = None  # simulated on held-back text, where it was measured
    tree_tokens_per_round: float | None = None
    walked_tokens_per_round: float | None = None  # chains of 5 through the texts of --measure-on
    seconds: float = 0.0  # that the step took
    tokens: int = 0  # of answers, seen in all steps so far
    trained_seconds: float = 0.0  # that all steps so far took, evaluations left out


Report = Callable[[Progress], None]
SAVE_SECONDS = 300.0  # a run saves at least so often: on a CPU --save-every steps may take hours


class Trainer:
    def __init__(
        self, options: TrainOptions, recipe: Recipe, corpus: Corpus, folder: Path, accelerator: Any = None
    ) -> None:
        self.options, self.recipe, self.folder, self.accelerator = options, recipe, folder, accelerator
        self.device = recipe.truth_head().device
        tokens, packed = options.batch_tokens, options.packed
        self.batches = Batches(corpus, corpus.training, tokens, options.seed, packed=packed)
        self.tests = Batches(corpus, corpus.held_back, tokens, options.seed + 1, packed=packed)
        self.walked_texts = _other_texts(options, corpus, recipe.vocabulary.vocab_size)
        self.named = {n: p for n, p in recipe.module().named_parameters() if p.requires_grad}
        self.optimizer = self._make_optimizer()
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.best: Best | None = None
        self._hash = hash_of(options.measure_on) if options.measure_on else ""

    @property
    def is_main(self) -> bool:
        return self.accelerator is None or bool(self.accelerator.is_main_process)

    def run(self, report: Report) -> Measured:
        """Train from the current step to the last, or until nothing is gained; returns what is said of the result."""
        self.resume()
        measured: Measured | None = None
        saved = perf_counter()
        if self.step == 0 and self.walked_texts is not None:
            begun = self.look()
            if self.is_main:
                self._log(begun)
                report(begun)
        while self.step < self.options.steps and not self.has_peaked:
            progress = self.one_step()
            ends = self.step == self.options.steps
            if self.step % self.options.eval_every == 0 or ends:
                measured = self.measure()
                progress = self._with_measured(progress, measured)
            if self.is_main:
                self._log(progress)
                report(progress)
                late = perf_counter() - saved > SAVE_SECONDS
                if self.step % self.options.save_every == 0 or late or ends or self.has_peaked:
                    self.save()
                    saved = perf_counter()
        return self.result(measured)

    @property
    def has_peaked(self) -> bool:
        return self.best is not None and 0 < self.options.patience <= self.best.since

    @property
    def best_step(self) -> int:
        """Of the weights that are written."""
        return self.step if self.best is None else self.best.step

    def result(self, measured: Measured | None = None) -> Measured:
        """Take the best weights, where some were kept; what was measured of those that are now in the module."""
        if self.best is not None and self.best.step != self.step:
            self._take(self.best.weights)
            measured = None
        return measured or self.measure()

    def one_step(self) -> Progress:
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
        self.tokens, self.seconds = self.tokens + int(batch.learnt.sum()) * share, self.seconds + seconds
        progress = Progress(self.step, self.options.steps, said, float(acceptance), lr, speed, seconds=seconds)
        return replace(progress, tokens=self.tokens, trained_seconds=self.seconds)

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
        if found is None or not found[1]:
            return None
        mean = found[0] / found[1]
        if self.accelerator is not None:  # all must stop at the same step
            mean = self.accelerator.reduce(torch.tensor(mean, device=self.device, dtype=torch.float64), "mean")
        return float(mean)

    def measure(self) -> Measured:
        """Simulated tokens per round on held-back text."""
        count = min(self.options.eval_batches, len(self.tests))
        with self._precision():
            return measure(self.recipe, (self.tests.at(i) for i in range(count)), self.device)

    def save(self) -> None:
        spent = self.tokens, self.seconds
        write_checkpoint(self.folder, self.step, self.options, self.named, self.optimizer, self.best, *spent)

    def _take(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(weights[name])

    def _compare(self, walked: float | None) -> None:
        """Keep the weights if none were better."""
        if walked is None:
            return
        if self.best is not None and walked <= self.best.tokens_per_round:
            self.best = replace(self.best, since=self.best.since + 1)
        else:
            weights = {name: parameter.detach().to("cpu", copy=True) for name, parameter in self.named.items()}
            self.best = Best(self._hash, self.step, walked, weights)

    def resume(self) -> bool:
        """Go on from the checkpoint in the folder, if there is one of this run."""
        saved = read_checkpoint(self.folder, self.options, self.named)
        if saved is None:
            return False
        self._take(saved.weights)
        self.best = saved.best if saved.best is not None and saved.best.texts == self._hash else None
        state = {i: saved.moments[name] for i, name in enumerate(self.named) if name in saved.moments}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.step, self.tokens, self.seconds = saved.step, saved.tokens, saved.seconds
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
        walked = self.walk()
        self._compare(walked)
        return replace(
            progress,
            tokens_per_round=measured.tokens_per_round,
            tree_tokens_per_round=measured.tree_tokens_per_round,
            walked_tokens_per_round=walked,
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
