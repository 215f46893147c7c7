"""Names to classes, without importing them: `registry.drafters.get("ngram")` imports only ngram's module.

A third party adds a drafter by an entry point in the group `forerun.drafters` (or `.verifiers`,
`.controllers`), or at run time by `register`. Nothing here knows what the classes do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from forerun.errors import UnknownName


@dataclass(slots=True)
class Registry:
    """One kind of named part; the values are "module:Class" until somebody asks for the class."""

    kind: str
    paths: dict[str, str] = field(default_factory=dict)

    def register(self, name: str, path: str) -> None:
        """Add or replace a part; `path` is "module:Class"."""
        self.paths[name] = path

    def names(self) -> list[str]:
        return sorted({*self.paths, *(point.name for point in self._points())})

    def get(self, name: str) -> Any:
        """The class behind a name; an unknown name lists what there is and the nearest spelling."""
        path = self.paths.get(name) or next((p.value for p in self._points() if p.name == name), None)
        if path is None:
            raise UnknownName(self._unknown(name))
        module, _, attribute = path.partition(":")
        return getattr(import_module(module), attribute)

    def _points(self) -> Iterator[Any]:
        return iter(entry_points(group=f"forerun.{self.kind}s"))

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"unknown {self.kind} {name!r}; {hint}known: {', '.join(self.names())}"


drafters = Registry(
    "drafter",
    {
        "none": "forerun.drafters.none:NoDrafter",
        "ngram": "forerun.drafters.ngram:NgramDrafter",
        "draft_model": "forerun.drafters.draft_model:ModelDrafter",
        "hybrid": "forerun.drafters.hybrid:HybridDrafter",
        "hybrid_eagle3": "forerun.drafters.hybrid:HybridEagle3Drafter",
        "hybrid_medusa": "forerun.drafters.hybrid:HybridMedusaDrafter",
        "medusa": "forerun.drafters.medusa:MedusaDrafter",
        "hydra": "forerun.drafters.hydra:HydraDrafter",
        "eagle": "forerun.drafters.eagle.drafter:EagleDrafter",
        "eagle2": "forerun.drafters.eagle.eagle2:Eagle2Drafter",
        "eagle3": "forerun.drafters.eagle.eagle3:Eagle3Drafter",
    },
)
verifiers = Registry(
    "verifier",
    {
        "exact": "forerun.verify.exact:ExactVerifier",
        "block": "forerun.verify.block:BlockVerifier",
        "coupled": "forerun.verify.coupled:CoupledVerifier",
        "typical": "forerun.verify.typical:TypicalVerifier",
    },
)
controllers = Registry(
    "controller",
    {
        "fixed": "forerun.control.fixed:FixedController",
        "adaptive": "forerun.control.adaptive:AdaptiveController",
    },
)
