"""The library as a whole: how it is found, its threads, and its C code under sanitizers and on other machines."""

import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import Queue
from pathlib import Path
from time import process_time, sleep

import pytest
import torch

from forerun.models.native import library as native_library
from forerun.models.native.library import functions
from forerun.models.native.packing import PackedWeight, pack_blocks
from tests.native.blocks import needs_native, random_blocks
from tests.native.packed_linear import apply

NATIVE = Path(native_library.__file__).parent / "c"
CHECKS = [
    Path(__file__).with_name(name)
    for name in ("check.c", "check_attention.c", "check_head.c", "check_experts.c", "check_run.c")
]
FLAGS = ["-std=gnu11", "-ffp-contract=off", "-pthread", f"-I{NATIVE}", "-DFR_AT_ONCE=1"]


def _ask(setting: str, path: str = "") -> str:
    """What another process says of the library under settings of FORERUN_NATIVE and FORERUN_ISA."""
    code = "from forerun.models.native import library as n; print(n.available(), n.isa(), n.why_not())"
    environment = {**os.environ, "FORERUN_NATIVE": setting, "FORERUN_ISA": path}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_it_can_be_turned_off_and_says_why_it_is_missing(tmp_path: Path) -> None:
    assert _ask("0").startswith("False  FORERUN_NATIVE=0")
    assert "absent.so names no file; unset it" in _ask(str(tmp_path / "absent.so"))
    asked = "from forerun.models.native import library as n; n.available(); n.isa()"
    environment = {**os.environ, "FORERUN_NATIVE": str(tmp_path / "absent.so")}
    told = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert told.stderr.count("absent.so names no file, so torch computes, more slowly") == 1
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF, but no more")
    assert "does not load" in _ask(str(broken))


@pytest.mark.parametrize(("lacks", "said"), [(0, "another version"), (1, "does not load")])
def test_a_library_of_another_version_is_warned_of_once(tmp_path: Path, lacks: int, said: str) -> None:
    """Everything still works, several times slower: nobody would look for the reason."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, stale = tmp_path / "stale.c", tmp_path / "stale.so"
    names = [name for name, _, _ in functions()][lacks:]  # an older build lacks what was added since
    source.write_text("".join(f"long {name}(void) {{ return 1; }}\n" for name in names))
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(stale)], check=True)
    code = "from forerun.models.native import library as n; n.available(); n.isa(); print(n.why_not())"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FORERUN_NATIVE": str(stale)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said in ran.stdout
    assert ran.stderr.count("pip install") == 1
    assert ran.stderr.count(f"{stale} was built from other sources") == 1
    quiet = _ask("0")  # turned off on purpose: nothing to warn of
    assert "pip install" not in quiet


@needs_native
def test_it_says_what_runs_here() -> None:
    assert native_library.why_not() is None
    paths = native_library.paths()
    assert native_library.isa() == os.environ.get("FORERUN_ISA") or next(n for n, has in paths.items() if has)
    assert paths["generic"]
    assert native_library.library().fr_choose(b"no such thing") == 1


@needs_native
@pytest.mark.parametrize("path", [name for name, has in native_library.paths().items() if has])
def test_a_path_can_be_forced(path: str) -> None:
    assert _ask("", path).split()[:2] == ["True", path]


@needs_native
def test_a_path_that_the_machine_lacks_is_one_line() -> None:
    environment = {**os.environ, "FORERUN_ISA": "vax"}
    code = "from forerun.models.native import library as n; n.available()"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    last = ran.stderr.strip().splitlines()[-1]
    assert "FORERUN_ISA=vax: this machine cannot run that; it can run" in last
    assert "generic" in last


def _work() -> tuple[PackedWeight, torch.Tensor]:
    return pack_blocks(random_blocks("Q4_1", 300, 256)), torch.randn(6, 256)


@needs_native
def test_threads_do_not_change_results() -> None:
    packed, x = _work()
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5, 3):
            torch.set_num_threads(threads)
            results.append(apply(packed, x))
            assert native_library.library().fr_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@needs_native
def test_two_callers_at_once() -> None:
    packed, x = _work()
    wanted = apply(packed, x)
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda _: apply(packed, x), range(200)))
    assert all(torch.equal(result, wanted) for result in results)


@needs_native
def test_idle_workers_sleep() -> None:
    """A worker watches for the next job a moment after the last one; whatever comes later finds it asleep."""
    packed, x = _work()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        wanted = apply(packed, x)
        sleep(0.1)
        spent = min(_spent_asleep() for _ in range(3))  # other threads of this process may work in one of them
        assert torch.equal(apply(packed, x), wanted)  # and wakes
    finally:
        torch.set_num_threads(before)
    assert spent < 0.05  # CPU seconds: one that goes on watching uses its share of a core


def _spent_asleep() -> float:
    before = process_time()
    sleep(0.25)
    return process_time() - before


def _in_child(answers: "Queue[bool]", packed: PackedWeight, x: torch.Tensor, wanted: torch.Tensor) -> None:
    lonely = native_library.library().fr_threads() == 1
    torch.set_num_threads(1)  # torch's own pool does not survive a fork
    alone = torch.equal(apply(packed, x), wanted)
    native_library.match_threads(2)
    answers.put(lonely and alone and native_library.library().fr_threads() == 2)


@needs_native
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_starts_its_own_threads() -> None:
    packed, x = _work()
    wanted = apply(packed, x)
    native_library.match_threads(3)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_in_child, args=(answers, packed, x, wanted))
    child.start()
    assert answers.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0


def _build(compiler: str, flags: list[str], into: Path) -> bool:
    sources = [str(file) for file in (*CHECKS, *sorted(NATIVE.rglob("*.c")))]
    command = [compiler, *FLAGS, *flags, *sources, "-lm", "-o", str(into)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_the_code_is_clean_under_sanitizers(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    trial = tmp_path / "trial.c"
    trial.write_text("int main(void) { return 0; }\n")
    sanitize = ["-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sanitize += ["-DFR_INLINE=static inline"]  # one huge function takes a minute to compile with all its checks
    tried = subprocess.run([compiler, *sanitize, str(trial), "-o", str(tmp_path / "trial")], check=False)
    if tried.returncode or subprocess.run([tmp_path / "trial"], check=False).returncode:
        pytest.skip("the compiler has no sanitizers")
    assert _build(compiler, sanitize, tmp_path / "check")
    ran = subprocess.run([tmp_path / "check"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split()[-1] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "path"), [("x86_64", "avx2"), ("aarch64", "neon-i8mm")])
def test_kernels_of_other_machines_give_the_same_bits(machine: str, path: str, tmp_path: Path) -> None:
    """In an emulator, which has AVX2 and i8mm; AVX-512 and AMX run where the processor has them."""
    compiler, emulator = shutil.which(f"{machine}-linux-gnu-gcc"), shutil.which(f"qemu-{machine}")
    if compiler is None or emulator is None:
        pytest.skip(f"needs {machine}-linux-gnu-gcc and qemu-{machine}")
    assert _build(compiler, ["-O2"], tmp_path / "check")
    command = [emulator, "-L", f"/usr/{machine}-linux-gnu", "-cpu", "max", tmp_path / "check"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert path in ran.stdout
    assert ran.stdout.split()[-1] == "ok"


@needs_native
def test_amx_runs_where_the_processor_has_it() -> None:
    """What the machine says of itself and what the library runs must agree."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    if "amx_int8" not in flags:
        pytest.skip("this processor has no AMX")
    assert native_library.paths()["amx-int8"]
