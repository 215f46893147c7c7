"""Quality of each number format against float32, and of rounded weights: perplexity, agreement and KL on one text.

The text is given to both, window by window. Perplexity says how well a format predicts the text; agreement says how
often its likeliest token is float32's; the mean divergence KL(float32 || format), in nats, says how far the whole law
has moved. A format that only rounds differently moves it hardly at all.

`input_sizes`: how large the inputs of each matrix are on some texts, for rounding errors count by what they are
multiplied by.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forerun.build.engine import load_target
from forerun.core.errors import ForerunError, InvalidInput, UnsupportedModel
from forerun.core.params import Dtype, EngineConfig, KvDtype
from forerun.core.types import Needs, PlainSeq, TreeBatch
from forerun.measure.bench.suites import Message, load_suite, prompt_ids
from forerun.models.base import Target
from forerun.models.blocks import Block
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.layers import Mlp
from forerun.models.load import checkpoint as loading
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.load.quantized.writing import plain_weights
from forerun.models.pages import TREE_MARGIN
from forerun.models.slots import SlotTarget

MODES: tuple[Dtype, ...] = ("gguf", "q8", "bfloat16", "float32")
REFERENCE: Dtype = "float32"
Source = str | Sequence[Message]  # a text, or a conversation
WINDOW = 256  # tokens scored together; each of them sees those of its own window


@dataclass(slots=True)
class _Sums:
    tokens: int = 0
    surprise: float = 0.0  # nats
    agreeing: int = 0
    divergence: float = 0.0  # nats

    def add(self, ours: Tensor, reference: Tensor, wanted: Tensor) -> None:
        """One window: log-probabilities of both [N, V], and the tokens that came [N]."""
        self.tokens += len(wanted)
        self.surprise -= float(ours.gather(1, wanted[:, None]).sum())
        self.agreeing += int((ours.argmax(1) == reference.argmax(1)).sum())
        self.divergence += float((reference.exp() * (reference - ours)).sum())

    def figures(self) -> dict[str, float]:
        return {
            "perplexity": round(math.exp(self.surprise / self.tokens), 4),
            "agreement": round(self.agreeing / self.tokens, 5),
            "kl": round(max(0.0, self.divergence / self.tokens), 7),
        }


def read_text(path: Path | None = None) -> str:
    if path is None:
        return files("forerun.measure").joinpath("quality.txt").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read {str(path)!r}: {error}; give a UTF-8 text file") from None


def read_conversations(path: Path, model: str | None = None) -> list[Source]:
    """The prompts of a file, with the answers that were recorded for them."""
    return [(*item.messages, *item.answers) for item in load_suite(path, model=model)]


def measure_quality(
    model: str,
    names: Sequence[Dtype] = MODES,
    text: str | None = None,
    window: int = WINDOW,
    report: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Perplexity, agreement and divergence of each format; a format that cannot be loaded says why not."""
    checkpoint = loading.open_checkpoint(model)
    windows = windows_of(checkpoint, [read_text() if text is None else text], window)
    reference = _reference(checkpoint)
    found: dict[str, Any] = {}
    for name in names:
        report(name)
        target = reference if name == REFERENCE else load_mode(loading.open_checkpoint(model), name)
        found[name] = {"why_not": target} if isinstance(target, str) else _figures(target, reference, windows)
    return {"modes": found, "tokens": sum(len(piece) - 1 for piece in windows), "window": window}


def measure_kv(
    model: str, kv_dtypes: Sequence[str], text: str | None = None, window: int = WINDOW, device: str = "cpu"
) -> dict[str, dict[str, Any]]:
    """The same figures of KV caches in other formats, against the usual one, with the weights as they are loaded."""
    if not kv_dtypes:
        return {}
    checkpoint = loading.open_checkpoint(model)
    windows = windows_of(checkpoint, [read_text() if text is None else text], window)
    reference, found = load_target(checkpoint, EngineConfig(device=device)), dict[str, dict[str, Any]]()
    for name in ("auto", *kv_dtypes):
        try:
            config = EngineConfig(device=device, kv_dtype=cast("KvDtype", name))
            target = reference if name == "auto" else load_target(loading.open_checkpoint(model), config)
        except ForerunError as error:
            found[name] = {"why_not": str(error)}
            continue
        figures = _figures(target, reference, windows)  # first: until then no slot is taken
        size = target.kv.nbytes // target.kv.capacity if isinstance(target, SlotTarget) else None
        found[name] = {**figures, "bytes_per_token": size}
    return found


def measure_rounded(original: str, rounded: str, texts: Sequence[Source], window: int = WINDOW) -> dict[str, Any]:
    """The same figures of a checkpoint with rounded weights against its original, both computed in float32."""
    checkpoint = loading.open_checkpoint(original)
    windows = windows_of(checkpoint, texts, window)
    reference, other = _reference(checkpoint), _reference(loading.open_checkpoint(rounded))
    return {
        "original": _figures(reference, reference, windows),
        "rounded": _figures(other, reference, windows),
        "tokens": sum(len(piece) - 1 for piece in windows),
        "window": window,
    }


