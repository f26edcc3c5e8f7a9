"""`pool.sync` under the pytest plugin: a program without a loop on virtual time."""

from __future__ import annotations

import pytest

from greensched import ForkedPool
from greensched.driver.simulated import cost
from greensched.integrations.testing import SimGPU, SimPool


def test_a_plain_test_is_on_virtual_time(sim_gpu: SimGPU, sim_pool: SimPool) -> None:
    """The loop of `pool.sync` runs on the simulated clock, so an hour takes no time."""
    pool = sim_pool()
    with pool.sync, pool.sync.partition(16) as p:
        assert p.run(cost(3600)(abs), -1) == 1
    assert 3600 <= sim_gpu.time < 3601


def test_in_a_forked_child(sim_pool: SimPool) -> None:
    """In a child without the loop's thread, nothing waits for it."""
    pool = sim_pool()
    pool.sync.open()
    state, pool._manager.state = pool._manager.state, type(pool.state).FORKED
    with pytest.raises(ForkedPool), pool.sync.partition(8):
        pass
    with pytest.raises(ForkedPool):
        pool.sync.close()
    pool._manager.state = state
    pool.sync.close()
