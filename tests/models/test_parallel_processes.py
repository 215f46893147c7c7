"""Tensor parallel over two processes with gloo: the texts of one process, faults, and nothing left behind."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from forerun import LLM
from forerun.core.errors import InvalidInput, ModelError, UnsupportedModel
from forerun.core.params import EngineConfig
from forerun.core.types import Budget
from forerun.models.base import ServedByProcesses
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.parallel.decoder import ParallelTarget
from forerun.models.parallel.launch import Worker, Workers, load_parallel
from forerun.testing import Fault
from tests.models.tiny_folder import make_tiny_folder

PROMPTS = ["abc abc abc ab", "hello world, hello w", "x", "The quick brown fox. The quick"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def one(folder: str) -> LLM:
    return LLM(folder, dtype="float32", drafter="ngram")


@pytest.fixture(scope="module")
def two(folder: str) -> Iterator[LLM]:
    with LLM(folder, tensor_parallel_size=2, drafter="ngram") as llm:
        yield llm


def workers_of(llm: LLM) -> Workers:
    target = llm.engine.target
    assert isinstance(target, ParallelTarget)
    return cast(Workers, target._others)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "none", "temperature": 0},
        {"drafter": "ngram", "temperature": 0},
        {"drafter": "recycling", "temperature": 0, "budget": Budget(8, 4, 3)},
        {"drafter": "ngram", "temperature": 0.8, "seed": 5},
    ],
    ids=["plain", "chains", "trees", "seeded"],
)
def test_texts_are_those_of_one_process(one: LLM, two: LLM, options: dict[str, object]) -> None:
    """A batch, so that prompts are read beside trees and pages are shared."""
    found = [[text.token_ids for text in llm.generate(PROMPTS, max_tokens=40, **options)] for llm in (one, two)]  # type: ignore[arg-type]
    assert found[0] == found[1]


def test_a_prompt_longer_than_a_plan(one: LLM, two: LLM) -> None:
    """A plan of more numbers than one message has, in passes of 512 rows; then the same prompt from the cache."""
    prompt = "all work and no play. " * 60
    texts = [llm.generate(prompt, max_tokens=8, temperature=0).token_ids for llm in (one, two, two)]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
def test_an_interrupt_or_error_between_passes_is_survived(two: LLM) -> None:
    """Ctrl-C, or no memory, anywhere on rank 0's own thread: the round is undone and the ranks stay in step."""
    wanted = two.generate(PROMPTS[0], max_tokens=12, temperature=0).token_ids
    with Fault(None, KeyboardInterrupt) as counted:
        two.generate(PROMPTS[0], max_tokens=12, temperature=0)
    step = max(1, counted.seen // 23)
    for at in range(step // 2, counted.seen, step):
        error = KeyboardInterrupt if at % 2 else MemoryError
        with suppress(KeyboardInterrupt, MemoryError, InvalidInput), Fault(at, error):
            two.generate(PROMPTS[0], max_tokens=12, temperature=0)
        assert two.generate(PROMPTS[0], max_tokens=12, temperature=0).token_ids == wanted


@pytest.mark.slow
def test_a_worker_that_dies_is_said(folder: str) -> None:
    llm = LLM(folder, tensor_parallel_size=2, drafter="none")
    target = llm.engine.target
    assert isinstance(target, ServedByProcesses)
    assert target.problem is None
    os.kill(workers_of(llm).pids[0], signal.SIGKILL)
    assert wait_for(lambda: target.problem is not None), "nobody noticed"  # while nothing was asked
    with pytest.raises(ModelError, match=r"rank 1 of 2 has ended \(status -9\)"):
        llm.generate("abc", max_tokens=4)


@pytest.mark.slow
def test_a_worker_that_dies_in_mid_pass_ends_its_request(folder: str) -> None:
    llm = LLM(folder, tensor_parallel_size=2, drafter="none")
    pid, stream = workers_of(llm).pids[0], llm.stream("abc", max_tokens=400, ignore_eos=True)
    next(stream)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ModelError, match="rank 1 of 2 has ended"):
        list(stream)
    assert not is_running(pid)


@pytest.mark.slow
def test_no_process_is_left_by_a_program_that_ends(folder: str) -> None:
    """Ctrl-C is survived where the program goes on, and a program that is killed takes its workers along."""
    script = """
        import signal, sys
        from forerun import LLM
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with Ctrl-C ignored
        llm = LLM(sys.argv[1], tensor_parallel_size=2, drafter="none")
        print(*llm.engine.target._others.pids, flush=True)
        while True:
            try:
                for event in llm.stream("abc", max_tokens=2000, ignore_eos=True):
                    print("writes", flush=True)
            except KeyboardInterrupt:
                print(len(llm.generate("abc", max_tokens=3, ignore_eos=True).token_ids), flush=True)
    """
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), folder], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert all(map(is_running, pids)), "the program did not start"
    assert program.stdout.readline() == "writes\n"
    program.send_signal(signal.SIGINT)
    assert next(line for line in program.stdout if line != "writes\n") == "3\n"
    program.kill()
    program.wait()
    assert wait_for(lambda: not any(map(is_running, pids))), "a worker outlives its program"


@pytest.mark.slow
def test_a_worker_that_cannot_load_says_why(tmp_path: Path) -> None:
    job = {"model": str(tmp_path / "none"), "dtype": "float32", "backend": "gloo", "threads": 1}
    workers = Workers(2, [torch.device("cpu")] * 2, job)
    with pytest.raises(ModelError, match=r"rank 1 of 2 has ended \(status 1: ModelNotFound"):
        workers.wait_until_ready()
    workers.close()


def test_a_worker_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.models.parallel.launch.GRACE", 0.2)
    hangs = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=subprocess.PIPE)
    worker = Worker.__new__(Worker)
    worker.process, worker._name = hangs, "rank 1 of 2"
    worker.close()
    worker.reap()
    assert hangs.returncode == -signal.SIGKILL


def test_what_cannot_be_split_is_refused(folder: str) -> None:
    with pytest.raises(InvalidInput, match="has 2 KV heads"):
        LLM(folder, tensor_parallel_size=3)
    with pytest.raises(InvalidInput, match="dtype='q8' cannot be split"):
        LLM(folder, tensor_parallel_size=2, dtype="q8")
    with pytest.raises(InvalidInput, match="tensor_parallel_size=0"):
        LLM(folder, tensor_parallel_size=0)
    other = cast(Checkpoint, SimpleNamespace(config={"model_type": "gpt2"}))
    with pytest.raises(UnsupportedModel, match="'gpt2' is none"):
        load_parallel(other, EngineConfig(tensor_parallel_size=2), torch.device("cpu"))


@pytest.mark.slow
def test_garbage_ends_the_processes(folder: str) -> None:
    llm = LLM(folder, tensor_parallel_size=2, drafter="none")
    pid = workers_of(llm).pids[0]
    assert is_running(pid)
    del llm
    gc.collect()
    assert wait_for(lambda: not is_running(pid)), "an unused model keeps its processes"


@pytest.mark.slow
def test_close_ends_the_processes(two: LLM) -> None:
    """The last test: nothing can be asked of it afterwards."""
    pid, workers = workers_of(two).pids[0], workers_of(two)
    assert is_running(pid)
    assert not workers.store.parent.exists()  # already: a program that is killed leaves no file behind
    two.close()
    assert not is_running(pid)
    two.close()
    with pytest.raises(ModelError, match="was closed"):
        two.generate("abc", max_tokens=4)
