"""Arrays of other libraries in device memory, used where they lie.

Whatever has `__dlpack__` or `__cuda_array_interface__` can be a kernel's argument or one end of a
copy. Rules:

1. DLPack goes first: its producer orders our stream behind its own, by an event, when it is told
   ours. By the other protocol it tells its stream, and we record the event; a producer that tells
   none has nothing in flight, or is the user's to wait for. No host ever waits.
2. It is looked at when the arguments are, and ordered (`before`) when the stream is known; both
   before anything is queued.
3. The array, and the memory, are kept until the ticket of whoever uses it is reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from greensched.device import dlpack
from greensched.device.buffers import BoundUser, Buffer, Use, dtype_of
from greensched.device.streams import Stream, TicketedStream
from greensched.errors import GreenschedError, InvalidArray, WrongDevice


class ForeignArray:
    """Somebody's device array, as a `Buffer` is used here. Made by `as_foreign_array`.

    Attributes:
        source: the array. A capsule of it, where there is one, is kept with it.
        device: the ordinal of its device; None: it does not say.
        address, shape, dtype, nbytes: as a Buffer's; a dtype that numpy lacks is of plain bytes.
        kind: the dtype in words.
        is_typed: whether its elements are of a dtype at all; else it is so many bytes.
        is_read_only: as it says. Not every array says so.
    """

    __slots__ = (
        "_capsule",
        "address",
        "device",
        "dtype",
        "is_read_only",
        "is_typed",
        "kind",
        "nbytes",
        "shape",
        "source",
    )

    def __init__(
        self,
        source: Any,
        view: dlpack.View,
        *,
        device: int | None,
        capsule: object = None,
    ) -> None:
        self.source = source
        self.address = view.address
        self.shape = view.shape
        self.dtype = dtype_of(view.dtype)
        self.kind = view.kind
        self.nbytes = math.prod(view.shape) * view.dtype.itemsize
        self.is_typed = capsule is None or hasattr(source, "dtype")
        self.is_read_only = view.is_read_only
        self.device = device
        self._capsule = capsule
        if not _is_contiguous(view):
            raise InvalidArray(
                f"is not contiguous: {view.shape} with strides of {view.strides} bytes; make it so"
            )

    def check(self, device: int) -> None:
        """Refuses one of another device, where it says which it is of.

        Raises:
            WrongDevice: it belongs to another device.
        """
        if self.device is not None and self.device != device:
            raise WrongDevice("this array", self.device, device)

    def holds(self, dtype: np.dtype[Any]) -> bool:
        """Whether it is of such elements, or bytes that can be."""
        return self.dtype == dtype or (not self.is_typed and self.nbytes % dtype.itemsize == 0)

    def before(self, track: TicketedStream, *, write: bool) -> Sequence[Use]:  # noqa: ARG002  as Buffer's
        """Orders the track behind its producer. Nobody else of ours is known to use it.

        Raises:
            WrongDevice: it lies in memory of another device.
            InvalidArray: it lies in no device's, or its producer refuses to hand it out.
            InvalidRequest: its producer's stream is capturing, or nothing can be ordered behind it.
        """
        self.order(track.stream)
        return ()

    def order(self, stream: Stream) -> None:
        """Later work on a stream comes behind its producer. Raises as `before`."""
        context = stream.context
        if self._capsule is not None:
            _capsule_of(self.source, stream.address)  # for its order; the first one is kept
            return
        if self.nbytes:
            device = context.driver.memory_device(self.address)
            if device is None:
                raise InvalidArray(f"the array lies at {self.address:#x}, in no memory of a device")
            if device != context.device_ordinal:
                raise WrongDevice("this array", device, context.device_ordinal)
        producer = _producer(self.source.__cuda_array_interface__)
        if producer is not None:
            stream.follow(producer)

    def note(self, track: TicketedStream, ticket: int, *, write: bool) -> None:  # noqa: ARG002  as Buffer's
        """Work on `track` up to `ticket` uses it: it lives until then. On the holder's loop."""
        track.keep(ticket, self)
        track.crew.notify_when(track, ticket, track.let_go)

    def bind(self, bound: BoundUser, *, write: bool) -> None:
        """A bound launch uses it, and has it, until `unbind`."""

    def unbind(self, bound: BoundUser, ticket: int) -> None:
        """The bound launch is over; its last use has this ticket. The lease's end lets it go."""
        bound.track.keep(ticket, self)

    def __repr__(self) -> str:
        return f"<{type(self.source).__name__} {self.shape} {self.kind}>"


