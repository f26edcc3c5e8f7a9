"""`Device`: its properties, its primary context, and methods that create everything else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Self
from weakref import WeakSet

from greensched import driver as drivers
from greensched._cleanup import run_all
from greensched._validation import Uncopyable
from greensched.context import Context, check_flags
from greensched.device import await_guard
from greensched.device.health import DeviceHealth
from greensched.device.resources import ContextOptions, DeviceResources, describe
from greensched.device.streams import Stream
from greensched.driver.interface import Driver
from greensched.driver.kept_handles import ContextKey, KeptContext
from greensched.driver.types import StreamHandle
from greensched.errors import Closed, DeviceNotFound, GreenschedError, InvalidRequest
from greensched.kernels import Loader
from greensched.typing import ContextFlags, DeviceFacts, SupportsDevice

await_guard.skip_frames_of(__name__)


class Device(Uncopyable):
    """A GPU. Creating one initialises the driver, which may block; it allocates no memory.

    The primary context is retained when first needed, and released by `close()`.

    Args:
        ordinal: The driver's number of the device; or another library's device with a `device_id`,
            such as cuda.core's.
        driver: A driver, `"cuda"`, or `"simulated:h200"`. None: the environment's, or else CUDA.

    Raises:
        DriverUnavailable: There is no usable driver or device; says what to install or change.
        DeviceNotFound: The device does not exist.
    """

    def __init__(
        self, ordinal: int | SupportsDevice = 0, *, driver: str | Driver | None = None
    ) -> None:
        self.driver = drivers.open(driver)
        self.driver.initialise()
        count = self.driver.device_count()
        ordinal = getattr(ordinal, "device_id", ordinal)
        if type(ordinal) is not int or not 0 <= ordinal < count:
            raise DeviceNotFound(ordinal, count)
        #: Its constant properties.
        self.facts: DeviceFacts = self.driver.device_facts(ordinal)
        #: The kernels loaded on it.
        self.loader = Loader(self.driver, self.facts)
        self.health = DeviceHealth(self.ordinal)
        self._primary: Context | None = None
        #: Existing green contexts made here, which are closed before the primary.
        self._greens: WeakSet[Context] = WeakSet()
        #: Those that executors use, kept alive until they are closed: `close` tries again where
        #: closing one failed.
        self._lent: dict[KeptContext, Context] = {}
        self._closed = False
        self._lock = threading.Lock()

    @property
    def ordinal(self) -> int:
        """The driver's number of the device."""
        return self.facts.ordinal

    @property
    def name(self) -> str:
        """The vendor's name for the device."""
        return self.facts.name

    @property
    def uuid(self) -> str:
        """The device's UUID, the same in every process, unlike the ordinal."""
        return self.facts.uuid

    @property
    def compute_capability(self) -> tuple[int, int]:
        """The compute capability as (major, minor)."""
        return self.facts.compute_capability

    @property
    def sm_count(self) -> int:
        """The number of SMs."""
        return self.facts.sm_count

    @property
    def resources(self) -> DeviceResources:
        """The device's resources: `sm`, all SMs, which can be split, and `workqueue`."""
        return DeviceResources(self.driver, self.ordinal)

    @property
    def primary(self) -> Context:
        """The primary context, retained from the first call on, which may block.

        Raises:
            Closed: The device is closed.
            CUDAError: The driver cannot create the context.
        """
        with self._lock:
            if self._closed:
                raise Closed(repr(self))
            if self._primary is None:
                handle = self.driver.retain_primary(self.ordinal)
                ordinal, driver = self.ordinal, self.driver
                self._primary = Context(
                    driver,
                    self.facts,
                    self.loader,
                    handle,
                    release=lambda: driver.release_primary(ordinal),
                    device=self,
                )
            return self._primary

    def set_current(self) -> None:
        """Make the primary context current on this thread, until another context is.

        The first call may block, as `primary` does. Unlike a block it is not checked for an
        `await`.
        """
        self.primary.set_current()

    def set_flags(self, flags: ContextFlags) -> None:
        """Set the flags of the primary context, before its first use.

        Raises:
            InvalidRequest: The flags are unknown, or the context already has other flags, because a
                pool, another library or this object has made it active.
            NotSupported: The driver no longer has one of the flags.
        """
        check_flags(flags)
        present, active = self.driver.primary_state(self.ordinal)
        ways = ContextFlags.SCHED_SPIN | ContextFlags.SCHED_YIELD | ContextFlags.SCHED_BLOCKING_SYNC
        decided = ways | ContextFlags.LMEM_RESIZE_TO_MAX
        if active and (present ^ flags) & decided:
            raise InvalidRequest(
                f"the primary context of device {self.ordinal} is active with flags {present:#x}, "
                "which its other users rely on: set flags before its first use"
            )
        self.driver.set_primary_flags(self.ordinal, flags)

    def create_context(self, options: ContextOptions) -> Context:
        """Create a green context over the resources of `options`, current on no thread. May block.

        The driver keeps a descriptor of each combination until the process ends. So create contexts
        once, and reuse them.

        Raises:
            InvalidRequest: There are no resources, a dry run's resources, or two work-queue
                configurations.
            WrongDevice: A resource belongs to another device.
            InvalidCombination: Outputs of different splits, or (from CUDA 13.1) of different
                alignment; says which.
        """
        made = self._create_green(options)
        return self._green(made, lambda: self.driver.destroy_green(made.green))

    def lend_context(self, key: ContextKey, options: ContextOptions) -> Context:
        """Return a green context for an executor, a kept or a new one. May block.

        The context and its streams are never destroyed: after `close` they are kept for reuse.
        Raises as `create_context`.

        Args:
            key: The key of the context among those that are kept.
            options: The resources for a new context.
        """
        driver = self.primary.driver  # retains it first, so that a closed device raises
        kept = driver.kept.take(self.ordinal, key) or self._create_green(options)

        def give_back() -> None:
            del self._lent[kept]
            driver.synchronize_context(kept.handle)  # if this raised at close, it raises again
            if self.health.failure is None:
                driver.kept.put(self.ordinal, key, kept)

        context = self._lent[kept] = self._green(kept, give_back, kept.streams)
        return context

    def _create_green(self, options: ContextOptions) -> KeptContext:
        driver = self.primary.driver  # retains it first, so that a closed device raises
        green = driver.create_green(describe(driver, self.ordinal, options), self.ordinal)
        try:
            return KeptContext(green, driver.green_context(green))
        except BaseException:
            driver.destroy_green(green)
            raise

    def _green(
        self,
        handles: KeptContext,
        release: Callable[[], None],
        kept_streams: dict[StreamHandle, int] | None = None,
    ) -> Context:
        primary = self.primary
        context = Context(
            self.driver,
            self.facts,
            primary.loader,
            handles.handle,
            release=release,
            green=handles.green,
            primary=primary,
            device=self,
            kept_streams=kept_streams,
        )
        self._greens.add(context)
        return context

    def create_stream(self, *, priority: int = 0) -> Stream:
        """Create a stream of the primary context; its work runs on *all* SMs. May block."""
        return Stream(self.primary, priority=priority)

    def close(self) -> None:
        """Close its green contexts, unload kernels, release the primary. Idempotent. May block.

        Raises:
            InvalidRequest: One of its contexts is current on this thread, or a thread is inside a
                block of it. Nothing is closed then.
            CUDAError: The driver's first error. All further steps were tried.
        """
        with self._lock:
            if self._closed:
                return
            greens = [context for context in self._greens if not context.is_closed]
            for context in (*greens, *([self._primary] if self._primary is not None else [])):
                context.refuse_while_used()
            self._closed, primary = True, self._primary
        steps: list[Callable[[], None]] = [context.close for context in greens]
        if primary is None:
            steps.append(self.loader.close)  # contexts of `Context.create` may use it, too
        else:
            steps += [partial(self._unload, primary), primary.close]
        try:
            run_all(steps)
        except GreenschedError:
            self.abandon()
            raise
        self._primary = None

    def abandon(self) -> None:
        """Leave its contexts as they are until the process ends, because closing them failed."""
        with self._lock:
            primary = () if self._primary is None else (self._primary,)
            for context in (*self._greens, *primary):
                context.is_abandoned = True

    def _unload(self, primary: Context) -> None:
        with primary.entered():
            self.loader.close()

    def __enter__(self) -> Self:
        """Make the primary context current on this thread until the block ends.

        Reentrant, and separate for each thread. The first use of a device may block. No `await`
        inside: see `HeldAcrossAwait`.
        """
        self.primary.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        """Restore the previous context, or none.

        Raises:
            HeldAcrossAwait: The block was held across an await, and that is an error here.
            CUDAError: The previous context could not be restored. Never hides the body's error.
        """
        self.primary.__exit__(*exc)

    def __repr__(self) -> str:
        return f"<Device {self.ordinal}: {self.name}, {self.sm_count} SMs>"
