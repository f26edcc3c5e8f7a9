"""`pool.sync`: a pool for threads that run no loop: scripts, notebooks, synchronous servers.

Nothing is scheduled here. A loop runs on its own thread, each call is a task there, and the
caller blocks until that task ends. The semantics are those of the asynchronous pool.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from contextvars import copy_context
from functools import partial, update_wrapper
from inspect import isawaitable
from types import FrameType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack
from weakref import WeakSet

import anyio

from greensched._asynclib import in_event_loop
from greensched._validation import Uncopyable
from greensched.device.device import Device
from greensched.errors import ForkedPool, InvalidRequest, LoopWouldBlock, PartitionClosed
from greensched.execution.eventloop import current_adapter, holder_override
from greensched.leasing.partition import Partition
from greensched.leasing.pool_state import CloseReport, PoolState
from greensched.leasing.requests import LeaseOptions
from greensched.typing import Size, T

if TYPE_CHECKING:
    from greensched import Pool

P = ParamSpec("P")
E = TypeVar("E")
V = TypeVar("V")


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Handle a SIGINT after the block, so that a loop is started or ended completely or not at all.

    Otherwise an interrupt could leave a loop's thread that never ends, and the exit would wait for
    it. Only the main thread is interrupted, and only by a handler written in Python.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


#: Pools whose loop runs until `SyncPool.close`.
_open_pools: WeakSet[SyncPool] = WeakSet()
#: Seconds that leases of an open pool have to end when the interpreter exits.
EXIT_GRACE = 0.5
#: Seconds in which the exit waits for all of them to close: the interpreter should exit in 1 s.
EXIT_LIMIT = 0.9


def _close_at_exit() -> None:
    """Close all pools that the program left open, while the threads of their loops still run.

    No thread is started here: Python 3.12 refuses that at exit.
    """
    closings = {}
    for sync in tuple(_open_pools):
        pool = sync._pool
        if pool.state not in (PoolState.CLOSED, PoolState.FORKED):  # a forked child has no loop
            closing = asyncio.run_coroutine_threadsafe(pool.aclose(EXIT_GRACE), sync._loop.loop)
            closings[closing] = f"{pool!r} was never closed"
    wait(closings, EXIT_LIMIT)
    for text in closings.values():
        warnings.warn(text, ResourceWarning, stacklevel=2)  # last: it may be raised


atexit.register(_close_at_exit)


class _LoopThread:
    """A loop on a daemon thread, which runs while anything uses it.

    anyio's `BlockingPortalProvider` cannot replace it: garbage collection would wait in it for a
    thread that has stopped at the interpreter's exit, and each call would wake the loop twice.
    Here a call wakes the loop only if no other call is about to begin.

    Args:
        new_loop: Makes the loop. None: asyncio makes it.
    """

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop] | None) -> None:
        self._options = {} if new_loop is None else {"loop_factory": new_loop}
        self._lock = threading.Lock()
        #: One entry for each use, because garbage collection ends a use without the lock.
        self._uses: list[None] = []
        #: None while nothing uses the loop.
        self._thread: threading.Thread | None = None
        # Those of the latest thread.
        self.loop: asyncio.AbstractEventLoop
        self._stopped: anyio.Event
        #: Calls that have not begun, and whether the loop was woken to begin them.
        self._calls: deque[_Call[Any]] = deque()
        self._is_woken = False

    def enter(self) -> None:
        """Begin a use: the loop runs until `leave` or `leave_collected`."""
        with self._lock:
            if self._thread is None:
                started: Future[None] = Future()
                run = partial(self._run, started)
                thread = threading.Thread(target=run, name="greensched sync", daemon=True)
                thread.start()
                started.result()
                self._thread = thread
            self._uses.append(None)

    def begin(self, call: _Call[Any]) -> None:
        """Begin a call in the next turn of the loop."""
        self._calls.append(call)
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._begin_calls)

    def cancel(self, call: _Call[Any]) -> None:
        """Cancel a call and wait for its end, which comes at once."""
        self.loop.call_soon_threadsafe(self._cancel, call)
        with suppress(CancelledError):
            call.ended.exception()

    def _begin_calls(self) -> None:
        self._is_woken = False  # first: a call added after the last one wakes the loop again
        while self._calls:
            call = self._calls.popleft()
            call.task = self.loop.create_task(call.run(), context=call.context)

    def _cancel(self, call: _Call[Any]) -> None:
        self._begin_calls()  # because an interrupt may come before the loop was woken
        if call.task is None:
            call.ended.cancel()
        else:
            call.task.add_done_callback(lambda _: call.ended.cancel())  # if it never began
            call.task.cancel()

    def leave(self) -> None:
        """End a use. The last use ends the loop and waits for its thread."""
        self._uses.pop()
        thread = self._end_unused()
        if thread is not None:
            thread.join()

    def leave_collected(self) -> None:
        """End a use from garbage collection. Takes no lock and never waits."""
        self._uses.pop()
        self._call_soon(self._end_unused)

    def _end_unused(self) -> threading.Thread | None:
        """Begin to end the loop if nothing uses it, and return its thread."""
        with self._lock:
            if self._uses or self._thread is None:
                return None
            thread, self._thread = self._thread, None
            self._call_soon(self._stopped.set)
        return thread

    def _call_soon(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: a call's interrupt ended it
            self.loop.call_soon_threadsafe(function)

    def _run(self, started: Future[None]) -> None:
        async def serve() -> None:
            self.loop, self._stopped = asyncio.get_running_loop(), anyio.Event()
            self._is_woken = False  # the previous loop may have ended before it began its calls
            started.set_result(None)
            await self._stopped.wait()

        try:
            anyio.run(serve, backend="asyncio", backend_options=self._options)
        except BaseException as error:  # of a call: its caller gets it
            if not started.done():
                started.set_exception(error)


class SyncPool(Uncopyable):
    """The pool for threads without a loop. Made by `pool.sync`.

        with pool.sync, pool.sync.partition(16) as p:
            y = p.run(function, x)

    `with pool.sync:` opens the pool and closes it. An open pool is used as it is. Any number
    of threads may use it at once; each counts as one task. While one of its blocks is open, a loop
    runs on a separate thread.

    Every method blocks until its work is done, and raises the errors of the asynchronous one. An
    interrupt (Ctrl-C) has the effects of a cancellation.

    Raises, everywhere:
        LoopWouldBlock: A loop runs on the calling thread: use the pool itself, with `await`.
        ForkedPool: This process is a forked child of the one that opened the pool.
    """

    def __init__(
        self, pool: Pool, new_loop: Callable[[], asyncio.AbstractEventLoop] | None
    ) -> None:
        self._pool = pool
        self._loop = _LoopThread(new_loop)
        self._lock = threading.Lock()
        #: One entry while `open` keeps the loop; garbage collection removes it without the lock.
        self._kept: list[None] = []

    # -- opening and closing -----------------------------------------------------------------------

    def open(self) -> None:
        """Open the pool, and keep its loop until `close`. Idempotent. Raises as `Pool.open`."""
        self._open(self._pool.open)

    def _open(self, opening: Callable[[], Awaitable[object]]) -> None:
        self._check()
        try:
            self._keep_loop()
            self.call(opening)
        except BaseException:
            self._release_loop()
            raise

    def close(self, grace: float | None = None) -> CloseReport:
        """Close the pool, within `grace` or the default grace. Idempotent. See `Pool.aclose`.

        Raises:
            InvalidRequest: `grace` is not a number of seconds; nothing is closed.
        """
        graces = () if grace is None else (grace,)
        report = self.call(self._pool.aclose, *graces)
        self._release_loop()
        return report

    def _keep_loop(self) -> None:
        with _interrupts_deferred(), self._lock:
            if not self._kept:
                self._loop.enter()
                _open_pools.add(self)
                self._kept.append(None)

    def _release_loop(self) -> None:
        with _interrupts_deferred():
            self._end_keeping(self._loop.leave)

    def _end_keeping(self, leave: Callable[[], None]) -> None:
        with suppress(IndexError):  # it is not kept
            self._kept.pop()
            _open_pools.discard(self)
            leave()

    @contextmanager
    def _loop_runs(self) -> Iterator[None]:
        """Have the loop run while the block is open."""
        is_entered = False
        try:
            with _interrupts_deferred():
                self._loop.enter()
                is_entered = True
            yield
        except GeneratorExit:  # perhaps from garbage collection
            is_entered = False
            self._loop.leave_collected()
            raise
        finally:
            if is_entered:
                with _interrupts_deferred():
                    self._loop.leave()

    def __enter__(self) -> Self:
        """Open the pool. An interrupt meanwhile also closes it again, as a cancellation does."""
        try:
            self._open(self._pool.__aenter__)
        except Exception:
            raise
        except BaseException:  # it may come after the pool is open
            self._close_block()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Close the pool, within the default grace, even if an interrupt comes meanwhile.

        If garbage collection ends the block, a thread closes the pool, as in `Pool.__aexit__`.
        """
        if isinstance(error, GeneratorExit):
            _end_collected(self._pool, error)
            self._end_keeping(self._loop.leave_collected)
        else:
            self._close_block()

    def _close_block(self) -> None:
        try:
            self.call(self._pool.__aexit__, None, None, None)
        finally:
            self._release_loop()

    # -- asking for SMs ----------------------------------------------------------------------------

    def partition(
        self, sms: Size, **options: Unpack[LeaseOptions]
    ) -> AbstractContextManager[SyncPartition]:
        """Request a lease. Use the result with `with`, which waits for it. See `Pool.partition`."""
        return self._block(self._pool.partition(sms, **options), self._wrap)

    def partitions(
        self, *sizes: Size, **options: Unpack[LeaseOptions]
    ) -> AbstractContextManager[tuple[SyncPartition, ...]]:
        """Request several leases that are granted together. See `Pool.partitions`."""
        group = self._pool.partitions(*sizes, **options)
        return self._block(group, lambda granted: tuple(map(self._wrap, granted)))

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[object]:
        """Write what happens while a block is open into a file. See `Pool.trace`."""
        return self._block(self._pool.trace(path), lambda trace: trace)

    def _wrap(self, partition: Partition) -> SyncPartition:
        return SyncPartition(self, partition)

    @contextmanager
    def _block(self, block: AbstractAsyncContextManager[E], wrap: Callable[[E], V]) -> Iterator[V]:
        """Turn an `async with` into a `with`. The loop runs while the block is open."""
        self._check()
        with self._loop_runs():
            try:
                yield wrap(self._call(block.__aenter__))
            except GeneratorExit as error:
                _end_collected(block, error)
                raise
            except BaseException as error:
                with suppress(PartitionClosed):  # it was never granted
                    self.call(block.__aexit__, type(error), error, error.__traceback__)
                raise
            self.call(block.__aexit__, None, None, None)

    # -- calling -----------------------------------------------------------------------------------

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async function on the pool's loop, for work that overlaps within a lease.

        With `SyncPartition.partition` the function can use everything that the pool offers to
        tasks. It counts as the calling thread; tasks that it starts count as tasks.

        Raises:
            InvalidRequest: The function is not async.
        """
        self._check()
        with self._loop_runs():
            return self._call(function, *args)

    def _call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call a function as `call` does, while the loop runs."""
        call: _Call[T] = _Call(function, args)
        try:
            self._loop.begin(call)
            return call.ended.result()
        except Exception:
            raise
        except BaseException:  # an interrupt, which may come at any line above
            self._loop.cancel(call)
            raise

    def _check(self) -> None:
        if in_event_loop():
            raise LoopWouldBlock("pool.sync")
        if self._pool.state is PoolState.FORKED:
            raise ForkedPool("this pool")
        self._pool._lifecycle.refuse_in_decision()  # its loop would wait for this thread

    def __repr__(self) -> str:
        return f"<sync of {self._pool!r}>"


