"""What one pass of a model computes: the next token of sequences, and pieces of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

#: Pieces of prompts that one pass can read.
MAX_PIECES = 4
#: Passes of one set of graphs that may be submitted at a time.
AHEAD = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a prompt that a pass reads into a slot, behind those read before."""

    slot: int
    tokens: Sequence[int]
    start: int
    #: Whether the prompt ends here: then the pass returns the first token of its answer.
    is_last: bool
    #: 0: the most probable token; larger: tokens are drawn, more evenly.
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass: the slots that get one more token, then pieces of at most MAX_PIECES prompts."""

    slots: Sequence[int] = ()
    pieces: Sequence[Piece] = field(default=())

    @property
    def rows(self) -> int:
        """The tokens that the pass computes."""
        return len(self.slots) + sum(len(piece.tokens) for piece in self.pieces)


class Answer(Protocol):
    """What a submitted pass computes."""

    def wait(self) -> None:
        """Block until the pass has ended."""

    def tokens(self) -> list[int]:
        """Return the next token of each slot and ended prompt, once the pass has ended.

        They are there until `AHEAD` further passes are submitted.
        """


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model, and of its cache of keys and values."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    mlp: int = 14336
    vocabulary: int = 128_256
    rope_theta: float = 500_000.0
    #: The most sequences at a time, and the most tokens of each.
    slots: int = 64
    context: int = 1536
    #: Sequences of the graphs of a decode step; tokens of those that read a prompt.
    decode_sizes: tuple[int, ...] = (8, 16, 24, 32, 40, 48, 64)
    prefill_sizes: tuple[int, ...] = tuple(range(128, 1281, 128))
