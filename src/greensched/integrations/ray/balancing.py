"""The choice of a pool for a job, from the pools' last snapshots. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from greensched.errors import TooManySMs
from greensched.integrations.ray.connection import PoolConnection


def check_feasible(sms: int, most: Iterable[int]) -> None:
    """Refuse a size that no pool of the fleet, connected or away, can ever grant.

    Raises:
        TooManySMs: the size exceeds that of the largest pool.
    """
    largest = max(most, default=sms)
    if sms > largest:
        raise TooManySMs(sms, largest)


def choose(
    pools: Sequence[PoolConnection],
    leaving: frozenset[str],
    sms: int,
    held: Mapping[str, int],
    chance: random.Random,
) -> PoolConnection | None:
    """Choose the less loaded of two random pools, of those with most of the job's data.

    The random choice spreads the jobs of programs that see the same snapshots; if all chose the
    best pool, it would become the worst. Pools with stale snapshots come last, behind leaving ones.

    Args:
        pools: the candidates.
        leaving: the names of pools that will be closed soon.
        sms: the smallest number of SMs that the job can run on.
        held: the bytes of the job's arguments on each node.
        chance: the source of randomness.

    Returns:
        None if no candidate is open and large enough.
    """
    fit = [pool for pool in pools if pool.is_open and pool.most >= sms]
    fit = [pool for pool in fit if pool.is_fresh] or fit
    fit = [pool for pool in fit if pool.name not in leaving] or fit
    if held:
        most = max((held.get(pool.node, 0) for pool in fit), default=0)
        fit = [pool for pool in fit if held.get(pool.node, 0) == most]
    return min(chance.sample(fit, min(2, len(fit))), key=lambda pool: pool.load, default=None)
