"""A package called llama_cpp whose model counts: what our side of llama.cpp needs of it, where it is not installed.

`write_package` puts it into a folder that goes on a process' path. With `deadly` its models end the process when they
are made, as a library does that was built for another processor.
"""

from __future__ import annotations

from pathlib import Path

MODEL = '''
import os
import signal

DEADLY = {deadly}


def llama_print_system_info():
    return b"CPU : AVX2 = 1 | AVX512 = 0 | OPENMP = 1 |"


class Llama:
    """Counts upwards; a draft model makes it count in steps of one pass for two tokens."""

    def __init__(self, path, n_ctx, n_threads, n_threads_batch, logits_all, verbose):
        if DEADLY:
            os.kill(os.getpid(), signal.SIGILL)
        assert isinstance(path, str) and n_threads == n_threads_batch and not verbose
        print("llama_model_loader: chatter")
        self.context, self.all, self.draft_model = n_ctx, logits_all, None
        self.n_tokens, self.last = 0, 0

    def n_ctx(self):
        return self.context

    def n_vocab(self):
        return 50

    def reset(self):
        self.n_tokens = 0

    def close(self):
        self.context = 0

    def eval(self, tokens):
        assert self.n_tokens + len(tokens) <= self.context
        self.n_tokens += len(tokens)
        self.last = tokens[-1]

    def generate(self, tokens, temp, repeat_penalty):
        assert self.n_tokens == 0, "the cache was not emptied"
        self.eval(tokens)
        while True:
            first = self.last + 1
            yield first
            if self.draft_model is not None:
                assert self.all, "lookup needs the logits of every token"
                yield first + 1
                self.eval([first, first + 1])
            else:
                self.eval([first])
'''
LOOKUP = """
class LlamaPromptLookupDecoding:
    def __init__(self, num_pred_tokens):
        self.num_pred_tokens = num_pred_tokens
"""


def write_package(folder: Path, deadly: bool = False) -> Path:
    package = folder / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(MODEL.format(deadly=deadly))
    (package / "llama_speculative.py").write_text(LOOKUP)
    return folder
