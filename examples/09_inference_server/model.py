"""Define a small transformer with random weights and a cache of keys and values, in torch or numpy.

Sequences occupy slots of the cache. `prefill` reads a prompt into a slot; `step` computes one more
token for several slots at once. Both block, as a model's functions do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from greensched.driver.simulated import cost
from greensched.typing import Cost

try:
    import torch

    import greensched.integrations.torch  # noqa: F401  in `p.run` its stream is the partition's
except ImportError:
    torch = None


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model, in elements."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    #: The most sequences at a time, and the most tokens of each.
    slots: int
    context: int


#: The model on a GPU has 1.2 billion parameters. On a simulated GPU the host computes a smaller
#: one, quickly enough that the modelled time dominates.
ON_GPU = Shape(layers=24, heads=16, width=2048, vocabulary=32_000, slots=24, context=4608)
SIMULATED = Shape(layers=4, heads=2, width=32, vocabulary=512, slots=12, context=256)

#: The modelled time on a simulated GPU is that of 32 billion parameters of 8 bits. A token takes
#: two operations per parameter, at the 4.5e12 per second of an SM of an H200 that runs a large
#: matrix product; a pass reads each parameter once.
PARAMETERS = 32e9
TOKEN_SM_NS = 2 * PARAMETERS / 4.5e3


def layer_cost(model: Transformer, _: int, x: Any, __: Any) -> Cost:
    """Return the cost of one layer for the rows of x."""
    layers = model.shape.layers
    return Cost(sm_ns=len(x) * TOKEN_SM_NS / layers, dram_bytes=PARAMETERS / layers)


class Transformer:
    """The model. Several threads may use it at once if each has its own slots.

    Args:
        shape: its sizes.
        device: the torch device; None: numpy, on the host.
    """

    def __init__(self, shape: Shape, device: str | None) -> None:
        self.shape = shape
        self.on = Numpy() if device is None else Torch(device)
        width, weights = shape.width, self.on.weights
        self.tokens = weights(shape.vocabulary, width)
        self.positions = weights(shape.context + 1, width)
        self.scores = weights(width, shape.vocabulary)
        self.layers = [
            (
                weights(width, 3 * width),
                weights(width, width),
                weights(width, 4 * width),
                weights(4 * width, width),
            )
            for _ in range(shape.layers)
        ]
        # One place more than the context: `step` writes slots without a sequence there.
        size = (shape.slots, shape.heads, shape.context + 1, width // shape.heads)
        self.cache = [(self.on.zeros(*size), self.on.zeros(*size)) for _ in range(shape.layers)]

    def prefill(self, slot: int, prompt: list[int]) -> int:
        """Read a prompt into a slot; return the next token."""
        length = len(prompt)

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            """Attend causally; q, k and v are (tokens, heads, size)."""
            keys, values = self.cache[layer]
            q, k, v = (a.swapaxes(0, 1) for a in (q, k, v))
            keys[slot, :, :length], values[slot, :, :length] = k, v
            return self.on.attend_causally(q, k, v).swapaxes(0, 1)

        x = self._forward(self.on.numbers(prompt), self.on.upto(length), attend)
        return self._next(x[-1:])[0]

    def step(self, sequences: dict[int, tuple[int, int]]) -> list[int]:
        """Compute the next token of each sequence.

        All slots are computed; those without a sequence at the unused place of the cache.

        Args:
            sequences: for each slot, the newest token and its position.

        Returns:
            The next tokens, in the same order.
        """
        slots, spare = range(self.shape.slots), (0, self.shape.context)
        given = self.on.numbers([sequences.get(slot, spare) for slot in slots])
        tokens, at, every = given[:, 0], given[:, 1], self.on.upto(len(slots))
        longest = 1 + max(place for _, place in sequences.values())
        seen = self.on.upto(longest)[None, :] <= at[:, None]

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            """Attend within each slot; q, k and v are (slots, heads, size)."""
            keys, values = self.cache[layer]
            keys[every, :, at], values[every, :, at] = k, v
            keys, values = keys[:, :, :longest], values[:, :, :longest]
            return self.on.attend(q[:, :, None], keys, values, seen[:, None, None])[:, :, 0]

        after = self._next(self._forward(tokens, at, attend))
        return [after[slot] for slot in sequences]

    def _forward(self, tokens: Any, places: Any, attend: Any) -> Any:
        x = self.tokens[tokens] + self.positions[places]
        for layer in range(self.shape.layers):
            x = self.layer(layer, x, attend)
        return x

    @cost(layer_cost)
    def layer(self, layer: int, x: Any, attend: Any) -> Any:
        """Apply one layer to (tokens, width)."""
        mix, out, up, down = self.layers[layer]
        rows, heads = len(x), self.shape.heads
        q, k, v = (normed(x) @ mix).reshape(rows, 3, heads, -1).swapaxes(0, 1)
        x = x + attend(layer, q, k, v).reshape(rows, -1) @ out
        return x + (normed(x) @ up).clip(0) @ down

    def _next(self, x: Any) -> list[int]:
        found: list[int] = (normed(x) @ self.scores).argmax(-1).tolist()
        return found


def normed(x: Any) -> Any:
    """Normalise each row by its root mean square."""
    return x / ((x * x).mean(-1)[:, None] + 1e-6) ** 0.5


class Numpy:
    """Compute on the host in double precision, so that the order of a sum changes no token."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(1)

    def weights(self, rows: int, columns: int) -> Any:
        return self._rng.standard_normal((rows, columns)) * rows**-0.5

    def zeros(self, *size: int) -> Any:
        return np.zeros(size)

    def numbers(self, given: list[Any]) -> Any:
        return np.array(given)

    def upto(self, end: int) -> Any:
        return np.arange(end)

    def attend(self, q: Any, k: Any, v: Any, seen: Any) -> Any:
        """Return the attention of the queries to the keys in `seen`."""
        scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True), where=seen, out=0 * scores)
        return weights / weights.sum(-1, keepdims=True) @ v

    def attend_causally(self, q: Any, k: Any, v: Any) -> Any:
        return self.attend(q, k, v, np.tri(q.shape[-2], dtype=bool))


class Torch:
    """Compute by torch: in 16 bits on a GPU, as models are served; in double precision on a CPU."""

    def __init__(self, device: str) -> None:
        kind = torch.bfloat16 if device == "cuda" else torch.float64
        self._options = {"device": device, "dtype": kind}
        self._device = device
        torch.manual_seed(1)

    def weights(self, rows: int, columns: int) -> Any:
        return torch.randn(rows, columns, **self._options) * rows**-0.5

    def zeros(self, *size: int) -> Any:
        return torch.zeros(size, **self._options)

    def numbers(self, given: list[Any]) -> Any:
        return torch.tensor(given, device=self._device)

    def upto(self, end: int) -> Any:
        return torch.arange(end, device=self._device)

    def attend(self, q: Any, k: Any, v: Any, seen: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    def attend_causally(self, q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True
        )[0]


def load(*, is_simulated: bool) -> Transformer:
    """Return the model for a pool's driver. On a GPU this takes seconds."""
    if is_simulated:
        return Transformer(SIMULATED, None if torch is None else "cpu")
    if torch is None:
        raise SystemExit("on a GPU this example needs torch: pip install torch")
    model = Transformer(ON_GPU, "cuda")
    torch.cuda.synchronize()
    return model
