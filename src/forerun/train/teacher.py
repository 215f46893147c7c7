"""The teacher: the frozen target during training, which computes features and laws for whole batches when needed.

Nothing is kept on disk: for a small target a pass costs less than reading its features back. Plain families run
in our own network; any other that transformers knows runs there. `SourceTeacher` is an encoder-decoder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput, UnsupportedModel
from forerun.core.types import Needs, PlainSeq
from forerun.models.base import Target
from forerun.models.config import DecoderConfig, supports
from forerun.models.encoder_decoder.config import EncoderDecoderConfig
from forerun.models.encoder_decoder.config import supports as has_encoder
from forerun.models.families import FAMILIES
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.load.shapes import check_shapes
from forerun.models.load.tokenizer import read_json
from forerun.train.data.corpus import Batch
from forerun.train.network import CausalNet, is_plain


class Teacher(ABC):
    def __init__(self, embedding: Tensor, head: Tensor, layer_count: int) -> None:
        """Its tables [V, D], and how many layers it has."""
        self.embedding, self.head, self.layer_count = embedding.detach(), head.detach(), layer_count

    @abstractmethod
    def features(self, tokens: Tensor, keep: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        """Inputs of the layers named (-1 = after the last norm) and the last rows [B, T, D], no gradients."""


class NetTeacher(Teacher):
    def __init__(self, net: CausalNet, *, compiled: bool = False) -> None:
        super().__init__(net.embedding, net.head, net.config.layers)
        self.net = net
        if compiled:  # all layers share one compiled program, for all shapes
            for layer in net.layers:
                layer.compile(dynamic=True)

    @torch.no_grad()
    def features(self, tokens: Tensor, keep: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        found: tuple[dict[int, Tensor], Tensor] = self.net(tokens, tuple(keep))
        return found


class TransformersTeacher(Teacher):
    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(model.get_input_embeddings().weight, model.get_output_embeddings().weight, layers)

    @torch.no_grad()
    def features(self, tokens: Tensor, keep: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        out = self.model.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        last = out.last_hidden_state
        return {i: last if i == -1 else out.hidden_states[i] for i in keep}, last


class ServedTeacher(Teacher):
    """A target as a CPU serves it: features come from our kernels, several times sooner, and are what drafters see."""

    def __init__(self, weights: Teacher, target: Target) -> None:
        """Tables are those of another teacher of the same model."""
        super().__init__(weights.embedding, weights.head, weights.layer_count)
        self.target = target

    @torch.no_grad()
    def features(self, tokens: Tensor, keep: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        """Rows of a batch are prompts that are read and forgotten; the last token of a prompt is never read."""
        needs = Needs(tuple(sorted({*keep, -1})))
        seqs = [PlainSeq(i, [*row.tolist(), 0], cache_salt=None) for i, row in enumerate(tokens)]
        try:
            hidden = self.target.prefill(seqs, needs)[1].hidden
        finally:
            for seq in seqs:
                self.target.release(seq)
        found = {layer: rows.view(*tokens.shape, -1).clone() for layer, rows in hidden.items()}
        return {layer: found[layer] for layer in keep}, found[-1]


def torch_device(name: str) -> torch.device:
    """The device of that name; auto is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInput(f"device={name!r} is not available: torch sees no GPU; use device='cpu'")
    return torch.device(name)


