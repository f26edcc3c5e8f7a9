"""`plan` predicts exactly what a split grants."""

from __future__ import annotations

from typing import Any

import pytest

import greensched
from greensched import ALL, REST
from helpers.backend import Backend

REQUESTS: list[tuple[Any, ...]] = [(1,), (16, 16, REST), (16, 16), ((8, 64), 8), (ALL,), (REST,)]


@pytest.mark.parametrize("sizes", REQUESTS)
@pytest.mark.parametrize("granularity", ["coscheduled", "fine"])
def test_a_plan_is_what_is_granted(
    backend: Backend, sizes: tuple[Any, ...], granularity: Any
) -> None:
    """On a free device a joint request gets what the plan says, and the plan takes nothing."""

    async def main() -> None:
        async with backend.pool(granularity=granularity) as pool:
            (plan,) = pool.preview(*sizes)
            assert plan.is_possible
            assert pool.statistics().sms_free == plan.sms == plan.left + sum(plan.granted)
            assert pool.statistics().requested == 0
            async with pool.partitions(*sizes) as parts:
                assert tuple(p.sm_count for p in parts) == plan.granted
                assert pool.preview(*sizes) == (plan,)  # whatever is leased now

    backend.run(main)


def test_what_is_impossible_says_why(backend: Backend) -> None:
    """Nothing is granted, the reason is a sentence, and the nearest sizes are possible."""

    async def main() -> None:
        async with backend.pool() as pool:
            total = pool.statistics().sms_total
            for sizes in ((total, 16), (total + 1,), (total, REST), (1,) * (total + 1)):
                (plan,) = pool.preview(*sizes)
                assert not plan.is_possible
                assert plan.granted == ()
                assert "impossible" in str(plan)
                assert plan.why in str(plan)
                assert plan.nearest
                assert all(again.is_possible for again in pool.preview(*plan.nearest))
                with pytest.raises(greensched.InvalidRequest):
                    async with pool.partitions(*sizes):
                        pass

    backend.run(main)


def test_a_plan_refuses_what_is_no_size(backend: Backend) -> None:
    """Sizes are checked as in a request, and a pool that is not open has no plan."""
    pool = backend.pool()
    with pytest.raises(greensched.PoolClosed, match="not open"):
        pool.preview(16)

    async def main() -> None:
        async with pool:
            for sizes in ((), (0,), ("16",), (ALL, 8), (REST, REST)):
                with pytest.raises(greensched.InvalidRequest):
                    pool.preview(*sizes)  # type: ignore[arg-type]

    backend.run(main)
