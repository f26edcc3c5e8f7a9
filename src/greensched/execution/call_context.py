"""The context of a blocking call: its stream and SMs, for libraries with a current stream.

`p.run` makes the partition's green context current. A library that keeps a current stream puts its
work there instead, so an integration registers a hook, which wraps each call. And code that sizes a
grid asks how many SMs it has.
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
    """Where a call of `p.run`, or a block of an integration, works.

    Attributes:
        stream: work on it is ordered and waited for with the partition's.
        device_id: the ordinal of its device.
        sm_count: the SMs it has.
        is_simulated: the stream exists in greensched only: no library can use it.
    """

    stream: Stream
    device_id: int
    sm_count: int
    is_simulated: bool

    @contextmanager
    def entered(self) -> Iterator[CallContext]:
        """Make `current_call()` return this in a block, for the calling task and thread."""
        token = running_call.set(self)
        try:
            yield self
        finally:
            running_call.reset(token)


#: Of the calling task and thread.
running_call: Final[ContextVar[CallContext | None]] = ContextVar("greensched_call", default=None)

#: Called at each `p.run` with the call's context and arguments; returns a wrapper, or None.
Hook = Callable[[CallContext, Sequence[object]], CallWrapper | None]
hooks: Final[list[Hook]] = []


def current_call() -> CallContext | None:
    """Return the call of `p.run`, or the integration's block, that this code runs in, or None.

    For code that sizes its grids by the number of SMs. It is the task's and the thread's own.
    """
    return running_call.get()


def call_context(where: object = None) -> CallContext:
    """Return the context whose stream a library is to be given.

    Args:
        where: a `Partition`, for its launches and copies; a `CallContext`; None: the current one.

    Raises:
        InvalidRequest: `where` is none of these, no call runs, or the call is simulated: a library
            would crash with its stream.
        WouldBlock: as `Partition.stream`.
    """
    call = running_call.get() if where is None else getattr(where, "call", where)
    if not isinstance(call, CallContext):
        raise InvalidRequest(
            "no call runs here: give the partition, or ask inside p.run"
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
    """Have a library's state set around each call of `p.run` from now on, in every pool.

    Args:
        hook: called at each `p.run`, on the caller's thread, with the call's context and arguments.
            It returns a function that calls the call, on the partition's thread; or None: this call
            does not concern it. What it raises, `p.run` raises. Where it returned a function the
            arguments live until the call's stream is done. Registered again, it counts once.

    Raises:
        InvalidRequest: it is not callable.
    """
    if not callable(hook):
        raise InvalidRequest(f"a call hook is a function, not {type(hook).__name__}: {hook!r}")
    if hook not in hooks:
        hooks.append(hook)