def load_net(checkpoint: Checkpoint, device: torch.device) -> CausalNet:
    """A plain family's weights in our own network: bfloat16 on a GPU, float32 elsewhere."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    config = DecoderConfig.from_hf(checkpoint.config)
    check_shapes(config, checkpoint.weights)
    return CausalNet(config, checkpoint.weights, dtype=dtype, device=device)


def load_teacher(checkpoint: Checkpoint, device: torch.device, *, compiled: bool = False) -> Teacher:
    if supports(checkpoint.config) and is_plain(DecoderConfig.from_hf(checkpoint.config)):
        return NetTeacher(load_net(checkpoint, device), compiled=compiled)
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if not checkpoint.path.is_dir():
        return TransformersTeacher(_model_of_file(checkpoint, dtype).to(device))
    model = AutoModelForCausalLM.from_pretrained(str(checkpoint.path), dtype=dtype, use_safetensors=True)
    return TransformersTeacher(model.to(device))


def _model_of_file(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """transformers' model with the weights of a GGUF file, which are named as in its own files."""
    import transformers

    config = dict(checkpoint.config)
    kind = config.pop("model_type")
    config |= {own: config[common] for own, common in FAMILIES[kind].spellings.items() if common in config}
    names = DecoderConfig.from_hf({**checkpoint.config, "named_as_llama": False})
    model, found = getattr(transformers, FAMILIES[kind].class_name).from_pretrained(
        None,
        config=transformers.AutoConfig.for_model(kind, **config),
        state_dict={names.file_name(name): weight.to(dtype) for name, weight in checkpoint.weights.items()},
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are told below
    )
    if wrong := [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]]:
        raise UnsupportedModel(
            f"{checkpoint.path} cannot teach: transformers holds {len(wrong)} weights of {kind} in another form; use "
            "the model's Hugging Face folder"
        )
    return model


_BANNED = -1e4  # a logit that no other falls below, and finite: gradients stay numbers


class SourceTeacher:
    """Encoder and decoder, batched with padding: what a drafter learns need not have the bits of decoding."""

    def __init__(self, model: Any, config: EncoderDecoderConfig, device: torch.device) -> None:
        self.config, self._model = config, model.to(device).eval().requires_grad_(False)
        self.weights: Mapping[str, Tensor] = model.state_dict()
        self.head: Tensor = model.get_output_embeddings().weight.detach()  # [V, D]
        bias = self.weights.get("final_logits_bias")
        # [V] of the law that is drafted for: tokens that the model's own settings ban are not to be learnt
        self.bias: Tensor = torch.zeros(len(self.head), device=device) if bias is None else bias.flatten().clone()
        laws = config.source_rules.laws
        self.bias[[word[0] for word in (() if laws is None else laws.bad_words) if len(word) == 1]] = _BANNED
        self.start = config.source_rules.start

    @torch.no_grad()
    def read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[B, T, D] the encoder's rows at the places of each source, and the decoder's at those before its output.

        Sequences are a source and its output; elsewhere the rows are zero.
        """
        tokens, learnt = batch.tokens, batch.learnt.to(batch.tokens.device)
        count, length = tokens.shape
        sources = torch.where(learnt.any(1), learnt.int().argmax(1), 1)  # [B]
        places = torch.arange(length, device=tokens.device)
        longest, outputs = int(sources.max()), int(learnt.sum(1).max())
        mask = (places < sources[:, None])[:, :longest]
        ids = torch.where(mask, tokens[:, :longest], self.start)
        encoder, decoder = self._model.get_encoder(), self._model.get_decoder()
        encoded = encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        # the decoder reads its start token where the source ends, and then the output but for its last token
        at = sources[:, None] - 1 + torch.arange(max(1, outputs), device=tokens.device)  # [B, O]
        inside = at < length
        at = at.clamp(max=length - 1)
        read = tokens.gather(1, at)
        read[:, 0] = self.start
        rows = decoder(
            input_ids=read, encoder_hidden_states=encoded, encoder_attention_mask=mask.long(), use_cache=False
        ).last_hidden_state
        whole = rows.new_zeros(2, count, length, rows.shape[-1])
        whole[0, :, :longest] = encoded * mask[:, :, None]
        whole[1].scatter_add_(1, at[:, :, None].expand_as(rows), rows * inside[:, :, None])
        return whole[0], whole[1]


def load_source_teacher(checkpoint: Checkpoint, device: torch.device) -> SourceTeacher:
    if not has_encoder(checkpoint.config):
        raise InvalidInput("specdec drafts for encoder-decoders (T5, Marian); for a decoder use dflash or eagle3")
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(str(checkpoint.path), dtype=torch.float32)
    config = EncoderDecoderConfig.from_hf(checkpoint.config, read_json(checkpoint.path / "generation_config.json"))
    return SourceTeacher(model, config, device)
