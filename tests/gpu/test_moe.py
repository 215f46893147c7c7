"""Experts on the GPU decoder: plain steps against transformers on a CPU, the kernels against plain steps and for bits.

The kernels also run on a CPU in Triton's interpreter: TRITON_INTERPRET=1 python -m pytest tests/gpu/test_moe.py
"""

import importlib.util
import os
import random
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.build.engine import make_engine
from forerun.core.errors import UnsupportedModel
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Needs, Request, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.cuda.network import Run, check_supported
from forerun.models.cuda.plan import Size
from forerun.models.cuda.pool import make_steps
from forerun.models.cuda.steps.plain import times
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import Fours, WeightKind, pack, pack_fours
from forerun.models.layers import clamped_gate, route
from forerun.models.moe import MoeConfig
from forerun.testing import FakeSeq, check_target, path_to, random_tree
from forerun.verify.greedy import device_walk
from tests.exactness.harness import run
from tests.gpu.tiny import fused_on_a_cpu, need_cuda, weights_of

VOCAB = 200


_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_MANY = {"num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
_LATENT = {
    "kv_lora_rank": 32, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4,
    "n_routed_experts": 24, "num_experts_per_tok": 4, "n_shared_experts": 2, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "model_type": "qwen2_moe", "shared_expert_intermediate_size": 80, "mlp_only_layers": [1], **_MANY,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 32, "norm_topk_prob": True, **_MANY},
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9,
        "swiglu_limit": 0.8, "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "truncate": False,
            "rope_theta": 150.0,
        },
    },
    "z-glm4_moe": {
        "model_type": "glm4_moe", "n_routed_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.5, "norm_topk_prob": True, "first_k_dense_replace": 1, "use_qk_norm": True,
        "attention_bias": True, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
    },
    "zz-deepseek2": {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy", **_LATENT},
    "zz-deepseek3": {  # queries of a short row, groups of experts, scores that yarn scales
        "model_type": "deepseek_v3", "q_lora_rank": 48, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 1.0,
            "mscale_all_dim": 0.7, "rope_theta": 10_000.0,
        }, **_LATENT,
    },
    "zz-glm4_moe_lite": {  # heads in two programs, three quarters of whose rows are queries; as wide as in real models
        "model_type": "glm4_moe_lite", "hidden_size": 256, "num_attention_heads": 96, "q_lora_rank": 64,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        **_LATENT, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_key_value_heads": 96,
    },
    "zz-minimax_m2": {  # queries and keys are normed over all heads, a part of each rotates; no expert is shared
        "model_type": "minimax_m2", "num_local_experts": 24, "num_experts_per_tok": 4, "intermediate_size": 48,
        # transformers 5.17 does not read rotary_dim
        "rotary_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    },
    "large": {  # tiles of 64 outputs
        "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 1024,
        "intermediate_size": 4352, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
        "num_hidden_layers": 2,
    },
}  # fmt: skip
SMALL = [name for name in SHAPES if name not in ("large", "zz-glm4_moe_lite")]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def _limited(model: Any, limit: float) -> Any:
    """With gates and ups limited as the config of gpt-oss says: older releases of transformers have 7.0 anyway."""
    for module in model.modules():
        if hasattr(module, "limit"):
            module.limit = limit
    return model


def make_reference(name: str) -> Any:
    settings = {**_BASE, **SHAPES[name]}
    torch.manual_seed(sorted(SHAPES).index(name))
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **eager).float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.normal_(0.0, 0.6 / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 0.2)
            if key.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight", "router.weight")):
                weight.mul_(4.0)  # routings that are no near-ties
            if "norm" in key:
                weight.add_(1.0)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    return _limited(model, settings.get("swiglu_limit", 7.0))


def make_target(
    name: str,
    device: str,
    dtype: torch.dtype = torch.float32,
    kernels: Literal["auto", "triton", "torch"] = "auto",
    kind: WeightKind = "plain",
) -> CudaDecoder:
    config, weights = weights_of(make_reference(name))
    return CudaDecoder(
        config, weights, dtype=dtype, device=device, kv_slots=20_000, kernels=kernels, weight_kind=kind,
        greedy_walk=device_walk(torch.device(device)),
    )  # fmt: skip


