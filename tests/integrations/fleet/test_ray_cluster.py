"""A fleet on a real Ray cluster of three nodes and four simulated GPUs.

One cluster and one fleet for all of them, on one loop; each test leaves the fleet with nothing to
do, which is looked at. Pools are told by what a job leaves in a folder, for they are other
processes: what is waited for there is looked at every now and then, for `SOON` seconds at most.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import greensched
from greensched import ALL, LaunchConfig, Partition, Pool
from greensched.driver import simulated
from greensched.kernels import fill, spin

ray = pytest.importorskip("ray", reason="ray is not installed: make test-integrations")
from greensched.integrations.ray import (  # noqa: E402
    Fleet,
    connection,
    gpus,
    own_gpus,
    pool_actor,
    protocol,
)
from greensched.integrations.ray import fleet as fleets  # noqa: E402

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::ResourceWarning")]

#: Seconds that something in another process may take.
SOON = 50.0
#: Seconds after which a pool that is silent is surely seen to be.
LATE = 0.5
#: Seconds that a test may take.
MOST = 60.0
#: Requests that may wait in one pool.
WAITING = 4
#: SMs of a simulated H200.
SMS = 132


def make(devices: list[int]) -> Pool:
    """In each pool's process: the first `fill` there is a device fault; callers are missed soon."""
    protocol.HEARTBEAT, pool_actor.LOST = 0.2, 1.0
    driver = simulated.open("h200", faults=[simulated.Crash("fill")])
    return Pool(devices, driver=driver, max_waiting=WAITING)


# -- jobs -------------------------------------------------------------------------------------


async def pid(p: Partition) -> int:
    return os.getpid()


def double(x: Any) -> Any:
    return 2 * x


async def held(p: Partition, folder: Path, name: str = "job") -> None:
    """Run until it is cancelled, and say so."""
    (folder / name).write_text(str(os.getpid()))
    try:
        await asyncio.Event().wait()
    finally:
        (folder / f"{name} ended").touch()


def runs(folder: Path) -> list[Path]:
    """What jobs have left, in whatever process."""
    return [*folder.iterdir()]


def runs_in(folder: Path) -> int:
    """How often a job has run before."""
    ran = len(runs(folder))
    (folder / str(ran)).touch()
    return ran


async def dies(p: Partition, folder: Path, times: int) -> int:
    """Kills its process so many times, in all; says how often it has run."""
    if (ran := runs_in(folder)) < times:
        os._exit(3)
    return ran + 1


async def spoils(p: Partition, folder: Path, times: int) -> int:
    """Spoils its GPU so many times, in all."""
    if runs_in(folder) < times:
        with await p.empty(64) as x:
            await p.launch(LaunchConfig(grid=1, block=64), fill, x, 1.0, x.size)
    return os.getpid()


async def blocks(p: Partition, folder: Path) -> None:
    """What a job should not do: it blocks its pool's loop."""
    (folder / "began").touch()
    ends = time.monotonic() + SOON
    while not (folder / "go").exists() and time.monotonic() < ends:
        time.sleep(0.01)  # noqa: ASYNC251  it blocks the loop on purpose


# -- the cluster ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(ray_cluster: Any) -> Any:
    """Its processes need not find this module."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return ray_cluster


@pytest.fixture(scope="module")
def run(cluster: Any) -> Iterator[Callable[[Any], Any]]:
    """Run a coroutine on the one loop, which runs on, so that pools hear of it between tests."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield lambda main: asyncio.run_coroutine_threadsafe(main, loop).result(MOST)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def the_fleet(run: Any) -> Iterator[Fleet]:
    """A pool on three of the four GPUs."""
    made = Fleet("shared", make, pools=3)
    run(made.__aenter__())
    yield made
    run(made.stop())


@pytest.fixture
def fleet(the_fleet: Fleet, run: Any) -> Iterator[Fleet]:
    """The shared one; before and after a test nothing uses it, and the fourth GPU is free."""
    run(settled(the_fleet))
    yield the_fleet
    run(settled(the_fleet))


def is_idle(fleet: Fleet) -> bool:
    pools = fleet.pools().values()
    return len(pools) == 3 and all(
        pool.is_open and pool.wanted == 0 and pool.sms_free == SMS for pool in pools
    )


