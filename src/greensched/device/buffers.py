"""Buffers on the device and pinned ones on the host; who wrote them last and who uses them.

A buffer belongs to a device, not to a partition: it outlives leases, and work of any partition
may use it. It knows the last ticket of everybody who uses it, so that work elsewhere is ordered
behind its writer, and its memory is given back behind its last user.
"""

from __future__ import annotations

import abc
import math
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from greensched.device import dlpack
from greensched.device.streams import TicketedStream
from greensched.driver.types import HostMemory
from greensched.errors import (
    BufferClosed,
    InvalidArray,
    OutOfMemory,
    WouldBlock,
    WrongDevice,
    too_late,
)

if TYPE_CHECKING:
    import numpy.typing as npt

#: (who, the ticket up to which).
Use = tuple[TicketedStream, int]


class Giver(Protocol):
    """Where a buffer's memory is from."""

    device: int
    is_closed: bool
    #: What ended its use before it was closed: a device fault, a fork, a pool closed over work.
    fault: BaseException | None


class MemoryQuota:
    """Bytes of device memory that a service class may have at once.

    Attributes:
        most: as many; None: any.
    """

    def __init__(self, name: str, most: int | None) -> None:
        self._name = name
        self.most = most
        self._lock = threading.Lock()
        self._taken = 0
        #: Given back, and not counted yet: a finaliser gives, perhaps while the lock is held.
        self._given: deque[int] = deque()

    def take(self, nbytes: int) -> None:
        """So many more.

        Raises:
            OutOfMemory: more than it may have; its `total` is that.
        """
        with self._lock:
            while self._given:
                self._taken -= self._given.popleft()
            if self.most is not None and self._taken + nbytes > self.most:
                what = f"memory_bytes of service {self._name!r}"
                raise OutOfMemory(what, nbytes, max(0, self.most - self._taken), self.most)
            self._taken += nbytes

    def give(self, nbytes: int) -> None:
        """So many are given back. Takes no lock."""
        self._given.append(nbytes)


class DeviceGiver(Giver, Protocol):
    """Where memory of the device is from, and goes back to."""

    def give_back(self, address: int, nbytes: int, uses: tuple[Use, ...]) -> None: ...


class PinnedGiver(Giver, Protocol):
    """The same for pinned memory."""

    def give_back(self, host: HostMemory, uses: tuple[Use, ...]) -> None: ...


class BoundUser(Protocol):
    """What a buffer needs to know of a bound launch, which uses it without a ticket each time."""

    track: TicketedStream

    def last_use(self) -> Use: ...

    def use_elsewhere(self, track: TicketedStream, ticket: int) -> None: ...

    def look_again(self) -> None: ...

    def share(self) -> None: ...


class Closable(abc.ABC):
    """What is somebody's until `close()`; a forgotten one warns, and is closed all the same."""

    __slots__ = ("__weakref__", "is_closed", "is_known")

    def __init__(self) -> None:
        self.is_closed = False
        #: Somebody was given it, and is to close it. The result of a cancelled job is nobody's.
        self.is_known = False

    def close(self) -> None:
        """Gives back what it has. Idempotent; does not wait."""
        if not self.is_closed:
            self.is_closed = True
            self._give_back()

    @abc.abstractmethod
    def _give_back(self) -> None:
        """What it has goes back; it is closed already. Takes no lock: a finaliser may ask."""

    @property
    @abc.abstractmethod
    def _is_over(self) -> bool:
        """Whether what it has was ended with the whole, closed or not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self.is_closed and not self._is_over:
            said = f"{self!r} was never closed"
            self.is_closed = True  # first: where warnings are errors, nothing after one is done
            self._give_back()
            if self.is_known:
                warnings.warn(said, ResourceWarning, stacklevel=2, source=self)


class BaseBuffer(Closable):
    """What every buffer is: memory that is somebody's until `close()`."""

    __slots__ = ("memory",)

    def __init__(self, memory: Giver) -> None:
        super().__init__()
        #: Where it is from, and goes back to.
        self.memory = memory

    @property
    def device(self) -> int:
        """The ordinal of its device."""
        return self.memory.device

    def check(self, device: int) -> None:
        """Refuses a closed buffer, and one of another device.

        Raises:
            BufferClosed: after `close()`, or after its pool was closed.
            DeviceLost, ForkedPool, PoolClosed: what ended its device's use.
            WrongDevice: it belongs to another device.
        """
        if self.is_closed or self.memory.is_closed:
            raise BufferClosed("this buffer")
        if self.memory.fault is not None:
            raise too_late(self.memory.fault)
        if device != self.memory.device:
            raise WrongDevice("this buffer", self.memory.device, device)

    def is_from(self, memory: object) -> bool:
        """Whether it is a part of this memory."""
        return self.memory is memory

    def close(self) -> None:
        """Gives its memory back behind its last user. Idempotent; does not wait."""
        super().close()

    @property
    def _is_over(self) -> bool:
        return self.memory.is_closed or self.memory.fault is not None


