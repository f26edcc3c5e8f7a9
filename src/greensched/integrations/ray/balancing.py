"""Which pool of a fleet a job goes to. Pure: of what pools last said of themselves."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from greensched.errors import InvalidRequest, TooManySMs


class Known(Protocol):
    """Who a pool is; see `wire.Facts`."""

    @property
    def name(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def uuid(self) -> str | None: ...


class Choice(Known, Protocol):
    """How a pool is; see `line.Line`."""

    @property
    def most(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_fresh(self) -> bool: ...
    @property
    def load(self) -> tuple[float, float]: ...


C = TypeVar("C", bound=Choice)


def check_feasible(sms: int, most: Iterable[int]) -> None:
    """Refuses what no pool of the fleet can ever grant, those that are away just now included.

    Raises:
        TooManySMs: it says what the largest can.
    """
    largest = max(most, default=sms)
    if sms > largest:
        raise TooManySMs(sms, largest)


def check_apart(new: Known, others: Iterable[Known]) -> None:
    """Refuses a second process's pool on one GPU, whatever ordinal it has there.

    Raises:
        InvalidRequest: its GPU has a pool; both processes would get it in turns.
    """
    for other in others:
        if other.pid != new.pid and other.uuid == new.uuid is not None and other.node == new.node:
            raise InvalidRequest(
                f"{new.name} and {other.name} are both on GPU {new.uuid}: let Ray set "
                "CUDA_VISIBLE_DEVICES (unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES)"
            )


def choose(
    pools: Sequence[C], sms: int, held: Mapping[str, int], chance: random.Random
) -> C | None:
    """The pool for a job: where its data is; of those, of two by chance, the one with less to do.

    Two by chance spread callers who know the same: all of them on the best one would make it the
    worst. Pools that were not heard of lately come last.

    Args:
        pools: those that may be chosen.
        sms: the least the job needs.
        held: of nodes, the bytes of the job's arguments that they have.
        chance: what decides.

    Returns:
        None: none of them is open and large enough.
    """
    fit = [pool for pool in pools if pool.is_open and pool.most >= sms]
    fit = [pool for pool in fit if pool.is_fresh] or fit
    most = max((held.get(pool.node, 0) for pool in fit), default=0)
    near = [pool for pool in fit if held.get(pool.node, 0) == most]
    return min(chance.sample(near, min(2, len(near))), key=lambda pool: pool.load, default=None)