def _text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", SMALL)
def test_plain_steps_make_a_target(name: str) -> None:
    needs, make = Needs((-1, 0, 1)), partial(make_target, name, "cpu")
    check_target(make, vocab_size=VOCAB, rounds=3, nodes=10, needs=needs, seed=len(name))


@pytest.mark.parametrize("name", SMALL)
def test_plain_steps_have_the_logits_of_transformers(name: str) -> None:
    model, target = make_reference(name), make_target(name, "cpu")
    _compare(model, target, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_have_the_logits_of_transformers(name: str) -> None:
    need_cuda()
    _compare(make_reference(name), make_target(name, "cuda", torch.bfloat16, "triton"), 0.15)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["zz-deepseek2", "zz-deepseek3"])
def test_kernels_in_the_interpreter_have_the_logits_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if _where().type == "cuda":
        pytest.skip("the test above does this on a GPU, in 16 bits")
    _compare(make_reference(name), fused_on_a_cpu(make_target(name, "cpu"), monkeypatch), 1e-4, 30)


def _compare(model: Any, target: CudaDecoder, most: float, length: int = 150) -> None:
    tokens = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(tokens, use_cache=False).logits[0, length - 11 :]
    seq = FakeSeq(1, tokens[0, : length - 10].tolist())
    target.prefill([seq], Needs())
    got = target.score([seq], TreeBatch.chains([tokens[0, length - 11 :].tolist()]), Needs()).required_logits.cpu()
    off = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(off.median()) < most  # in 16 bits, a near-tie of the router may fall otherwise


def test_padding_wakes_no_expert() -> None:
    """Rows of padding are never read, so what they pick must cost nothing: their stream stays as it was."""
    target = make_target("mixtral", "cpu")
    run_of_six = Run.of(Size(6, 8, 1), target.buffers.ints)
    run_of_six.slots[:] = torch.tensor([4, 9, -1, 0, 7, -1], dtype=torch.int32)
    target.buffers.x[:6] = 1.0
    steps = make_steps("torch", target.model, target.buffers, target.kv.data)
    steps.leave_mlp(run_of_six, 0)
    changed = (target.buffers.x[:6] != 1.0).any(-1).tolist()
    assert changed == [True, True, False, True, True, False]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])])
