"""numba-cuda on a partition's SMs. Needs the extra `numba`.

    import greensched.integrations.numba as gs_numba

    with gs_numba.on(p) as stream:
        kernel[blocks, threads, stream](x, y)

and inside `p.run`, `gs_numba.on()`. numba has no current stream: a launch without a stream runs on
the whole GPU. A device array can be a kernel argument of `p.launch`, ordered after the stream on
which it was made; wait for any other stream that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from greensched import CallContext, Partition, call_context
from greensched.errors import MissingPackage

try:
    from numba import cuda
except ModuleNotFoundError as error:
    raise MissingPackage(__name__, "numba-cuda", "numba") from error


@contextmanager
def on(where: Partition | CallContext | None = None) -> Iterator[Any]:
    """Open a block for numba's launches and copies on a partition's stream; no `await` inside.

    The primary context is current in it, because numba works in no other context (its
    `external_stream` accepts the stream of a green context).

    Args:
        where: a partition; None for the running call of `p.run`.

    Returns:
        The stream for numba, to be given to each launch and copy. Valid with the lease.

    Raises:
        InvalidRequest: There is no partition or call, or the GPU is simulated.
        WouldBlock: As for `Partition.stream`.
    """
    call = call_context(where)
    with call.entered(), call.stream.context.primary.entered():
        cuda.select_device(call.device_id)
        yield cuda.external_stream(call.stream.address)
