"""The peer llama.cpp on the same GGUF file, through llama-cpp-python.

It is given the same token ids, decodes greedily with as many threads, and starts every text with an empty cache: by
itself it would keep the prompt from one repeat to the next, which no other contender may. Its lookup needs the logits
of every token, so that contender has a model of its own; the plain one computes only the last row, as it should.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from forerun.core.errors import InvalidInput, MissingDependency
from forerun.measure.bench.alternate import Contender, Written
from forerun.measure.bench.settings import LLAMA_CPP, LLAMA_CPP_LOOKUPS

MOST_CONTEXT = 4096  # tokens: its lookup keeps a row of logits for each of them


def why_not(model: str | Path) -> str | None:
    """Why llama.cpp cannot run this file here; None = it can."""
    if Path(model).suffix != ".gguf":
        return f"llama.cpp reads .gguf files only, and {str(model)!r} is none"
    try:
        import_module("llama_cpp")
    except ImportError:
        return "llama-cpp-python is not installed; get it with: pip install 'forerun[llama]'"
    except Exception as error:  # its native library does not load
        return f"llama-cpp-python does not load ({error}); install it again: pip install 'forerun[llama]'"
    return None


def load(names: Sequence[str], file: str | Path, ends: Sequence[int], context: int, threads: int) -> list[Contender]:
    if reason := why_not(file):
        raise MissingDependency(f"the peer {names[0]!r} cannot run: {reason}")
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    context, stops = min(context, MOST_CONTEXT), frozenset(ends)
    found = []
    if LLAMA_CPP in names:
        found.append(llama_cpp_contender(LLAMA_CPP, load_model(file, context, threads), stops))
    lookups = [name for name in names if name in LLAMA_CPP_LOOKUPS]
    model = load_model(file, context, threads, all_logits=True) if lookups else None
    for name in lookups:
        lookup = LlamaPromptLookupDecoding(num_pred_tokens=LLAMA_CPP_LOOKUPS[name])
        like = LLAMA_CPP if LLAMA_CPP in names else None
        found.append(llama_cpp_contender(name, model, stops, lookup, like))
    return found


def isa() -> str:
    """The instruction sets that its library was built with."""
    from llama_cpp import llama_print_system_info

    said: bytes = llama_print_system_info()
    return enabled(said.decode("utf-8", "replace"))


def enabled(said: str) -> str:
    """What is switched on in its own words, which are "CPU : AVX = 1 | AVX2 = 1 | NEON = 0 | ..."."""
    parts = [part.strip() for part in said.replace(":", "|").split("|")]
    return " ".join(name.strip() for name, _, value in (part.partition("=") for part in parts) if value.strip() == "1")


def load_model(file: str | Path, context: int, threads: int, all_logits: bool = False) -> Any:
    """A llama.cpp model that says nothing while it loads."""
    from llama_cpp import Llama

    return Llama(
        str(file), n_ctx=context, n_threads=threads, n_threads_batch=threads, logits_all=all_logits, verbose=False
    )


def llama_cpp_contender(
    name: str, model: Any, ends: frozenset[int], lookup: Any = None, like: str | None = None
) -> Contender:
    """`Llama.generate`, timed; its passes are counted from outside. Other kernels may write other texts than ours."""

    def write(prompts: Sequence[Sequence[int]], max_tokens: int) -> Written:
        (ids,) = prompts
        if len(ids) + max_tokens > model.n_ctx():
            raise InvalidInput(
                f"a prompt of {len(ids)} tokens and {max_tokens} more exceed llama.cpp's context of "
                f"{model.n_ctx()} here; leave it out, or give shorter prompts"
            )
        passes: list[float] = []  # when each began; the first is the one over the prompt
        tokens: list[int] = []
        first = 0.0  # when the first token came
        evaluate = model.eval

        def counted(part: Sequence[int]) -> None:
            passes.append(perf_counter())
            evaluate(part)

        model.reset()
        model.draft_model, model.eval = lookup, counted
        started = perf_counter()
        try:
            for token in model.generate(list(ids), temp=0.0, repeat_penalty=1.0):
                first = first or perf_counter()
                tokens.append(int(token))
                if token in ends or len(tokens) == max_tokens:
                    break
            ended = perf_counter()
        finally:
            model.eval = evaluate
        return Written([tokens], ended - started, len(passes), ended - first)

    return Contender(name, write, exact=False, like=like)