def test_experts_that_a_pass_reads_are_counted(device: str) -> None:
    """Those of the last pass, by layer, whatever the padding; none in layers without experts."""
    need_cuda(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    target, seq = make_target("qwen2_moe", device, dtype), FakeSeq(1, _text(random.Random(3), 40))
    target.prefill([seq], Needs())
    for nodes, most in ((1, 4), (3, 12), (50, 24)):
        target.score([seq], TreeBatch.chains([[seq.tokens[-1], *range(nodes - 1)]]), Needs())
        first, dense, last = target.passes.steps.active_experts()
        assert dense == 0
        assert 4 <= first <= most
        assert 4 <= last <= most
        assert nodes == 1 or max(first, last) > 4
    target.release(seq)
    assert make_target("mixtral", device, dtype).passes.steps.active_experts() == [0, 0, 0]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", SMALL)
def test_texts_are_those_of_generate(name: str) -> None:
    model, target, rng = make_reference(name), make_target(name, "cpu"), random.Random(5)
    prompts = [tuple(_text(rng, length)) for length in (6, 11)]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        wanted.append(out[0, len(prompt) :].tolist())
    requests = [Request(prompt, SamplingParams(max_tokens=16)) for prompt in prompts]
    for drafter in ("none", "ngram"):
        engine = make_engine(target, frozenset(), SpeculativeConfig(drafter, budget=6, controller="fixed"))
        assert run(engine, requests)[0] == wanted


def test_widths_that_tiles_do_not_fit_are_refused() -> None:
    settings = {**_BASE, **SHAPES["qwen3_moe"], "moe_intermediate_size": 40}
    with pytest.raises(UnsupportedModel, match="multiples of 16"):
        check_supported(DecoderConfig.from_hf(settings))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_make_a_target(name: str) -> None:
    need_cuda()
    check_target(  # bits do not depend on company, so the tolerance is zero
        lambda: make_target(name, "cuda", torch.bfloat16, "triton"),
        vocab_size=VOCAB,
        rounds=4,
        nodes=12,
        needs=Needs((-1, 1)),
        seed=len(name),
        atol=0.0,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    need_cuda()
    rng = random.Random(7)
    target, alone = (make_target(name, "cuda", torch.bfloat16, "triton") for _ in range(2))
    seqs = [FakeSeq(i, _text(rng, length), max_length=2000) for i, length in enumerate([2, 129, 700, 60])]
    target.prefill(seqs, Needs())
    for nodes in (1, 7, 24, 100):
        grown = [random_tree(rng, seq.tokens[-1], VOCAB, nodes) for seq in seqs]
        trees = TreeBatch.trees(grown)
        logits = target.score(seqs, trees, Needs()).required_logits.clone()
        for b, (seq, (tokens, parents)) in enumerate(zip(seqs, grown, strict=True)):
            node = rng.randrange(len(tokens))
            path = [tokens[i] for i in path_to(parents, node)]
            plain = FakeSeq(100, [*seq.tokens, *path], max_length=2000)
            alone.prefill([plain], Needs())
            root = alone.score([plain], TreeBatch.chains([plain.tokens[-1:]]), Needs()).required_logits
            assert torch.equal(root[0], logits[trees.starts[b] + node]), (nodes, b, node)
            alone.release(plain)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_of_one_byte_come_near(kind: WeightKind) -> None:
    need_cuda()
    _compare(make_reference("mixtral"), make_target("mixtral", "cuda", torch.bfloat16, "triton", kind), 0.25)


# the kernels one by one, in the interpreter or on a GPU


def _where() -> torch.device:
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        pytest.skip("needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)")
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("experts", "each", "rows", "groups"),
    [(5, 2, 1, (1, 1)), (24, 4, 7, (1, 1)), (24, 4, 33, (4, 2)), (24, 3, 9, (8, 1)), (3, 3, 70, (1, 1))],
)
@pytest.mark.parametrize(
    ("renormalise", "biased", "sigmoid"),
    [(True, False, False), (False, False, False), (True, True, False), (True, False, True), (False, False, True)],
)
def test_routing_kernels(
    experts: int, each: int, rows: int, groups: tuple[int, int], renormalise: bool, biased: bool, sigmoid: bool
) -> None:
    device, width = _where(), 48
    from forerun.models.cuda.kernels import experts as kernels

    torch.manual_seed(rows)
    x, norm = torch.randn(rows, width, device=device), torch.rand(width, device=device) + 0.5
    router = torch.randn(experts + 1, width, device=device)
    before, bias = torch.randn(width, device=device), 3 * torch.randn(experts + 1, device=device)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    slots[rows // 2 + 1 :: 5] = -1  # padding
    columns, wide = 1 << experts.bit_length(), 1 << (experts - 1).bit_length()
    normed, logits = torch.zeros_like(x), torch.zeros(rows, columns, device=device)
    picked = torch.zeros(rows * each, dtype=torch.int32, device=device)
    weights, gates = torch.zeros(rows * each, device=device), torch.zeros(rows, device=device)
    order, counts = picked.new_full((experts + rows * each, 2), -1), picked.new_zeros(experts)
    kernels.route[(rows, -(-(experts + 1) // 4))](
        x, norm, router, before, bias, normed, logits, 1e-5, OUTPUTS=experts + 1, OUTPUTS_UP=columns, WIDTH=width,
        UP=64, EB=4, BIASES=biased, PDL=False,
    )  # fmt: skip
    correction, scale = torch.randn(experts, device=device), 1.7 if sigmoid else 1.0
    kernels.pick[(rows,)](
        logits, slots, correction, picked, weights, gates, scale, E=experts, E_UP=wide, OUTPUTS_UP=columns, EACH=each,
        EACH_UP=1 << (each - 1).bit_length(), RENORMALISE=renormalise, SIGMOID=sigmoid, SHARED=True,
        GROUPS=groups[0], KEPT=groups[1], PDL=False,
    )  # fmt: skip
    spread = int(rows * each > experts)
    blocks = picked.new_full((1 + experts + rows * each, 2), -1)
    kernels.sort_pairs[(experts,)](
        picked, order, counts, blocks, rows * each, 2, spread, E=experts, BLOCK=32, PDL=False
    )
    wanted = torch.nn.functional.rms_norm(x + before if biased else x, (width,), norm, 1e-5)
    torch.testing.assert_close(normed, wanted, atol=1e-5, rtol=1e-5)
    moe = MoeConfig(experts, each, 1, renormalise, None, sigmoid=sigmoid, scale=scale, groups=groups)
    own = bias[:experts] if biased else None
    law, chosen = route(wanted, router[:experts], moe, own, correction if sigmoid else None)
    for m in range(rows):
        found = dict(zip(picked.view(rows, each)[m].tolist(), weights.view(rows, each)[m].tolist(), strict=True))
        if int(slots[m]) < 0:
            assert set(found) == {experts}
            continue
        assert sorted(found) == chosen[m].tolist()
        torch.testing.assert_close([found[e] for e in sorted(found)], law[m].tolist(), atol=1e-5, rtol=1e-4)
    opened = wanted @ router[-1] + (bias[-1] if biased else 0.0)
    torch.testing.assert_close(gates, opened.sigmoid(), atol=1e-5, rtol=1e-4)
    live = [p for p, e in enumerate(picked.tolist()) if e < experts]
    assert counts.tolist() == torch.bincount(picked[live].long(), minlength=experts).tolist()
    places = int(blocks[0, 0])
    assert places <= (rows * each // 2 + experts if spread else rows * each)
    found = list[int]()
    for (expert, own), some in zip(blocks[1 : 1 + places].tolist(), order.tolist(), strict=False):
        assert 0 <= own <= 2
        assert all(int(picked[p]) == expert for p in some[:own])
        found += some[:own]
    assert found == sorted(live, key=lambda p: (int(picked[p]), p))
    assert bool((blocks[1 + places :] == -1).all())


def blocks_of(picks: Tensor, experts: int, size: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Pairs and blocks as `sort_pairs` cuts them up, with places that have none."""
    order, found = list[list[int]](), [[0, 0]]
    for expert in range(experts):
        pairs = (picks == expert).nonzero()[:, 0].tolist()
        parts = [*(pairs[first : first + size] for first in range(0, len(pairs), size)), list[int]()]
        found += [[expert, len(part)] for part in parts]
        order += [part + [7] * (size - len(part)) for part in parts]
    found[0][0] = len(found) - 1
    blocks = [*found, [0, size]]  # the last is nobody's
    return tuple(torch.tensor(one, dtype=torch.int32, device=device) for one in ([*order, order[0]], blocks))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["plain", "int8"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("limit", [0.0, 0.6])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_grouped_product(gated: bool, block: int, kind: WeightKind, limit: float) -> None:
    """With a limit also with biases, as gpt-oss has both."""
    device = _where()
    from forerun.models.cuda.kernels import experts as kernels

    torch.manual_seed(3)
    experts, each, rows, outputs, depth = 4, 2 if gated else 1, 21, 32, 48
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    given = torch.randn(rows, depth, device=device).to(dtype)
    stacked = (torch.randn(experts * outputs, depth, device=device) / 7).to(dtype)
    weight = pack(stacked, kind)
    picks = torch.stack([torch.randperm(experts - 1)[:each] for _ in range(rows)]).flatten()  # nobody picks the last
    order, blocks = blocks_of(picks, experts, block, device)
    columns = outputs // 2 if gated else outputs
    out = torch.full((rows * each, columns), 7.0, device=device, dtype=dtype if gated else torch.float32)
    data, scales = (weight, blocks) if isinstance(weight, Tensor) else (weight.data, weight.scales)
    bias = torch.randn(experts * outputs, device=device)
    kernels.grouped[len(blocks) - 1, outputs // 16](
        given, data, scales, bias, order, blocks, out, 0, N=outputs, K=depth, BN=16, BK=16, MT=block, EACH=each,
        GATED=gated, LIMIT=limit, ALPHA=1.702, W8=kind != "plain", W4=False, BIASES=limit > 0, PDL=False,
    )  # fmt: skip
    wide = stacked if isinstance(weight, Tensor) else weight[torch.arange(experts * outputs, device=device)]
    for pair, expert in enumerate(picks.tolist()):
        row = times(given[pair // each, None].float(), wide[expert * outputs : (expert + 1) * outputs].float())[0]
        row = row + bias[expert * outputs : (expert + 1) * outputs] if limit else row
        wanted = torch.nn.functional.silu(row[0::2]) * row[1::2] if gated else row
        if gated and limit:
            wanted = clamped_gate(torch.cat((row[0::2], row[1::2]))[None], limit, 1.702)[0]
        most = 1e-5 if INTERPRETED else 0.03
        torch.testing.assert_close(out[pair].float(), wanted, atol=most, rtol=most)


def of_four_bits(outputs: int, depth: int, device: torch.device | str = "cpu") -> Tensor:
    """Weights in bfloat16 that MXFP4 has exactly."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[torch.randint(8, (outputs, depth // 32, 32))]
    signs, scales = torch.randint(2, numbers.shape) * 2 - 1, torch.randint(-9, -2, (outputs, depth // 32, 1))
    return (numbers * signs).ldexp(scales).view(outputs, depth).to(device, torch.bfloat16)


def test_four_bits_are_packed_only_where_nothing_is_lost() -> None:
    torch.manual_seed(1)
    weight = of_four_bits(48, 192)
    weight[3], weight[4, :32], weight[5] = 0.0, weight[4, :32] * 2.0**-70, weight[5] * 2.0**5
    packed = pack_fours(weight)
    assert packed is not None
    assert packed.shape == weight.shape
    assert packed.nbytes * 16 == 48 * 256 * 9, "steps are of 128 inputs"
    assert torch.equal(packed[:], weight)
    assert torch.equal(packed[20:37], weight[20:37])
    for place, number in (((7, 1), 5.0), ((7, 1), 2.0**-40), ((0, 0), 2.0**9)):  # no such number, step or scale
        other = weight.clone()
        other[7, :32] = 4.0
        assert pack_fours(other) is not None
        other[place] = number
        assert pack_fours(other) is None
    assert pack_fours(weight.float()) is None
    assert pack_fours(weight[:40]) is None
    assert pack_fours(weight[:, :80]) is None


@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize(("outputs", "tile"), [(32, 16), (128, 64)])
def test_a_product_with_four_bits_has_the_bits_of_the_same_numbers(outputs: int, tile: int, block: int) -> None:
    device = _where()
    from forerun.models.cuda.kernels import experts as kernels

    torch.manual_seed(block)
    experts, rows, depth = 3, 21, 352  # not a number of whole steps
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    given = torch.randn(rows, depth, device=device).to(dtype)
    wide = of_four_bits(experts * outputs, depth, device)
    fours = pack_fours(wide)
    assert fours is not None
    picks = torch.arange(rows) % (experts - 1)  # nobody picks the last
    found = list[Tensor]()
    for four, own in ((True, block), (True, 64), (False, block)):
        order, blocks = blocks_of(picks, experts, own, device)
        data, scales = (fours.data, fours.scales) if four else (wide.to(dtype), blocks)
        found.append(torch.full((rows, outputs), 7.0, device=device))
        kernels.grouped[len(blocks) - 1, outputs // tile](
            given, data, scales, scales, order, blocks, found[-1], 0, N=outputs, K=depth, BN=tile, BK=32,
            MT=own, EACH=1, GATED=False, LIMIT=0.0, ALPHA=1.0, W8=False, W4=four, BIASES=False, PDL=False,
        )  # fmt: skip
    torch.testing.assert_close(found[0], found[2], atol=1e-5, rtol=1e-5)
    if not INTERPRETED:  # numpy's sums have another order
        assert torch.equal(found[0], found[1])
        # tiles of few outputs take another instruction, which adds up numbers that come as bytes in another order
        assert torch.equal(found[0], found[2]) or tile < 64
    assert not torch.equal(found[0], found[0].round())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])])
def test_experts_of_four_bits_stay_packed_and_write_the_same(device: str) -> None:
    """Also in any company; a checkpoint that was not rounded to four bits stays in 16."""
    need_cuda(device)
    settings = {**_BASE, **SHAPES["gpt_oss"], "hidden_size": 128, "intermediate_size": 64}
    family = settings.pop("model_type")
    torch.manual_seed(2)
    config_of = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config_of, attn_implementation="eager").bfloat16().eval()
    _limited(model, settings["swiglu_limit"])
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith(("gate_up_proj", "down_proj")):  # [E, inputs, outputs]
                some = [of_four_bits(weight.shape[2], weight.shape[1]).t() for _ in range(len(weight))]
                weight.copy_(torch.stack(some))
            else:
                weight.normal_(0.0, 0.3 / weight.shape[-1] ** 0.5).add_(1.0 if "norm" in key else 0.0)
    config, weights = weights_of(model)
    texts, found = [FakeSeq(i, _text(random.Random(i), 40 + 60 * i)) for i in range(3)], list[Tensor]()
    for kept in (True, False):
        given = weights if kept else {name: weight * (1 + 2.0**-7) for name, weight in weights.items()}
        target = CudaDecoder(
            config, given, dtype=torch.bfloat16, device=device, kv_slots=20_000,
            kernels="triton" if device == "cuda" else "torch", greedy_walk=device_walk(torch.device(device)),
        )  # fmt: skip
        experts = target.model.layers[0].experts
        assert experts is not None
        assert isinstance(experts.gate_up, Fours) == isinstance(experts.down, Fours) == kept
        if not kept:
            break
        for together in (texts, texts[1:2]):
            target.prefill(together, Needs())
            chains = TreeBatch.chains([[seq.tokens[-1], 5, 6] for seq in together])
            found.append(target.score(together, chains, Needs()).required_logits.clone())
            for seq in together:
                target.release(seq)
    assert torch.equal(found[0][3:6], found[1]) or device == "cpu"
    torch.testing.assert_close(found[0][3:6], found[1], atol=0.05, rtol=0.05)
    with torch.no_grad():
        tokens = torch.tensor([[*texts[1].tokens, 5, 6]])
        wanted = model.float()(tokens, use_cache=False).logits[0, -3:]
    off = (found[1].cpu() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(off.median()) < 0.1


@pytest.mark.parametrize("biased", [False, True])
def test_combining_kernel(biased: bool) -> None:
    device, width, rows, each, tile = _where(), 48, 6, 3, 16
    from forerun.models.cuda.kernels import experts as kernels

    torch.manual_seed(4)
    found, x = torch.randn(rows * each, width, device=device), torch.randn(rows, width, device=device)
    weights, gates = torch.rand(rows * each, device=device), torch.rand(rows, device=device)
    shared, norm = torch.randn(rows, width, device=device), torch.rand(width, device=device)
    slots = torch.tensor([3, -1, 0, 9, 4, -1], dtype=torch.int32, device=device)
    live = (slots >= 0)[:, None]
    found[1 * each : 2 * each] = float("nan")  # what nobody wrote
    sums = (found.view(rows, each, width) * weights.view(rows, each, 1)).sum(1) + gates[:, None] * shared
    before = torch.randn(width, device=device)
    wanted = x + torch.where(live, sums + before if biased else sums, 0.0)
    out, inverses = torch.zeros_like(x), torch.zeros(rows, device=device)
    squares = torch.zeros(rows, 32, dtype=torch.float64, device=device)
    kernels.combine[(rows,)](
        found, weights, shared, gates, before, slots, x, out, squares, inverses, norm, 1e-5, WIDTH=width, UP=64,
        BN=tile, TILES_UP=32, EACH=each, SHARED=True, BIASES=biased, PDL=False,
    )  # fmt: skip
    torch.testing.assert_close(x, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, wanted * norm, atol=1e-5, rtol=1e-5)
    tiles = wanted.double().square().view(rows, -1, tile).sum(-1)
    torch.testing.assert_close(squares[:, : width // tile], tiles, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(inverses, (wanted.square().mean(-1) + 1e-5).rsqrt(), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 64, 512])
def test_sums_of_squares_are_of_the_row_as_stored(width: int) -> None:
    """Several threads hold each column of a narrow row; one that read it late added the experts a second time."""
    need_cuda()
    from forerun.models.cuda.kernels import experts as kernels

    torch.manual_seed(4)
    rows, each, tile, up = 1024, 2, 16, width
    found, start = torch.randn(rows * each, width, device="cuda"), torch.randn(rows, width, device="cuda")
    weights, norm = torch.rand(rows * each, device="cuda"), torch.rand(width, device="cuda")
    slots, inverses = torch.arange(rows, dtype=torch.int32, device="cuda"), torch.zeros(rows, device="cuda")
    squares = torch.zeros(rows, 32, dtype=torch.float64, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    x, out = torch.empty_like(start), torch.empty_like(start)
    for _ in range(300):  # a late thread is rare: about one row in a thousand
        x.copy_(start)
        kernels.combine[(rows,)](
            found, weights, found, inverses, norm, slots, x, out, squares, inverses, norm, 1e-5, WIDTH=width, UP=up,
            BN=tile, TILES_UP=32, EACH=each, SHARED=False, BIASES=False, PDL=False, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
        wanted = x.double().square().view(rows, -1, tile).sum(-1)
        wrong += ((squares[:, : width // tile] - wanted).abs() > 1e-9 * wanted).any(-1).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "z-glm4_moe", "zz-deepseek3"])
def test_a_layer_by_kernels_is_the_layer_in_torch(name: str) -> None:
    """All launches of a layer with experts, padding included."""
    device = _where()
    from forerun.models.cuda.steps.experts import ExpertBuffers, Left

    rows, tile, dtype = 6, 16, torch.float32 if INTERPRETED else torch.bfloat16
    plain = make_target(name, str(device), dtype, "torch")
    model, buffers = plain.model, plain.buffers
    run = Run.of(Size(rows, 8, 1), buffers.ints)
    run.slots[:] = torch.tensor([4, 9, -1, 0, 7, -1], dtype=torch.int32)
    steps = make_steps("torch", model, buffers, plain.kv.data)
    start = torch.randn(rows, model.config.width, generator=torch.Generator().manual_seed(2)).to(device)
    index = model.config.sparse.index(True)
    layer, eps = model.layers[index], model.config.norm_eps
    assert layer.experts is not None
    buffers.x[:rows] = start
    steps.gate(run, index)
    steps.leave_mlp(run, index)
    wanted = buffers.x[:rows].clone()
    room, x = ExpertBuffers(model, pdl=False), start.clone()
    squares = torch.zeros(rows, 32, dtype=torch.float64, device=device)
    left = Left(
        torch.zeros(rows, x.shape[1], dtype=dtype, device=device), squares, squares.new_zeros(rows).float(), tile
    )
    room.enter(run, x, layer.mlp_norm, layer.experts, eps, index)
    room.leave(run, x, model.next_norm(index), layer.experts, eps, left)
    assert room.active_experts() == steps.active_experts()
    assert room.active_experts()[index] > 2
    most = 1e-4 if INTERPRETED else 0.1
    torch.testing.assert_close(x, wanted, atol=most, rtol=most)
    assert torch.equal(x[2], start[2])  # padding stays
    assert not torch.equal(x[1], start[1])
    torch.testing.assert_close(squares.sum(1).float(), wanted.square().sum(1), atol=most, rtol=most)
