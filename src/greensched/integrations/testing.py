"""A simulated GPU for tests: pools on it, virtual time, what ran where, and what is left.

The fixtures `sim_gpu` and `sim_pool` of the pytest plugin are made of it; it needs no pytest.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

from greensched import Kernel, Partition, Pool, PoolState
from greensched.driver import simulated
from greensched.driver.simulated import Fault, Hang, SimulatedDriver, Span
from greensched.errors import InvalidRequest

T = TypeVar("T")

#: What a machine is unless a test says otherwise: a GPU of 132 SMs.
USUAL = "h200"
#: SMs of a GPC of a GPU of another size: whole sets of 8, and no more than the usual one has.
GPC = 16


class SimPool(Protocol):
    """What the fixture `sim_pool` is: makes a pool over a simulated GPU of its own, not open yet.

    Args:
        sms: how many SMs the GPU has, a multiple of 2. It is an H200 in all else.
        faults: what shall go wrong on it: `Fail`, `Slow`, `Hang`, `Crash` of
            `greensched.driver.simulated`.
        options: as of `Pool`.
    """

    def __call__(self, sms: int = 132, *, faults: Iterable[Fault] = (), **options: Any) -> Pool: ...


@dataclass(frozen=True, slots=True)
class Launched:
    """A kernel as it ran. Times in seconds of the clock; `sms` are the ids it could run on."""

    kernel: str
    device: int
    sms: frozenset[int]
    submitted: float
    start: float
    end: float

    def __str__(self) -> str:
        return f"{self.kernel} on {len(self.sms)} SMs from {self.start:.6f} to {self.end:.6f} s"


class SimGPU:
    """Simulated machines on one virtual clock, for one test. Nothing here waits, but `run`.

    Args:
        seed: of the order in which what can run goes.
    """

    def __init__(self, seed: int = 0) -> None:
        self.clock = simulated.VirtualClock(seed)
        self._machines: list[tuple[SimulatedDriver, tuple[Fault, ...]]] = []
        self._pools: list[Pool] = []
        self._spans: list[Span] = []

    # -- machines ----------------------------------------------------------------------------------

    @cached_property
    def driver(self) -> SimulatedDriver:
        """A machine with one GPU, for `Pool(driver=...)` of a program; the same each time."""
        return self.open()

    def open(self, what: str | int = USUAL, *, faults: Iterable[Fault] = ()) -> SimulatedDriver:
        """Another machine.

        Args:
            what: as `simulated.open` takes it (`"h200x2"`), or how many SMs its GPU has.
            faults: as of `SimPool`.

        Raises:
            InvalidRequest: no such machine.
        """
        given = tuple(faults)
        spec = what if isinstance(what, str) else [_model(what)]
        driver = simulated.open(spec, clock=self.clock, faults=given)
        driver.on_span(self._spans.append)
        self._machines.append((driver, given))
        return driver

    def pool(self, sms: int = 132, *, faults: Iterable[Fault] = (), **options: Any) -> Pool:
        """A pool over a machine of its own; see `SimPool`."""
        pool = Pool(driver=self.open(sms, faults=faults), **options)
        self._pools.append(pool)
        return pool

    # -- time --------------------------------------------------------------------------------------

    @property
    def time(self) -> float:
        """Seconds on the clock. It stands while anybody has something to do."""
        return self.clock.seconds()

    @property
    def backend_options(self) -> dict[str, Any]:
        """For what starts a loop by anyio, as Starlette's TestClient does: it is on this clock."""
        return {"loop_factory": self.clock.new_event_loop}

    @property
    def anyio_backend(self) -> tuple[str, dict[str, Any]]:
        """For the fixture `anyio_backend`: async fixtures and tests are on this clock, then."""
        return "asyncio", self.backend_options

    def run(
        self,
        main: Callable[..., Awaitable[T]],
        *args: object,
        backend: Literal["asyncio", "trio"] = "asyncio",
    ) -> T:
        """Runs an async function on the clock, to its end."""
        return self.clock.run(main, *args, backend=backend)

    # -- what ran where ----------------------------------------------------------------------------

    def launches(self, kernel: Kernel | str | None = None) -> list[Launched]:
        """The kernels that have ended, of all machines, in the order of their starts.

        Args:
            kernel: one kernel's alone, itself or by name.
        """
        name = _name(kernel)
        kernels = (span for span in self._spans if span.kind == "kernel")
        found = [_launched(span) for span in kernels if name in (None, span.name)]
        return sorted(found, key=lambda one: (one.start, one.end))

    def sms_of(self, partition: Partition) -> frozenset[int]:
        """The ids of a partition's SMs, to compare with what ran. Only inside its block.

        Raises:
            PartitionClosed: it is over, or was never granted.
        """
        handle: Any = partition.context.resources.sm.handle
        return _ids(handle.mask)

    def assert_ran(
        self,
        kernel: Kernel | str,
        *,
        times: int | None = None,
        sms: int | None = None,
        on: frozenset[int] | None = None,
        by: float | None = None,
    ) -> list[Launched]:
        """Asserts that a kernel ran, and that each launch of it was as said; returns them.

        Args:
            kernel: itself, or by name.
            times: how often; None: at least once.
            sms: how many SMs it had.
            on: which SMs it had, as `sms_of` gives them.
            by: when it had ended, in seconds of the clock.
        """
        found, name = self.launches(kernel), _name(kernel)
        wanted = len(found) or 1 if times is None else times
        _check(len(found) == wanted, f"{name} ran {len(found)} times, not {wanted}", self._account)
        for one in found:
            _check(sms in (None, len(one.sms)), f"not on {sms} SMs", one)
            _check(on in (None, one.sms), f"on SMs {sorted(one.sms)}, not {sorted(on or ())}", one)
            _check(by is None or one.end <= by, f"not by {by} s", one)
        return found

    def assert_apart(self, first: Kernel | str, second: Kernel | str) -> None:
        """Asserts that two kernels ran, and that no launches of them had an SM in common."""
        for one, other in self._pairs(first, second):
            shared = one.sms & other.sms if one.device == other.device else ()
            _check(not shared, f"both on SMs {sorted(shared)}", one, other)

    def assert_at_once(self, first: Kernel | str, second: Kernel | str) -> None:
        """Asserts that some launches of two kernels ran at the same time."""
        met = any(a.start < b.end and b.start < a.end for a, b in self._pairs(first, second))
        names = f"{_name(first)} and {_name(second)}"
        _check(met, f"{names} never ran at the same time", *self.launches())

    def _pairs(self, first: Kernel | str, second: Kernel | str) -> list[tuple[Launched, Launched]]:
        firsts, seconds = self.assert_ran(first), self.assert_ran(second)
        return [(a, b) for a in firsts for b in seconds if a != b]

    @property
    def _account(self) -> str:
        """What ran, in few words."""
        often = Counter(one.kernel for one in self.launches())
        said = ", ".join(f"{name} {times} times" for name, times in often.items())
        return f"there ran {said}" if said else "no kernel ran at all"

    # -- the end -----------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """What is leased or alive now; empty: nothing, as it must be when a test ends.

        What a hung kernel or a device fault kept is left on purpose, and not told.
        """
        open_pools = [pool for pool in self._pools if pool.state in _OPEN]
        found = [f"a pool that was not closed, {pool!r}" for pool in open_pools]
        for driver, faults in self._machines:
            if not _is_spoilt(driver, faults) and driver.live():
                gc.collect()  # what is only waiting to be collected is not left
                alive = ", ".join(f"{number} x {kind}" for kind, number in driver.live().items())
                found += [f"alive on the GPU: {alive}"] if alive else []
        return found

    def end(self) -> list[str]:
        """Says what is left, then ends it as far as can be, so that the next test is alone."""
        left = self.left()
        for pool in self._pools:
            if pool.state in _OPEN:
                with suppress(Exception):  # it was told; this is tidying
                    self.run(pool.aclose, 0)
        for driver, _ in self._machines:
            driver.close()
        return left


#: Where a pool grants, or may yet.
_OPEN = (PoolState.OPENING, PoolState.OPEN, PoolState.CLOSING)


def _model(sms: int) -> simulated.DeviceModel:
    """The usual device, with so many SMs."""
    usual = simulated.PRESETS[USUAL]
    if sms == usual.sm_count:
        return usual
    if type(sms) is not int or sms < 2 or sms % 2:
        raise InvalidRequest(f"sms={sms!r}: a simulated GPU has an even number of SMs, at least 2")
    gpcs = [GPC] * (sms // GPC) + [sms % GPC] * (sms % GPC > 0)
    return replace(usual, name=f"{usual.name} of {sms} SMs", gpcs=tuple(gpcs))


def _is_spoilt(driver: SimulatedDriver, faults: Iterable[Fault]) -> bool:
    """Whether greensched had to leave things alive: a device failed, or a kernel hangs."""
    hung = any(
        isinstance(fault, Hang) and driver.script.starts[fault.kernel] >= fault.nth
        for fault in faults
    )
    return hung or any(device.fault is not None for device in driver.devices)


def _launched(span: Span) -> Launched:
    times = (nanoseconds / 1e9 for nanoseconds in (span.enqueued, span.start, span.end))
    return Launched(span.name, span.device, _ids(span.sms), *times)


def _check(holds: bool, said: str, *facts: object) -> None:
    """As `assert`, which `python -O` would leave out."""
    if not holds:
        raise AssertionError(f"{said}: {'; '.join(map(str, facts))}")


def _ids(mask: int) -> frozenset[int]:
    return frozenset(index for index in range(mask.bit_length()) if mask >> index & 1)


def _name(kernel: Kernel | str | None) -> str | None:
    return kernel.name if isinstance(kernel, Kernel) else kernel
