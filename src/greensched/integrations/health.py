"""Whether the GPU of a pool is well, asked of the driver."""

from __future__ import annotations

from greensched import Pool
from greensched.errors import Closed, CUDAError


def fault_of(pool: Pool) -> BaseException | None:
    """What is wrong with a device, asked now. Does not block.

    Making an event is the least that a driver answers with the fault of its context. An H200's was
    seen to wait for nothing (docs/measurements/h200-580/stuck-and-lost.json, "create event") but a
    kernel's first use by somebody else (first-use-holds.json there): then it is not asked.
    """
    if pool.fault is not None or not pool.is_ready:
        return pool.fault
    try:
        for device in pool.devices:
            if not device.loader.first_uses:
                device.primary.create_event().close()
    except CUDAError as error:
        return error
    except Closed:  # by another thread's hand, just now
        pass
    return None
