"""CuPy on a partition's SMs. Needs the extra `cupy`.

    import greensched.integrations.cupy as gs_cupy

    y = await p.run(cupy.fft.fft, x)   # with the import, CuPy's current stream is the partition's
    with gs_cupy.current(p):           # the same for work that is submitted here
        z = x + 1

An array can be a kernel argument by DLPack, ordered after CuPy's current stream. CuPy's memory
pool knows only the stream on which memory was allocated. So await a call before you use its result,
and await work on an array before you drop the array, or pass the array to the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from greensched import CallContext, Partition, call_context, register_call_hook
from greensched.errors import MissingPackage

try:
    import cupy
except ModuleNotFoundError as error:
    raise MissingPackage(__name__, "cupy-cuda13x", "cupy") from error


def stream(where: Partition | CallContext | None = None) -> Any:
    """Wrap the stream of a partition, or of the running call, for CuPy. Valid with the lease.

    Raises:
        InvalidRequest: There is no partition or call, or the GPU is simulated.
        WouldBlock: As for `Partition.stream`.
    """
    return cupy.cuda.Stream.from_external(call_context(where).stream)


@contextmanager
def current(p: Partition, *arrays: Any) -> Iterator[Any]:
    """Open a block in which CuPy's current stream is the partition's; no `await` inside.

    The block's work is ordered after CuPy's current stream. Affects the calling thread only.

    Args:
        p: The partition; the block's work is ordered with its launches and copies.
        arrays: Arrays from elsewhere that are used inside. They are kept until that work is done,
            so that their memory is not reused before.

    Returns:
        The stream.

    Raises:
        InvalidRequest: The GPU is simulated, and CuPy cannot work on it.
        WouldBlock: As for `Partition.stream`.
    """
    call = call_context(p)
    own = stream(call)
    call.stream.follow(_address(cupy.cuda.get_current_stream(call.device_id)))
    with call.entered(), cupy.cuda.Device(call.device_id), own:
        try:
            yield own
        finally:
            if arrays:
                p.keep_alive(*arrays)


def around_call(
    call: CallContext,
    arguments: Sequence[object],  # noqa: ARG001  a call hook has it; the function may use this library whatever its arguments
) -> Callable[[Callable[[], Any]], Any] | None:
    """Run `p.run` with CuPy: a call hook, registered when this module is imported.

    The call's stream is ordered after CuPy's current stream at submission, and is CuPy's current
    stream in the call. The arguments live until the call is done.
    """
    if call.is_simulated:
        return None
    other = cupy.cuda.get_current_stream(call.device_id)

    def around(function: Callable[[], Any]) -> Any:
        call.stream.follow(_address(other))
        with cupy.cuda.Device(call.device_id), stream(call):
            return function()

    return around


def _address(other: Any) -> int:
    """Return a stream's address for the driver. CuPy's null stream is the legacy default, 1."""
    return int(other.ptr) or 1


register_call_hook(around_call)
