"""The context of a blocking call: its stream and SMs, for libraries that keep a current stream.

`p.run` makes the partition's green context current. A library that keeps a current stream would
still submit there, so its integration registers a hook that wraps each call. Code that sizes
grids also reads its number of SMs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from greensched.device.streams import Stream
from greensched.errors import InvalidRequest

#: Calls its argument with a library's current stream set, and returns its result.
CallWrapper = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True, slots=True)
class CallContext:
    """Where the work of a `p.run` call, or of an integration's block, goes.

    Attributes:
        stream: The stream; its work is ordered with the partition's and waited for.
        device_id: The ordinal of the device.
        sm_count: The number of SMs.
        is_simulated: Whether the stream exists only in greensched, so that no library can use it.
    """

    stream: Stream
    device_id: int
    sm_count: int
    is_simulated: bool

    @contextmanager
    def entered(self) -> Iterator[CallContext]:
        """Make `current_call()` return this object in a block, for the calling task and thread."""
        token = running_call.set(self)
        try:
            yield self
        finally:
            running_call.reset(token)


#: The call context of the calling task and thread.
running_call: Final[ContextVar[CallContext | None]] = ContextVar("greensched_call", default=None)

#: Called at each `p.run` with the call's context and arguments; returns a wrapper, or None.
Hook = Callable[[CallContext, Sequence[object]], CallWrapper | None]
hooks: Final[list[Hook]] = []


def current_call() -> CallContext | None:
    """Return the `p.run` call, or the integration's block, in which this code runs, or None.

    Code that sizes grids reads its number of SMs here. Each task and thread has its own.
    """
    return running_call.get()


def call_context(where: object = None) -> CallContext:
    """Return the context whose stream a library should use.

    Args:
        where: A `Partition`, for its launch stream; a `CallContext`; or None for the current one.

    Raises:
        InvalidRequest: `where` is invalid, no call runs here, or the stream is simulated, so that
            a library would crash with it.
        WouldBlock: As for `Partition.stream`.
    """
    call = running_call.get() if where is None else getattr(where, "call", where)
    if not isinstance(call, CallContext):
        raise InvalidRequest(
            "no p.run is running here: give the partition, or call this inside p.run"
            if where is None
            else f"give a Partition or a CallContext, not {type(where).__name__}: {where!r}"
        )
    if call.is_simulated:
        raise InvalidRequest(
            "this partition is of a simulated GPU, which has no stream for other libraries: "
            "have them work on the CPU there"
        )
    return call


def register_call_hook(hook: Hook) -> None:
    """Set a library's state around each later call of `p.run`, in every pool.

    Args:
        hook: Called at each `p.run`, on the caller's thread, with the call's context and arguments.
            It returns a function that runs the call on the partition's thread, or None if the call
            does not concern it. `p.run` raises the hook's exceptions. If it returned a function,
            the arguments live until the call's stream is done. A hook is registered only once.

    Raises:
        InvalidRequest: `hook` is not callable.
    """
    if not callable(hook):
        raise InvalidRequest(f"a call hook is a function, not {type(hook).__name__}: {hook!r}")
    if hook not in hooks:
        hooks.append(hook)
