"""A context's settings (limits, cache configuration, flags) as properties of `Context`.

Nothing is cached: each property reads from the driver, and each assignment writes to it. All
settings belong to the primary context; its green contexts are views of it and share them (cuda.h of
13.3, cuCtxFromGreenCtx); none of their own are documented.
"""

from __future__ import annotations

import abc

from greensched._validation import Uncopyable
from greensched.device.current_context import ContextScope, Enterable
from greensched.driver.interface import Driver
from greensched.errors import InvalidRequest
from greensched.typing import CacheConfig, ContextFlags, Limit

#: The largest `size_t` of the driver; the bindings raise for more.
MAX_BYTES = 2**64 - 1


class ContextLimits(Uncopyable, abc.ABC):
    """Typed properties for all settings of a context.

    Reading never waits. Assigning may wait until the device is idle (if the stack grows): not for
    an event-loop thread. The driver may round an assigned value, so read the property again. Each
    property raises:

        Closed: The context is closed.
        InvalidRequest: The assigned value has the wrong type or is out of range.
        NotSupported: The device lacks the resource of this limit.
        CUDAError: The driver refused the value.
    """

    driver: Driver

    @property
    @abc.abstractmethod
    def _base(self) -> Enterable:
        """The context with the settings; not a green one, which only one thread at a time owns."""

    @abc.abstractmethod
    def _check(self) -> None:
        """Raise `Closed` if the context has ended."""

    @property
    def flags(self) -> ContextFlags:
        """The flags with which the context was created: how its threads wait, and more."""
        with self._inside():
            return self.driver.context_flags()

    @property
    def stack_bytes(self) -> int:
        """Bytes of stack for each thread of a kernel (CU_LIMIT_STACK_SIZE)."""
        return self._limit(Limit.STACK)

    @stack_bytes.setter
    def stack_bytes(self, nbytes: int) -> None:
        self._set_limit(Limit.STACK, nbytes, "stack_bytes")

    @property
    def printf_fifo_bytes(self) -> int:
        """Bytes of the ring buffer for `printf` in kernels (CU_LIMIT_PRINTF_FIFO_SIZE)."""
        return self._limit(Limit.PRINTF_FIFO)

    @printf_fifo_bytes.setter
    def printf_fifo_bytes(self, nbytes: int) -> None:
        self._set_limit(Limit.PRINTF_FIFO, nbytes, "printf_fifo_bytes")

    @property
    def malloc_heap_bytes(self) -> int:
        """Bytes of the heap for `malloc` in kernels (CU_LIMIT_MALLOC_HEAP_SIZE)."""
        return self._limit(Limit.MALLOC_HEAP)

    @malloc_heap_bytes.setter
    def malloc_heap_bytes(self, nbytes: int) -> None:
        self._set_limit(Limit.MALLOC_HEAP, nbytes, "malloc_heap_bytes")

    @property
    def persisting_l2_bytes(self) -> int:
        """Bytes of L2 set aside for persisting accesses (CU_LIMIT_PERSISTING_L2_CACHE_SIZE).

        From compute capability 8.0 on. The driver rounds up, and refuses more than the device has
        (`CUDAError`).
        """
        return self._limit(Limit.PERSISTING_L2)

    @persisting_l2_bytes.setter
    def persisting_l2_bytes(self, nbytes: int) -> None:
        self._set_limit(Limit.PERSISTING_L2, nbytes, "persisting_l2_bytes")

    @property
    def cache_config(self) -> CacheConfig:
        """Whether its kernels prefer more L1 cache or more shared memory. A hint."""
        with self._inside():
            return self.driver.cache_config()

    @cache_config.setter
    def cache_config(self, config: CacheConfig) -> None:
        if not isinstance(config, CacheConfig):
            raise InvalidRequest(
                f"cache_config={config!r}: give a CacheConfig, such as CacheConfig.PREFER_L1"
            )
        with self._inside():
            self.driver.set_cache_config(config)

    def _limit(self, limit: Limit) -> int:
        with self._inside():
            return self.driver.limit(limit)

    def _set_limit(self, limit: Limit, nbytes: int, what: str) -> None:
        if type(nbytes) is not int or not 0 <= nbytes <= MAX_BYTES:
            raise InvalidRequest(f"{what}={nbytes!r}: give a number of bytes from 0 to {MAX_BYTES}")
        with self._inside():
            self.driver.set_limit(limit, nbytes)

    def _inside(self) -> ContextScope:
        self._check()
        return ContextScope(self._base)
