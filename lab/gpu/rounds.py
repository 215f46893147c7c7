"""Time of a whole speculative round on this GPU: draft, pass, verdict and commit, beside a plain pass.

The head is one layer of the target's own size over a reduced vocabulary. With random weights hardly anything is
accepted, which does not change what a round costs; texts written with a trained head are measured elsewhere
(`lab.gpu.command --head`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor

from forerun.core.noise import Noise
from forerun.core.tree import committed_tokens
from forerun.core.types import Budget, Needs, TreeBatch, Verdict
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.eagle import HeadDraft
from forerun.drafters.device.head import make_net
from forerun.drafters.heads.eagle_head import EagleConfig, default_layers, expected_shapes
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import WeightKind
from forerun.testing import FakeSeq
from forerun.verify.exact import ExactVerifier
from forerun.verify.greedy import greedy_verdict
from forerun.verify.warp import warp

FORMS = {"chain of 5": Budget(5, 5), "tree of 59": Budget(59, 6, 10)}
DRAFT_VOCABULARY = 16384
ROUNDS = 20

Head = tuple[EagleConfig, dict[str, Tensor]]


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Seconds of some work on the device, the mean of several."""
    work()
    _wait()
    started = perf_counter()
    for _ in range(repeats):
        work()
    _wait()
    return (perf_counter() - started) / repeats


def random_head(target: CudaDecoder, draft_vocabulary: int = DRAFT_VOCABULARY, *, layers: int = 1) -> Head:
    """A head of so many layers of the target's size with random weights."""
    shape = target.config
    rows = min(draft_vocabulary, shape.vocab_size)
    config = EagleConfig(
        kind="eagle3", width=shape.width, inner=shape.inner, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, vocab_size=shape.vocab_size, draft_vocab_size=rows,
        layers=default_layers(shape.layers), target_width=shape.width, max_length=8192, depth=layers,
    )  # fmt: skip
    shapes = {**expected_shapes(config), "lm_head.weight": (rows, shape.width)}
    weights = {}
    for name, size in shapes.items():
        new = torch.ones(size, dtype=target.model.dtype, device=target.device)
        weights[name] = new.normal_(0.0, size[-1] ** -0.5) if len(size) > 1 else new
    counts = torch.arange(shape.vocab_size).flip(0)
    return config, weights | DraftVocabulary.most_frequent(counts, rows).tensors()


def make_drafter(
    target: CudaDecoder, head: Head, kind: WeightKind | None, max_batch: int = 0, max_length: int = 0
) -> OnDevice[HeadDraft]:
    """A drafter whose graphs are captured now, for batches up to `max_batch`; 0 = when they are first used."""
    capture = target.kernels == "triton"
    draft = HeadDraft(*make_net(*head, target, kind), capture=capture, rates=head[0].rates)
    drafter = OnDevice(draft, _no_other)
    if max_batch:
        draft.rehearse(target, max_batch, max_length or target.max_length)
    return drafter


def _no_other() -> NoReturn:
    raise AssertionError("greedy sequences are drafted for on the device")


def measure_rounds(
    target: CudaDecoder,
    name: str,
    kinds: Sequence[WeightKind] = ("plain", "int8"),
    batches: Sequence[int] = (1, 8),
    context: int = 512,
) -> list[dict[str, Any]]:
    """Every form of draft with heads of every kind; all are compared with plain passes over as many sequences."""
    found = []
    head = random_head(target)
    for kind in kinds:
        drafter = make_drafter(target, head, kind)
        for batch in batches:
            for label, budget in FORMS.items():
                row = _measure_round(target, drafter, batch, budget, context)
                found.append({"shape": name, "head": kind, "batch": batch, "form": label, **row})
                print(
                    f"{name:>5} batch {batch} {label}, {kind} head: draft {row['draft_ms']:.3f} ms, pass "
                    f"{row['pass_ms']:.3f}, round {row['round_ms']:.3f}, plain round {row['plain_round_ms']:.3f}: "
                    f"{row['round_ms'] / row['plain_round_ms'] - 1:+.0%}",
                    flush=True,
                )
        del drafter
    return found


