"""The actor of one pool: it opens the pool over the GPU Ray gave it, and hears its callers."""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import ray

from greensched import ALL, Pool
from greensched.errors import DeviceLost, PoolClosed, QueueFull, VersionSkew
from greensched.integrations.health import fault_of
from greensched.integrations.ray import protocol as wire
from greensched.integrations.ray.gpus import own_gpu
from greensched.integrations.ray.protocol import MessageBatch, PoolInfo, ReplyBatch, Snapshot
from greensched.integrations.ray.remote_client import RemoteClient

logger = logging.getLogger("greensched")

#: Callers of one pool at most. Each has `line.CALLS` calls of Ray at once, which must not queue in
#: Ray, where nobody sees them: `CONCURRENCY` is above what they can have.
MOST_CALLERS = 200
CONCURRENCY = 1000
#: Jobs that a pool takes at once, those whose arguments are still on their way among them; the pool
#: has its own bound for those that wait for SMs.
MOST_JOBS = 10_000
#: Seconds between two looks at the GPU, the callers, and what they should be told.
LOOK = 0.05
#: Seconds without a letter after which a caller is taken for dead: several beats, so that one whose
#: loop is busy for a while is not.
LOST = 5 * wire.HEARTBEAT
#: Of a spoilt process: seconds for its jobs to end by themselves, and for answers to be fetched.
LAST_S = 1.0
#: Seconds for Ray to send what it was given, before the process ends.
SENDING_S = 0.1
#: The exit status of a process whose GPU failed. Source: sysexits.h, EX_IOERR.
EXIT = 74
#: Jobs by which the median wait is told.
REMEMBERED = 64


class Health(NamedTuple):
    """What a look at a pool's actor gives. `stalled`: seconds for which its loop stood still."""

    name: str
    pid: int
    is_open: bool
    fault: str
    stalled: float
    callers: int
    jobs: int