async def settled(fleet: Fleet) -> None:
    """Wait until no job, other program or other fleet of an earlier test is left.

    Health is fresh, but a snapshot may be older than the last lease of a program that has died.
    """
    async with asyncio.timeout(SOON):
        while True:
            health = (await fleet.health()).values()
            is_free = all(one is not None and one.jobs == 0 and one.callers == 1 for one in health)
            if is_free and is_idle(fleet) and await asyncio.to_thread(gpus.free) == 1:
                return
            await asyncio.sleep(0.01)


def waiting(fleet: Fleet) -> int:
    return sum(pool.waiting for pool in fleet.pools().values())


async def remaining(holds: Callable[[], bool]) -> None:
    """Looks until something holds, for `SOON` seconds at most."""
    async with asyncio.timeout(SOON):
        while not holds():  # noqa: ASYNC110  another process's doing
            await asyncio.sleep(0.01)


def program(text: str, address: str) -> str:
    """A program of its own, connected to the cluster."""
    return f"""
import asyncio, os, ray
from functools import partial
from pathlib import Path
from greensched import Pool
from greensched.integrations.ray import Fleet
ray.init(address={address!r}, log_to_driver=False, logging_level="error")
async def pid(p): return os.getpid()
async def held(p, path):
    Path(path).touch()
    try:
        await asyncio.Event().wait()
    finally:
        Path(path + " ended").touch()
async def main():
{text}
asyncio.run(main())
"""


