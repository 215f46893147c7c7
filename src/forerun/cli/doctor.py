"""`forerun doctor`: what this machine has, what is missing, and the command that gets it.

Exit code 0 when `forerun generate` would work as it stands, else 1.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.text import Text

from forerun import __version__
from forerun.cli.flags import DEFAULT_MODEL, HELP, JsonFile, write_document
from forerun.cli.models import in_units
from forerun.core import registry
from forerun.core.checks import as_name
from forerun.core.errors import InvalidInput
from forerun.core.params import KvDtype
from forerun.heads import heads_in_the_box
from forerun.measure.plan.advice import Memory
from forerun.models.load.catalog import cache_folder, known_models

MODEL = "model"  # the finding about the default one
LENGTHS = (2_000, 8_000, 32_000)  # tokens of sequences that are counted
# Distribution names: what each extra brings, and what is always needed. A test holds them to pyproject.toml.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "serve": ("fastapi", "uvicorn", "pydantic", "prometheus-client", "llguidance"),
    "train": ("accelerate",),
    "bench": ("matplotlib",),
    "llama": ("llama-cpp-python",),
    "ray": ("ray",),
}
NEEDED = ("transformers", "tokenizers", "safetensors", "huggingface_hub", "jinja2", "numpy")
# gguf: only for block types that our own reader does not know; prompt_toolkit: editing and history in a chat
HANDY = ("gguf", "prompt_toolkit")


@dataclass(frozen=True, slots=True)
class Finding:
    about: str
    found: str
    ok: bool = True
    needed: bool = True  # without it nothing can be generated
    fix: str | None = None  # the command that fixes it


def doctor(
    model: Annotated[str | None, typer.Option("--model", help="Also explain the memory of this checkpoint.")] = None,
    kv_dtype: Annotated[str, typer.Option(help=HELP["kv_dtype"])] = "auto",
    json_file: JsonFile = None,
) -> None:
    """Show what this machine has and what is missing; exit code 0 if generating would work."""
    with Console(stderr=True).status("looking at this machine"):  # the default model is loaded: seconds
        kept = as_name("--kv-dtype", kv_dtype, get_args(KvDtype))
        findings = [*examine(kept, model), *([] if model is None else [_weights(model), _room(model, kept)])]
    ready = all(finding.ok for finding in findings if finding.needed)
    document = {"ready": ready, "findings": [asdict(finding) for finding in findings]}
    if not write_document(json_file, document):
        _show(findings, ready)
    raise typer.Exit(0 if ready else 1)


def examine(kv_dtype: str = "auto", named: str | None = None) -> Iterator[Finding]:
    """All but what is said of a model that was named."""
    yield Finding("forerun", __version__)
    yield Finding("machine", f"{_cpu()}, {_cores()} cores, {in_units(_memory())} memory, {platform.platform()}")
    yield Finding("python", platform.python_version())
    yield from _torch()
    for library in NEEDED:
        yield _library(library, needed=True, fix=f"pip install {library}")
    for library in HANDY:
        yield _library(library, needed=False, fix=f"pip install {library}")
    model = _default_model()
    yield model
    yield from _drafters()
    if model.ok:
        yield from _defaults()
    yield _cache()
    yield _kv_cache()
    if model.ok and named is None:
        yield _room(DEFAULT_MODEL, kv_dtype)
    yield _compiler()
    yield _kernels()
    for extra, libraries in EXTRAS.items():
        for library in libraries:
            yield _library(library, needed=False, fix=f"pip install 'forerun[{extra}]'")


def _show(findings: list[Finding], ready: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)  # a path that wraps cannot be copied
    column = max(len(finding.about) for finding in findings)
    for finding in findings:
        mark, style = ("ok", "green") if finding.ok else ("no", "red") if finding.needed else ("--", "dim")
        fix = "" if finding.ok or finding.fix is None else f"; get it: {finding.fix}"
        console.print(Text(mark, style), Text(f" {finding.about:<{column}}  {finding.found}{fix}"), sep="")
    missing = [finding.about for finding in findings if finding.needed and not finding.ok]
    if ready:
        console.print("generating works")
    elif missing == [MODEL]:
        console.print("generating works with a model of your own (--model); the default one is not here", style="red")
    else:
        console.print("generating does not work yet: fix the lines marked no", style="red")


def _torch() -> Iterator[Finding]:
    """torch must not only be installed but load, which is where broken installations show."""
    try:
        torch = import_module("torch")
    except Exception as error:  # any error of a broken installation is the finding
        yield Finding("torch", f"does not load ({error})", ok=False, fix="pip install torch")
        return
    yield Finding("torch", torch.__version__)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Finding("devices", ", ".join(["cpu", *(f"cuda:{i} ({name})" for i, name in enumerate(gpus))]))
    yield Finding("threads", str(torch.get_num_threads()))
    if gpus:
        later = "a server writes plainly at first, and drafts join as they are captured: /health says what is left"
        yield Finding("GPU graphs", later, needed=False)


def _library(name: str, needed: bool, fix: str) -> Finding:
    try:
        return Finding(name, version(name), needed=needed)
    except PackageNotFoundError:
        return Finding(name, "missing", ok=False, needed=needed, fix=fix)


def _default_model() -> Finding:
    path = next((model.path for model in known_models() if model.name == DEFAULT_MODEL), None)
    if path is None:
        return Finding(
            MODEL, f"the default, {DEFAULT_MODEL}, is absent", ok=False, fix=f"forerun models pull {DEFAULT_MODEL}"
        )
    return Finding(MODEL, f"{DEFAULT_MODEL}, {path}")


def _drafters() -> Iterator[Finding]:
    boxed = heads_in_the_box()
    ready, wanting = [], dict[str, list[str]]()
    for spec in registry.drafters.specs():
        heads = ", ".join(head.path.name for head in boxed if head.kind in spec.formats)
        if spec.needs == "nothing" or heads:
            ready.append(f"{spec.name} (heads {heads})" if heads else spec.name)
        else:
            wanting.setdefault("a second model" if spec.needs == "checkpoint" else "a head", []).append(spec.name)
    yield Finding("drafters", ", ".join(ready), needed=False)
    for need, names in wanting.items():
        yield Finding("drafters", f"with {need} (--draft-model): {', '.join(names)}", needed=False)


def _defaults() -> Iterator[Finding]:
    """What `auto` drafts with here, which is decided by times that are measured now, and the size of a batch."""
    try:
        drafter, batch = import_module("forerun.build.load").explain_defaults(DEFAULT_MODEL)
    except Exception as error:  # a broken installation, or a model that does not load, is the finding
        yield Finding("auto", f"cannot be tried ({error})", ok=False, needed=False)
        return
    yield Finding("auto", f"{DEFAULT_MODEL} drafts with {drafter}", needed=False)
    yield Finding("batch", f"{DEFAULT_MODEL} writes {batch} (max_batch, --max-num-seqs)", needed=False)


def _weights(model: str) -> Finding:
    try:
        load = import_module("forerun.build.load")
        held, packed = load.explain_weights(model), load.bytes_packed(model)
    except Exception as error:  # a format that cannot be read, or no such model, is the finding
        return Finding("weights", f"{model}: {error}", ok=False, needed=False)
    if packed is not None:
        here, plain = (in_units(size) for size in packed)
        held += f"; a Hopper GPU would hold {here} of them with --dtype gguf, {plain} in bfloat16"
    return Finding("weights", held, needed=False)


def _cache() -> Finding:
    folder = cache_folder()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Finding("cache", f"{folder}, {in_units(size)}")


def _kv_cache() -> Finding:
    try:
        torch, budget = import_module("torch"), import_module("forerun.models.slots")
    except Exception as error:  # torch does not load
        return Finding("KV cache", f"cannot be tried ({error})", ok=False, needed=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    allowed = budget.allowed_bytes(None, device)
    most = "as much as it needs" if allowed is None else f"up to {in_units(allowed)} of what is free now"
    formats = [name for name in get_args(KvDtype) if budget.reason_against(name, device) is None]
    said = f"{most} (kv_memory), as {' or '.join(formats)} (kv_dtype); prompts that start alike are read once"
    return Finding("KV cache", said, needed=False)


def _room(model: str, kv_dtype: str) -> Finding:
    """How many tokens and sequences of this model the KV cache holds."""
    try:
        loading = import_module("forerun.build.load")
        weights, room, token_bytes = loading.memory_here(model, kv_dtype)
        longest = loading.longest_here(model)
    except Exception as error:  # what cannot be read, or has no such KV cache, is the finding
        return Finding("KV tokens", f"{model}: {error}", ok=False, needed=False)
    lengths = [length for length in LENGTHS if length <= longest] or [longest]
    told = Memory(weights, room, token_bytes, kv_dtype).told(lengths)
    return Finding("KV tokens", f"{model}: {'; '.join(told)}", needed=False)


def _compiler() -> Finding:
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        return Finding("C compiler", "missing", ok=False, needed=False, fix="your system's gcc or clang package")
    return Finding("C compiler", found, needed=False)


def _kernels() -> Finding:
    try:
        library = import_module("forerun.models.native.library")
    except ImportError as error:  # torch itself does not load
        return Finding("native kernels", f"cannot be tried ({error})", ok=False, needed=False)
    try:
        why = library.why_not()
    except InvalidInput as error:
        return Finding("native kernels", str(error), ok=False, fix="unset FORERUN_ISA")
    if why is not None:
        lost = f"absent ({why}): passes on the CPU run on torch, several times slower"
        built = "gcc or clang, then pip install --no-deps -e . in its repository"
        fix = "unset FORERUN_NATIVE" if why.startswith("FORERUN_NATIVE") else built
        return Finding("native kernels", lost, ok=False, needed=False, fix=fix)
    return Finding("native kernels", _why_these(library.isa(), library.paths()), needed=False)


def _why_these(isa: str, paths: Mapping[str, bool]) -> str:
    """Which path runs here and why not a better one."""
    forced = os.environ.get("FORERUN_ISA")
    here = [name for name, has in paths.items() if has]
    lacking = [name for name in list(paths)[: list(paths).index(isa)] if not paths[name]]
    if forced:
        return f"{isa} (FORERUN_ISA asks for it; the best here is {here[0]})"
    lesser = f"; FORERUN_ISA can force {', '.join(here[1:])}" if here[1:] else ""
    better = f"this machine lacks {', '.join(lacking)}" if lacking else "the best path there is"
    return f"{isa} ({better}{lesser})"


def _cpu() -> str:
    commands = (["lscpu"], ["sysctl", "machdep.cpu.brand_string"])  # Linux; macOS
    for command in [command for command in commands if shutil.which(command[0])]:
        answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        for line in answer.splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("Model name", "machdep.cpu.brand_string") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Cores this process may use, which in a container can be fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int | None:
    """Bytes of memory, or the container's limit where that is lower."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return min(whole, int(allowed)) if allowed.isdigit() else whole