class PoolActor:
    """One pool of a fleet. Making one touches neither CUDA nor Ray.

    Ray has prestarted the process it is in, and may have forked it: CUDA begins at the first
    `hello`. Ray calls `health` on a thread of its own (concurrency group `control`), all else on
    one loop, which no job should block.
    """

    def __init__(self, name: str, make: Callable[..., Pool]) -> None:
        self.name = name
        self._pool: Pool | None = None
        self._make = make
        self._opening = asyncio.Lock()
        self._callers: dict[str, RemoteClient] = {}
        self._jobs = self._wanted = 0
        self._waits: deque[float] = deque([0.0], REMEMBERED)
        self._looked = time.monotonic()
        self._fault: BaseException | None = None
        self._watching: asyncio.Task[None] | None = None

    # -- what callers call -------------------------------------------------------------------------

    async def hello(self, key: str, protocol: int) -> PoolInfo:
        """A new caller, known by the key from now on; the first one has the pool opened.

        Raises:
            VersionSkew: he speaks another version.
            QueueFull: there are too many.
            InvalidRequest: Ray did not give it a GPU of its own.
            Others: as `Pool.open`.
        """
        if protocol != wire.PROTOCOL:
            raise VersionSkew(self.name, wire.PROTOCOL, protocol)
        if len(self._callers) >= MOST_CALLERS:
            raise QueueFull(len(self._callers), LOST)
        async with self._opening:
            if self._pool is None:
                pool = self._make(devices=[own_gpu()])
                await pool.open()
                self._pool = pool
                self._looked = time.monotonic()
                self._watching = asyncio.create_task(self._watch())
        self._callers[key] = RemoteClient(self)
        device, *_ = self.pool.devices
        context = ray.get_runtime_context()
        return PoolInfo(
            name=self.name,
            node=context.get_node_id(),
            pid=os.getpid(),
            uuid=device.uuid if device.driver.needs_binary else None,
            most=self.pool.preview(ALL)[0].granted[0],
            snapshot=self.snapshot(),
        )

    async def exchange(self, key: str, letter: MessageBatch) -> ReplyBatch | None:
        """A caller's letter; answered when there is something to tell, or after a beat.

        Returns:
            None: no such caller (any more), and nothing of the letter was taken.
        """
        caller = self._callers.get(key)
        return None if caller is None else await caller.answer(letter)

    async def goodbye(self, key: str) -> None:
        """The caller is gone: what of his waits leaves the queue."""
        caller = self._callers.pop(key, None)
        if caller is not None:
            caller.end()

    async def stop(self, grace: float) -> None:
        """Ends the pool: who waits is told so, what is leased may end within the grace."""
        if self._pool is not None:
            await self._pool.aclose(grace=grace)

    def health(self) -> Health:
        """How it is, also while its loop stands still."""
        is_open = self._pool is not None and self._pool.is_ready and self._fault is None
        return Health(
            name=self.name,
            pid=os.getpid(),
            is_open=is_open,
            fault=str(self._fault or ""),
            stalled=self._stalled() if self._watching else 0.0,
            callers=len(self._callers),
            jobs=self._jobs,
        )

    # -- what callers' jobs need -------------------------------------------------------------------

    @property
    def pool(self) -> Pool:
        """The pool; there is one as soon as there is a caller."""
        assert self._pool is not None
        return self._pool

    def admit(self) -> None:
        """Lets a job in.

        Raises:
            QueueFull: there are too many.
            DeviceLost: the process is about to end.
        """
        if self._fault is not None:
            raise DeviceLost(self._fault)
        if self._jobs > MOST_JOBS:
            raise QueueFull(self._jobs, max(statistics.median(self._waits), LOOK))

    def came(self, sms: int) -> None:
        """A job of so many SMs is here; or, by `went`, not any more."""
        self._jobs += 1
        self._wanted += sms

    def went(self, sms: int) -> None:
        self._jobs -= 1
        self._wanted -= sms

    def queued(self, seconds: float) -> None:
        """A job was granted its SMs after so long."""
        self._waits.append(seconds)

    def snapshot(self) -> Snapshot:
        """How it is now."""
        has = self.pool.statistics()
        return Snapshot(
            is_open=self.pool.is_ready and self._fault is None,
            sms_total=has.sms_total,
            sms_free=has.sms_free,
            waiting=has.waiting,
            wanted=self._wanted,
            wait=statistics.median(self._waits),
        )

    def _stalled(self) -> float:
        """Seconds for which its loop has looked at nothing, beyond those it should."""
        return max(0.0, time.monotonic() - self._looked - LOOK)

    # -- watching ----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Looks at the GPU, though nobody uses it; at who is gone; and tells callers what is new.

        After a device fault the process leaves, which Ray takes for a crash, so that it starts
        another; a living actor over a dead GPU it would keep.
        """
        loop = asyncio.get_running_loop()
        while self._fault is None:
            await asyncio.sleep(LOOK)
            stood_still, self._looked = self._stalled(), time.monotonic()
            for key, caller in [*self._callers.items()]:
                caller.heard += stood_still  # what came meanwhile was not heard
                if loop.time() - caller.heard > LOST:
                    logger.warning("%s: a caller was not heard of for %g s", self.name, LOST)
                    await self.goodbye(key)
            self._fault = fault_of(self.pool)
            try:
                snapshot = self.snapshot()
            except PoolClosed:
                return
            for caller in self._callers.values():
                caller.look(snapshot)
        await self._leave(self._fault)

    async def _leave(self, fault: BaseException) -> None:
        """Every job is answered, and the process ends."""
        logger.error("%s: its process ends, for its GPU failed: %s", self.name, fault)
        await self._quiet(LAST_S)
        for caller in self._callers.values():
            caller.fail(DeviceLost(fault))
        await self._quiet(LAST_S)
        await asyncio.sleep(SENDING_S)
        os._exit(EXIT)

    async def _quiet(self, seconds: float) -> None:
        """Waits until nobody has anything to be told, for so long at most."""
        for _ in range(int(seconds / LOOK)):
            if not any(caller.is_busy for caller in self._callers.values()):
                return
            for caller in self._callers.values():
                caller.ring()
            await asyncio.sleep(LOOK)


def actor(name: str, make: Callable[..., Pool], namespace: str, *, detached: bool) -> Any:
    """The actor of that name: the one there is, or a new one. Blocks on Ray.

    Nothing is tried again by Ray: what a job may do twice is for its caller to say.
    """
    return (
        ray.remote(concurrency_groups={"control": 2})(PoolActor)
        .options(
            name=name,
            namespace=namespace,
            get_if_exists=True,
            lifetime="detached" if detached else None,
            num_cpus=0,
            num_gpus=1,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=CONCURRENCY,
        )
        .remote(name, make)
    )
