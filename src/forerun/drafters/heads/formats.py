"""The files of a trained head (config.json and safetensors in one folder), its vocabulary, and its matrices.

Nothing is unpickled unless the caller says so, and then as weights only. A folder is read whole: heads are small.

The largest matrix of a small head is its LM head, and most of a large vocabulary is never accepted from a
draft. So a head may have only the most frequent ids (`DraftVocabulary`). On disk this is `d2t`, an *offset* per row
(the target's id is row + d2t[row]), and `t2d`, a mask over the target's ids. Verification has the full vocabulary.

On a CPU a draft step is memory traffic, so large matrices are held as int8 blocks where the native kernels are there
(`Matrix`); files may have one byte per weight too: `name` int8 [N, K] and `name.scales` [N, K / 32] in fp16. Rounding
costs a rejected token now and then, and never correctness, which is the verifier's.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.core.errors import DamagedFile, InvalidInput, ModelNotFound, UnsupportedModel, brief
from forerun.heads import lora_base, must_be_folder
from forerun.models.adapters import Adapter
from forerun.models.layers import linear
from forerun.models.load.weights import write_tensors
from forerun.models.native import library as native
from forerun.models.native.packing import FloatMode, PackedWeight, pack_floats, side_by_side

_SHARD_BYTES = 15 << 20  # small enough for strict hosts; one file where everything fits


def write_config(folder: Path, values: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_config(folder: Path) -> dict[str, Any]:
    folder = lora_base(folder) or folder
    must_be_folder(folder)
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(f"{folder} has no config.json; give the folder that holds the head's files") from None
    except (ValueError, OSError, RecursionError) as error:
        raise DamagedFile(f"{folder / 'config.json'} is not JSON ({brief(error)}); fetch it again") from None
    if not isinstance(values, dict):
        raise DamagedFile(f"{folder / 'config.json'} does not hold an object; fetch it again")
    return values


def read_tensors(
    folder: Path, *, pickle: bool = False, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """The tensors of a folder's safetensors files that are wanted; of its pickles only where that was asked for.

    Those of a LoRA are its base's, with its changes added.
    """
    if (base := lora_base(folder)) is not None:
        changed = _with_changes(widened(read_tensors(base, pickle=pickle)), folder)
        return {name: tensor for name, tensor in changed.items() if wanted(name)}
    tensors: dict[str, Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DamagedFile(f"{file} cannot be read ({brief(error)}); fetch it again") from None
    pickles = [] if files else sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
    if pickles and not pickle:
        raise InvalidInput(
            f"{pickles[0]} is a pickle, which is not read by default; convert it with "
            "`forerun drafters import DIR OUT --pickle`"
        )
    for file in pickles:
        tensors |= torch.load(file, map_location="cpu", weights_only=True)
    if not files and not pickles:
        raise ModelNotFound(f"{folder} holds no safetensors file; give the folder of a trained head")
    return tensors


def _with_changes(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """A head's tensors with the changes of a LoRA."""
    adapter = Adapter.read(folder)
    for given, (down, up) in adapter.changes.items():
        name = given if given in tensors else f"model.{given}"
        if name not in tensors or tensors[name].shape != (len(up), down.shape[1]):
            raise DamagedFile(
                f"the LoRA in {folder} changes {given[:80]!r} of {(len(up), down.shape[1])}, which the head in "
                f"{adapter.base} does not have: it is another head's"
            )
        weight = tensors[name]
        tensors[name] = (weight.float() + adapter.scale * (up.float() @ down.float())).to(weight.dtype)
    return tensors


