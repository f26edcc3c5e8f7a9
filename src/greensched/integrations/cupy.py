"""CuPy on a partition's SMs. Needs the extra `cupy`.

    import greensched.integrations.cupy as gs_cupy

    y = await p.run(cupy.fft.fft, x)   # CuPy's current stream is the partition's, by the import
    with gs_cupy.current(p):           # the same for what is submitted here and now
        z = x + 1

An array is a kernel argument as it is: by DLPack, behind CuPy's current stream. CuPy's memory pool
goes by the stream that memory was taken on, and is told of no other: use what a call returned once
it was awaited, and await that work before the array is forgotten, or name it to the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cupy

from greensched import CallContext, Partition, call_context, register_call_hook


def stream(where: Partition | CallContext | None = None) -> Any:
    """CuPy's view of a partition's stream, or of the running call's. As good as the lease.

    Raises:
        InvalidRequest: neither is there, or the GPU is simulated.
        WouldBlock: as `Partition.stream`.
    """
    return cupy.cuda.Stream.from_external(call_context(where).stream)


@contextmanager
def current(p: Partition, *arrays: Any) -> Iterator[Any]:
    """A block in which CuPy's current stream is the partition's; no `await` inside.

    It comes behind what CuPy's current stream had before. Of the calling thread alone.

    Args:
        p: whose launches and copies it is in one order with.
        arrays: those made elsewhere that are used inside: they are kept until that is done, so
            their memory is not used again before.

    Returns:
        The stream.

    Raises:
        InvalidRequest: the GPU is simulated: CuPy cannot work there.
        WouldBlock: as `Partition.stream`.
    """
    call = call_context(p)
    ours = stream(call)
    call.stream.follow(_address(cupy.cuda.get_current_stream(call.device)))
    with call.entered(), cupy.cuda.Device(call.device), ours:
        try:
            yield ours
        finally:
            if arrays:
                p.keep_alive(*arrays)


def around_call(
    call: CallContext,
    given: Sequence[object],  # noqa: ARG001  any argument may be of this library
) -> Callable[[Callable[[], Any]], Any] | None:
    """What `p.run` does for CuPy once this module is imported; see `greensched.register_call_hook`.

    The call's stream comes behind CuPy's current stream of who submits it, and is CuPy's current
    one in the call. The arguments live until it is done.
    """
    if call.is_simulated:
        return None
    theirs = cupy.cuda.get_current_stream(call.device)

    def around(function: Callable[[], Any]) -> Any:
        call.stream.follow(_address(theirs))
        with cupy.cuda.Device(call.device), stream(call):
            return function()

    return around


def _address(theirs: Any) -> int:
    """CuPy's null stream is the legacy default one, which has another number for the driver."""
    return int(theirs.ptr) or 1


register_call_hook(around_call)
