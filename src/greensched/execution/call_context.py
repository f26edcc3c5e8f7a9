"""What runs a blocking call where, for libraries that have a current stream of their own.

A call of `p.run` has the partition's green context current, which is not enough for a library that
keeps a current stream: its work goes there. So an integration may stand around every call, and
whoever sizes a grid asks how many SMs there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from greensched.device.streams import Stream
from greensched.errors import InvalidRequest

#: Calls what it is given, with a library's current stream set, and returns what that returns.
Around = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True, slots=True)
class CallContext:
    """Where a call of `p.run`, or a block of an integration, works.

    Attributes:
        stream: its work goes there to be ordered and waited for with the partition's.
        device: the ordinal of its device.
        sm_count: the SMs it has.
        is_simulated: there is no such stream outside greensched: no library can be given it.
    """

    stream: Stream
    device: int
    sm_count: int
    is_simulated: bool

    @contextmanager
    def entered(self) -> Iterator[CallContext]:
        """A block in which `current_call()` is this. Of the calling task and thread alone."""
        token = running_call.set(self)
        try:
            yield self
        finally:
            running_call.reset(token)


#: Of the calling task and thread.
running_call: Final[ContextVar[CallContext | None]] = ContextVar("greensched_call", default=None)

#: Asked at each submission: told the call and its arguments, it says what to do around it.
Hook = Callable[[CallContext, Sequence[object]], Around | None]
#: Asked at each submission.
hooks: Final[list[Hook]] = []


def current_call() -> CallContext | None:
    """The call of `p.run`, or the block of an integration, that this code runs in; None: neither.

    For code that sizes its grids by the SMs there are. It is the task's and the thread's own.
    """
    return running_call.get()


def call_context(where: object = None) -> CallContext:
    """The call that a library is to be given the stream of.

    Args:
        where: a `Partition`, for its launches and copies; a `CallContext`; None: the current one.

    Raises:
        InvalidRequest: none of these, no call, or a simulated one: a library would crash with its
            stream.
        WouldBlock: as `Partition.stream`.
    """
    call = running_call.get() if where is None else getattr(where, "call", where)
    if not isinstance(call, CallContext):
        raise InvalidRequest(
            "no call runs here: give the partition, or ask inside p.run"
            if where is None
            else f"{where!r} is no partition"
        )
    if call.is_simulated:
        raise InvalidRequest(
            "this partition is of a simulated GPU, which has no stream for other libraries: "
            "have them work on the CPU there"
        )
    return call


def register_call_hook(hook: Hook) -> None:
    """Has a library's own state set around every call of `p.run` from now on, in every pool.

    Args:
        hook: called at each `p.run`, on the caller's thread, with the call and its arguments. It
            returns what calls the function, on the partition's thread, or None: this one does not
            concern it. What it raises there is raised by `p.run`. Where it is concerned the
            arguments live until the call's stream is done. Given again, it counts once.

    Raises:
        InvalidRequest: it cannot be called.
    """
    if not callable(hook):
        raise InvalidRequest(f"{hook!r} is not to be called")
    if hook not in hooks:
        hooks.append(hook)
