"""Undamaged files of every format, as small as can be."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path
from shutil import copytree
from typing import Any

import tokenizers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from forerun.train.data.corpus import Text, write_shard
from forerun.train.run import train
from tests.damaged.formats import FAMILIES, HEADS, train_options
from tests.drafters.tiny_heads import (
    block_config,
    block_weights,
    eagle_config,
    eagle_weights,
    heads_config,
    heads_weights,
    mtp_weights,
)
from tests.models.tiny_checkpoints import VOCAB, make_reference, save


def make_material(folder: Path) -> Path:
    """Everything that tests.damaged.formats names."""
    from forerun.drafters.heads.block_config import KINDS
    from forerun.drafters.heads.block_head import write_block
    from forerun.drafters.heads.eagle import write_mtp
    from forerun.drafters.heads.eagle_head import write_head
    from forerun.drafters.heads.medusa import write_heads
    from tests.models.tiny_gguf import write_tiny

    for family in ("llama", "qwen2_moe", "gemma3_text", "phi3"):
        (folder / f"gguf-{family}").mkdir(parents=True)
        write_tiny(folder / f"gguf-{family}" / "m.gguf", family, layers=1)
    for name in FAMILIES:
        _target(folder / f"family-{name}", name)
    plain = _target(folder / "folder", "smollm2")
    _shard(copytree(plain, folder / "shards"))
    for name in HEADS:
        copytree(plain, folder / name / "target")
        if name in ("medusa", "hydra"):
            heads = heads_config("medusa" if name == "medusa" else "hydra", VOCAB, width=32, blocks=1)
            write_heads(folder / name / "head", heads, heads_weights(heads, own=name == "medusa"))
        elif name in KINDS:
            block = block_config(next(kind for kind in KINDS if kind == name), VOCAB, width=32)
            write_block(folder / name / "head", block, block_weights(block))
        elif name == "mtp":
            layer = eagle_config("mtp", VOCAB, width=32)
            write_mtp(folder / name / "head", layer, mtp_weights(layer))
        else:
            kind: Any = name
            config = eagle_config(kind, VOCAB, width=32, draft_vocab=VOCAB - 2 if name == "eagle3" else None)
            write_head(folder / name / "head", config, eagle_weights(config))
    _run(folder / "run", plain)
    return folder


def _target(folder: Path, name: str) -> Path:
    save(make_reference(name), folder)
    letters = [chr(ord("a") + i % 26) * (1 + i // 26) for i in range(VOCAB - 3)]
    vocabulary = {token: i for i, token in enumerate(["<end>", "<start>", "Ġ", *letters])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "a"), ("b", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<start>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "bos_token": {"content": "<start>"}, "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0], "bos_token_id": 1}))
    return folder


def _shard(folder: Path) -> None:
    """The same weights in two files with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({name: weights[name] for name in weights if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _run(folder: Path, target: Path) -> None:
    """A training run after two of four steps."""
    copytree(target, folder / "target")
    texts = [Text([1 + (3 * i + j) % (VOCAB - 1) for j in range(12 + i % 9)], 3, 1.0, i) for i in range(40)]
    write_shard(folder / "texts" / "shard-00000.safetensors", texts)
    others = [Text([1 + (7 * i + j) % (VOCAB - 1) for j in range(20)], 5, 0.0, i) for i in range(3)]
    write_shard(folder / "others" / "shard-00000.safetensors", others)
    with chdir(folder):
        train(train_options(steps=2))
