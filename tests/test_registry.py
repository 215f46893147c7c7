"""Who a drafter is stands in the registry: one registration puts it in the list, in build and in compositions."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from forerun.build.engine import build_drafter, choose_drafter, make_engine
from forerun.cli import app
from forerun.cli.doctor import examine
from forerun.core import registry
from forerun.core.errors import InvalidInput, UnknownName
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.registry import DrafterRegistry, DrafterSpec
from forerun.core.types import Budget, Needs, Offer, Request, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.base import BaseDrafter, Drafter, LookupDrafter, Parts
from forerun.drafters.compose import EitherDrafter, HybridDrafter
from forerun.heads import open_head
from forerun.testing import TableLM


class Echo(BaseDrafter):
    """Bets that the last token comes again."""

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        pairs = zip(seqs, budgets, strict=True)
        return TreeBatch.chains([seq.tokens[-1:] * (1 + min(b.nodes, b.depth)) for seq, b in pairs])


class ToyHead(BaseDrafter):
    """A head whose weights are one token, which it always drafts."""

    needs = Needs((-1,))

    def __init__(self, token: int) -> None:
        self.token = token
        self.rows: dict[int, int] = {}

    @classmethod
    def build(cls, parts: Parts) -> Drafter:
        folder = parts.head_folder("toy")
        return cls(json.loads((folder / "config.json").read_text())["token"])

    def offer(self, seq: Seq) -> Offer:
        return Offer((0.001, 0.0))

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        depths = [min(budget.nodes, budget.depth) if budget.runs else 0 for budget in budgets]
        pairs = zip(seqs, depths, strict=True)
        return TreeBatch.chains([[seq.tokens[-1], *[self.token] * depth] for seq, depth in pairs])

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        for seq in seqs:
            self.rows[seq.id] = self.rows.get(seq.id, 0) + len(scores.hidden[-1])


class Unfinished:
    """A class that forgot most of what a drafter has."""


class HalfDone(Unfinished):
    @classmethod
    def build(cls, parts: Parts) -> HalfDone:
        return cls()


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafters, by one registration each."""
    monkeypatch.setattr(registry.drafters, "_specs", dict(registry.drafters._specs))
    registry.drafters.register("echo", f"{__name__}:Echo")
    registry.drafters.register(
        "toy", f"{__name__}:ToyHead", needs="head", formats=("toy",), says="Drafts one token.", beside="ngram"
    )


@pytest.fixture
def toy_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"forerun": {"format": "toy"}, "token": 3}))
    return tmp_path


def write(drafter: str, folder: Path | None = None, temperature: float = 0.0) -> list[int]:
    speculative = SpeculativeConfig(drafter, draft_model=folder and str(folder), budget=4, controller="fixed")
    engine = make_engine(TableLM(8, order=1, seed=5, sharpness=3.0), frozenset(), speculative)
    params = SamplingParams(40, temperature=temperature, seed=None if temperature == 0 else 7)
    seq = engine.find(engine.submit(Request((1, 2, 3), params)))
    assert seq is not None
    while engine.busy:
        engine.step()
    assert seq.drafter == registry.drafters.spec(drafter).name
    return seq.tokens


def command(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["forerun", *words])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("toys")
def test_one_registration_puts_a_drafter_into_the_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = command(["drafters"], monkeypatch, capsys)
    assert "Drafts one token." in said
    assert "needs a head: toy" in said
    assert "Who a drafter is stands in the registry" in said  # the module's own line, where nothing was said
    document = json.loads(command(["drafters", "--json", "-"], monkeypatch, capsys))
    row = next(row for row in document["drafters"] if row["name"] == "toy")
    assert (row["needs"], row["formats"], row["best"]) == ("head", ["toy"], "ngram+toy")
    assert document["aliases"]["hybrid_eagle3"] == "ngram+eagle3"
    doctor = [finding.found for finding in examine() if finding.about == "drafters"]
    assert "echo" in doctor[0]
    assert any("with a head" in line and "toy" in line for line in doctor)


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_and_it_is_built_and_composed_and_writes_the_plain_text(toy_folder: Path, temperature: float) -> None:
    plain = write("none", temperature=temperature)
    for drafter in ("echo", "ngram+echo", "echo+ngram", "ngram+none"):
        assert write(drafter, temperature=temperature) == plain
    for drafter in ("toy", "ngram+toy", "toy+echo", "ngram+echo+toy", "toy+toy"):
        assert write(drafter, toy_folder, temperature) == plain


