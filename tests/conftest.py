"""Fixtures that several folders share: the real default model, loaded once per worker; and which files run first."""

from __future__ import annotations

import fcntl
import os
import signal
import ssl
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores: one thread each
# On ARM torch hands products of more than 8 rows to oneDNN, which takes up to five times as long as BLAS for such small
# ones as here; on x86 it does so with 16-bit ones alone
os.environ.setdefault("TORCH_MKLDNN_MATMUL_MIN_DIM", str(1 << 30))

# A shell that runs this in the background has SIGINT ignored, and so would servers that a test sends it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every call of httpx, and every client of openai, reads the certificates of the world: 0.1 seconds for a server on this
# machine that has none
ssl.create_default_context = cache(ssl.create_default_context)

with suppress(ImportError):  # a machine for the GPU tests need not have it
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")  # a machine that is busy is no failure


# Files of many seconds, longest first: a worker that began one of them last would end long after the other.
LONGEST = (
    "models/test_row_decoder.py",
    "models/test_hybrid.py",
    "exactness/test_engine.py",
    "exactness/test_real_model.py",
    "cluster/test_ray.py",
    "engine/test_faults.py",
    "gpu/test_following.py",
    "damaged/test_damaged_files.py",
    "server/test_sleep.py",
    "gpu/test_first_call.py",
    "docs/test_site.py",
    "engine/test_hybrid_texts.py",
    "gpu/test_adapter_heads.py",
    "referee/test_planted.py",
    "gpu/test_layer_skip.py",
    "gpu/test_adapters.py",
    "server/test_engine_process.py",
    "train/test_recipes.py",
    "gpu/test_plain_rounds.py",
    "gpu/test_starters_beside_trees.py",
    "native/test_library.py",
    "readme/test_runs.py",
    "control/test_following.py",
    "drafters/test_cascade.py",
    "lab/test_serve.py",
    "lab/test_cpu.py",
    "server/test_hang.py",
    "models/test_parallel_processes.py",
    "control/test_forms.py",
    "measure/advise/test_answer.py",
    "server/test_both_fronts.py",
    "encoder_decoder/test_target.py",
    "exactness/test_tensor_parallel.py",
    "exactness/test_laws.py",
    "encoder_decoder/test_specdec.py",
    "engine/test_prefix.py",
    "server/test_lost_process.py",
    "server/test_robust.py",
    "server/test_refresh.py",
    "train/test_walk.py",
    "gpu/test_hybrid_following.py",
    "gpu/test_lookups_following.py",
    "engine/test_chunks.py",
    "server/test_schemathesis.py",
    "gpu/test_draft.py",
    "gpu/test_model_following.py",
    "gpu/test_draft_batch.py",
    "lab/spec/test_command.py",
    "drafters/test_vocabularies.py",
    "server/test_exact.py",
    "cluster/test_without_ray.py",
    "server/test_http.py",
    "test_junk.py",
    "native/test_decoder.py",
    "test_wrap.py",
    "server/test_reading.py",
    "conformance/test_decoder.py",
    "control/test_decisions.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """In a clean clone one worker imports all tests first: the other reads what was compiled and does not do it too."""
    compiled = Path(__file__).parent / "verify" / "__pycache__"
    with Path(__file__).open() as this:
        if not compiled.exists() and not sys.dont_write_bytecode:
            fcntl.flock(this, fcntl.LOCK_EX)
        return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="both tiers: also the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The fast tier, unless all were asked for; the longest files first, and within a file nothing moves."""
    if not config.getoption("--all"):
        left_out = set(left_out_of_the_fast_tier(items))
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    tests = Path(__file__).parent
    place = {tests / file: i for i, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def left_out_of_the_fast_tier(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests marked `slow`; of `slow(keep=n)` n cases stay, spread over all cases of that function."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is not None:
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    found = list[pytest.Item]()
    for function in cases.values():
        keep = max(int(mark.kwargs.get("keep", 0)) for mark in function[0].iter_markers("slow"))
        kept = {i * len(function) // keep for i in range(keep)}
        found += [item for i, item in enumerate(function) if i not in kept]
    return found


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """The default model's file; tests that need it skip where it was not pulled."""
    from forerun.models.load.catalog import known_models

    model = next(model for model in known_models() if model.name == "smollm2")
    if model.path is None:
        pytest.skip("the default model is not here; run `forerun models pull smollm2`")
    return str(model.path)


@pytest.fixture(scope="session")
def checkpoint(smollm2_path: str) -> Iterator[object]:
    from forerun.models.load.checkpoint import open_checkpoint

    return open_checkpoint(smollm2_path)
