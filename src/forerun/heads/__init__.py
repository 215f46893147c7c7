"""Trained heads: which kind of head a folder holds, and the heads that come with the package. No torch here.

Only this module decides the kind of a head. A kind of another package is named in config.json:
{"forerun": {"format": KIND}}; which drafter runs a kind is in the registry.

Each lies in a folder of its own beside this file: config.json, safetensors and the fingerprint of its target, as
`forerun train` writes them. A head is used where shape and fingerprint are the model's (forerun.build.fingerprint).
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.core import registry
from forerun.core.checks import refuse_special, shown
from forerun.core.errors import InvalidInput, ModelNotFound
from forerun.core.params import SpeculativeConfig

BOX = Path(__file__).parent
_FAMILIES = ("medusa", "hydra")  # config.json counts their heads
_BLOCKS = ("dspark", "dflash", "peagle")  # config.json names their model
_SAME = {"dflash2": "dflash"}  # speculators' names of what is one kind here
_FORMAT = re.compile(r"([._-](i?q\d\w*|b?f16|fp16|f32|fp32))?(\.gguf)?$")


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """A head on disk, described by its config.json."""

    path: Path
    kind: str  # a format of the registry: eagle, eagle3, medusa, hydra, ...
    target: str  # what it was trained for, as the trainer named it
    width: int | None  # the target's
    vocab_size: int | None  # the target's
    layers: int | None  # how many the target must have; None = not said
    size: int  # bytes
    # How often the token at depth 1, 2, ... is right if those before it are; () = unknown.
    rates: tuple[float, ...] = ()

    @property
    def drafter(self) -> str:
        """The default drafter for it."""
        running = registry.drafters.running(self.kind)
        if not running:
            raise InvalidInput(f"{self.path} holds a head of the kind {shown(self.kind)}, which no drafter here runs")
        return running[0].best

    def serves(self, drafter: str) -> bool:
        return self.kind in registry.drafters.spec(drafter).formats

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Has a model with this configuration the width, vocabulary and layers of its target?"""
        known = (("hidden_size", self.width), ("vocab_size", self.vocab_size), ("num_hidden_layers", self.layers))
        return all(value is None or config.get(key) == value for key, value in known)

    def is_for(self, names: Iterable[str]) -> bool:
        """Was it trained for a model that is known by one of these names?"""
        wanted = _plain(self.target)
        return bool(wanted) and wanted in {_plain(name) for name in names}


def heads_in_the_box(box: Path = BOX) -> list[HeadFolder]:
    """Every head that comes with the package, by name."""
    found = (open_head(folder) for folder in sorted(box.iterdir()) if folder.is_dir())
    return [head for head in found if head is not None]


def fitting_heads(config: Mapping[str, Any], drafter: str = "auto", box: Path = BOX) -> list[HeadFolder]:
    """The heads of the box that fit a model's shape, and this drafter if one is named, in the registry's order."""
    order = [kind for spec in registry.drafters.specs() for kind in spec.formats]
    found = [head for head in heads_in_the_box(box) if head.fits(config) and head.kind in order]
    named = [head for head in found if drafter == "auto" or head.serves(drafter)]
    return sorted(named, key=lambda head: order.index(head.kind))


def with_head(speculative: SpeculativeConfig, drafter: str, swapped: str | None = None) -> SpeculativeConfig:
    """The settings with the head that this drafter runs: the configured one, or one that was swapped in for it.

    Where that is of another kind it is the box's for the same target: a request may ask for Medusa where the engine
    was loaded with the EAGLE-3 head of the box.
    """
    folder = swapped or speculative.draft_model
    if folder is None or registry.drafters.spec(drafter).needs != "head":
        return speculative
    given = open_head(Path(folder))
    if given is not None and not given.serves(drafter):  # where it holds none, the drafter says what is wrong
        same = (head for head in heads_in_the_box() if _plain(head.target) == _plain(given.target))
        other = next((head for head in same if head.width == given.width and head.serves(drafter)), None)
        if other is None:
            raise InvalidInput(
                f"the drafter {drafter!r} cannot run the head {given.path.name!r}, which is of the kind "
                f"{given.kind}; use drafter={given.drafter!r}, or give draft_model=FOLDER of one that it runs"
            )
        folder = str(other.path)
    return replace(speculative, draft_model=folder)


def lora_base(folder: Path, box: Path = BOX) -> Path | None:
    """The folder of the head that a LoRA in PEFT's form changes: it names a path, or a head of the box.

    None where the folder holds something else.
    """
    if (folder / "config.json").exists():
        return None
    try:
        base = Path(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"])
        places = base.expanduser(), folder / base, box / base
        return next((place for place in places if (place / "config.json").is_file()), None)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, RuntimeError):
        return None


def must_be_folder(folder: Path) -> None:
    """Raise where there is no folder to read a head from."""
    if not folder.is_dir():
        raise ModelNotFound(f"there is no folder {str(folder)!r}; give the folder of a trained head")


