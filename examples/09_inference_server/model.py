"""Run a decoder in torch, as CUDA graphs: Llama-3-8B's shape, or a model of Hugging Face.

Keys and values lie in slots, one for each sequence, and so do the newest token, the length and the
temperature of each sequence: a pass reads and writes all of them on the device. So a decode step is
one graph: the numbers of the slots go up, the new tokens come down, and nothing else moves.

A graph runs on the SMs on which it was captured. `Graphs` are those of one set of SMs; keep them
with `p.local`.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from batch import AHEAD, MAX_PIECES, Batch, Shape
from products import FastestProducts
from torch.nn import functional as nn

#: Called for each layer with queries, keys and values: (tokens, heads, head size).
Attend = Callable[[int, Any, Any, Any], Any]
#: Temperatures go up as whole numbers of this size.
MICRO = 1e-6
EPSILON = 1e-5


class Decoder(Protocol):
    """The layers of a model."""

    shape: Shape

    def forward(self, tokens: Any, places: Any, attend: Attend) -> Any:
        """Return the normalised states of these tokens, (tokens, width)."""

    def logits(self, states: Any) -> Any:
        """Return the scores of all tokens of the vocabulary."""


class Llama:
    """The layers of Llama 3, with random weights.

    Args:
        shape: its sizes.
        device: torch's device.
        dtype: of the weights, and of the cache.
    """

    def __init__(self, shape: Shape, device: str, dtype: Any) -> None:
        self.shape = shape
        width, heads, size = shape.width, shape.heads + 2 * shape.kv_heads, shape.head_size
        generator = torch.Generator(device).manual_seed(1)

        def weights(rows: int, columns: int) -> Any:
            made = torch.empty(rows, columns, device=device, dtype=dtype)
            return made.normal_(0, columns**-0.5, generator=generator)

        self.embedding = weights(shape.vocabulary, width)
        self.head = weights(shape.vocabulary, width)
        self.norm = torch.ones(width, device=device, dtype=dtype)
        self.layers = [
            (
                weights(heads * size, width),
                weights(width, shape.heads * size),
                weights(2 * shape.mlp, width),
                weights(width, shape.mlp),
            )
            for _ in range(shape.layers)
        ]
        powers = torch.arange(0, size, 2, device=device, dtype=torch.float64) / size
        places = torch.arange(shape.context, device=device, dtype=torch.float64)
        angles = torch.outer(places, shape.rope_theta**-powers).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, tokens: Any, places: Any, attend: Attend) -> Any:
        shape, rows = self.shape, len(tokens)
        rotated = shape.heads + shape.kv_heads
        cos, sin = self.cos[places][:, None], self.sin[places][:, None]
        x = self.embedding[tokens]
        for layer, (mix, out, up, down) in enumerate(self.layers):
            qkv = nn.linear(self._normed(x), mix).view(rows, -1, shape.head_size)
            qk, v = qkv[:, :rotated], qkv[:, rotated:]
            first, second = qk.chunk(2, -1)
            qk = torch.addcmul(qk * cos, torch.cat((-second, first), -1), sin)
            found = attend(layer, qk[:, : shape.heads], qk[:, shape.heads :], v)
            x.addmm_(found.reshape(rows, -1), out.t())
            gate, value = nn.linear(self._normed(x), up).chunk(2, -1)
            x.addmm_(nn.silu(gate).mul_(value), down.t())
        return self._normed(x)

    def logits(self, states: Any) -> Any:
        return nn.linear(states, self.head)

    def _normed(self, x: Any) -> Any:
        return nn.rms_norm(x, (x.shape[-1],), self.norm, EPSILON)


class HuggingFace:
    """A causal language model of transformers; it has to call the attention that it is told to.

    Args:
        name: a folder with a model; the name of one on the hub, for its configuration; or a type
            of model such as `qwen3`, for the default configuration. Only a folder's weights are
            read; others are random.
        device: torch's device.
        dtype: of the weights, and of the cache.
        sizes: of the cache and the graphs; the others are the configuration's.
    """

    def __init__(self, name: str, device: str, dtype: Any, **sizes: Any) -> None:

        from transformers import (
            CONFIG_MAPPING,
            AttentionInterface,
            AutoConfig,
            AutoModelForCausalLM,
        )

        AttentionInterface.register("slots", self._attention)
        known = name in CONFIG_MAPPING
        config = AutoConfig.for_model(name) if known else AutoConfig.from_pretrained(name)
        options = {"attn_implementation": "slots", "dtype": dtype}
        with torch.device(device):
            self._model = (
                AutoModelForCausalLM.from_pretrained(name, **options)
                if Path(name).is_dir()
                else AutoModelForCausalLM.from_config(config, **options)
            ).eval()
        heads = config.num_attention_heads
        self.shape = Shape(
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
            **sizes,
        )
        self._running = threading.local()

    def forward(self, tokens: Any, places: Any, attend: Attend) -> Any:
        self._running.attend = attend
        found = self._model.base_model(
            input_ids=tokens[None], position_ids=places[None], use_cache=False
        )
        return found.last_hidden_state[0]

    def logits(self, states: Any) -> Any:
        return self._model.get_output_embeddings()(states)

    def _attention(self, module: Any, q: Any, k: Any, v: Any, *_: Any, **more: Any) -> Any:
        self._check(more)
        q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))
        return self._running.attend(module.layer_idx, q, k, v)[None], None

    def _check(self, asked: dict[str, Any]) -> None:
        """Raise ValueError if the model needs what `Attention` would silently leave out."""
        usual = self.shape.head_size**-0.5
        refused = {
            name: asked[name] for name in ("softcap", "s_aux") if asked.get(name) is not None
        }
        if (window := asked.get("sliding_window") or self.shape.context) < self.shape.context:
            refused["sliding_window"] = window
        if not math.isclose(scaling := asked.get("scaling") or usual, usual):
            refused["scaling"] = scaling
        if refused:
            raise ValueError(
                f"the model's attention has {refused}, which attention to slots does not support: "
                "choose another model"
            )


class Model:
    """A decoder with the state of its sequences. Several threads may run passes over other slots.

    Args:
        decoder: its layers.
        device: torch's device: on `cpu` passes run without graphs.
        dtype: of the cache.
    """

    def __init__(self, decoder: Decoder, device: str, dtype: Any) -> None:
        self.decoder, self.shape, self.device = decoder, decoder.shape, device
        shape = self.shape
        # One slot more: what fills up a graph is computed there.
        self.spare = shape.slots
        places = (shape.slots + 1) * shape.context
        size = (shape.layers, 2, places, shape.kv_heads, shape.head_size)
        self.cache = torch.zeros(size, device=device, dtype=dtype)
        self.newest = torch.zeros(shape.slots + 1, device=device, dtype=torch.int64)
        self.length = torch.zeros(shape.slots + 1, device=device, dtype=torch.int64)
        self.temperature = torch.zeros(shape.slots + 1, device=device, dtype=torch.float32)

    # -- graphs, each a function for `p.local` ----------------------------------------------------

    def decode_graphs(self) -> Graphs:
        """Make the graphs of decode steps."""
        return Graphs(self, [(rows, 0) for rows in self.shape.decode_sizes])

    def prefill_graphs(self) -> Graphs:
        """Make the graphs that read a prompt."""
        return Graphs(self, [(0, length) for length in self.shape.prefill_sizes])

    def all_graphs(self) -> Graphs:
        """Make the graphs of both."""
        shape = self.shape
        decode = [(rows, 0) for rows in shape.decode_sizes]
        return Graphs(self, [*decode, *((0, length) for length in shape.prefill_sizes)])

    def fused_graphs(self, budget: int) -> Graphs:
        """Make the graphs of decode steps, alone and with `budget` tokens in all."""
        sizes = [rows for rows in self.shape.decode_sizes if rows < budget]
        decode = [(rows, 0) for rows in self.shape.decode_sizes]
        return Graphs(self, [*decode, *((rows, budget - rows) for rows in (0, *sizes))])

    # -- a pass -----------------------------------------------------------------------------------

    def compute(self, inputs: Inputs, generator: Any) -> Any:
        """Put the work of a pass on the current stream; return the new tokens, on the device."""
        slots, rows, length = inputs.slots, inputs.rows, inputs.length
        tokens, places, at = self.newest[slots], self.length[slots], slots * self.shape.context
        at = at + places
        if length:
            tokens = torch.cat((tokens, inputs.tokens))
            places = torch.cat((places, inputs.places))
            at = torch.cat((at, inputs.at))
        attention = Attention(self, inputs)

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            keys, values = self.cache[layer]
            keys[at], values[at] = k, v
            return attention(q, keys, values)

        states = self.decoder.forward(tokens, places, attend)
        self.length[slots] += 1
        if length:
            states = torch.cat((states[:rows], states[rows + inputs.last]))
            self.temperature[inputs.ending] = inputs.temperature * MICRO
            self.length[inputs.ending] = inputs.used
            slots = torch.cat((slots, inputs.ending))
        self.length[self.spare].zero_()
        chosen = sample(self.decoder.logits(states), self.temperature[slots], generator)
        self.newest[slots] = chosen
        return chosen


class Inputs:
    """The numbers that go up for a pass, as parts of one array of numpy or torch.

    Args:
        array: int64, of at least `size(rows, length)` numbers.
        rows: the slots that get a token.
        length: the tokens of prompts that are read.
    """

    def __init__(self, array: Any, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        parts = iter(np.cumsum([0, *self._lengths(rows, length)]).tolist())
        spans = [slice(*span) for span in itertools.pairwise(parts)]
        self.slots = array[spans[0]]
        if length:
            #: Tokens of prompts, their places in them, and in the cache.
            self.tokens, self.places, self.at = (array[span] for span in spans[1:4])
            #: Of each piece: where its rows start, and of the last one where they end.
            self.starts = array[spans[4]]
            #: Of each piece: the first place of its slot, how many places are in use with it, its
            #: last row, its slot if its prompt ends, and its temperature.
            self.begins, self.used, self.last, self.ending, self.temperature = (
                array[span] for span in spans[5:]
            )

    @staticmethod
    def _lengths(rows: int, length: int) -> list[int]:
        pieces = [MAX_PIECES + 1, *[MAX_PIECES] * 5]
        return [rows, *([length] * 3 + pieces if length else [])]

    @classmethod
    def size(cls, rows: int, length: int) -> int:
        """Return how many numbers these are."""
        return sum(cls._lengths(rows, length))

    def fill(self, batch: Batch, spare: int, context: int) -> None:
        """Describe a batch; what is left of the graph's size is computed in the spare slot."""
        self.slots[:] = spare
        self.slots[: len(batch.slots)] = batch.slots
        if not self.length:
            return
        self.tokens[:] = self.places[:] = 0
        self.at[:] = spare * context
        self.begins[:], self.used[:], self.last[:] = spare * context, 0, 0
        self.ending[:], self.temperature[:] = spare, 0
        row = 0
        for number, piece in enumerate(batch.pieces):
            end, length = row + len(piece.tokens), piece.start + len(piece.tokens)
            begin = piece.slot * context
            self.tokens[row:end] = piece.tokens
            self.places[row:end] = np.arange(piece.start, length)
            self.at[row:end] = np.arange(begin + piece.start, begin + length)
            self.starts[number], self.begins[number], self.used[number] = row, begin, length
            if piece.is_last:
                self.last[number], self.ending[number] = end - 1, piece.slot
                self.temperature[number] = round(piece.temperature / MICRO)
            row = end
        self.starts[len(batch.pieces) :] = row


