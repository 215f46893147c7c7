"""What a config.json says about quantised weights: compressed-tensors, block FP8, MXFP4, AWQ and GPTQ.

Formats and variants that are not understood raise UnsupportedModel with the format's name: never a guess. Which
modules are quantised is decided by the tensors in the files, so lists of modules that stay plain need no reading.
Nothing here imports torch: `forerun models` describes checkpoints with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forerun.core.errors import DamagedFile, UnsupportedModel, brief

Layout = Literal["awq", "gptq", "packed", "elements", "mxfp4"]
# compressed-tensors: how a format lays out its weights; the other names are refused
_FORMATS: dict[str, Layout | None] = {
    "pack-quantized": "packed",
    "int-quantized": "elements",
    "float-quantized": "elements",
    "naive-quantized": "elements",
    "dense": None,
}


@dataclass(frozen=True, slots=True)
class Scheme:
    layout: Layout
    bits: int
    block: tuple[int, int]  # rows and columns that share a scale; 0 = all
    floats: bool = False  # FP8, not whole numbers
    zeros: bool = False  # with zero points
    less_one: str = ""  # GPTQ stores zero points less one; "words": subtracted from whole words, "fields": from each
    act_order: bool = False  # columns name their group

    def __str__(self) -> str:
        rows, columns = self.block
        if rows > 1:
            shared = f"blocks of {rows} x {columns}"
        elif columns:
            shared = f"groups of {columns}"
        else:
            shared = "per channel" if rows else "per tensor"
        details = [shared, *(["zero points"] if self.zeros else []), *(["act-order"] if self.act_order else [])]
        return ", ".join(details)

    @property
    def numbers(self) -> str:
        """What the weights are made of."""
        return f"FP{self.bits}" if self.floats else f"{self.bits}-bit"


@dataclass(frozen=True, slots=True)
class Quantization:
    method: str  # in the words of its makers
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]  # modules, by name, pattern or class, and how they are stored
    unused: str = ""  # what the checkpoint has beside weights, and is not used

    def __str__(self) -> str:
        schemes = dict.fromkeys(scheme for _, scheme in self.groups)
        numbers = " and ".join(dict.fromkeys(scheme.numbers for scheme in schemes))
        return f"{numbers} ({self.method}, {'; '.join(dict.fromkeys(map(str, schemes)))})"

    def of(self, module: str) -> Scheme:
        """How a module is stored that the files hold quantised; a name counts more than a pattern or a class."""
        if len(self.groups) == 1:
            return self.groups[0][1]
        for matches in (_is_name, _is_pattern, _is_class):
            for targets, scheme in self.groups:
                if any(matches(target, module) for target in targets):
                    return scheme
        raise DamagedFile(f"config.json says nothing about how {module[:80]!r} is quantised; fetch it again")


def _is_name(target: str, module: str) -> bool:
    return target == module


def _is_pattern(target: str, module: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], module) is not None


def _is_class(target: str, module: str) -> bool:
    return target == "Linear"


def quantization_of(config: Mapping[str, Any]) -> Quantization:
    """What a config.json says where it is quantised; UnsupportedModel names what cannot be read."""
    given = _settings(config)
    if not isinstance(given, Mapping):
        raise DamagedFile(f"quantization_config in config.json is {given!r:.60}, not settings; fetch it again")
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise _unsupported(f"quant_method={method!r:.60}")
    if method == "mxfp4" and config.get("model_type", "gpt_oss") != "gpt_oss":
        raise _unsupported("quant_method='mxfp4' in another family than gpt_oss")
    try:
        return _METHODS[method](given)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, re.error) as error:
        said = f"it has no {error}" if isinstance(error, KeyError) else brief(error)
        raise DamagedFile(
            f"quantization_config ({method}) in config.json cannot be read ({said}); fetch it again"
        ) from error


def is_quantised(config: Mapping[str, Any]) -> bool:
    return bool(_settings(config))


def _settings(config: Mapping[str, Any]) -> Any:
    return config.get("quantization_config") or config.get("compression_config")


def describe(config: Mapping[str, Any]) -> str:
    """The format of a checkpoint's weights in a few words, or why it cannot be read; empty where they are plain."""
    try:
        return str(quantization_of(config)) if is_quantised(config) else ""
    except (UnsupportedModel, DamagedFile) as error:
        return str(error)


def _unsupported(what: str) -> UnsupportedModel:
    known = "compressed-tensors, fp8, mxfp4, awq and gptq"
    return UnsupportedModel(f"weights quantised with {what} cannot be read ({known} can): use another checkpoint of it")


def _awq(given: Mapping[str, Any]) -> Quantization:
    bits, version = int(given.get("bits", given.get("w_bit", 4))), str(given.get("version", "gemm")).lower()
    if bits != 4:
        raise _unsupported(f"AWQ of {bits} bits")
    if version != "gemm":
        raise _unsupported(f"AWQ in the layout {version!r:.40}")
    if not given.get("zero_point", True):
        raise _unsupported("AWQ without zero points")
    scheme = Scheme("awq", bits, (1, _group(given.get("group_size", given.get("q_group_size", 128)))), zeros=True)
    return Quantization("AWQ", ((("Linear",), scheme),))


