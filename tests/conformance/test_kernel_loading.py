"""A kernel's first use waits until nothing runs on its device, and holds up the driver meanwhile.

Launches, copies and records of every stream wait for it then, on an H200. So threads make them: no
loop ever stands still, whatever other code loads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

from greensched import BoundLaunch, Buffer, LaunchConfig, Partition, Pool
from greensched.integrations.health import fault_of
from greensched.kernels import fill, spin
from greensched.typing import Feature
from helpers.backend import Backend, standin_library
from helpers.gate import Gate
from helpers.waiting import still_waits, until

IS_VERSIONED = False

CONFIG = LaunchConfig(grid=1, block=64)
ONE = LaunchConfig(grid=1, block=1)


@pytest.fixture(autouse=True)
def waits(backend: Backend) -> None:
    """Say whether the driver's code loading waits for running work."""
    if not backend.is_simulated and standin_library() is not None:
        pytest.skip("the stand-in loads code at once, whatever runs: nothing waits for it")


async def begin_first_use(backend: Backend, pool: Pool, p: Partition) -> None:
    """Launch a kernel for the first time behind a gate, so that a thread waits for it."""
    job = p.launch(ONE, spin, 1)
    loader = pool.devices[0].loader
    while backend.kind != "virtual" and not loader.first_uses:
        pass  # not a turn of the loop, in which an event would be recorded
    await until(lambda: bool(loader.first_uses) or job.done())
    if not loader.first_uses:
        await job  # which tells why it has begun none
    await anyio.sleep(0.005)  # and it is in the driver by now


#: Ways to submit something, of which a driver makes calls that wait.
WAYS: dict[str, Callable[[Partition, BoundLaunch, Buffer], Any]] = {
    "launch": lambda p, _, x: p.launch(CONFIG, fill, x, 1.0, 64),
    "bound launch": lambda p, bound, x: (bound(), p.drain())[1],
    "bound launch with a job": lambda p, bound, x: bound.submit(),
    "upload": lambda p, _, x: p.upload(np.ones(8)),
    "download": lambda p, _, x: p.download(x),
    "copy": lambda p, _, x: p.copy(x, np.ones(64, np.float32)),
}


#: What tickets are, by whether streams can write words.
MARKS = ("words", "events")
#: And the same behind another lease's work on the same buffer.
BEHIND = [(way, "another", marks) for way in WAYS if "launch" in way for marks in MARKS]


@pytest.mark.parametrize(
    ("way", "beside", "marks"),
    [*((way, "nothing", marks) for way in WAYS for marks in MARKS), *BEHIND],
)
def test_nothing_is_submitted_by_the_loop_meanwhile(
    backend: Backend, way: str, beside: str, marks: str
) -> None:
    """A thread makes every driver call that would wait, and the work is done."""
    if marks == "events" and not backend.is_simulated:
        pytest.skip("streams of this driver can write words, so its tickets are never events")
    lacks = {"without": [Feature.WRITE_VALUE]} if marks == "events" else {}

    async def main() -> None:
        async with (
            backend.pool(prepare=[fill], **lacks) as pool,
            pool.partition(8) as p,
            pool.partition(8) as q,
            pool.partition(8) as r,
        ):
            with await q.empty(64) as x:
                here = q.bind(CONFIG, fill, x, 1.0, 64)
                await here.submit()
                with await Gate.closed(p) as gate:
                    if beside == "another":
                        r.bind(CONFIG, fill, x, 1.0, 64)()
                    await begin_first_use(backend, pool, p)
                    done = WAYS[way](q, here, x)
                    assert not q._open_lease().all_submitted
                    gate.open()
                result = await done
                if way == "upload":
                    result.close()

    backend.run(main)


