"""What callers and pools of a fleet send each other, and how jobs and their ends are packed.

A job, its arguments and its result are packed one by one: what cannot be packed, or not unpacked at
the other end, fails that job and no other of the same call. Who can send to a pool can run any code
there: that is what a job is, and what pickle is.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import iscoroutinefunction
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import ray
from ray import ObjectRef, cloudpickle

from greensched import ALL, REST
from greensched.errors import InvalidRequest, InvalidSize, JobFailed
from greensched.typing import Size

#: Callers and pools of different numbers refuse each other. To be raised with every change here.
PROTOCOL = 1
#: Seconds after which a letter is answered though nothing has ended: then the caller knows that the
#: pool is there, and by his next one the pool that he is.
HEARTBEAT = 1.0
#: Bytes from which arrays and results go through Ray's object store, by reference. Below, one copy
#: with the job is cheaper: 1 MiB took 3.0 ms in a call, 4 KiB 1.4 ms (Ray 2.60, two cores).
LARGE = 1 << 20
#: Different functions that one caller may submit: each stays in every pool as long as he does.
MOST_FUNCTIONS = 1000


class Packed(NamedTuple):
    """A function and its arguments. `refs` are the arguments that are objects of Ray's store."""

    digest: bytes
    args: bytes
    refs: tuple[tuple[int, ObjectRef], ...]


class LeaseSpec(NamedTuple):
    """What `Pool.partition` is to be asked for; `deadline` in seconds from when it is sent."""

    sms: Size
    deadline: float | None
    service: str | None
    duration: float | None


# -- from a caller to a pool ------------------------------------------------------------------


class Run(NamedTuple):
    """Run a job: on a lease of its own, or on that of a session (`wish` is its number)."""

    number: int
    work: Packed
    wish: LeaseSpec | int


class Open(NamedTuple):
    """Lease SMs for a session, which has this number."""

    number: int
    wish: LeaseSpec


class Close(NamedTuple):
    """End a session, and say when its work is done."""

    number: int
    session: int


class Cancel(NamedTuple):
    """Nobody waits for this any more; a session ends by it."""

    number: int


Message = Run | Open | Close | Cancel


class MessageBatch(NamedTuple):
    """One call's worth. `code` has the functions that this pool has not been sent before."""

    number: int
    messages: Sequence[Message]
    code: Mapping[bytes, bytes]


# -- from a pool to a caller ------------------------------------------------------------------


class Snapshot(NamedTuple):
    """How a pool is, at one moment.

    `wanted` are the SMs of all jobs it has and has not ended, `wait` the median of the last jobs'
    seconds in its queue.
    """

    is_open: bool
    sms_total: int
    sms_free: int
    waiting: int
    wanted: int
    wait: float


class Outcome(NamedTuple):
    """How something ended.

    `error` and `value` are packed; `ref` has a large value, `handle` one that the job itself put
    there. `has_begun` is false if nothing of a job was done.
    """

    number: int
    value: bytes = b""
    ref: ObjectRef | None = None
    handle: ObjectRef | None = None
    error: bytes = b""
    has_begun: bool = True


class ReplyBatch(NamedTuple):
    """What has ended since the last answer, and how the pool is. `heard` is a letter's number."""

    heard: int
    outcomes: Sequence[Outcome]
    snapshot: Snapshot


class PoolInfo(NamedTuple):
    """Who a pool is. `uuid` is of its GPU, None of a simulated one; `most`: SMs of one lease."""

    name: str
    node: str
    pid: int
    uuid: str | None
    most: int
    snapshot: Snapshot


# -- jobs -------------------------------------------------------------------------------------


