"""The pool for threads that run no loop: scripts, notebooks' cells, servers that call a function.

Nothing is scheduled here. A loop runs on a thread of anyio's (a blocking portal), everything is
asked of the pool there, and the caller blocks until it is answered: so there is one semantics, and
`await` is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import anyio
import numpy.typing as npt
from anyio.from_thread import BlockingPortalProvider

from greensched._asynclib import in_event_loop
from greensched.device.buffers import Buffer, PinnedBuffer
from greensched.device.launch import LaunchConfig
from greensched.errors import ForkedPool, LoopWouldBlock, PartitionClosed
from greensched.execution.eventloop.adapters import asker, current_door
from greensched.execution.jobs import Job, ProgressCallback
from greensched.kernels import Kernel
from greensched.leasing.partition import Array, Partition
from greensched.leasing.status import CloseReport, PoolState
from greensched.scheduling.requests import Duration
from greensched.typing import DeviceArray, Size

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from greensched.pool import Pool

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E")
V = TypeVar("V")


class SyncPool:
    """`pool.sync`: what a pool does, for threads without a loop. Made by its pool.

        with pool.sync, pool.sync.partition(16) as p:
            y = p.run(function, x)

    `with pool.sync:` opens the pool and closes it. A pool that is open already, wherever, is used
    as it is. Any number of threads may use it at once; each counts as one task does. While a block
    of it is open a loop runs on a thread of its own.

    Everything blocks until it is done, and raises what the `await` would. An interrupt (Ctrl-C) is
    a cancellation: it leaves behind what that does.

    Raises, everywhere:
        LoopWouldBlock: a loop runs on the calling thread: use the pool itself, with `await`.
        ForkedPool: this is a forked child of the process that opened it.
    """

    def __init__(self, pool: Pool, new_loop: Callable[[], AbstractEventLoop] | None) -> None:
        self._pool = pool
        options = {} if new_loop is None else {"loop_factory": new_loop}
        self._portals = BlockingPortalProvider("asyncio", options)
        self._lock = threading.Lock()
        #: Whether `open` keeps the portal.
        self._is_kept = False

    # -- its life ----------------------------------------------------------------------------------

    def open(self) -> None:
        """Opens the pool, and keeps a loop until `close`. Idempotent. Raises as `Pool.open`."""
        self._check()
        with self._lock:
            if not self._is_kept:
                self._portals.__enter__()
                self._is_kept = True
        try:
            self.call(self._pool.open)
        except BaseException:
            self._let_go()
            raise

    def close(self, grace: float | None = None) -> CloseReport:
        """Closes the pool. Idempotent. See `Pool.aclose`, whose grace it has unless one is given.

        Raises:
            InvalidRequest: the grace is no number of seconds; nothing is closed.
        """
        graces = () if grace is None else (grace,)
        report = self.call(self._pool.aclose, *graces)
        self._let_go()
        return report

    def _let_go(self) -> None:
        with self._lock:
            was_kept, self._is_kept = self._is_kept, False
        if was_kept:
            self._portals.__exit__(None, None, None)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- asking for SMs ----------------------------------------------------------------------------

    def partition(
        self,
        sms: Size,
        *,
        device: int | None = None,
        service: str | None = None,
        deadline: float | None = None,
        duration: Duration | None = None,
        near: Buffer | None = None,
    ) -> AbstractContextManager[SyncPartition]:
        """A lease, to be used with `with`, which waits for it. See `Pool.partition`."""
        lease = self._pool.partition(
            sms, device=device, service=service, deadline=deadline, duration=duration, near=near
        )
        return self._block(lease, self._wrap)

    def partitions(
        self,
        *sizes: Size,
        device: int | None = None,
        service: str | None = None,
        deadline: float | None = None,
        duration: float | None = None,
        near: Buffer | None = None,
    ) -> AbstractContextManager[tuple[SyncPartition, ...]]:
        """Several leases granted together. See `Pool.partitions`."""
        together = self._pool.partitions(
            *sizes, device=device, service=service, deadline=deadline, duration=duration, near=near
        )
        return self._block(together, lambda granted: tuple(map(self._wrap, granted)))

    def _wrap(self, partition: Partition) -> SyncPartition:
        return SyncPartition(self, partition)

    @contextmanager
    def _block(self, block: AbstractAsyncContextManager[E], wrap: Callable[[E], V]) -> Iterator[V]:
        """An `async with` as a `with`; its loop runs as long as it is open."""
        self._check()
        with self._portals:
            try:
                yield wrap(self.call(block.__aenter__))
            except BaseException as error:
                with suppress(PartitionClosed):  # it was never granted
                    self.call(block.__aexit__, type(error), error, error.__traceback__)
                raise
            self.call(block.__aexit__, None, None, None)

    # -- calling -----------------------------------------------------------------------------------

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Runs an async function on the pool's loop: for work that is to overlap within a lease.

        With `p.partition` of a `SyncPartition` it has all that the pool does for tasks. Tasks that
        it starts count as tasks do; itself, it counts as the thread.
        """
        self._check()
        errand = _PortalCall(function, args)
        with self._portals as portal:
            try:
                future: Future[T] = portal.start_task_soon(errand.run)
                return future.result()
            except Exception:
                raise
            except BaseException:  # an interrupt, which may come at any line above
                portal.call(errand.end)
                raise

    def _check(self) -> None:
        if in_event_loop():
            raise LoopWouldBlock("pool.sync")
        if self._pool.state is PoolState.FORKED:
            raise ForkedPool("this pool")

    def __repr__(self) -> str:
        return f"<sync of {self._pool!r}>"


