"""Handles that outlive the pools of a process: green contexts, their streams, and the splits.

A library keeps the address of a stream for as long as it keeps memory that was used there. torch
records an event on that stream when it frees such memory, CuPy frees memory in its order: after
the pool has closed, or at the end of the interpreter, and the process aborts where the stream is
gone. So an executor destroys neither its streams nor its green context. They are kept here, and the
next executor over the same SMs has them, also of a later pool.

That costs no device memory, either: driver 580 takes 4 of a green context's 5 MiB back only with
the primary context (docs/measurements/h200-580/stuck-and-lost.json).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from greensched.driver.types import ContextHandle, GreenHandle, ResourceHandle, StreamHandle

T = TypeVar("T")

#: A green context of a device: whether its split is fine, its cells, and whether its work queues
#: are balanced. Cells of one number are the same SMs in each pool, because the split is kept.
ContextKey = tuple[bool, int, bool]
#: The result of a split: the groups, and the remainder (None: no SM is left over).
Cut = tuple[list[ResourceHandle], ResourceHandle | None]


class KeptContext:
    """A green context that is never destroyed, and its streams.

    Args:
        green: the driver's green context. It retains the primary context.
        handle: the same, as a context that can be current.
    """

    __slots__ = ("green", "handle", "streams")

    def __init__(self, green: GreenHandle, handle: ContextHandle) -> None:
        self.green = green
        self.handle = handle
        #: With their priorities, the oldest first.
        self.streams: dict[StreamHandle, int] = {}


class KeptHandles:
    """The kept handles of one driver, of which a process has one.

    What an executor uses is not in here. From any thread: each method is one operation of a
    dictionary. The process is a part of each key, because CUDA does not survive a fork: a forked
    child finds nothing of its parent's.
    """

    def __init__(self) -> None:
        self._contexts: dict[tuple[int, int, ContextKey], KeptContext] = {}
        self._cuts: dict[tuple[int, int, int, bool], Cut] = {}

    def take(self, device: int, key: ContextKey) -> KeptContext | None:
        """Return a context that nothing uses, for one user; None: there is none."""
        return self._contexts.pop((os.getpid(), device, key), None)

    def put(self, device: int, key: ContextKey, context: KeptContext) -> None:
        """Keep a context, all of whose work is done, for the next user."""
        self._contexts[os.getpid(), device, key] = context

    def cut(self, device: int, minimum: int, fine: bool, split: Callable[[], Cut]) -> Cut:
        """Return the outputs of the one split of a device by these numbers; the first time, split.

        A second split has the same sizes; that it has the same SMs is not documented.
        """
        key = os.getpid(), device, minimum, fine
        if key not in self._cuts:
            self._cuts.setdefault(key, split())
        return self._cuts[key]

    def forget(self, device: int) -> None:
        """Have no executor use a context of a lost device again; the contexts stay as they are."""
        for key in tuple(self._contexts):
            if key[1] == device:
                self._contexts.pop(key, None)

    def count(self, device: int) -> Counter[str]:
        """Return how many contexts and streams of a device are kept, by the names of `live`."""
        contexts = [kept for key, kept in tuple(self._contexts.items()) if key[1] == device]
        streams = sum(len(context.streams) for context in contexts)
        return Counter({"green context": len(contexts), "stream": streams})