#: What lies in device memory, and can be used there.
DeviceOperand = Buffer | ForeignArray


def is_on_device(value: object) -> bool:
    """Whether it is an array in device memory, by what it says of itself."""
    if isinstance(value, np.ndarray):
        return False
    device_of = getattr(value, "__dlpack_device__", None)
    if device_of is not None:
        return int(device_of()[0]) in (dlpack.CUDA, dlpack.CUDA_MANAGED)
    return hasattr(value, "__cuda_array_interface__")


def as_foreign_array(value: Any) -> ForeignArray | None:
    """An array of another library, looked at; None: it is no array at all.

    Raises:
        InvalidArray: it is in host memory, not contiguous, of foreign byte order, masked, or its
            producer refuses to hand it out; says why.
    """
    if isinstance(value, ForeignArray):
        return value
    device_of = getattr(value, "__dlpack_device__", None)
    if device_of is not None:
        kind, device = (int(number) for number in device_of())
        if kind == dlpack.CUDA or kind == dlpack.CUDA_MANAGED:
            capsule = _capsule_of(value, -1)
            return ForeignArray(
                value,
                dlpack.read(capsule),
                device=device if kind == dlpack.CUDA else None,
                capsule=capsule,
            )
        raise InvalidArray("is in no CUDA device's memory: `await p.upload(array)` first")
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        return None
    _producer(interface)
    return ForeignArray(value, _view(interface), device=None)


def _capsule_of(source: Any, stream: int) -> object:
    """Its capsule, for work on a stream; -1: on none."""
    try:
        try:
            return source.__dlpack__(stream=stream, max_version=dlpack.VERSION)
        except TypeError:  # of before DLPack 1.0
            return source.__dlpack__(stream=stream)
    except GreenschedError:  # a Buffer's own, behind somebody's view of it
        raise
    except Exception as error:
        raise InvalidArray(f"is not handed out by its library: {error}") from error


def _view(interface: dict[str, Any]) -> dlpack.View:
    """What a `__cuda_array_interface__` says, of version 2 or 3."""
    try:
        dtype = np.dtype(interface["typestr"])
        address, is_read_only = interface["data"]
        shape, strides = interface["shape"], interface.get("strides")
        mask = interface.get("mask")
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArray(f"its __cuda_array_interface__ is not as agreed: {error!r}") from None
    if mask is not None:
        raise InvalidArray("is masked, and a kernel would not see the mask")
    return dlpack.View(
        int(address or 0),
        tuple(shape),
        None if strides is None else tuple(strides),
        dtype,
        str(dtype),
        bool(is_read_only),
    )


def _producer(interface: dict[str, Any]) -> int | None:
    """The stream that it says its work is on; None: it says none.

    Looked up each time: it may be another by now, and a stream of before may be gone.
    """
    stream = interface.get("stream")
    if stream is not None and (type(stream) is not int or stream <= 0):
        raise InvalidArray(f"its __cuda_array_interface__ says stream {stream!r}, which is none")
    return stream


def _is_contiguous(view: dlpack.View) -> bool:
    """Whether it is in C order; the stride of a dimension of one says nothing."""
    if view.strides is None or 0 in view.shape:
        return True
    wanted = view.dtype.itemsize
    for size, step in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size != 1 and step != wanted:
            return False
        wanted *= size
    return True
