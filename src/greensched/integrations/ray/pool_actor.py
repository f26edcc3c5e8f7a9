"""The actor of one pool: it opens the pool on the GPU that Ray assigned, and serves clients."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import time
from typing import Any, NamedTuple

import ray

from greensched import ALL, Pool
from greensched.errors import DeviceLost, PoolClosed, QueueFull, VersionSkew
from greensched.integrations.health import fault_of
from greensched.integrations.ray import protocol
from greensched.integrations.ray.gpus import own_gpus
from greensched.integrations.ray.protocol import PoolInfo, Snapshot
from greensched.integrations.ray.remote_client import RemoteClient

logger = logging.getLogger("greensched")

#: The most clients of one pool. Each client has up to `protocol.FEW` + 1 Ray calls in flight, and
#: none may queue inside Ray, where it is invisible; so `CONCURRENCY` exceeds their number.
MOST_CALLERS = 200
CONCURRENCY = 2000
#: The most jobs of a pool, including jobs whose arguments are still being fetched. The pool's own
#: queue is bounded, too.
MOST_JOBS = 10_000
#: Seconds between two checks of the GPU and the clients. More checks would keep an idle process
#: busy, and find a fault hardly earlier: a job that meets it reports it at once.
CHECK = 0.25
#: Seconds between two looks at jobs that end before the process does; also the least `retry_after`.
POLL = 0.05
#: Seconds without a batch after which a client counts as dead: several heartbeats, so that a client
#: with a busy loop is not mistaken for a dead one.
LOST = 5 * protocol.HEARTBEAT
#: After a device fault: seconds in which jobs may end by themselves and replies are fetched.
LAST_S = 1.0
#: Seconds for Ray to send replies before the process exits.
SENDING_S = 0.1
#: The exit status of a process whose GPU failed. Source: sysexits.h, EX_IOERR.
EXIT = 74
#: The weight of the last job in the mean wait.
WEIGHT = 1 / 32


class Health(NamedTuple):
    """The health of a pool's process. `stalled`: seconds for which its loop has not run."""

    name: str
    node: str
    pid: int
    is_open: bool
    fault: str
    stalled: float
    callers: int
    jobs: int


