"""Too little memory is told in one line: under a limit that torch cannot start under, and where an allocation fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forerun import LLM
from forerun.build.memory_limit import as_out_of_memory
from forerun.core.errors import OutOfMemory
from forerun.models.slots import free_memory
from tests.models.tiny_gguf import write_tiny


def limited(megabytes: int, *command: str) -> subprocess.CompletedProcess[str]:
    """A command under `ulimit -v`."""
    limit = f'ulimit -v {megabytes * 1000}; exec "$@"'
    words = ["bash", "-c", limit, "bash", sys.executable, *command]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.mark.parametrize(
    ("megabytes", "command"), [(40, "generate"), (200, "generate"), (690, "generate"), (400, "serve")]
)
def test_commands_under_a_limit_say_so_in_one_line(megabytes: int, command: str) -> None:
    words = ["generate", "hi"] if command == "generate" else ["serve", "--port", "0"]
    ran = limited(megabytes, "-m", "forerun", *words)
    assert (ran.returncode, ran.stdout) == (2, "")
    limit = megabytes * 1024 // 1000
    assert ran.stderr.startswith(f"forerun: the memory limit of this process is {limit} MB (ulimit -v)")
    assert ran.stderr.count("\n") == 1


@pytest.mark.slow
def test_commands_that_need_no_torch_go_on() -> None:
    for command in ("models", "drafters"):
        ran = limited(120, "-m", "forerun", command)
        assert (ran.returncode, ran.stderr) == (0, "")
    assert limited(120, "-m", "forerun", "generate", "--help").returncode == 0


def test_the_library_raises_one_of_its_errors() -> None:
    program = "import forerun\ntry: forerun.LLM\nexcept forerun.ForerunError as error: print(error)"
    ran = limited(400, "-c", program)
    assert ran.stderr == ""
    assert ran.stdout.startswith("the memory limit of this process is 409 MB (ulimit -v), and torch alone needs")


def test_a_cache_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    if (free_memory(torch.device("cpu")) or 0) > 40 << 30:
        pytest.skip("it would fit")
    path = write_tiny(tmp_path / "m.gguf")
    with pytest.raises(OutOfMemory, match=r"^out of memory.*; (use a smaller model|raise the limit)") as raised:
        LLM.load(str(path), kv_slots=10**8)
    assert "\n" not in str(raised.value)


def test_errors_that_mean_too_little_memory() -> None:
    with pytest.raises(RuntimeError) as huge:
        torch.empty(1 << 60, dtype=torch.uint8)
    import_error = ImportError("libtorch_cpu.so: failed to map segment from shared object")
    for error in (huge.value, MemoryError(), OSError(12, "Cannot allocate memory"), import_error):
        assert isinstance(as_out_of_memory(error), OutOfMemory), error
    for other in (ValueError("no"), OSError(2, "No such file"), ImportError("no module")):
        assert as_out_of_memory(other) is None
