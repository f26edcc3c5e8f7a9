"""Warp on a partition's SMs. Needs the extra `warp`.

    import greensched.integrations.warp as gs_warp

    wp.launch(kernel, dim=n, inputs=[x], stream=gs_warp.stream(p))

and inside `p.run`, `gs_warp.stream()`. Pass the stream to each launch and copy: Warp's current
stream (`ScopedStream`) is process-wide, so concurrent partitions would overwrite it. An array can
be a kernel argument of `p.launch` by DLPack, ordered after Warp's current stream.
"""

from __future__ import annotations

from greensched import CallContext, Partition, call_context
from greensched.errors import MissingPackage

try:
    import warp
except ModuleNotFoundError as error:
    raise MissingPackage(__name__, "warp-lang", "warp") from error


def stream(where: Partition | CallContext | None = None) -> warp.Stream:
    """Wrap the stream of a partition, or of the running call, for Warp. Valid with the lease.

    The stream is ordered after Warp's current stream.

    Raises:
        InvalidRequest: There is no partition or call, or the GPU is simulated.
        WouldBlock: As for `Partition.stream`.
    """
    call = call_context(where)
    device = warp.get_cuda_device(call.device_id)
    other = warp.get_stream(device).cuda_stream
    call.stream.follow(int(other) or 1)
    return warp.Stream(device, cuda_stream=call.stream.address)
