"""Kernels that are compiled side by side before they are launched: none is launched meanwhile, none is compiled later.

Compiling needs Triton but no GPU: where there is none, a driver that only counts launches stands in for it.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from signal import SIGINT
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.models.cuda.compile import on_disk
from forerun.models.cuda.compile import together as compiling
from forerun.models.cuda.compile.together import begin_compiling, compile_together
from forerun.models.cuda.compile.worker import Job
from forerun.models.cuda.network import Run, one_of_each_kind
from forerun.models.cuda.plan import Size
from forerun.models.cuda.special import store_of
from forerun.models.cuda.steps.tiles import shared_out
from tests.gpu.test_plain_rounds import PROMPTS, _write
from tests.gpu.tiny import make_target, need_cuda

WIDTHS = (64, 128, 256)
LENGTH = 400
SHARED_MEMORY = 1 << 17  # bytes of a block, under the driver that stands in


class Offline:
    """What kernels were compiled and launched, under a driver without a device."""

    def __init__(self) -> None:
        self.launched, self.compiled = list[int](), Counter[str]()
        self.from_disk = 0  # of those that were compiled: a process had done it
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY},
            load_binary=lambda *given: (1, 1, 0, 0, 1024),
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *given: self.launched.append(given[0])

    def note(self, *, cache_hit: bool, **given: Any) -> None:
        self.compiled[threading.current_thread().name.partition("_")[0]] += 1
        self.from_disk += cache_hit

    def launch(self, width: int = 64, programs: int = 1, up: int | None = None) -> None:
        from forerun.models.cuda.kernels.rows import normalise

        rows = torch.zeros(4, width)
        normalise[(programs,)](rows, rows, rows, 1e-5, WIDTH=width, UP=up or width, PDL=False)


@contextmanager
def standing_in(cache: Path) -> Iterator[Offline]:
    """The driver without a device in place of the real one, which finds Triton afterwards as it was."""
    knobs, limit = import_module("triton.knobs"), import_module("triton.compiler.compiler").max_shared_mem
    from forerun.models.cuda.kernels.rows import normalise

    found = Offline()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        patch.setenv("FORERUN_CACHE", str(cache / "forerun"))
        patch.setattr(import_module("triton.runtime").driver, "_active", found)
        patch.setattr(knobs.compilation, "listener", found.note)
        patch.setattr(normalise, "device_caches", defaultdict(normalise.create_binder))
        limit.cache_clear()  # Triton asks a driver once for its shared memory, and holds other drivers to the answer
        try:
            yield found
        finally:
            limit.cache_clear()


def need_compiler() -> None:
    pytest.importorskip("triton.knobs")
    if not compiling._thread_count():
        pytest.skip("kernels are interpreted, or this Triton compiles them one by one")


@pytest.fixture
def offline(tmp_path: Path) -> Iterator[Offline]:
    need_compiler()
    with standing_in(tmp_path) as found:
        yield found


def test_a_driver_that_stood_in_leaves_no_limit_behind(tmp_path: Path) -> None:
    """Its 128 KiB of shared memory were kept: real kernels of the same process then ran out of resources."""
    need_compiler()
    limit = import_module("triton.compiler.compiler").max_shared_mem
    with standing_in(tmp_path) as stranger:
        assert limit(0) == SHARED_MEMORY
    with pytest.MonkeyPatch.context() as patch:
        properties = {"max_shared_mem": 2 * SHARED_MEMORY}
        patch.setattr(stranger.utils, "get_device_properties", lambda device: properties)
        patch.setattr(import_module("triton.runtime").driver, "_active", stranger)
        assert limit(0) == 2 * SHARED_MEMORY
    limit.cache_clear()


@pytest.mark.parametrize("missing", ["triton.knobs", "triton.runtime._async_compile"])
def test_nothing_is_done_where_triton_cannot_compile_ahead(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    with suppress(ImportError):
        import_module("triton.runtime")  # whole, or what follows would leave a part of it
    monkeypatch.setitem(sys.modules, missing, None)
    calls = list[int]()
    compile_together(lambda: calls.append(1))
    assert calls == []


def test_kernels_are_compiled_once_in_threads_and_found_by_launches(offline: Offline) -> None:
    def work() -> None:
        for width in WIDTHS * 5:
            offline.launch(width)

    compile_together(work)
    assert offline.compiled == {"compile": len(WIDTHS)}
    assert offline.launched == []
    for width in WIDTHS:
        offline.launch(width, programs=width)
    assert offline.compiled == {"compile": len(WIDTHS)}
    assert offline.launched == [*WIDTHS]


def test_the_key_of_a_kernel_that_is_asked_for_again_is_not_computed_again(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of 209 sizes ask 3,622 times for 86 kernels: their keys alone took two seconds of every start."""
    jit, keys = import_module("triton.runtime.jit"), list[str]()
    find = jit.get_cache_key
    monkeypatch.setattr(jit, "get_cache_key", lambda *given: keys.append(find(*given)) or keys[-1])
    compile_together(lambda: [offline.launch(width) for width in WIDTHS * 5])
    assert len(keys) == len(set(keys)) == len(WIDTHS)


