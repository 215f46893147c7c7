"""Flags, their names in error messages, and the files that they name.

Flags are made from the fields of the settings classes, so type, default and limits are defined once: a field becomes a
flag by having its line in `HELP`. A flag that is not given stays None, and the class's own default holds. The library
names settings as Python does; error messages of the command line name the flag: `max_tokens=0` becomes
`--max-tokens 0`. Files to be written are checked first: a run of minutes must not end without a place for its result.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from forerun.core import registry
from forerun.core.checks import one_format
from forerun.core.errors import InvalidInput
from forerun.core.params import Dtype, EngineConfig, SamplingParams, SpeculativeConfig

STDOUT = Path("-")  # of --json: standard output


def check_file(flag: str, file: Path) -> None:
    """Raise where this file cannot be written; nothing is created, and whether the disk has room shows only later."""
    if file.is_dir():
        raise InvalidInput(f"{flag} {str(file)!r} is a folder; name a file in it")
    if not file.absolute().parent.is_dir():
        raise InvalidInput(f"{flag} {str(file)!r}: there is no folder {str(file.parent)!r}; make it first")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise InvalidInput(f"{flag} {str(file)!r} may not be written; choose another file")


def check_folder(flag: str, folder: Path) -> None:
    """Raise where this folder can be neither written to nor made."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise InvalidInput(f"{flag} {str(folder)!r}: {str(there)!r} is a file; choose another folder")
    if not os.access(there, os.W_OK):
        raise InvalidInput(f"{flag} {str(folder)!r}: {str(there)!r} may not be written; choose another folder")


def write_file(flag: str, file: Path, text: str) -> None:
    """Write a result; where that fails, say which flag named the file."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot write {str(file)!r}: {error.strerror}; choose another {flag}") from None


def check_json(file: Path | None) -> Path | None:
    """The same for --json, when the command line is read."""
    if file is not None and file != STDOUT:
        check_file("--json", file)
    return file


def write_document(file: Path | None, document: object, *, escape: bool = True) -> bool:
    """Write a result where --json says, if it was given; True = to standard output, which then holds nothing else."""
    if file is not None:
        line = json.dumps(document, ensure_ascii=escape)
        if file == STDOUT:
            print(line)
        else:
            write_file("--json", file, line + "\n")
    return file == STDOUT


@contextmanager
def interruption(folder: str | Path) -> Iterator[None]:
    """Say where Ctrl-C leaves what was done, for commands that resume from a folder."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes from what is in {folder}", file=sys.stderr)
        raise


DEFAULT_MODEL = "smollm2"
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="File for a trace of every round, for ui.perfetto.dev or chrome://tracing."),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", callback=check_json, help="Write the result as JSON there; - is standard output."
    ),
]

