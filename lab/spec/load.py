"""Loads the target once and builds every drafter on it, each by itself: one that cannot be built says why.

On a GPU the default model is inflated to the shape of an 8B model (lab.inflate.model), and its heads with it, so
that tokens and acceptance are real and times those of the large shape. Heads are written to a temporary folder and
then built as a user's would be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from forerun.api.llm import LLM
from forerun.build.engine import make_engine
from forerun.core import registry
from forerun.core.params import Dtype, EngineConfig, SpeculativeConfig
from forerun.core.types import Needs
from forerun.drafters.base import CompositeClass, Drafter
from forerun.drafters.device.drafter import OnDevice
from forerun.heads import open_head
from forerun.measure.bench.contenders import LAYERS, build_head, fresh_costs
from forerun.measure.bench.settings import DrafterSetup
from forerun.measure.machine import cores
from forerun.models.base import Target
from forerun.models.cuda.target import CudaDecoder
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from lab.inflate.heads import OWN, inflate_folder, load_inflated
from lab.inflate.model import find_shape
from lab.spec.methods import Method, parameters_in, parameters_of, training_minutes

MARGIN = 512  # slots of the KV cache beyond a sequence of full length: trees and padding
_SEQUENCES = 4  # of full length that the KV cache of an inflated target holds


@dataclass(frozen=True, slots=True)
class Shape:
    preset: str = OWN  # or a shape to inflate it to
    device: str = "cpu"
    context: int = 4096  # tokens of a sequence
    dtype: Dtype = "auto"  # where it keeps its own shape
    threads: int | None = None


def load_llm(checkpoint: Checkpoint, shape: Shape) -> LLM:
    """The model as a user would load it, or at a larger shape; one sequence at a time."""
    torch.set_num_threads(shape.threads or cores())
    config = EngineConfig(
        device=shape.device, dtype=shape.dtype, threads=shape.threads or cores(), max_batch=1, max_length=shape.context
    )  # fmt: skip
    if shape.preset == OWN:
        llm = LLM.load(checkpoint.name, config=config)
        fresh_costs(llm)
        return llm
    slots = _SEQUENCES * (shape.context + MARGIN)
    target, _ = load_inflated(checkpoint, shape.preset, slots, device=shape.device)
    tokenizer = checkpoint.tokenizer()
    speculative = SpeculativeConfig(drafter="ngram")
    engine = make_engine(target, tokenizer.eos_ids, speculative, config, tokenizer)
    return LLM(engine, tokenizer, checkpoint.name)


@dataclass(slots=True)
class Builder:
    """Builds the drafters of a table on one target; heads and second models are loaded once."""

    llm: LLM
    shape: Shape
    folder: Path  # for inflated heads
    say: Callable[[str], None] = lambda line: None
    # by method: what the table says of its drafter
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    built: dict[str, Drafter] = field(default_factory=dict)
    _kept: dict[tuple[str, str, bool], Drafter] = field(default_factory=dict)
    _models: dict[str, Target] = field(default_factory=dict)
    _inflated: dict[str, str] = field(default_factory=dict)  # a head's folder -> that of the larger one

    def build_all(self, methods: Sequence[Method]) -> None:
        """Every method that can be built; what a drafter of this kind raises is its own row's error."""
        for method in methods:
            self.facts[method.name] = {"parameters": 0, "minutes": None, "error": method.why_not, "notes": []}
            if method.why_not:
                continue
            with self.blaming(method.name):
                self.built[method.name] = self._build(method.setup, method.chosen)
                self.llm.engine.drafters.add(method.name, self.built[method.name])
                self.facts[method.name] |= self._describe(method.setup)
                self.say(f"{method.name}: ready")
        needs = reduce(Needs.__or__, (drafter.needs for drafter in self.built.values()), Needs())
        if isinstance(self.llm.engine.target, CudaDecoder):
            self.llm.engine.target.warm_up(needs, 1, self.llm.engine.max_length)

    @contextmanager
    def blaming(self, name: str) -> Iterator[None]:
        """What is raised in here becomes a method's error, and what is logged as a warning its notes."""
        facts = self.facts[name]
        with warnings_into(facts["notes"]):
            try:
                yield
            except Exception as error:  # whatever it is, the other methods go on
                facts["error"] = brief_error(error)
                self.say(f"{name}: {facts['error']}")

    def _build(self, setup: DrafterSetup, chosen: bool = False) -> Drafter:
        """`chosen`: above T=0 too a head's tokens are chosen, and not drawn from its law."""
        assert setup.drafter is not None
        spec = registry.drafters.spec(setup.drafter)
        if setup.head is None:
            return self.llm.engine.drafters.get(spec.name)
        kept = spec.name, setup.head, chosen
        if kept not in self._kept:
            if "+" in spec.name:  # of drafters that have rows of their own in the table
                members = [_member(setup, member.name, member.needs) for member in spec.members]
                cls = registry.load(spec.where)
                assert isinstance(cls, CompositeClass)
                self._kept[kept] = cls.compose(*(self._build(member, chosen) for member in members))
            else:
                self._kept[kept] = self._build_one(setup, chosen)
        return self._kept[kept]

    def _build_one(self, setup: DrafterSetup, chosen: bool) -> Drafter:
        assert setup.head is not None
        if chosen:
            drawing = self._build(setup)
            if isinstance(drawing, OnDevice):  # the same graphs
                return OnDevice(drawing.draft, lambda: drawing.plain)
        ready = replace(setup, head=self._at_shape(setup.head))
        return build_head(self.llm, ready, self._models, drawn=not chosen)

    def _at_shape(self, given: str) -> str:
        """A head's folder as the target needs it: inflated with it, once."""
        head = open_head(Path(given).expanduser())
        if head is None or self.shape.preset == OWN:
            return given
        if given not in self._inflated:
            folder = self.folder / f"{len(self._inflated)}-{head.path.name}"
            wanted, device = find_shape(self.shape.preset), self.shape.device
            self._inflated[given] = str(inflate_folder(head.path, head.kind, wanted, folder, device))
        return self._inflated[given]

    def _describe(self, setup: DrafterSetup) -> dict[str, Any]:
        """Parameters as they run here, and how long training took."""
        if setup.head is None or setup.drafter is None or LAYERS in setup.drafter:
            return {}
        head = open_head(Path(setup.head).expanduser())
        if head is not None:
            count = parameters_in(Path(self._at_shape(setup.head)))
            return {"parameters": count, "minutes": training_minutes(head.path)}
        models = [open_checkpoint(name) for name in setup.head.split(";")]
        minutes = [training_minutes(model.path) for model in models]
        known = [one for one in minutes if one is not None]
        return {
            "parameters": sum(map(parameters_of, models)),
            "minutes": sum(known) if len(known) == len(minutes) else None,
        }


def _member(setup: DrafterSetup, name: str, needs: str) -> DrafterSetup:
    head = setup.head if needs != "nothing" or LAYERS in name else None
    return DrafterSetup(name, name, None, head)


def brief_error(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@contextmanager
def warnings_into(notes: list[str]) -> Iterator[None]:
    """Keep what the package logs as warnings, once each."""

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said = record.getMessage()
            if said not in notes:
                notes.append(said)

    handler = Keeping(logging.WARNING)
    logger = logging.getLogger("forerun")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
