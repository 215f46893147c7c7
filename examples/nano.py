"""Speculative decoding, whole, in one file: a Llama with a KV cache, two drafters, the exact rule, the loop.

Read it from top to bottom; it is the library without batches, penalties, budgets and speed. Only the weights
come through Forerun's loader, so that the text is real: python examples/nano.py "Count to ten in words."
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, rms_norm, scaled_dot_product_attention, silu

# 1. A tree of guesses. Node 0, the root, is the last token of the text; it is certain. Every other node is a
#    guess of what follows its parent. A chain is a tree, and plain decoding is a tree of one node.


@dataclass
class Tree:
    tokens: list[int]
    parents: list[int]
    laws: list[Tensor | None]  # the law [V] that a node was drawn from; None = it was chosen, not drawn

    @classmethod
    def chain(cls, tokens: list[int]) -> Tree:
        return cls(tokens, [i - 1 for i in range(len(tokens))], [None] * len(tokens))

    def add(self, parent: int, token: int, law: Tensor | None) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.laws.append(law)
        return len(self.tokens) - 1

    def path_to(self, node: int) -> list[int]:
        """The nodes from the root down to this one, both included."""
        path = [node]
        while path[0]:
            path = [self.parents[path[0]], *path]
        return path


# 2. The target: the model whose text we promise. `score` looks at every node of a tree in ONE pass. That is the
#    whole gain: a pass mostly waits for the weights to arrive, so eight nodes cost little more than one.


class Llama:
    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.kv_heads, self.eps = config["num_key_value_heads"], config["rms_norm_eps"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        theta = config["rope_parameters"]["rope_theta"]
        self.frequencies = theta ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        self.weights = {name: weights[name].float() for name in weights}
        nothing = torch.zeros(0, self.kv_heads, self.head_dim)
        self.keys, self.values = [nothing] * self.layers, [nothing] * self.layers  # of committed tokens
        self.fresh: list[tuple[Tensor, Tensor]] = []  # keys and values of the tree scored last

    def score(self, tree: Tree) -> Tensor:
        """Logits [M, V] after each of the M nodes, as if the text were the root's and then the node's path."""
        paths, cached = [tree.path_to(node) for node in range(len(tree.tokens))], len(self.keys[0])
        # A node's position is its depth, not its index: siblings stand at the same place of the text.
        angles = torch.tensor([cached + len(path) - 1 for path in paths])[:, None] * self.frequencies
        # A node sees the committed text and its own ancestors, never a sibling: tree attention is this mask.
        sees = torch.zeros(len(paths), cached + len(paths), dtype=torch.bool)
        sees[:, :cached] = True
        for node, path in enumerate(paths):
            sees[node, [cached + ancestor for ancestor in path]] = True
        x = self.weights["model.embed_tokens.weight"][tree.tokens]
        self.fresh = []
        for n in range(self.layers):
            x = x + self._attend(n, self._norm(x, f"model.layers.{n}.input_layernorm"), angles, sees)
            inner = self._norm(x, f"model.layers.{n}.post_attention_layernorm")
            gate, up = (self._linear(inner, f"model.layers.{n}.mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self._linear(silu(gate) * up, f"model.layers.{n}.mlp.down_proj")
        head = "lm_head" if "lm_head.weight" in self.weights else "model.embed_tokens"
        return self._linear(self._norm(x, "model.norm"), head)

    def commit(self, path: list[int]) -> None:
        """Keep the keys and values of the root and the path, in order; the other nodes were never there."""
        for n, (keys, values) in enumerate(self.fresh):
            self.keys[n] = torch.cat([self.keys[n], keys[[0, *path]]])
            self.values[n] = torch.cat([self.values[n], values[[0, *path]]])

    def reset(self) -> None:
        self.keys, self.values = ([rows[:0] for rows in kept] for kept in (self.keys, self.values))

    def _attend(self, n: int, x: Tensor, angles: Tensor, sees: Tensor) -> Tensor:
        q, k, v = (
            self._linear(x, f"model.layers.{n}.self_attn.{part}_proj").view(len(x), -1, self.head_dim)
            for part in "qkv"
        )
        q, k = _rotate(q, angles), _rotate(k, angles)
        self.fresh.append((k, v))
        k, v = torch.cat([self.keys[n], k]), torch.cat([self.values[n], v])
        k, v = (rows.repeat_interleave(self.heads // self.kv_heads, 1).transpose(0, 1) for rows in (k, v))
        mixed = scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], attn_mask=sees)[0]
        return self._linear(mixed.transpose(0, 1).flatten(1), f"model.layers.{n}.self_attn.o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.eps)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: pairs (i, i + D/2) of x [M, H, D] are turned by the angles [M, D/2]."""
    (a, b), (cos, sin) = x.chunk(2, -1), (angles.cos()[:, None], angles.sin()[:, None])
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


# 3. Drafters guess. They may be wrong as often as they like: that costs time, never correctness. These only look
#    at the text. `lookup` *chooses*: what followed the last few tokens before will follow them again.

