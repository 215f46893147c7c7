"""Builds an engine from a checkpoint, a target, drafters, verifiers and a controller (the composition root).

Nothing below this file knows which classes exist, and nothing above it puts them together.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from os.path import expanduser
from pathlib import Path
from typing import Any, cast

import torch

from forerun.build.auto_drafter import settle
from forerun.build.fingerprint import find_head, other_target
from forerun.control.base import Controller, ControllerClass, ControlParts
from forerun.control.cost import CostModel
from forerun.core import registry
from forerun.core.checks import as_memory
from forerun.core.errors import ForerunError, InvalidInput, UnknownName, UnsupportedModel, VocabularyMismatch
from forerun.core.params import EngineConfig, KvDtype, SpeculativeConfig
from forerun.core.registry import DrafterSpec
from forerun.drafters.base import CompositeClass, Drafter, DrafterClass, Parts
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.model.translated import Spelling, TokenMap
from forerun.engine.engine import Engine
from forerun.engine.routing import BESIDE, DrafterPool
from forerun.engine.sequence import Decodes
from forerun.heads import carries_mtp, must_be_folder, open_head, with_head
from forerun.models.adapters import AdapterPool, own_head
from forerun.models.base import Target
from forerun.models.config import DecoderConfig
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.load.tokenizer import opening_of
from forerun.models.slots import GPU_SHARE, KV_DTYPES, allowed_bytes, reason_against, slot_bytes, usual_batch
from forerun.verify.decide import VerifierPool
from forerun.verify.grammar.compiled import Grammars

log = logging.getLogger(__name__)
_DERIVE = "derive it from forerun.drafters.base.BaseDrafter"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_engine(
    target: Target,
    stop_ids: frozenset[int],
    speculative: SpeculativeConfig | None = None,
    config: EngineConfig | None = None,
    tokenizer: Decodes | None = None,
    draft_target: Target | None = None,
    cost_file: Path | None = None,
    more_drafts: tuple[Target, ...] = (),
    costs: Callable[[], CostModel] | None = None,
    loaded_from: str = "",
) -> Engine:
    """An engine around a target that is already in memory; `costs` are measured by the first who asks."""
    speculative, config = speculative or SpeculativeConfig(), config or EngineConfig()
    head: Drafter | None = None
    if (max_batch := config.max_batch) is None:
        max_batch, why = default_batch(target)
        log.info("at most %d sequences in a batch (max_batch): %s", max_batch, why)
    adapters = make_adapters(target, config, loaded_from)  # first: passes with them are captured beside the others
    costs = costs or cache(partial(CostModel.measure_or_load, target, cost_file))
    parts = Parts(target, draft_target, speculative, max_batch, config.max_length, more_drafts)
    parts = replace(parts, opening=opening_of(target, tokenizer), cost_file=cost_file)
    if speculative.drafter == "auto":
        choice = settle(parts, costs, partial(build_named, parts))
        log.info("auto: %s: %s", choice.drafter, choice.why)
        speculative, head = replace(speculative, drafter=choice.drafter), choice.head

    def make_drafter(name: str, head: str | None = None) -> Drafter:
        kind, at, adapter = name.partition("@")
        if (spec := registry.drafters.spec(kind)).name != kind:  # an old name is the same drafter, not a second one
            return drafters.get(spec.name + at + adapter)
        if spec.name.startswith(BESIDE):
            first, second = (member.name for member in spec.members)  # of other requests too
            return HybridDrafter.compose(drafters.get(first), drafters.get(second + at + adapter))
        return build_drafter(spec, replace(parts, speculative=with_head(speculative, spec.name, head)))

    def sibling(drafter: str) -> Engine:
        own, size = replace(speculative, drafter=drafter), replace(config, max_batch=max_batch)
        return make_engine(target, stop_ids, own, size, tokenizer, draft_target, cost_file, more_drafts, costs)

    drafters = DrafterPool(make_drafter, target.vocab_size, runs_head, target.can.captures)
    if head is not None:
        drafters.add(speculative.drafter, head)
    for adapter, folder in config.adapters.items():
        add_own_head(drafters, adapter, folder)
    return Engine(
        target,
        drafters,
        VerifierPool(lambda name: registry.verifiers.get(name)()),
        make_controller(target, drafters, speculative, cache(lambda: deepcopy(costs()))),  # its rounds correct them
        Grammars(tokenizer, target.vocab_size, stop_ids),
        default_drafter=registry.drafters.spec(speculative.drafter).name,
        default_verifier=speculative.verifier,
        stop_ids=stop_ids,
        tokenizer=tokenizer,
        max_batch=max_batch,
        max_length=config.max_length,
        adapters=adapters,
        sibling=sibling,
    )


def make_adapters(target: Target, config: EngineConfig, loaded_from: str = "") -> AdapterPool:
    """The adapters that are served beside this target from the start."""
    share = as_memory("adapter_memory", config.adapter_memory)
    pool = AdapterPool(target, None if share is None else allowed_bytes(share, target.device), loaded_from)
    for name, folder in config.adapters.items():
        pool.add(name, folder)
    return pool


def add_own_head(drafters: DrafterPool, adapter: str, given: str) -> None:
    """The head that an adapter brings, if it does; one that does not fit the target is refused."""
    folder = own_head(given)[1]
    if folder is None:
        return
    head = open_head(Path(expanduser(folder)))
    if head is None:
        raise InvalidInput(
            f"{folder!r} of the adapter {adapter!r} holds no trained head, nor a LoRA whose base_model_name_or_path is "
            "the folder of one; train one with `forerun train`"
        )
    drafters.add_own(adapter, head.drafter, str(head.path))


def default_batch(target: Target) -> tuple[int, str]:
    """How many sequences an engine decodes together where nobody says, and why."""
    return usual_batch(target.device.type, target.slots, torch.get_num_threads())


def build_named(parts: Parts, name: str) -> Drafter:
    """A drafter that is built to be weighed, before an engine is made."""
    return build_drafter(registry.drafters.spec(name), parts)


def build_drafter(spec: DrafterSpec, parts: Parts) -> Drafter:
    """The drafter of this specification; a composition is built from its members."""
    cls = registry.load(spec.where)
    if spec.members:
        assert isinstance(cls, CompositeClass), f"{spec.where} has no compose(first, second)"
        first, second = spec.members
        parts = replace(parts, by_host=parts.by_host or ">" in spec.name)
        later = _without_drafts(parts, first.checkpoints) if spec.checkpoints > 1 else parts
        return cls.compose(build_drafter(first, parts), build_drafter(second, later))
    if not isinstance(cls, DrafterClass):
        raise InvalidInput(f"{spec.where} has no classmethod build(parts): {_DERIVE}")
    drafter = cls.build(parts)
    if not isinstance(drafter, Drafter):
        raise InvalidInput(f"{spec.where} lacks one of needs, offer, propose, observe and forget: {_DERIVE}")
    return drafter


def _without_drafts(parts: Parts, used: int) -> Parts:
    """The parts that are left when the first draft models have their place in a cascade."""
    left = [*([] if parts.draft is None else [parts.draft]), *parts.more_drafts][used:]
    return replace(parts, draft=left[0] if left else None, more_drafts=tuple(left[1:]))


def check_names(speculative: SpeculativeConfig) -> None:
    """Unknown names, a second model or head that is missing, and a head that the drafter cannot run.

    They are the caller's error before anything is loaded.
    """
    if speculative.drafter != "auto":
        spec, given = registry.drafters.spec(speculative.drafter), speculative.draft_model
        spec.refuse_missing_model(given)
        head = open_head(Path(given).expanduser()) if given is not None and spec.needs != "nothing" else None
        if head is not None and not head.serves(spec.name):
            runs = "a second model" if spec.needs == "checkpoint" else f"heads of the kind {spec.formats[0]}"
            raise InvalidInput(
                f"drafter={speculative.drafter!r} runs {runs}, and draft_model={given} is a head of the kind "
                f"{head.kind}; leave the drafter out, or give drafter={head.drafter!r}"
            )
        if head is None and given is not None and spec.needs == "head":
            _must_hold_head(Path(given).expanduser(), spec)
    registry.controllers.get(speculative.controller)
    if speculative.verifier != "auto":
        registry.verifiers.get(speculative.verifier)


def _must_hold_head(folder: Path, spec: DrafterSpec) -> None:
    """Raise where a folder cannot hold a head for this drafter: it is missing, or has no config.json."""
    from forerun.drafters.heads.formats import read_config

    must_be_folder(folder)
    if any(map(_is_ours, spec.formats)):
        read_config(folder)


def _is_ours(kind: str) -> bool:
    """Is a head of this kind described as our own drafters describe theirs?"""
    return any(spec.where.startswith("forerun.") for spec in registry.drafters.running(kind))


def make_controller(
    target: Target, drafters: DrafterPool, speculative: SpeculativeConfig, measure: Callable[[], CostModel]
) -> Controller:
    """The controller of that name; without a drafter, the fixed one in place of the adaptive one."""
    name = speculative.controller
    cls = registry.controllers.get("fixed" if speculative.drafter == "none" and name == "adaptive" else name)
    if not isinstance(cls, ControllerClass):
        raise InvalidInput(f"controller {name!r} has no classmethod build(parts); see forerun.control.base")
    limits, follows = (speculative.budget, speculative.width), target.can.overlap > 1
    return cls.build(ControlParts(drafters.offer, measure, *limits, drafters.looks_up, follows))


def choose_drafter(speculative: SpeculativeConfig, checkpoint: Checkpoint, device: str = "auto") -> SpeculativeConfig:
    """The same with its drafter chosen: by what draft_model is, else by the heads that come with the package.

    A head that comes with the package is the default on a GPU, with n-gram beside it. Else it stays `auto`, and
    `make_engine` decides by what passes cost there (forerun.build.auto_drafter). Requests may ask for a head anyhow.
    """
    drafter, given = speculative.drafter, speculative.draft_model
    if given is not None:
        head = open_head(Path(given).expanduser())
        if head is not None and (wrong := other_target(head, checkpoint)) is not None:
            log.warning("%s", wrong)
        if drafter != "auto":
            return speculative
        return replace(speculative, drafter="draft_model" if head is None else head.drafter)
    if not drafts_with_checkpoint(drafter):
        wanted = drafter if drafter != "auto" and needs_head(drafter) else "auto"
        bundled = find_head(checkpoint, wanted)
        if bundled is not None:
            log.log(logging.INFO if bundled.likeness == "same" else logging.WARNING, "%s", bundled)
            default = "auto" if _device(device).startswith("cpu") else bundled.head.drafter
            chosen = default if drafter == "auto" else drafter
            return replace(speculative, drafter=chosen, draft_model=str(bundled.head.path))
        if drafter == "mtp" and carries_mtp(checkpoint.weights):
            return replace(speculative, draft_model=str(checkpoint.path))
    return speculative


def refuse_missing_head(speculative: SpeculativeConfig, checkpoint: Checkpoint) -> None:
    """A drafter that runs a head, where none was given or found, is the caller's error before weights are loaded."""
    drafter = speculative.drafter
    if speculative.draft_model is None and drafter != "auto" and needs_head(drafter):
        raise InvalidInput(
            f"drafter={drafter!r} needs a head, and none comes with the package for {checkpoint.name}; "
            "train one with `forerun train`, give its folder as draft_model=FOLDER, or use drafter='ngram'"
        )


