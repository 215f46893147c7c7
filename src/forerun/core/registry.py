"""The registry: names of drafters, verifiers and controllers, and DrafterSpec, without importing any of them.

`drafters.spec("eagle3")` says what a drafter needs, its name in vLLM and SGLang, and where its class is; the class
is imported when one is built. Drafters are composed by name: `ngram+eagle3` is one drafter made of two, and in
`ngram>draft_model` the first drafts for the second. A third party adds a part by an entry point in the group
`forerun.drafters` (or `.verifiers`, `.controllers`), or at run time by `register`.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal

from forerun.core.errors import InvalidInput, UnknownName

log = logging.getLogger(__name__)

Need = Literal["nothing", "checkpoint", "head"]


@dataclass(slots=True)
class Registry:
    """Named parts of one kind; the values are "module:Class" until the class is asked for."""

    kind: str
    paths: dict[str, str] = field(default_factory=dict)

    def register(self, name: str, path: str) -> None:
        """Add or replace a part; `path` is "module:Class"."""
        self.paths[name] = path

    def names(self) -> list[str]:
        return sorted({*self.paths, *(point.name for point in _points(self.kind))})

    def get(self, name: str) -> Any:
        """The class behind a name; an unknown name lists what there is and the nearest spelling."""
        path = self.paths.get(name) or next((p.value for p in _points(self.kind) if p.name == name), None)
        if path is None:
            raise UnknownName(_unknown(self.kind, name, self.names()))
        return load(path)


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """The description of a drafter, read by the command line, doctor, advise, build and the tests."""

    name: str
    where: str  # "module:Class"; the class has `build(parts)`, of a composition `compose(first, second)`
    needs: Need = "nothing"  # what `draft_model` must name: nothing, a second checkpoint, or a head's folder
    formats: tuple[str, ...] = ()  # kinds of heads that it runs, as forerun.heads names them
    says: str = ""  # one line
    vllm: str | None = None  # its `method` in vLLM's --speculative-config
    sglang: str | None = None  # its name as SGLang's --speculative-algorithm
    beside: str | None = None  # a drafter that costs nothing and is best composed with it: beside+name
    reads_source: bool = False  # is it for encoder-decoders alone?
    members: tuple[DrafterSpec, ...] = ()  # of a composition
    by_request: bool = False  # drafts only what a request brings with it: alone it drafts nothing

    @property
    def checkpoints(self) -> int:
        """How many second models it runs; several only where a draft model drafts for another."""
        if not self.members:
            return int(self.needs == "checkpoint")
        counts = [member.checkpoints for member in self.members]
        return sum(counts) if ">" in self.name else max(counts)

    @property
    def best(self) -> str:
        """The name under which it drafts best: with a drafter beside it where there is one."""
        return f"{self.beside}+{self.name}" if self.beside else self.name

    def refuse_missing_model(self, given: str | None) -> None:
        """A drafter that runs a second model, where none was given, is the caller's error before anything is read."""
        if self.needs == "checkpoint" and given is None:
            raise InvalidInput(f"drafter={self.name!r} needs a second model to draft with; pass draft_model=NAME")


