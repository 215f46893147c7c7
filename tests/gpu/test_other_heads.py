"""MTP layers and heads on the last row: texts are the same with and without, and on a GPU drafts are captured."""

from pathlib import Path

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request, Verdict
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.eagle import on_device as draft_on_device
from forerun.drafters.heads.drafter import LastRowDrafter
from forerun.drafters.heads.eagle import MtpDrafter, read_mtp, write_mtp
from forerun.drafters.heads.medusa import HydraDrafter, MedusaDrafter, load_heads, write_heads
from forerun.engine.driver import Driver
from forerun.models.cuda.target import CudaDecoder
from forerun.testing import FakeSeq
from tests.drafters.rounds import as_lists
from tests.drafters.tiny_heads import heads_config, heads_weights
from tests.gpu.heads import make_head
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda

NAMES = ["mtp", "hydra", "medusa"]


def save_head(name: str, target: CudaDecoder, folder: Path) -> Path:
    if name == "mtp":
        write_mtp(folder, *make_head(target, eagle="mtp", borrows=True))
    else:
        config = heads_config("medusa" if name == "medusa" else "hydra", VOCAB, target.config.width)
        write_heads(folder, config, heads_weights(config, seed=5))
    return folder


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_text_is_the_same_with_and_without(name: str, device: str, tmp_path: Path) -> None:
    need_cuda(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    texts = []
    for drafter in ("none", name):
        target = make_target("llama", device, dtype)
        head = str(save_head(name, target, tmp_path)) if drafter == name else None
        speculative = SpeculativeConfig(drafter=drafter, draft_model=head, controller="fixed", budget=5)
        engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=1, max_length=200))
        prompts = [(5, 9, 2), (7,), tuple(range(3, 60))]
        seqs = Driver(engine).write(Request(prompt, SamplingParams(max_tokens=24)) for prompt in prompts)
        texts.append([seq.tokens for seq in seqs])
        drafted = sum(seq.stats.drafted for seq in seqs)
    assert drafted > 0
    assert texts[0] == texts[1]
    built = engine.drafters.get(name)
    if device == "cuda":
        assert isinstance(built, OnDevice) if name == "mtp" else built.captures > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["mtp", "eagle3"])
def test_the_files_of_an_mtp_layer_are_read_for_the_device(name: str, tmp_path: Path) -> None:
    """What builds it on a GPU, on a CPU; a folder that holds another kind of head is refused."""
    target = make_target("llama", "cpu")
    folder = save_head("mtp", target, tmp_path)
    if name == "mtp":
        drafter = draft_on_device(folder, target, lambda: pytest.fail("not needed"), read=MtpDrafter.read)
        assert isinstance(drafter, OnDevice)
        assert drafter.needs.hidden_layers == read_mtp(folder)[0].layers == (-1,)
        assert drafter.offer(FakeSeq(0, [1])).menu is drafter.draft.menu
        return
    with pytest.raises(Exception, match="no EAGLE head"):
        draft_on_device(folder, target, lambda: pytest.fail("not needed"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hydra", "medusa"])
def test_a_captured_draft_is_the_draft(name: str, tmp_path: Path) -> None:
    """In fp32, so that near-ties do not decide: alone and in a batch."""
    need_cuda()
    target = make_target("llama", "cuda")
    family = "medusa" if name == "medusa" else "hydra"
    heads = load_heads(save_head(name, target, tmp_path), target, family)  # type: ignore[arg-type]
    make = MedusaDrafter if name == "medusa" else HydraDrafter
    captured, plain = make(heads), make(heads)
    captured.capture(captured.usual_budgets())
    at_load = captured.captures
    seqs = [FakeSeq(b, [(b + 3 * i) % VOCAB for i in range(n)]) for b, n in enumerate((3, 40, 300))]
    drafters: list[LastRowDrafter] = [captured, plain]
    for seq in seqs:
        trees, scores = target.prefill([seq], captured.needs)
        for drafter in drafters:
            drafter.observe([seq], trees, scores, Verdict.whole_chain(trees, [seq.tokens[-1]]))
    for some in (seqs[:1], seqs[2:], seqs):
        for budget in (Budget(4, 4), Budget(9, 4, 2), Budget(20, 3, 4)):
            ours, theirs = (as_lists(one.propose(some, [budget] * len(some))) for one in drafters)
            assert ours == theirs
    assert captured.captures == at_load + (3 if name == "hydra" else 2)