def refuse_unfit_head(speculative: SpeculativeConfig, checkpoint: Checkpoint) -> None:
    """A head of another width or vocabulary is the caller's error before weights are loaded: the configs tell."""
    drafter, given = speculative.drafter, speculative.draft_model
    if given is None or not (drafter == "auto" or needs_head(drafter)):
        return
    head = open_head(Path(given).expanduser())
    if head is None or not _is_ours(head.kind):
        return
    width, vocab_size = _sizes_in(checkpoint.config)
    known, exactly, wrong = head.vocab_size, registry.drafters.running(head.kind)[0].reads_source, ""
    kind: type[InvalidInput] = InvalidInput
    if isinstance(head.width, int) and width not in (None, head.width):
        wrong = f"is {head.width} wide and {checkpoint.name} {width}"
    elif isinstance(known, int) and vocab_size is not None and (known != vocab_size if exactly else known > vocab_size):
        wrong, kind = f"knows {known} tokens and {checkpoint.name} {vocab_size}", VocabularyMismatch
    if wrong:
        raise kind(
            f"the head {head.path.name} {wrong}: it was trained for {head.target or 'another model'}; "
            "train one with `forerun train`, give its folder as draft_model=FOLDER, or use drafter='ngram'"
        )


def _sizes_in(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Width and vocabulary of a model, as far as its config says them."""
    from forerun.models.config import DecoderConfig, has_states, supports
    from forerun.models.encoder_decoder.config import supports as is_encoder_decoder

    if is_encoder_decoder(config):
        return None, config.get("vocab_size")
    if supports(config) or has_states(config):
        family = DecoderConfig.from_hf(config)
        return family.width, family.vocab_size
    nested = config.get("text_config")
    width = (nested if isinstance(nested, Mapping) else config).get("hidden_size")
    return (width if isinstance(width, int) else None), None  # transformers may run more ids than its config counts


def refuse_draft_dtype(speculative: SpeculativeConfig, device: str, models: Sequence[str]) -> None:
    """Formats that nothing on this device reads are refused before weights are loaded; `models`: to draft with."""
    dtype = speculative.draft_dtype
    held = dtype == "auto" or (dtype == "bfloat16" and models)
    if not held and not _device(device).startswith("cuda"):
        raise InvalidInput(f"draft_dtype={dtype!r} needs a CUDA device; on a CPU only draft models take one, bfloat16")


def needs_head(drafter: str) -> bool:
    return registry.drafters.spec(drafter).needs == "head"


def runs_head(drafter: str) -> bool:
    """The same of a name in a pool, which may be one that no registry knows, or another name of a drafter."""
    with suppress(UnknownName):
        return registry.drafters.spec(drafter).name == drafter and needs_head(drafter)
    return False


def drafts_with_checkpoint(drafter: str) -> bool:
    """Does this drafter run a second model? Others take `draft_model` for a head, or leave it to single requests."""
    return drafter != "auto" and registry.drafters.spec(drafter).needs == "checkpoint"


def load_target(checkpoint: Checkpoint, config: EngineConfig) -> Target:
    """Our own decoder where it knows the family, else transformers behind the same protocol."""
    from forerun.models.config import DecoderConfig, has_states, supports
    from forerun.models.encoder_decoder.config import supports as is_encoder_decoder
    from forerun.models.encoder_decoder.target import load_encoder_decoder

    device = torch.device(_device(config.device))
    _refuse_kv_dtype(checkpoint, config, device)
    if config.tensor_parallel_size > 1:
        from forerun.models.parallel.launch import load_parallel

        return load_parallel(checkpoint, config, device)
    if is_encoder_decoder(checkpoint.config):
        return load_encoder_decoder(checkpoint, config.dtype, _dtype, device, config.kv_slots)
    if supports(checkpoint.config) or has_states(checkpoint.config):
        from forerun.models.hybrid.target import torch_decoder
        from forerun.models.load.shapes import check_shapes
        from forerun.models.native.target import native_decoder

        family, share = DecoderConfig.from_hf(checkpoint.config), as_memory("kv_memory", config.kv_memory)
        memory = allowed_bytes(share, device)
        check_shapes(family, checkpoint.weights)
        if (held := held_as(checkpoint, family, config.dtype, device)) is not None:
            log.info("%s: %s", checkpoint.name, held)
        if device.type == "cpu":
            native = native_decoder(family, checkpoint.weights, config.dtype, config.kv_slots, memory, config.kv_dtype)
            if native is not None:
                return native
        packed = keeps_packed(checkpoint, family, config.dtype, device)
        dtype = torch.bfloat16 if packed else _dtype(config.dtype, device)
        if device.type == "cuda" and dtype != torch.float32:
            from forerun.models.cuda.hybrid import cuda_decoder
            from forerun.models.cuda.weights import WeightKind
            from forerun.verify.greedy import device_walk
            from forerun.verify.sampled import SampledTokens

            kind: WeightKind = "file" if packed else "plain"
            if config.dtype in ("int8", "fp8", "w4"):
                kind = config.dtype
            try:
                return cuda_decoder(family)(
                    family, checkpoint.weights, dtype=dtype, device=device, kv_slots=config.kv_slots,
                    kv_memory=share, kv_dtype=KV_DTYPES.get(config.kv_dtype), weight_kind=kind,
                    greedy_walk=device_walk(device), sampling=SampledTokens(),
                )  # fmt: skip
            except UnsupportedModel as error:  # torch runs every part, and has no numbers of one byte
                if kind not in ("plain", "file") or config.kv_dtype != "auto":
                    raise
                log.info("%s: %s", checkpoint.name, error)
        made = torch_decoder(family)
        return made(family, checkpoint.weights, dtype=dtype, device=device, kv_slots=config.kv_slots, kv_memory=memory)
    from forerun.models.hf import HFTarget

    dtype = _dtype(config.dtype, device)
    if config.dtype in ("int8", "fp8", "w4"):
        raise InvalidInput(
            f"dtype={config.dtype!r} needs a decoder of our own families, and "
            f"{checkpoint.config.get('model_type')!r} is none; use bfloat16"
        )
    return HFTarget.load(str(checkpoint.path), dtype=dtype, device=device, kv_slots=config.kv_slots)


def _refuse_kv_dtype(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> None:
    """A KV cache that the backend of this model does not have is refused before weights are read."""
    from forerun.models.config import DecoderConfig, supports

    reason, lacking = reason_against(config.kv_dtype, device), ""
    if reason is None and config.kv_dtype != "auto":
        if config.tensor_parallel_size > 1:
            lacking = f"tensor_parallel_size=1, and it is {config.tensor_parallel_size}"
        elif not supports(checkpoint.config):
            lacking = f"a decoder of our own families, and {checkpoint.config.get('model_type')!r} is none"
        elif device.type != "cpu":
            from forerun.models.cuda.network import reason_against as against_kernels

            if device.type != "cuda":
                lacking = f"a CPU or a CUDA device, and this is {device.type!r}"
            elif config.dtype != "gguf" and _dtype(config.dtype, device) == torch.float32:
                lacking = f"the GPU's kernels, and dtype={config.dtype!r} runs in torch"
            elif why_not := against_kernels(family := DecoderConfig.from_hf(checkpoint.config)):
                lacking = f"the GPU's kernels, and {why_not}"
            elif family.special is not None:
                lacking = f"ordinary attention on a GPU, and {family.family} has {family.special}"
        if lacking:
            reason = f"kv_dtype={config.kv_dtype!r} needs {lacking}; use kv_dtype='auto'"
    if reason is not None:
        raise InvalidInput(reason)


def held_as(checkpoint: Checkpoint, family: DecoderConfig, dtype: str, device: torch.device) -> str | None:
    """The format of a checkpoint's quantised weights and what they are held as in memory; None where they are plain."""
    from forerun.models.native.target import choose_mode

    quantization: object = checkpoint.weights.quantization
    if quantization is None and (kinds := checkpoint.weights.packed_kinds()):
        from forerun.models.load.quants import LAYOUTS

        quantization = f"GGUF ({', '.join(LAYOUTS[kind].name for kind in sorted(kinds))})"
    if quantization is None:
        return None
    held: str | None = choose_mode(family, checkpoint.weights, dtype) if device.type == "cpu" else None
    if held == "gguf" or keeps_packed(checkpoint, family, dtype, device):
        return f"{quantization}, kept packed"
    if held is None:
        held = dtype if dtype in ("int8", "fp8", "w4") else str(_dtype(dtype, device)).removeprefix("torch.")
    return f"{quantization}, dequantised to {held}"


_SIZES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "q8": 1.06, "int8": 1.0, "fp8": 1.0, "w4": 0.52}  # bytes