class Buffer(BaseBuffer):
    """An array in device memory, in C order.

    Made by `Partition.upload`, `empty` and `empty_like`. Usable by any partition of its device,
    in this thread and others, one at a time. `close()` it, or use it in a `with` block; a
    forgotten one warns and is given back all the same.

    Attributes:
        shape, dtype: as in numpy; `size` counts elements, `nbytes` bytes.
        address: in device memory; 0 if it has no bytes.
        device: the ordinal of its device.
    """

    __slots__ = (
        "_bound",
        "_takers",
        "address",
        "allowance",
        "dtype",
        "nbytes",
        "readers",
        "shape",
        "sole",
        "writers",
    )

    memory: DeviceGiver

    def __init__(
        self, memory: DeviceGiver, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        super().__init__(memory)
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        #: What it counts against until it is given back.
        self.allowance: MemoryQuota | None = None
        #: Who writes it, up to which ticket. Several only where bound launches ended that others
        #: were not ordered behind yet. Whoever is `sole` may note itself here without asking.
        self.writers: dict[TicketedStream, int] = {}
        self.readers: dict[TicketedStream, int] = {}
        #: Bound launches that use it, and whether they write it.
        self._bound: dict[BoundUser, bool] = {}
        #: The one track that has ever used it, where there is no other, nor a bound launch.
        self.sole: TicketedStream | None = None
        #: One for each who took it by DLPack and has it still.
        self._takers: list[None] = []

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    # -- who uses it -----------------------------------------------------------------------------

    def before(self, track: TicketedStream, *, write: bool) -> Sequence[Use]:
        """Work elsewhere that work on `track` must be ordered behind."""
        mine = not self._bound and _only(self.writers, track)
        if mine and (not write or _only(self.readers, track)):
            return ()  # as for most buffers: nobody else uses them
        uses = self.uses() if write else self._written()
        return [
            (who, ticket) for who, ticket in uses if who is not track and not who.reached(ticket)
        ]

    def note(self, track: TicketedStream, ticket: int, *, write: bool) -> None:
        """Work on `track` up to `ticket` uses it, ordered behind what `before` said."""
        if write and not (_only(self.writers, track) and not self.readers):
            for uses in (self.writers, self.readers):
                for use in tuple(uses.items()):
                    if not _goes_on_beside(use, track):
                        del uses[use[0]]
        self._add(track, ticket, write=write)

    def bind(self, bound: BoundUser, *, write: bool) -> None:
        """A bound launch uses it, time and again, until `unbind`; in one argument or several."""
        for other, writes in self._bound.items():
            if other.track is not bound.track and (write or writes):
                other.share()
                bound.share()
        self._bound[bound] = write or self._bound.get(bound, False)
        self.sole = None

    def unbind(self, bound: BoundUser, ticket: int) -> None:
        """The bound launch is over; its last use has this ticket.

        It was not ordered behind everybody who came since: they are not forgotten.
        """
        write = self._bound.pop(bound, None)
        if write is not None:
            self._add(bound.track, ticket, write=write)

    def _add(self, track: TicketedStream, ticket: int, *, write: bool) -> None:
        (self.writers if write else self.readers)[track] = ticket
        alone = not self._bound and _only(self.writers, track) and _only(self.readers, track)
        self.sole = track if alone else None
        for bound, writes in self._bound.items():
            if write or writes:
                bound.use_elsewhere(track, ticket)

    def _written(self) -> tuple[Use, ...]:
        bound = (bound.last_use() for bound, writes in self._bound.items() if writes)
        return (*self.writers.items(), *bound)

    def uses(self) -> tuple[Use, ...]:
        """Everybody who uses it, and up to which ticket."""
        reading = (bound.last_use() for bound, writes in self._bound.items() if not writes)
        return (*self.readers.items(), *reading, *self._written())

    def _give_back(self) -> None:
        for bound in self._bound:
            bound.look_again()
        self._leave()

    def _leave(self) -> None:
        """One of those who have it lets go; the last of them, and no other, finds no taker left."""
        if self._takers:
            with suppress(IndexError):  # another thread was here at the same time
                self._takers.pop()
                return
        if self.address:
            self.memory.give_back(self.address, self.nbytes, self.uses())
        if self.allowance is not None:
            self.allowance.give(self.nbytes)

    # -- in other libraries' hands ---------------------------------------------------------------

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, for libraries that take device arrays without a copy.

        The stream is that of the last writer while its work is not done: whoever takes the array
        orders itself behind it, and so behind any other writer.

        Raises:
            WouldBlock: what writes it is not even submitted yet, or is a stream of another device,
                behind which not every library can order itself: await that job first.
            BufferClosed, DeviceLost, ForkedPool, PoolClosed: as `check`.
        """
        pending = self._pending(self._written())
        if any(who.stream.context.device_ordinal != self.device for who, _ in pending):
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
        """(2, its device): kDLCUDA."""
        return dlpack.CUDA, self.device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A DLPack capsule, for libraries that take device arrays without a copy.

        The taker's stream waits, on the device, for whatever uses the buffer now. The memory stays
        until the taker has let go of it and the buffer is closed, or its pool is: let go when your
        work on it is done, for the taker's stream is not ours to look at.

        Args:
            stream: the taker's: a raw `CUstream`; None or 1: the legacy default stream; 2: the
                thread's own; -1: nothing waits.
            max_version, dl_device, copy: as the array API has them; copies are not made.

        Raises:
            WouldBlock: what uses it is not even submitted yet: await that job first.
            InvalidArray: DLPack has no such elements, or a copy or another device is asked for.
            BufferClosed, DeviceLost, ForkedPool, PoolClosed: as `check`.
        """
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise InvalidArray("a buffer is handed out where it lies, and is not copied")
        uses = self._pending(self.uses())
        if stream != -1:
            for who, _ in uses:
                who.lead(dlpack.LEGACY if stream is None else stream)
        self._takers.append(None)
        return dlpack.make(
            self.address,
            self.shape,
            self.dtype,
            self.device,
            newest=max_version,
            returned=self._leave,
        )

    def _pending(self, uses: Iterable[Use]) -> list[Use]:
        """Those that are not done, and on their streams already."""
        self.check(self.device)
        pending = [(who, ticket) for who, ticket in uses if not who.reached(ticket)]
        # A call's own arguments count as written by it; in the call, its stream is the right one.
        if not all(w.has_submitted(t) or w.crew.is_entered for w, t in pending):
            raise WouldBlock("this buffer's user is still to be submitted: await its job first")
        return pending

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"device {self.device}"
        return f"<Buffer {self.shape} {self.dtype} ({state})>"


def _only(uses: dict[TicketedStream, int], track: TicketedStream) -> bool:
    """Whether nobody but the track is among them."""
    return not uses or (len(uses) == 1 and track in uses)


def _goes_on_beside(use: Use, track: TicketedStream) -> bool:
    """Whether work on a track was not ordered behind this use; see `Channel.others`.

    So it is with a call of the same partition that has not returned.
    """
    who, ticket = use
    return who is not track and who.crew is track.crew and not who.has_submitted(ticket)


class PinnedBuffer(BaseBuffer):
    """Host memory that the device reads and writes directly, as a numpy array.

    Made by `Partition.empty_pinned`. Its bytes are shared with the device: nothing orders the
    host's accesses but waiting for jobs.

    Attributes:
        array: the memory, as numpy sees it; not to be used after `close()`, when it may become
            somebody else's.
        address: for the device.
    """

    __slots__ = ("_bound", "_host", "_uses", "address", "array")

    memory: PinnedGiver

    def __init__(
        self, memory: PinnedGiver, host: HostMemory, shape: tuple[int, ...], dtype: np.dtype[Any]
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
        """As of its array."""
        return self.array.dtype

    def before(self, track: TicketedStream, *, write: bool) -> list[Use]:  # noqa: ARG002  as Buffer's
        """Nothing: the host shares it, so no order of work on the device would be the whole one."""
        return []

    def note(self, track: TicketedStream, ticket: int, *, write: bool) -> None:  # noqa: ARG002  as Buffer's
        """Work on `track` up to `ticket` uses it."""
        self._uses[track] = ticket

    def bind(self, bound: BoundUser, *, write: bool) -> None:  # noqa: ARG002  as Buffer's
        """A bound launch uses it, time and again, until `unbind`."""
        self._bound[bound] = None

    def unbind(self, bound: BoundUser, ticket: int) -> None:
        """The bound launch is over; its last use has this ticket."""
        if self._bound.pop(bound, self) is None:
            self._uses[bound.track] = ticket

    def _give_back(self) -> None:
        for bound in self._bound:
            bound.look_again()
        uses = (*self._uses.items(), *(bound.last_use() for bound in self._bound))
        self.memory.give_back(self._host, uses)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"device {self.device}"
        return f"<PinnedBuffer {self.array.shape} {self.array.dtype} ({state})>"


def dtype_of(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """A dtype that device memory can hold.

    Raises:
        InvalidArray: numpy knows none such, it holds Python objects, or its bytes are in the other
            order; says which.
    """
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise InvalidArray(f"{dtype!r} is no dtype: {error}") from None
    if not found.itemsize or found.subdtype is not None:
        raise InvalidArray(f"dtype {found} is of no bytes, or an array itself: give its elements'")
    if found.hasobject:
        raise InvalidArray(f"dtype {found} holds Python objects, which have no bytes to move")
    if not found.isnative:
        raise InvalidArray(
            f"dtype {found} is big-endian, and kernels read little-endian: convert it first with "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    return found