PANELS: Mapping[str, type] = {"Sampling": SamplingParams, "Speculation": SpeculativeConfig, "Machine": EngineConfig}
HELP: Mapping[str, str] = {
    "model": "A known name (`forerun models`), a .gguf file, a Hugging Face folder, or a hub id.",
    "max_tokens": "Tokens to write at most.",
    "temperature": "0 is greedy; higher is more varied.",
    "top_p": "Sample from the likeliest tokens that hold this share of the law; 1 is off.",
    "top_k": "Sample from this many of the likeliest tokens; 0 is off.",
    "min_p": "Drop tokens less likely than this share of the likeliest one; 0 is off.",
    "repetition_penalty": "Above 1: tokens already in prompt or output become less likely.",
    "presence_penalty": "Subtracted from the logit of every token already written.",
    "frequency_penalty": "Subtracted from the logit of a token for each time it was written.",
    "stop": "End before this text; may be given several times.",
    "ignore_eos": "Continue past the end token, up to --max-tokens.",
    "seed": "Makes the text a function of the seed alone, whatever the drafter.",
    "drafter": "How to draft; `forerun drafters` lists them, a+b composes two, none is plain decoding.",
    "draft_model": "A smaller model of the same vocabulary, or the folder of a trained head, to draft with.",
    "budget": "Draft exactly this many tokens a round; 0 drafts nothing.",
    "width": "Children per node of a drafted tree at most; 1 is a chain.",
    "verifier": f"auto, {', '.join(registry.verifiers.paths)}; auto is coupled with a seed and on a GPU, else exact.",
    "corpus": "A file of `forerun corpus build` that the drafter suffix searches.",
    "shared": "Let suffix, recycling and lookahead learn from earlier requests.",
    "history": "Keep the outputs that suffix searches in this file; needs --shared.",
    "draft_layers": "Layers that layer_skip runs: a file of `forerun layers search`, or a number of first layers.",
    "draft_context": "Tokens of a long context that sparse_kv drafts over.",
    "draft_dtype": "Number format of a head's or draft model's weights; int8, fp8 and w4 need a GPU.",
    "dtype": "Number format of weights and activations.",
    "quantization": "The same as --dtype, by vLLM's name.",
    "kv_dtype": "Number format of the KV cache: int8, or fp8 (GPU only), takes a quarter to a half of the memory.",
    "device": "auto, cpu, cuda or one of several: cuda:1.",
    "threads": "CPU threads.",
    "max_length": "Prompt and output together, in tokens.",
    "tensor_parallel_size": "Processes that the model is split over, one per GPU.",
}
# settings whose flag may be called otherwise: as vLLM calls it, or because it is a limit there
_CALLED = {"max_batch": "--max-num-seqs", "budget": "--max-budget", "suite": "--prompts"}
_SETTING = re.compile(r"(?<![\w.-])([a-z][a-z_]*)=('[^']*'|[^\s;:,)'\"]*[^\s;:,)'\".])")
_DEFAULTS_IN_WORDS = {
    "budget": "what pays",
    "width": "what pays",
    "seed": "a fresh one",
    "threads": "one per core",
    "max_length": "the model's context",
}


@dataclass(frozen=True, slots=True)
class Settings:
    model: str
    sampling: SamplingParams
    speculative: SpeculativeConfig
    engine: EngineConfig

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Settings from flags by name; None and an empty list mean that the flag was not given."""
        values = {name: plain(value) for name, value in given.items() if value is not None and value != []}
        if "quantization" in values:
            values["dtype"] = one_format(values.get("dtype"), values["quantization"], get_args(Dtype))
        made = {
            panel: owner(**{f.name: values[f.name] for f in fields(owner) if f.name in values})
            for panel, owner in PANELS.items()
            if panel != "Speculation"
        }
        return cls(values.get("model", DEFAULT_MODEL), made["Sampling"], _speculative(values), made["Machine"])


def _speculative(values: Mapping[str, Any]) -> SpeculativeConfig:
    """A budget that was asked for is kept every round, whatever it costs; else the controller decides."""
    ours = {f.name: values[f.name] for f in fields(SpeculativeConfig) if f.name in values}
    if "budget" in ours:
        ours["controller"] = "fixed"
    name, colon, number = str(ours.get("drafter", "")).rpartition(":")
    if colon and number.isdigit():  # as `forerun bench` takes it
        raise InvalidInput(f"--drafter takes a name alone here; use --drafter {name} --budget {number}")
    config = SpeculativeConfig(**ours)
    if config.drafter != "auto":
        registry.drafters.spec(config.drafter).refuse_missing_model(config.draft_model)
    if config.verifier not in ("auto", *registry.verifiers.names()):
        registry.verifiers.get(config.verifier)  # raises, naming what there is, before a model is loaded
    return config


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every flag of `HELP`; they reach it as one Settings, its first parameter."""
    flags = [flag_of("--model", str, HELP["model"], DEFAULT_MODEL, "-m")]
    for panel, owner in PANELS.items():
        hints, known = get_type_hints(owner), {f.name: f for f in fields(owner)}
        for name in (name for name in HELP if name in known):
            default = _default_in_words(known[name])
            flags.append(flag_of(spelt(name), hints[name], HELP[name], default, panel=panel))
            if name == "dtype":
                flags.append(flag_of("--quantization", str, HELP["quantization"], None, panel=panel))
    return with_flags(command, flags, Settings.of)


