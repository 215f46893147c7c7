"""Write a Table as an ordinary Llama checkpoint, with a draft model and an EAGLE-3 head of known acceptance.

Every number in the weights is exact in float16, and the norms divide by powers of two:

- An embedding has one lane for the token's symbol and three constant lanes; its root mean square is 1.
- Layer 0 has two heads whose rotary scores peak at one earlier position each (1 and 7 back): they copy the symbol found
  there into further lanes, and constants that bring the root mean square to 2. All other layers add nothing.
- The LM head holds the rows of the table.

The keys and values of layer 0 therefore matter: an engine that loses, moves or mixes up its cache writes another law.
The head's one layer attends to its own position, replaces the symbol it carries by that of the next token, and reads
the drafter's table. No torch is needed to write any of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.referee.tables import DEAD, FAR, Pair, Table

Weights = dict[str, NDArray[Any]]

WIDTH, HEADS, HEAD_DIM, INNER, LAYERS, CONTEXT = 256, 4, 64, 64, 8, 4096
THETA = 10000.0
AUX_LAYERS = (2, LAYERS // 2, LAYERS - 3)  # whose inputs an EAGLE-3 head reads by default
_PLACES = (0, 32, 64)  # first lanes of the symbol that is last, before the last, far
_CONSTANT, _ADDED = 96, 99  # lanes 96..98 of embeddings; lanes 99 and 100 that attention adds
_ONE = 8.0  # what a lane holds
_KEEN = 28.0  # of queries and keys: the second best position lies some hundred nats below
_END, _BEGIN, _JOINED = 256, 257, 258
VOCAB = 264
_SPECIAL = {_END: "<|end|>", _BEGIN: "<|begin|>"}


@dataclass(frozen=True)
class Made:
    """Where the parts of a made model lie."""

    target: Path
    draft: Path
    head: Path
    table: Path


def make_model(folder: Path, pair: Pair, dtype: str = "float32", gguf: bool = False) -> Made:
    """Write target/, draft/, eagle3/ and table.json; with `gguf` also target.gguf and draft.gguf."""
    made = Made(*(folder / name for name in ("target", "draft", "eagle3", "table.json")))
    for part, table, layers in ((made.target, pair.target, LAYERS), (made.draft, pair.draft, 1)):
        part.mkdir(parents=True, exist_ok=True)
        weights = target_weights(table, layers)
        _save(part / "model.safetensors", weights, dtype)
        _write_json(part / "config.json", _config(dtype, layers))
        _write_json(part / "generation_config.json", {"bos_token_id": _BEGIN, "eos_token_id": _END})
        _write_tokenizer(part)
        if gguf:
            write_gguf(folder / f"{part.name}.gguf", weights, layers)
    made.head.mkdir(exist_ok=True)
    _save(made.head / "model.safetensors", head_weights(pair.draft), dtype)
    _write_json(made.head / "config.json", _head_config(dtype))
    pair.save(made.table)
    return made


def token_ids(table: Table) -> list[int]:
    """The token id of each symbol."""
    letters = {byte: i for i, byte in enumerate(_byte_letters())}
    return [*(letters[ord(letter)] for letter in table.alphabet), _END]


def target_weights(table: Table, layers: int = LAYERS) -> Weights:
    symbol = np.full(VOCAB, table.other)
    symbol[token_ids(table)] = np.arange(table.size)
    embedding = np.zeros((VOCAB, WIDTH), np.float32)
    embedding[np.arange(VOCAB), _PLACES[0] + symbol] = _ONE
    embedding[:, _CONSTANT : _CONSTANT + 3] = _ONE
    weights: Weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(WIDTH, np.float32)}
    for layer in range(layers):
        weights |= _layer(f"model.layers.{layer}.", WIDTH)
    first = "model.layers.0.self_attn."
    for head, (back, lanes) in enumerate(zip((1, FAR), _PLACES[1:], strict=True)):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        weights[first + "q_proj.weight"][rows, _CONSTANT] = _turned(-back)
        weights[first + "k_proj.weight"][rows, _CONSTANT] = _turned(0)
        value, out = weights[first + "v_proj.weight"], weights[first + "o_proj.weight"]
        for s in range(table.size + 1):
            value[rows.start + s, _PLACES[0] + s] = 1.0
            out[lanes + s, rows.start + s] = 1.0
        value[rows.stop - 1, _CONSTANT] = 1.0
        out[_ADDED + head, rows.stop - 1] = (3.0, 1.0)[head]
    read = _ONE / 2  # of a lane behind the last norm
    lm_head = np.zeros((VOCAB, WIDTH), np.float32)
    lm_head[:, _CONSTANT] = DEAD / read
    ids = token_ids(table)
    lm_head[ids, _CONSTANT] = table.offset / read
    for place, lane in enumerate(_PLACES):
        lm_head[ids, lane : lane + table.size + 1] = table.rows[place].T / read
    weights["lm_head.weight"] = lm_head
    return weights


def head_weights(table: Table) -> Weights:
    """An EAGLE-3 head, by its authors' names, whose law is this table's, of the last token alone."""
    symbols, carried = (np.arange(table.size + 1), 2 * _ONE)  # what the carried lane holds: a root mean square of 1
    weights: Weights = {name.replace("layer.", "midlayer."): each for name, each in _layer("layer.", 2 * WIDTH).items()}
    weights["midlayer.hidden_norm.weight"] = np.ones(WIDTH, np.float32)
    weights["midlayer.input_layernorm.weight"] = np.ones(WIDTH, np.float32)
    weights["norm.weight"] = np.ones(WIDTH, np.float32)
    weights["fc.weight"] = np.zeros((WIDTH, len(AUX_LAYERS) * WIDTH), np.float32)
    weights["fc.weight"][symbols, symbols] = carried / _ONE
    attention = "midlayer.self_attn."
    for name in "qk":
        weights[f"{attention}{name}_proj.weight"][:HEAD_DIM, _CONSTANT] = _turned(0)
    weights[attention + "v_proj.weight"][symbols, symbols] = carried / _ONE
    weights[attention + "v_proj.weight"][symbols, WIDTH + symbols] = -1.0
    weights[attention + "o_proj.weight"][symbols, symbols] = 1.0
    lm_head = np.zeros((VOCAB, WIDTH), np.float32)
    lm_head[:, : table.size + 1] = DEAD / carried
    rows = (table.rows[0] + table.offset).T / carried  # [A, S]
    lm_head[token_ids(table), : table.size + 1] = rows
    weights["lm_head.weight"] = lm_head
    weights["d2t"] = np.zeros(VOCAB, np.int64)
    weights["t2d"] = np.ones(VOCAB, np.bool_)
    return weights


def _layer(prefix: str, width_in: int) -> Weights:
    """A layer that adds nothing; its attention reads rows of `width_in`."""
    inner = HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (inner, width_in),
        "self_attn.k_proj": (inner, width_in),
        "self_attn.v_proj": (inner, width_in),
        "self_attn.o_proj": (WIDTH, inner),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
    }
    weights: Weights = {f"{prefix}{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{prefix}{name}.weight"] = np.ones(WIDTH, np.float32)
    return weights


def _turned(steps: int) -> NDArray[np.float32]:
    """[Dh] weights on a constant lane: a vector that rotary embedding turns onto another one `steps` positions off."""
    angles = steps * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float32) * np.float32(_KEEN / _ONE)


def _config(dtype: str, layers: int = 1) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH,
        "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
        "rope_theta": THETA, "max_position_embeddings": CONTEXT, "hidden_act": "silu", "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": _BEGIN, "eos_token_id": _END,
        "torch_dtype": dtype,
    }  # fmt: skip


def _head_config(dtype: str) -> dict[str, Any]:
    same = {name: value for name, value in _config(dtype).items() if name != "architectures"}
    return {
        **same,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VOCAB,
        "target_hidden_size": WIDTH,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
    }


def _byte_letters() -> dict[int, str]:
    """How byte-level tokenizers spell each byte."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printed]
    return {b: chr(b) for b in printed} | {b: chr(256 + i) for i, b in enumerate(rest)}


