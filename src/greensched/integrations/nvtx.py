"""NVTX ranges of pools, for Nsight Systems and other tools. Needs the extra `nvtx`.

    from greensched.integrations.nvtx import annotate

    annotate(pool)

    nsys profile --trace=cuda,nvtx python service.py

The ranges are in the domain `greensched`, with the service class as the category. `wait` lasts from
a request to its grant. `lease` lasts from the grant until its work is done; its payload is its
number. `call` surrounds each function of `p.run`, on its thread, so that tools show its kernels
inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from greensched import (
    CallContext,
    Cancelled,
    Drained,
    Expired,
    Granted,
    Pool,
    Record,
    Refused,
    Requested,
    register_call_hook,
)
from greensched.errors import MissingPackage

try:
    import nvtx
except ModuleNotFoundError as error:
    raise MissingPackage(__name__, "nvtx", "nvtx") from error

DOMAIN = "greensched"


def annotate(pool: Pool) -> None:
    """Show what happens in a pool, and the calls of every pool, as ranges. Never waits.

    Does nothing if no tool is attached to the process. Under a tool each lease costs as much as
    with `Pool.watch`.
    """
    domain = nvtx.get_domain(DOMAIN)
    if isinstance(domain, nvtx.Domain):
        pool.watch(_Ranges(domain))
        register_call_hook(around_call)


def around_call(
    call: CallContext,
    arguments: Sequence[object],  # noqa: ARG001  the signature of a call hook
) -> Callable[[Callable[[], Any]], Any]:
    """Run `p.run` in a range. A call hook, registered by `annotate`."""
    domain, message = nvtx.get_domain(DOMAIN), f"call: {call.sm_count} SMs"

    def around(function: Callable[[], Any]) -> Any:
        domain.push_range(message=message)
        try:
            return function()
        finally:
            domain.pop_range()

    return around


class _Ranges:
    """Turns the records of one pool into ranges."""

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._waits: dict[int, int] = {}
        self._leases: dict[int, int] = {}

    def __call__(self, record: Record) -> None:
        match record:
            case Requested():
                message = f"wait: {', '.join(record.sizes)} SMs"
                self._waits[record.request] = self._start(message, record.service, record.request)
            case Granted():
                self._end(self._waits, record.request)
                message = f"lease: {record.sms} SMs of device {record.device}"
                self._leases[record.lease] = self._start(message, record.service, record.lease)
            case Refused() | Expired() | Cancelled():
                self._end(self._waits, record.request)
            case Drained():
                self._end(self._leases, record.lease)

    def _start(self, message: str, service: str, payload: int) -> int:
        category = service or "no class"
        started: int = self._domain.start_range(message=message, category=category, payload=payload)
        return started

    def _end(self, ranges: dict[int, int], number: int) -> None:
        opened = ranges.pop(number, None)
        if opened is not None:
            self._domain.end_range(opened)
