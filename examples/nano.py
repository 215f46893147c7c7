"""Speculative decoding, whole, in one file: a Llama with a KV cache, two drafters, the exact rule, the loop.

Read it from top to bottom; it is the library without batches, penalties, budgets and speed. Only the weights
come through Forerun's loader, so that the text is real: python examples/nano.py "Count to ten in words."
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, rms_norm, scaled_dot_product_attention, silu

# 1. A tree of guesses. Node 0, the root, is the last token of the text; it is certain. Every other node is a
#    guess of what follows its parent. A chain is a tree, and plain decoding is a tree of one node.


class Node(NamedTuple):
    token: int
    parent: int  # index of a node before it; -1 at the root
    law: Tensor | None = None  # the law [V] it was drawn from; None = it was chosen, not drawn


Tree = list[Node]  # parents precede children


def chain(tokens: list[int]) -> Tree:
    return [Node(token, i - 1) for i, token in enumerate(tokens)]


def path_to(tree: Tree, node: int) -> list[int]:
    """The nodes from the root down to this one, both included."""
    path = [node]
    while path[-1]:
        path.append(tree[path[-1]].parent)
    return path[::-1]


# 2. The target: the model whose text we promise. `score` looks at every node of a tree in ONE pass. That is
#    the gain: a pass mostly waits for the weights to arrive, so a few nodes cost little more than one.


class Llama:
    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.kv_heads, self.eps = config["num_key_value_heads"], config["rms_norm_eps"]
        dim = self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.frequencies = config["rope_parameters"]["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        self.weights = {name: weights[name].float() for name in weights}
        self.reset()

    def reset(self) -> None:
        """No text yet: keys and values of committed tokens, and of the nodes that were scored last."""
        self.cache = torch.zeros(self.layers, 2, 0, self.kv_heads, self.head_dim)
        self.fresh: list[Tensor] = []  # [2, M, H, D] by layer

    def score(self, tree: Tree) -> Tensor:
        """Logits [M, V] after each node, as if the text went on with the node's own path."""
        paths, cached = [path_to(tree, node) for node in range(len(tree))], self.cache.shape[2]
        # A node's position is its depth, not its index: siblings stand at the same place of the text.
        angles = torch.tensor([cached + len(path) - 1 for path in paths])[:, None] * self.frequencies
        # A node sees the committed text and its own ancestors, never a sibling: tree attention is this mask.
        sees = torch.zeros(len(tree), cached + len(tree), dtype=torch.bool)
        sees[:, :cached] = True
        for node, path in enumerate(paths):
            sees[node, [cached + ancestor for ancestor in path]] = True
        x, self.fresh = self.weights["model.embed_tokens.weight"][[node.token for node in tree]], []
        for layer in (f"model.layers.{n}" for n in range(self.layers)):
            x = x + self._attend(layer, self._norm(x, f"{layer}.input_layernorm"), angles, sees)
            inner = self._norm(x, f"{layer}.post_attention_layernorm")
            gate, up = (self._linear(inner, f"{layer}.mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self._linear(silu(gate) * up, f"{layer}.mlp.down_proj")
        head = "lm_head" if "lm_head.weight" in self.weights else "model.embed_tokens"
        return self._linear(self._norm(x, "model.norm"), head)

    def commit(self, path: list[int]) -> None:
        """Keep the keys and values of the root and the path, in order; the other nodes leave no trace."""
        self.cache = torch.cat([self.cache, torch.stack(self.fresh)[:, :, [0, *path]]], dim=2)

    def _attend(self, layer: str, x: Tensor, angles: Tensor, sees: Tensor) -> Tensor:
        shape = (len(x), -1, self.head_dim)
        q, k, v = (self._linear(x, f"{layer}.self_attn.{part}_proj").view(shape) for part in "qkv")
        self.fresh.append(torch.stack([rotate(k, angles), v]))
        seen = torch.cat([self.cache[len(self.fresh) - 1], self.fresh[-1]], dim=1)  # [2, S, H, D]
        k, v = seen.repeat_interleave(self.heads // self.kv_heads, 2).transpose(1, 2)
        mixed = scaled_dot_product_attention(rotate(q, angles).transpose(0, 1), k, v, attn_mask=sees)
        return self._linear(mixed.transpose(0, 1).flatten(1), f"{layer}.self_attn.o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.eps)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: pairs (i, i + D/2) of x [M, H, D] are turned by the angles [M, D/2]."""
    (a, b), (cos, sin) = x.chunk(2, -1), (angles.cos()[:, None], angles.sin()[:, None])
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


# 3. Drafters guess. They may be wrong as often as they like: that costs time, never correctness. These two
#    look at the text only. `lookup` *chooses*: what followed the last few tokens before follows them again.
Drafter = Callable[[list[int], torch.Generator], Tree]


def lookup(text: list[int], rng: torch.Generator, depth: int = 8, longest: int = 4) -> Tree:
    for n in range(min(longest, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return chain([text[-1], *text[end : end + depth]])
    return chain(text[-1:])


def sample(text: list[int], rng: torch.Generator, size: int, depth: int = 3, width: int = 2) -> Tree:
    """This one *samples*: from the law q of what followed a token so far, siblings without replacement."""
    tree, node = chain(text[-1:]), 0
    for _ in range(depth):  # fixed before anything is drawn: a draw must not decide whether it is tested
        counts = torch.zeros(size, dtype=torch.float64)  # [V]
        for token, successor in pairwise(text):
            counts[successor] += token == tree[node].token
        parent, node = node, len(tree)
        for _ in range(min(width, int((counts > 0).sum()))):
            q = counts / counts.sum()
            tree.append(Node(int(torch.multinomial(q, 1, generator=rng)), parent, q))
            counts[tree[-1].token] = 0  # the next sibling is drawn from what is left, and carries that law
        if node == len(tree):
            break  # nothing ever followed this token
    return tree


# 4. The verifier. Here, and nowhere else, lives the promise: what is committed has the target's own law p.


def verify(tree: Tree, laws: Tensor, rng: torch.Generator) -> tuple[list[int], int]:
    """The accepted nodes below the root, and one more token of the target's own: the bonus."""
    path = [0]
    while True:
        p = laws[path[-1]]  # what the target says after this node
        children = [(i, *node) for i, node in enumerate(tree) if node.parent == path[-1]]
        for i, x, _, q in children:  # sampled ones, in the order they were drawn
            if q is not None:
                if torch.rand((), generator=rng, dtype=torch.float64) * q[x] < p[x]:
                    path.append(i)  # it stands, with probability min(1, p/q)
                    break
                p = residual(p, q)  # what is left for the target to say: NOT p itself
        else:  # chosen children, or all have fallen: draw ONCE per node and follow the child that equals it
            x = int(torch.multinomial(p, 1, generator=rng))
            right = [i for i, token, _, q in children if token == x and q is None]
            if not right:
                return path[1:], x
            path += right


def residual(p: Tensor, q: Tensor) -> Tensor:
    left = (p - q).clamp(min=0.0)
    return left / left.sum() if left.sum() > 0 else p


# 5. The loop. A text of n tokens has n - 1 of them cached; the last one is the root of the next tree.


@torch.inference_mode()
def generate(
    target: Llama, prompt: list[int], drafter: Drafter, max_tokens: int,
    temperature: float = 0.0, seed: int = 0, stop: frozenset[int] = frozenset(),
) -> tuple[list[int], int]:  # fmt: skip
    """The new tokens, and how many rounds they took."""
    text, rounds, rng = list(prompt), 0, torch.Generator().manual_seed(seed)
    target.reset()
    if prompt[:-1]:  # a prompt is a chain of which everything is accepted
        target.score(chain(prompt[:-1]))
        target.commit(list(range(1, len(prompt) - 1)))
    while len(text) < len(prompt) + max_tokens and not stop & set(text[len(prompt) :]):
        tree = drafter(text, rng)
        logits = target.score(tree).double()
        greedy = one_hot(logits.argmax(-1), logits.shape[-1]).double()  # greedy is a law too: a point mass
        path, bonus = verify(tree, (logits / temperature).softmax(-1) if temperature else greedy, rng)
        target.commit(path)
        text, rounds = [*text, *(tree[node].token for node in path), bonus], rounds + 1
    new = text[len(prompt) : len(prompt) + max_tokens]  # an accepted path may run past the end
    return new[: next((i + 1 for i, token in enumerate(new) if token in stop), len(new))], rounds


if __name__ == "__main__":
    from forerun.models.load.checkpoint import open_checkpoint

    checkpoint = open_checkpoint("smollm2")
    model, tokenizer = Llama(checkpoint.config, checkpoint.weights), checkpoint.tokenizer()
    ids = tokenizer.chat_ids([{"role": "user", "content": " ".join(sys.argv[1:]) or "Count to ten, twice."}])
    drawn = partial(sample, size=checkpoint.config["vocab_size"])
    for name, guess in (("plain", partial(lookup, depth=0)), ("look-up", lookup), ("sampled drafts", drawn)):
        tokens, rounds = generate(model, ids, guess, max_tokens=48, stop=tokenizer.eos_ids)
        print(f"{name}: {len(tokens)} tokens in {rounds} rounds: {tokenizer.decode(tokens)}\n")
