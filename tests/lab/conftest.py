"""The tiny models of the benchmark's tests, and a real server, for the lab too."""

from tests.measure.conftest import suite, tiny_checkpoint, tiny_folder
from tests.server.conftest import llm, served

__all__ = ["llm", "served", "suite", "tiny_checkpoint", "tiny_folder"]
