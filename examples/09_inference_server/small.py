"""A small Llama in numpy, for simulated GPUs: the interface of `model.Model`, without a GPU.

It computes in double precision, so that the order of a sum changes no token, and takes the time
that Llama-3-8B would take on the simulated SMs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from batch import Batch, Piece, Shape

from greensched.driver.simulated import cost
from greensched.typing import Cost

__all__ = ["SHAPE", "Batch", "Piece", "Small"]

SHAPE = Shape(
    layers=2, width=32, heads=4, kv_heads=2, head_size=8, mlp=64, vocabulary=512,
    slots=12, context=256, decode_sizes=(4, 12), prefill_sizes=(128, 256),
)  # fmt: skip

#: Of the model whose time is modelled, in 16 bits. A token takes two operations for each, at the
#: 4.5e12 per second of an SM of an H200 that runs a large matrix product; a pass reads each once.
PARAMETERS = 8e9
TOKEN_SM_NS = 2 * PARAMETERS / 4.5e3


def pass_cost(_: Small, batch: Batch) -> Cost:
    """Return the cost of a pass."""
    return Cost(sm_ns=batch.rows * TOKEN_SM_NS, dram_bytes=2 * PARAMETERS)


class Small:
    """The model, with the state of its sequences."""

    def __init__(self) -> None:
        self.shape = shape = SHAPE
        rng = np.random.default_rng(1)

        def weights(rows: int, columns: int) -> Any:
            return rng.standard_normal((rows, columns)) * columns**-0.5

        heads, size = shape.heads + 2 * shape.kv_heads, shape.head_size
        self.embedding = weights(shape.vocabulary, shape.width)
        self.head = weights(shape.vocabulary, shape.width)
        self.layers = [
            (
                weights(heads * size, shape.width),
                weights(shape.width, shape.heads * size),
                weights(2 * shape.mlp, shape.width),
                weights(shape.width, shape.mlp),
            )
            for _ in range(shape.layers)
        ]
        angles = np.outer(
            np.arange(shape.context), shape.rope_theta ** -(np.arange(0, size, 2) / size)
        )
        self.cos, self.sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        self.cache = np.zeros((shape.layers, 2, shape.slots, shape.context, shape.kv_heads, size))
        self.newest = [0] * shape.slots
        self.length = [0] * shape.slots

    def decode_graphs(self) -> Small:
        return self

    def prefill_graphs(self) -> Small:
        return self

    def all_graphs(self) -> Small:
        return self

    def fused_graphs(self, _: int) -> Small:
        return self

    @cost(pass_cost)
    def launch(self, batch: Batch) -> Tokens:
        """Submit a batch; on simulated GPUs it is computed now, and takes its time on them."""
        return Tokens(self.compute(batch))

    def compute(self, batch: Batch) -> list[int]:
        """Compute a batch; return the next token of each slot and ended prompt."""
        tokens = [self._read(slot, [self.newest[slot]], self.length[slot]) for slot in batch.slots]
        for piece in batch.pieces:
            token = self._read(piece.slot, list(piece.tokens), piece.start)
            tokens += [token] if piece.is_last else []
        return tokens

    def _read(self, slot: int, tokens: list[int], start: int) -> int:
        """Read tokens into a slot; return the most probable one behind them."""
        shape, end = self.shape, start + len(tokens)
        cos, sin, rotated = self.cos[start:end], self.sin[start:end], shape.heads + shape.kv_heads
        seen = np.arange(end) <= np.arange(start, end)[:, None]
        x = self.embedding[tokens]
        for layer, (mix, out, up, down) in enumerate(self.layers):
            qkv = (normed(x) @ mix.T).reshape(len(tokens), -1, shape.head_size)
            first, second = np.split(qkv[:, :rotated], 2, -1)
            qk = np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)
            cache = self.cache[layer, :, slot]
            cache[0, start:end], cache[1, start:end] = qk[:, shape.heads :], qkv[:, rotated:]
            keys, values = cache[:, :end].repeat(shape.heads // shape.kv_heads, 2)
            scores = np.einsum("qhd,khd->hqk", qk[:, : shape.heads], keys) * shape.head_size**-0.5
            weights = np.exp(np.where(seen, scores, -np.inf) - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            x = x + np.einsum("hqk,khd->qhd", weights, values).reshape(len(tokens), -1) @ out.T
            gate, value = np.split(normed(x) @ up.T, 2, -1)
            x = x + (gate / (1 + np.exp(-gate)) * value) @ down.T
        token = int((normed(x[-1]) @ self.head.T).argmax())
        self.newest[slot], self.length[slot] = token, end
        return token


class Tokens:
    """The answer of a pass, as `batch.Answer`."""

    def __init__(self, found: list[int]) -> None:
        self._found = found

    def wait(self) -> None:
        """Return at once: the tokens are there."""

    def tokens(self) -> list[int]:
        return self._found


def normed(x: Any) -> Any:
    """Normalise each row by its root mean square."""
    return x / ((x * x).mean(-1, keepdims=True) + 1e-5) ** 0.5