def _measure_round(
    target: CudaDecoder, drafter: OnDevice[HeadDraft], batch: int, budget: Budget, context: int
) -> dict[str, float]:
    seqs = [FakeSeq(i, [(7 * i + j) % 199 for j in range(context + 1)], max_length=context + 400) for i in range(batch)]
    trees, scores = target.prefill(seqs, drafter.needs)
    drafter.observe(seqs, trees, scores, Verdict.whole_chain(trees, [seq.tokens[-1] for seq in seqs]))
    parts: dict[str, float] = {}
    for timed in (False, True):  # the first rounds capture
        parts = dict.fromkeys(("propose", "score", "verify", "rest"), 0.0)
        started = perf_counter()
        for _ in range(ROUNDS if timed else 3):
            play(target, drafter, seqs, budget, parts)
        whole = (perf_counter() - started) / ROUNDS
    draft = seconds_of(drafter.draft._replay_last, 20)
    device = seconds_of(target.passes.replay_last, 20)
    plain = _plain_round(target, seqs)
    plain_device = seconds_of(target.passes.replay_last, 20)
    for seq in seqs:
        target.release(seq)
        drafter.forget(seq)
    times = {"draft_ms": draft, "pass_ms": device, "round_ms": whole, "plain_pass_ms": plain_device}
    times |= {"plain_round_ms": plain} | {f"host_{name}_ms": spent / ROUNDS for name, spent in parts.items()}
    return {name: value * 1e3 for name, value in times.items()}


def play(
    target: CudaDecoder, drafter: OnDevice[HeadDraft], seqs: Sequence[FakeSeq], budget: Budget, parts: dict[str, float]
) -> None:
    """One round without an engine; verdicts wait for the device."""
    at = perf_counter()

    def lap(name: str) -> None:
        nonlocal at
        now = perf_counter()
        parts[name] += now - at
        at = now

    trees = drafter.propose(seqs, [budget] * len(seqs))
    lap("propose")
    scores = target.score(seqs, trees, drafter.needs)
    lap("score")
    assert scores.greedy is not None, "trees that the device has grown are decided there"
    verdict = greedy_verdict(trees, scores.greedy)
    lap("verify")
    target.commit(seqs, trees, verdict)
    drafter.observe(seqs, trees, scores, verdict)
    for seq, tokens in zip(seqs, committed_tokens(trees, verdict), strict=True):
        seq.tokens += tokens
    lap("rest")


def _plain_round(target: CudaDecoder, seqs: Sequence[FakeSeq]) -> float:
    """Score, argmax, commit: seconds of a round that drafts nothing."""
    for timed in (False, True):
        started = perf_counter()
        for _ in range(ROUNDS if timed else 2):
            roots = TreeBatch.chains([seq.tokens[-1:] for seq in seqs])
            scores = target.score(seqs, roots, Needs())
            laws = warp(scores.required_logits, seqs, roots)
            verdict = ExactVerifier().verify(roots, laws, Noise([0] * len(seqs), [1] * len(seqs)))
            target.commit(seqs, roots, verdict)
            for seq, token in zip(seqs, verdict.bonus.tolist(), strict=True):
                seq.tokens.append(token)
    return (perf_counter() - started) / ROUNDS


def measure_long_context(target: CudaDecoder, name: str, length: int = 32_000) -> dict[str, Any]:
    """Passes behind a long context: one node, a chain and a tree of 64."""
    length = min(length, target.max_length - 1)
    seq = FakeSeq(1 << 30, [(7 * j) % 199 for j in range(length + 1)], max_length=length + 2)
    started = perf_counter()
    target.prefill([seq], Needs())
    _wait()
    row: dict[str, Any] = {"shape": name, "context": length, "prefill_s": perf_counter() - started}
    root = seq.tokens[-1]
    shapes = {
        "1 node": TreeBatch.chains([[root]]),
        "chain of 64": TreeBatch.chains([[root, *range(63)]]),
        "tree of 64": TreeBatch.trees([([root, *range(63)], [-1, *((i - 1) // 2 for i in range(1, 64))])]),
    }
    for label, trees in shapes.items():
        target.score([seq], trees, Needs())
        row[label] = seconds_of(target.passes.replay_last, 10) * 1e3
        print(f"{name:>5} behind {length} tokens, {label}: {row[label]:.3f} ms", flush=True)
    target.release(seq)
    return row


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
