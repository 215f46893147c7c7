"""Block drafts on the device: captured or not they are the same trees, and a text is the same with and without."""

from pathlib import Path

import pytest

from forerun.build.engine import make_engine
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request, Verdict
from forerun.drafters.heads.block import BlockDrafter, BlockRunner, load_block
from forerun.drafters.heads.block_config import KINDS
from forerun.drafters.heads.block_head import write_block
from forerun.engine.driver import Driver
from forerun.models.cuda.target import CudaDecoder
from forerun.testing import FakeSeq
from tests.drafters.rounds import as_lists
from tests.drafters.tiny_heads import BLOCKS, block_config, block_weights
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda

NAMES = (*KINDS, *BLOCKS)


def save_block(name: str, target: CudaDecoder, folder: Path) -> Path:
    """A random drafter in float32, so that near-ties do not decide."""
    parts = BLOCKS.get(name, {"kind": name})
    config = block_config(vocab=VOCAB, width=target.config.width, draft_vocab=VOCAB - 40, layers=(0, 1, 2), **parts)
    write_block(folder, config, block_weights(config, seed=5))
    return folder


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_draft_is_the_draft(name: str, device: str, tmp_path: Path) -> None:
    """Over prompts of different lengths, alone and in a batch, and after the cache had to grow."""
    need_cuda(device)
    target = make_target("llama", device)
    folder = save_block(name, target, tmp_path)
    kind = next(kind for kind in KINDS if kind == name.partition(" ")[0])
    captured, plain = (BlockDrafter(load_block(folder, target, kind)) for _ in range(2))
    plain._runner = BlockRunner(plain.head)
    seqs = [FakeSeq(b, [(b + 3 * i) % VOCAB for i in range(n)]) for b, n in enumerate((3, 40, 300))]
    for seq in seqs:
        trees, scores = target.prefill([seq], captured.needs)
        for drafter in (captured, plain):
            drafter.observe([seq], trees, scores, Verdict.whole_chain(trees, [seq.tokens[-1]]))
    for some in (seqs[:1], seqs[:2], seqs, seqs[2:], seqs[:1]):
        for budget in (Budget(4, 4, 1), Budget(9, 4, 3)):
            ours, theirs = (as_lists(d.propose(some, [budget] * len(some))) for d in (captured, plain))
            assert ours == theirs
            assert all(len(tokens) > 2 for tokens, _ in ours)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_text_is_the_same_with_and_without(name: str, device: str, tmp_path: Path) -> None:
    need_cuda(device)
    texts, kind = [], name.partition(" ")[0]
    for drafter in ("none", kind):
        target = make_target("llama", device)
        head = str(save_block(name, target, tmp_path)) if drafter == kind else None
        speculative = SpeculativeConfig(drafter=drafter, draft_model=head, controller="fixed", budget=5)
        engine = make_engine(target, frozenset(), speculative)
        prompts = [(5, 9, 2), (7,), tuple(range(3, 60))]
        seqs = Driver(engine).write(Request(prompt, SamplingParams(max_tokens=24)) for prompt in prompts)
        texts.append([seq.tokens for seq in seqs])
        drafted = sum(seq.stats.drafted for seq in seqs)
    assert drafted > 0
    assert texts[0] == texts[1]