def _vocabulary() -> dict[str, int]:
    letters = _byte_letters()
    words = {letter: i for i, letter in enumerate(letters.values())}
    words[letters[0] * 2] = _JOINED  # the one merge: some loaders refuse a tokenizer without any
    words |= {f"<|unused{i}|>": i for i in range(_JOINED + 1, VOCAB)}
    return words | {text: i for i, text in _SPECIAL.items()}


def _write_tokenizer(folder: Path) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = [
        {
            "id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True,
        }
        for i, text in _SPECIAL.items()
    ]  # fmt: skip
    zero = _byte_letters()[0]
    bpe = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": _vocabulary(), "merges": [[zero, zero]],
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": bpe,
    }  # fmt: skip
    _write_json(folder / "tokenizer.json", tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _SPECIAL[_BEGIN], "eos_token": _SPECIAL[_END],
        "pad_token": _SPECIAL[_END], "add_bos_token": False, "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }  # fmt: skip
    _write_json(folder / "tokenizer_config.json", settings)


def write_gguf(file: Path, weights: Mapping[str, NDArray[np.float32]], layers: int = LAYERS) -> None:
    """The same model as a GGUF file in float32, for llama.cpp."""
    import gguf

    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCAB)
    words = sorted(_vocabulary().items(), key=lambda pair: pair[1])
    special = {*_SPECIAL, *range(_JOINED + 1, VOCAB)}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([word for word, _ in words])
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for _, i in words]
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{_byte_letters()[0]} {_byte_letters()[0]}"])
    writer.add_bos_token_id(_BEGIN)
    writer.add_eos_token_id(_END)
    writer.add_add_bos_token(False)
    for name, values in weights.items():
        writer.add_tensor(
            _gguf_name(name), _paired(values) if name.endswith(("q_proj.weight", "k_proj.weight")) else values
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_GGUF = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{_GGUF[part]}.weight"
    return f"{_GGUF[stem]}.weight"


def _paired(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """GGUF files of Llama rotate neighbouring rows, checkpoints rows half a head apart."""
    halves = rows.reshape(HEADS, 2, HEAD_DIM // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _save(file: Path, weights: Mapping[str, NDArray[Any]], dtype: str) -> None:
    from safetensors.numpy import save_file

    kind = np.float16 if dtype == "float16" else np.float32
    cast = {name: each.astype(kind) if each.dtype == np.float32 else each for name, each in weights.items()}
    save_file(cast, file, metadata={"format": "pt"})


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
