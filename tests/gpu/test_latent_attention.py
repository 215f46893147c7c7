"""The kernels of latent attention: what a node finds, by programs that share splits and by programs that have all.

Runs on a GPU, or in Triton's interpreter: TRITON_INTERPRET=1 python -m pytest tests/gpu/test_latent_attention.py
"""

import math

import pytest
import torch
from torch import Tensor

from forerun.core.tree import chain_of, topology_of
from forerun.models.config import DecoderConfig
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import MAX_ROWS, Span, nodes_per_group, plan_pass, split_start
from forerun.models.pages import slots_of
from tests.gpu.test_attention import PAGE, _ints, must_agree
from tests.gpu.tiny import where_kernels_run

RANK, TURNED, SLOTS = 32, 16, 4096
pytestmark = pytest.mark.gpu


def config_of(heads: int) -> DecoderConfig:
    return DecoderConfig.from_hf(
        {
            "model_type": "deepseek_v3", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": None,
            "kv_lora_rank": RANK, "qk_nope_head_dim": 16, "qk_rope_head_dim": TURNED, "v_head_dim": 16, "head_dim": 16,
            "max_position_embeddings": 2048, "hidden_act": "silu", "rope_theta": 1e4, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        }
    )  # fmt: skip


def numbers(heads: int) -> tuple[Tensor, Tensor]:
    device = where_kernels_run()
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    queries = torch.randn(MAX_ROWS, heads * (RANK + TURNED), device=device).to(dtype)
    return queries, torch.randn(SLOTS, RANK + TURNED, device=device).to(dtype)


def by_hand(spans: list[Span], queries: Tensor, store: Tensor, config: DecoderConfig) -> Tensor:
    found, row = [], 0
    for span in spans:
        slots = slots_of(span.pages, 0, span.length + len(span.tokens))
        for path in span.shape.paths:
            seen = store[[*slots[: span.length], *(slots[span.length + node] for node in path)]].float()
            asked = queries[row].view(config.heads, -1).float()
            law = torch.softmax(asked @ seen.t() * config.attention_scale, -1)
            found.append((law @ seen[:, :RANK]).flatten())
            row += 1
    return torch.stack(found)


@pytest.mark.parametrize(("heads", "lengths"), [(6, (255, 3, 700)), (96, (130,))])  # 96: in two programs
def test_programs_that_share_splits_find_what_programs_of_whole_groups_find(
    heads: int, lengths: tuple[int, ...]
) -> None:
    """Of trees whose paths go on in the next split, behind short texts and long ones, and of a chunk of a prompt."""
    where_kernels_run()
    from forerun.models.cuda.steps.latent import LatentAttention

    parents = (-1, 0, 1, 2, 3, 1, 0, 4, 0)
    spans = [
        Span([*range(9)], topology_of(parents), [*range(1 + 14 * i, 2 + 14 * i + (length + 9) // PAGE)], length)
        for i, length in enumerate(lengths)
    ]
    spans.append(Span([*range(20)], chain_of(20), [50, 52, 51], 120))
    plan, config = plan_pass(spans, nodes_per_group(heads, 1, RANK)), config_of(heads)
    queries, store = numbers(heads)
    found, run = list[Tensor](), Run.of(plan.size, _ints(plan).to(queries.device))
    for processors in (1, 10_000):
        attention = LatentAttention(config, split_start(plan.size.splits) - MAX_ROWS - 1, queries.device, pdl=False)
        for part in (attention.parts, attention.tops, attention.sums):
            part.fill_(math.nan)  # what nobody wrote shows
        attention.processors = processors
        out = torch.full((MAX_ROWS, heads * RANK), math.nan, dtype=queries.dtype, device=queries.device)
        attention.attend_latents(run, queries, store, out)
        found.append(out[: plan.rows])
    must_agree(found[0], found[1])
    wanted = by_hand(spans, queries, store, config)
    torch.testing.assert_close(found[0].float(), wanted, atol=2e-2, rtol=2e-2)
    changed = store.clone()
    changed[PAGE + 7] += 1.0  # one token of the first text
    other = by_hand(spans, queries, changed, config)
    assert float((other - wanted)[:9].abs().max()) > 2e-2, "a token that is read wrongly would not show"
