"""The engines that the referee is run against: how each is started with the table model, and what its API calls things.

A command line is written as a user would type it, in a folder that holds `table/` (`forerun verify make-model table`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def _words(fields: Mapping[str, Any]) -> str:
    return f"'{json.dumps(fields)}'"


@dataclass(frozen=True)
class Engine:
    """What is checked: a server's command line, or flags of `forerun verify` for an engine in its own process."""

    title: str
    package: str  # whose version is recorded
    server: str = ""  # a command line with {port}; "" = in the process of `forerun verify`
    plain: str = ""  # the same model without speculation; "" = one server does both, or the engine is in process
    flags: str = ""  # of `forerun verify`


_VLLM = (
    "python -m vllm.entrypoints.openai.api_server --model table/target --served-model-name table --dtype float16 "
    "--max-model-len 2048 --max-num-seqs 32 --gpu-memory-utilization 0.05 --kv-cache-memory-bytes 1073741824 "
    "--generation-config vllm --port {port}"
)
_LLAMA = "python llama_server.py table/target.gguf --port {port}"
_LLAMA_FLAGS = " ".join([
    "--extra", _words({"top_k": 0, "top_p": 1, "min_p": 0, "repeat_last_n": 1024}),
    "--rename", _words({"repetition_penalty": "repeat_penalty", "response_format": "json_schema"}),
])  # fmt: skip
_SERVE = "forerun serve --model table/target --device {device} --port {port} --speculative-config "
_OFF = f"--off {_words({'speculative': 'off'})}"
_FIXED = {"controller": "fixed", "budget": 4}
# transformers' server takes generate's own options as a text of JSON; of the API's parameters it knows a few
_GENERATE = {"do_sample": True, "top_k": 0, "eos_token_id": 256, "pad_token_id": 256}


def _vllm(title: str, drafting: Mapping[str, Any]) -> Engine:
    return Engine(f"vLLM, {title}", "vllm", f"{_VLLM} --speculative-config {_words(drafting)}", _VLLM)


def _served(title: str, drafting: Mapping[str, Any]) -> Engine:
    return Engine(f"Forerun's server, {title}", "forerun", _SERVE + _words({**drafting, **_FIXED}), flags=_OFF)


def _in_process(drafter: str, model: str = "") -> Engine:
    flags = f"--drafter {drafter}" + (f" --draft-model table/{model}" if model else "")
    return Engine(f"Forerun in process, {drafter}", "forerun", flags=flags)


ENGINES = {
    "forerun-ngram": _in_process("ngram"),
    "forerun-draft": _in_process("draft_model", "draft"),
    "forerun-eagle3": _in_process("eagle3", "eagle3"),
    "forerun-recycling": _in_process("recycling"),
    "forerun-suffix": _in_process("suffix"),
    "serve-ngram": _served("n-gram", {"drafter": "ngram"}),
    "serve-draft": _served("draft model", {"drafter": "draft_model", "draft_model": "table/draft"}),
    "serve-eagle3": _served("EAGLE-3 head", {"drafter": "eagle3", "draft_model": "table/eagle3"}),
    "transformers-draft": Engine(
        "transformers' generate, assistant model",
        "transformers",
        flags="--engine transformers --draft-model table/draft",
    ),
    "transformers-lookup": Engine(
        "transformers' generate, prompt look-up", "transformers", flags="--engine transformers"
    ),
    "transformers-serve": Engine(
        "transformers serve, prompt look-up",
        "transformers",
        "transformers serve table/target --device cpu --port {port}",
        flags=" ".join(
            [
                "--model table/target",
                "--extra",
                _words({"generation_config": json.dumps({**_GENERATE, "prompt_lookup_num_tokens": 4})}),
                "--off",
                _words({"generation_config": json.dumps(_GENERATE)}),
            ]
        ),
    ),
    "llama-draft": Engine(
        "llama.cpp's server, draft model", "xllamacpp", f"{_LLAMA} --draft table/draft.gguf", _LLAMA, _LLAMA_FLAGS
    ),
    "vllm-ngram": _vllm(
        "n-gram", {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    ),
    "vllm-draft": _vllm("draft model", {"method": "draft_model", "model": "table/draft", "num_speculative_tokens": 4}),
    "vllm-eagle3": _vllm(
        "our EAGLE-3 head", {"method": "eagle3", "model": "table/eagle3", "num_speculative_tokens": 3}
    ),
}
