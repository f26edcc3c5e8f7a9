"""Arrays of other libraries in device memory, used in place.

An object with `__dlpack__` or `__cuda_array_interface__` can be a kernel's argument or one end of
a copy. Rules:

1. DLPack is tried first: given our stream, the producer orders it after its own, by an event. In
   the other protocol the producer names its stream, and we record the event. A producer that names
   no stream has no work in flight, or the user waits for it. No host thread ever waits.
2. The array is checked with the arguments, and ordered (`dependencies`) once the stream is known,
   both before anything is queued.
3. The array and its memory are kept until the ticket of the work that uses it is reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from greensched.device import dlpack
from greensched.device.buffers import BoundUser, Buffer, Use, dtype_of
from greensched.device.streams import Stream
from greensched.device.tickets import TicketedStream
from greensched.errors import GreenschedError, InvalidArray, WrongDevice


class ForeignArray:
    """Another library's device array, used like a `Buffer`. Made by `as_foreign_array`.

    Attributes:
        source: The array. Its DLPack capsule, if any, is kept with it.
        device_id: The ordinal of its device, or None if unknown.
        address, shape, dtype, nbytes: As for a Buffer; a dtype that numpy lacks becomes plain
            bytes.
        kind: The dtype in words.
        is_typed: Whether its elements have a dtype; otherwise it is plain bytes.
        is_read_only: Whether the array says so. Not every array does.
    """

    __slots__ = (
        "_capsule",
        "address",
        "device_id",
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
        device_id: int | None,
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
        self.device_id = device_id
        self._capsule = capsule
        if not _is_contiguous(view):
            raise InvalidArray(
                f"is not contiguous: {view.shape} with strides of {view.strides} bytes: "
                "copy it first"
            )

    def check(self, device_id: int) -> None:
        """Raise if the array is known to belong to another device.

        Raises:
            WrongDevice: It belongs to another device.
        """
        if self.device_id is not None and self.device_id != device_id:
            raise WrongDevice("this array", self.device_id, device_id)

    def holds(self, dtype: np.dtype[Any]) -> bool:
        """Say whether its elements have this dtype, or are bytes that can be read as such."""
        return self.dtype == dtype or (not self.is_typed and self.nbytes % dtype.itemsize == 0)

    def dependencies(self, stream: TicketedStream, *, write: bool) -> Sequence[Use]:  # noqa: ARG002  the signature of Buffer's method
        """Order the stream behind the array's producer. Its other users are unknown.

        Raises:
            WrongDevice: Its memory belongs to another device.
            InvalidArray: Its memory is on no device, or its producer refuses to export it.
            InvalidRequest: Its producer's stream is capturing, or cannot be waited for.
        """
        self.order(stream.stream)
        return ()

    def order(self, stream: Stream) -> None:
        """Order later work on a stream after the producer. Raises as `dependencies`."""
        context = stream.context
        if self._capsule is not None:
            _capsule_of(self.source, stream.address)  # for its order only; the first one is kept
            return
        if self.nbytes:
            device = context.driver.memory_device(self.address)
            if device is None:
                raise InvalidArray(
                    f"the array is at {self.address:#x}, which is not device memory: "
                    "`await p.upload(array)` first"
                )
            if device != context.device_id:
                raise WrongDevice("this array", device, context.device_id)
        producer = _producer(self.source.__cuda_array_interface__)
        if producer is not None:
            stream.follow(producer)

    def record_use(self, stream: TicketedStream, ticket: int, *, write: bool) -> None:  # noqa: ARG002  the signature of Buffer's method
        """Keep it alive until work on `stream` up to `ticket` is done."""
        stream.keep(ticket, self)

    def bind(self, bound: BoundUser, *, write: bool) -> None:
        """Do nothing, because the bound launch keeps it alive until `unbind`."""

    def unbind(self, bound: BoundUser, ticket: int) -> None:
        """Keep it alive until the last use of a bound launch, with this ticket, is done."""
        bound.track.keep(ticket, self)

    def __repr__(self) -> str:
        return f"<{type(self.source).__name__} {self.shape} {self.kind}>"


#: An array in device memory that work can use.
DeviceOperand = Buffer | ForeignArray


def is_on_device(value: object) -> bool:
    """Say whether a value is an array in device memory, according to its own protocols."""
    if isinstance(value, np.ndarray):
        return False
    device_of = getattr(value, "__dlpack_device__", None)
    if device_of is not None:
        return int(device_of()[0]) in (dlpack.CUDA, dlpack.CUDA_MANAGED)
    return hasattr(value, "__cuda_array_interface__")


def as_foreign_array(value: Any) -> ForeignArray | None:
    """Return a view of another library's array, or None if the value is not an array.

    Raises:
        InvalidArray: It is in host memory, not contiguous, of foreign byte order, masked, or its
            producer refuses to export it; says why.
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
                device_id=device if kind == dlpack.CUDA else None,
                capsule=capsule,
            )
        raise InvalidArray("is not in device memory: `await p.upload(array)` first")
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        return None
    _producer(interface)
    return ForeignArray(value, _view(interface), device_id=None)


def _capsule_of(source: Any, stream: int) -> object:
    """Return the array's DLPack capsule for work on a stream; -1 means no stream."""
    try:
        try:
            return source.__dlpack__(stream=stream, max_version=dlpack.VERSION)
        except TypeError:  # the producer predates DLPack 1.0
            return source.__dlpack__(stream=stream)
    except GreenschedError:  # from a Buffer under another library's view of it
        raise
    except Exception as error:
        raise InvalidArray(f"is not exported by its library: {error}") from error


def _view(interface: dict[str, Any]) -> dlpack.View:
    """Read a `__cuda_array_interface__` of version 2 or 3."""
    try:
        dtype = np.dtype(interface["typestr"])
        address, is_read_only = interface["data"]
        shape, strides = interface["shape"], interface.get("strides")
        mask = interface.get("mask")
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArray(f"its __cuda_array_interface__ is malformed: {error!r}") from None
    if mask is not None:
        raise InvalidArray("is masked, and a kernel does not see the mask: fill it first")
    return dlpack.View(
        int(address or 0),
        tuple(shape),
        None if strides is None else tuple(strides),
        dtype,
        str(dtype),
        bool(is_read_only),
    )


def _producer(interface: dict[str, Any]) -> int | None:
    """Return the stream that the producer names, or None if it names none.

    Read each time, because the array may have a new stream, and the old one may be gone.
    """
    stream = interface.get("stream")
    if stream is not None and (type(stream) is not int or stream <= 0):
        raise InvalidArray(
            f"its __cuda_array_interface__ has stream {stream!r}: a positive int or None is needed"
        )
    return stream


def _is_contiguous(view: dlpack.View) -> bool:
    """Say whether it is in C order. The stride of a dimension of size one does not matter."""
    if view.strides is None or 0 in view.shape:
        return True
    wanted = view.dtype.itemsize
    for size, step in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size != 1 and step != wanted:
            return False
        wanted *= size
    return True
