"""Write a trained head for another engine (vLLM, SGLang, speculators), and take one over from it.

Each engine reads a little less than the next. What one cannot read is refused by name, because a head that loads with
a part left out drafts tokens that are never accepted, and nothing says so. What was written is read back and compared.

vLLM reads the authors' names of DFlash and DSpark, and P-EAGLE as EAGLE-3 with a token for masks; SGLang reads DFlash
with whole attention and a whole vocabulary. Neither is given convolutions or a path selector. vLLM has no int8 with a
scale per row, does not borrow LM head rows for a reduced vocabulary, and wants DSpark's Markov head as two tables,
which are made here of the target's embedding and LM head: the same numbers, computed once.

Check that a trained head fits its target: files, shapes, and tokens per round on a few prompts.

A head for another target, or read as another kind, drafts as fast as the right one and is always rejected: nothing
fails, nothing is gained. So a head of which almost nothing is accepted is reported, with the likely cause.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.build.engine import load_target, make_engine
from forerun.core.errors import DamagedFile, InvalidInput, VocabularyMismatch
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.drafters.heads.base import vocabulary_of
from forerun.drafters.heads.block_config import KINDS, BlockConfig
from forerun.drafters.heads.block_config import NAMES as BLOCKS
from forerun.drafters.heads.block_head import read_block, tables_of, write_block
from forerun.drafters.heads.eagle import read_mtp, write_mtp
from forerun.drafters.heads.eagle_head import NAMES, EagleConfig, Layout, read_head, write_head
from forerun.drafters.heads.formats import read_config, write_config
from forerun.drafters.heads.medusa import read_heads, write_heads
from forerun.drafters.heads.specdec import read_specdec
from forerun.engine.driver import Driver
from forerun.heads import open_head
from forerun.models.base import Target
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.tokenizer import Tokenizer

OTHERS = ("medusa", "hydra", *KINDS, "mtp")  # kinds with files of their own
HeadRows = Callable[[Tensor], Tensor]  # rows of the target's LM head or embedding, by token


@dataclass(frozen=True, slots=True)
class Reader:
    """What an engine reads of a head, and how it is told to."""

    layout: Layout
    flag: str  # how the engine is started; {target}, {folder}, {method}, {tokens}, {nodes}
    kinds: tuple[str, ...] = ("eagle", "eagle3")
    own_head: bool = True  # it does not borrow LM head rows for a reduced vocabulary
    layer_shift: int = 0  # its number for "the input of layer i" is i + layer_shift
    layers: int | None = None  # hidden layers that it reads; None = as many as the config says
    lacks: tuple[str, ...] = ()  # settings of EagleConfig that it ignores
    narrow: bool = False  # it reads heads that are narrower than their target
    deep: bool = True  # it reads heads of several layers


# As of vLLM 0.24, SGLang's llama_eagle3 and speculators 0.9.
READERS = {
    "vllm": Reader(
        "eagle",
        "vllm serve {target} --speculative-config "
        '\'{{"method": "{method}", "model": "{folder}", "num_speculative_tokens": {tokens}}}\'',
        kinds=("eagle", "eagle3", *KINDS),
        narrow=True,
    ),
    "sglang": Reader(
        "eagle",
        "python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} "
        "--speculative-draft-model-path {folder} --speculative-num-steps {tokens} "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens {nodes}",
        kinds=("eagle", "eagle3", "dflash"),
        layer_shift=-1,
        layers=3,
        deep=False,
        lacks=("window", "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"),
    ),
    "speculators": Reader("speculators", 'speculators.SpeculatorModel.from_pretrained("{folder}")', kinds=("eagle3",)),
    "eagle": Reader(
        "eagle",
        "forerun generate --drafter {method} --draft-model {folder}",
        kinds=("eagle", "eagle3", *OTHERS),
        own_head=False,
        narrow=True,
    ),
}


def export_head(
    folder: Path,
    out: Path,
    to: str,
    head_rows: HeadRows | None,
    *,
    embed_rows: HeadRows | None = None,
    tokens: int = 5,
    target_name: str = "",
) -> str:
    """Write a head as an engine reads it, read it back, and return how to use it there.

    `head_rows` gives the LM head rows that the head borrows from its target, `embed_rows` those of the embedding; None
    where no target is at hand. `target_name` is what the other engine calls the target: a hub id or a folder.
    """
    reader, kind = _reader(to), kind_of_head(folder)
    if kind not in reader.kinds:
        raise InvalidInput(f"{to} reads no {kind} heads; it reads {', '.join(reader.kinds)}")
    target = target_name or "TARGET"
    names = {"folder": out, "method": kind, "tokens": tokens, "nodes": tokens + 1, "target": target}
    flag = reader.flag.format(algorithm={"eagle": "EAGLE"}.get(kind, kind.upper()), **names)
    if kind in KINDS and to != "eagle":
        export_block(folder, out, to, head_rows, embed_rows)
        return flag.replace('"method": "peagle"', '"method": "eagle3", "parallel_drafting": true')
    if kind in OTHERS:
        _copy_head(folder, out, kind, pickle=False)
        return flag
    config, weights = read_head(folder)
    _must_be_readable(config, reader, to)
    if reader.own_head and "embed_proj.weight" in weights:
        weights = _with_own_embedding(config, weights, embed_rows, to)
    if reader.own_head and config.kind == "eagle3" and "lm_head.weight" not in weights:
        if head_rows is None:
            raise InvalidInput(
                f"{to} needs the LM head rows that this head borrows from its target; name it with --target"
            )
        rows = head_rows(vocabulary_of(config, weights).ids)
        weights["lm_head.weight"] = rows.to(weights["fc.weight"].dtype)
    if reader.layout == "speculators" or to == "sglang":
        weights = {name: weight for name, weight in weights.items() if name != "t2d"}
        if "d2t" in weights:  # which of the target's tokens are drafted
            weights["t2d"] = vocabulary_of(config, weights).tensors()["t2d"]
    shifted = _shift_layers(config, reader.layer_shift)
    if target_name:
        shifted = replace(shifted, target=target_name)
    write_head(out, shifted, weights, reader.layout)
    if to in ("vllm", "sglang"):
        write_config(out, _engine_keys(read_config(out), shifted))
    _read_back(out, shifted, weights)
    return flag


def import_head(folder: Path, out: Path, source: str, *, pickle: bool = False) -> None:
    """Take a head over from another engine: safetensors in the authors' layout, layers in our count."""
    reader, kind = _reader(source), kind_of_head(folder, pickle=pickle)
    if kind in OTHERS:
        _copy_head(folder, out, kind, pickle=pickle)
        return
    config, weights = read_head(folder, pickle=pickle)
    config = _shift_layers(config, -reader.layer_shift)
    write_head(out, config, weights)
    _read_back(out, config, weights)


