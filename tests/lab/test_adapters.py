"""The measurement of LoRA adapters runs through, and adapters that change nothing change no text."""

import json

import pytest

from lab.runner import main


@pytest.mark.slow
def test_adapters_of_zeros_write_the_texts_of_the_base(capsys: pytest.CaptureFixture[str]) -> None:
    words = "adapters --shape tiny --device cpu --adapters 3 --batch 4 --max-tokens 8 --repeats 1 --drafters none,ngram"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["equal"]
    assert found["differing"] == {"none": 0, "ngram": 0}
    assert [row["drafter"] for row in found["rows"]] == ["none", "ngram"]
