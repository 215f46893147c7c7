"""The benchmark of plain rounds runs, on the GPU decoder's plain steps, and finds the texts equal."""

from forerun.bench.gpu.plain import measure
from tests.gpu.tiny import make_target


def test_plain_rounds_are_measured() -> None:
    target = make_target("llama", "cpu", kv_slots=8000)
    found = measure(target, [1, 2], rounds=4, prompt=150)
    assert found["texts_equal"]
    assert [(row["batch"], row["ahead"]) for row in found["rounds"]] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    assert [row["followed"] > 0 for row in found["rounds"]] == [False, True, False, True]
    chunks, whole = found["stalls"]
    assert chunks["rounds"] > whole["rounds"]
