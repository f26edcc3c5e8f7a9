"""A lease's blocking calls, on its executor's worker thread, and values kept by the executor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import CO_COROUTINE
from types import FunctionType
from typing import Any, TypeVar

from greensched._asynclib import is_coroutine_function
from greensched.device.buffers import Buffer, PinnedBuffer
from greensched.device.tickets import TicketedStream
from greensched.errors import InvalidRequest, WouldBlock
from greensched.execution.call_context import CallWrapper, hooks
from greensched.execution.jobs import Job
from greensched.execution.lease import Lease
from greensched.execution.submission import Dependencies

T = TypeVar("T")


def submit_call(
    lease: Lease, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Job[T]:
    """See `Partition.run`."""
    # Recognise the usual case without a call: a plain function that is not a coroutine function.
    if type(fn) is not FunctionType or fn.__dict__ or fn.__code__.co_flags & CO_COROUTINE:
        check_blocking(fn)
    stream, poller = lease.executor.call_stream, lease.poller
    if not lease.has_room(stream):
        raise WouldBlock("too many calls are in flight: `await p.drain()` first")
    values = (*args, *kwargs.values()) if kwargs else args
    uses = [(a, True) for a in values if isinstance(a, (Buffer, PinnedBuffer))] if values else ()
    for buffer, _ in uses:
        buffer.check(lease.ordinal)
    where = lease.call_context
    wrappers: list[CallWrapper] = []
    if hooks:
        wrappers = [wrap for hook in hooks if (wrap := hook(where, values)) is not None]
    call: Callable[[], T] = partial(fn, *args, **kwargs) if values else fn
    for wrap in wrappers:
        call = partial(wrap, call)
    if uses:
        call = partial(_call_in_order, stream, lease.dependencies(stream, uses), call)
    name = getattr(fn, "__name__", None)  # an object may have any value there
    ticket = stream.issue()
    for buffer, write in uses:
        buffer.record_use(stream, ticket, write=write)
    job: Job[T] = Job(stream, ticket, name if isinstance(name, str) else "run", lease)
    if wrappers:  # the libraries' work may outlast the call
        stream.keep(ticket, values)
    lease.has_called = True
    poller.watch(stream)
    lease.executor.calls.submit(call, job, poller, where)
    if lease.recorder.notes_jobs:
        lease.record(job)
    return job


def _call_in_order(stream: TicketedStream, dependencies: Dependencies, call: Callable[[], T]) -> T:
    """Call a function after the work that uses its buffers."""
    dependencies.order_before(stream)
    return call()


def local(lease: Lease, factory: Callable[[], T]) -> Job[T]:
    """See `Partition.local`."""
    check_blocking(factory)
    values = lease.executor.locals
    try:
        is_made = values.has(factory)
    except TypeError:
        raise InvalidRequest(f"{factory!r} is not hashable: give a function") from None
    if not is_made:
        return submit_call(lease, values.get, (factory,), {})
    # Ticket 0 is always reached.
    job: Job[T] = Job(lease.executor.call_stream, 0, "local", lease)
    job._set_result(values.get(factory))
    return job


def keep_alive(lease: Lease, objects: tuple[object, ...]) -> Job[None]:
    """See `Partition.keep_alive`."""
    lease.check_capture()
    stream = lease.launch_stream
    return lease.submit("keep_alive", lambda ticket: stream.keep(ticket, objects))


def check_blocking(fn: object) -> None:
    """Refuse objects that the worker thread cannot call.

    Raises:
        InvalidRequest: It is not callable, or is a coroutine function.
    """
    if not callable(fn):
        raise InvalidRequest(f"p.run takes a function, not {type(fn).__name__}: {fn!r}")
    if is_coroutine_function(fn):
        raise InvalidRequest(
            f"{fn!r} is a coroutine function: await it here; p.run calls blocking functions"
        )