class _PortalCall:
    """A coroutine function called on the portal's loop, and how to end it there."""

    def __init__(self, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args
        self._thread = threading.current_thread()
        self._scope: anyio.CancelScope | None = None
        self._over: anyio.Event

    async def run(self) -> Any:
        self._over = anyio.Event()
        asker.set((current_door().current_task(), self._thread))  # in a context of its own
        try:
            with anyio.CancelScope() as self._scope:
                return await self._function(*self._args)
        finally:
            self._over.set()

    async def end(self) -> None:
        """Cancels it, and waits until it has ended: a cancelled task is free at once.

        Asked for behind it, so what has not begun by now was never handed over.
        """
        if self._scope is not None:
            self._scope.cancel()
            await self._over.wait()


class SyncPartition:
    """A lease, for threads without a loop: where `Partition` returns a job, this waits for it.

    For any thread, inside the block. Facts, arguments and errors are `Partition`'s.

    Attributes:
        partition: the lease itself, for `SyncPool.call`.
    """

    __slots__ = ("_sync", "partition")

    def __init__(self, sync: SyncPool, partition: Partition) -> None:
        self._sync = sync
        self.partition = partition

    @property
    def sm_count(self) -> int:
        """The SMs it was granted."""
        return self.partition.sm_count

    @property
    def device(self) -> int:
        """The ordinal of its device."""
        return self.partition.device

    def _wait(self, submit: Callable[..., Job[T]], /, *args: Any, **kwargs: Any) -> T:
        async def job() -> T:
            return await submit(*args, **kwargs)

        return self._sync.call(job)

    def checkpoint(self, duration: Duration | None = None, *, deadline: float | None = None) -> int:
        """Waits for the lease's work, lets its SMs be changed, and says how many it has now."""
        return self._sync.call(partial(self.partition.checkpoint, duration, deadline=deadline))

    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a blocking function on the partition's own thread, on these SMs."""
        result: T = self._wait(self.partition.run, fn, *args, **kwargs)
        return result

    def local(self, factory: Callable[[], T]) -> T:
        """What a function makes for these SMs, once."""
        result: T = self._wait(self.partition.local, factory)
        return result

    def launch(self, config: LaunchConfig, kernel: Kernel, *args: object) -> None:
        """Launches a kernel, and waits for it. For several behind each other: `SyncPool.call`."""
        self._wait(self.partition.launch, config, kernel, *args)

    def prepare(self, config: LaunchConfig, kernel: Kernel) -> None:
        """Compiles and loads a kernel for these SMs."""
        self._wait(self.partition.prepare, config, kernel)

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32") -> Buffer:
        """An uninitialised buffer on the device."""
        return self._wait(self.partition.empty, shape, dtype)

    def empty_like(self, like: Buffer | Array) -> Buffer:
        """An uninitialised buffer of the same shape and dtype."""
        return self._wait(self.partition.empty_like, like)

    def empty_pinned(
        self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32"
    ) -> PinnedBuffer:
        """Zeroed host memory that the device reads and writes directly."""
        return self._wait(self.partition.empty_pinned, shape, dtype)

    def upload(self, array: npt.ArrayLike, *, progress: ProgressCallback | None = None) -> Buffer:
        """Copies an array to new device memory."""
        return self._wait(self.partition.upload, array, progress=progress)

    def download(
        self,
        buffer: Buffer | DeviceArray,
        out: Array | None = None,
        *,
        progress: ProgressCallback | None = None,
    ) -> Array:
        """Copies a buffer to a numpy array: a new one, or `out`."""
        return self._wait(self.partition.download, buffer, out, progress=progress)

    def copy(
        self,
        dst: Buffer | DeviceArray,
        src: Buffer | DeviceArray | Array,
        *,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Copies a buffer, or an array, into an existing buffer."""
        self._wait(self.partition.copy, dst, src, progress=progress)

    def __repr__(self) -> str:
        return repr(self.partition)
