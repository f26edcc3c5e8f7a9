"""The example service, by real HTTP: uvicorn on a port of its own, and httpx."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import io
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import httpx
import numpy as np
import pytest
import uvicorn

from greensched import ALL, Pool, PoolState
from greensched.cli.demo import blurred
from greensched.driver import simulated
from greensched.kernels import gaussian_blur
from greensched.typing import Cost
from helpers.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_async_service.py"

IMAGE = np.random.default_rng(5).random((48, 64, 3), np.float32)

pytestmark = pytest.mark.asyncio


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import the example on a simulated GPU, and check that nothing is left there."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    spec = importlib.util.spec_from_file_location("async_service", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    driver = simulated.open()
    monkeypatch.setattr(module, "Pool", partial(Pool, driver=driver))
    yield module
    gc.collect()
    assert not driver.live()


@dataclass
class Service:
    """A running service."""

    server: uvicorn.Server
    client: httpx.AsyncClient
    port: int

    @property
    def pool(self) -> Pool:
        return self.server.lifespan.state["pool"]  # type: ignore[no-any-return]

    def post(self, image: np.ndarray = IMAGE, **query: object) -> asyncio.Task[httpx.Response]:
        """Send an image, and return the response."""
        return asyncio.create_task(self.client.post("/blur", params=query, content=npy(image)))


@asynccontextmanager
async def serving(example: ModuleType) -> AsyncIterator[Service]:
    """Run the service, and stop it as a signal does."""
    server = uvicorn.Server(uvicorn.Config(example.app, port=0, log_config=None))
    running = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield Service(server, client, port)
    finally:
        server.should_exit = True
        await running


def npy(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, image)
    return file.getvalue()


def image_of(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    result: np.ndarray = np.load(io.BytesIO(response.content))
    return result


def reference(image: np.ndarray, sigma: float) -> np.ndarray:
    return blurred(np.atleast_3d(image).astype(np.float32), sigma).reshape(image.shape)


# -- answers ----------------------------------------------------------------------------------

IMAGES = {
    "colour": IMAGE,
    "grey": IMAGE[:, :, 0],
    "integers": (255 * IMAGE).astype(np.uint8),
    "columns first": np.asfortranarray(IMAGE),
    "one pixel": IMAGE[:1, :1],
    "large": np.tile(IMAGE, (6, 6, 1)),  # more than the 64 KiB that are staged
}


@pytest.mark.parametrize("kind", IMAGES)
async def test_an_image_comes_back_blurred(example: ModuleType, kind: str) -> None:
    """Whatever its shape, dtype, order and size: as numpy blurs it, in the shape it was sent."""
    image = IMAGES[kind]
    async with serving(example) as service:
        result = image_of(await service.post(image, sigma=3))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, reference(image, 3.0), rtol=1e-4, atol=1e-4)


async def test_each_client_gets_its_own_image(example: ModuleType) -> None:
    """Of many clients at once each gets what it sent, and every SM is free afterwards."""
    images = [np.roll(IMAGE, i, axis=1)[i:] for i in range(40)]
    async with serving(example) as service:
        posts = [service.post(image) for image in images]
        for image, post in zip(images, posts, strict=True):
            np.testing.assert_allclose(image_of(await post), reference(image, 2.0), atol=1e-5)
        statistics = service.pool.statistics()
        assert statistics.granted == len(images)
        assert statistics.sms_free == statistics.sms_total


NONSENSE = {
    "nothing": (b"", {}, "npy"),
    "no .npy": (b"GIF89a, not an array", {}, "npy"),
    "half of it": (npy(IMAGE)[:200], {}, "npy"),
    "a forged size": (npy(IMAGE).replace(b"(48, 64, 3)", b"(999999999999,)", 1), {}, "allocate"),
    "objects": (npy(np.array([[object]])), {}, "npy"),
    "complex numbers": (npy(IMAGE[0] * 1j), {}, "numbers"),
    "a row": (npy(IMAGE[0, :, 0]), {}, "height, width"),
    "no pixels": (npy(IMAGE[:0]), {}, "grid"),
    "no sigma": (npy(IMAGE), {"sigma": "much"}, "much"),
    "no deadline": (npy(IMAGE), {"deadline": "-1"}, "deadline"),
}


@pytest.mark.parametrize("kind", NONSENSE)
async def test_nonsense_is_refused(example: ModuleType, kind: str) -> None:
    """What cannot be blurred gets 400 and a reason, and the service goes on."""
    body, query, reason = NONSENSE[kind]
    async with serving(example) as service:
        response = await service.client.post("/blur", params=query, content=body)
        assert response.status_code == 400
        assert reason in response.text
        image_of(await service.post())


# -- too much, too late -----------------------------------------------------------------------


async def test_overload_is_reported(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the queue's bound: 429 with Retry-After in whole seconds; queued ones are served."""
    monkeypatch.setattr(example, "MAX_WAITING", 3)
    async with serving(example) as service:
        async with service.pool.partition(ALL):
            posts = [service.post(deadline=30) for _ in range(8)]
            await until(lambda: sum(post.done() for post in posts) == 5)
            assert service.pool.statistics().waiting == 3
        answers = [await post for post in posts]
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 5
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["Retry-After"]) >= 1
        image_of(await service.post())


