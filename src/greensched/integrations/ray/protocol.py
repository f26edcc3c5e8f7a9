"""The messages between programs and the pools of a fleet, and the packing of jobs and outcomes.

Each job, its arguments and its result are packed separately, so a failure to pack or unpack fails
one job only. A program that can send to a pool can run any code there: jobs are pickled.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import iscoroutinefunction
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import ray
from ray import ObjectRef, cloudpickle

from greensched import ALL, REST
from greensched.errors import InvalidRequest, InvalidSize, JobFailed
from greensched.typing import Size

#: Clients and pools of different versions refuse each other. Raise it with every change here.
PROTOCOL = 6
#: Seconds after which a batch gets a reply though nothing has ended: the client learns that the
#: pool is alive, and the pool learns the same from the client's next batch.
HEARTBEAT = 1.0
#: Up to this many jobs of a client in a pool have a Ray call each, which waits for the job. With
#: one call for all, four jobs of 10 ms would take 1.21 calls each, not 1.01, because some replies
#: have no outcome.
FEW = 4
#: Bytes from which arrays and results go by reference through Ray's object store. Smaller values
#: are cheaper to copy with the job: a call took 3.0 ms with 1 MiB, 1.4 ms with 4 KiB (Ray 2.60, two
#: cores).
LARGE = 1 << 20
#: Types that pickle packs in a tenth of cloudpickle's 7 us, which is for functions and classes.
PLAIN = {int, float, bool, str, bytes, type(None)}
#: Different functions that one client may submit. Every pool keeps them as long as the client.
MOST_FUNCTIONS = 1000


class Packed(NamedTuple):
    """A function and its arguments. `refs` are the arguments that are in Ray's object store."""

    digest: bytes
    args: bytes
    refs: tuple[tuple[int, ObjectRef], ...]


# -- from a client to a pool ------------------------------------------------------------------


class Message(NamedTuple):
    """A message of one client, which knows it by its number.

    run: run a job, on a lease of its own or on that of a session (`session` is its number).
    open: lease SMs for a session, which gets this number. close: end one, and say when its work is
    done. cancel: cancel the job, or end the session, that has this number.

    `sms`, `service` and `duration` are as for `Pool.partition`; `deadline` in seconds from the time
    of sending.
    """

    kind: Literal["run", "open", "close", "cancel"]
    number: int
    digest: bytes = b""
    args: bytes = b""
    refs: tuple[tuple[int, ObjectRef], ...] = ()
    session: int = 0
    sms: Size = 0
    deadline: float | None = None
    service: str | None = None
    duration: float | None = None


class MessageBatch(NamedTuple):
    """The messages of one call. `code` holds the functions that are new to the pool."""

    number: int
    messages: Sequence[Message]
    code: Mapping[bytes, bytes]


# -- from a pool to a client ------------------------------------------------------------------


class Snapshot(NamedTuple):
    """The state of a pool.

    `wanted`: the SMs of all jobs that have not ended. `wait`: the mean seconds that the last jobs
    were queued.
    """

    is_open: bool
    sms_total: int
    sms_free: int
    waiting: int
    wanted: int
    wait: float


class Outcome(NamedTuple):
    """The outcome of a message.

    `error` and `value` are packed. `ref` refers to a large value, `handle` to a value that the job
    itself put into the store. `has_begun` is false if no part of the job ran.
    """

    number: int
    value: bytes = b""
    ref: ObjectRef | None = None
    handle: ObjectRef | None = None
    error: bytes = b""
    has_begun: bool = True


class ReplyBatch(NamedTuple):
    """The outcomes since the last reply, and the pool's state. `received` is a batch's number."""

    received: int
    outcomes: Sequence[Outcome]
    snapshot: Snapshot


def pack_batch(key: str, batch: MessageBatch) -> Any:
    """Pack a client's key and a batch, for one Ray call."""
    plain = key, batch.number, [tuple(message) for message in batch.messages], batch.code
    return _packed(plain, has_refs=any(message.refs for message in batch.messages))


def unpack_batch(sent: Any) -> tuple[str, MessageBatch]:
    """Unpack what `pack_batch` returned."""
    key, number, messages, code = _unpacked(sent)
    return key, MessageBatch(number, [Message(*fields) for fields in messages], code)


def pack_reply(reply: ReplyBatch) -> Any:
    """Pack a reply, for the result of a Ray call."""
    plain = reply.received, [tuple(outcome) for outcome in reply.outcomes], tuple(reply.snapshot)
    return _packed(plain, has_refs=any(outcome.ref or outcome.handle for outcome in reply.outcomes))


def unpack_reply(sent: Any) -> ReplyBatch:
    """Unpack what `pack_reply` returned."""
    received, outcomes, snapshot = _unpacked(sent)
    return ReplyBatch(received, [Outcome(*fields) for fields in outcomes], Snapshot(*snapshot))


def _packed(plain: tuple[Any, ...], *, has_refs: bool) -> Any:
    """Return bytes, which Ray sends as they are; it must see the references to its objects.

    For an empty job alone, named tuples would add 40 us, and objects other than bytes a fifth of
    its time (Ray 2.60, two cores).
    """
    return plain if has_refs else pickle.dumps(plain)


def _unpacked(sent: Any) -> Any:
    return pickle.loads(sent) if isinstance(sent, bytes) else sent