def memory_of(checkpoint: Checkpoint, config: EngineConfig) -> tuple[int, int | None, dict[str, int]]:
    """Bytes that a model will take here, known before its weights are read.

    Of its weights, about; what they leave to the KV cache (None = unknown); of a token's keys and values, by kv_dtype.
    """
    from forerun.models.config import supports
    from forerun.models.native.target import choose_mode, usual_kv_dtype

    if not supports(checkpoint.config):
        raise UnsupportedModel(f"{checkpoint.name} is of no decoder family of ours: loading it shows what it takes")
    device, family = torch.device(_device(config.device)), DecoderConfig.from_hf(checkpoint.config)
    _refuse_kv_dtype(checkpoint, config, device)
    mode = choose_mode(family, checkpoint.weights, config.dtype) if device.type == "cpu" else None
    packed = mode == "gguf" or keeps_packed(checkpoint, family, config.dtype, device)
    if mode is not None:
        usual = usual_kv_dtype(mode)
    else:
        usual = torch.bfloat16 if packed else _dtype(config.dtype, device)
    held = mode or (config.dtype if config.dtype in _SIZES else str(usual).removeprefix("torch."))
    weights = _file_bytes(checkpoint.path) if packed else int(_SIZES[held] * _numbers(checkpoint, family))
    kinds = {"auto": usual}
    for name, kind in KV_DTYPES.items():
        with suppress(ForerunError):
            _refuse_kv_dtype(checkpoint, replace(config, kv_dtype=cast(KvDtype, name)), device)
            kinds[name] = kind
    share = as_memory("kv_memory", config.kv_memory)
    room = allowed_bytes(share, device)
    if room is not None and device.type == "cuda" and not isinstance(share, int):  # a share of what weights leave
        room = max(0, room - int((share or GPU_SHARE) * weights))
    return weights, room, {name: slot_bytes(family, kind) for name, kind in kinds.items()}


