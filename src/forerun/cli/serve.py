"""`forerun serve`: an OpenAI-compatible server around one model; `--replicas N` for several engines, by Ray Serve."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from forerun.cli.flags import DEFAULT_MODEL, HELP, TraceFile, with_fields
from forerun.core.checks import one_format
from forerun.core.errors import InvalidInput
from forerun.core.params import Dtype, EngineConfig
from forerun.heads import HeadVersions
from forerun.server.settings import LOG_FORMAT, ClusterSettings, Front, ServerSettings, read_keys

if TYPE_CHECKING:
    from forerun.server.backends.base import Backend


_SERVER = {  # fields of ServerSettings
    "host": "Address to listen on.",
    "port": "Port to listen on.",
    "max_queue": "Texts that may wait for admission; further requests get status 429.",
    "rate_limit": "Requests a minute per key or address.",
    "deadline": "Seconds that one request may take.",
    "drain_seconds": "Seconds that running texts have after SIGTERM.",
    "client_seconds": "Seconds for a client to send its request, and to go without reading its answer.",
    "hang_seconds": "Seconds without progress until requests end with an error.",
    "restart": "Start the engine again if it fails or hangs.",
    "log_prompts": "Write prompts and answers to the log.",
    "share_prefixes": "Let requests with different API keys share cached prompts.",
    "record": 'Folder where texts of requests with "record": true are saved, for training.',
    "heads": "Folder with versions of a head; the server loads what its link `current` points to.",
    "admin_key": "Key for the routes that change adapters, and for sleep.",
}
_ENGINE = {  # and of EngineConfig
    "max_length": "Prompt and answer together, in tokens.",
    "max_batch": "Largest batch, in sequences; default: by device, cores and KV memory.",
    "kv_slots": "Size of the KV cache in tokens.",
    "device": "auto, cpu or cuda.",
    "threads": "CPU threads.",
    "tensor_parallel_size": "Processes that the model is split over, one per GPU.",
}
Keys = Annotated[list[str] | None, typer.Option(help="A key that clients must send; repeatable.")]
Memory = Annotated[str | None, typer.Option(help="Memory of the KV cache: 8GB, or a share of the free memory: 50%.")]
FrontFlag = Annotated[
    Front, typer.Option(help="Run the engine in a process of its own, or on a thread of the HTTP server.")
]
Model = Annotated[str | None, typer.Argument(help="Name, GGUF file, folder or hub id.", show_default=DEFAULT_MODEL)]
Drafting = Annotated[str | None, typer.Option(help="Drafting settings as JSON, with our names or vLLM's.")]
Names = Annotated[list[str] | None, typer.Option(help="Names that clients may use for the model; the first is shown.")]
Lora = Annotated[
    list[str] | None,
    typer.Option(help="A LoRA adapter served beside the model: NAME=FOLDER[,head=FOLDER]; repeatable."),
]
LoraMemory = Annotated[str | None, typer.Option(help="Memory of adapters: 2GB, or a share of the free memory: 10%.")]
MaxReplicas = Annotated[
    int | None, typer.Option(help="Upper limit of autoscaling by queue and KV use; default: --replicas.")
]
PerReplica = Annotated[float | None, typer.Option(help="GPUs per replica; default: 1 on a GPU.")]
WriteConfig = Annotated[
    Path | None, typer.Option(help="Write a config file for `serve deploy` or KubeRay, and serve nothing.")
]


@with_fields(ServerSettings, _SERVER)
@with_fields(EngineConfig, _ENGINE)
def serve(
    engine: Mapping[str, Any],
    server: Mapping[str, Any],
    model: Model = None,
    named: Annotated[str | None, typer.Option("--model", "-m", help="The model; the same as the argument.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter of requests that name none.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="A smaller model, or a head's folder.")] = None,
    speculative_config: Drafting = None,
    api_key: Keys = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with keys, one per line.")] = None,
    served_model_name: Names = None,
    kv_memory: Memory = None,
    kv_dtype: Annotated[str, typer.Option(help=HELP["kv_dtype"])] = "auto",
    dtype: Annotated[str, typer.Option(help="Number format.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help=HELP["quantization"])] = None,
    front: FrontFlag = "process",
    trace: TraceFile = None,
    lora: Lora = None,
    lora_memory: LoraMemory = None,
    replicas: Annotated[int, typer.Option(help="Engines behind one address, by Ray Serve; 1 needs no Ray.")] = 1,
    max_replicas: MaxReplicas = None,
    gpus_per_replica: PerReplica = None,
    write_config: WriteConfig = None,
) -> None:
    """Serve a model over HTTP with the OpenAI API."""
    model, keys = _one_of(model, named), (*(api_key or ()), *(read_keys(api_key_file) if api_key_file else ()))
    names = tuple(served_model_name or [model])
    settings = ServerSettings(names, api_keys=keys, adapters=_adapters(lora), **server)
    dtype = one_format(dtype, quantization, get_args(Dtype))
    engine = {**engine, "dtype": dtype, "kv_memory": kv_memory, "kv_dtype": kv_dtype, "adapter_memory": lora_memory,
              "adapters": dict(settings.adapters) or None}  # fmt: skip
    drafting = {"drafter": drafter, "draft_model": _head_of(settings.heads, draft_model),
                "speculative_config": _parse(speculative_config)}  # fmt: skip
    many = {"replicas": replicas, "max_replicas": max_replicas, "gpus": gpus_per_replica}
    if replicas == 1 and (max_replicas or 1) == 1 and write_config is None:
        _load_and_run({"model": model, "engine": engine, "drafting": drafting}, settings, front, trace)
    elif trace is not None:
        raise InvalidInput("--trace writes the rounds of one engine; leave it out with several replicas")
    else:
        serve_replicas(model, settings, {**engine, **drafting}, many, api_key_file, write_config)


def _adapters(given: Sequence[str] | None) -> dict[str, str]:
    """Folders of adapters by name, from NAME=FOLDER."""
    found: dict[str, str] = {}
    for each in given or ():
        name, equals, folder = each.partition("=")
        if not (name and equals and folder):
            raise InvalidInput(f"--lora {each!r} is not NAME=FOLDER; write --lora support=adapters/support")
        if name in found:
            raise InvalidInput(f"--lora names {name!r} twice; choose another name for one of them")
        found[name] = folder
    return found


def _one_of(model: str | None, named: str | None) -> str:
    if model is not None and named is not None:
        raise InvalidInput(f"two models were given, {model!r} and --model {named}; give one of them")
    return named or model or DEFAULT_MODEL


def _load_and_run(given: dict[str, Any], settings: ServerSettings, front: Front, trace: Path | None) -> None:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    from forerun.server.backends.start import LOAD_LLM, Loader
    from forerun.server.run import address_of, bind
    from forerun.server.run import serve as run

    listener = bind(settings)

    def announce(backend: Backend) -> None:
        how = f"drafter: {backend.drafter}, up to {backend.max_batch} texts written together"
        where = f"{address_of(listener)} (API below /v1, {how})"
        typer.echo(f"serving {settings.model_names[0]} at {where}; Ctrl-C ends it", err=True)

    heads = None if settings.heads is None else str(settings.heads)
    loader = Loader(LOAD_LLM, {**given, "heads": heads})
    run(loader, settings, listener, announce, front=front, trace=trace)


def _head_of(heads: Path | None, draft_model: str | None) -> str | None:
    """What to draft with: the version that a folder of heads is at, if one was given."""
    if heads is None:
        return draft_model
    if draft_model is not None:
        raise InvalidInput("--heads and --draft-model both name a head; give one of them")
    return str(HeadVersions(heads).must_have_current())


def _parse(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidInput(f"--speculative-config must be a JSON object, not {text[:80]!r}")
    return values


def serve_replicas(
    model: str,
    server: ServerSettings,
    load: Mapping[str, Any],
    many: Mapping[str, Any],
    key_file: Path | None,
    config: Path | None,
) -> None:
    """Write the config file that was asked for, or serve until a signal comes."""
    settings = cluster_settings(model, server, load, many)
    from forerun.server.cluster import run

    if config is not None:
        if server.api_keys and key_file is None:
            raise InvalidInput("keys do not belong into a config file; give --api-key-file instead of --api-key")
        run.write_config(replace(settings, api_key_file=None if key_file is None else str(key_file)), config)
        typer.echo(f"wrote {config}; start it with `serve deploy {config}`")
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        if server.api_keys:  # the front reads them from a file that only this user can read
            keys = Path(folder) / "keys"
            keys.touch(mode=0o600)
            keys.write_text("\n".join(server.api_keys), encoding="utf-8")
            settings = replace(settings, api_key_file=str(keys))
        run.serve_replicas(settings, lambda url: typer.echo(_said(settings, url), err=True))


def cluster_settings(
    model: str, server: ServerSettings, load: Mapping[str, Any], many: Mapping[str, Any]
) -> ClusterSettings:
    """The settings of the cluster that the flags ask for; what is at its default is left out."""
    own = {name: value for name, value in load.items() if value is not None and value != "auto"}
    on_gpu = _on_gpu(str(load.get("device") or "auto"))
    replicas, most = int(many["replicas"]), many["max_replicas"]
    if not on_gpu and "threads" not in own:  # they share this machine's cores
        own["threads"] = max(1, (os.cpu_count() or 1) // max(replicas, most or 1))
    drafter = own.pop("drafter", None)
    given = {name: list(value) if name == "model_names" else value for name, value in asdict(server).items()}
    plain = asdict(ServerSettings(("-",)))
    kept = {name: value for name, value in given.items() if "key" not in name and value != plain[name]}
    gpus = many["gpus"]
    return ClusterSettings(
        model, replicas, most, drafter, own, kept, gpus=float(on_gpu) if gpus is None else float(gpus)
    )


def _on_gpu(device: str) -> bool:
    if device != "auto":
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()


def _said(settings: ClusterSettings, url: str) -> str:
    most = "" if settings.most == settings.replicas else f" to {settings.most}"
    return (
        f"serving {settings.server_settings().model_names[0]} at {url} (API below /v1, "
        f"{settings.replicas}{most} replicas); Ctrl-C ends it"
    )