class Functions:
    """A caller's functions, each packed once: later changes to what it closes over do not go."""

    def __init__(self) -> None:
        self.code: dict[bytes, bytes] = {}
        self._digests: WeakKeyDictionary[Callable[..., Any], bytes] = WeakKeyDictionary()

    def digest(self, function: Callable[..., Any]) -> bytes:
        """The name it has on the wire.

        Raises:
            InvalidRequest: it is no function, cannot be packed, or is one too many.
        """
        try:
            known = self._digests.get(function)
        except TypeError:  # neither a function nor anything like one
            known = None
        if known is not None:
            return known
        if not callable(function):
            raise InvalidRequest(f"a function is needed, and {function!r} is none")
        code = _dumped(function)
        digest = hashlib.sha256(code).digest()
        if len(self.code) >= MOST_FUNCTIONS and digest not in self.code:
            raise InvalidRequest(
                f"{MOST_FUNCTIONS} different functions were submitted already: give functions of a "
                "module, and what differs as arguments"
            )
        self.code[digest] = code
        with suppress(TypeError):  # what has no weak references is packed each time
            self._digests[function] = digest
        return digest


async def packed(functions: Functions, job: Callable[..., Any], args: Sequence[object]) -> Packed:
    """A job with its arguments; large arrays are put into Ray's store, by a thread.

    Raises:
        InvalidRequest: the function, or an argument, cannot be packed.
    """
    given = list(args)
    refs: list[tuple[int, ObjectRef]] = []
    for place, value in enumerate(args):
        is_large = isinstance(value, np.ndarray) and value.nbytes >= LARGE
        if is_large or isinstance(value, ObjectRef):
            ref = await asyncio.to_thread(ray.put, value) if is_large else value
            refs.append((place, ref))
            given[place] = None
    return Packed(functions.digest(job), _dumped(given) if given else b"", tuple(refs))


def _dumped(value: object) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise InvalidRequest(f"{value!r} cannot be sent to another process: {error}") from error


async def arguments(work: Packed) -> list[Any]:
    """The arguments of a job; those in Ray's store are waited for, and are read-only."""
    args: list[Any] = pickle.loads(work.args) if work.args else []
    for place, ref in work.refs:
        args[place] = await ref
    return args


def is_awaited(function: Callable[..., Any]) -> bool:
    """Whether a job is given its partition, and awaited; else it is a blocking call."""
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "func", None))


def least(sms: object) -> int:
    """The SMs without which a size cannot be granted.

    Raises:
        InvalidSize: it is none.
    """
    if sms in (ALL, REST):
        return 1
    first = sms[0] if isinstance(sms, tuple) and len(sms) == 2 else sms
    if type(first) is not int or first < 1:
        raise InvalidSize(sms)
    return first


# -- ends -------------------------------------------------------------------------------------


async def success(number: int, value: object) -> Outcome:
    """A job's result, packed; a large one by reference. One that cannot be packed is a failure."""
    if value is None:
        return Outcome(number)
    if isinstance(value, ObjectRef):
        return Outcome(number, handle=value)
    try:
        if isinstance(value, np.ndarray) and value.nbytes >= LARGE:
            return Outcome(number, ref=await asyncio.to_thread(ray.put, value))
        return Outcome(number, value=_dumped(value))
    except Exception as error:
        return failure(number, error, has_begun=True)


def failure(number: int, error: BaseException, *, has_begun: bool) -> Outcome:
    """What a job raised, with where; as it is if that can be sent, else in words."""
    where = "".join(traceback.format_exception(error))
    sent: BaseException = JobFailed(f"the job raised {type(error).__name__}: {error}")
    if isinstance(error, Exception):  # what ends tasks and programs does so over there alone
        try:
            pickle.loads(cloudpickle.dumps(error))
            sent = error
        except Exception:
            pass
    return Outcome(number, error=_dumped((sent, where)), has_begun=has_begun)


def unpacked(value: bytes) -> Any:
    """A result.

    Raises:
        JobFailed: what it is of is not known here.
    """
    try:
        return pickle.loads(value) if value else None
    except Exception as error:
        raise JobFailed(f"the job's result cannot be read here: {error}") from error


def raised(outcome: Outcome, pool: str) -> Exception:
    """The error of a failure, as it was raised; its notes say where."""
    try:
        error, where = pickle.loads(outcome.error)
    except Exception as unknown:
        error, where = JobFailed(f"the job raised what is not known here: {unknown}"), ""
    if where:
        error.add_note(f"In {pool}:\n{where}")
    return error  # type: ignore[no-any-return]  # only exceptions are packed
