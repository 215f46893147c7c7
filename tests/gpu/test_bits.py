"""Bits of a node are the same in a tree, in a chain, alone, and in a batch: bf16 text cannot depend on drafting."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.core.types import Needs, TreeBatch, Verdict
from forerun.models.cuda.plan import MAX_ROWS, ROW_SIZES
from forerun.models.cuda.target import CudaDecoder
from forerun.testing import FakeSeq, path_to, random_tree
from tests.gpu.tiny import VOCAB, make_target, need_cuda, rounding

pytestmark = pytest.mark.gpu
IN_BYTES = ("smollm2+int8", "large+fp8", "wide-qwen3+int8", "with-large-gemma3+fp8")  # keys and values
GEMMA = ("with-gemma2", "with-gemma3", "with-large-gemma2", "with-large-gemma3")
SIZED = ("zz-gemma4", "zz-gemma4-equal", "zz-large-gemma4")  # layers of different sizes
OTHERS = ("z-olmo2", "z-olmo3", "z-granite", "z-large-olmo2", "z-large-granite")


def _text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def _score(target: CudaDecoder, seqs: list[FakeSeq], trees: TreeBatch) -> Tensor:
    return target.score(seqs, trees, Needs()).required_logits.clone()  # the next pass overwrites them


USUAL, LONG = [2, 129, 700, 1500, 60], [5000, 37, 1022, 4090, 4160]


@pytest.mark.parametrize(
    ("name", "lengths", "short"),
    [
        *((name, USUAL, 32) for name in ("smollm2", "wide-heads", "mistral", "qwen3", "large", "odd")),
        *((name, USUAL, 32) for name in (*GEMMA, *OTHERS, *SIZED)),
        ("xl-context", LONG, 32),
        ("large+int8", USUAL, 32),
        ("with-large-gemma3+fp8", USUAL, 32),
        *(
            pytest.param(name, lengths, 8, id=f"tiled-{name}")
            for name, lengths in (("smollm2", USUAL), ("mistral", USUAL), ("large", USUAL), ("with-gemma2", USUAL),
                                  ("with-large-gemma3", USUAL), ("xl-context", LONG), ("large+fp8", USUAL),
                                  ("with-large-gemma3+int8", USUAL), ("xl-context+int8", LONG))
        ),
    ],
)  # fmt: skip
def test_a_node_has_the_same_bits_in_any_company(
    name: str, lengths: list[int], short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short of 8 splits: passes that reach 1,024 positions are tiled, and passes over single short ones are not."""
    need_cuda()
    monkeypatch.setattr("forerun.models.cuda.plan.SHORT", short)
    rng = random.Random(7)
    target, alone = [make_target(name, "cuda", torch.bfloat16, "triton") for _ in range(2)]
    seqs = [FakeSeq(i, _text(rng, length), max_length=max(lengths) + 500) for i, length in enumerate(lengths)]
    target.prefill(seqs, Needs())
    grown = [random_tree(rng, seq.tokens[-1], VOCAB, 24) for seq in seqs]
    trees = TreeBatch.trees(grown)
    logits = _score(target, seqs, trees)
    for b, (seq, (tokens, parents)) in enumerate(zip(seqs, grown, strict=True)):
        single = _score(target, [seq], TreeBatch.trees([(tokens, parents)]))
        batched = logits[trees.starts[b] : trees.starts[b + 1]]
        assert torch.equal(single, batched), "a tree differs from itself in a batch"
        for node in rng.sample(range(len(tokens)), min(6, len(tokens))):
            path = [tokens[i] for i in path_to(parents, node)]
            chain = _score(target, [seq], TreeBatch.chains([[tokens[0], *path]]))
            assert torch.equal(chain[-1], single[node]), f"node {node} differs in a chain"
            plain = FakeSeq(100 + node, [*seq.tokens, *path], max_length=max(lengths) + 500)
            alone.prefill([plain], Needs())
            root = _score(alone, [plain], TreeBatch.chains([plain.tokens[-1:]]))
            alone.release(plain)
            assert torch.equal(root[0], single[node]), f"node {node} differs alone"


