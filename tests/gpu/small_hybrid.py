"""A small hybrid out of SmolLM2: short convolutions in two layers of three, trained on SmolLM2's texts; and its drafts.

    forerun data make --target smollm2 --out texts --own-prompts 12000 --temperatures 0,1 --max-answer 256 --batch 2048
    python -m tests.gpu.small_hybrid train --data texts --out hybrid
    forerun train eagle3 --target hybrid --data texts --out hybrid-head --steps 350 --vocab 16384 --holdout 0.04
    python -m tests.gpu.small_hybrid measure --data texts --model hybrid --head hybrid-head

`train` writes transformers' LFM2 with SmolLM2's embedding, feed-forward layers and, in every third layer, attention. It
learns SmolLM2's laws, and goes on from the folder where there is one. `measure` compares drafted texts with plain ones,
one by one and in batches, and what the prefix cache gives to second turns; it fails where they differ.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.api.llm import LLM
from forerun.core.params import EngineConfig
from forerun.models.config import DecoderConfig
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.train.data.corpus import Batch, Batches, Corpus
from forerun.train.teacher import load_net, torch_device

MORE = "<|im_end|>\n<|im_start|>user\nSay more about that.<|im_end|>\n<|im_start|>assistant\n"
SHARED = {  # parts of a layer: ours, and SmolLM2's
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "self_attn.q_proj": "self_attn.q_proj",
    "self_attn.k_proj": "self_attn.k_proj",
    "self_attn.v_proj": "self_attn.v_proj",
    "self_attn.out_proj": "self_attn.o_proj",
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    trains, measures = commands.add_parser("train"), commands.add_parser("measure")
    for one in (trains, measures):
        one.add_argument("--data", required=True, help="a folder that `forerun data make` filled")
        one.add_argument("--holdout", type=float, default=0.04, help="share of prompts; default: %(default)s")
        one.add_argument("--device", default="auto")
    add = trains.add_argument
    add("--teacher", default="smollm2")
    add("--out", type=Path, required=True)
    add("--seconds", type=float, default=90.0, help="default: %(default)s")
    add("--layers", type=int, default=18, help="of SmolLM2's 30; default: %(default)s")
    add("--batch-tokens", type=int, default=16384, help="default: %(default)s")
    add("--rate", type=float, default=6e-4, help="highest learning rate; default: %(default)s")
    trains.set_defaults(work=train)
    add = measures.add_argument
    add("--model", required=True)
    add("--head", help="of that model; default: look-ups alone")
    add("--prompts", type=int, default=200, help="held back from training; default: %(default)s")
    add("--timed", type=int, default=12, help="of them one at a time; default: %(default)s")
    add("--turns", type=int, default=40, help="conversations; default: %(default)s")
    add("--repeats", type=int, default=2, help="default: %(default)s")
    add("--batch", type=int, default=32, help="default: %(default)s")
    add("--max-tokens", type=int, default=64, help="default: %(default)s")
    measures.set_defaults(work=measure)
    given = parser.parse_args()
    given.work(given)


def train(given: argparse.Namespace) -> None:
    device, checkpoint = torch_device(given.device), open_checkpoint(given.teacher)
    teacher = load_net(checkpoint, device)
    model = make_hybrid(checkpoint, given.layers, given.out).to(device).train()
    corpus = Corpus(given.data, max_length=512, holdout=given.holdout)
    batches = Batches(corpus, corpus.training, given.batch_tokens, seed=int(perf_counter()))
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=given.rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    started, step, tokens = perf_counter(), 0, 0
    while (spent := (perf_counter() - started) / given.seconds) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = given.rate * min(1.0, 20 * spent, 1.25 * (1 - spent) + 0.01)
        batch = batches.at(step).to(device)
        loss = distance(model, teacher, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + batch.tokens.numel()
        if step % 50 == 0 or step == 1:
            seconds = perf_counter() - started
            print(f"step {step}: loss {float(loss.detach()):.3f}, {tokens / seconds:.0f} tokens/s", flush=True)
    model.eval()
    held = Batches(corpus, corpus.held_back, given.batch_tokens, seed=0)
    with torch.no_grad():
        losses = [float(distance(model, teacher, held.at(i).to(device))) for i in range(min(4, len(held)))]
    model.to(torch.bfloat16).save_pretrained(given.out)
    checkpoint.tokenizer().save(given.out)
    print(
        f"{step} steps, {tokens} tokens; on held-back texts {statistics.fmean(losses):.3f} nats from the teacher's law"
    )


def make_hybrid(checkpoint: Checkpoint, layers: int, folder: Path) -> Any:
    """transformers' model: what the folder holds, or a new one with the teacher's weights where they fit."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    if (folder / "config.json").is_file():
        return Lfm2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = checkpoint.config
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    settings = {name: theirs[name] for name in (*same, "max_position_embeddings", "bos_token_id", "eos_token_id")}
    config = Lfm2Config(
        **settings,
        pad_token_id=settings["eos_token_id"],
        num_hidden_layers=layers,
        norm_eps=theirs["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": DecoderConfig.from_hf(theirs).ropes[0].theta},
        layer_types=["full_attention" if i % 3 == 2 else "conv" for i in range(layers)],
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Lfm2ForCausalLM(config).float()
    last = theirs["num_hidden_layers"] - 1
    sources = [round(i * last / max(1, layers - 1)) for i in range(layers)]
    load_weights(dict(model.named_parameters()), checkpoint.weights, sources)
    return model


def load_weights(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], sources: list[int]) -> None:
    names = {
        "model.embed_tokens.weight": "model.embed_tokens.weight",
        "model.embedding_norm.weight": "model.norm.weight",
    }
    for i, source in enumerate(sources):
        names |= {f"model.layers.{i}.{a}.weight": f"model.layers.{source}.{b}.weight" for a, b in SHARED.items()}
    with torch.no_grad():
        for name, source_name in names.items():
            if name in ours:  # a layer has attention, or a convolution
                ours[name].copy_(theirs[source_name].float())


