"""Test the application without a GPU, in virtual time: pytest examples/07_fastapi."""

import asyncio

import httpx
import pytest
from app import create_app

from greensched import ALL
from greensched.driver.simulated import Crash
from greensched.kernels import reduce_sum


def make_client(pool):
    """Return a client of the application over an open pool."""
    transport = httpx.ASGITransport(create_app(pool))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def test_a_sum(sim_gpu, sim_pool):
    """The sum is correct, and one kernel on 16 SMs computed it."""
    async with sim_pool() as pool, make_client(pool) as client:
        answer = await client.post("/sum", json=[1, 2, 3.5])
    assert answer.json() == {"sum": 6.5}
    sim_gpu.assert_ran(reduce_sum, times=1, sms=16)


async def test_a_burst(sim_gpu, sim_pool):
    """Of 20 requests on 64 SMs, four run, ten wait, and six are refused with Retry-After."""
    async with sim_pool(sms=64, max_waiting=10) as pool, make_client(pool) as client:
        answers = await asyncio.gather(*(client.post("/sum", json=[1]) for _ in range(20)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 6
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
    sim_gpu.assert_ran(reduce_sum, times=14, by=0.1)


async def test_too_late(sim_gpu, sim_pool):
    """A request that is not granted SMs within half a second is answered then."""
    async with sim_pool() as pool, make_client(pool) as client, pool.partition(ALL):
        answer = await asyncio.create_task(client.post("/sum", json=[1]))  # no SM is free
        assert answer.status_code == 504
        assert sim_gpu.time == pytest.approx(0.5, abs=0.01)


async def test_a_dead_gpu(sim_pool):
    """After a device fault the service is not ready; requests that need no GPU are served."""
    async with sim_pool(faults=[Crash("reduce_sum")]) as pool, make_client(pool) as client:
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.post("/sum", json=[1])).status_code == 503
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/about")).status_code == 200