@pytest.mark.parametrize("short", [32, pytest.param(8, id="tiled")])
def test_a_large_tree_behind_a_long_context_beside_a_prompt_has_the_bits_of_its_nodes_alone(
    short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of 16, 64 and 128 rows, trees that fill several groups, and a chunk of a prompt in the same pass."""
    need_cuda()
    monkeypatch.setattr("forerun.models.cuda.plan.SHORT", short)
    rng = random.Random(17)
    target, alone = [make_target("xl-context", "cuda", torch.bfloat16, "triton") for _ in range(2)]
    seqs = [FakeSeq(i, _text(rng, length), max_length=6000) for i, length in enumerate([4999, 300])]
    target.prefill(seqs, Needs())
    tokens = [seqs[0].tokens[-1], *(i % VOCAB for i in range(99))]
    parents = [-1, *((i - 1) // 3 for i in range(1, 100))]
    single = _score(target, seqs[:1], TreeBatch.trees([(tokens, parents)]))
    other = [seqs[1].tokens[-1], *_text(rng, 200)]
    both = _score(target, seqs, TreeBatch.trees([(tokens, parents), (other, [*range(-1, 200)])]))
    assert torch.equal(both[:100], single)
    for node in (0, 1, 40, 77, 99):
        path = [tokens[i] for i in path_to(parents, node)]
        plain = FakeSeq(100 + node, [*seqs[0].tokens, *path], max_length=6000)
        alone.prefill([plain], Needs())
        root = _score(alone, [plain], TreeBatch.chains([plain.tokens[-1:]]))
        alone.release(plain)
        assert torch.equal(root[0], single[node]), f"node {node} differs alone"
    other_text = FakeSeq(99, [*seqs[0].tokens[:-9], 5, *seqs[0].tokens[-8:]], max_length=6000)
    alone.prefill([other_text], Needs())
    changed = _score(alone, [other_text], TreeBatch.chains([other_text.tokens[-1:]]))
    assert not torch.equal(changed[0], single[0]), "one token of 5,000 changes nothing"


@pytest.mark.parametrize("name", ["large", "xl-context"])
def test_prompts_that_are_tiled_however_far_they_reach_leave_the_same_bits(name: str) -> None:
    need_cuda()
    tokens, found = _text(random.Random(3), 1950), list[Tensor]()
    for rows, some in ((MAX_ROWS + 1, tokens), (64, tokens), (64, [5, *tokens[1:]])):
        target = make_target(name, "cuda", torch.bfloat16, "triton")
        target.passes.tiled_prompts = rows
        seq = FakeSeq(1, some, max_length=2000)
        target.prefill([seq], Needs())
        found.append(_score(target, [seq], TreeBatch.chains([some[-1:]])))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2]), "one token of 1,950 changes nothing"


WIDTHS = [1, 2, 8, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 160, 192, 200, 224, 256, 300, 384, 400, 512, 768]


@pytest.mark.parametrize(
    "name",
    ["smollm2", "qwen3", "large", "odd", "wide-split", "wide-qwen2", "wide-qwen3", *GEMMA, *OTHERS, *SIZED, *IN_BYTES],
)
def test_a_row_has_the_same_bits_at_every_width(name: str) -> None:
    need_cuda()
    rng = random.Random(3)
    target = make_target(name, "cuda", torch.bfloat16, "triton")
    seqs = [FakeSeq(i, _text(rng, length), max_length=900) for i, length in enumerate([300, 2, 129, 600])]
    target.prefill(seqs, Needs())
    chains = [[seq.tokens[-1], *_text(rng, 255)] for seq in seqs]
    wanted = _score(target, seqs, TreeBatch.chains(chains))
    assert len(wanted) == MAX_ROWS
    for count in WIDTHS:
        some = [chain[: max(0, count - 256 * i)] for i, chain in enumerate(chains)]
        some = [chain for chain in some if chain]
        got = _score(target, seqs[: len(some)], TreeBatch.chains(some))
        assert torch.equal(got, wanted[:count]), f"{int((got != wanted[:count]).sum())} differ at {count} rows"


@pytest.mark.parametrize("name", ["smollm2", "large", "smollm2+fp8", "large+int8"])
def test_a_text_is_the_same_however_its_prompt_was_cut_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts alone or together, in passes of any size: what is read later is the same."""
    need_cuda()
    rng = random.Random(13)
    texts = [_text(rng, length) for length in (1, 70, 257, 900, 1400)]
    layers = 2 if name.startswith("large") else 3
    found = []
    for chunk, together in [(MAX_ROWS, True), (MAX_ROWS, False), (512, True), (200, True), (64, False)]:
        monkeypatch.setattr("forerun.models.cuda.target.CHUNK", chunk)
        target = make_target(name, "cuda", torch.bfloat16, "triton")
        seqs = [FakeSeq(i, text, max_length=1800) for i, text in enumerate(texts)]
        for some in [seqs] if together else [[seq] for seq in seqs]:
            target.prefill(some, Needs())
        scores = target.score(seqs, TreeBatch.chains([seq.tokens[-1:] for seq in seqs]), Needs((layers, -1)))
        assert scores.logits is not None
        found.append([scores.logits.clone(), *scores.hidden.values()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", ["large", "odd", "wide-qwen2", "wide-qwen3", *GEMMA[2:], *OTHERS[3:]])
def test_wide_products_have_the_bits_of_narrow_ones(name: str) -> None:
    """And would not have them in another order of sums."""
    need_cuda()
    from forerun.models.cuda.steps.fused import FusedSteps
    from tests.gpu.wide_products import NAMES, count_differing, fill

    target = make_target(name, "cuda", torch.bfloat16, "triton")
    steps = target.passes.steps
    assert isinstance(steps, FusedSteps)
    if steps.wide is None:
        pytest.skip("this GPU has no wide products")
    fill(target)
    for rows in [size for size in ROW_SIZES if size > 64]:
        for product in NAMES:
            assert count_differing(target, product, rows) == 0, f"{product} of {rows} rows"
    assert steps.tiles["down"].splits > 1
    tile = steps.wide.tiles["down", 256]
    steps.wide.tiles["down", 256] = replace(tile, outputs=128, rows=128, parallel=1, sequential=1)
    assert count_differing(target, "down", 256) > 0, "one sum and a sum of several have the same bits"


def test_plain_decoding_goes_the_way_of_one_large_chain() -> None:
    need_cuda()
    rng = random.Random(5)
    target = make_target("large", "cuda", torch.bfloat16, "triton")
    seq = FakeSeq(1, _text(rng, 120), max_length=400)
    target.prefill([seq], Needs())
    wanted = _score(target, [seq], TreeBatch.chains([[seq.tokens[-1], *(text := _text(rng, 20))]]))
    for i, token in enumerate(text):
        root = TreeBatch.chains([seq.tokens[-1:]])
        assert torch.equal(_score(target, [seq], root)[0], wanted[i]), f"token {i} differs"
        target.commit([seq], root, _nothing(root, token))
        seq.tokens.append(token)


def _nothing(trees: TreeBatch, bonus: int) -> Verdict:
    return Verdict.of([[]], [bonus], trees.tokens.device)


@pytest.mark.parametrize("name", ["smollm2", "mistral", "qwen3", "large", *GEMMA, *OTHERS, *SIZED])
def test_kernels_agree_with_plain_torch_on_random_trees(name: str) -> None:
    need_cuda()
    rng = random.Random(11)
    fused, plain = [make_target(name, "cuda", torch.bfloat16, kind) for kind in ("triton", "torch")]
    seqs = [FakeSeq(i, _text(rng, length), max_length=1800) for i, length in enumerate([1, 140, 1100])]
    trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 40) for seq in seqs])
    found = []
    for target in (fused, plain):
        target.prefill(seqs, Needs())
        found.append(_score(target, seqs, trees))
    off, spread = float((found[0] - found[1]).abs().max()), float(found[1].std())
    most = max(0.1 * spread, rounding(name, torch.tensor([seqs[1].tokens]), 40))
    assert off < most, f"off by {off:.3g}, at most {most:.3g}, at a spread of {spread:.3g}"
