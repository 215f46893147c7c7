"""Matplotlib's pyplot, imported when a plot is drawn."""

from __future__ import annotations

from typing import Any

from forerun.errors import MissingDependency


def load_pyplot() -> Any:
    """Drawing into files: no display is needed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingDependency(
            "plots need matplotlib; install it with: pip install 'forerun[bench]'"
        ) from error
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
