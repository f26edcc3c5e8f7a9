"""What a context is set to: limits, cache configuration, flags, as properties of `Context`.

Nothing is remembered: each property asks the driver, and each assignment tells it. All of it is the
primary context's, and its green contexts share it: they are views of it (cuda.h of 13.3,
cuCtxFromGreenCtx), and nothing is documented of state of their own.
"""

from __future__ import annotations

import abc

from greensched.device.current_context import ContextScope, Enterable
from greensched.driver.interface import Driver
from greensched.errors import InvalidRequest
from greensched.typing import CacheConfig, ContextFlags, Limit

#: What a `size_t` of the driver holds at most: past it a wheel raises.
MOST_BYTES = 2**64 - 1


class ContextLimits(abc.ABC):
    """Typed properties for everything that a context can be set to.

    Reading never waits; assigning may, until the device is idle (a stack that grows): not for an
    event-loop thread. What was assigned is a wish: read it again to see what the driver made of it.
    Each of them raises:

        Closed: the context is closed.
        InvalidRequest: what is assigned is no such value.
        NotSupported: the device has nothing that this limits.
        CUDAError: the driver refused it.
    """

    driver: Driver

    @property
    @abc.abstractmethod
    def _base(self) -> Enterable:
        """The context that has the state: never a green one, which needs its turn."""

    @abc.abstractmethod
    def _check(self) -> None:
        """Raises `Closed` where the context has ended."""

    @property
    def flags(self) -> ContextFlags:
        """How it was made: how a thread of it waits, and what else was asked for."""
        with self._inside():
            return self.driver.context_flags()

    @property
    def stack_bytes(self) -> int:
        """Bytes of stack that each thread of a kernel has (CU_LIMIT_STACK_SIZE)."""
        return self._limit(Limit.STACK)

    @stack_bytes.setter
    def stack_bytes(self, nbytes: int) -> None:
        self._set_limit(Limit.STACK, nbytes, "stack_bytes")

    @property
    def printf_fifo_bytes(self) -> int:
        """Bytes of the ring that `printf` in kernels writes to (CU_LIMIT_PRINTF_FIFO_SIZE)."""
        return self._limit(Limit.PRINTF_FIFO)

    @printf_fifo_bytes.setter
    def printf_fifo_bytes(self, nbytes: int) -> None:
        self._set_limit(Limit.PRINTF_FIFO, nbytes, "printf_fifo_bytes")

    @property
    def malloc_heap_bytes(self) -> int:
        """Bytes of the heap that `malloc` in kernels takes from (CU_LIMIT_MALLOC_HEAP_SIZE)."""
        return self._limit(Limit.MALLOC_HEAP)

    @malloc_heap_bytes.setter
    def malloc_heap_bytes(self, nbytes: int) -> None:
        self._set_limit(Limit.MALLOC_HEAP, nbytes, "malloc_heap_bytes")

    @property
    def persisting_l2_bytes(self) -> int:
        """Bytes of L2 set aside for persisting accesses (CU_LIMIT_PERSISTING_L2_CACHE_SIZE).

        From compute capability 8.0 on. A driver rounds them up; more than the device has are
        refused (`CUDAError`).
        """
        return self._limit(Limit.PERSISTING_L2)

    @persisting_l2_bytes.setter
    def persisting_l2_bytes(self, nbytes: int) -> None:
        self._set_limit(Limit.PERSISTING_L2, nbytes, "persisting_l2_bytes")

    @property
    def cache_config(self) -> CacheConfig:
        """What its kernels would rather have more of, L1 cache or shared memory; a hint."""
        with self._inside():
            return self.driver.cache_config()

    @cache_config.setter
    def cache_config(self, config: CacheConfig) -> None:
        if not isinstance(config, CacheConfig):
            raise InvalidRequest(f"cache_config={config!r} is no CacheConfig, such as PREFER_L1")
        with self._inside():
            self.driver.set_cache_config(config)

    def _limit(self, limit: Limit) -> int:
        with self._inside():
            return self.driver.limit(limit)

    def _set_limit(self, limit: Limit, nbytes: int, what: str) -> None:
        if type(nbytes) is not int or not 0 <= nbytes <= MOST_BYTES:
            raise InvalidRequest(
                f"{what}={nbytes!r} is no number of bytes: give an int from 0 to {MOST_BYTES}"
            )
        with self._inside():
            self.driver.set_limit(limit, nbytes)

    def _inside(self) -> ContextScope:
        self._check()
        return ContextScope(self._base)
