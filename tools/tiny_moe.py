"""Trains the tiny mixture of experts that tests run, and its dense twin, on text that the default model writes.

    python -m tools.tiny_moe tests/models/tiny_moe

Bytes are the tokens. The default model answers prompts of the built-in suite; both models then learn that text from
scratch with transformers, the mixture with its own loss for balanced experts. A few minutes on two cores, and half a
megabyte. The folder gets `mixture`, `dense` and text.txt, a stretch of the text that was held out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BASE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None, "head_dim": 16,
}  # fmt: skip
EXPERTS, PICKED, INNER = 8, 2, 64
HELD_OUT, STRETCH, BATCH, RATE = 1500, 128, 24, 3e-3


def write_text(prompts: int, tokens: int) -> bytes:
    """Answers of the default model, end to end."""
    from forerun.api.llm import LLM
    from forerun.measure.bench.suites import load_suite

    llm = LLM.load("smollm2", drafter="ngram", max_batch=16)
    chats = [list(item.messages) for item in load_suite()][:prompts]
    return "\n\n".join(done.text for done in llm.chat(chats, max_tokens=tokens)).encode()


def make_models() -> dict[str, Any]:
    """The mixture, and a dense model as large as what one token uses of it."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    routed = MixtralConfig(
        **BASE, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=PICKED,
        output_router_logits=True, router_aux_loss_coef=0.02, sliding_window=None,
    )  # fmt: skip
    dense = LlamaConfig(**BASE, intermediate_size=PICKED * INNER)
    return {"mixture": MixtralForCausalLM(routed), "dense": LlamaForCausalLM(dense)}


def train(model: Any, data: Tensor, steps: int) -> float:
    """Teach a model the text; returns the last loss in nats per byte."""
    made, loss = torch.Generator().manual_seed(2), torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for step in range(steps):
        begins = torch.randint(len(data) - STRETCH, (BATCH,), generator=made)
        rows = torch.stack([data[begin : begin + STRETCH] for begin in begins.tolist()])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: {float(loss.detach()):.3f}", flush=True)
    return float(loss.detach())


def save(model: Any, folder: Path) -> None:
    """In 16 bits, as checkpoints come."""
    model.half().save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["output_router_logits"] = False
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_moe", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="written per prompt")
    parser.add_argument("--steps", type=int, default=350)
    flags = parser.parse_args()
    text = write_text(flags.prompts, flags.tokens)
    print(f"{len(text)} bytes of text", flush=True)
    flags.folder.mkdir(parents=True, exist_ok=True)
    (flags.folder / "text.txt").write_bytes(text[-HELD_OUT:])
    data = torch.tensor(list(text[:-HELD_OUT]))
    for name, model in make_models().items():
        loss = train(model, data, flags.steps)
        save(model, flags.folder / name)
        print(f"{name}: {loss:.3f} nats per byte, {model.num_parameters()} parameters", flush=True)


if __name__ == "__main__":
    main()