class DrafterRegistry:
    """Drafters by name, in order of preference: of two that run the same kind of head, the first is the default."""

    kind = "drafter"

    def __init__(
        self, specs: Iterable[DrafterSpec], aliases: dict[str, str], operators: dict[str, tuple[str, str]]
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self.aliases = aliases  # old name -> name
        self._operators = operators  # loosest first -> where the composing class is, and what it says
        self._warned: set[str] = set()  # aliases whose warning was logged

    def register(
        self,
        name: str,
        path: str,
        *,
        needs: Need = "nothing",
        formats: tuple[str, ...] = (),
        says: str = "",
        vllm: str | None = None,
        sglang: str | None = None,
        beside: str | None = None,
    ) -> None:
        """Add or replace a drafter; `path` is "module:Class", the rest as in DrafterSpec."""
        if not name or any(mark in name for mark in (*"+>:=, ", *self._operators)):
            raise InvalidInput(f"a drafter cannot be called {name!r}: use letters, digits and underscores")
        self._specs[name] = DrafterSpec(name, path, needs, formats, says, vllm, sglang, beside)

    def unregister(self, name: str) -> None:
        """Take a drafter out; unknown names are ignored."""
        self._specs.pop(name, None)

    def specs(self) -> list[DrafterSpec]:
        """All drafters that are no compositions, in order of preference."""
        return [*self._specs.values(), *self._installed()]

    def names(self) -> list[str]:
        """Their names, by alphabet."""
        return sorted(spec.name for spec in self.specs())

    def spec(self, name: str) -> DrafterSpec:
        """The drafter of this name; composes `a+b`, resolves old names and raises UnknownName for others."""
        name = self._current(name.strip())
        for mark in self._operators:
            if mark in name:
                first, _, second = name.partition(mark)
                return self._composed(mark, self.spec(first), self.spec(second))
        if name in self._specs:
            return self._specs[name]
        found = next((spec for spec in self._installed() if spec.name == name), None)
        if found is None:
            raise UnknownName(f"{_unknown(self.kind, name, self.names())}; or auto, or two of them: a+b, a>b")
        return found

    def get(self, name: str) -> Any:
        """The class behind a name, imported."""
        return load(self.spec(name).where)

    def running(self, head: str) -> list[DrafterSpec]:
        """The drafters that run heads of this kind, the default first."""
        return [spec for spec in self.specs() if head in spec.formats]

    def _current(self, name: str) -> str:
        """The current name behind an old one; the first use logs a warning."""
        current = self.aliases.get(name)
        if current is None:
            return name
        if name not in self._warned:
            self._warned.add(name)
            log.warning("the drafter %r is an old name of %r; it still works", name, current)
        return current

    def _composed(self, mark: str, first: DrafterSpec, second: DrafterSpec) -> DrafterSpec:
        where, says = self._operators[mark]
        name = f"{first.name}{mark}{second.name}"
        needs = {spec.needs for spec in (first, second)} - {"nothing"}
        heads = [set(spec.formats) for spec in (first, second) if spec.needs == "head"]
        formats = sorted(set.intersection(*heads)) if heads else []
        if len(needs) > 1 or (heads and not formats):
            raise InvalidInput(f"{name!r} cannot be composed: draft_model names one checkpoint or one head, not two")
        costlier = second if second.needs != "nothing" else first  # other engines have no compositions
        return DrafterSpec(
            name,
            where,
            next(iter(needs), "nothing"),
            tuple(formats),
            says.format(first.name, second.name),
            costlier.vllm,
            costlier.sglang,
            members=(first, second),
        )

    def _installed(self) -> Iterator[DrafterSpec]:
        """Drafters of other packages: an entry point names a class, or, in capitals, a DrafterSpec."""
        for point in _points(self.kind):
            if point.name not in self._specs:
                found = load(point.value) if point.value.partition(":")[2].isupper() else None
                spec = found if isinstance(found, DrafterSpec) else DrafterSpec(point.name, point.value)
                yield replace(spec, name=point.name)


@cache  # it reads a file of every installed package
def _points(kind: str) -> tuple[Any, ...]:
    return tuple(entry_points(group=f"forerun.{kind}s"))


def load(path: str) -> Any:
    """The class behind "module:Class", imported now."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def _unknown(kind: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}; {hint}known: {', '.join(known)}"


drafters = DrafterRegistry(
    [
        DrafterSpec(
            "none", "forerun.drafters.base:NoDrafter", says="No drafting: plain decoding in the same loop."
        ),
        DrafterSpec(
            "ngram", "forerun.drafters.lookup.ngram:NgramDrafter", vllm="ngram", sglang="NGRAM",
            says="Prompt lookup: the tokens that followed the last few tokens earlier in this sequence.",
        ),
        DrafterSpec(
            "suffix", "forerun.drafters.lookup.suffix:SuffixDrafter", vllm="suffix",
            says="Suffix automaton: longest match in this sequence, past outputs and a corpus, with counts.",
        ),
        DrafterSpec(
            "recycling", "forerun.drafters.lookup.recycling:RecyclingDrafter",
            says="Token recycling: a tree of what the target found likeliest after the same tokens before.",
        ),
        DrafterSpec(
            "lookahead", "forerun.drafters.lookup.lookahead:LookaheadDrafter",
            says="Lookahead: n-grams from the target's own guesses, made in spare branches of the tree.",
        ),
        DrafterSpec(
            "prediction", "forerun.drafters.lookup.prediction:PredictionDrafter",
            says="Predicted outputs: the text that a request predicts, aligned with what is written.",
            by_request=True,
        ),
        DrafterSpec(
            "forced", "forerun.drafters.lookup.prediction:ForcedDrafter",
            says="Forced tokens: what a grammar or a thinking budget leaves no choice about.",
            by_request=True,
        ),
        DrafterSpec(
            "layer_skip", "forerun.drafters.model.layer_skip:LayerSkipDrafter",
            says="Self-speculation: some of the target's own layers, on the target's own KV cache.",
        ),
        DrafterSpec(
            "sparse_kv", "forerun.drafters.model.layer_skip:SparseKvDrafter",
            says="Self-speculation: the target itself, over a few pages of its own KV cache; for long contexts.",
        ),
        DrafterSpec(
            "draft_model", "forerun.drafters.model.draft_model:ModelDrafter", "checkpoint",
            vllm="draft_model", sglang="STANDALONE", beside="ngram",
            says="A second, smaller model; with another tokenizer, it drafts the tokens that both have.",
        ),
        DrafterSpec(
            "draft_text", "forerun.drafters.model.draft_model:TextDrafter", "checkpoint",
            says="A second model with another tokenizer: its text is put into the target's tokens.",
        ),
        DrafterSpec(
            "eagle3", "forerun.drafters.heads.eagle:Eagle3Drafter", "head", ("eagle3",),
            vllm="eagle3", sglang="EAGLE3", beside="ngram",
            says="EAGLE-3: a layer or a few on several of the target's hidden layers; a chain, or a tree that grows.",
        ),
        DrafterSpec(
            "medusa", "forerun.drafters.heads.medusa:MedusaDrafter", "head", ("medusa",), vllm="medusa", beside="ngram",
            says="Medusa: heads on the last hidden row that each guess one position, all at once.",
        ),
        DrafterSpec(
            "eagle2", "forerun.drafters.heads.eagle:Eagle2Drafter", "head", ("eagle",),
            vllm="eagle", sglang="EAGLE",
            says="EAGLE-2: EAGLE-1's head, with a tree that grows where the head is confident.",
        ),
        DrafterSpec(
            "eagle", "forerun.drafters.heads.eagle:EagleDrafter", "head", ("eagle",), vllm="eagle", sglang="EAGLE",
            says="EAGLE-1: one layer on the target's last hidden row; a chain, or a tree of one shape.",
        ),
        DrafterSpec(
            "hydra", "forerun.drafters.heads.medusa:HydraDrafter", "head", ("hydra",),
            says="Hydra: heads on the last hidden row that see the tokens drafted before them.",
        ),
        DrafterSpec(
            "specdec", "forerun.drafters.heads.specdec:SpecDecDrafter", "head", ("specdec",), reads_source=True,
            says="SpecDec: for encoder-decoders; a layer on the encoder's rows fills a block in one pass.",
        ),
        DrafterSpec(
            "dspark", "forerun.drafters.heads.block:DSparkDrafter", "head", ("dspark",),
            vllm="dspark", sglang="DSPARK",
            says="DSpark: DFlash's block, corrected by the token before, and cut where a head is not confident.",
        ),
        DrafterSpec(
            "dflash", "forerun.drafters.heads.block:DFlashDrafter", "head", ("dflash",),
            vllm="dflash", sglang="DFLASH",
            says="DFlash, DFlash 2, JetSpec: one pass over mask tokens drafts a whole block from the target's layers.",
        ),
        DrafterSpec(
            "peagle", "forerun.drafters.heads.block:PEagleDrafter", "head", ("peagle",), vllm="eagle3",
            says="P-EAGLE: EAGLE-3's layers draft a whole block in one pass, over mask tokens that share a feature.",
        ),
        DrafterSpec(
            "mtp", "forerun.drafters.heads.eagle:MtpDrafter", "head", ("mtp",), vllm="mtp", sglang="NEXTN",
            says="MTP: the multi-token-prediction layer that a checkpoint brings, or one trained for it.",
        ),
    ],
    aliases={
        "hybrid": "ngram+draft_model",
        "hybrid_eagle3": "ngram+eagle3",
        "hybrid_medusa": "ngram+medusa",
    },
    operators={
        "+": ("forerun.drafters.compose:HybridDrafter", "Both {0} and {1}: whichever is expected to gain more."),
        ">": ("forerun.drafters.model.draft_model:CascadeDrafter", "{1}, which decodes with {0} as its own drafter."),
    },
)  # fmt: skip
verifiers = Registry(
    "verifier",
    {
        "exact": "forerun.verify.exact:ExactVerifier",
        "block": "forerun.verify.exact:BlockVerifier",
        "coupled": "forerun.verify.coupled:CoupledVerifier",
        "typical": "forerun.verify.typical:TypicalVerifier",
    },
)
controllers = Registry(
    "controller",
    {"fixed": "forerun.control.base:FixedController", "adaptive": "forerun.control.adaptive:AdaptiveController"},
)
