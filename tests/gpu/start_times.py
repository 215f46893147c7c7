"""How long a server's engine takes from the start of its process until it writes, drafts, and has captured everything.

    python -m tests.gpu.start_times MODEL "$(date +%s.%N)" [SECONDS]

Times are seconds since the second argument. First a table: the seconds that each part of the start took by itself, on
the thread that loads, up to the first token; parts that a machine does not have are left out. Then, of each text, its
seconds, tokens and tokens per round: one is written while captures wait, then one every second until nothing waits for
one sequence, or SECONDS are over. All must be the same.
"""

import asyncio
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter, time
from typing import Any

PROMPT, TOKENS = "Explain how a hash table works, with an example in Python.", 64

HEAVY = {"transformers", "torch._dynamo", "torch._inductor", "sympy", "gguf", "fastapi", "scipy", "llguidance"}

# what the parts are called, and where their work is done: each is told without what others did for it
PARTS = {
    "file opened": ("forerun.models.load.checkpoint:open_checkpoint",),
    "head found": ("forerun.build.engine:find_head",),
    "tokenizer": ("forerun.models.load.checkpoint:Checkpoint.tokenizer",),
    "weights": (
        "forerun.models.cuda.network:Model.__init__",
        "forerun.models.native.target:native_decoder",
        "forerun.models.hybrid.target:torch_decoder",
    ),
    "library's products tried": ("forerun.models.cuda.steps.wide:WideProducts.__init__",),
    "KV pool and buffers": ("forerun.build.load:load_target",),
    "Triton's own key": ("triton.runtime.cache:triton_key",),
    "kernels asked for": ("forerun.models.cuda.graphs:Passes.compile",),
    "kernels waited for": ("forerun.models.cuda.compile.together:Compiling.finish",),
    "kernels looked up": ("triton.runtime.jit:JITFunction._do_compile",),
    "kernels put on the device": ("triton.compiler.compiler:CompiledKernel._init_handles",),
    "passes timed, or read": ("forerun.control.cost:CostModel.measure_or_load",),
    "drafter": ("forerun.build.engine:build_drafter",),
    "kernels of the drafter asked for": ("forerun.drafters.device.eagle:HeadDraft._prepare",),
    "captures": ("forerun.models.cuda.graphs:capture",),
    "passes prepared": ("forerun.models.cuda.graphs:Passes.warm_up",),
    "sampling prepared": ("forerun.models.cuda.after_pass:Sampler.warm_up",),
    "kept rows prepared": ("forerun.models.cuda.after_pass:AfterPass.warm_up",),
    "sampling rehearsed": ("forerun.build.load:rehearse_verdicts",),
    "garbage": ("forerun.build.load:collect_garbage",),
    "rest of loading": ("forerun.build.load:load_engine",),
}


class Parts:
    """Seconds and calls of each part, on the thread that began."""

    def __init__(self, started: float) -> None:
        self.started, self.seconds, self.calls = started, dict[str, float](), Counter[str]()
        self._inner, self._thread = [0.0], threading.get_ident()  # seconds of parts within those that are under way

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.calls[name] += 1

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(work)
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return work(*args, **kwargs)
            self._inner.append(0.0)
            began = perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                spent = perf_counter() - began
                self.add(name, spent - self._inner.pop())
                self._inner[-1] += spent

        return run

    def imports(self, name: str, *modules: str) -> None:
        began = perf_counter()
        for module in modules:
            import_module(module)
        self.add(f"import {name}", perf_counter() - began)

    def watch(self) -> None:
        """From now on the parts are timed, of modules that can be imported here."""
        for name, places in PARTS.items():
            for place in places:
                module, _, path = place.partition(":")
                *outer, last = path.split(".")
                try:
                    owner = import_module(module)
                except ImportError:  # no Triton
                    continue
                for each in outer:
                    owner = getattr(owner, each)
                found = vars(owner)[last]
                if isinstance(found, classmethod):
                    setattr(owner, last, classmethod(self.timed(name, found.__func__)))
                else:
                    setattr(owner, last, self.timed(name, found))

    def print(self, total: float) -> None:
        known = sum(self.seconds.values())
        for name, seconds in [*self.seconds.items(), ("between these", total - known), ("in all", total)]:
            print(f"{seconds:8.3f} s  {name}" + f", {self.calls[name]} times" * (self.calls[name] > 1))


def kernels_counted() -> Counter[str]:
    """Counts kernels by where they come from, and processes that compile, from now on."""
    found = Counter[str]()
    if find_spec("triton") is not None:
        worker = import_module("forerun.models.cuda.compile.worker").Worker
        start = worker.__init__

        def note(*, cache_hit: bool, **_: Any) -> None:
            found["from disk" if cache_hit else "compiled"] += 1

        def begin(self: Any) -> None:
            found["processes that compile"] += 1
            start(self)

        worker.__init__ = begin
        import_module("triton.knobs").compilation.listener = note
    return found


def begin(started: float) -> tuple[Parts, Counter[str]]:
    """Imports what a server's engine does, in its order, and times the parts that follow."""
    parts = Parts(started)
    parts.add("until Python runs", time() - started)
    parts.imports("torch", "torch")
    parts.imports("forerun", "forerun.api.llm")
    torch = import_module("torch")
    if torch.cuda.is_available():
        parts.imports("triton", "triton.compiler.compiler", "triton.runtime.jit")
        parts.imports("forerun's decoder for GPUs", "forerun.models.cuda.target", "forerun.drafters.device.eagle")
        began = perf_counter()
        torch.zeros(1, device="cuda")
        parts.add("device", perf_counter() - began)
    began = perf_counter()
    parts.watch()
    counted = kernels_counted()
    parts.add("this script's own imports", perf_counter() - began)
    return parts, counted


async def main(model: str, started: float, most: float) -> None:
    parts, counted = begin(started)
    async with import_module("forerun").AsyncLLM(model) as llm:
        ready = time()
        captures, texts, drafts = llm.llm.engine.captures, set[str](), False
        stream = llm.stream(PROMPT, max_tokens=TOKENS, temperature=0.0)
        async for _ in stream:
            parts.add("first token", time() - ready)
            break
        parts.print(time() - started)
        kernels = ", ".join(f"{count} {name}" for name, count in counted.items()) or "none"
        print(f"kernels: {kernels}; {captures.missing} captures for one sequence wait", flush=True)
        print("imported, and heavy:", *sorted(HEAVY & sys.modules.keys()))
        await stream.close()
        while True:
            before, missing = time(), captures.missing
            done = await llm.chat(PROMPT, max_tokens=TOKENS, temperature=0.0)
            tokens, rounds = len(done.token_ids), llm.llm.engine.stats.rounds
            texts.add(done.text)
            accepted = llm.llm.engine.stats.accepted
            said = f"{time() - started:.1f} s: a text of {tokens} tokens in {time() - before:.2f} s"
            print(f"{said}; rounds so far {rounds}, accepted {accepted}, {missing} captures waited", flush=True)
            if accepted and not drafts:
                drafts = True
                print(f"first drafted text: {time() - started:.1f} s", flush=True)
            if not missing or time() - started > most:
                break
            await asyncio.sleep(1.0)
        print(f"{len(texts)} different texts (1 is right)")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s %(message)s", filename="start.log")
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), *map(float, sys.argv[3:] or ["inf"])))
