"""Several leases of one request: granted together, entered together, ended together."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from greensched.errors import InvalidRequest
from greensched.partition import Grantor, Partition


class Together:
    """The context manager of a joint grant."""

    def __init__(self, grantor: Grantor, wish: Any) -> None:
        self._grantor = grantor
        self._wish = wish
        self._partitions: tuple[Partition, ...] = ()
        self._is_entered = False

    async def __aenter__(self) -> tuple[Partition, ...]:
        if self._is_entered:
            raise InvalidRequest("these partitions were entered already: ask for others")
        self._is_entered = True
        try:
            channels = await self._grantor.acquire(self._wish)
        except BaseException:  # it may be tried again
            self._is_entered = False
            raise
        self._partitions = tuple(
            Partition(self._grantor, self._wish, channel, is_entered=True) for channel in channels
        )
        return self._partitions

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Ends all of them, then waits for them as each would; raises the first failure."""
        for partition in self._partitions:
            partition.leave(kind)
        if kind is None:
            for partition in self._partitions:
                await partition.finish()
            for partition in self._partitions:
                partition.raise_unseen()
