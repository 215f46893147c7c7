"""What Forerun supports, as Markdown tables made from the code: families, GGUF types, number formats, machines, parts.

Every cell is asked of the code that decides it, so that the page cannot promise what a load would refuse. What the C
library has is read from its source: the page must not depend on the machine that writes it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import torch

from forerun.build.engine import _dtype
from forerun.core import registry
from forerun.core.errors import InvalidInput, UnsupportedModel
from forerun.core.params import Dtype
from forerun.heads import heads_in_the_box
from forerun.models.config import DecoderConfig
from forerun.models.cuda.file_weights import BITS
from forerun.models.cuda.network import HAS, reason_against
from forerun.models.families import FAMILIES, WRAPPED, RecurrentKind
from forerun.models.hybrid.mixers import DeltaNet, Mamba2, Memory, ShortConv
from forerun.models.load.catalog import known_models
from forerun.models.load.quantized.scheme import quantization_of
from forerun.models.load.quants import LAYOUTS, Blocks, Layout, dequantize
from forerun.models.native.target import NativeDecoder
from forerun.models.native.weights import Mode

ROOT = Path(__file__).parents[1]
C = ROOT / "src" / "forerun" / "models" / "native" / "c"
YES, NO = "yes", "-"
# A checkpoint of ordinary sizes; every family reads what it has of this and takes its own defaults for the rest.
_ORDINARY: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
    "n_routed_experts": 64,
}  # fmt: skip
_MORE = {family: {"residual_multiplier": 0.22} for family in ("granitemoe", "granitemoeshared")}  # all have it

_REFUSED: dict[str, dict[str, Any]] = {  # what checkpoints of a family may have that is not there yet
    "nemotron_h": {"hybrid_override_pattern": "ME*E", "moe_latent_size": 1024},
    "olmoe": {"clip_qkv": 8.0},
    "lfm2_moe": {"use_expert_bias": False},
    "ernie4_5_moe": {"use_bias": True},
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def families() -> str:
    """One row per family that our own decoder runs, and whose language part is one of them."""
    rows = table(
        ("`model_type`", "GGUF architecture", "C kernels (CPU)", "Triton kernels (GPU)", "torch (CPU, GPU)"),
        ([f"`{family}`", *_kernels_of(family), YES] for family in FAMILIES),
    )
    wrapped = ", ".join(f"`{outer}` as `{part.family}`" for outer, part in WRAPPED.items())
    vision = f"Of vision models the language part runs, and requests with images are refused: {wrapped}."
    return f"{rows}\n\n{_reasons()}\n\n{vision}"


def _ordinary(family: str) -> DecoderConfig:
    return DecoderConfig.from_hf({"model_type": family, **_ORDINARY, **_MORE.get(family, {})})


def _kernels_of(family: str) -> Iterator[str]:
    config = _ordinary(family)
    yield f"`{FAMILIES[family].gguf}`" if FAMILIES[family].gguf else NO
    yield YES if NativeDecoder.reason_against(config) is None else NO
    yield YES if reason_against(config) is None else _parts_in_triton(config)


def _parts_in_triton(config: DecoderConfig) -> str:
    """Of a decoder in torch that works row by row; the other one has none."""
    if config.special is None:
        return NO
    mixers: dict[RecurrentKind, type] = {"short_conv": ShortConv, "delta_net": DeltaNet, "mamba2": Mamba2}
    parts = ["attention"] if config.latent is None else []
    if config.recurrent is not None and issubclass(mixers[config.recurrent.kind], Memory):
        parts.append("scans")
    return " and ".join(parts) or NO


def _reasons() -> str:
    """Why a column is not all yes, and what no kernel of the Triton decoder has."""
    lines = list[str]()
    for column, of in (("the C kernels", NativeDecoder.reason_against), ("the Triton kernels alone", reason_against)):
        reasons = dict[str, list[str]]()
        for family in FAMILIES:
            if (reason := of(_ordinary(family))) is not None:
                reasons.setdefault(reason.removeprefix("it has ").removeprefix("no kernels for "), []).append(family)
        why = (f"{', '.join(f'`{name}`' for name in names)} ({reason})" for reason, names in reasons.items())
        lines.append(f"- Not run by {column}: {'; '.join(why) or 'none'}.")
    without = dict[str, list[str]]()
    for family in FAMILIES:
        if FAMILIES[family].gguf is None:
            without.setdefault(_ordinary(family).special or "its tensor names are not mapped", []).append(family)
    why = (f"{', '.join(f'`{name}`' for name in names)} ({reason})" for reason, names in without.items())
    lines.append(f"- Not read from GGUF: {'; '.join(why)}.")
    lines.append(f"- Left to transformers: {'; '.join(map(_refusal, _REFUSED))}.")
    lacking = [name for name in _ordinary("llama").parts if name not in HAS]
    lines.append(f"- Not in the Triton kernels: {', '.join(lacking)}. Such a model runs in torch on a GPU.")
    return "\n".join(lines)


def _refusal(family: str) -> str:
    try:
        DecoderConfig.from_hf({"model_type": family, **_ORDINARY, **_REFUSED[family]})
    except UnsupportedModel as error:
        return f'`{family}` ("{error}")'
    raise AssertionError(f"{family} with {_REFUSED[family]} is not refused any more")


def gguf_types() -> str:
    """One row per block type that can be read, then those that cannot."""
    packed = kernel_types()
    read = [layout for kind, layout in LAYOUTS.items() if _is_read(kind)]
    rows = [
        (
            f"`{layout.name}`",
            f"{8 * layout.bytes / layout.weights:g}",
            "as it is" if layout.name in packed else "as float32",
            _on_hopper(layout),
        )
        for layout in read
    ]
    unread = ", ".join(f"`{layout.name}`" for layout in LAYOUTS.values() if layout not in read)
    head = ("block type", "bits per weight", "held in memory by the C kernels", "by a Hopper GPU with `--dtype gguf`")
    return f"{table(head, rows)}\n\nNot read: {unread}."


def _on_hopper(layout: Layout) -> str:
    if layout.name == "MXFP4":
        return "experts of gpt-oss as they are (any GPU, `bfloat16` too)"
    return f"packed, {BITS[layout.name]:g} bits" if layout.name in BITS else "as bfloat16"


def _is_read(kind: int) -> bool:
    layout = LAYOUTS[kind]
    if layout.name[0] == "I" and layout.name[1:].isdigit():
        return False  # integers: no weights
    try:
        dequantize(Blocks(kind, (1, layout.weights), torch.zeros(layout.bytes, dtype=torch.uint8)))
    except (UnsupportedModel, KeyError):
        return False
    return True


def kernel_types() -> set[str]:
    """The GGUF types that the C kernels multiply as they are: those that pack.c gives a format, and two floats."""
    switch = re.search(r"static int format_of\(.*?\n}", (C / "linear" / "pack.c").read_text(), re.DOTALL)
    assert switch is not None, "pack.c has a function format_of"
    return {*re.findall(r"case GGUF_(\w+)", switch[0]), "F32", "BF16"}


def quantised_files() -> str:
    """One row per format of quantised safetensors, and those that are refused."""
    group = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    whole = {"num_bits": 8, "type": "int", "strategy": "channel"}
    floats = {"num_bits": 8, "type": "float"}
    weights = [
        ("float-quantized", {**floats, "strategy": "tensor"}), ("float-quantized", {**floats, "strategy": "channel"}),
        ("float-quantized", {**floats, "strategy": "block", "block_structure": [128, 128]}),
        ("int-quantized", whole), ("pack-quantized", whole), ("pack-quantized", group),
        ("pack-quantized", {**group, "symmetric": False}), ("pack-quantized", {**group, "actorder": "group"}),
    ]  # fmt: skip
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    configs: list[dict[str, Any]] = [
        *(_compressed(name, **args) for name, args in weights),
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, {"quant_method": "fp8"}, {"quant_method": "mxfp4"},
        {"quant_method": "awq", "bits": 4, "group_size": 128}, gptq, {**gptq, "bits": 8},
        {**gptq, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
    ]  # fmt: skip
    rows = []
    for config in configs:
        layout = config.get("format") or config.get("checkpoint_format") or "-"
        rows.append((f"`{config['quant_method']}`", f"`{layout}`" if layout != "-" else NO, _described(config)))
    return table(("`quant_method`", "format", "read as"), rows)


def _compressed(name: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}


def _described(config: dict[str, Any]) -> str:
    """What loading says; a format that is refused must not be in the table."""
    return str(quantization_of({"quantization_config": config}))


def number_formats() -> str:
    """One row per value of `dtype`."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    rows = []
    for name in get_args(Dtype):
        kernels = "as the file packs it, else float32" if name == "auto" else YES if name in get_args(Mode) else NO
        rows.append((f"`{name}`", kernels, _computed_in(name, cpu), _computed_in(name, gpu)))
    return table(("`dtype`", "C kernels (CPU)", "torch or transformers (CPU)", "GPU"), rows)