def sample(logits: Any, temperature: Any, generator: Any) -> Any:
    """Draw a token for each row; at a temperature of 0 the most probable one.

    The largest quotient of probability and exponential noise is a draw by the probabilities.
    """
    scores = logits.float()
    noise = torch.empty_like(scores).exponential_(generator=generator).log_()
    return (scores - noise * temperature[:, None]).argmax(-1)


class Attention:
    """Attention of a pass to the keys and values of its slots.

    On a GPU FlashAttention reads as many keys as a sequence has, without a mask. On a CPU, for
    tests, a mask hides the others.
    """

    def __init__(self, model: Model, inputs: Inputs) -> None:
        slots, context = inputs.slots, model.shape.context
        self._context, self._rows = context, inputs.rows
        starts = torch.arange(len(slots) + 1, device=slots.device)
        self._kinds = []
        if inputs.rows:
            decode = (starts, slots * context, model.length[slots] + 1)
            self._kinds.append((slice(0, inputs.rows), 1, self._indices(*decode)))
        if inputs.length:
            prefill = (inputs.starts, inputs.begins, inputs.used)
            behind = slice(inputs.rows, inputs.rows + inputs.length)
            self._kinds.append((behind, inputs.length, self._indices(*prefill)))

    @staticmethod
    def _indices(starts: Any, begins: Any, used: Any) -> tuple[Any, Any, Any]:
        begins = torch.cat((begins, begins[:1]))  # one more, which is not read: `used` is
        return starts.int(), begins.int(), used.int()

    def __call__(self, q: Any, keys: Any, values: Any) -> Any:
        found = [
            self._attend(q[rows], keys, values, most, *indices)
            for rows, most, indices in self._kinds
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _attend(
        self, q: Any, keys: Any, values: Any, most: int, starts: Any, begins: Any, used: Any
    ) -> Any:
        """Attend causally: the last query of a piece sees all `used` keys."""
        if q.is_cuda:
            flash = torch.ops.aten._flash_attention_forward
            lengths = most, self._context
            found = flash(
                q, keys, values, starts, begins, *lengths, 0.0, True, False, seqused_k=used
            )
            return found[0]
        out = torch.zeros_like(q)
        ends = starts[1:].tolist()
        for first, end, begin, length in zip(
            starts.tolist(), ends, begins.tolist(), used.tolist(), strict=False
        ):
            if end > first:
                seen = slice(begin, begin + length)
                mask = torch.ones(end - first, length, dtype=torch.bool).tril(length - end + first)
                out[first:end] = nn.scaled_dot_product_attention(
                    *(part.transpose(0, 1) for part in (q[first:end], keys[seen], values[seen])),
                    attn_mask=mask,
                    enable_gqa=True,
                ).transpose(0, 1)
        return out


#: Captures are one at a time: torch registers generators and memory with each.
_capturing = threading.Lock()


class Graphs:
    """The graphs of a model on one set of SMs, each for a number of slots and of prompts' tokens.

    Make and use it where these SMs' stream is torch's current one. At most `AHEAD` passes may be
    submitted at a time: each has arrays of its own for what goes up and comes down.

    Args:
        model: the model.
        sizes: slots and tokens of each graph.
    """

    def __init__(self, model: Model, sizes: Sequence[tuple[int, int]]) -> None:
        self._model = model
        most = max(Inputs.size(*size) for size in sizes)
        width = max(rows for rows, _ in sizes) + MAX_PIECES
        self._inputs = torch.empty(most, dtype=torch.int64, device=model.device)
        self._chosen = torch.zeros(width, dtype=torch.int64, device=model.device)
        self._answers = itertools.cycle([Answer(most, width, model.device) for _ in range(AHEAD)])
        self._sizes = sorted(sizes, key=sum)
        self._generator = torch.Generator(model.device)
        self._graphs: dict[tuple[int, int], Any] = {}
        if model.device != "cpu":
            pool = torch.cuda.graph_pool_handle()
            with _capturing, FastestProducts():
                # The largest first: the others fit into its memory.
                for size in reversed(self._sizes):
                    self._graphs[size] = self._capture(size, pool)

    def compute(self, batch: Batch) -> list[int]:
        """Compute a batch and wait for it; return the next token of each slot and ended prompt."""
        answer = self.launch(batch)
        answer.wait()
        return answer.tokens()

    def launch(self, batch: Batch) -> Answer:
        """Submit a batch; do not wait for it."""
        size, answer = self._size_for(batch), next(self._answers)
        self._send(answer, batch, size)
        if size in self._graphs:
            self._graphs[size].replay()
        else:
            with torch.inference_mode():
                self._work(size)
        answer.receive(self._chosen)
        return answer

    def _size_for(self, batch: Batch) -> tuple[int, int]:
        """Return the size of the smallest graph that a batch fits."""
        length = batch.rows - len(batch.slots)
        return next(
            (rows, tokens)
            for rows, tokens in self._sizes
            if rows >= len(batch.slots) and tokens >= length and (tokens > 0) == (length > 0)
        )

    def _send(self, answer: Answer, batch: Batch, size: tuple[int, int]) -> None:
        """Describe a batch to a graph of this size."""
        sent = answer.describe(batch, size, self._model)
        self._inputs[: len(sent)].copy_(sent, non_blocking=True)

    def seconds(self, batch: Batch, times: int) -> float:
        """Return the seconds of a batch's graph on the device, on average."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        size = self._size_for(batch)
        self._send(next(self._answers), batch, size)
        began.record()
        for _ in range(times):
            self._graphs[size].replay()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3 / times

    def _work(self, size: tuple[int, int]) -> None:
        chosen = self._model.compute(Inputs(self._inputs, *size), self._generator)
        self._chosen[: len(chosen)].copy_(chosen)

    @torch.inference_mode()
    def _capture(self, size: tuple[int, int], pool: Any) -> Any:
        self._send(next(self._answers), Batch(), size)
        self._work(size)  # what libraries do at their first call cannot be captured
        stream = torch.cuda.current_stream()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        try:
            self._work(size)
        finally:
            graph.capture_end()
        return graph


class Answer:
    """What goes up for a pass, and the tokens that it computes, as `batch.Answer`.

    Args:
        most: numbers that go up.
        width: numbers that come down.
        device: of the graphs.
    """

    def __init__(self, most: int, width: int, device: str) -> None:
        self._sent, self._received = host_array(most, device), host_array(width, device)
        self._numbers = self._sent.numpy()
        self._ended = None if device == "cpu" else torch.cuda.Event()
        #: The places of the tokens among the numbers that come down.
        self._places: list[int] = []

    def describe(self, batch: Batch, size: tuple[int, int], model: Model) -> Any:
        """Return the numbers of a batch for a graph of this size."""
        Inputs(self._numbers, *size).fill(batch, model.spare, model.shape.context)
        ends = [size[0] + n for n, piece in enumerate(batch.pieces) if piece.is_last]
        self._places = [*range(len(batch.slots)), *ends]
        return self._sent[: Inputs.size(*size)]

    def receive(self, chosen: Any) -> None:
        """Have the tokens come down behind the pass."""
        self._received.copy_(chosen, non_blocking=True)
        if self._ended is not None:
            self._ended.record()

    def wait(self) -> None:
        if self._ended is not None:
            self._ended.synchronize()

    def tokens(self) -> list[int]:
        found = self._received.tolist()
        return [found[place] for place in self._places]


def host_array(size: int, device: str) -> Any:
    """Return memory of the host that a GPU reads and writes directly."""
    return torch.zeros(size, dtype=torch.int64, pin_memory=device != "cpu")


def load(name: str | None = None, *, device: str = "cuda", **sizes: Any) -> Model:
    """Return a model of Llama-3-8B's shape, or of Hugging Face. On a GPU this takes seconds."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    if name is None:
        decoder: Decoder = Llama(Shape(**sizes), device, dtype)
    else:
        decoder = HuggingFace(name, device, dtype, **sizes)
    model = Model(decoder, device, dtype)
    if device != "cpu":
        torch.cuda.synchronize(device)
    return model
