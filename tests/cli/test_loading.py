"""The progress that the library tells while a model is loaded, as the command line shows it."""

from __future__ import annotations

import logging

import pytest

from forerun.cli.loading import _progress


def test_progress_is_shown_while_loading_and_only_then(caplog: pytest.LogCaptureFixture) -> None:
    progress, shown = logging.getLogger("forerun.progress"), list[str]()
    progress.info("before")
    with _progress(shown.append):
        progress.info("capturing %d of %d", 2, 7)
        progress.debug("details")
    progress.info("after")
    assert shown == ["capturing 2 of 7"]
    assert not caplog.records, "nothing is printed twice"
    with pytest.raises(KeyboardInterrupt), _progress(shown.append):
        raise KeyboardInterrupt
    progress.info("later")
    assert len(shown) == 1
