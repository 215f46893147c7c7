"""Start a training run from a finished head: its weights, its draft vocabulary, and what must be the same.

The head must be of the run's method and shape, so that the first step computes what the head did. Three things may
differ: the MLP of an EAGLE head may become wider, by units whose output weights start at zero; an EAGLE-3 head may get
further layers, whose output weights start at zero; and DFlash and DSpark may start from each other's layers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.core.errors import InvalidInput
from forerun.drafters.heads.base import vocabulary_of
from forerun.drafters.heads.block_head import BlockConfig, BlockKind, read_block
from forerun.drafters.heads.eagle_head import EagleConfig, read_head
from forerun.drafters.heads.formats import SCALES, DraftVocabulary, read_config, read_tensors
from forerun.drafters.heads.medusa import HeadsConfig, read_heads
from forerun.drafters.heads.mtp import read_mtp
from forerun.heads import kind_of
from forerun.train.options import TrainOptions
from forerun.train.recipes.scaling import unfold

_FREE = (
    "inner", "depth", "target", "calibration", "rates", "max_length", "draft_vocab_size", "markov_rank", "confidence",
)  # fmt: skip
_HEADS = ("markov_head.", "confidence_head.")  # DSpark's own
_BESIDE = ("d2t", "t2d", "embed_tokens.weight")  # entries of a head's file that are not trained
_WIDER = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")  # of an EAGLE head
_WRITES = ("self_attn.o_proj.weight", "mlp.down_proj.weight")  # what a layer adds to the rows that pass it


@dataclass(frozen=True, slots=True)
class Start:
    """A finished head to start from."""

    folder: Path
    config: EagleConfig | HeadsConfig | BlockConfig
    weights: dict[str, Tensor]  # as files hold them
    vocabulary: DraftVocabulary
    one_byte: bool = False  # do its files hold one byte per weight?

    def must_fit(self, config: EagleConfig | HeadsConfig | BlockConfig) -> None:
        """Raise where the run's head is another than this one."""
        for name in sorted((field.name for field in fields(config)), key=lambda name: name != "kind"):
            theirs, ours = getattr(self.config, name), getattr(config, name)
            unnamed = name == "layers" and not theirs  # then the default layers
            if name not in _FREE and theirs != ours and not unnamed:
                _refuse(self.folder, f"{name}={theirs!r}", f"{name}={ours!r}")
        if isinstance(self.config, EagleConfig) and isinstance(config, EagleConfig):
            for name in ("inner", "depth"):
                theirs, ours = getattr(self.config, name), getattr(config, name)
                if ours < theirs:
                    _refuse(self.folder, f"{name}={theirs}", f"{name}={ours}, which is less")

    @torch.no_grad()
    def fill(self, module: nn.Module, embedding: Tensor) -> None:
        """Give a module this head's weights, as the module learns them."""
        own = self.weights.get("embed_tokens.weight")
        if own is not None and not torch.allclose(own.float(), embedding.float().cpu(), rtol=0.02, atol=1e-3):
            _refuse(self.folder, "an embedding of its own", "the target's")
        learnt = {name: weight for name, weight in self.weights.items() if name not in _BESIDE}
        known = dict(module.named_parameters())
        if unknown := sorted(learnt.keys() - known.keys()):
            _refuse(self.folder, f"the weight {unknown[0]!r}", "none of that name")
        for name, weight in unfold(module, learnt).items():
            parameter, shape = known[name], tuple(weight.shape)
            wider = isinstance(self.config, EagleConfig) and name.endswith(_WIDER)
            if not wider and shape != tuple(parameter.shape):
                _refuse(self.folder, f"{name!r} of {shape}", f"{tuple(parameter.shape)}")
            if name.endswith("down_proj.weight"):
                parameter.zero_()  # new units start at zero
            parameter[tuple(slice(size) for size in shape)] = weight.to(parameter.device)
        if isinstance(self.config, EagleConfig):
            for name in known.keys() - learnt.keys():
                if name.startswith("layers.") and name.endswith(_WRITES):
                    known[name].zero_()  # so do new layers

    def record(self) -> dict[str, Any]:
        """Its entry in provenance.json."""
        digest = hashlib.sha256()
        for file in sorted(self.folder.glob("*.safetensors")):
            digest.update(file.read_bytes())
        record: dict[str, Any] = {"folder": self.folder.resolve().name, "sha256": digest.hexdigest()}
        if (kept := self.folder / "provenance.json").is_file():
            record["provenance"] = json.loads(kept.read_text(encoding="utf-8"))
        return record


def read_start(options: TrainOptions, width: int, vocab_size: int) -> Start | None:
    """The head that a run starts from, if it names one."""
    if not options.init:
        return None
    folder = Path(options.init)
    kind = kind_of(read_config(folder), lambda: read_tensors(folder))
    if _family_of(str(kind)) != _family_of(options.method):
        _refuse(folder, f"a head of the kind {kind}", options.method)
    if options.method == "medusa" or options.method == "hydra":
        heads, weights = read_heads(folder, options.method, width, vocab_size)
        rows = len(weights["d2t"]) if "d2t" in weights else heads.vocab_size
        start = Start(folder, heads, weights, DraftVocabulary.from_file(weights, rows, heads.vocab_size))
    elif options.method == "dflash" or options.method == "dspark":
        start = _block_start(folder, options.method)
    else:
        config, weights = read_mtp(folder) if options.method == "mtp" else read_head(folder)
        in_bytes = bool(read_tensors(folder, wanted=lambda name: name.endswith(SCALES)))
        start = Start(folder, config, weights, vocabulary_of(config, weights), in_bytes)
    if options.vocab not in (0, len(start.vocabulary)):
        _refuse(folder, f"a draft vocabulary of {len(start.vocabulary)}", f"vocab={options.vocab}")
    return start


def _block_start(folder: Path, kind: BlockKind) -> Start:
    """A block drafter; of the other kind its layers alone, whose rows then predict one token more or less far."""
    block, weights = read_block(folder)
    if block.kind != kind:
        weights = {name: weight for name, weight in weights.items() if not name.startswith(_HEADS)}
        rows = block.rows + (1 if kind == "dflash" else -1)
        block = replace(block, kind=kind, rows=rows)
    return Start(folder, block, weights, vocabulary_of(block, weights))


def _family_of(method: str) -> str:
    families = {"eagle3": "eagle", "hass": "eagle", "dspark": "dflash"}
    return families.get(method, method)


def _refuse(folder: Path, theirs: str, ours: str) -> None:
    raise InvalidInput(
        f"the head in {folder} has {theirs} and this run {ours}; give the run the head's, or another --init"
    )
