"""The command line of the GPU benchmark, as far as it goes without a GPU."""

from __future__ import annotations

import pytest
import torch

from lab.gpu import command
from lab.runner import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and it would be measured")
def test_without_a_gpu_it_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--quick"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == ["forerun: this benchmark needs a CUDA device and torch sees none; use `python -m lab cpu`"]


@pytest.mark.parametrize("words", [["--shape", "8b", "--nonsense"], ["--preset", "7b"], ["--limit", "two"]], ids=str)
def test_flags_that_do_not_exist_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["gpu", *words])
    assert ended.value.code == 2


def test_shapes_are_those_of_real_models() -> None:
    small, vocabulary = command.SHAPES["135m"]
    assert (small.width, small.layers, small.heads, small.kv_heads, vocabulary) == (576, 30, 9, 3, 49152)
    large, _ = command.SHAPES["8b"]
    layer = large.width * large.head_dim * 2 * (large.heads + large.kv_heads) + 3 * large.width * large.inner
    assert 6.5e9 < large.layers * layer < 8e9
    assert set(command.QUICK_NODES) < set(command.NODES)
