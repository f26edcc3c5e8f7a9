"""numba-cuda on a partition's SMs. Needs the extra `numba`.

    import greensched.integrations.numba as gs_numba

    with gs_numba.on(p) as stream:
        kernel[blocks, threads, stream](x, y)

and inside `p.run`, `gs_numba.on()`. numba has no current stream: what is launched without one goes
to the whole GPU. A device array is a kernel argument of ours as it is, by the stream that it was
made on; wait for another one that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba import cuda

from greensched import CallContext, Partition, call_context


@contextmanager
def on(where: Partition | CallContext | None = None) -> Iterator[Any]:
    """A block for numba's launches and copies on a partition's stream; no `await` inside.

    The primary context is current in it: numba works in no other (its `external_stream` does not
    mind that the stream is of a green one).

    Args:
        where: a partition; None: the running call of `p.run`.

    Returns:
        numba's view of the stream, to be given to each launch and copy. As good as the lease.

    Raises:
        InvalidRequest: neither is there, or the GPU is simulated.
        WouldBlock: as `Partition.stream`.
    """
    call = call_context(where)
    with call.entered(), call.stream.context.primary.entered():
        cuda.select_device(call.device)
        yield cuda.external_stream(call.stream.address)
