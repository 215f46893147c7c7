"""Help for the measuring commands comes at once: nothing heavy is imported for it."""

from __future__ import annotations

from tests.test_imports import HEAVY, imported_by

HELP = """
import contextlib, io, sys
from forerun.cli.app import main
for word in ("bench", "compare", "advise", "diagnose", "quality"):
    sys.argv = ["forerun", word, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main()
        except SystemExit as ended:
            assert not ended.code, word
    assert "--json" in out.getvalue(), word
"""


def test_nothing_heavy_is_imported() -> None:
    loaded = imported_by(HELP)
    assert loaded.isdisjoint(HEAVY), sorted(loaded & set(HEAVY))