@pytest.mark.runs_device_code
def test_everything_can_be_submitted_meanwhile(backend: Backend) -> None:
    """The loop can submit any work on another lease; it is done after the first use."""

    async def main() -> None:
        async with (
            backend.pool(prepare=[fill]) as pool,
            pool.partition(8) as p,
            pool.partition(8) as q,
        ):
            with await q.empty(64) as x, await q.empty(64) as y:
                bound = q.bind(CONFIG, fill, x, 1.0, 64)
                await bound.submit()
                with await Gate.closed(p) as gate:
                    await begin_first_use(backend, pool, p)
                    bound.set(1, 2.0)
                    bound()
                    jobs: list[Any] = [
                        q.launch(CONFIG, fill, y, 3.0, 64),
                        q.copy(x, y),
                        q.download(x),
                        bound.submit(),
                        q.download(x),
                        q.upload(np.arange(8.0)),
                        q.run(lambda: 4),
                    ]
                    await still_waits(jobs[-1])
                    assert not any(job.done() for job in jobs)
                    gate.open()
                got = [await job for job in jobs]
                assert np.all(got[2] == 3.0)
                assert np.all(got[4] == 2.0)
                assert got[-1] == 4
                with got[5] as uploaded:
                    np.testing.assert_array_equal(await q.download(uploaded), np.arange(8.0))
                await until(lambda: q._open_lease().all_submitted)
                q.launch(CONFIG, fill, y, 5.0, 64)
                assert q._open_lease().all_submitted, "at once again"

    backend.run(main)


def test_what_is_in_flight_is_awaited_meanwhile(backend: Backend) -> None:
    """A thread that sleeps until a job is done is woken without a recorded event."""

    async def main() -> None:
        async with (
            backend.pool(prepare=[fill]) as pool,
            pool.partition(8) as p,
            pool.partition(8) as q,
        ):
            with await q.empty(64) as x, await Gate.closed(q) as mine, await Gate.closed(p) as gate:
                job = q.launch(CONFIG, fill, x, 1.0, 64)
                await until(lambda: q._open_lease().all_submitted)
                await begin_first_use(backend, pool, p)
                mine.open()
                await job
                assert pool.devices[0].loader.first_uses
                gate.open()

    backend.run(main)


@pytest.mark.parametrize("is_exposed", [False, True])
def test_a_lease_ends_meanwhile(backend: Backend, is_exposed: bool) -> None:
    """A lease whose stream a library may use is over once the first use is.

    A lease whose call has left no work ends at once, and so does one that has done nothing.
    """

    async def main() -> None:
        async with backend.pool(prepare=[fill]) as pool, pool.partition(8) as p:
            called, began, over = anyio.Event(), anyio.Event(), anyio.Event()

            async def calling() -> None:
                async with pool.partition(8) as q:
                    await q.run(lambda: None)
                    if is_exposed:
                        assert q.stream
                    called.set()
                    await began.wait()
                over.set()

            async with anyio.create_task_group() as tasks:
                with await Gate.closed(p) as gate:
                    tasks.start_soon(calling)
                    await called.wait()
                    await begin_first_use(backend, pool, p)
                    began.set()
                    if is_exposed:
                        await still_waits(over.wait())
                    else:
                        await over.wait()
                    async with pool.partition(8) as r:
                        assert r.sm_count == 8
                    gate.open()
                await over.wait()

    backend.run(main)


def test_a_call_returns_meanwhile(backend: Backend) -> None:
    """A function of `p.run` that leaves no work is done before the first use is."""

    async def main() -> None:
        async with backend.pool(prepare=[fill]) as pool, pool.partition(8) as p:
            async with pool.partition(8) as q:
                with await Gate.closed(p) as gate:
                    await begin_first_use(backend, pool, p)
                    assert await q.run(lambda: 5) == 5
                    gate.open()

    backend.run(main)


def test_a_pool_is_well_meanwhile(backend: Backend) -> None:
    """The pool's health needs no driver call that could wait."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await Gate.closed(p) as gate:
                await begin_first_use(backend, pool, p)
                assert fault_of(pool) is None
                gate.open()

    backend.run(main)