def _gptq(given: Mapping[str, Any]) -> Quantization:
    bits, layout = int(given["bits"]), str(given.get("checkpoint_format") or given.get("format") or "gptq").lower()
    if bits not in (4, 8):
        raise _unsupported(f"GPTQ of {bits} bits")
    if given.get("is_marlin_format") or layout not in ("gptq", "gptq_v2"):
        raise _unsupported(f"GPTQ in the layout {'marlin' if given.get('is_marlin_format') else layout!r:.40}")
    overrides = [str(name) for name in given.get("dynamic") or () if not str(name).startswith("-:")]
    if overrides:
        raise _unsupported(f"GPTQ and settings of their own for some modules (dynamic {overrides[0]!r:.60})")
    writer = str((given.get("meta") or {}).get("quantizer", "")).lower()
    less_one = "" if layout == "gptq_v2" else "words" if "gptqmodel" in writer else "fields"
    scheme = Scheme(
        "gptq", bits, (1, _group(given["group_size"])), zeros=not given.get("sym", True), less_one=less_one,
        act_order=bool(given.get("desc_act")),
    )  # fmt: skip
    return Quantization("GPTQ", ((("Linear",), scheme),))


def _fp8(given: Mapping[str, Any]) -> Quantization:
    block, kind = given.get("weight_block_size"), str(given.get("fmt", given.get("format", "e4m3")))
    if "e4m3" not in kind and kind != "float-quantized":
        raise _unsupported(f"FP8 of the kind {kind!r:.40}")
    rows, columns = (0, 0) if block is None else map(int, block)
    if block is not None and min(rows, columns) < 1:
        raise ValueError(f"weight_block_size is {block!r:.40}")
    static = "scales of activations" if given.get("activation_scheme") == "static" else ""
    return Quantization("fp8", ((("Linear",), Scheme("elements", 8, (rows, columns), floats=True)),), static)


def _mxfp4(given: Mapping[str, Any]) -> Quantization:
    """Of gpt-oss's experts, which forerun.models.load.quantized.unstacked reads."""
    return Quantization("mxfp4", ((("Linear",), Scheme("mxfp4", 4, (1, 32), floats=True)),))


def _compressed(given: Mapping[str, Any]) -> Quantization:
    sparsity = (given.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _unsupported(f"compressed-tensors in the format {sparsity!r:.40}")
    if (given.get("transform_config") or {}).get("config_groups"):
        raise _unsupported("compressed-tensors and transforms of activations (transform_config)")
    listed, unused = [], list[str]()
    for group in given["config_groups"].values():
        if not isinstance(group, Mapping):
            raise _unsupported(f"compressed-tensors and a preset for {group!r:.40}")
        scheme = _scheme(group, str(group.get("format") or given.get("format")))
        if scheme is not None:
            targets = tuple(map(str, group["targets"]))
            for pattern in (target for target in targets if target.startswith("re:")):
                re.compile(pattern[3:])
            listed.append((targets, scheme))
            if (group.get("input_activations") or {}).get("dynamic") is False:
                unused.append("scales of activations")
    if given.get("kv_cache_scheme"):
        unused.append("scales of the KV cache")
    if not listed:
        raise _unsupported("compressed-tensors for other things than weights")
    return Quantization("compressed-tensors", tuple(listed), " and ".join(dict.fromkeys(unused)))


def _scheme(group: Mapping[str, Any], name: str) -> Scheme | None:
    if name not in _FORMATS:
        raise _unsupported(f"compressed-tensors in the format {name!r:.40}")
    layout, weights = _FORMATS[name], group.get("weights")
    if layout is None or weights is None:
        return None
    bits, floats, strategy = int(weights["num_bits"]), weights["type"] == "float", str(weights["strategy"])
    if bits not in ((4, 8) if layout == "packed" else (8,)) or (floats and layout == "packed"):
        raise _unsupported(f"compressed-tensors in the format {name!r}, {weights['type']!r:.20} of {bits} bits")
    blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, int(weights.get("group_size") or 0))}
    if strategy == "block":
        rows, columns = map(int, weights["block_structure"])
        blocks["block"] = rows, columns
    if strategy not in blocks or (strategy in ("group", "block") and min(blocks[strategy]) < 1):
        raise _unsupported(f"compressed-tensors by {strategy!r:.40} (group_size {weights.get('group_size')!r:.20})")
    zeros = not weights.get("symmetric", True)
    if zeros and (floats or strategy not in ("channel", "group")):
        raise _unsupported(f"compressed-tensors by {strategy!r:.40} with zero points")
    return Scheme(layout, bits, blocks[strategy], floats, zeros, act_order=weights.get("actorder") == "group")


def _group(size: object) -> int:
    """Columns that share a scale; files say -1 for all."""
    if type(size) is not int or size == 0 or size < -1:
        raise ValueError(f"group_size is {size!r:.40}")
    return max(size, 0)


_METHODS = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed}