Drafter = Callable[[list[int], torch.Generator], Tree]


def nobody(text: list[int], rng: torch.Generator) -> Tree:
    return Tree.chain(text[-1:])


def lookup(text: list[int], rng: torch.Generator, depth: int = 8, longest: int = 4) -> Tree:
    for n in range(min(longest, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return Tree.chain([text[-1], *text[end : end + depth]])
    return Tree.chain(text[-1:])


def sampler(vocab_size: int, depth: int = 3, width: int = 2) -> Drafter:
    """This one *samples*: from the law q of what followed this token so far, siblings without replacement."""

    def draft(text: list[int], rng: torch.Generator) -> Tree:
        tree, node = Tree.chain(text[-1:]), 0
        for _ in range(depth):  # fixed before anything is drawn: a draw must not decide whether it is tested
            followed = [b for a, b in pairwise(text) if a == tree.tokens[node]]
            if not followed:
                break
            q = torch.bincount(torch.tensor(followed), minlength=vocab_size).double() / len(followed)
            children = torch.multinomial(q, min(width, int((q > 0).sum())), generator=rng).tolist()
            node = [tree.add(node, child, q) for child in children][0]  # noqa: RUF015 - all are added
        return tree

    return draft


# 4. The verifier. Here, and nowhere else, lives the promise: what is committed has the target's own law p.


def verify(tree: Tree, laws: Tensor, rng: torch.Generator) -> tuple[list[int], int]:
    """The accepted nodes below the root, and one more token of the target's own: the bonus."""
    path: list[int] = []
    while True:
        node = path[-1] if path else 0
        p, stands = laws[node], None
        children = [i for i, parent in enumerate(tree.parents) if parent == node and i]
        q = next((law.clone() for i in children if (law := tree.laws[i]) is not None), None)
        for i in children if q is not None else []:  # sampled: in the order they were drawn
            x = tree.tokens[i]
            if torch.rand((), generator=rng, dtype=torch.float64) * q[x] < p[x]:  # stands with min(1, p/q)
                stands = i
                break
            p = residual(p, q)  # what is left for the target to say, NOT p itself
            q[x] = 0.0  # the next sibling was drawn without this one
            q = q / q.sum().clamp(min=1e-300)
        if stands is None:  # chosen children, or all fell: one draw per node; a child that equals it is right
            x = int(torch.multinomial(p, 1, generator=rng))
            stands = next((i for i in children if tree.laws[i] is None and tree.tokens[i] == x), None)
            if stands is None:
                return path, x
        path.append(stands)


def residual(p: Tensor, q: Tensor) -> Tensor:
    left = (p - q).clamp(min=0.0)
    return left / left.sum() if left.sum() > 0 else p


# 5. The loop. A text of n tokens has n - 1 of them cached; the last one is the root of the next tree.


@torch.inference_mode()
def generate(
    target: Llama, prompt: list[int], drafter: Drafter, max_tokens: int, temperature: float = 0.0, seed: int = 0,
    stop: frozenset[int] = frozenset(),
) -> tuple[list[int], int]:  # fmt: skip
    """The new tokens, and how many rounds they took."""
    text, rounds, rng = list(prompt), 0, torch.Generator().manual_seed(seed)
    target.reset()
    if prompt[:-1]:  # a prompt is a chain of which everything is accepted
        target.score(Tree.chain(prompt[:-1]))
        target.commit(list(range(1, len(prompt) - 1)))
    while len(text) < len(prompt) + max_tokens and not stop & set(text[len(prompt) :]):
        tree = drafter(text, rng)
        logits = target.score(tree).double()
        greedy = one_hot(logits.argmax(-1), logits.shape[-1]).double()  # greedy is a law too: a point mass
        laws = (logits / temperature).softmax(-1) if temperature else greedy
        path, bonus = verify(tree, laws, rng)
        target.commit(path)
        text, rounds = [*text, *(tree.tokens[node] for node in path), bonus], rounds + 1
    new = text[len(prompt) : len(prompt) + max_tokens]  # an accepted path may run past the end
    return new[: next((i + 1 for i, token in enumerate(new) if token in stop), len(new))], rounds


def main() -> None:
    from forerun.models.load.checkpoint import open_checkpoint

    asked = " ".join(sys.argv[1:]) or "Say the word hello twelve times."
    checkpoint = open_checkpoint("smollm2")
    target, tokenizer = Llama(checkpoint.config, checkpoint.weights), checkpoint.tokenizer()
    prompt = tokenizer.chat_ids([{"role": "user", "content": asked}])
    for drafter in (nobody, lookup, sampler(checkpoint.config["vocab_size"])):
        tokens, rounds = generate(target, prompt, drafter, max_tokens=48, stop=tokenizer.eos_ids)
        print(f"{drafter.__name__}: {len(tokens)} tokens, {rounds} rounds\n{tokenizer.decode(tokens)}\n")


if __name__ == "__main__":
    main()