def test_a_launch_meanwhile_compiles_what_was_asked_for(offline: Offline) -> None:
    """It finds no kernel that somebody waits for: that might never come."""
    begun = begin_compiling(lambda: [offline.launch(64) for _ in range(2)])
    assert begun is not None
    offline.launch(64, programs=2)
    begun.finish()
    offline.launch(64, programs=3)
    assert offline.launched == [2, 3]


def _in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.models.cuda.kernels.rows import normalise

    monkeypatch.setattr(normalise, "device_caches", defaultdict(normalise.create_binder))


def test_kernels_that_are_all_on_disk_are_not_asked_for(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[int]()

    def work() -> None:
        done.append(1)
        for width in WIDTHS:
            offline.launch(width)

    compile_together(work, ("a model", 64))
    _in_a_new_process(monkeypatch)
    started = list[int]()
    monkeypatch.setattr(compiling, "Worker", lambda: started.append(1))
    compile_together(work, ("a model", 64))
    assert len(done) == 1
    offline.compiled.clear()
    offline.from_disk = 0
    for width in WIDTHS:
        offline.launch(width)
    assert offline.compiled == {"MainThread": len(WIDTHS)}
    assert (offline.from_disk, started) == (len(WIDTHS), [])


@pytest.mark.parametrize("change", ["what", "sources", "triton", "a kernel is gone", "a note that is damaged"])
def test_kernels_are_asked_for_where_something_is_another(
    offline: Offline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    done, what = list[int](), "a model"
    monkeypatch.setattr(compiling, "job_of", lambda compile_kernel: None)  # without a process

    def work() -> None:
        done.append(1)
        offline.launch(64)

    compile_together(work, what)
    _in_a_new_process(monkeypatch)
    if change == "sources":
        monkeypatch.setattr(on_disk, "_contents", lambda: "others")
    elif change == "triton":
        monkeypatch.setattr(on_disk, "_stamp", lambda: "another")
    elif change == "a kernel is gone":
        next(tmp_path.glob("*/normalise.cubin")).unlink()
    elif change == "a note that is damaged":
        next(tmp_path.glob("forerun/kernels/*.json")).write_text('["')
    compile_together(work, "another model" if change == "what" else what)
    assert len(done) == 2


def test_a_kernel_that_cannot_be_compiled_is_not_noted(offline: Offline, tmp_path: Path) -> None:
    compile_together(lambda: offline.launch(64, up=48), "a model")
    assert not [*tmp_path.glob("forerun/kernels/*.json")]


def test_triton_hashes_itself_once_and_again_when_it_changes(
    offline: Offline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """400 MB, 1.4 s of every start."""
    cache, hashed = import_module("triton.runtime.cache"), list[int]()

    def hash_itself() -> str:
        hashed.append(1)
        return f"{cache.__version__}-{len(hashed)}"

    def key() -> str:
        monkeypatch.setattr(cache, "triton_key", hash_itself)
        on_disk.triton_key.cache_clear()
        found = on_disk.triton_key()
        assert cache.triton_key() == found, "where Triton itself asks"
        return found

    try:
        assert key() == key() == f"{cache.__version__}-1"
        next(tmp_path.glob("forerun/kernels/triton-*")).write_text("")
        assert key() == key() == f"{cache.__version__}-2"
        monkeypatch.setattr(on_disk, "_stamp", lambda: "another")
        assert key() == f"{cache.__version__}-3"
    finally:
        on_disk.triton_key.cache_clear()


def test_processes_leave_what_a_launch_reads(offline: Offline, tmp_path: Path) -> None:
    """Triton reads all files of a kernel: texts of what it was made of are four fifths of them."""
    compile_together(lambda: offline.launch(64))
    assert offline.from_disk == 1
    kinds = {file.suffix for file in tmp_path.glob("*/*normalise*")}
    assert kinds == {".json", ".cubin", ".source"}


def test_processes_compile_what_is_not_on_disk_yet(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.models.cuda.kernels.rows import normalise

    def work() -> None:
        for width in WIDTHS:
            offline.launch(width)

    compile_together(work)
    assert offline.from_disk == len(WIDTHS)
    started = list[int]()
    monkeypatch.setattr(compiling, "Worker", lambda: started.append(1))
    monkeypatch.setattr(normalise, "device_caches", defaultdict(normalise.create_binder))
    compile_together(work)
    assert offline.from_disk == 2 * len(WIDTHS)
    assert started == []  # nothing was left for a process


def test_kernels_are_compiled_where_a_process_dies(
    offline: Offline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = compiling.Worker()
    worker._process.kill()
    worker._process.wait()
    monkeypatch.setattr(compiling, "Worker", lambda: worker)
    monkeypatch.setattr(compiling, "MOST_THREADS", 1)
    with caplog.at_level("WARNING"):
        compile_together(lambda: offline.launch(64))
    assert offline.compiled == {"compile": 1}
    assert offline.from_disk == 0
    assert "in the main process" in caplog.text


@pytest.mark.parametrize(
    "module", ["forerun.drafters.device.kernels", "forerun.verify.kernels", "forerun.models.cuda.kernels.linear"]
)
def test_a_process_compiles_without_torch(module: str) -> None:
    """Importing it takes four seconds of every process, and ending it half of one."""
    need_compiler()
    asked = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", asked], check=True)


def test_the_processes_end_when_their_kernels_are_compiled(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[compiling.Worker]()

    class Noted(compiling.Worker):
        def __init__(self) -> None:
            super().__init__()
            started.append(self)

    monkeypatch.setattr(compiling, "Worker", Noted)
    begun = begin_compiling(lambda: offline.launch(64))
    assert begun is not None
    while not begun.is_done:
        time.sleep(0.01)
    assert [worker._process.wait(30) for worker in started] == [0], "also where nobody asks for the kernels"


def test_processes_outlive_an_interrupt_of_the_program() -> None:
    """Ctrl-C reaches all processes of a terminal; a text is interrupted, and what comes next needs the kernels."""
    worker = compiling.Worker()
    nothing = Job("missing", "kernel", "", object, {}, {}, {}, None, {}, None, "")
    for _ in range(2):
        worker.compile(nothing)  # which fails, and is answered
        worker._process.send_signal(SIGINT)
    worker.close()
    assert worker._process.returncode == 0


def test_a_process_whose_program_has_ended_says_nothing() -> None:
    """A command may end, or be interrupted, in the middle of a first start: a traceback of each process was printed."""
    nothing = Job("missing", "kernel", "", object, {}, {}, {}, None, {}, None, "")
    command = [sys.executable, "-m", "forerun.models.cuda.compile.worker"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(pickle.dumps(nothing))
        process.stdin.flush()
        process.stdout.readline()  # it is at work
        process.stdout.close()
        process.stdin.write(pickle.dumps(nothing))
        process.stdin.close()
        assert process.wait(30) == 0
        assert process.stderr.read() == b""


def test_what_is_compiled_beside_texts_is_found_by_launches_at_the_end(offline: Offline) -> None:
    begun = begin_compiling(lambda: offline.launch(64))
    assert begun is not None
    offline.launch(128, programs=2)  # a text goes on
    begun.finish()
    assert begun.is_done
    assert offline.compiled == {"compile": 1, "MainThread": 1}
    offline.launch(64, programs=3)
    assert offline.compiled == {"compile": 1, "MainThread": 1}
    assert offline.launched == [2, 3]


def test_a_program_may_end_while_kernels_are_compiled(tmp_path: Path) -> None:
    need_compiler()
    program = """
import sys, time
from concurrent.futures import Future
from forerun.models.cuda.compile import together as compiling
compiling.job_of = lambda compile_kernel: "a job"
class Worker:
    def compile(self, job): time.sleep(600)
compiling.Worker = Worker
pool = compiling._Pool(2)
for _ in range(3): pool.submit(lambda: None)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_kernels_that_were_compiled_before_are_not_launched_either(offline: Offline) -> None:
    offline.launch(64, programs=3)
    compile_together(lambda: offline.launch(64, programs=4))
    assert offline.launched == [3]


def test_a_launch_says_why_its_kernel_cannot_be_compiled(offline: Offline) -> None:
    def work() -> None:
        offline.launch(64, up=48)  # no power of two
        offline.launch(128)

    compile_together(work)
    assert offline.compiled == {"compile": 1}
    with pytest.raises(Exception, match="power of 2"):
        offline.launch(64, up=48)


def test_work_that_fails_leaves_launches_as_they_were(offline: Offline, caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        offline.launch(64)
        raise RuntimeError("another Triton")

    compile_together(work)
    assert "compiled one by one: RuntimeError: another Triton" in caplog.text
    offline.launch(128, programs=7)
    assert offline.launched == [7]


def test_other_threads_launch_meanwhile(offline: Offline) -> None:
    def work() -> None:
        thread = threading.Thread(target=lambda: offline.launch(64, programs=5))
        thread.start()
        thread.join()
        offline.launch(64, programs=6)

    compile_together(work)
    assert offline.launched == [5]


def test_noise_is_one_kernel_wherever_seeds_and_positions_lie(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions are sent behind seeds: those of 7 nodes lie at 56 bytes, and a kernel for that was compiled in text."""
    from forerun.core.noise_kernel import uniform_rows, uniforms_by_kernel
    from forerun.models.cuda.kernels.rows import normalise

    monkeypatch.setattr(uniform_rows, "device_caches", defaultdict(uniform_rows.create_binder))
    for nodes in (8, 7, 1, 2, 31):
        seeds, positions, _ = torch.zeros(3, nodes, dtype=torch.long)
        uniforms_by_kernel(seeds, positions, torch.arange(300, dtype=torch.int32))
    assert offline.compiled.total() == 1
    for at in (0, 1):  # a kernel that does depend on the place
        rows = torch.zeros(5, 64).flatten()[at:]
        normalise[(1,)](rows, rows, rows, 1e-5, WIDTH=64, UP=64, PDL=False)
    assert offline.compiled.total() == 3


def test_walks_of_forms_of_about_one_size_are_one_kernel(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they accept lies behind their paths: of odd depths and numbers of trees, at other places."""
    from forerun.verify.kernels import follow, walk_by_kernel

    monkeypatch.setattr(follow, "device_caches", defaultdict(follow.create_binder))

    def work() -> None:
        for count, depth, before in ((1, 4, 0), (1, 5, 0), (2, 4, 0), (2, 5, 1)):
            trees = torch.zeros(2, count, 8, dtype=torch.long)
            ancestors = torch.zeros(before + count * 8 * (depth + 1), dtype=torch.int32)[before:]
            decided = torch.zeros(count * (depth + 2), dtype=torch.long)
            paths, accepted, bonus = decided.split([count * depth, count, count])
            walk_by_kernel(trees, ancestors, trees[0], paths.view(count, depth), accepted, bonus)

    compile_together(work)
    work()
    assert offline.compiled == {"compile": 1}
    assert offline.launched == [1, 1, 2, 2]


@pytest.mark.slow
def test_attention_of_the_widest_heads_fits_a_multiprocessor(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's heads of 512, where they branch and where not: 227 KiB of shared memory are all there is."""
    from forerun.models.cuda.kernels.attention import attend
    from forerun.models.cuda.steps.attention import Attention

    monkeypatch.setattr(attend, "device_caches", defaultdict(attend.create_binder))
    target = make_target("zz-large-gemma4", "cpu", torch.bfloat16, kv_slots=64)
    config, buffers, layer = target.config, target.buffers, 1
    attention, kv = Attention(config, 512, target.device, 0, pdl=False), store_of(target.kv.data, config, layer)
    assert kv.shape[3] == 512

    def work() -> None:
        for size in (Size(16, 16, 8), Size(16, 18, 8, lone=16)):
            run, how = Run.of(size, buffers.ints), shared_out(size, kv.shape[1], kv.shape[3], 132)
            attention.attend(run, buffers.queries, kv, buffers.found, 0, how=how)

    begun = begin_compiling(work)
    assert begun is not None
    shared = [kernel.result().metadata.shared for kernel in begun.mode.future_kernels.values()]
    assert 128 << 10 < max(shared) <= 227 << 10
    assert offline.launched == []


def test_layers_of_each_kind_are_compiled_and_the_last() -> None:
    def kinds(name: str) -> list[int]:
        return one_of_each_kind(make_target(name, "cpu").model.layers)

    assert kinds("llama") == [0, 2]
    assert kinds("smollm3") == [0, 1, 2]  # every second has no positions
    assert kinds("zz-gemma4") == [0, 1, 3, 4, 5]  # two sizes, with keys of their own and without


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["large", "smollm3"])
def test_captures_compile_nothing_and_texts_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str) -> None:
    need_cuda()
    need_compiler()
    target = make_target(shape, "cuda", torch.bfloat16)
    config = EngineConfig(max_batch=len(PROMPTS), max_length=LENGTH)
    engine = make_engine(target, frozenset(), SpeculativeConfig(drafter="none"), config)
    requests = [Request(prompt, SamplingParams(max_tokens=12, ignore_eos=True)) for prompt in PROMPTS]
    wanted = _write(engine, requests)
    _forget_kernels(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = Offline()
    monkeypatch.setattr(import_module("triton.knobs").compilation, "listener", found.note)
    target.passes.warm_up((0, -1), LENGTH)
    assert set(found.compiled) == {"compile"}
    assert found.compiled["compile"] > 10
    assert _write(engine, requests) == wanted


def _forget_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: what other tests compiled is compiled again."""
    kind = import_module("triton.runtime.jit").JITFunction
    for name, module in list(sys.modules.items()):
        if name.startswith("forerun.models.cuda.kernels"):
            for kernel in vars(module).values():
                if isinstance(kernel, kind):
                    monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
