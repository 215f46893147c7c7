"""What docs/serving.md shows with the openai client runs against a server."""

from __future__ import annotations

import pytest

from tests.readme.pages import ROOT, blocks
from tests.server.conftest import Running

pytest.importorskip("openai")


def test_the_python_blocks_of_the_serving_page_run(
    served: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = "\n".join(blocks(ROOT / "docs" / "serving.md", "python"))
    assert "127.0.0.1:8000" in shown
    exec(compile(shown.replace("http://127.0.0.1:8000", served.url), "serving.md", "exec"), {})
    assert capsys.readouterr().out.strip()
