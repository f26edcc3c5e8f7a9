"""Calls of a lease: blocking functions on its lane's own thread, and what outlives their code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from greensched._asynclib import is_coroutine_function
from greensched.device.buffers import Buffer, PinnedBuffer
from greensched.device.streams import Stream, TicketedStream
from greensched.errors import InvalidRequest, WouldBlock
from greensched.execution.call_context import Around, CallContext, hooks
from greensched.execution.jobs import Job
from greensched.execution.submission import Channel, Lagging, order_behind

T = TypeVar("T")


def run(
    channel: Channel, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Job[T]:
    """See `Partition.run`."""
    check_blocking(fn)
    runs, holding = channel.lane.runs, channel.holding
    if not channel.has_room(runs):
        raise WouldBlock("too many calls are in flight: `await p.drain()` first")
    given = (*args, *kwargs.values()) if kwargs else args
    uses = [(a, True) for a in given if isinstance(a, (Buffer, PinnedBuffer))] if given else ()
    for buffer, _ in uses:
        buffer.check(channel.ordinal)
    where = channel.in_calls or _in_calls(channel)
    arounds = _surroundings(where, given) if hooks else ()
    call: Callable[[], T] = partial(fn, *args, **kwargs) if given else fn
    for around in arounds:
        call = partial(around, call)
    if uses:
        call = partial(_behind, runs, *channel.others(runs, uses), call)
    name = getattr(fn, "__name__", None)  # an object may have anything there
    ticket = runs.issue()
    for buffer, write in uses:
        buffer.note(runs, ticket, write=write)
    job: Job[T] = Job(runs, ticket, name if isinstance(name, str) else "run", holding.failed)
    completion = holding.completion
    if arounds:  # what they put on the stream may outlast the call
        runs.keep(ticket, given)
        completion.when_reached(runs, ticket, runs.let_go)

    holding.expose()
    completion.watch(runs)
    holding.crew.run(call, job, completion, where)
    return job


def _surroundings(call: CallContext, given: Sequence[object]) -> list[Around]:
    """What the hooks want to do around a call, asked where it is submitted."""
    return [around for hook in hooks if (around := hook(call, given)) is not None]


def _behind(
    runs: TicketedStream, lagging: Lagging, behind: list[TicketedStream], call: Callable[[], T]
) -> T:
    """Makes a call behind others who use its buffers."""
    order_behind(runs, lagging, behind)
    return call()


def local(channel: Channel, factory: Callable[[], T]) -> Job[T]:
    """See `Partition.local`."""
    check_blocking(factory)
    belongings, holding = channel.holding.crew.belongings, channel.holding
    try:
        is_made = belongings.has(factory)
    except TypeError:
        raise InvalidRequest(f"{factory!r} is not hashable: give a function") from None
    if not is_made:
        return run(channel, belongings.get, (factory,), {})
    job: Job[T] = Job(channel.lane.runs, 0, "local", holding.failed)  # 0: always reached
    job.succeed(belongings.get(factory))
    return job


def keep(channel: Channel, things: tuple[object, ...]) -> Job[None]:
    """See `Partition.keep`."""
    channel.check_capture()
    track = channel.track
    job = channel.submit("keep", lambda ticket: track.keep(ticket, things))
    channel.holding.completion.when_reached(track, job.ticket, track.let_go)
    return job


def _in_calls(channel: Channel) -> CallContext:
    """What is current in every call of the lease, made for the first."""
    channel.in_calls = call_on(channel, channel.lane.runs.stream)
    return channel.in_calls


def call_on(channel: Channel, stream: Stream) -> CallContext:
    """What integrations are told of a lease, and of the stream they work on."""
    lane = channel.lane
    is_simulated = not lane.device.driver.needs_binary
    return CallContext(stream, channel.ordinal, lane.sm_count, is_simulated)


def check_blocking(fn: object) -> None:
    """Refuses what a thread of ours cannot call."""
    if not callable(fn):
        raise InvalidRequest(f"a function is needed, and {fn!r} is none")
    if is_coroutine_function(fn):
        raise InvalidRequest("blocking functions are called, on a thread: await this one")
