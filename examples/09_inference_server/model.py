"""A small transformer with random weights and a cache of keys and values, in torch or in numpy.

Its sequences live in slots of the cache. `prefill` reads a prompt into a slot; `step` gives one
more token for each of several slots at once. Both block, as a model's functions do.
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
    """What a model is like: sizes, all in numbers of elements."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    #: Sequences there can be at once, and tokens of each at most.
    slots: int
    context: int


#: What is served on a GPU: 1.2 thousand million parameters. And what is computed on a simulated
#: one, where the host does it, in so little time that the modelled time is what counts.
ON_GPU = Shape(layers=24, heads=16, width=2048, vocabulary=32_000, slots=24, context=4608)
SIMULATED = Shape(layers=4, heads=2, width=32, vocabulary=512, slots=12, context=256)

#: The time that a simulated GPU is told: of 32 thousand million parameters of 8 bits. A token is
#: two operations for each, at the 4.5e12 a second of an SM of an H200 that runs a large matrix
#: product; a pass reads each of them once.
PARAMETERS = 32e9
TOKEN_SM_NS = 2 * PARAMETERS / 4.5e3


def layer_cost(model: Transformer, _: int, x: Any, __: Any) -> Cost:
    """What a layer costs: its part of that, for the rows of x."""
    layers = model.shape.layers
    return Cost(sm_ns=len(x) * TOKEN_SM_NS / layers, dram_bytes=PARAMETERS / layers)


class Transformer:
    """The model. Different threads may be in it at once, each for slots of its own.

    Args:
        shape: its sizes.
        device: where torch shall have it; None: numpy has it, on the host.
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
        # Behind each slot's last token there is room for one that nobody reads: see `step`.
        size = (shape.slots, shape.heads, shape.context + 1, width // shape.heads)
        self.cache = [(self.on.zeros(*size), self.on.zeros(*size)) for _ in range(shape.layers)]

    def prefill(self, slot: int, prompt: list[int]) -> int:
        """Reads a prompt into a slot. Returns the token that comes next."""
        length = len(prompt)

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            """All three: (tokens, heads, size). Every token sees those before it, and itself."""
            keys, values = self.cache[layer]
            q, k, v = (a.swapaxes(0, 1) for a in (q, k, v))
            keys[slot, :, :length], values[slot, :, :length] = k, v
            return self.on.attend_causally(q, k, v).swapaxes(0, 1)

        x = self._forward(self.on.numbers(prompt), self.on.upto(length), attend)
        return self._next(x[-1:])[0]

    def step(self, sequences: dict[int, tuple[int, int]]) -> list[int]:
        """One more token for each sequence.

        All slots are computed, those without a sequence for nothing: at a place that nobody reads.

        Args:
            sequences: by its slot, the newest token and where it stands.

        Returns:
            The tokens that come next, in the same order.
        """
        slots, spare = range(self.shape.slots), (0, self.shape.context)
        given = self.on.numbers([sequences.get(slot, spare) for slot in slots])
        tokens, at, every = given[:, 0], given[:, 1], self.on.upto(len(slots))
        longest = 1 + max(place for _, place in sequences.values())
        seen = self.on.upto(longest)[None, :] <= at[:, None]

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            """All three: (slots, heads, size). A token sees what its own slot has, and itself."""
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
        """One layer: (tokens, width) to the same."""
        mix, out, up, down = self.layers[layer]
        rows, heads = len(x), self.shape.heads
        q, k, v = (normed(x) @ mix).reshape(rows, 3, heads, -1).swapaxes(0, 1)
        x = x + attend(layer, q, k, v).reshape(rows, -1) @ out
        return x + (normed(x) @ up).clip(0) @ down

    def _next(self, x: Any) -> list[int]:
        found: list[int] = (normed(x) @ self.scores).argmax(-1).tolist()
        return found


def normed(x: Any) -> Any:
    """Each row to length 1 per element."""
    return x / ((x * x).mean(-1)[:, None] + 1e-6) ** 0.5


class Numpy:
    """On the host, in double precision: the order of a sum changes no token."""

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
        """The values that the queries ask for, of those seen."""
        scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True), where=seen, out=0 * scores)
        return weights / weights.sum(-1, keepdims=True) @ v

    def attend_causally(self, q: Any, k: Any, v: Any) -> Any:
        return self.attend(q, k, v, np.tri(q.shape[-2], dtype=bool))


class Torch:
    """On a GPU in 16 bits, as models are served; on a CPU as numpy does it."""

    def __init__(self, device: str) -> None:
        kind = torch.bfloat16 if device == "cuda" else torch.float64
        self._here = {"device": device, "dtype": kind}
        self._device = device
        torch.manual_seed(1)

    def weights(self, rows: int, columns: int) -> Any:
        return torch.randn(rows, columns, **self._here) * rows**-0.5

    def zeros(self, *size: int) -> Any:
        return torch.zeros(size, **self._here)

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
    """The model for a pool's driver. Takes seconds on a GPU, and returns when all is there."""
    if is_simulated:
        return Transformer(SIMULATED, None if torch is None else "cpu")
    if torch is None:
        raise SystemExit("this example needs torch where there is a GPU: pip install torch")
    model = Transformer(ON_GPU, "cuda")
    torch.cuda.synchronize()
    return model
