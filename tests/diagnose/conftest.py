"""The tiny models of the benchmark's tests, for the diagnosis too."""

from tests.bench.conftest import tiny_checkpoint

__all__ = ["tiny_checkpoint"]