def settings_in(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The settings under a key of a config; none where the key is absent, ValueError where it holds something else."""
    found = values.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{key} = {found!r:.60}")
    return found


def size_in(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A count or width in a config: a whole number from 1; ValueError where it cannot be one."""
    value = values[key] if default is None else values.get(key) or default
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ValueError(f"{key} = {value!r:.60}")
    return value


def rates_in(ours: Mapping[str, Any]) -> tuple[tuple[float, ...], ...]:
    """[levels][ranks] how often each rank was right, as our trainer measured it."""
    rates = tuple(tuple(map(float, row)) for row in ours.get("rates", ()))
    if not all(0.0 <= rate <= 1.0 for row in rates for rate in row):
        raise ValueError("rates outside 0 to 1")
    return rates


def check_weight(folder: Path, weights: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> None:
    """Raise where a weight that must have this shape is missing, has another, or holds no plain numbers."""
    if name not in weights:
        raise DamagedFile(f"{folder} has no weight {name!r}; is a file missing?")
    if tuple(weights[name].shape) != shape:
        given = tuple(weights[name].shape)
        raise DamagedFile(f"weight {name!r} of {folder} is {given} but its config says {shape}")
    kind = weights[name].dtype
    if name.endswith(".weight") and not (kind.is_floating_point and kind.itemsize > 1):
        said = str(kind).removeprefix("torch.")
        raise UnsupportedModel(f"weight {name!r} of {folder} is {said}: use a head whose files are not quantised")


@contextmanager
def config_of(whose: str) -> Iterator[None]:
    """While a config.json is read: what it lacks or garbles is a damaged file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise DamagedFile(f"config.json of the head lacks or garbles {brief(error)}; is it {whose}?") from None


def readers(
    weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, prefix: str = ""
) -> tuple[Callable[[str], Tensor], Callable[[str], Tensor | None]]:
    """How to get a weight under a prefix in one precision on one device: one that must be there, one that may be."""

    def get(name: str) -> Tensor:
        return weights[prefix + name].detach().to(device, dtype).contiguous()

    return get, lambda name: get(name) if prefix + name in weights else None


def write_shards(folder: Path, tensors: Mapping[str, Tensor], stem: str = "model") -> None:
    """One safetensors file, or several of at most 15 MiB (a larger tensor has one to itself) and an index."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, given in tensors.items():
        tensor = given.detach().cpu().contiguous()
        size = tensor.numel() * tensor.element_size()
        if used and used + size > _SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
    for stale in folder.glob(f"{stem}*.safetensors"):
        stale.unlink()
    if len(shards) == 1:
        write_tensors(folder / f"{stem}.safetensors", shards[0])
        return
    places: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        name = f"{stem}-{i:05}-of-{len(shards):05}.safetensors"
        write_tensors(folder / name, shard)
        places |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


class DraftVocabulary:
    """Rows of a draft head, ascending in the target's ids."""

    def __init__(self, ids: Tensor, vocab_size: int) -> None:
        self.ids = ids  # [Vd] int64, ascending
        self.vocab_size = vocab_size  # the target's
        self.is_whole = len(ids) == vocab_size

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def whole(cls, vocab_size: int, device: torch.device | str = "cpu") -> DraftVocabulary:
        """Every id of the target."""
        return cls(torch.arange(vocab_size, device=device), vocab_size)

    @classmethod
    def most_frequent(cls, counts: Tensor, size: int, always: Sequence[int] = ()) -> DraftVocabulary:
        """The `size` ids with the largest counts [V] (the lowest id on a tie), and those named in any case."""
        if not 1 <= size <= len(counts):
            raise InvalidInput(f"a draft vocabulary of {size} is out of range: 1 to the target's {len(counts)}")
        ranked = counts.to(torch.int64).clone()
        ranked[list(always)] = torch.iinfo(torch.int64).max
        order = ranked.argsort(descending=True, stable=True)
        return cls(order[:size].sort().values, len(counts))

    @classmethod
    def from_file(cls, weights: Mapping[str, Tensor], rows: int, vocab_size: int) -> DraftVocabulary:
        """From `d2t`; without it the head must have a row for every id of the target."""
        if "d2t" not in weights:
            if rows != vocab_size:
                raise DamagedFile(
                    f"a draft head of {rows} rows for a vocabulary of {vocab_size} has no d2t: which ids are they?"
                )
            return cls.whole(vocab_size)
        offsets = weights["d2t"].to(torch.int64).flatten()
        ids = torch.arange(len(offsets)) + offsets
        ascending = bool((ids[1:] > ids[:-1]).all()) if len(ids) > 1 else True
        if len(ids) != rows or not ascending or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise DamagedFile(
                f"d2t does not name {rows} different ids below {vocab_size} in order: it holds offsets "
                "(id - row), not ids; write the head again"
            )
        return cls(ids, vocab_size)

    def tensors(self) -> dict[str, Tensor]:
        ids = self.ids.cpu()
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[ids] = True
        return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}

    def to(self, device: torch.device) -> DraftVocabulary:
        return DraftVocabulary(self.ids.to(device), self.vocab_size)

    def rows_of(self, weight: Tensor) -> Tensor:
        """The rows of a full LM head [V, D] that this vocabulary keeps [Vd, D]."""
        return weight if self.is_whole else weight[self.ids.to(weight.device)].contiguous()

    def spread(self, logits: Tensor) -> Tensor:
        """Draft logits [..., Vd] over the target's ids [..., V]; what cannot be drafted is impossible."""
        if self.is_whole:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        full[..., self.ids] = logits
        return full


SMALLEST = 1 << 16  # numbers in a matrix that is worth packing


def is_worth_packing(weight: Tensor) -> bool:
    return weight.numel() >= SMALLEST and weight.shape[1] % 32 == 0 and weight.dtype == torch.float32


def packed_form(weight: Tensor, bias: Tensor | None = None, mode: FloatMode = "q8") -> PackedWeight:
    """A weight as the kernels read it: in blocks, or float32 where it is small or odd."""
    weight = weight.detach().float()
    return pack_floats(weight, mode if is_worth_packing(weight) else "float32", bias)


class Matrix:
    """[outputs, inputs], to be multiplied with rows."""

    def __init__(self, weight: Tensor, *, packed: bool = True) -> None:
        self.outputs, self.inputs = weight.shape
        self._plain: Tensor | None = weight
        if packed and is_worth_packing(weight) and weight.device.type == "cpu" and native.available():
            self._kept = pack_floats(weight, "q8")  # the struct below points into it
            self._struct = side_by_side([self._kept])
            self._plain = None

    def times(self, x: Tensor) -> Tensor:
        """x [N, inputs] -> [N, outputs]"""
        if self._plain is not None:
            return linear(x, self._plain)
        rows = x.contiguous()
        out = rows.new_empty(len(rows), self.outputs)
        native.match_threads(torch.get_num_threads())
        call = native.library().fr_linear_rows
        if call(ctypes.byref(self._struct), rows.data_ptr(), out.data_ptr(), len(rows)):
            raise MemoryError(f"no memory for the blocks of {len(rows)} rows")
        return out

    def add_to(self, onto: Tensor, x: Tensor) -> Tensor:
        return onto.add_(self.times(x))


BLOCK = 32
SMALLEST_IN_BYTES = 1 << 14  # numbers in a matrix that is worth it
SCALES = ".scales"


def in_bytes(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Large matrices as bytes and scales; all else as it is."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        found[name] = weight
        large = weight.dim() == 2 and weight.numel() >= SMALLEST_IN_BYTES and weight.shape[1] % BLOCK == 0
        if large and weight.is_floating_point():
            found[name], found[name + SCALES] = _bytes_of(weight)
    return found


def widened(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `in_bytes` wrote, in bfloat16."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        scales = weights.get(name + SCALES)
        if name.endswith(SCALES):
            continue
        if scales is not None and weight.dtype == torch.int8:
            blocks = weight.view(len(weight), -1, BLOCK).float() * scales.float()[..., None]
            weight = blocks.view(weight.shape).bfloat16()
        found[name] = weight
    return found


def _bytes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight.float().view(len(weight), -1, BLOCK)
    scales = (blocks.abs().amax(-1) / 127).half().float()
    data = (blocks / scales.clamp(min=1e-7)[..., None]).round().clamp(-127, 127)
    return data.to(torch.int8).view(weight.shape), scales.half()