def distance(model: Any, teacher: Any, batch: Batch) -> Tensor:
    """KL of the teacher's law and the model's behind every token of a text but its last."""
    behind = batch.learnt.flip(1).cumsum(1).flip(1) > 0
    inside = torch.cat((behind[:, 1:], torch.zeros_like(behind[:, :1])), 1).to(batch.tokens.device)
    with torch.no_grad():
        rows = teacher(batch.tokens)[1][inside]
        truth = F.linear(rows, teacher.head).float().log_softmax(-1)
    with torch.autocast("cuda", torch.bfloat16, enabled=batch.tokens.is_cuda):
        rows = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state[inside]
        laws = F.linear(rows, model.lm_head.weight)
    return F.kl_div(laws.float().log_softmax(-1), truth, reduction="batchmean", log_target=True)


@dataclass
class Seen:
    """Of one drafter."""

    alone: list[list[int]] = field(default_factory=list)  # texts
    batched: list[list[int]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # tokens/s alone
    batch_rate: float = 0.0
    rounds: float = 0.0  # tokens per round, alone
    turns: list[list[int]] = field(default_factory=list)
    found: list[int] = field(default_factory=list)  # tokens of each second prompt in the prefix cache
    asked: int = 0  # tokens of second prompts


def measure(given: argparse.Namespace) -> None:
    config = EngineConfig(device=given.device, max_batch=given.batch)
    llm = (
        LLM.load(given.model, config=config, draft_model=given.head)
        if given.head
        else LLM.load(given.model, config=config)
    )
    prompts, names = held_back_prompts(given), ["none", "ngram", "suffix"]
    if given.head:
        names += ["eagle3", "auto"]
    seen = {name: Seen() for name in names}
    for repeat in range(1 + given.repeats):
        some = prompts[: given.timed if repeat else 2]  # the first ones compile
        for name, one in seen.items():
            run_alone(llm, name, some, given.max_tokens, one, timed=repeat > 0)
    for name, one in seen.items():
        run_batch(llm, name, prompts, given.max_tokens, one)
        run_turns(llm, name, prompts[: given.turns], one)
    plain, wrong = seen["none"], 0
    print("drafter | alone, tokens/s | over plain | tokens per round | batch, tokens/s | over plain | differ | cached")
    for name, one in seen.items():
        alone, base = statistics.median(one.rates), statistics.median(plain.rates)
        pairs = [(one.alone, plain.alone), (one.batched, plain.batched), (one.turns, plain.turns)]
        differ = sum(a != b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
        wrong += differ + sum(a != b for a, b in zip(one.found, plain.found, strict=True))
        rates = f"{alone:.1f} | {alone / base:.2f}x | {one.rounds:.2f} | {one.batch_rate:.1f}"
        cached = f"{sum(one.found)} of {one.asked}"
        print(f"{name} | {rates} | {one.batch_rate / plain.batch_rate:.2f}x | {differ} | {cached}", flush=True)
    company = sum(a != b for a, b in zip(plain.alone, plain.batched, strict=False))
    print(f"{company} plain texts differ in a batch")
    if wrong + company or not sum(plain.found):
        raise SystemExit("FAILED: texts or hits of the prefix cache differ, or nothing was found in it")
    print("passed")


def held_back_prompts(given: argparse.Namespace) -> list[list[int]]:
    corpus, count = Corpus(given.data, max_length=512, holdout=given.holdout), given.prompts
    found = dict.fromkeys(tuple(corpus.tokens[first:answer].tolist()) for first, _, answer in corpus.held_back)
    if len(found) < count:
        raise SystemExit(f"{given.data} holds back {len(found)} prompts, and {count} are asked for; write more texts")
    return [list(prompt) for prompt in list(found)[:count]]


def run_alone(llm: LLM, name: str, prompts: list[list[int]], longest: int, seen: Seen, *, timed: bool) -> None:
    started = perf_counter()
    done = [llm.generate(one, drafter=name, max_tokens=longest, cache_salt=None) for one in prompts]
    if timed:
        seen.rates.append(sum(one.tokens for one in done) / (perf_counter() - started))
    seen.alone = [one.token_ids for one in done]
    seen.rounds = sum(one.tokens for one in done) / sum(one.rounds for one in done)


def run_batch(llm: LLM, name: str, prompts: list[list[int]], longest: int, seen: Seen) -> None:
    for some in (prompts[: llm.engine.max_batch], prompts):  # the first ones compile
        started = perf_counter()
        done = llm.generate(some, drafter=name, max_tokens=longest, cache_salt=None)
        seen.batch_rate = sum(one.tokens for one in done) / (perf_counter() - started)
    seen.batched = [one.token_ids for one in done]


def run_turns(llm: LLM, name: str, prompts: list[list[int]], seen: Seen) -> None:
    """Conversations of two turns, cached apart from other drafters'."""
    more = llm.tokenizer.encode(MORE, add_special=False)
    firsts = llm.generate(prompts, drafter=name, max_tokens=100, cache_salt=name)
    asked = [[*prompt, *first.token_ids, *more] for prompt, first in zip(prompts, firsts, strict=True)]
    seconds = llm.generate(asked, drafter=name, max_tokens=32, cache_salt=name)
    seen.turns = [one.token_ids for one in (*firsts, *seconds)]
    seen.found, seen.asked = [one.cached_tokens for one in seconds], sum(map(len, asked))


if __name__ == "__main__":
    main()
