"""Typed access to a GGUF file's metadata: a value that is missing or of the wrong kind is a damaged file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from forerun.core.errors import DamagedFile
from forerun.models.load.gguf import GgufFile

_LARGEST = 1 << 31


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata under one architecture's prefix; keys that begin with a dot are relative to it."""

    path: Path
    values: dict[str, Any]
    architecture: str

    @classmethod
    def of(cls, file: GgufFile) -> Metadata:
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise DamagedFile(f"{file.path} does not say which architecture it holds; pull it again")
        return cls(file.path, file.metadata, architecture)

    def find(self, key: str) -> Any:
        return self.values.get(self._full(key))

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.find(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value < _LARGEST:
            self.wrong(key, value, f"a whole number from {least}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.find(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.wrong(key, value, "a positive number")
        # The file has float32; the shortest decimal of the same float32 is what the authors wrote.
        return float(str(np.float32(value)))

    def text(self, key: str, default: str) -> str:
        value = self.find(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.wrong(key, value, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.find(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(key, value, "true or false")
        return value

    def items(self, key: str, kind: type, required: bool = False) -> list[Any]:
        value = self.find(key)
        if value is None and not required:
            return []
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            self.wrong(key, value if not isinstance(value, list) else "a list", f"a list of {kind.__name__}")
        return value

    def wrong(self, key: str, value: object, expected: str) -> NoReturn:
        what = "is missing" if value is None else f"is {str(value)[:40]!r}"
        raise DamagedFile(f"{self.path} is damaged: {self._full(key)} {what}, not {expected}; pull it again")

    def _full(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key