def open_head(folder: Path) -> HeadFolder | None:
    refuse_special(folder)
    if (base := lora_base(folder)) is not None:
        found = open_head(base)
        return None if found is None else replace(found, path=folder)
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    kind = kind_of(values, lambda: _weights_in(folder)) if isinstance(values, dict) else None
    if kind is None:
        return None
    shape = {**values, **_settings(values, "transformer_layer_config")}
    nested = _settings(_settings(values, "speculators_config"), "verifier")
    target = values.get("target_model") or values.get("base_model_name_or_path") or nested.get("name_or_path")
    width = values.get("target_hidden_size") or shape.get("hidden_size")
    layers = _settings(values, "forerun").get("target_layers")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    rates = _first_rates(_settings(values, "forerun").get("rates"))
    return HeadFolder(folder, kind, str(target or ""), width, shape.get("vocab_size"), layers, size, rates)


def _first_rates(table: Any) -> tuple[float, ...]:
    """Of [levels][ranks], the first rank of every level; none where the value is something else."""
    rows = table if isinstance(table, list) else []
    firsts = [row[0] if isinstance(row, list) and row else None for row in rows]
    return (
        tuple(rate for rate in firsts if isinstance(rate, float) and 0.0 <= rate <= 1.0) if None not in firsts else ()
    )


def _settings(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Nested settings; none where the value is something else: loading the head then says what is wrong."""
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def kind_of(values: Mapping[str, Any], weights: Callable[[], Iterable[str]]) -> str | None:
    """The kind of a head from its config.json and the names of its weights; None = no known kind.

    Weights are read only where the config does not say.
    """
    if named := _settings(values, "forerun").get("format"):
        return str(named)
    for family in _FAMILIES:
        if f"{family}_num_heads" in values:
            return family
    listed = values.get("architectures")
    names = " ".join(map(str, listed)).lower() if isinstance(listed, list) else ""
    if speculators := values.get("speculators_model_type"):
        return _SAME.get(str(speculators), str(speculators))
    for family in _BLOCKS:
        if family in names or f"{family}_config" in values:
            return family
    if "eagle" in names and ("ptd_token_id" in values or "pard_token" in values):
        return "peagle"  # under EAGLE-3's name, with a token for masks
    if "eagle" in names:
        return "eagle3" if "eagle3" in names else "eagle"
    found = set(weights())
    if carries_mtp(found) and "norm.weight" not in found:
        return "mtp"  # the layer alone: a whole model that has one is a model
    # EAGLE-1's authors call theirs an ordinary model
    if "fc.weight" in found and any("self_attn" in name for name in found):
        return "eagle3" if any(name.endswith("hidden_norm.weight") for name in found) else "eagle"
    return None


def carries_mtp(names: Iterable[str]) -> bool:
    """Is there a multi-token-prediction layer among weights of these names?"""
    return any(name.endswith(("eh_proj.weight", "mtp.fc.weight")) for name in names)


def _weights_in(folder: Path) -> set[str]:
    """The names in the headers of a folder's safetensors files, which are small JSON documents."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        try:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                names |= set(json.loads(opened.read(min(length, 1 << 24))))
        except (OSError, ValueError, struct.error):
            continue  # loading it says what is wrong
    return {name.removeprefix("model.") for name in names}


def _plain(name: str) -> str:
    """A model's name without its owner, its format and its quantisation, in small letters and digits."""
    bare = _FORMAT.sub("", name.rstrip("/").rsplit("/", 1)[-1].lower())
    return "".join(letter for letter in bare if letter.isalnum())


_NAME = re.compile(r"v\d{4,}")
CURRENT = "current"


class HeadVersions:
    """A folder of versions of one head: v0001, v0002, ..., and a link `current` to the one that is to draft.

    `forerun train refresh` adds versions and moves the link; a server that was given the folder follows it. The link is
    replaced in one step, so that a reader finds the old version or the new one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        if not self.folder.is_dir():
            return []
        found = [path.name for path in self.folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda name: int(name[1:]))

    def next_name(self) -> str:
        """The name of a version to come; numbers are not used twice."""
        return f"v{max((int(name[1:]) for name in self.names()), default=0) + 1:04d}"

    def current(self) -> Path | None:
        """The version that is to draft; None where there is none yet, or the link leads nowhere."""
        try:
            name = os.readlink(self.folder / CURRENT)
        except OSError:
            return None
        path = self.folder / name
        return path if _NAME.fullmatch(name) and path.is_dir() else None

    def must_have_current(self) -> Path:
        """The version that is to draft; raises where there is none."""
        found = self.current()
        if found is None:
            raise InvalidInput(
                f"{self.folder} has no link `{CURRENT}` to a version of a head; "
                f"make the first with `forerun train refresh --out {self.folder}`"
            )
        return found

    def publish(self, name: str) -> None:
        """Let this version draft from now on."""
        if name not in self.names():
            raise InvalidInput(
                f"{self.folder} has no version {name[:80]!r}; it has {', '.join(self.names()) or 'none'}"
            )
        part = self.folder / f".{CURRENT}-{os.getpid()}"
        part.unlink(missing_ok=True)
        part.symlink_to(name)
        part.replace(self.folder / CURRENT)