def rows_of_target(model: str, *, embedding: bool = False) -> HeadRows:
    """LM head rows of a model (or of its embedding), read when asked for; a tied head's are the embedding's."""

    def rows(ids: Tensor) -> Tensor:
        weights = open_checkpoint(model).weights
        untied = "lm_head.weight" in weights and not embedding
        name = "lm_head.weight" if untied else "model.embed_tokens.weight"
        return weights[name][ids]

    return rows


def _reader(name: str) -> Reader:
    if name not in READERS:
        raise InvalidInput(f"no engine {name!r} is known here; use one of {', '.join(READERS)}")
    return READERS[name]


def _shift_layers(config: EagleConfig, by: int) -> EagleConfig:
    """Number hidden layers as another engine does; EAGLE-1 names none."""
    if config.kind != "eagle3":
        return config
    return replace(config, layers=tuple(layer + by for layer in config.layers))


def _must_be_readable(config: EagleConfig, reader: Reader, name: str) -> None:
    ignored = [setting for setting in reader.lacks if getattr(config, setting)]
    if ignored:
        raise InvalidInput(
            f"{name} ignores {', '.join(ignored)}, which this head was trained with, and would accept almost "
            f"nothing of its drafts; train one without (forerun train {config.kind}), or export it to vllm"
        )
    if config.kind != "eagle3":
        return
    if config.width != config.target_width and not reader.narrow:
        raise InvalidInput(
            f"{name} reads heads that are as wide as their target, {config.target_width}, and this one is "
            f"{config.width} wide; export it to vllm, or train one without --width"
        )
    if config.depth > 1 and not reader.deep:
        raise InvalidInput(f"{name} reads heads of one layer and this one has {config.depth}; export it to vllm")
    if reader.layers is not None and len(config.layers) not in (0, reader.layers):
        raise InvalidInput(
            f"{name} reads {reader.layers} hidden layers and this head reads {len(config.layers)}; export it to vllm"
        )
    if reader.layer_shift and any(layer + reader.layer_shift < 0 for layer in config.layers):
        raise InvalidInput(f"{name} cannot read the input of layer 0; train a head on later layers")