def windows_of(checkpoint: Checkpoint, texts: Sequence[Source], window: int) -> list[list[int]]:
    """The texts' tokens, in pieces that are scored together; conversations are read as users send them."""
    tokenizer = checkpoint.tokenizer()
    ids = [tokenizer.encode(text) if isinstance(text, str) else prompt_ids(tokenizer, text) for text in texts]
    windows = [piece for each in ids for piece in cut(each, window)]
    if not windows:
        count = sum(map(len, ids))
        raise InvalidInput(f"the text has {count} tokens, and quality needs 2 or more; give a longer one")
    return windows


def _reference(checkpoint: Checkpoint) -> Target:
    target = load_mode(checkpoint, REFERENCE)
    if isinstance(target, str):
        raise InvalidInput(target)
    return target


def _figures(target: Target, reference: Target, windows: Sequence[Sequence[int]]) -> dict[str, float]:
    sums = _Sums()
    for piece in windows:
        theirs = laws_of(reference, piece)
        ours = theirs if target is reference else laws_of(target, piece)
        sums.add(ours, theirs, torch.tensor(piece[1:]))
    return sums.figures()


def cut(ids: Sequence[int], window: int) -> Iterator[list[int]]:
    """Pieces of `window` tokens, and what is left where it has something to predict."""
    if window < 2:
        raise InvalidInput(f"window={window} predicts nothing; use 2 or more tokens")
    for first in range(0, len(ids), window):
        piece = list(ids[first : first + window])
        if len(piece) > 1:
            yield piece


@torch.inference_mode()
def laws_of(target: Target, piece: Sequence[int]) -> Tensor:
    """[N-1, V] log-probabilities of what follows each token of a piece but its last."""
    if len(piece) > target.max_length:
        raise InvalidInput(f"window={len(piece)} is beyond the model's {target.max_length} tokens; use a smaller one")
    probe = PlainSeq(-1, [piece[0]], max_length=len(piece))  # its chain is the rest of the window
    target.prefill([probe], Needs())
    try:
        chain = TreeBatch.chains([list(piece[:-1])], target.device)
        return target.score([probe], chain, Needs()).required_logits.log_softmax(-1).cpu()
    finally:
        target.release(probe)


def load_mode(checkpoint: Checkpoint, name: Dtype) -> Target | str:
    """The checkpoint's weights on the CPU in one format, or why they cannot be loaded in it."""
    try:
        return load_target(checkpoint, EngineConfig(dtype=name, device="cpu"))
    except ForerunError as error:
        return str(error)


_PRODUCTS = (torch.mm, torch.mv, torch.addmm, Tensor.addmm_, Tensor.addmv_)  # of forerun.models.layers
_MATRIX = re.compile(r"layers\.(\d+)\.\w+\.(\w+)_proj\.weight$")
_JOINED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}  # others have their own names


def input_sizes(checkpoint: Checkpoint, texts: Sequence[Source]) -> dict[str, Tensor]:
    """[K] the mean square of what each column of a layer's matrices is multiplied by, in float32 on the CPU."""
    weights, config = plain_weights(checkpoint), DecoderConfig.from_hf(checkpoint.config)
    if config.special:
        raise UnsupportedModel(f"--calibrate cannot read {config.family!r}: it has {config.special}")
    windows = windows_of(checkpoint, texts, WINDOW)
    slots = max(map(len, windows)) + TREE_MARGIN
    decoder = Decoder(config, weights, dtype=torch.float32, device="cpu", kv_slots=slots)
    noted = _Noted(decoder)
    with noted:
        for window in windows:
            laws_of(decoder, window)
    return {name: noted.mean_square(int(match[1]), _JOINED.get(match[2], match[2]))
            for name in weights if (match := _MATRIX.search(name))}  # fmt: skip


class _Noted(TorchFunctionMode):
    """Sums the squares of rows that are multiplied by a layer's matrices."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self._places = dict[int, tuple[int, str]]()
        for index, block in enumerate(decoder.shared().layers):
            assert isinstance(block, Block)
            assert isinstance(block.mlp, Mlp)
            matrices = {"qkv": block.qkv, "o": block.o, "gate_up": block.mlp.gate_up, "down": block.mlp.down}
            self._places |= {weight.data_ptr(): (index, name) for name, weight in matrices.items()}
        self._sums, self._rows = dict[tuple[int, str], Tensor](), dict[tuple[int, str], int]()

    def mean_square(self, index: int, name: str) -> Tensor:
        """Of rows in front of one matrix."""
        return self._sums[index, name] / self._rows[index, name]

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function in _PRODUCTS:
            left, right = args[-2:]
            turned = right.t() if right.dim() == 2 else right[None]
            for weight, rows in ((right, left), (left, turned)):
                if (place := self._places.get(weight.data_ptr())) is not None:
                    squares = rows.float().square().sum(0)
                    self._sums[place] = self._sums.get(place, 0.0) + squares
                    self._rows[place] = self._rows.get(place, 0) + len(rows)
        return function(*args, **(kwargs or {}))