async def test_a_deadline_that_passes_is_reported(example: ModuleType) -> None:
    """A request that is not granted within its deadline is answered with 504."""
    async with serving(example) as service, service.pool.partition(ALL):
        answer = await service.post(deadline=0.01)
        assert answer.status_code == 504
        assert "0.01 s" in answer.text


# -- clients that leave -----------------------------------------------------------------------


async def test_a_client_that_leaves_the_queue(example: ModuleType) -> None:
    """A client that goes away while it is queued loses its place at once."""
    async with serving(example) as service, service.pool.partition(ALL):
        post = service.post(deadline=30)
        await until(lambda: service.pool.statistics().waiting == 1)
        post.cancel()
        await until(lambda: service.pool.statistics().waiting == 0)
        assert service.pool.statistics().cancelled == 1


async def test_a_client_that_leaves_while_its_kernel_runs(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its SMs come back when the kernel has ended, not before, and then all of them."""
    started, end = threading.Event(), threading.Event()

    def is_over() -> bool:
        started.set()  # called only while the kernel runs
        return end.is_set()

    monkeypatch.setattr(gaussian_blur.spec, "cost", lambda *_: Cost(until=is_over))
    async with serving(example) as service:
        pool = service.pool
        post = service.post()
        await until(started.is_set)
        assert pool.statistics().sms_leased == 16
        post.cancel()
        await until(lambda: pool.statistics().sms_draining == 16)
        end.set()
        await until(lambda: pool.statistics().sms_free == pool.statistics().sms_total)


async def test_a_client_that_leaves_before_all_is_sent(
    example: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that goes away in the middle of its image is one line in the log, no error."""
    async with serving(example) as service:
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(b"POST /blur HTTP/1.1\r\nHost: here\r\nContent-Length: 9999\r\n\r\nhalf")
        await until(lambda: len(service.server.server_state.tasks) == 1)
        writer.close()
        await writer.wait_closed()
        await until(lambda: not service.server.server_state.tasks)
        assert service.pool.statistics().requested == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# -- readiness and the end --------------------------------------------------------------------


async def test_ready_while_the_pool_is(example: ModuleType) -> None:
    """/readyz answers 200 with what the pool is doing; once it is closed everything answers 503."""
    async with serving(example) as service:
        answer = await service.client.get("/readyz")
        assert answer.status_code == 200
        assert "132 SMs" in answer.text
        await service.pool.aclose()
        assert (await service.client.get("/readyz")).status_code == 503
        assert (await service.post()).status_code == 503


async def test_a_device_fault_ends_readiness(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a device fault /blur and /readyz answer 503, so that the process is replaced."""
    driver = simulated.open(faults=[simulated.Crash(gaussian_blur.name)])
    monkeypatch.setattr(example, "Pool", partial(Pool, driver=driver))
    async with serving(example) as service:
        for _ in range(2):
            answer = await service.post()
            assert answer.status_code == 503
            assert "ILLEGAL_ADDRESS" in answer.text
        assert (await service.client.get("/readyz")).status_code == 503


@pytest.mark.fault("E3")
async def test_a_stop_lets_requests_finish(
    example: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopping service answers accepted requests, closes the pool, and logs no warning."""
    async with serving(example) as service:
        pool = service.pool
        async with pool.partition(ALL):
            post = service.post(deadline=30)
            await until(lambda: pool.statistics().waiting == 1)
            service.server.should_exit = True
        image_of(await post)
    assert pool.state is PoolState.CLOSED
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
