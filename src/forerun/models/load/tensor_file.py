"""Write tensors as a safetensors file whose mode follows the umask; safetensors itself writes 0600."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """The file gets the mode that `open` would give it."""
    file.touch()
    mode = file.stat().st_mode & 0o777
    save_file(dict(tensors), file, None if metadata is None else dict(metadata))
    file.chmod(mode)