def _with_own_embedding(
    config: EagleConfig, weights: dict[str, Tensor], embed_rows: HeadRows | None, name: str
) -> dict[str, Tensor]:
    """The map from the target's embedding to the head's width, written out for every token: others do not map."""
    if embed_rows is None:
        raise InvalidInput(f"{name} needs the embedding that this head maps from its target's; name it with --target")
    into = weights["embed_proj.weight"]
    table = (embed_rows(torch.arange(config.vocab_size)).float() @ into.float().t()).to(into.dtype)
    kept = {key: weight for key, weight in weights.items() if key != "embed_proj.weight"}
    return {**kept, "embed_tokens.weight": table}


def _engine_keys(values: dict[str, Any], config: EagleConfig) -> dict[str, Any]:
    """What vLLM and SGLang look for beside the authors' keys; what only we read is left out."""
    values = {name: value for name, value in values.items() if name != "forerun"}
    values |= {"dtype": "bfloat16", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    if config.kind == "eagle3" and config.layers:
        ids = list(config.layers)
        nested = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        values |= {"num_aux_hidden_states": len(ids), "eagle_config": nested}
    return values


def _read_back(out: Path, config: EagleConfig, weights: dict[str, Tensor]) -> None:
    found, tensors = read_head(out)
    same = {name for name, weight in weights.items() if name in tensors and torch.equal(weight.cpu(), tensors[name])}
    wrong = sorted((weights.keys() | tensors.keys()) - same)
    kept = ("calibration", "rates", "target", "trained")
    left_out = {name: getattr(config, name) for name in kept}
    if wrong or replace(found, **left_out) != config:
        what = ", ".join(wrong) or json.dumps([str(found), str(config)])
        raise DamagedFile(f"{out} was written, but reads back otherwise ({what}); is the disk full?")


def _copy_head(folder: Path, out: Path, kind: str, *, pickle: bool) -> None:
    if kind in KINDS:
        config, weights = read_block(folder, pickle=pickle)
        _write_block(out, config, weights)
        return
    if kind == "mtp":
        write_mtp(out, *read_mtp(folder))
        return
    write_heads(out, *read_heads(folder, "medusa" if kind == "medusa" else "hydra", pickle=pickle))


def _must_be_known(config: BlockConfig, to: str) -> None:
    """Refuse what an engine would leave out or compute otherwise: it would accept almost nothing of the drafts."""
    spans, whole = config.window or config.causal != "none", config.draft_vocab_size == config.vocab_size
    for unknown, what in (
        (config.taps, "convolutions"),
        (config.markov == "selector", "a path selector"),
        (config.markov == "gated", "a gated Markov head"),
        (config.kind == "dflash" and not config.first, "a root row that predicts"),
        (to == "sglang" and spans, "windows or causal blocks"),
        (to == "sglang" and not whole, "a reduced vocabulary"),
        (config.kind == "peagle" and config.window, "windows"),
    ):
        if unknown:
            raise InvalidInput(
                f"{to} does not read block drafters with {what}, which this head was trained with; draft with it "
                f"here (drafter={config.kind!r}), or train one without"
            )


def export_block(folder: Path, out: Path, to: str, head_rows: HeadRows | None, embed_rows: HeadRows | None) -> None:
    """For vLLM or SGLang; rows that the head borrows from its target are written with it."""
    config, weights = read_block(folder)
    _must_be_known(config, to)
    owner, before, after = tables_of(config)
    down, up = weights.pop(f"{owner}.down.weight", None), weights.pop(f"{owner}.up.weight", None)
    if config.draft_vocab_size != config.vocab_size or up is not None or config.reads_rows:
        ids = torch.arange(config.draft_vocab_size) + weights.get("d2t", torch.tensor(0))
        rows = _own_or_borrowed(weights, "lm_head.weight", ids, head_rows)
        if "d2t" in weights or config.reads_rows:
            weights["lm_head.weight"] = rows
        if up is not None and down is not None:
            every = torch.arange(config.vocab_size)
            table = _own_or_borrowed(weights, "embed_tokens.weight", every, embed_rows)
            weights |= {before: table @ down.float().t(), after: rows @ up.float()}
    kept = {name: weight for name, weight in weights.items() if name != "t2d"}
    _write_block(out, config, kept, _block_keys)


def _own_or_borrowed(weights: Mapping[str, Tensor], name: str, ids: Tensor, rows: HeadRows | None) -> Tensor:
    """Rows that a head stores, or else those of its target."""
    if name in weights:
        return weights[name].float()
    if rows is None:
        raise InvalidInput(
            f"vllm needs the rows of {name} that this head borrows from its target; name it with --target"
        )
    return rows(ids).float()


Keys = Callable[[dict[str, Any], BlockConfig], dict[str, Any]]


def _write_block(out: Path, config: BlockConfig, weights: Mapping[str, Tensor], keys: Keys | None = None) -> None:
    """In half precision, with `keys` for another engine, and read it back."""
    half = {name: w.to(torch.bfloat16) if w.is_floating_point() else w for name, w in weights.items()}
    write_block(out, config, half)
    if keys is not None:
        write_config(out, keys(read_config(out), config))
    _, found = read_block(out)
    wrong = [name for name, weight in half.items() if name not in found or not torch.equal(weight, found[name])]
    if wrong or found.keys() != half.keys():
        raise DamagedFile(f"{out} was written, but reads back otherwise ({', '.join(wrong)}); is the disk full?")


def _block_keys(values: dict[str, Any], config: BlockConfig) -> dict[str, Any]:
    """What an engine looks for beside the authors' keys; what only we read is left out."""
    values = {name: value for name, value in values.items() if name != "forerun"}
    if config.reads_rows:
        nested = {"eagle_aux_hidden_state_layer_ids": list(config.layers), "use_aux_hidden_state": True}
        values |= {"architectures": ["LlamaForCausalLMEagle3"], "pard_token": config.mask_token, "eagle_config": nested}
    rope = _rope_keys(config)
    if config.rope_scaling:
        values["rope_scaling"] = rope  # the name of transformers 4; an engine reads one of the two
    return {**values, "dtype": "bfloat16", "torch_dtype": "bfloat16", "rope_parameters": rope}


def _rope_keys(config: BlockConfig) -> dict[str, Any]:
    """The head's rotary positions, with what vLLM wants said that a head's file may leave out."""
    rope, said = config.rope, dict(config.rope_scaling)
    if said:
        said.setdefault("factor", rope.factor)
        if rope.kind != "linear":
            said.setdefault("original_max_position_embeddings", rope.context)
    return {**said, "rope_type": rope.kind, "rope_theta": config.rope_theta}


PROMPTS = (
    "Explain why the sky is blue.",
    "Write a Python function that reverses a list.",
    "Name three large rivers and the countries they flow through.",
    "Write a short letter that thanks a friend for a book.",
)
TOO_LITTLE = 1.1  # tokens per round under which a head does not belong to the target


@dataclass(frozen=True, slots=True)
class HeadReport:
    folder: str
    kind: str
    about: str  # shape in a line
    trained_for: str
    tokens_per_round: float
    accepted_per_position: list[float]
    fits: bool

    @property
    def verdict(self) -> str:
        if self.fits:
            return f"fits: {self.tokens_per_round:.2f} tokens per round"
        named = f" (its config names {self.trained_for!r})" if self.trained_for else ""
        return (
            f"almost nothing is accepted ({self.tokens_per_round:.2f} tokens per round): "
            f"it was trained for another target{named}, on other layers, or hardly at all"
        )


def kind_of_head(folder: Path, *, pickle: bool = False) -> str:
    """What a folder holds; raises where it holds no head."""
    found = open_head(folder)
    return read_head(folder, pickle=pickle)[0].kind if found is None else found.kind


def check_head(folder: Path, model: str, config: EngineConfig | None = None, *, tokens: int = 64) -> HeadReport:
    """Check a head with a target; raises with the reason where the two cannot work together."""
    kind = kind_of_head(folder)
    checkpoint = open_checkpoint(model)
    target = load_target(checkpoint, config or EngineConfig())
    about, trained_for = _compare(folder, kind, target)
    per_round, rates = _accepted(folder, kind, target, checkpoint.tokenizer(), tokens)
    return HeadReport(str(folder), kind, about, trained_for, per_round, rates, per_round >= TOO_LITTLE)


def _compare(folder: Path, kind: str, target: Target) -> tuple[str, str]:
    if kind in ("medusa", "hydra"):
        heads, _ = read_heads(folder, "medusa" if kind == "medusa" else "hydra", vocab_size=target.vocab_size)
        _check_vocabulary(heads.vocab_size, target, heads.target)
        return f"{heads.count} heads of {heads.blocks} blocks, {heads.width} wide", heads.target
    if kind in BLOCKS:
        block, _ = read_block(folder)
        _check_vocabulary(block.vocab_size, target, block.target)
        _check_layers(block.layers, target, block.target)
        layers = f"{block.depth} layers of width {block.width}, {block.levels} tokens a pass"
        about = f"{BLOCKS[kind]}, {layers}, reads layers {', '.join(map(str, block.layers))}, {_sees(block)}"
        return about, block.target
    if kind == "specdec":
        found, _, _ = read_specdec(folder)
        _check_vocabulary(found.vocab_size, target, found.target)
        size = f"{found.depth} layers of width {found.width}, {found.levels} tokens a pass"
        return f"SpecDec, {size}, {found.draft_vocab_size} of {found.vocab_size} tokens", found.target
    config, _ = read_mtp(folder) if kind == "mtp" else read_head(folder)
    _check_vocabulary(config.vocab_size, target, config.target)
    _check_layers(config.layers, target, config.target)
    layers = "the last row" if kind != "eagle3" else f"layers {', '.join(map(str, config.layers)) or 'by default'}"
    depth = f"{config.depth} layers, " if config.depth > 1 else ""
    size = f"{depth}{config.width} wide, {config.draft_vocab_size} of {config.vocab_size} tokens"
    return f"{NAMES[config.kind]}, {size}, reads {layers}, {_sees(config)}", config.target


def _sees(config: EagleConfig | BlockConfig) -> str:
    reaches = sorted({config.reach(i) for i in range(config.depth)})
    return f"sees {' or '.join(map(str, reaches))} positions"


def _check_layers(layers: Sequence[int], target: Target, trained_for: str) -> None:
    shared = target.shared()
    count = 0 if shared is None else len(shared.layers)
    beyond = [layer for layer in layers if count and layer > count]
    if beyond:
        raise InvalidInput(
            f"the head reads layer {beyond[0]} and the target has {count}: it was trained for another target "
            f"({trained_for or 'unnamed'})"
        )


def _check_vocabulary(size: int, target: Target, trained_for: str) -> None:
    if size > target.vocab_size or target.vocab_size - size > 1024:
        raise VocabularyMismatch(
            f"the head was trained for a vocabulary of {size}, the target has {target.vocab_size}: "
            f"it belongs to another target ({trained_for or 'unnamed'})"
        )


def _accepted(folder: Path, kind: str, target: Target, tokenizer: Tokenizer, tokens: int) -> tuple[float, list[float]]:
    """Tokens per round of greedy chains, and how often they were accepted to each depth."""
    speculative = SpeculativeConfig(drafter=kind, draft_model=str(folder), budget=5, controller="fixed")
    engine = make_engine(target, tokenizer.eos_ids, speculative, EngineConfig(max_batch=len(PROMPTS)))
    prompts: Sequence[list[int]] = [
        tokenizer.chat_ids([{"role": "user", "content": text}])
        if tokenizer.has_chat_template
        else tokenizer.encode(text)
        for text in PROMPTS
    ]
    params = SamplingParams(max_tokens=tokens)
    seqs = Driver(engine).write(Request(tuple(ids), params) for ids in prompts)
    rows = [seq.stats.accepted_per_position for seq in seqs]
    depth = max((len(row) for row in rows), default=0)
    rates = [sum(row[i] for row in rows if i < len(row)) / len(rows) for i in range(depth)]
    return sum(seq.stats.tokens for seq in seqs) / sum(seq.stats.rounds for seq in seqs), rates
