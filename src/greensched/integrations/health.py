"""Check the GPUs of a pool: with the driver, and by what hangs."""

from __future__ import annotations

from greensched import Pool
from greensched.errors import Closed, CUDAError


def fault_of(pool: Pool) -> BaseException | None:
    """Check the pool's devices now, and return the fault of one, or None. Does not block.

    Work that hangs (`Pool.hung`) is a fault once it holds every SM of the pool: it can grant none.

    Making an event is the cheapest call that returns the fault of a context. On an H200 it waited
    for nothing (docs/measurements/h200-580/stuck-and-lost.json, "create event") except a first use
    of a kernel elsewhere (first-use-holds.json there): during that a device is not checked.
    """
    if pool.fault is not None or not pool.is_ready:
        return pool.fault
    try:
        for device in pool.devices:
            if not device.loader.first_uses:
                device.primary.create_event().close()
        hung = pool.hung
        if hung and sum(one.sms for one in hung) >= pool.statistics().sms_total:
            return hung[0]
    except CUDAError as error:
        return error
    except Closed:  # another thread has just closed the pool
        pass
    return None
