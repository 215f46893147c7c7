"""CPU seconds of one thread, ours and llama.cpp's, on one GGUF file (python -m forerun.bench.cpu.seconds FILE).

On a machine that others use the clock says little; what a process has computed for is known all the same, though its
caches and its memory are shared. Each engine has a process of its own and one thread, reads the same prompt and decodes
greedily; medians over all tokens. An engine that cannot run or dies is left out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from statistics import median
from time import process_time

from forerun.bench.machine import load_average, machine_facts
from forerun.bench.measure import ContenderLost
from forerun.bench.peers import llama_cpp
from forerun.bench.peers.process import PeerProcess
from forerun.errors import InvalidInput

STRIDE = 7919  # a prime, so that tokens of the prompt differ
Reads = Callable[[list[int]], int]  # tokens to read -> the likeliest next one


def ours(file: str, tokens: int, prompt: int, repeats: int) -> dict[str, float]:
    """Our target: a pass over each token, and its commit."""
    import torch

    from forerun.build import load_target
    from forerun.models.load.checkpoint import open_checkpoint
    from forerun.params import EngineConfig
    from forerun.types import Needs, PlainSeq, TreeBatch, Verdict

    torch.set_num_threads(1)
    target = load_target(open_checkpoint(file), EngineConfig(device="cpu"))

    def start(ids: list[int]) -> Reads:
        seq = PlainSeq(0, [ids[0]], max_length=len(ids) + tokens + 2)
        target.release(seq)

        def read(fresh: list[int]) -> int:
            seq.tokens += fresh
            if target.cached_tokens(seq) < len(seq.tokens) - 1:
                target.prefill([seq], Needs())
            root = TreeBatch.chains([seq.tokens[-1:]])
            greedy = target.score([seq], root, Needs()).greedy
            assert greedy is not None
            assert greedy.argmax is not None
            target.commit([seq], root, Verdict.of([[]], greedy.argmax, "cpu"))
            return greedy.argmax[0]

        return read

    return measure(start, target.vocab_size, tokens, prompt, repeats)


def llamas(file: str, tokens: int, prompt: int, repeats: int) -> dict[str, float]:
    """llama.cpp's: `eval` and the argmax of its last row of logits."""
    if reason := llama_cpp.why_not(file):
        raise InvalidInput(reason)
    import numpy as np
    from llama_cpp import llama_get_logits

    model = llama_cpp.load_model(file, prompt + tokens + 2, 1)

    def start(ids: list[int]) -> Reads:
        model.reset()
        model.eval(ids[:1])

        def read(fresh: list[int]) -> int:
            model.eval(fresh)
            row = np.ctypeslib.as_array(llama_get_logits(model._ctx.ctx), (model.n_vocab(),))
            return int(row.argmax())

        return read

    return measure(start, model.n_vocab(), tokens, prompt, repeats)


def measure(
    start: Callable[[list[int]], Reads], vocabulary: int, tokens: int, prompt: int, repeats: int
) -> dict[str, float]:
    """Medians: seconds per token that is written, and per token of a prompt; the first text warms up."""
    writing, reading = list[float](), list[float]()
    for repeat in range(repeats + 1):
        # prompts that differ: none is found in a prefix cache
        ids = [(1 + STRIDE * (i + 1) * (repeat + 1)) % vocabulary for i in range(prompt)]
        read, seconds = start(ids), list[float]()
        fresh = ids[1:]
        for _ in range(tokens + 1):
            began = process_time()
            fresh = [read(fresh)]
            seconds.append(process_time() - began)
        if repeat:
            reading.append(seconds[0] / (prompt - 1))
            writing += seconds[1:]
    return {"token_s": median(writing), "prompt_token_s": median(reading)}


def main(words: Sequence[str] | None = None) -> int:
    """Measure both, print a line for each and the document."""
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.cpu.seconds")
    parser.add_argument("file", help="a GGUF file")
    parser.add_argument("--tokens", type=int, default=16, help="written per text")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt, 2 or more")
    parser.add_argument("--repeats", type=int, default=3)
    flags, load = parser.parse_args(words), load_average()
    found, left_out = dict[str, dict[str, float]](), dict[str, str]()
    for engine, function in (("forerun", "ours"), ("llama_cpp", "llamas")):
        with PeerProcess() as process:
            try:
                found[engine] = process.call(f"{__spec__.name}:{function}", **vars(flags))
            except (ContenderLost, InvalidInput) as error:
                left_out[engine] = str(error)
    for engine, seconds in found.items():
        token, read = seconds["token_s"], 1.0 / seconds["prompt_token_s"]
        print(f"{engine:<10} {token * 1e3:7.2f} ms of CPU a token, prompts {read:7.1f} tokens a CPU second")
    for engine, why in left_out.items():
        print(f"{engine:<10} left out: {why}")
    conditions = {**machine_facts(), "load_before": load, "load_after": load_average()}
    print(
        json.dumps(
            {"benchmark": "cpu_seconds", "seconds": found, "left_out": left_out, "conditions": conditions}
        )
    )
    return 0 if found else 1


if __name__ == "__main__":
    raise SystemExit(main())
