"""Python of a round in CPU seconds: what is counted as native, and how rounds are told apart."""

from __future__ import annotations

import json
from time import thread_time
from types import SimpleNamespace

import pytest

from forerun.bench.cpu import host
from forerun.engine.engine import Engine
from forerun.errors import InvalidInput
from forerun.load_engine import LoadOptions, load_engine
from forerun.models.load.tokenizer import Tokenizer
from forerun.models.native import library


def test_native_calls_are_counted_and_put_back() -> None:
    def busy(seconds: float) -> int:
        began = thread_time()
        while thread_time() - began < seconds:
            pass
        return 3

    kernels = SimpleNamespace(**dict.fromkeys(host.NATIVE, busy))
    with host.native_time(kernels) as spent:
        assert kernels.fr_decode(0.002) == 3
        kernels.fr_head_run(0.001)
        busy(0.001)  # not through the library
    assert spent.calls == 2
    assert 0.003 <= spent.seconds < 0.1
    assert kernels.fr_decode is busy


def test_rounds_are_told_apart() -> None:
    assert [host.kind_of(*counts) for counts in ((0, 1), (0, 0), (0, 3), (2, 3))] == [
        "plain",
        "plain",
        "looked",
        "drafted",
    ]
    assert [host.at_share([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 1.0)] == [1.0, 2.0, 3.0]


def test_rounds_of_one_call_are_averaged_over_all_of_them() -> None:
    """Two runs of four rounds at 1 s, one of one round at 0.5 s, and one behind a drafted round."""
    groups = [host.Group(4, 4, 1.0, 8.0)] * 2 + [host.Group(1, 1, 0.5, 2.0), host.Group(3, 3, 0.5, None)]
    row = host.figures(groups)
    assert (row["rounds"], row["tokens"], row["runs"]) == (12, 12, 4)
    assert row["host_p10_ms"] == row["host_token_p10_ms"] == pytest.approx(1e3 * 3.0 / 12)
    assert row["native_p10_ms"] == pytest.approx(1e3 * 18.0 / 9)
    cold, warm = [host.Group(1, 1, 0.4, 2.0)] * 10, [host.Group(1, 1, 0.1, None)] * 10
    assert host.figures(cold + warm)["host_p10_ms"] == pytest.approx(250.0), (
        "a warm round stands for no cold one"
    )
    drafted = host.figures([host.Group(1, 3, 0.6, 2.0)])
    assert (drafted["host_p50_ms"], drafted["host_token_p50_ms"]) == pytest.approx((600.0, 200.0))


@pytest.mark.skipif(not library.available(), reason="no native kernels here")
@pytest.mark.usefixtures("tiny_checkpoint")
def test_every_round_but_those_of_prompts_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main(["--model", "tiny", "--drafters", "none,ngram", "--tokens", "5", "--repeats", "1"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["rounds"]
    assert found["none"].keys() == {"plain"}
    assert found["none"]["plain"]["rounds"] == 3 * 4  # of five rounds the first read the prompt
    assert found["none"]["plain"]["host_p50_ms"] > 0.0


@pytest.mark.skipif(not library.available(), reason="no native kernels here")
@pytest.mark.usefixtures("tiny_checkpoint")
def test_the_engine_runs_on_the_cpu_where_there_is_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host of a GPU it ran there: rounds without a native call, whose Python launched kernels."""
    given = list[LoadOptions]()

    def load(model: str, options: LoadOptions) -> tuple[Engine, Tokenizer]:
        given.append(options)
        return load_engine(model, options)

    monkeypatch.setattr("forerun.load_engine.load_engine", load)
    host.measure("tiny", "none", 5, 1)
    assert [options["device"] for options in given] == ["cpu"]


@pytest.mark.skipif(not library.available(), reason="no native kernels here")
@pytest.mark.usefixtures("tiny_checkpoint")
def test_rounds_without_a_native_call_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "NATIVE", ())
    with pytest.raises(InvalidInput, match="no native call"):
        host.measure("tiny", "none", 5, 1)