def _computed_in(name: str, device: torch.device) -> str:
    if name == "gguf" and device.type == "cuda":
        return "bfloat16 rows, the file's weights (Hopper)"
    try:
        found = str(_dtype(name, device)).removeprefix("torch.")
    except InvalidInput:
        return NO
    return YES if found == name else f"{found} rows, {name} weights" if name in ("int8", "fp8", "w4") else found


def processors() -> str:
    """One row per architecture: the instruction sets that the C kernels have code for, best first."""
    names = {"defined(__x86_64__)": "x86-64, with AVX2 and FMA at least", "defined(__aarch64__)": "ARM, 64 bit"}
    found: dict[str, list[str]] = {}
    nested, here = 0, ""
    for line in (C / "dispatch.c").read_text().splitlines():
        word, _, condition = line.partition(" ")
        if word.startswith("#if"):
            nested += 1
        if nested == 1 and word in ("#if", "#elif", "#else"):
            here = names.get(condition, "others")
        if word == "#endif":
            nested -= 1
        if paths := re.findall(r'{"([\w-]+)", fr_packed_', line):
            found.setdefault(here, []).extend(f"`{path}`" for path in paths)
    return table(("processor", "code paths, best first"), ((name, ", ".join(paths)) for name, paths in found.items()))


def wheels() -> str:
    """What wheels are built for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = project["tool"]["cibuildwheel"]
    rows = [
        (
            "Linux",
            ", ".join(f"`{arch}`" for arch in build["linux"]["archs"]),
            f"`{build['linux']['manylinux-x86_64-image']}`",
        )
    ]
    rows.append(("macOS", ", ".join(f"`{arch}`" for arch in build["macos"]["archs"]), NO))
    return table(("system", "processors", "C library"), rows)


def models() -> str:
    rows = [
        (f"`{model.name}`", model.description, f"{model.size / 1e6:.0f} MB", model.licence, model.gain or "by look-ups")
        for model in known_models()
    ]
    return table(("name", "model", "size", "licence", "drafting"), rows)


def heads() -> str:
    rows = [(f"`{head.path.name}`", head.kind, head.target, f"{head.size / 1e6:.1f} MB") for head in heads_in_the_box()]
    return table(("folder", "kind", "trained for", "size"), rows)


def drafters() -> str:
    """One row per drafter; compositions are made of these."""
    needs = {"nothing": NO, "checkpoint": "a second model", "head": "a head"}
    rows = [
        (f"`{spec.name}`", needs[spec.needs], _named(spec.vllm), _named(spec.sglang), spec.says)
        for spec in registry.drafters.specs()
    ]
    return table(("drafter", "needs", "in vLLM", "in SGLang", "what it does"), rows)


def _named(name: str | None) -> str:
    return NO if name is None else f"`{name}`"


def verifiers() -> str:
    rows = []
    for name in registry.verifiers.names():
        cls = registry.verifiers.get(name)
        rows.append((f"`{name}`", YES if cls().exact else "**no**", _first_sentence(cls.__doc__)))
    return table(("verifier", "exact", "what it does"), rows)


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())
