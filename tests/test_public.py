"""The public names, pinned: adding or dropping one is a decision, not an accident."""

from __future__ import annotations

import forerun


def test_public_names() -> None:
    assert sorted(forerun.__all__) == [
        "AsyncLLM",
        "AsyncStream",
        "Budget",
        "Completion",
        "EngineConfig",
        "Event",
        "ForerunError",
        "LLM",
        "LawProcessor",
        "Prefix",
        "Request",
        "SamplingParams",
        "SpeculativeConfig",
        "Stream",
        "TokenLogprob",
        "wrap",
    ]


def test_every_public_name_is_there_and_nothing_else_shows() -> None:
    for name in forerun.__all__:
        assert getattr(forerun, name) is not None
    assert set(dir(forerun)) == {*forerun.__all__, "__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(forerun, "speculate_harder")
