"""No code asks drafters, targets or controllers what attributes they have: the protocols say what is there."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "forerun"
# Objects that are not ours, by file: transformers' configs and models, torch modules, the operating system, and what
# callers pass (prompts as arrays, streamers).
NOT_OURS = {
    "api/dropin.py": 2,
    "api/calls.py": 3,
    "build/memory_limit.py": 1,
    "cli/doctor.py": 1,
    "core/params.py": 1,
    "models/hf.py": 9,
    "models/load/gguf.py": 1,
    "models/native/library.py": 1,
    "referee/suite.py": 1,
    "referee/targets.py": 3,
    "server/limits.py": 2,
    "train/checkpoint.py": 1,
    "train/recipes/eagle.py": 2,
}


def probes(source: str) -> int:
    """How often a program asks for an attribute that may not be there."""
    if "hasattr" not in source and "getattr" not in source:
        return 0
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = [(call.func.id, len(call.args)) for call in calls if isinstance(call.func, ast.Name)]
    return sum(name == "hasattr" or (name == "getattr" and count == 3) for name, count in names)


def test_probes_are_counted() -> None:
    assert probes("x = getattr(a, 'b', None) or hasattr(a, 'c')") == 2
    assert probes("x = getattr(a, 'b')") == 0


def test_only_what_is_not_ours_is_probed() -> None:
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        if count := probes(file.read_text(encoding="utf-8")):
            found[file.relative_to(SOURCE).as_posix()] = count
    beyond = {name: count for name, count in found.items() if count > NOT_OURS.get(name, 0)}
    assert beyond == {}, "give the part a method in its protocol instead of probing for it"
