"""Measuring a piece of work on partitions of each size, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from greensched._asynclib import is_coroutine_function
from greensched.errors import InvalidRequest
from greensched.leasing.latency import LatencyCurve
from greensched.scheduling.cells import DeviceCells

if TYPE_CHECKING:
    from greensched.pool import Pool

#: Times each size is measured, in turns with the others: a machine's speed changes from minute to
#: minute. The 95th percentile of 20 is the largest but one.
REPEATS = 20
#: Sizes measured, at most, unless told otherwise: all there are on a device cut by eights.
SIZES = 17


def sizes_of(cells: DeviceCells) -> tuple[int, ...]:
    """Sizes worth measuring: multiples of a cell, evenly, and the whole device."""
    step = -(-cells.count // (SIZES - 1))
    counts = range(step, cells.count + 1, step)
    return tuple(dict.fromkeys((*(count * cells.size for count in counts), cells.total)))


async def measure(
    pool: Pool,
    clock: Callable[[], float],
    sizes: Sequence[int],
    fn: Callable[..., Any],
    args: tuple[object, ...],
    *,
    device: int,
    service: str | None,
) -> LatencyCurve:
    """See `Pool.measure`."""
    if not callable(fn):
        raise InvalidRequest(f"measure calls a function, and {fn!r} is none")
    given: object = sizes
    if not isinstance(given, Iterable):
        raise InvalidRequest(f"measure(sms={sizes!r}): give the sizes, such as [8, 16, 32]")
    sizes = tuple(given)  # each of them is measured many times
    samples: dict[int, list[float]] = {}
    for turn in range(1 + REPEATS):
        for sms in sizes:
            async with pool.partition(sms, device=device, service=service) as p:
                start = clock()
                await (fn(p, *args) if is_coroutine_function(fn) else p.run(fn, *args))
                took = clock() - start
                if turn:  # the first time, things are made and loaded
                    samples.setdefault(p.sm_count, []).append(took)
    return LatencyCurve(samples)
