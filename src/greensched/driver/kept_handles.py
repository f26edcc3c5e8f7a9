"""Handles that outlive the pools of a process: green contexts, their streams, and splits.

A library keeps a stream's address as long as it keeps memory that was used there. When it frees
such memory, torch records an event on that stream and CuPy frees in the stream's order. This may be
after the pool has closed, or at the interpreter's exit, and the process aborts if the stream is
gone. So an executor destroys neither its streams nor its green context. They are kept here for the
next executor over the same SMs, even in a later pool.

This costs no device memory: driver 580 frees 4 of a green context's 5 MiB only with the primary
context (docs/measurements/h200-580/stuck-and-lost.json).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

from greensched.driver.types import ContextHandle, GreenHandle, ResourceHandle, StreamHandle

#: Identifies a green context of a device: whether its split is fine, its cells, and whether its
#: work queues are balanced. Equal cells are the same SMs in each pool, because the split is kept,
#: too.
ContextKey = tuple[bool, int, bool]
#: The result of a split: the groups, and the remainder or None.
Cut = tuple[list[ResourceHandle], ResourceHandle | None]


class KeptContext:
    """A green context that is never destroyed, with its streams.

    Args:
        green: The driver's green context. It retains the primary context.
        handle: The handle by which the green context is made current.
    """

    __slots__ = ("green", "handle", "streams")

    def __init__(self, green: GreenHandle, handle: ContextHandle) -> None:
        self.green = green
        self.handle = handle
        #: Streams with their priorities, oldest first.
        self.streams: dict[StreamHandle, int] = {}


class KeptHandles:
    """The kept handles of a driver, of which each process has one.

    Handles that an executor uses are not in here. From any thread: each method is one operation of
    a dictionary. Each key contains the process, because CUDA does not survive a fork: a forked
    child finds no handle of its parent.
    """

    def __init__(self) -> None:
        self._contexts: dict[tuple[int, int, ContextKey], KeptContext] = {}
        self._cuts: dict[tuple[int, int, int, bool], Cut] = {}

    def take(self, device: int, key: ContextKey) -> KeptContext | None:
        """Return an unused context for one user, or None."""
        return self._contexts.pop((os.getpid(), device, key), None)

    def put(self, device: int, key: ContextKey, context: KeptContext) -> None:
        """Keep a context for the next user. All its work must be done."""
        self._contexts[os.getpid(), device, key] = context

    def cells(self, device: int, like: ContextKey) -> list[int]:
        """Return the cells of unused contexts whose key equals `like` in all but the cells."""
        fine, _, balanced = like
        return [
            cells
            for pid, ordinal, (is_fine, cells, is_balanced) in tuple(self._contexts)
            if (pid, ordinal, is_fine, is_balanced) == (os.getpid(), device, fine, balanced)
        ]

    def cut(self, device: int, minimum: int, fine: bool, split: Callable[[], Cut]) -> Cut:
        """Return the outputs of a device's split by these numbers; split only the first time.

        A second split has the same sizes, but whether it has the same SMs is not documented.
        """
        key = os.getpid(), device, minimum, fine
        if key not in self._cuts:
            self._cuts.setdefault(key, split())
        return self._cuts[key]

    def forget(self, device: int) -> None:
        """Keep executors from using contexts of a lost device. The contexts stay as they are."""
        for key in tuple(self._contexts):
            if key[1] == device:
                self._contexts.pop(key, None)

    def count(self, device: int) -> Counter[str]:
        """Return how many contexts and streams of a device are kept, named as in `live`."""
        contexts = [kept for key, kept in tuple(self._contexts.items()) if key[1] == device]
        streams = sum(len(context.streams) for context in contexts)
        return Counter({"green context": len(contexts), "stream": streams})
