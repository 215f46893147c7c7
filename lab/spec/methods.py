"""The rows of the table: every drafter of the registry, with the head, plan or second model that it runs.

A drafter whose head or second model was not given stays in the table, with what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from forerun.build.fingerprint import find_head
from forerun.core import registry
from forerun.core.errors import InvalidInput
from forerun.core.registry import DrafterSpec
from forerun.heads import HeadFolder, open_head
from forerun.measure.bench.contenders import LAYERS
from forerun.measure.bench.settings import AUTO, DrafterSetup
from forerun.models.load.checkpoint import Checkpoint

LOOKUPS = ("ngram", "suffix", "recycling", "lookahead")
CASCADES = (f"ngram>{LAYERS}",)
HEADS = ("eagle3", "mtp")  # whose chosen tokens are drafted on a GPU by captured graphs, and drawn ones on the host
CHOSEN = " chosen"
_MAPS = ("d2t", "t2d")  # between vocabularies: not parameters


@dataclass(frozen=True, slots=True)
class Method:
    """One row: a drafter and what it runs, or why it cannot run."""

    setup: DrafterSetup
    why_not: str = ""
    # its tokens are chosen above T=0 too, and not drawn: a row where that is another drafter
    chosen: bool = False

    @property
    def name(self) -> str:
        return self.setup.name


@dataclass(frozen=True, slots=True)
class Given:
    heads: tuple[HeadFolder, ...] = ()
    draft_models: tuple[str, ...] = ()  # smallest first
    layers: str | None = None  # a plan for layer_skip

    def __post_init__(self) -> None:
        if (count := len(self.draft_models)) > 2:
            raise InvalidInput(f"--draft-models names {count} models; give one, or two, the smaller first")

    def head_for(self, spec: DrafterSpec) -> list[HeadFolder]:
        return [head for head in self.heads if head.kind in spec.formats]


def given_heads(folders: Sequence[str], checkpoint: Checkpoint) -> tuple[HeadFolder, ...]:
    """The heads in these folders, and of other kinds those that come with the package for this model."""
    found = []
    for folder in folders:
        head = open_head(Path(folder).expanduser())
        if head is None:
            raise InvalidInput(f"{folder} holds no head of a known kind; give the folder of a trained head")
        found.append(head)
    kinds = {head.kind for head in found}
    for spec in registry.drafters.specs():
        bundled = find_head(checkpoint, spec.name)
        if bundled is not None and bundled.head.kind not in kinds:
            kinds.add(bundled.head.kind)
            found.append(bundled.head)
    return tuple(found)


def every_method(given: Given) -> list[Method]:
    """The whole table: look-ups, the target's own layers, second models and their cascades, heads."""
    names = [*LOOKUPS, LAYERS, *CASCADES]
    for spec in registry.drafters.specs():
        if spec.needs == "checkpoint":
            names += _with_models(spec, given.draft_models)
        elif spec.needs == "head":
            names += _with_heads(spec, given.head_for(spec))
        elif spec.name not in ("none", *names) and not spec.by_request:
            names.append(spec.name)  # of another package
    if len(given.draft_models) == 2:
        both = ";".join(given.draft_models)
        names += [f"draft_model>draft_model={both}", f"ngram>draft_model>draft_model={both}"]
    heads = tuple(head for head in HEADS if given.head_for(registry.drafters.spec(head)))
    names += [f"{name}{CHOSEN}" for name in names if name.partition("=")[0].endswith(heads)]
    return [find_method(name, given) for name in names]


def _with_models(spec: DrafterSpec, models: Sequence[str]) -> list[str]:
    cascaded = [spec.name, f"ngram>{spec.name}"] if spec.name == "draft_model" else [spec.name]
    return [f"{name}={model}" for model in models for name in cascaded] or [spec.name]


def _with_heads(spec: DrafterSpec, heads: Sequence[HeadFolder]) -> list[str]:
    """A drafter with each of its heads, and with the look-up that is best composed with it."""
    names = dict.fromkeys((spec.name, spec.best if heads else spec.name))
    if len(heads) < 2:
        return list(names)
    return [f"{name}={head.path}" for head in heads for name in names]


def find_method(text: str, given: Given) -> Method:
    """The method of a name: as `forerun bench` names drafters, with what was given where the name does not say."""
    if text.endswith(CHOSEN):
        drawn = find_method(text.removesuffix(CHOSEN), given)
        return replace(drawn, setup=replace(drawn.setup, name=drawn.name + CHOSEN), chosen=True)
    setup = DrafterSetup.parse(text)
    if setup.drafter is None:
        raise InvalidInput(f"{AUTO!r} is one of the other methods: the table says which; leave it out")
    if setup.head is not None:
        return Method(setup)
    spec = registry.drafters.spec(setup.drafter)
    if spec.needs == "head":
        heads = given.head_for(spec)
        missing = f"no {spec.formats[0] if spec.formats else 'fitting'} head was given (--heads FOLDER)"
        return Method(replace(setup, head=str(heads[0].path))) if heads else Method(setup, missing)
    if spec.needs == "checkpoint":
        if len(given.draft_models) < spec.checkpoints:
            return Method(setup, "no second model was given (--draft-models NAME)")
        return Method(replace(setup, head=";".join(given.draft_models[: spec.checkpoints])))
    return Method(replace(setup, head=given.layers) if LAYERS in spec.name else setup)


def parameters_in(folder: Path) -> int:
    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                sizes = opened.get_slice(name).get_shape()
                count += 0 if name in _MAPS else _product(sizes)
    return count


def parameters_of(checkpoint: Checkpoint) -> int:
    return sum(_product(checkpoint.weights.shape(name)) for name in checkpoint.weights)


def _product(sizes: Sequence[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def training_minutes(folder: Path) -> float | None:
    """What its training took, with that of the head it started from; None where its provenance does not say."""
    try:
        record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return _minutes(record) if isinstance(record, dict) else None


def _minutes(record: Mapping[str, Any]) -> float | None:
    own = record.get("minutes")
    if not isinstance(own, int | float):
        return None
    start = record.get("init")
    if not isinstance(start, Mapping):
        return float(own)
    before = _minutes(start.get("provenance") or {})
    return None if before is None else own + before