def _numbers(checkpoint: Checkpoint, family: DecoderConfig) -> int:
    from forerun.models.load.shapes import expected_shapes

    return sum(math.prod(shape) for _, shape in expected_shapes(family, checkpoint.weights))


def _file_bytes(path: Path) -> int:
    files = path.glob("*.safetensors") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files)


def keeps_packed(checkpoint: Checkpoint, family: DecoderConfig, dtype: str, device: torch.device) -> bool:
    """Do the GPU's kernels read the weights of this checkpoint as it has them? Any other `dtype` converts.

    Quantised safetensors stay as they are with `auto`, GGUF files with `gguf`.
    """
    from forerun.models.load.quantized.layouts import QuantizedWeights
    from forerun.models.load.weights import GgufWeights

    kinds = {"auto": QuantizedWeights, "gguf": GgufWeights}
    if device.type != "cuda" or not isinstance(checkpoint.weights, kinds.get(dtype, ())):
        return False
    from forerun.models.cuda.file_weights import is_packed
    from forerun.models.cuda.network import check_supported
    from forerun.models.cuda.pool import has_compiled, pick_kernels

    try:
        check_supported(family)
    except UnsupportedModel:
        return False
    if isinstance(checkpoint.weights, GgufWeights) and not is_packed(checkpoint.weights):
        return False
    return has_compiled("file", family, device, pick_kernels("auto", device, torch.bfloat16))


