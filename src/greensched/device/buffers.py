"""Buffers on the device and pinned buffers on the host, with the streams that use them.

A buffer belongs to a device, not to a partition: it outlives leases, and work of any partition
may use it. It records the last ticket of each stream that uses it, so that other work is ordered
after its writers, and its memory is reused after its last user.
"""

from __future__ import annotations

import abc
import math
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from greensched._validation import Uncopyable
from greensched.device import dlpack
from greensched.device.device import Device
from greensched.device.health import DeviceHealth
from greensched.device.quota import MemoryQuota
from greensched.device.tickets import TicketedStream
from greensched.driver.types import HostMemory
from greensched.errors import BufferClosed, InvalidArray, WouldBlock, WrongDevice

if TYPE_CHECKING:
    import numpy.typing as npt

#: A stream, and the last of its tickets that matters.
Use = tuple[TicketedStream, int]


class MemorySource(Protocol):
    """What a buffer needs from its allocator."""

    device: Device
    device_id: int
    is_closed: bool
    health: DeviceHealth


class DeviceMemorySource(MemorySource, Protocol):
    """What a buffer in device memory needs from its allocator."""

    def give_back(self, address: int, nbytes: int, uses: tuple[Use, ...]) -> None: ...


class PinnedMemorySource(MemorySource, Protocol):
    """What a pinned buffer needs from its allocator."""

    def give_back(self, host: HostMemory, uses: tuple[Use, ...]) -> None: ...


class BoundUser(Protocol):
    """What a buffer needs from a bound launch, whose launches have no ticket each."""

    track: TicketedStream

    def last_use(self) -> Use: ...

    def use_elsewhere(self, track: TicketedStream, ticket: int) -> None: ...

    def look_again(self) -> None: ...

    def share(self) -> None: ...


