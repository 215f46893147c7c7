"""A process that compiles Triton's kernels into Triton's cache on disk, for one that waits for them.

A third of a compilation holds Python's global lock, and the part that launches a kernel is made by a C compiler when
the kernel is first launched: both happen here instead, in one process per core. Jobs come as pickles on standard
input, from our own process alone; for each, one line says that it is done, or what went wrong.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from signal import SIG_IGN, SIGINT, signal
from typing import IO, Any, cast

from forerun.models.cuda.compile.on_disk import triton_key, use_triton_key

LONGEST = 60.0  # seconds that a process may take to end


@dataclass(frozen=True, slots=True)
class Job:
    module: str  # where the kernel is
    kernel: str
    hash: str  # as Triton has it: where kernels refer to each other it depends on which was asked for first
    source: type[Any]  # Triton's class of sources: of its own language, or of Gluon's
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: Any
    options: dict[str, Any]
    environment: Any
    triton: str  # Triton's key

    def compile(self) -> None:
        """Into the cache; so is what launches the kernel, where that can be made."""
        use_triton_key(self.triton)
        import_module("triton.knobs").compilation.store_binary_only = True  # a launch would read all it is made from
        kernel = getattr(import_module(self.module), self.kernel)
        kernel.hash = self.hash
        source = self.source(kernel, self.signature, self.constants, self.attributes)
        compiler = import_module("triton.compiler.compiler")
        made = compiler.compile(source, target=self.target, options=self.options, _env_vars=self.environment)
        with suppress(Exception):  # the first launch makes it, or says why not
            import_module("triton.backends.nvidia.driver").CudaLauncher(source, made.metadata)

    def is_cached(self, source: Any) -> bool:
        """Is the kernel of this source on disk already?"""
        compiler, cache = import_module("triton.compiler.compiler"), import_module("triton.runtime.cache")
        backend = compiler.make_backend(self.target)
        key = compiler.get_cache_key(source, backend, backend.parse_options(self.options), self.environment)
        found = cache.get_cache_manager(sha256(key.encode()).hexdigest())
        return bool(found.get_group(f"{source.name[:150]}.json"))


def job_of(compile_kernel: Any) -> Job | None:
    """What a closure of Triton's (`_do_compile` of a kernel) would compile; None where that is on disk already."""
    names = dict(zip(compile_kernel.__code__.co_freevars, compile_kernel.__closure__ or (), strict=True))
    try:
        kernel, source = names["self"].cell_contents, names["src"].cell_contents
        target, options = names["target"].cell_contents, names["options"].cell_contents
        environment = names["env_vars"].cell_contents
    except KeyError:
        return None
    job = Job(
        kernel.module, kernel.fn.__qualname__, kernel.cache_key, type(source), source.signature, source.constants,
        source.attrs, target, dict(options.__dict__), environment, triton_key(),
    )  # fmt: skip
    return None if job.is_cached(source) else job


class Worker:
    """Such a process, seen from the one that waits."""

    def __init__(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
        )

    def compile(self, job: Job) -> None:
        """Waits until it is done, or has failed: then a launch compiles the kernel again and says why."""
        into, out = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        into.write(pickle.dumps(job))
        into.flush()
        out.readline()

    def close(self) -> None:
        """Let it end, by force where that takes too long. It ends likewise when this process does."""
        try:
            self._process.communicate(timeout=LONGEST)  # ends what it reads
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.wait()


def main() -> None:
    signal(SIGINT, SIG_IGN)  # Ctrl-C reaches it too: it ends with the program, which may go on
    os.nice(5)  # texts may be written meanwhile
    said = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no answer
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer = "done"
        try:
            job.compile()
        except Exception as error:
            answer = repr(error).replace("\n", " ")
        try:
            os.write(said, answer.encode() + b"\n")
        except BrokenPipeError:  # the program has ended
            return


if __name__ == "__main__":
    main()
