"""Check the GPUs of a pool, by a driver call and by hanging work."""

from __future__ import annotations

from greensched import Pool
from greensched.errors import Closed, CUDAError


def fault_of(pool: Pool) -> BaseException | None:
    """Check the pool's devices now; return the first fault, or None. Does not block.

    Hanging work (`Pool.hung`) counts as a fault once it holds every SM, so that nothing can run.

    Making an event is the cheapest call that returns the fault of a context. On an H200 it never
    waited (docs/measurements/h200-580/stuck-and-lost.json, "create event") except during a first
    use of a kernel (first-use-holds.json there), so a device is not checked during a first use.
    """
    if pool.fault is not None or not pool.is_ready:
        return pool.fault
    try:
        for device in pool.devices:
            if not device.loader.first_uses:
                device.primary.create_event().close()
        hung = pool.hung
        if hung and sum(hang.sms for hang in hung) >= pool.statistics().sms_total:
            return hung[0]
    except CUDAError as error:
        return error
    except Closed:  # another thread has just closed the pool
        pass
    return None
