"""Block drafters against a plain reference of every configuration; public layouts of files; texts as without drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from forerun.build.engine import make_engine
from forerun.core.errors import DamagedFile, InvalidInput
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.drafters.heads.block import BlockDrafter, BlockSteps, candidates_of, load_block
from forerun.drafters.heads.block_config import KINDS, BlockConfig, BlockKind
from forerun.drafters.heads.block_head import BlockHead, read_block, write_block
from forerun.drafters.heads.formats import read_config, write_config
from forerun.testing import FakeSeq, TableLM
from forerun.train.export import export_head
from tests.drafters.rounds import observe_prompts
from tests.drafters.tiny_heads import BLOCKS, block_config, block_weights, save_head

VOCAB = 24
NAMES = (*KINDS, *BLOCKS)
Weights = dict[str, Tensor]


def kind_of(name: str) -> BlockKind:
    return next(kind for kind in KINDS if kind == name.partition(" ")[0])


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, places: Tensor, theta: float) -> Tensor:
    """[N, H, Dh] by halves, as checkpoints order them."""
    dims = x.shape[-1]
    angles = places[:, None].float() * theta ** (-torch.arange(0, dims, 2).float() / dims)
    cos, sin = (part[:, None].repeat(1, 1, 2) for part in (angles.cos(), angles.sin()))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def convolved(x: Tensor, factors: Tensor) -> Tensor:
    """Row i is a sum over taps t of factors[i, t] times row i - t; what is before the block is nothing."""
    out = torch.zeros_like(x)
    for i in range(len(x)):
        for tap in range(min(i + 1, factors.shape[1])):
            out[i] += factors[i, tap] * x[i - tap]
    return out


class Reference:
    """One sequence, one row at a time where order matters, nothing cached."""

    def __init__(self, config: BlockConfig, weights: Weights) -> None:
        self.c, self.w = config, {name: weight.float() for name, weight in weights.items()}

    def logits(self, tokens: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """[levels, Vd] by position alone and the rows behind them, after tokens [n] with features [n - 1, F]."""
        c, w = self.c, self.w
        fused = features @ w["fc.weight"].t()
        block = [tokens[-1], *[c.mask_token] * (c.rows - 1)]
        if c.kind == "peagle":
            mask = (w["fc.weight"] @ w["mask_hidden"])[None].expand(c.rows - 1, -1)
            ids, x = [*tokens[1:], *block[1:]], torch.cat((fused, mask))
            normed = norm(x, w["layers.0.hidden_norm.weight"], c.norm_eps)
            said = norm(w["embed_tokens.weight"][ids], w["layers.0.input_layernorm.weight"], c.norm_eps)
            into, x = torch.cat((said, normed), -1), normed if c.norm_before_residual else x
            context, places = None, torch.arange(len(ids))
        else:
            context, x = norm(fused, w["hidden_norm.weight"], c.norm_eps), w["embed_tokens.weight"][block]
            into, places = None, len(context) + torch.arange(c.rows)
        for i in range(c.depth):
            x = self._layer(i, x, into if i == 0 else None, context, places)
        rows = norm(x, w["norm.weight"], c.norm_eps)[-c.rows :][c.first :]
        return rows @ w["lm_head.weight"].t(), rows

    def _layer(self, i: int, x: Tensor, into: Tensor | None, context: Tensor | None, places: Tensor) -> Tensor:
        c, w = self.c, {n.removeprefix(f"layers.{i}."): t for n, t in self.w.items() if n.startswith(f"layers.{i}.")}

        def project(rows: Tensor, name: str, at: Tensor) -> Tensor:
            heads = (rows @ w[f"self_attn.{name}_proj.weight"].t()).view(len(rows), -1, c.head_dim)
            if name != "v" and f"self_attn.{name}_norm.weight" in w:
                heads = norm(heads, w[f"self_attn.{name}_norm.weight"], c.norm_eps)
            return heads if name == "v" else turned(heads, at, c.rope_theta)

        def around(rows: Tensor, owner: str) -> tuple[Tensor, Tensor] | tuple[None, None]:
            if not c.taps:
                return None, None
            added = (rows @ w[f"{owner}.kernel_projection.weight"].t()).view(len(rows), 2, c.taps, -1)
            whole = added.repeat_interleave(c.group, -1) + w[f"{owner}.base_kernel"]
            return whole[:, 0], whole[:, 1]

        rows = norm(x, w["input_layernorm.weight"], c.norm_eps) if into is None else into
        before, behind = around(rows, "attention_conv")
        rows = rows if before is None else convolved(rows, before)
        q, k, v = (project(rows, name, places) for name in "qkv")
        at = places
        if context is not None:
            at = torch.cat((torch.arange(len(context)), places))
            k = torch.cat((project(context, "k", torch.arange(len(context))), k))
            v = torch.cat((project(context, "v", torch.arange(len(context))), v))
        window, causal = (c.window if c.windowed and c.windowed[i] else 0), c.causal
        found = torch.zeros(len(x), c.heads, c.head_dim)
        for row, place in enumerate(places.tolist()):
            seen = torch.ones(len(at), dtype=torch.bool)
            if causal == "all" or (causal == "windowed" and window):
                seen &= at <= place
            if window:
                seen &= (at - place).abs() < window
            for head in range(c.heads):
                own = head // (c.heads // c.kv_heads)
                shares = (k[seen, own] @ q[row, head] / c.head_dim**0.5).softmax(-1)
                found[row, head] = shares @ v[seen, own]
        out = found.flatten(1) @ w["self_attn.o_proj.weight"].t()
        x = x + (out if behind is None else convolved(out, behind))
        rows = norm(x, w["post_attention_layernorm.weight"], c.norm_eps)
        before, behind = around(rows, "mlp_conv")
        rows = rows if before is None else convolved(rows, before)
        inner = F.silu(rows @ w["mlp.gate_proj.weight"].t()) * (rows @ w["mlp.up_proj.weight"].t())
        out = inner @ w["mlp.down_proj.weight"].t()
        return x + (out if behind is None else convolved(out, behind))

    def corrected(self, logits: Tensor, rows: Tensor, level: int, before: int) -> Tensor:
        """[Vd] of a level behind a token."""
        c, w = self.c, self.w
        if c.markov == "none":
            return logits[level]
        owner = "candidate_selector" if c.markov == "selector" else "markov_head"
        known = w[f"{owner}.down.weight"] @ w["embed_tokens.weight"][before]
        if c.markov == "selector":
            known = known * (w[f"{owner}.hidden_projection.weight"] @ rows[level])
        if c.markov == "gated":
            both = torch.cat((rows[level], known))
            known = known * torch.sigmoid(w[f"{owner}.gate_proj.weight"] @ both + w[f"{owner}.gate_proj.bias"])
        moved = logits[level] + w["lm_head.weight"] @ w[f"{owner}.up.weight"] @ known
        if c.markov == "selector":
            kept = logits[level].topk(c.candidates).indices
            return torch.full_like(moved, -torch.inf).index_copy(0, kept, moved[kept])
        return moved


def made(name: str, **more: Any) -> tuple[BlockConfig, Weights]:
    config = block_config(vocab=VOCAB, **{**BLOCKS.get(name, {"kind": name}), **more})
    return config, block_weights(config, seed=5)


def shown(drafter: BlockDrafter, texts: list[list[int]]) -> tuple[list[FakeSeq], list[Tensor]]:
    """Sequences whose prompts were observed, and the features [n - 1, F] of each."""
    seqs = [FakeSeq(i, list(text)) for i, text in enumerate(texts)]
    observe_prompts(drafter, TableLM(VOCAB), seqs)
    return seqs, [torch.cat(drafter._sequences[seq.id].features).clone() for seq in seqs]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_pass_is_that_of_the_reference(name: str) -> None:
    """Texts of other lengths side by side, longer than every window; each level behind some token."""
    config, weights = made(name)
    drafter = BlockDrafter(BlockHead(config, weights, None))
    texts = [[i * 7 % VOCAB for i in range(13)], [3, 5], [i * 5 % VOCAB for i in range(8)]]
    seqs, features = shown(drafter, texts)
    drafter._runner.read(seqs, [drafter._sequences[seq.id] for seq in seqs])
    rows = drafter._runner.begin(seqs)
    steps = BlockSteps(drafter.head, rows, seqs)
    reference, path = Reference(config, weights), [4, 9, 1, 17, 2, 6]
    wanted = [reference.logits(text, some) for text, some in zip(texts, features, strict=True)]
    for level in range(config.levels):
        tokens = torch.tensor([[path[level - 1]]] * 3)
        found = steps.after(torch.zeros(3, 1, dtype=torch.long), tokens)[:, 0] if level else steps.first()
        for b, (logits, states) in enumerate(wanted):
            before = path[level - 1] if level else texts[b][-1]
            torch.testing.assert_close(
                found[b], reference.corrected(logits, states, level, before), rtol=1e-3, atol=1e-3
            )
    # and what trees are grown from: the likeliest of each level, corrected behind each of the level before
    scored, tokens = candidates_of(drafter.head, rows, torch.tensor([text[-1] for text in texts]))
    for b, (logits, _) in enumerate(wanted):
        count = min(config.candidates, VOCAB)
        assert tokens[b].tolist() == [level.topk(count).indices.tolist() for level in logits]
    assert scored.shape[-1] == min(config.candidates, VOCAB)


@pytest.mark.parametrize("part", ["causal", "window", "taps", "markov"])
@torch.no_grad()
def test_negative_control_a_part_left_out_changes_the_draft(part: str) -> None:
    name = {"causal": "dflash causal", "window": "dflash windowed", "taps": "dflash 2", "markov": "dspark gated"}[part]
    config, weights = made(name)
    without = {"causal": {"causal": "none"}, "window": {"window": 0, "windowed": ()}, "taps": {"taps": 0},
               "markov": {"markov": "vanilla"}}[part]  # fmt: skip
    drafts = []
    for one in (config, replace(config, **without)):  # type: ignore[arg-type]
        kept = {n: w for n, w in weights.items() if part != "markov" or one is config or "head.gate" not in n}
        drafter = BlockDrafter(BlockHead(one, kept, None))
        seqs, _ = shown(drafter, [[i * 7 % VOCAB for i in range(13)]])
        drafter._runner.read(seqs, [drafter._sequences[0]])
        rows = drafter._runner.begin(seqs)
        drafts.append(BlockSteps(drafter.head, rows, seqs).first() if part == "markov" else rows)
    assert not torch.allclose(drafts[0], drafts[1], atol=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_those_without_drafts(name: str, tmp_path: Path) -> None:
    """Greedy, and at temperatures with a seed, several at once."""
    folder = save_head(name, tmp_path, VOCAB)
    prompts = [(1, 2, 3, 1, 2), (9, 9, 4), tuple(range(12))]
    settings = [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.9, seed=3),
                SamplingParams(max_tokens=24, temperature=1.3, top_p=0.8, seed=8)]  # fmt: skip
    texts = []
    for drafter in ("none", kind_of(name)):
        folder_of = None if drafter == "none" else str(folder)
        speculative = SpeculativeConfig(drafter=drafter, draft_model=folder_of, budget=6, width=2, controller="fixed")
        engine = make_engine(TableLM(VOCAB), frozenset({0}), speculative, EngineConfig(max_batch=4))
        ids = [engine.submit(Request(prompt, params)) for prompt, params in zip(prompts, settings, strict=True)]
        written: dict[int, list[int]] = {i: [] for i in ids}
        while engine.busy:
            for event in engine.step():
                written[event.seq_id] += event.tokens
        texts.append([written[i] for i in ids])
    assert texts[0] == texts[1]


LAYER = {
    "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "num_hidden_layers": 2, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 1 << 20, "attention_bias": False,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
OWN = {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1, 2]}
SPEC = {"block_size": 6, "draft_vocab_size": VOCAB, "target_hidden_size": 8, "speculators_version": "0.9.0"}
AUX = {"aux_hidden_state_layer_ids": [1, 2, 3], "mask_token_id": VOCAB - 1}
DEPTHS = {"algorithm": "peagle", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6}]}
MARKOV = {"markov_rank": 3, "markov_head_type": "vanilla", "enable_confidence_head": True}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 3}
EAGLE = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "norm_before_residual": True}
MASKED = {"mask_token_id": VOCAB - 1}
DFLASH = {"architectures": ["DFlashDraftModel"], **LAYER, "block_size": 6}
WINDOWED = BLOCKS["dflash windowed"]

# layout: config.json as its authors write it, and what it is
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DFlash": ({**DFLASH, "dflash_config": OWN}, {"kind": "dflash"}),
    "DFlash with windows": ({**DFLASH, **SLIDING, "dflash_config": OWN}, WINDOWED),
    "DFlash 2": (
        {"architectures": ["DFlash2DraftModel"], **LAYER, "is_causal": False, "sliding_window": 4,
         "layer_types": ["sliding_attention"] * 2, "dflash_config": {**OWN, "block_size": 6, **SELECTOR}},
        {**BLOCKS["dflash 2"], "window": 4, "windowed": (True, True)},
    ),
    "JetSpec": ({**DFLASH, "dflash_config": {**OWN, "causal_head": True}}, BLOCKS["dflash causal"]),
    "DSpark of DeepSpec with windows": (
        {"architectures": ["Qwen3DSparkModel"], **LAYER, "block_size": 6, **OWN, **MARKOV, "use_swa": True,
         "swa_window_size": 4, "layer_types": SLIDING["layer_types"]},
        {"kind": "dspark", "window": 4, "windowed": (True, False)},
    ),
    "DSpark of SpecForge": (
        {"architectures": ["DSparkDraftModel"], **LAYER, "block_size": 6,
         "dflash_config": {**OWN, **MARKOV, "projector_type": "dspark", "attention_mode": "gqa"}},
        {"kind": "dspark"},
    ),
    "speculators' DFlash with windows": (
        {"speculators_model_type": "dflash", **SPEC, **AUX, "transformer_layer_config": {**LAYER, **SLIDING}}, WINDOWED,
    ),
    "speculators' DFlash that looks both ways": (
        {"speculators_model_type": "dflash", **SPEC, **AUX, "sliding_window_non_causal": True,
         "sample_from_anchor": True, "transformer_layer_config": {**LAYER, **SLIDING}},
        {**WINDOWED, "causal": "none", "first": 0},
    ),
    "speculators' DFlash 2": (
        {"speculators_model_type": "dflash2", **SPEC, **AUX, **SELECTOR, "transformer_layer_config": LAYER},
        BLOCKS["dflash 2"],
    ),
    "speculators' DSpark": (
        {"speculators_model_type": "dspark", **SPEC, **AUX, **MARKOV, "markov_head_type": "gated",
         "confidence_head_with_markov": False, "transformer_layer_config": LAYER},
        {"kind": "dspark", "markov": "gated", "confidence_with_markov": False},
    ),
    "speculators' P-EAGLE": (
        {"speculators_model_type": "peagle", **SPEC, "block_size": None, **EAGLE, **MASKED, "fc_norm": False,
         "speculators_config": DEPTHS, "transformer_layer_config": LAYER},
        {"kind": "peagle", "norm_before_residual": True},
    ),
    "P-EAGLE of SpecForge": (
        {"architectures": ["PEagleDraftModel"], **LAYER, **EAGLE, **MASKED, "block_size": 6},
        {"kind": "peagle", "norm_before_residual": True},
    ),
    "P-EAGLE under EAGLE-3's name": (
        {"architectures": ["LlamaForCausalLMEagle3"], **LAYER, **EAGLE, "ptd_token_id": VOCAB - 1, "block_size": 6},
        {"kind": "peagle", "norm_before_residual": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_public_layouts_load_as_they_are(layout: str, tmp_path: Path) -> None:
    values, parts = LAYOUTS[layout]
    config = block_config(vocab=VOCAB, **parts)
    weights = block_weights(config, seed=2, tables=True)
    stored = {"midlayer." + n.removeprefix("layers.0.") if "EAGLE-3" in layout and n.startswith("layers.0.") else n: w
              for n, w in weights.items()}  # fmt: skip
    if "mask_hidden" in stored:
        stored["mask_hidden"] = stored["mask_hidden"][None, None]
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(stored, tmp_path / "model.safetensors")
    found, read = read_block(tmp_path)
    assert replace(found, target="") == config
    assert read.keys() == weights.keys()
    ours = tmp_path / "ours"
    write_block(ours, found, read)  # and as this package writes it
    assert read_block(ours)[0] == found
    drafts = []
    for head in (BlockHead(config, weights, None), load_block(tmp_path, TableLM(VOCAB), config.kind)):
        drafter = BlockDrafter(head)
        seqs, _ = shown(drafter, [[i * 7 % VOCAB for i in range(13)]])
        drafter._runner.read(seqs, [drafter._sequences[0]])
        drafts.append(drafter._runner.begin(seqs))
    torch.testing.assert_close(drafts[0], drafts[1])


@pytest.mark.parametrize(
    ("name", "to", "words"),
    [
        ("dflash 2", "vllm", "convolutions"),
        ("dflash 2", "sglang", "convolutions"),
        ("dspark gated", "vllm", "a gated Markov head"),
        ("dflash causal", "sglang", "windows or causal blocks"),
        ("dflash windowed", "sglang", "windows or causal blocks"),
        ("dspark", "sglang", "no dspark heads"),
        ("peagle", "sglang", "no peagle heads"),
        ("peagle windowed", "vllm", "windows"),
    ],
)
def test_what_an_engine_would_misread_is_not_written_for_it(name: str, to: str, words: str, tmp_path: Path) -> None:
    config, weights = made(name)
    write_block(tmp_path / "head", config, weights)
    with pytest.raises(InvalidInput, match=words):
        export_head(tmp_path / "head", tmp_path / "out", to, None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "to", "flag"),
    [
        ("dflash", "sglang", "--speculative-algorithm DFLASH"),
        ("dflash windowed", "vllm", '"method": "dflash"'),
        ("dflash causal", "vllm", '"method": "dflash"'),
    ],
)
def test_what_an_engine_knows_is_written_as_it_reads_it(name: str, to: str, flag: str, tmp_path: Path) -> None:
    config, weights = made(name)
    write_block(tmp_path / "head", config, weights)
    assert flag in export_head(tmp_path / "head", tmp_path / "out", to, None)
    values = read_config(tmp_path / "out")
    # vLLM: rows of windowed layers see only those before them where the file does not say
    assert values["dflash_config"].get("causal") == (True if name == "dflash causal" else None)
    assert values.get("sliding_window") == (config.window or None)
    assert replace(read_block(tmp_path / "out")[0], calibration=config.calibration) == config


SCALED: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16},
    "linear, older name": {"type": "linear", "factor": 2.0},
    "yarn that says little": {"rope_type": "yarn"},
}  # fmt: skip


@pytest.mark.parametrize("scaling", SCALED)
@pytest.mark.parametrize("name", ["dflash", "dspark", "peagle"])
def test_scaled_positions_are_exported_as_the_head_has_them(name: str, scaling: str, tmp_path: Path) -> None:
    """vLLM reads `rope_parameters` where transformers 5 is installed, `rope_scaling` where 4 is."""
    config, weights = made(name)
    config = replace(config, rope_scaling=SCALED[scaling], rope_theta=5000.0)
    write_block(tmp_path / "head", config, weights)
    export_head(tmp_path / "head", tmp_path / "out", "vllm", None)
    values, rope = read_config(tmp_path / "out"), config.rope
    read = values["rope_parameters"]
    assert (read["rope_type"], read["rope_theta"], read["factor"]) == (rope.kind, 5000.0, rope.factor)
    if rope.kind != "linear":  # vLLM looks for it, whether or not the head's file had it
        assert read["original_max_position_embeddings"] == rope.context
    assert SCALED[scaling].items() <= read.items()
    assert values["rope_scaling"] == read
    assert read_block(tmp_path / "out")[0].rope == rope != replace(config, rope_scaling={}).rope


def test_a_mask_token_that_no_file_names_is_asked_for(tmp_path: Path) -> None:
    save_head("peagle", tmp_path, VOCAB)
    values = read_config(tmp_path)
    write_config(
        tmp_path, {key: value for key, value in values.items() if key not in ("mask_token_id", "ptd_token_id")}
    )
    with pytest.raises(DamagedFile, match="mask_token_id"):
        read_block(tmp_path)