class Closable(Uncopyable, abc.ABC):
    """An object that its user closes. If it is collected unclosed, it warns and is closed."""

    __slots__ = ("__weakref__", "is_closed", "is_known")

    def __init__(self) -> None:
        self.is_closed = False
        #: Whether a user received it and must close it. A cancelled job's result has no user.
        self.is_known = False

    def close(self) -> None:
        """Release its memory after its last user. Idempotent; does not wait."""
        if not self.is_closed:
            self.is_closed = True
            self._give_back()

    @abc.abstractmethod
    def _give_back(self) -> None:
        """Release its resources after `is_closed` is set. For finalisers: takes no lock."""

    @property
    @abc.abstractmethod
    def _is_over(self) -> bool:
        """Whether its resources have ended with its pool or device."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self.is_closed and not self._is_over:
            message = f"{self!r} was never closed"
            self.is_closed = True  # first, because the warning may be raised as an error
            self._give_back()
            if self.is_known:
                warnings.warn(message, ResourceWarning, stacklevel=2, source=self)


class BaseBuffer(Closable):
    """Memory that belongs to a user until `close()`."""

    __slots__ = ("memory",)

    def __init__(self, memory: MemorySource) -> None:
        super().__init__()
        #: The allocator that it came from and returns to.
        self.memory = memory

    @property
    def device(self) -> Device:
        """The device of the buffer."""
        return self.memory.device

    @property
    def device_id(self) -> int:
        """The ordinal of the device."""
        return self.memory.device_id

    def check(self, device_id: int) -> None:
        """Raise if the buffer is closed or belongs to another device.

        Raises:
            BufferClosed: `close()` was called, or the pool is closed.
            DeviceLost, ForkedPool, PoolClosed: The device is no longer used.
            WrongDevice: It belongs to another device.
        """
        if self.is_closed or self.memory.is_closed:
            raise BufferClosed("this buffer")
        self.memory.health.check()
        if device_id != self.memory.device_id:
            raise WrongDevice("this buffer", self.memory.device_id, device_id)

    @property
    def _is_over(self) -> bool:
        return self.memory.is_closed or self.memory.health.is_over


class Buffer(BaseBuffer):
    """An array in device memory, in C order.

    Made by `Partition.upload`, `empty` and `empty_like`. Any partition of its device may use it,
    from any thread, one at a time. `close()` it, or use it in a `with` block. If it is collected
    unclosed, it warns and is closed.

    Attributes:
        shape, dtype: As in numpy; `size` counts elements, `nbytes` bytes.
        address: The address in device memory; 0 if it has no bytes.
    """

    __slots__ = (
        "_bound",
        "_exports",
        "address",
        "dtype",
        "nbytes",
        "only_user",
        "quota",
        "readers",
        "shape",
        "writers",
    )

    memory: DeviceMemorySource

    def __init__(
        self, memory: DeviceMemorySource, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        super().__init__(memory)
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        #: The quota that it counts against until it is returned.
        self.quota: MemoryQuota | None = None
        #: The streams that write it, each with a ticket. There are several only if bound launches
        #: have ended and no later work was ordered after them yet.
        self.writers: dict[TicketedStream, int] = {}
        self.readers: dict[TicketedStream, int] = {}
        #: Bound launches that use it, and whether they write it.
        self._bound: dict[BoundUser, bool] = {}
        #: The only stream that has ever used it, if on its device; None if others or a bound launch
        #: have.
        self.only_user: TicketedStream | None = None
        #: One entry for each DLPack capsule that is not released yet.
        self._exports: list[None] = []

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    # -- which streams use it --------------------------------------------------------------------

    def dependencies(self, stream: TicketedStream, *, write: bool) -> Sequence[Use]:
        """Return the work elsewhere that work on `stream` must follow."""
        mine = not self._bound and _only(self.writers, stream)
        if mine and (not write or _only(self.readers, stream)):
            return ()  # the usual case: no other stream uses it
        uses = self.uses() if write else self._written()
        return [
            (other, ticket)
            for other, ticket in uses
            if other is not stream and not other.reached(ticket)
        ]

    def record_use(self, stream: TicketedStream, ticket: int, *, write: bool) -> None:
        """Record a use by work on `stream` up to `ticket`, which follows `dependencies`."""
        if write and not (_only(self.writers, stream) and not self.readers):
            for uses in (self.writers, self.readers):
                for use in tuple(uses.items()):
                    if not _runs_beside(use, stream):
                        del uses[use[0]]
        self._add(stream, ticket, write=write)

    def bind(self, bound: BoundUser, *, write: bool) -> None:
        """Record that a bound launch uses the memory, in one or more arguments, until `unbind`."""
        for other, writes in tuple(self._bound.items()):
            if other.track is not bound.track and (write or writes):
                other.share()
                bound.share()
        self._bound[bound] = write or self._bound.get(bound, False)
        self.only_user = None

    def unbind(self, bound: BoundUser, ticket: int) -> None:
        """Record the end of a bound launch, with the ticket of its last use.

        The launch did not follow every later user, so their records stay.
        """
        write = self._bound.pop(bound, None)
        if write is not None:
            self._add(bound.track, ticket, write=write)

    def _add(self, stream: TicketedStream, ticket: int, *, write: bool) -> None:
        (self.writers if write else self.readers)[stream] = ticket
        alone = not self._bound and _only(self.writers, stream) and _only(self.readers, stream)
        is_here = stream.stream.context.device_id == self.device_id  # no launch elsewhere uses it
        self.only_user = stream if alone and is_here else None
        for bound, writes in tuple(self._bound.items()):
            if write or writes:
                bound.use_elsewhere(stream, ticket)

    def _written(self) -> tuple[Use, ...]:
        bound = (bound.last_use() for bound, writes in tuple(self._bound.items()) if writes)
        return (*self.writers.items(), *bound)

    def uses(self) -> tuple[Use, ...]:
        """Return all streams that use it, each with its last ticket."""
        users = tuple(self._bound.items())
        reading = (bound.last_use() for bound, writes in users if not writes)
        return (*self.readers.items(), *reading, *self._written())

    def _give_back(self) -> None:
        for bound in tuple(self._bound):
            bound.look_again()
        self._release()

    def _release(self) -> None:
        """Release one claim, its own or a capsule's. The last release frees the memory."""
        if self._exports:
            with suppress(IndexError):  # another thread has just released the last one
                self._exports.pop()
                return
        if self.address:
            self.memory.give_back(self.address, self.nbytes, self.uses())
        if self.quota is not None:
            self.quota.give(self.nbytes)

    # -- for other libraries -----------------------------------------------------------------------

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, for libraries that use device arrays without a copy.

        While the last writer's work is not done, `stream` is its stream; a consumer that follows it
        also follows every other writer.

        Raises:
            WouldBlock: A writer is not submitted yet, or is on another device, whose work not every
                library can follow. Await that job first.
            BufferClosed, DeviceLost, ForkedPool, PoolClosed: As for `check`.
        """
        pending = self._pending(self._written())
        if any(writer.stream.context.device_id != self.device_id for writer, _ in pending):
            raise WouldBlock("another device still writes this buffer: await that job first")
        stream = None
        if pending:
            last = pending[-1][0]
            for other, _ in pending[:-1]:
                last.order_behind(other)
            stream = last.stream.__cuda_stream__()[1]
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": stream,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (2, the device ordinal), where 2 is kDLCUDA."""
        return dlpack.CUDA, self.device_id

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return a DLPack capsule, for libraries that take device arrays without a copy.

        The consumer's stream waits, on the device, for the present users of the buffer. The memory
        stays until the consumer has released it and the buffer or its pool is closed. Release it
        only when your work on it is done, because the consumer's work is not tracked here.

        Args:
            stream: The consumer's stream: a raw `CUstream`; None or 1 for the legacy default
                stream; 2 for the thread's own; -1 for no wait.
            max_version, dl_device, copy: As in the array API; copies are not made.

        Raises:
            WouldBlock: A user's work is not submitted yet. Await that job first.
            InvalidArray: DLPack has no such elements, or a copy or another device is requested.
            BufferClosed, DeviceLost, ForkedPool, PoolClosed: As for `check`.
        """
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise InvalidArray(
                f"copy={copy}, dl_device={dl_device}: a buffer is exported without a copy, on its "
                "own device; leave both out"
            )
        uses = self._pending(self.uses())
        if stream != -1:
            for user, _ in uses:
                user.order_before(dlpack.LEGACY if stream is None else stream)
        self._exports.append(None)
        return dlpack.make(
            self.address,
            self.shape,
            self.dtype,
            self.device_id,
            newest=max_version,
            released=self._release,
        )

    def _pending(self, uses: Iterable[Use]) -> list[Use]:
        """Return the uses that are not done. All of them must be on their streams already."""
        self.check(self.device_id)
        pending = [(stream, ticket) for stream, ticket in uses if not stream.reached(ticket)]
        # A call counts as writing its own arguments, but inside the call its stream is in order.
        if not all(s.has_submitted(t) or (s.owner and s.owner.is_entered) for s, t in pending):
            raise WouldBlock("a job that uses this buffer is not submitted yet: await it first")
        return pending

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"device {self.device_id}"
        return f"<Buffer {self.shape} {self.dtype} ({state})>"


def _only(uses: dict[TicketedStream, int], stream: TicketedStream) -> bool:
    """Say whether no other stream is in `uses`."""
    return not uses or (len(uses) == 1 and stream in uses)


def _runs_beside(use: Use, stream: TicketedStream) -> bool:
    """Say whether a use may run at the same time as work on a stream.

    This is so for a call of the same partition that has not returned.
    """
    user, ticket = use
    return user is not stream and user.owner is stream.owner and not user.has_submitted(ticket)


class PinnedBuffer(BaseBuffer):
    """Host memory that the device reads and writes directly, as a numpy array.

    Made by `Partition.empty_pinned`. The device accesses the same bytes, so the host must wait for
    jobs to order its own accesses.

    Attributes:
        array: The memory as a numpy array. Not to be used after `close()`, when another buffer
            may get the memory.
        address: The address for the device.
    """

    __slots__ = ("_bound", "_host", "_uses", "address", "array")

    memory: PinnedMemorySource

    def __init__(
        self,
        memory: PinnedMemorySource,
        host: HostMemory,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        super().__init__(memory)
        self._host = host
        self._uses: dict[TicketedStream, int] = {}
        self._bound: dict[BoundUser, None] = {}
        self.address = host.device_address
        self.array: npt.NDArray[Any] = np.frombuffer(
            host.view, dtype, count=math.prod(shape)
        ).reshape(shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its array."""
        return self.array.dtype

    def dependencies(self, stream: TicketedStream, *, write: bool) -> Sequence[Use]:  # noqa: ARG002  the signature of Buffer's method
        """Return nothing: the host shares the memory, so ordering device work would not suffice."""
        return ()

    def record_use(self, stream: TicketedStream, ticket: int, *, write: bool) -> None:  # noqa: ARG002  the signature of Buffer's method
        """Record that work on `stream` up to `ticket` uses it."""
        self._uses[stream] = ticket

    def bind(self, bound: BoundUser, *, write: bool) -> None:  # noqa: ARG002  the signature of Buffer's method
        """Record that a bound launch uses the memory until `unbind`."""
        self._bound[bound] = None

    def unbind(self, bound: BoundUser, ticket: int) -> None:
        """Record that a bound launch is over, with the ticket of its last use."""
        if self._bound.pop(bound, self) is None:
            self._uses[bound.track] = ticket

    def _give_back(self) -> None:
        for bound in tuple(self._bound):
            bound.look_again()
        uses = (*self._uses.items(), *(bound.last_use() for bound in tuple(self._bound)))
        self.memory.give_back(self._host, uses)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"device {self.device_id}"
        return f"<PinnedBuffer {self.array.shape} {self.array.dtype} ({state})>"


def dtype_of(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return a dtype that device memory can hold.

    Raises:
        InvalidArray: Not a numpy dtype, or one with Python objects, no bytes or foreign byte order.
    """
    try:
        converted = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise InvalidArray(f"{dtype!r} is not a dtype: {error}") from None
    if not converted.itemsize or converted.subdtype is not None:
        raise InvalidArray(
            f"dtype {converted} has no size, or is a subarray: give the dtype of one element"
        )
    if converted.hasobject:
        raise InvalidArray(
            f"dtype {converted} holds Python objects, which cannot be copied to a device: convert "
            "them to numbers first"
        )
    if not converted.isnative:
        raise InvalidArray(
            f"dtype {converted} is big-endian, and kernels read little-endian: convert it first "
            "with array.astype(array.dtype.newbyteorder('='))"
        )
    return converted