class PoolInfo(NamedTuple):
    """The identity of a pool. `most` is the most SMs of one lease."""

    name: str
    node: str
    most: int
    snapshot: Snapshot


# -- jobs -------------------------------------------------------------------------------------


class Functions:
    """A client's functions. Each is packed once; later changes of its closure are not sent."""

    def __init__(self) -> None:
        self.code: dict[bytes, bytes] = {}
        self._digests: WeakKeyDictionary[Callable[..., Any], bytes] = WeakKeyDictionary()

    def digest(self, function: Callable[..., Any]) -> bytes:
        """Return the digest by which messages name a function.

        Raises:
            InvalidRequest: It is not a function, cannot be packed, or exceeds the limit.
        """
        try:
            known = self._digests.get(function)
        except TypeError:  # not even similar to a function
            known = None
        if known is not None:
            return known
        if not callable(function):
            raise InvalidRequest(f"{function!r} is not callable: give a function")
        code = _dumps(function)
        digest = hashlib.sha256(code).digest()
        if len(self.code) >= MOST_FUNCTIONS and digest not in self.code:
            raise InvalidRequest(
                f"{MOST_FUNCTIONS} different functions were submitted already: submit functions of "
                "modules, and pass what differs as arguments"
            )
        self.code[digest] = code
        with suppress(TypeError):  # an object without weak references is packed each time
            self._digests[function] = digest
        return digest


async def pack_job(functions: Functions, job: Callable[..., Any], args: Sequence[object]) -> Packed:
    """Pack a job with its arguments; a thread puts large arrays into Ray's store.

    Raises:
        InvalidRequest: The function or an argument cannot be packed.
    """
    packed_args = list(args)
    refs: list[tuple[int, ObjectRef]] = []
    for place, value in enumerate(args):
        is_large = isinstance(value, np.ndarray) and value.nbytes >= LARGE
        if is_large or isinstance(value, ObjectRef):
            ref = await asyncio.to_thread(ray.put, value) if is_large else value
            refs.append((place, ref))
            packed_args[place] = None
    return Packed(functions.digest(job), _dumps(packed_args) if packed_args else b"", tuple(refs))


def _dumps(value: object) -> bytes:
    parts = value if type(value) is list else [value]
    try:
        if all(type(part) in PLAIN for part in parts):
            return pickle.dumps(value)
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise InvalidRequest(f"{value!r} cannot be sent to another process: {error}") from error


async def load_arguments(message: Message) -> list[Any]:
    """Unpack the arguments of a job; those in Ray's store are fetched, and are read-only."""
    args: list[Any] = pickle.loads(message.args) if message.args else []
    for place, ref in message.refs:
        args[place] = await ref
    return args


def is_async_job(function: Callable[..., Any]) -> bool:
    """Say whether a job is awaited and gets its partition, or is a blocking call."""
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "func", None))


def least_sms(sms: object) -> int:
    """Return the smallest number of SMs that satisfies a size.

    Raises:
        InvalidSize: It is not a size.
    """
    if sms in (ALL, REST):
        return 1
    first = sms[0] if isinstance(sms, tuple) and len(sms) == 2 else sms
    if type(first) is not int or first < 1:
        raise InvalidSize(sms)
    return first


# -- outcomes ---------------------------------------------------------------------------------


async def success(number: int, value: object) -> Outcome:
    """Pack a job's result, by reference if large. The outcome is a failure if packing fails."""
    if value is None:
        return Outcome(number)
    if isinstance(value, ObjectRef):
        return Outcome(number, handle=value)
    try:
        if isinstance(value, np.ndarray) and value.nbytes >= LARGE:
            return Outcome(number, ref=await asyncio.to_thread(ray.put, value))
        return Outcome(number, value=_dumps(value))
    except Exception as error:
        return failure(number, error, has_begun=True)


def failure(number: int, error: BaseException, *, has_begun: bool) -> Outcome:
    """Pack a job's error and traceback; an error that cannot be sent becomes a `JobFailed`."""
    where = "".join(traceback.format_exception(error))
    what = "".join(traceback.format_exception_only(error)).strip()  # though `str(error)` may fail
    sent: BaseException = JobFailed(f"the job raised {what}")
    if isinstance(error, Exception):  # CancelledError and SystemExit must not act in the client
        with suppress(Exception):
            if isinstance(pickle.loads(cloudpickle.dumps(error)), Exception):
                sent = error
    return Outcome(number, error=_dumps((sent, where)), has_begun=has_begun)


def unpack_value(value: bytes) -> Any:
    """Unpack a result.

    Raises:
        JobFailed: It cannot be unpacked here, for example because a module is missing.
    """
    try:
        return pickle.loads(value) if value else None
    except Exception as error:
        raise JobFailed(f"the job's result cannot be unpacked in this process: {error}") from error


def unpack_error(outcome: Outcome, pool: str) -> Exception:
    """Unpack the error of a failure, with its traceback as a note."""
    try:
        error, where = pickle.loads(outcome.error)
    except Exception as unknown:
        error, where = JobFailed(f"the job's error cannot be unpacked here: {unknown}"), ""
    if where:
        error.add_note(f"In {pool}:\n{where}")
    return error  # type: ignore[no-any-return]  # only exceptions are packed
