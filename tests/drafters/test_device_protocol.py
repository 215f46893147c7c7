"""Drafters on a GPU have one protocol of eight members; nobody outside of their folder uses anything else of them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun.drafters.base import device_of
from forerun.drafters.compose import EitherDrafter, HybridDrafter
from forerun.drafters.device.eagle import HeadDraft
from forerun.drafters.device.model import ModelDraft, SparseDraft
from forerun.drafters.device.plan import DraftMenu
from forerun.drafters.device.protocol import DeviceDrafter, DeviceMenu
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.models.attention import SparseContext
from forerun.testing import FakeSeq
from tests.gpu.heads import both_drafters
from tests.gpu.tiny import VOCAB, make_target
from tests.simulate.head import SimulatedHead

ROOT = Path(forerun.__file__).parent
FOLDER = ROOT / "drafters" / "device"
MEMBERS = {"needs", "menu", "is_ready", "launch", "observe", "rest", "rehearse", "forget"}
MENU = {"forms", "seconds", "rows", "expected", "switches", "complete_to", "fitting", "holds", "knows", "drafting"}
MENU |= {"take_price"}
# what other folders may import: the protocol, what builds a drafter, and what heads share that the host cuts trees for
DOORS = {
    ("protocol", "*"),
    ("eagle", "on_device"),
    ("model", "on_device"),
    ("model", "sparse_on_device"),
    ("growth", "*"),
}


def public(cls: type, methods_only: bool = False) -> set[str]:
    found = {name: one for base in cls.__mro__ for name, one in vars(base).items() if name[0] != "_"}
    return {name for name, one in found.items() if callable(one) or not methods_only}


def test_the_protocol_has_eight_members() -> None:
    assert public(DeviceDrafter) == MEMBERS
    assert public(DeviceMenu) == MENU
    assert all(inspect.getdoc(getattr(DeviceDrafter, name)) for name in MEMBERS), "each states its contract"


@pytest.mark.parametrize("cls", [HeadDraft, ModelDraft, SparseDraft])
def test_a_drafter_on_a_device_has_this_protocol_and_no_other_method(cls: type) -> None:
    assert public(cls, methods_only=True) | {"needs", "menu"} == MEMBERS
    assert "__init__" in vars(cls), "which sets the menu"
    for name in MEMBERS - {"needs", "menu"}:
        stated, found = (inspect.signature(getattr(one, name)) for one in (DeviceDrafter, cls))
        assert [*stated.parameters] == [*found.parameters], name


def test_every_menu_is_the_same_class() -> None:
    target = make_target("llama", "cpu")
    draft_model = ModelDraft(make_target("llama", "cpu"), VOCAB, target.grown.last)
    drafts = both_drafters(target)[0].draft, draft_model, SparseDraft(target, SparseContext(1024))
    assert {type(draft.menu) for draft in drafts} == {DraftMenu}
    assert [draft.menu.switches for draft in drafts] == [True, False, True]
    assert MENU - {"forms", "switches", "complete_to"} <= public(DraftMenu)
    assert {*public(SimulatedHead), *vars(SimulatedHead(_NoGPU(), 0.5))} >= MEMBERS  # type: ignore[arg-type]


class _NoGPU:
    speeds, rate = None, 0.5


def test_compositions_hand_out_the_device_of_their_second_drafter() -> None:
    drafter, seq = both_drafters(make_target("llama", "cpu"))[0], FakeSeq(0, [1, 2])
    assert device_of(drafter, [seq]) is drafter.draft
    assert device_of(HybridDrafter(NgramDrafter(), drafter), [seq]) is drafter.draft
    assert device_of(EitherDrafter(NgramDrafter(), drafter), [seq]) is None, "nothing was drafted yet"
    assert device_of(NgramDrafter(), [seq]) is None
    drafter._failed = True
    assert device_of(drafter, [seq]) is None


def holds_device(node: ast.expr) -> bool:
    """Is this what some call of `device` or `device_of` returns, or the draft of `OnDevice`?"""
    if isinstance(node, ast.IfExp):
        return holds_device(node.body) or holds_device(node.orelse)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            return node.func.attr == "device" and ast.unparse(node.func.value).endswith("drafters")
        return isinstance(node.func, ast.Name) and node.func.id == "device_of"
    return False


def uses(source: str, own: str = "") -> Iterator[tuple[str, str]]:
    """Members of device drafters and of their menus that a module uses. `own`: attributes of self that hold one."""
    if not own and not re.search(r"drafters\.base import .*\bdevice_of\b|drafters\.device\(", source):
        return  # quicker
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        pairs = list[tuple[ast.expr, ast.expr]]()
        for one in ast.walk(function):
            for into in one.targets if isinstance(one, ast.Assign) else ():
                assert isinstance(one, ast.Assign)
                if isinstance(into, ast.Tuple) and isinstance(one.value, ast.Tuple):
                    pairs += zip(into.elts, one.value.elts, strict=False)
                else:
                    pairs.append((into, one.value))
        held = {ast.unparse(into) for into, value in pairs if holds_device(value)} | ({own} if own else set())
        menus = {ast.unparse(into) for into, value in pairs if ast.unparse(value) in {f"{one}.menu" for one in held}}
        menus |= {f"{one}.menu" for one in held}
        for one in ast.walk(function):
            if isinstance(one, ast.Attribute):
                if ast.unparse(one.value) in held or holds_device(one.value):
                    yield "drafter", one.attr
                elif ast.unparse(one.value) in menus:
                    yield "menu", one.attr


def past(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(what, name) for what, name in found if name not in (MEMBERS if what == "drafter" else MENU)}


def test_nobody_reaches_past_the_protocol() -> None:
    outside = [path for path in ROOT.rglob("*.py") if FOLDER not in path.parents]
    found = {use for path in outside for use in uses(path.read_text())}
    assert {("drafter", "launch"), ("drafter", "rest"), ("menu", "switches")} <= found, "the engine's"
    assert not past(found)
    own = {*uses((FOLDER / "drafter.py").read_text(), own="self.draft")}
    assert {("drafter", "observe"), ("drafter", "forget"), ("menu", "fitting")} <= own
    assert not past(own)


def test_negative_control_somebody_who_reaches_past() -> None:
    wrong = "def f(self, seqs):\n    form, device = 1, self.drafters.device(seqs)\n"
    wrong += "    device.rows.read(device.menu.jobs)"
    assert past({*uses(wrong)}) == {("drafter", "rows"), ("menu", "jobs")}


def imported(path: Path) -> Iterator[tuple[str, str]]:
    source = path.read_text()
    for node in ast.walk(ast.parse(source)) if "drafters.device" in source else ():
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forerun.drafters.device"):
            module = (node.module or "").removeprefix("forerun.drafters.device").lstrip(".")
            yield from ((module, one.name) for one in node.names)


def test_other_folders_come_in_by_few_doors() -> None:
    outside = [path for path in ROOT.rglob("*.py") if FOLDER not in path.parents]
    found = {(path.name, *one) for path in outside for one in imported(path)}
    wrong = [one for one in found if one[1:] not in DOORS and (one[1], "*") not in DOORS]
    assert found
    assert not wrong
    targets: list[Any] = [one for path in (ROOT / "models").rglob("*.py") for one in imported(path)]
    assert not targets, "a target knows nothing of who drafts"


def test_graphs_of_drafts_are_captured_in_one_place() -> None:
    makers = [path for path in ROOT.rglob("*.py") if "torch.cuda.CUDAGraph()" in path.read_text()]
    assert [path.name for path in makers if "train" not in path.parts] == ["graphs.py"]


def test_the_folder_stays_small() -> None:
    assert len([*FOLDER.glob("*.py")]) <= 13
