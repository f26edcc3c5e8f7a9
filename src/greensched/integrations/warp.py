"""Warp on a partition's SMs. Needs the extra `warp`.

    import greensched.integrations.warp as gs_warp

    wp.launch(kernel, dim=n, inputs=[x], stream=gs_warp.stream(p))

and inside `p.run`, `gs_warp.stream()`. Name the stream at each launch and copy: Warp's current
stream (`ScopedStream`) is the whole process's, so two partitions at work would take it from each
other. An array is a kernel argument of ours as it is: by DLPack, behind Warp's current stream.
"""

from __future__ import annotations

import warp

from greensched import CallContext, Partition, call_context


def stream(where: Partition | CallContext | None = None) -> warp.Stream:
    """Warp's view of a partition's stream, or of the running call's. As good as the lease.

    It comes behind what Warp's own current stream has now.

    Raises:
        InvalidRequest: neither is there, or the GPU is simulated.
        WouldBlock: as `Partition.stream`.
    """
    call = call_context(where)
    device = warp.get_cuda_device(call.device)
    theirs = warp.get_stream(device).cuda_stream
    call.stream.follow(int(theirs) or 1)
    return warp.Stream(device, cuda_stream=call.stream.address)
