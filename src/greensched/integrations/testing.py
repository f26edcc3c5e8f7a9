"""A simulated GPU for tests: pools, virtual time, assertions on what ran where, leak checks.

The pytest plugin's fixtures `sim_gpu` and `sim_pool` use it; it needs no pytest.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

from greensched import Kernel, Partition, Pool, PoolState
from greensched.driver import simulated
from greensched.driver.simulated import Fault, Hang, SimulatedDriver, Span
from greensched.errors import InvalidRequest
from greensched.observability import sm_map
from greensched.observability.lease_history import Span as HeldSpan
from greensched.observability.lease_history import TracedDevice
from greensched.observability.pool_map import MOST_SPANS, PoolMap
from greensched.typing import T

#: The default GPU, with 132 SMs.
DEFAULT_GPU = "h200"
#: SMs of each GPC in a GPU of another size: a multiple of 8, as many as the default GPU's or fewer.
GPC = 16
#: The most SMs of a simulated GPU: five times as many as the largest preset has.
MOST_SMS = 1024


class SimPool(Protocol):
    """The fixture `sim_pool`: makes a pool, not open yet, over its own simulated GPU.

    Args:
        sms: The number of SMs of the GPU, even, at most 1024. Otherwise the GPU is an H200.
        faults: Faults to inject: `Fail`, `Slow`, `Hang`, `Crash` of `greensched.driver.simulated`.
        options: The options of `Pool`.
    """

    def __call__(self, sms: int = 132, *, faults: Iterable[Fault] = (), **options: Any) -> Pool: ...


@dataclass(frozen=True, slots=True)
class Launched:
    """One run of a kernel. Times are in seconds of the clock; `sms` are the ids of its SMs."""

    kernel: str
    device: int
    sms: frozenset[int]
    submitted: float
    start: float
    end: float

    def __str__(self) -> str:
        where = _place(self.sms, self.device)
        return f"{self.kernel} on {where} from {self.start:.6f} to {self.end:.6f} s"


class SimGPU:
    """Simulated machines on one virtual clock, for one test. Only `run` waits.

    Args:
        seed: determines the order of runnable threads.
    """

    def __init__(self, seed: int = 0) -> None:
        self.clock = simulated.VirtualClock(seed)
        self._machines: list[_Machine] = []
        self._pools: list[Pool] = []
        #: What the map shows: leases of `pool`, and kernels on machines of a program's own pools.
        self._watched: list[PoolMap | _Machine] = []

    # -- machines ----------------------------------------------------------------------------------

    @cached_property
    def driver(self) -> SimulatedDriver:
        """A machine with one GPU, for a program's `Pool(driver=...)`; always the same object."""
        return self.open()

    def open(
        self, what: str | int = DEFAULT_GPU, *, faults: Iterable[Fault] = ()
    ) -> SimulatedDriver:
        """Make a further machine.

        Args:
            what: As for `simulated.open` (`"h200x2"`), or the number of SMs of its GPU.
            faults: As for `SimPool`.

        Raises:
            InvalidRequest: There is no such machine.
        """
        machine = self._add(what, faults)
        self._watched.append(machine)
        return machine.driver

    def _add(self, what: str | int, faults: Iterable[Fault]) -> _Machine:
        script = tuple(faults)
        spec = what if isinstance(what, str) else [_model(what)]
        machine = _Machine(simulated.open(spec, clock=self.clock, faults=script), script)
        self._machines.append(machine)
        return machine

    def pool(self, sms: int = 132, *, faults: Iterable[Fault] = (), **options: Any) -> Pool:
        """Make a pool over its own machine; see `SimPool`."""
        pool = Pool(driver=self._add(sms, faults).driver, **options)
        self._pools.append(pool)
        self._watched.append(watched := PoolMap(pool.snapshot))
        pool.watch(watched.add)
        return pool

    # -- time --------------------------------------------------------------------------------------

    @property
    def time(self) -> float:
        """Seconds on the clock, which stands still while a loop or thread can run."""
        return self.clock.seconds()

    @property
    def backend_options(self) -> dict[str, Any]:
        """Options to run an anyio loop on this clock, for example for Starlette's TestClient."""
        return {"loop_factory": self.clock.new_event_loop}

    @property
    def anyio_backend(self) -> tuple[str, dict[str, Any]]:
        """The value for a fixture `anyio_backend` that runs async tests on this clock."""
        return "asyncio", self.backend_options

    def run(
        self,
        main: Callable[..., Awaitable[T]],
        *args: object,
        backend: Literal["asyncio", "trio"] = "asyncio",
    ) -> T:
        """Run an async function on the clock to its end."""
        return self.clock.run(main, *args, backend=backend)

    # -- what ran where ----------------------------------------------------------------------------

    def launches(self, kernel: Kernel | str | None = None) -> list[Launched]:
        """Return the launches that have ended on all machines, in the order of their starts.

        Args:
            kernel: a kernel, or its name, to return only its launches.
        """
        name = _name(kernel)
        kernels = (span for machine in self._machines for span in machine.kernels)
        launches = [_launched(span) for span in kernels if name in (None, span.name)]
        return sorted(launches, key=lambda launch: (launch.start, launch.end))

    def sms_of(self, partition: Partition) -> frozenset[int]:
        """Return the ids of a partition's SMs, to compare with launches. Only inside its block.

        Raises:
            PartitionClosed: The block has ended, or has not begun.
        """
        handle: Any = partition.context.resources.sm.handle
        return frozenset(sm_map.numbers(handle.mask))

    def assert_ran(
        self,
        kernel: Kernel | str,
        *,
        times: int | None = None,
        sms: int | None = None,
        on: frozenset[int] | None = None,
        by: float | None = None,
    ) -> list[Launched]:
        """Assert that a kernel ran, and how each of its launches ran; return the launches.

        A failure lists all launches with their SMs and times.

        Args:
            kernel: the kernel, or its name.
            times: the number of launches; None for at least one.
            sms: the number of SMs of each launch.
            on: the SMs of each launch, as from `sms_of`.
            by: the latest end, in seconds of the clock.
        """
        launches, name = self.launches(kernel), _name(kernel)
        if times is None:
            self._check(bool(launches), f"{name} ran 0 times, expected at least 1")
        else:
            self._check(
                len(launches) == times, f"{name} ran {len(launches)} times, expected {times}"
            )
        for launch in launches:
            at = sm_map.ranges(launch.sms)
            self._check(
                sms in (None, len(launch.sms)),
                f"{name} ran on {len(launch.sms)} SMs, expected {sms}",
            )
            self._check(
                on in (None, launch.sms),
                f"{name} ran on SMs {at}, expected {sm_map.ranges(on or ())}",
            )
            self._check(
                by is None or launch.end <= by,
                f"{name} ended at {launch.end:.6f} s, expected by {by} s",
            )
        return launches

    def assert_apart(self, first: Kernel | str, second: Kernel | str) -> None:
        """Assert that two kernels ran, and that their launches had no SM in common."""
        for launch, other in self._pairs(first, second):
            shared = launch.sms & other.sms if launch.device == other.device else frozenset()
            self._check(
                not shared,
                f"{launch.kernel} and {other.kernel} both ran on SMs {sm_map.ranges(shared)}",
            )

    def assert_at_once(self, first: Kernel | str, second: Kernel | str) -> None:
        """Assert that some launches of two kernels ran at the same time."""
        overlaps = any(a.start < b.end and b.start < a.end for a, b in self._pairs(first, second))
        self._check(overlaps, f"{_name(first)} and {_name(second)} never ran at the same time")

    def _pairs(self, first: Kernel | str, second: Kernel | str) -> list[tuple[Launched, Launched]]:
        firsts, seconds = self.assert_ran(first), self.assert_ran(second)
        return [(a, b) for a in firsts for b in seconds if a != b]

    def _check(self, holds: bool, problem: str) -> None:
        """Raise an AssertionError with what ran, because `python -O` ignores `assert`."""
        if not holds:
            raise AssertionError(f"{problem}\n{self._account()}")

    def _account(self) -> str:
        """Describe which kernels ran on which SMs, how many times, and when."""
        places: dict[tuple[str, int, frozenset[int]], list[Launched]] = {}
        for launch in self.launches():
            places.setdefault((launch.kernel, launch.device, launch.sms), []).append(launch)
        if not places:
            return "no kernel ran"
        rows = [
            f"  {kernel}: {len(ran)} times on {_place(sms, device)}, from {ran[0].start:.6f} to "
            f"{max(launch.end for launch in ran):.6f} s"
            for (kernel, device, sms), ran in places.items()
        ]
        return "\n".join(["what ran:", *rows])

    def map(self) -> str:
        """Return lines of text that show which SMs were in use at which time.

        The lines show the leases of the pools of `pool`, and the kernels on a machine of `open`.
        """
        return "\n".join(line for watched in self._watched for line in watched.lines(self.time))

    # -- the end -----------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """Return what is leased or alive now; a test must end with an empty list.

        Objects that a hung kernel or a device fault keeps alive are expected and not listed.
        """
        open_pools = [pool for pool in self._pools if pool.state in _OPEN]
        left = [f"a pool that was not closed, {pool!r}" for pool in open_pools]
        for machine in self._machines:
            driver = machine.driver
            if not _leaves_on_purpose(driver, machine.faults) and driver.live():
                gc.collect()  # uncollected garbage is not a leak
                alive = ", ".join(f"{number} x {kind}" for kind, number in driver.live().items())
                left += [f"alive on the GPU: {alive}"] if alive else []
        return left

    def close(self) -> list[str]:
        """Return what is left, and close as much of it as possible, for the next test."""
        leftovers = self.leftovers()
        for pool in self._pools:
            if pool.state in _OPEN:
                with suppress(Exception):  # the leak is reported anyway
                    self.run(pool.aclose, 0)
        for machine in self._machines:
            machine.driver.close()
        return leftovers


class _Machine:
    """A simulated machine, and the kernels that have run on it."""

    def __init__(self, driver: SimulatedDriver, faults: tuple[Fault, ...]) -> None:
        self.driver = driver
        self.faults = faults
        self.kernels: list[Span] = []
        driver.on_span(self._add)

    def _add(self, span: Span) -> None:
        if span.kind == "kernel":
            self.kernels.append(span)

    def lines(self, now: float) -> list[str]:
        ran = [_held(span) for span in self.kernels[-MOST_SPANS:]]
        if not ran:
            return []
        facts = [device.model.facts(i) for i, device in enumerate(self.driver.devices)]
        devices = [
            TracedDevice(fact.ordinal, fact.name, fact.uuid, fact.sm_count, fact.sm_count, 1)
            for fact in facts
        ]
        return sm_map.text(ran, devices, min(span.start for span in ran), now)


def _held(span: Span) -> HeldSpan:
    """Return the run of a kernel as a lease of its SMs, each of which is a cell."""
    start, end = span.start / 1e9, span.end / 1e9
    return HeldSpan(0, span.name, "", span.device, span.sms, span.sms.bit_count(), start, end)


#: States of a pool that is not closed.
_OPEN = (PoolState.OPENING, PoolState.OPEN, PoolState.CLOSING)


def _model(sms: int) -> simulated.DeviceModel:
    """Return the default device's model with this many SMs."""
    usual = simulated.PRESETS[DEFAULT_GPU]
    if sms == usual.sm_count:
        return usual
    if type(sms) is not int or not 2 <= sms <= MOST_SMS or sms % 2:
        raise InvalidRequest(f"sms={sms!r}: give an even number of SMs from 2 to {MOST_SMS}")
    gpcs = [GPC] * (sms // GPC) + [sms % GPC] * (sms % GPC > 0)
    return replace(usual, name=f"{usual.name} of {sms} SMs", gpcs=tuple(gpcs))


def _leaves_on_purpose(driver: SimulatedDriver, faults: Iterable[Fault]) -> bool:
    """Say whether a failed device or a hanging kernel must leave objects alive."""
    hung = any(
        isinstance(fault, Hang) and driver.script.starts[fault.kernel] >= fault.nth
        for fault in faults
    )
    return hung or any(device.fault is not None for device in driver.devices)


def _launched(span: Span) -> Launched:
    times = (nanoseconds / 1e9 for nanoseconds in (span.enqueued, span.start, span.end))
    return Launched(span.name, span.device, frozenset(sm_map.numbers(span.sms)), *times)


def _place(sms: frozenset[int], device: int) -> str:
    return f"{len(sms)} SMs ({sm_map.ranges(sms)}) of device {device}"


def _name(kernel: Kernel | str | None) -> str | None:
    return kernel.name if isinstance(kernel, Kernel) else kernel