def execute(text: str, cluster: Any) -> str:
    command = [sys.executable, "-c", program(text, cluster.address)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- jobs go somewhere ------------------------------------------------------------------------


def test_a_job_runs_on_some_gpu(fleet: Fleet, run: Any) -> None:
    """A coroutine function gets the partition, a blocking function is called; both return."""

    async def sms(p: Partition, x: int) -> tuple[int, int]:
        await p.launch(LaunchConfig(grid=1, block=32), spin, 1000)
        return p.sm_count, x

    assert run(fleet.submit(sms, 3, sms=16, deadline=5)) == (16, 3)
    assert run(fleet.submit(double, 21, sms=8)) == 42
    assert run(fleet.submit(functools.partial(double, 4), sms=(8, 64))) == 8


def test_each_gpu_has_a_pool_of_its_own(fleet: Fleet, run: Any) -> None:
    """Each pool is a process with the one GPU that Ray assigned to it, and every pool gets jobs."""

    async def where(p: Partition) -> tuple[int, Any, str | None]:
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids()["GPU"]
        return os.getpid(), (context.get_node_id(), *gpus), os.environ["CUDA_VISIBLE_DEVICES"]

    async def main() -> None:
        jobs = (fleet.submit(where, sms=ALL) for _ in range(15))
        found = {*await asyncio.gather(*jobs)}
        assert len({process for process, _, _ in found}) == 3
        assert len({gpu for _, gpu, _ in found}) == 3
        assert all(gpu[1] == visible for _, gpu, visible in found)

    run(main())


def test_what_a_job_raises_is_raised(fleet: Fleet, run: Any) -> None:
    """The caller gets the job's exception with its remote traceback, and the pool keeps serving."""
    with pytest.raises(ZeroDivisionError) as caught:
        run(fleet.submit(lambda: 1 / 0, sms=8))
    assert "1 / 0" in caught.value.__notes__[0]
    with pytest.raises(greensched.InvalidRequest, match="missing"):
        run(fleet.submit(pid, sms=8, service="missing"))
    assert run(fleet.submit(pid, sms=8))


def test_what_can_never_be_is_refused_here(fleet: Fleet, run: Any) -> None:
    """Invalid requests are refused in the client, because Ray would wait for ever."""
    for sms, kind in ((SMS + 1, greensched.TooManySMs), (0, greensched.InvalidSize)):
        with pytest.raises(kind):
            run(fleet.submit(pid, sms=sms, deadline=5))
    with pytest.raises(greensched.InvalidRequest, match="deadline"):
        run(fleet.submit(pid, sms=8, idempotent=True))
    with pytest.raises(greensched.InvalidRequest, match="cannot be sent"):
        run(fleet.submit(double, (n for n in ()), sms=8))


def test_gpus_that_are_not_free_are_not_waited_for(
    fleet: Fleet, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second fleet gets the GPU that is free; a request for two is refused at once."""
    monkeypatch.setattr(gpus, "SETTLED_S", LATE)

    async def main() -> None:
        with pytest.raises(greensched.NoPool, match="2 free GPUs, and 1 of the 4"):
            async with Fleet("second", make, pools=2):
                pass
        async with Fleet("second", make, pools=1) as second:
            mine, theirs = await asyncio.gather(second.submit(pid, sms=8), fleet.submit(pid, sms=8))
            assert mine != theirs
            await second.stop()
        with pytest.raises(greensched.NoPool, match="no pool"):
            async with Fleet("missing", None):
                pass

    run(main())


def test_it_runs_on_uvloop(fleet: Fleet, cluster: Any) -> None:
    """The caller's loop may be uvloop, as in Ray Serve."""
    uvloop = pytest.importorskip("uvloop")

    async def main() -> int:
        async with Fleet("shared", None) as mine:
            return await mine.submit(double, 4, sms=8, deadline=5)

    assert uvloop.run(main()) == 8


# -- data -------------------------------------------------------------------------------------


def test_large_arrays_go_by_reference(fleet: Fleet, run: Any) -> None:
    """Large arrays and Ray's references arrive whole and read-only, and large results return."""

    async def main() -> None:
        large = np.arange(1 << 19, dtype=np.float64)

        def update(x: Any, y: Any) -> tuple[bool, bool]:
            return x.flags.writeable, bool((x == y).all())

        ref = ray.put(large)
        assert await fleet.submit(update, large, ref, sms=8) == (False, True)
        got = await fleet.submit(double, ref, sms=8, deadline=20, idempotent=True)
        np.testing.assert_array_equal(got, 2 * large)

    run(main())


def test_jobs_go_where_their_data_is(fleet: Fleet, run: Any) -> None:
    """A job runs on the node that holds its argument, which an earlier job stored by `ray.put`."""

    async def leave(p: Partition) -> Any:
        return ray.put(np.ones(1 << 20))

    async def node(p: Partition, x: Any) -> str:
        assert x.nbytes == 8 << 20
        return str(ray.get_runtime_context().get_node_id())

    async def main() -> None:
        handle = await fleet.submit(leave, sms=8)
        assert isinstance(handle, ray.ObjectRef)
        found = ray.experimental.get_object_locations([handle])[handle]["node_ids"]
        assert len(found) == 1
        for _ in range(10):
            assert await fleet.submit(node, handle, sms=8) == found[0]
        assert (await handle).sum() == 1 << 20

    run(main())


# -- what is not waited for any more ----------------------------------------------------------


def test_a_cancellation_reaches_the_gpu(fleet: Fleet, run: Any, tmp_path: Path) -> None:
    """Cancelling a running job cancels it in its pool; a cancelled job in the queue never runs."""

    async def main() -> None:
        jobs = [
            asyncio.create_task(fleet.submit(held, tmp_path, str(n), sms=ALL)) for n in range(9)
        ]
        await remaining(lambda: waiting(fleet) == 6)
        running = {int(one.name) for one in runs(tmp_path)}
        assert len(running) == 3
        for n in {*range(9)} - running:
            jobs[n].cancel()
        await remaining(lambda: waiting(fleet) == 0)
        for n in running:
            jobs[n].cancel()
        await remaining(lambda: len([*tmp_path.glob("* ended")]) == 3)
        assert len(runs(tmp_path)) == 6

    run(main())


def test_a_deadline_reaches_the_gpu(fleet: Fleet, run: Any, tmp_path: Path) -> None:
    """A job without a reply by its deadline raises FleetTimeout and is cancelled in its pool."""

    async def main() -> None:
        with pytest.raises(greensched.FleetTimeout) as caught:
            await fleet.submit(held, tmp_path, sms=8, deadline=0.2)
        assert caught.value.deadline == 0.2
        assert caught.value.was_sent
        await remaining((tmp_path / "job ended").exists)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fleet.submit(held, tmp_path, "again", sms=8), 0.2)
        await remaining((tmp_path / "again ended").exists)

    run(main())


@pytest.mark.fault("E5")
def test_a_dead_caller_reaches_the_gpu(
    fleet: Fleet, run: Any, tmp_path: Path, cluster: Any
) -> None:
    """If a program is killed while its job runs, the pool cancels the job."""
    text = f"""
    async with Fleet("shared", None) as fleet:
        await fleet.submit(held, {str(tmp_path / "job")!r}, sms=16)
"""
    command = [sys.executable, "-c", program(text, cluster.address)]
    with subprocess.Popen(command) as caller:
        run(until_there(tmp_path / "job"))
        caller.send_signal(signal.SIGKILL)
    run(until_there(tmp_path / "job ended"))


async def until_there(path: Path) -> None:
    async with asyncio.timeout(2 * SOON):  # a program begins, and connects
        while not path.exists():  # noqa: ASYNC110, ASYNC240  another process's doing
            await asyncio.sleep(0.01)


def test_a_full_fleet_says_so_at_once(fleet: Fleet, run: Any, tmp_path: Path) -> None:
    """Jobs beyond what all pools run and queue are refused at once, with `retry_after`."""

    async def main() -> None:
        room = 3 * (1 + WAITING)
        jobs = [
            asyncio.create_task(fleet.submit(held, tmp_path, str(n), sms=ALL))
            for n in range(room + 5)
        ]
        refused, waiting = set(), set(jobs)
        try:
            while len(refused) < 5:
                done, waiting = await asyncio.wait(
                    waiting, timeout=SOON, return_when=asyncio.FIRST_COMPLETED
                )
                assert done
                refused |= done
            assert all(isinstance(one.exception(), greensched.QueueFull) for one in refused)
            assert len(refused) == 5
        finally:
            for job in waiting:
                job.cancel()
            await asyncio.wait(waiting)

    run(main())


# -- pools that are lost ----------------------------------------------------------------------


@pytest.mark.fault("E4")
def test_an_idempotent_job_is_tried_again(fleet: Fleet, run: Any, tmp_path: Path) -> None:
    """If the pool's process dies, an idempotent job runs again and is answered by its deadline."""
    assert run(fleet.submit(dies, tmp_path, 1, sms=8, deadline=30, idempotent=True)) == 2


@pytest.mark.fault("E4")
def test_any_other_runs_once(fleet: Fleet, run: Any, tmp_path: Path) -> None:
    """If the pool's process dies, any other job raises PoolLost and does not run again."""
    with pytest.raises(greensched.PoolLost) as caught:
        run(fleet.submit(dies, tmp_path, 1, sms=8, deadline=30))
    assert caught.value.pool.startswith("shared/")
    assert len([*tmp_path.iterdir()]) == 1


def test_what_ends_every_pool_is_given_up(
    fleet: Fleet, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idempotent job that kills every pool is given up after three of them."""
    monkeypatch.setattr(fleets, "MOST_LOSSES", 2)
    with pytest.raises(greensched.PoolLost):
        run(fleet.submit(dies, tmp_path, 99, sms=8, deadline=50, idempotent=True))
    assert len([*tmp_path.iterdir()]) == fleets.MOST_LOSSES


def test_a_spoilt_pool_leaves_its_process(fleet: Fleet, run: Any, tmp_path: Path) -> None:
    """After a device fault the caller gets the error, and Ray replaces the process."""

    async def processes() -> set[int]:
        return {one.pid for one in (await fleet.health()).values() if one is not None}

    async def main() -> None:
        before = await processes()
        with pytest.raises(greensched.DeviceLost):
            await fleet.submit(spoils, tmp_path, 1, sms=8)
        new: set[int] = set()
        async with asyncio.timeout(SOON):
            while not new:
                await asyncio.sleep(0.05)
                new = await processes() - before
        assert len(new) == 1
        async with asyncio.timeout(SOON):
            while await fleet.submit(pid, sms=8, deadline=5, idempotent=True) not in new:
                pass

    run(main())


def test_a_job_survives_a_spoilt_pool(fleet: Fleet, run: Any, tmp_path: Path) -> None:
    """An idempotent job whose pool has a device fault is answered by another pool."""
    assert run(fleet.submit(spoils, tmp_path, 1, sms=8, deadline=30, idempotent=True))
    assert len([*tmp_path.iterdir()]) == 2


def test_a_killed_actor_is_back(fleet: Fleet, run: Any, tmp_path: Path) -> None:
    """After `ray.kill` the job raises PoolLost, and Ray restarts the pool without help."""

    async def main() -> None:
        job = asyncio.create_task(fleet.submit(held, tmp_path, sms=8))
        await remaining((tmp_path / "job").exists)
        victim = int((tmp_path / "job").read_text())
        (name,) = [n for n, one in (await fleet.health()).items() if one and one.pid == victim]
        await asyncio.to_thread(ray.kill, ray.get_actor(name, "greensched"), no_restart=False)
        with pytest.raises(greensched.PoolLost):
            await job
        await remaining(lambda: len(fleet.pools()) == 3)
        health = (await fleet.health())[name]
        assert health is not None
        assert health.pid != victim

    run(main())


def test_a_blocked_pool_is_seen(fleet: Fleet, run: Any, tmp_path: Path) -> None:
    """A job that blocks its pool's loop does not delay `health`, and new jobs go to other pools."""

    async def main() -> None:
        job = asyncio.create_task(fleet.submit(blocks, tmp_path, sms=8))
        await remaining((tmp_path / "began").exists)
        async with asyncio.timeout(SOON):
            while True:
                looks = (await fleet.health()).values()
                assert all(update is not None for update in looks)
                if max(update.stalled for update in looks if update) > connection.STALE + LATE:
                    break
                await asyncio.sleep(0.05)
        for _ in range(20):
            await asyncio.wait_for(fleet.submit(pid, sms=8), 5)
        (tmp_path / "go").touch()
        await job

    run(main())


# -- sessions ---------------------------------------------------------------------------------


def test_a_session_keeps_its_sms(fleet: Fleet, run: Any) -> None:
    """A session's jobs run on one pool, one by one or at once, on SMs of their own."""

    async def main() -> None:
        async with fleet.partition(32, deadline=5) as session:
            assert session.sm_count == 32
            await remaining(lambda: fleet.pools()[session.pool].sms_free == SMS - 32)
            assert len({*await asyncio.gather(*(session.run(pid) for _ in range(5)))}) == 1
            assert await session.run(double, 4, deadline=5) == 8
            with pytest.raises(ZeroDivisionError):
                await session.run(lambda: 1 / 0)
        with pytest.raises(greensched.PartitionClosed):
            await session.run(pid)

    run(main())


def test_a_session_ends_with_its_block(fleet: Fleet, run: Any, tmp_path: Path) -> None:
    """A session that ends by an error frees its SMs and cancels its running jobs."""

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            async with fleet.partition(16) as session:
                job = asyncio.create_task(session.run(held, tmp_path))
                await remaining((tmp_path / "job").exists)
                raise ZeroDivisionError
        job.cancel()
        await remaining((tmp_path / "job ended").exists)

    run(main())


def test_a_session_is_lost_with_its_pool(fleet: Fleet, run: Any, tmp_path: Path) -> None:
    """If the pool is lost, both the session's job and the end of its block raise PoolLost."""

    async def main() -> None:
        with pytest.raises(greensched.PoolLost):
            async with fleet.partition(16) as session:
                with pytest.raises(greensched.PoolLost):
                    await session.run(dies, tmp_path, 1)

    run(main())


def test_a_session_of_a_dead_caller_ends(
    fleet: Fleet, run: Any, tmp_path: Path, cluster: Any
) -> None:
    """If a program is killed inside a session's block, the session's SMs become free."""
    execute(
        f"""
    fleet = await Fleet("shared", None).__aenter__()
    session = await fleet.partition(64).__aenter__()
    await session.run(pid)
    Path({str(tmp_path / "there")!r}).touch()
    os._exit(0)
""",
        cluster,
    )
    assert (tmp_path / "there").exists()  # and the fixture sees that all SMs are free


# -- programs come and go ---------------------------------------------------------------------


def test_a_detached_fleet_outlives_its_program(
    fleet: Fleet, run: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program can join and stop a detached fleet; another version is refused."""
    execute(
        """
    make = partial(Pool, driver="simulated:h200")
    async with Fleet("service", make, pools=1, detached=True) as fleet:
        await fleet.submit(pid, sms=8)
""",
        cluster,
    )

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(protocol, "PROTOCOL", protocol.PROTOCOL + 1)
            with pytest.raises(greensched.VersionSkew):
                async with Fleet("service", None):
                    pass
        async with Fleet("service", None) as service:
            assert await service.submit(double, 4, sms=8) == 8
            await service.stop()
        with pytest.raises(greensched.NoPool):
            async with Fleet("service", None):
                pass

    run(main())


def test_any_other_fleet_ends_with_its_program(fleet: Fleet, run: Any, cluster: Any) -> None:
    """The pools of a fleet end with its last program, and their GPUs are free afterwards."""
    execute(
        """
    async with Fleet("script", partial(Pool, driver="simulated:h200"), pools=1) as fleet:
        await fleet.submit(pid, sms=8)
""",
        cluster,
    )

    async def main() -> None:
        async with Fleet("next", make, pools=1) as mine:
            await mine.stop()

    run(main())


def test_a_fleet_outlives_the_program_that_started_it(
    fleet: Fleet, run: Any, cluster: Any, tmp_path: Path
) -> None:
    """If its first program is killed, other programs go on, and lost pools are replaced."""
    text = f"""
    async with Fleet("orphan", partial(Pool, driver="simulated:h200"), pools=1) as fleet:
        await held(None, {str(tmp_path / "there")!r})
"""

    async def main(owner: subprocess.Popen[bytes]) -> None:
        await until_there(tmp_path / "there")
        async with Fleet("orphan", None) as mine:
            before = await mine.submit(pid, sms=8)
            owner.kill()
            owner.wait()
            assert await mine.submit(pid, sms=8, deadline=20, idempotent=True) == before
            ran = tmp_path / "ran"
            ran.mkdir()
            assert await mine.submit(dies, ran, 1, sms=8, deadline=30, idempotent=True) == 2
            assert await mine.submit(pid, sms=8) != before

    command = [sys.executable, "-c", program(text, cluster.address)]
    with subprocess.Popen(command) as owner:
        run(main(owner))


def test_a_draining_node_is_left(fleet: Fleet, run: Any, cluster: Any, tmp_path: Path) -> None:
    """Running jobs end, queued jobs are handed back, and a replacement opens first."""
    head = cluster.head_node.node_id

    async def place() -> str:
        health = (await fleet.health()).items()
        return next(name for name, one in health if one is not None and one.node != head)

    async def slow(p: Partition) -> str:
        await asyncio.sleep(1)
        return ray.get_runtime_context().get_node_id()

    async def main(node: str, name: str) -> None:
        jobs = [asyncio.create_task(fleet.submit(slow, sms=ALL)) for _ in range(3 * WAITING)]
        await remaining(lambda: waiting(fleet) == 3 * WAITING - 3)
        drain = ["drain-node", "--address", cluster.address, "--node-id", node]
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
        seconds = ["--deadline-remaining-seconds", "60"]
        command = [sys.executable, "-m", "ray.scripts.scripts", *drain, *reason, *seconds]
        ray_cli = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
        assert await ray_cli.wait() == 0
        await remaining(lambda: len(fleet.pools()) == 4)  # the new one is there, the old one too
        await remaining(lambda: name not in fleet.pools())
        nodes = await asyncio.gather(*jobs)
        assert len(nodes) == 3 * WAITING
        later = await asyncio.gather(*(fleet.submit(slow, sms=ALL) for _ in range(3)))
        assert node not in later

    name = run(place())
    node = run(fleet.health())[name].node
    try:
        run(main(node, name))
    finally:  # other tests find four GPUs again
        (drained,) = [one for one in cluster.worker_nodes if one.node_id == node]
        cluster.remove_node(drained)
        cluster.add_node(num_cpus=1, num_gpus=1)


def test_half_a_gpu_is_refused_by_ray_too(fleet: Fleet, cluster: Any) -> None:
    """Two actors with half a GPU each get an error that says why they cannot have a pool."""
    halves = [ray.remote(num_gpus=0.5, max_calls=1)(own_gpus).remote() for _ in range(2)]
    for half in halves:
        with pytest.raises(greensched.InvalidRequest, match="take turns"):
            ray.get(half, timeout=SOON)
    assert ray.get(ray.remote(num_gpus=1, max_calls=1)(own_gpus).remote(), timeout=SOON) == [0]
    with pytest.raises(greensched.InvalidRequest, match="num_gpus=1"):
        ray.get(ray.remote(num_gpus=0, max_calls=1)(own_gpus).remote(), timeout=SOON)