def token_map(target: Checkpoint, draft: Checkpoint) -> TokenMap | None:
    """How the tokens of two models correspond; None where both give the same tokens the same ids."""
    ours, theirs = target.tokenizer(), draft.tokenizer()
    if share_ids(ours.vocabulary(), theirs.vocabulary()):
        return None
    first, second = (
        Spelling.of(one.vocabulary(), one.special_ids(), one.eos_ids, next(iter(one.encode("")), None))
        for one in (ours, theirs)
    )
    return TokenMap.between(first, second, ours.vocab_size, partial(ours.encode, add_special=False))


def share_ids(ours: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    """Do two vocabularies give the same tokens the same ids? Padding ids may differ."""
    if ours == theirs:
        return True
    alike = all(ours.get(token) == index for token, index in theirs.items())
    return alike and len(ours) - len(theirs) < 256  # a few more special ones on the target's side


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInput(f"device={name!r} is not available: torch sees no GPU; use device='cpu'")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InvalidInput(f"device={name!r} cannot be used here; use auto, cpu or cuda") from error
    return name


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name in ("int8", "fp8", "w4"):
        if device.type != "cuda":
            raise InvalidInput(f"dtype={name!r} needs a CUDA device; on a CPU use q8")
        return torch.bfloat16  # the rows' dtype: weights are read as one byte each, or as four bits
    if name == "gguf" and device.type == "cuda":
        needs = "a GGUF file with quantised weights, a dense model with widths in multiples of 128 and a Hopper GPU"
        raise InvalidInput(f"dtype='gguf' on a GPU needs {needs}; use bfloat16")
    if name in ("gguf", "q8"):
        raise InvalidInput(f"dtype={name!r} needs a CPU and one of our own families; use float32 or bfloat16")
    if name not in _DTYPES:
        raise InvalidInput(f"dtype={name!r} is unknown; use auto, {', '.join(_DTYPES)}, int8, fp8, w4, q8 or gguf")
    return _DTYPES[name]