@pytest.mark.usefixtures("toys")
def test_a_folder_of_its_head_finds_it(toy_folder: Path) -> None:
    head = open_head(toy_folder)
    assert head is not None
    assert (head.kind, head.drafter) == ("toy", "ngram+toy")
    assert head.serves("ngram+toy")
    assert not head.serves("eagle3")
    found = choose_drafter(SpeculativeConfig(draft_model=str(toy_folder)), None)  # type: ignore[arg-type]
    assert found.drafter == "ngram+toy"
    registry.drafters.unregister("toy")
    with pytest.raises(InvalidInput, match="kind 'toy', which no drafter here runs"):
        choose_drafter(SpeculativeConfig(draft_model=str(toy_folder)), None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("toys")
def test_what_a_composition_is_made_of(toy_folder: Path) -> None:
    parts = Parts(TableLM(8), TableLM(8), SpeculativeConfig("toy", draft_model=str(toy_folder)))

    def built(name: str) -> Drafter:
        return build_drafter(registry.drafters.spec(name), parts)

    lookup = built("toy+ngram")
    assert isinstance(lookup, HybridDrafter)
    assert isinstance(lookup.first, LookupDrafter)
    assert isinstance(lookup.second, ToyHead)
    assert lookup.needs == Needs((-1,))
    assert isinstance(built("toy+echo"), EitherDrafter)
    nested = built("ngram+echo+toy")
    assert isinstance(nested, HybridDrafter)
    assert isinstance(nested.second, EitherDrafter)


CASCADES = {"ngram": 0, "ngram>draft_model": 1, "draft_model>draft_model": 2, "ngram+ngram>draft_model": 1}


def test_specs_of_compositions_follow_from_their_members() -> None:
    spec = registry.drafters.spec(" ngram+eagle3 ")
    assert (spec.name, spec.needs, spec.formats) == ("ngram+eagle3", "head", ("eagle3",))
    assert (spec.vllm, spec.sglang) == ("eagle3", "EAGLE3")
    assert [member.name for member in spec.members] == ["ngram", "eagle3"]
    assert registry.drafters.spec("ngram+draft_model").needs == "checkpoint"
    assert registry.drafters.spec("ngram + none").needs == "nothing"
    with pytest.raises(InvalidInput, match="names one checkpoint or one head"):
        registry.drafters.spec("eagle3+medusa")
    with pytest.raises(InvalidInput, match="names one checkpoint or one head"):
        registry.drafters.spec("draft_model+eagle3")
    with pytest.raises(UnknownName, match="unknown drafter 'eagel3'; did you mean 'eagle3'"):
        registry.drafters.spec("ngram+eagel3")
    assert (
        registry.drafters.spec("ngram>draft_model").says == "draft_model, which decodes with ngram as its own drafter."
    )
    assert [registry.drafters.spec(name).checkpoints for name in CASCADES] == list(CASCADES.values())


def test_a_second_operator_is_one_line() -> None:
    specs = [DrafterSpec(name, f"m:{name}") for name in "abc"]
    cascades = DrafterRegistry(specs, {}, {"+": ("m:Both", "{0} and {1}"), ">": ("m:Cascade", "{0} under {1}")})
    spec = cascades.spec("a+b>c")  # + binds less than >
    assert [member.name for member in spec.members] == ["a", "b>c"]
    assert spec.members[1].where == "m:Cascade"
    assert spec.members[1].says == "b under c"


def test_old_names_are_the_same_drafter_and_say_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry.drafters, "_warned", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert registry.drafters.spec("hybrid") == registry.drafters.spec("ngram+draft_model")
    assert [record.getMessage() for record in caplog.records] == [
        "the drafter 'hybrid' is an old name of 'ngram+draft_model'; it still works"
    ]
    engine = make_engine(
        TableLM(8), frozenset(), SpeculativeConfig("hybrid", controller="fixed"), draft_target=TableLM(8)
    )
    assert engine.drafters.get("hybrid") is engine.drafters.get("ngram+draft_model")


@pytest.mark.parametrize("name", ["", "a+b", "a>b", "a b", "a:2", "a=b", "a,b"])
def test_names_that_would_be_read_as_something_else_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="letters, digits and underscores"):
        registry.drafters.register(name, "m:C")


@pytest.mark.usefixtures("toys")
def test_a_class_that_is_no_drafter_is_named_with_what_to_do() -> None:
    for cls, lacks in (("Unfinished", "no classmethod build"), ("HalfDone", "lacks one of needs, offer")):
        registry.drafters.register("mine", f"{__name__}:{cls}")
        with pytest.raises(InvalidInput, match=f"{lacks}.*BaseDrafter"):
            write("mine")


INSTALLED = DrafterSpec("other", f"{__name__}:ToyHead", "head", ("toy",), "Installed.")


def test_other_packages_bring_drafters_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("bare", f"{__name__}:Echo", "forerun.drafters"),
        EntryPoint("named", f"{__name__}:INSTALLED", "forerun.drafters"),
    ]

    def installed(kind: str) -> Iterator[EntryPoint]:
        return iter(points if kind == "drafter" else [])

    monkeypatch.setattr(registry, "_points", installed)
    assert {"bare", "named"} <= set(registry.drafters.names())
    assert registry.drafters.spec("bare").needs == "nothing"
    assert registry.drafters.spec("ngram+named").needs == "head"
    assert [spec.name for spec in registry.drafters.running("toy")] == ["named"]
    assert write("bare") == write("none")


def test_every_drafter_says_who_it_is() -> None:
    for spec in registry.drafters.specs():
        assert spec.says.endswith(".")
        assert len(spec.says) < 100
        assert (spec.needs == "head") == bool(spec.formats)
        assert spec.name in spec.best
        registry.drafters.get(spec.name)  # the class is where it says
        registry.drafters.spec(spec.best)


def test_the_default_drafter_of_each_kind_of_head() -> None:
    best = {kind: registry.drafters.running(kind)[0].best for kind in ("eagle3", "medusa", "eagle", "hydra")}
    assert best == {"eagle3": "ngram+eagle3", "medusa": "ngram+medusa", "eagle": "eagle2", "hydra": "hydra"}
