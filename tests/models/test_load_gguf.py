"""GGUF files: metadata and tensors read back as written; damage of any kind is refused in one line."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest

from forerun.core.errors import DamagedFile, ForerunError, ModelNotFound, UnsupportedModel
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.gguf import GgufFile
from forerun.models.load.quants import dequantize
from tests.models.tiny_gguf import gguf, write_tiny


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


def test_metadata_reads_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    written = {"a.text": "naïve 🙂", "a.flag": True, "a.big": 2**40, "a.small": -3, "a.real": 0.25}
    writer.add_string("a.text", "naïve 🙂")
    writer.add_bool("a.flag", True)
    writer.add_uint64("a.big", 2**40)
    writer.add_int8("a.small", -3)
    writer.add_float64("a.real", 0.25)
    lists = {"l.texts": ["x", "", "ÿ"], "l.ints": [1, -2, 3], "l.reals": [0.5, 1.5], "l.flags": [True, False]}
    for key, values in lists.items():
        writer.add_array(key, values)
    writer.add_tensor("t", np.arange(6, dtype=np.float16).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    for key, value in (written | lists).items():
        assert file.metadata[key] == value
    assert file.tensors["t"].shape == (2, 3)
    assert dequantize(file.blocks("t")).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (b"", DamagedFile, "empty"),
        (b"not a model at all", DamagedFile, "GGUF"),
        (b"GGUF" + struct.pack("<I", 1), UnsupportedModel, "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), DamagedFile, "metadata"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), DamagedFile, "tensors"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + b"x" * 20, DamagedFile, "text"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**50), DamagedFile, "texts"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 6, 2**50), DamagedFile, "numbers"),
    ],
)
def test_a_bad_header_says_what_is_wrong(content: bytes, error: type, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(error, match=says) as raised:
        GgufFile(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file() -> None:
    with pytest.raises(ModelNotFound, match=r"nowhere\.gguf"):
        open_checkpoint("nowhere.gguf")


def load_fully(path: Path) -> None:
    checkpoint = open_checkpoint(str(path))
    for name in checkpoint.weights:
        _ = checkpoint.weights[name]
    tokenizer = checkpoint.tokenizer()
    tokenizer.decode(tokenizer.encode("ab cd 12"))


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "whole.gguf", layers=1).read_bytes()
    load_fully(tmp_path / "whole.gguf")
    lengths = {*range(0, 2000, 23), *range(2000, len(whole) - 64, len(whole) // 40)}
    for length in sorted(lengths):
        path = tmp_path / f"{length}.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(ForerunError):
            load_fully(path)


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_flipped_bytes_load_or_are_refused(family: str, tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "whole.gguf", family, layers=1).read_bytes()
    dice, refused = random.Random(0), 0
    described = whole.index(b"ffn_down") + 400  # metadata and tensor list: where a flip can do harm
    for case in range(300):
        damaged = bytearray(whole)
        for _ in range(dice.choice([1, 1, 3])):
            damaged[dice.randrange(4, min(described, len(whole)))] ^= 1 << dice.randrange(8)
        path = tmp_path / f"{case}.gguf"
        path.write_bytes(damaged)
        try:
            load_fully(path)
        except ForerunError:
            refused += 1
    assert refused > 30