def with_flags(
    command: Callable[..., None], flags: Sequence[inspect.Parameter], made: Callable[[dict[str, Any]], Any]
) -> Callable[..., None]:
    """Give a command more flags; what is made of their values, by name, is its first parameter."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @wraps(command)
    def run(*others: Any, **values: Any) -> None:  # what flags of another class have become
        command(made({flag.name: values.pop(flag.name) for flag in flags}), *others, **values)

    run.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [*own, *flags]}
    return run


def with_fields(owner: type[Any], helps: Mapping[str, str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command flags for fields of a class, with their types and defaults; they reach it as one mapping."""
    hints, known = get_type_hints(owner), {field.name: field for field in fields(owner)}
    flags = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=known[name].default,
            annotation=Annotated[hints[name], typer.Option(_CALLED.get(name, spelt(name)), help=words)],
        )
        for name, words in helps.items()
    ]  # fmt: skip
    return lambda command: with_flags(command, flags, dict)


def spelt(name: str) -> str:
    return "--" + name.replace("_", "-")


def flag_of(
    flag: str, hint: Any, words: str, default: str | None, *more: str, panel: str | None = None, needed: bool = False
) -> inspect.Parameter:
    """A flag as a command's parameter; None where it is not given."""
    words = words if default is None else f"{words.removesuffix('.')}; default: {default}."
    said = {"help": words, "show_default": False, "rich_help_panel": panel}
    option = typer.Option(... if needed else None, flag, *more, **said)  # type: ignore[arg-type]
    name = flag.partition("/")[0].removeprefix("--").replace("-", "_")
    kind = _flag_type(name, hint) if needed else _flag_type(name, hint) | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def _flag_type(name: str, hint: Any) -> Any:
    """The type a flag is parsed as: a choice for a Literal, a repeated flag for a sequence."""
    if get_origin(hint) in (types.UnionType, Union):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return Enum(name, {choice: choice for choice in get_args(hint)}, type=str)
    if get_origin(hint) is not None and issubclass(get_origin(hint), Sequence):
        return list[get_args(hint)[0]]  # type: ignore[misc]
    return hint


def _default_in_words(field: Field[Any]) -> str | None:
    """The default as help shows it; None where it shows none."""
    if field.name in _DEFAULTS_IN_WORDS:
        return _DEFAULTS_IN_WORDS[field.name]
    value = None if field.default is MISSING else field.default
    if isinstance(value, bool) or value is None or value == ():
        return None
    return f"{value:g}" if isinstance(value, float) else str(value)


def plain(value: Any) -> Any:
    """A choice by its name."""
    return value.value if isinstance(value, Enum) else value


def in_flags(message: str, command: Any) -> str:
    """The message, with the flags of `command` in place of the settings that they set."""
    return _with_flags(message, set(_flags(command)))


def in_chat(message: str) -> str:
    """The message in the words of a chat: its own commands, and flags for the next start."""
    said = _with_flags(message, {spelt(name) for name in HELP})
    said = re.sub(r"--(drafter|system|temperature)\b", r"/\1", said)
    return re.sub(r"\b(?:add|give|pass|use) (?=--)", "start the chat with ", said)


def _with_flags(message: str, known: Collection[str]) -> str:
    def named(found: re.Match[str]) -> str:
        name, value = found[1], found[2].strip("'")
        flag = spelt(name)
        flag = flag if flag in known else _CALLED.get(name, f"{flag}s")  # one of several values
        if flag not in known:
            return found[0]
        return flag if value == "True" else f"{flag} {value}"

    return _SETTING.sub(named, message)


def _flags(command: Any) -> Iterator[str]:
    """The flags of a command, or of all commands of a group."""
    for parameter in command.params:
        yield from (option for option in parameter.opts if option.startswith("--"))
    if isinstance(command, TyperGroup):
        for part in command.commands.values():
            yield from _flags(part)
