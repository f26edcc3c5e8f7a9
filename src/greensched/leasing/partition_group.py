"""Several leases of one request: granted together, entered together, ended together."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn

from greensched.errors import InvalidRequest
from greensched.execution.lease import Lease
from greensched.leasing.asking import Asker, Grantor
from greensched.leasing.partition import Partition


class PartitionGroup(Asker[tuple[Partition, ...]]):
    """The context manager of a joint grant."""

    def __init__(self, grantor: Grantor, wish: Any) -> None:
        self._desk = grantor
        self._wish = wish
        self._is_entered = False
        self._leased = None
        self._partitions: tuple[Partition, ...] = ()

    def _refuse(self) -> NoReturn:
        raise InvalidRequest("these partitions were entered already: ask for others")

    def _have(self, leases: tuple[Lease, ...]) -> tuple[Partition, ...]:
        self._partitions = tuple(
            Partition(self._desk, self._wish, lease, is_entered=True) for lease in leases
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
