"""Quantised weights of safetensors files under their ordinary names, dequantised one at a time when asked for."""

from __future__ import annotations

import logging
from collections import defaultdict
from copy import copy

import torch
from torch import Tensor

from forerun.core.errors import DamagedFile
from forerun.models.load.quantized.layouts import Module, Numbers
from forerun.models.load.quantized.scheme import Quantization, Scheme
from forerun.models.load.weights import SafetensorsWeights, Weights

log = logging.getLogger(__name__)

_WORDS = ("qweight", "weight_packed")
_SCALES = ("weight_scale", "weight_scale_inv")
_OTHERS = {  # parts of quantised weights, and scales of rows and of the KV cache, which are not used
    "scales", "qzeros", "g_idx", *_SCALES, "weight_zero_point", "weight_shape", "weight_g_idx",
    "input_scale", "input_zero_point", "output_scale", "output_zero_point", "q_scale", "k_scale", "v_scale",
}  # fmt: skip
_QUANTISED_TYPES = ("I8", "U8", "F8_E4M3", "F8_E5M2")
_FUSED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # biases that are read together


class QuantizedWeights(Weights):
    """`X.weight` for every module X that the files hold quantised, in float32; other weights as they are."""

    def __init__(self, files: SafetensorsWeights, quantization: Quantization) -> None:
        self.files, self.quantization = files, quantization
        self.device: torch.device | str = "cpu"
        self.names = self._schemes = self._find()
        if quantization.unused:
            log.warning("%s: %s are not used: rows stay in 16 or 32 bits", files.folder, quantization.unused)

    def on(self, device: torch.device | str) -> QuantizedWeights:
        there = copy(self)
        there.device = device
        return there

    def shape(self, name: str) -> tuple[int, ...]:
        scheme = self._schemes[name]
        return self.files.shape(name) if scheme is None else self._module(name, scheme).shape()

    def __getitem__(self, name: str) -> Tensor:
        scheme = self._schemes[name]
        return self.files[name] if scheme is None else self._module(name, scheme).numbers().widened()

    def scheme(self, name: str) -> Scheme | None:
        """How a weight is stored; None = as it is."""
        return self._schemes[name]

    def numbers(self, name: str) -> Numbers:
        """A quantised weight as the files have it."""
        scheme = self._schemes[name]
        assert scheme is not None
        return self._module(name, scheme).numbers()

    def _module(self, name: str, scheme: Scheme) -> Module:
        return Module(self.files, name.removesuffix(".weight"), scheme, self.device)

    def _find(self) -> dict[str, Scheme | None]:
        """Every weight, and how it is stored; None = as it is."""
        found = dict[str, Scheme | None]()
        for name in self.files:
            stem, _, part = name.rpartition(".")
            if part in _WORDS:
                found[f"{stem}.weight"] = self._scheme(stem, part)
            elif part == "weight":
                found[name] = self._scheme(stem, part) if self._is_quantised(stem) else None
            elif part not in _OTHERS:
                found[name] = None
        for name in self._zero_biases(found):
            del found[name]
        return found

    def _scheme(self, stem: str, part: str) -> Scheme:
        assert self.quantization is not None
        scheme = self.quantization.of(stem)
        expected = {"packed": "weight_packed", "elements": "weight"}.get(scheme.layout, "qweight")
        if part != expected:
            raise DamagedFile(
                f"{self.files.folder} is damaged: it has {f'{stem}.{part}'[:80]!r} where its config says "
                f"{expected!r} ({self.quantization}); fetch it again"
            )
        return scheme

    def _is_quantised(self, stem: str) -> bool:
        kind = self.files.kind(f"{stem}.weight")
        if kind in _QUANTISED_TYPES:
            return True
        if any(f"{stem}.{scale}" in self.files for scale in _SCALES):
            raise DamagedFile(
                f"{self.files.folder} is damaged: {stem[:80]!r} has scales, but its weight is {kind}; fetch it again"
            )
        return False

    def _zero_biases(self, found: dict[str, Scheme | None]) -> list[str]:
        """Biases that GPTQ's libraries add to layers without: left out, since not all kernels have these biases."""
        alike = defaultdict[str, list[str]](list)
        for name, scheme in found.items():
            bias = name.removesuffix("weight") + "bias"
            if scheme is not None and scheme.layout == "gptq" and bias in found:
                kind = name.rsplit(".", 2)[-2]
                alike[_FUSED.get(kind, kind)].append(bias)
        return [name for names in alike.values() if not any(self.files[name].any() for name in names) for name in names]