def _end_collected(block: AbstractAsyncContextManager[object], error: GeneratorExit) -> None:
    """End a block, perhaps from garbage collection on any thread, without waiting for a loop."""
    with suppress(StopIteration, PartitionClosed):
        block.__aexit__(type(error), error, error.__traceback__).send(None)


class _Call(Generic[T]):
    """A thread's call of an async function, which runs as a task of the loop."""

    def __init__(self, function: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args
        self._thread = threading.current_thread()
        self.context = copy_context()
        #: None until the call begins.
        self.task: asyncio.Task[None] | None = None
        self.ended: Future[T] = Future()

    async def run(self) -> None:
        holder_override.set((current_adapter().current_task(), self._thread))
        try:
            awaitable = self._function(*self._args)
            if not isawaitable(awaitable):
                raise InvalidRequest(
                    f"pool.sync.call takes an async function, but {self._function!r} returned "
                    f"{awaitable!r}: call a blocking function with `p.run`"
                )
            value = await awaitable
        except BaseException as error:  # also an interrupt, which belongs to the caller
            self.ended.set_exception(error)
        else:
            self.ended.set_result(value)


def _blocking(
    method: Callable[Concatenate[Partition, P], Awaitable[T]],
) -> Callable[Concatenate[SyncPartition, P], T]:
    """Make the method of `SyncPartition` that waits for a method of `Partition`."""

    def blocking(self: SyncPartition, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async def call() -> T:
            return await method(self.partition, *args, **kwargs)

        return self._sync.call(call)

    update_wrapper(blocking, method)
    blocking.__doc__ = f"Call `Partition.{method.__name__}`, and wait for what it returns."
    return blocking


class SyncPartition(Uncopyable):
    """A lease for threads without a loop. Its methods wait for the jobs that `Partition` returns.

    For any thread, inside the block. Arguments, values and errors are those of the methods of
    `Partition` with the same names. To overlap several calls, use `SyncPool.call`.

    Attributes:
        partition: the lease itself, for `SyncPool.call`.
    """

    __slots__ = ("_sync", "partition")

    def __init__(self, sync: SyncPool, partition: Partition) -> None:
        self._sync = sync
        self.partition = partition

    @property
    def sm_count(self) -> int:
        """The number of granted SMs."""
        return self.partition.sm_count

    @property
    def device(self) -> Device:
        """The device of the partition."""
        return self.partition.device

    @property
    def device_id(self) -> int:
        """The ordinal of the device."""
        return self.partition.device_id

    checkpoint = _blocking(Partition.checkpoint)
    launch = _blocking(Partition.launch)
    prepare = _blocking(Partition.prepare)
    empty = _blocking(Partition.empty)
    empty_like = _blocking(Partition.empty_like)
    empty_pinned = _blocking(Partition.empty_pinned)
    upload = _blocking(Partition.upload)
    download = _blocking(Partition.download)
    copy = _blocking(Partition.copy)

    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a blocking function on these SMs. See `Partition.run`."""
        result: T = _run(self, fn, *args, **kwargs)
        return result

    def local(self, factory: Callable[[], T]) -> T:
        """Return the value that the factory makes once for these SMs. See `Partition.local`."""
        result: T = _local(self, factory)
        return result

    def __repr__(self) -> str:
        return repr(self.partition)


# Generic methods lose their type variables in `_blocking`.
_run: Callable[..., Any] = _blocking(Partition.run)
_local: Callable[..., Any] = _blocking(Partition.local)