class PoolActor:
    """One pool of a fleet. The constructor uses neither CUDA nor Ray.

    Ray has started its process beforehand and may have forked it, so CUDA is initialised at the
    first `hello`. Ray calls `health` on a separate thread (concurrency group `control`), and all
    other methods on one loop, which no job should block.
    """

    def __init__(self, name: str, make: bytes) -> None:
        self.name = name
        self._pool: Pool | None = None
        self._make = make
        self._opening = asyncio.Lock()
        self._clients: dict[str, RemoteClient] = {}
        self._jobs = self._wanted = 0
        self._wait = 0.0
        #: The counts of the last check: all SMs, free SMs, and queued requests.
        self._counts = (0, 0, 0)
        self._last_check = time.monotonic()
        self._failure: BaseException | None = None
        self._watching: asyncio.Task[None] | None = None

    # -- called by clients -------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the pool on the GPUs that Ray assigned. Idempotent.

        Raises:
            InvalidRequest: Ray did not assign this process a whole GPU.
            Others: As for `Pool.open`.
        """
        async with self._opening:
            if self._pool is None:
                pool: Pool = pickle.loads(self._make)(devices=own_gpus())
                await pool.open()
                self._pool = pool
                self.count()
                self._last_check = time.monotonic()
                self._watching = asyncio.create_task(self._watch())

    async def hello(self, key: str, version: int) -> PoolInfo:
        """Register a client under a key. The first client opens the pool.

        Raises:
            VersionSkew: The client speaks another version.
            QueueFull: There are too many clients.
            Others: As for `open`.
        """
        if version != protocol.PROTOCOL:
            raise VersionSkew(self.name, protocol.PROTOCOL, version)
        if len(self._clients) >= MOST_CALLERS:
            raise QueueFull(len(self._clients), LOST)
        await self.open()
        self._clients[key] = RemoteClient(self)
        return PoolInfo(
            name=self.name,
            node=ray.get_runtime_context().get_node_id(),
            most=self.pool.preview(ALL)[0].granted[0],
            snapshot=self.snapshot(),
        )

    async def exchange(self, sent: Any) -> Any:
        """Handle a client's batch; reply when there is news, or after a heartbeat.

        Args:
            sent: The client's key and a `MessageBatch`, packed. The `ReplyBatch` is packed, too.

        Returns:
            None if the client is unknown; then no message of the batch was handled.
        """
        key, batch = protocol.unpack_batch(sent)
        client = self._clients.get(key)
        reply = None if client is None else await client.reply(batch)
        return None if reply is None else protocol.pack_reply(reply)

    async def goodbye(self, key: str) -> None:
        """Remove a client; its queued jobs are cancelled."""
        client = self._clients.pop(key, None)
        if client is not None:
            client.close()

    async def stop(self, grace: float) -> None:
        """Close the pool: queued requests fail, and leases may end within the grace.

        Returns once every client has the outcomes, because the process is killed then.
        """
        if self._pool is not None:
            await self._pool.aclose(grace=grace)
            await self._drain(LAST_S)
            await asyncio.sleep(SENDING_S)

    def health(self) -> Health:
        """Return the health. Works even while the loop is blocked."""
        is_open = self._pool is not None and self._pool.is_ready and self._failure is None
        return Health(
            name=self.name,
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            is_open=is_open,
            fault=str(self._failure or ""),
            stalled=self._stalled() if self._watching else 0.0,
            callers=len(self._clients),
            jobs=self._jobs,
        )

    # -- called by clients' jobs -------------------------------------------------------------------

    @property
    def pool(self) -> Pool:
        """The pool. It is open once there is a client."""
        assert self._pool is not None
        return self._pool

    def admit(self) -> None:
        """Check that a further job can be accepted.

        Raises:
            QueueFull: There are too many jobs.
            DeviceLost: The GPU failed, and the process is about to exit.
        """
        if self._failure is not None:
            raise DeviceLost(self._failure)
        if self._jobs > MOST_JOBS:
            raise QueueFull(self._jobs, max(self._wait, POLL))

    def job_started(self, sms: int) -> None:
        """Count a job of this many SMs."""
        self._jobs += 1
        self._wanted += sms

    def job_ended(self, sms: int) -> None:
        """Remove a job from the count."""
        self._jobs -= 1
        self._wanted -= sms

    def job_granted(self, seconds: float) -> None:
        """Record how long a job was queued."""
        self._wait += WEIGHT * (seconds - self._wait)

    def snapshot(self) -> Snapshot:
        """Return the pool's state, with SMs and queue of the last check: they cost half a job."""
        is_open = self.pool.is_ready and self._failure is None
        return Snapshot(is_open, *self._counts, wanted=self._wanted, wait=self._wait)

    def count(self) -> None:
        """Count the SMs and the queue.

        Raises:
            PoolClosed: the pool is closed.
        """
        statistics = self.pool.statistics()
        self._counts = (statistics.sms_total, statistics.sms_free, statistics.waiting)

    def _stalled(self) -> float:
        """Return the seconds by which the next check is overdue."""
        return max(0.0, time.monotonic() - self._last_check - CHECK)

    # -- watching ----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Check the GPU even while idle, drop dead clients, and send changes of the pool's state.

        After a device fault the process exits, so that Ray starts a new one. If the process stayed
        alive, Ray would leave the actor on the failed GPU.
        """
        loop = asyncio.get_running_loop()
        while self._failure is None:
            await asyncio.sleep(CHECK)
            stood_still, self._last_check = self._stalled(), time.monotonic()
            for key, client in [*self._clients.items()]:
                client.last_batch += stood_still  # batches that came meanwhile were not read
                if loop.time() - client.last_batch > LOST:
                    logger.warning("%s: a caller was not heard of for %g s", self.name, LOST)
                    await self.goodbye(key)
            self._failure = fault_of(self.pool)
            try:
                self.count()
            except PoolClosed:
                return
            snapshot = self.snapshot()
            for client in self._clients.values():
                client.update(snapshot)
        await self._exit(self._failure)

    async def _exit(self, fault: BaseException) -> None:
        """Fail every job, send the replies, and exit the process."""
        logger.error("%s: the process exits because its GPU failed: %s", self.name, fault)
        await self._drain(LAST_S)
        for client in self._clients.values():
            client.fail(DeviceLost(fault))
        await self._drain(LAST_S)
        await asyncio.sleep(SENDING_S)
        os._exit(EXIT)

    async def _drain(self, seconds: float) -> None:
        """Wait until every client has all its outcomes, for at most this many seconds."""
        for _ in range(int(seconds / POLL)):
            if not any(client.is_busy for client in self._clients.values()):
                return
            for client in self._clients.values():
                client.wake()
            await asyncio.sleep(POLL)


def pool_actor(name: str, make: bytes, namespace: str) -> Any:
    """Return the actor of this name, or start it. Blocks on Ray.

    It outlives the program and the supervisor that start it. Ray restarts it on any free GPU. Ray
    retries no call, because only the client knows whether a job may run twice.
    """
    return (
        ray.remote(concurrency_groups={"control": 2})(PoolActor)
        .options(
            name=name,
            namespace=namespace,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            num_gpus=1,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=CONCURRENCY,
        )
        .remote(name, make)
    )
