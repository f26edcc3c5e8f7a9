"""On a real GPU: libraries with their own state work in two partitions at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from greensched import Pool

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch() -> Any:
    """Return torch with CUDA."""
    found = pytest.importorskip("torch", reason="torch is not on this machine")
    if not found.cuda.is_available():
        pytest.skip("torch on this machine was built without CUDA")
    import greensched.integrations.torch  # noqa: F401  calls have torch's stream by this

    return found


def in_two_partitions(work: Callable[[], Any]) -> list[Any]:
    """Call a function 20 times in each of two partitions at once; return all results."""

    async def repeat(p: Any) -> list[Any]:
        return [await p.run(work) for _ in range(20)]

    async def main() -> list[Any]:
        async with Pool(devices=[0]) as pool, pool.partitions(24, 48) as (a, b):
            first, second = await asyncio.gather(repeat(a), repeat(b))
            return [*first, *second]

    return asyncio.run(main())


def test_cublas_has_a_workspace_for_each_stream(torch: Any) -> None:
    """Products with a split inner dimension are right in both."""
    a = torch.randn(256, 16384, device="cuda", dtype=torch.float16)
    b = torch.randn(16384, 256, device="cuda", dtype=torch.float16)
    expected = (a.float() @ b.float()).cpu()
    torch.cuda.synchronize()
    for found in in_two_partitions(lambda: (a @ b).float().cpu()):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=2.0)


def test_cudnns_benchmark_ends(torch: Any) -> None:
    """It measures on the call's SMs, and its result is right."""
    x, w = torch.randn(8, 64, 56, 56, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
    expected = torch.nn.functional.conv2d(x.double(), w.double(), padding=1).float().cpu()
    torch.cuda.synchronize()
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        for found in in_two_partitions(lambda: torch.nn.functional.conv2d(x, w, padding=1).cpu()):
            torch.testing.assert_close(found, expected, rtol=0.02, atol=0.1)
    finally:
        torch.backends.cudnn.benchmark = before


def test_flash_attention_sizes_nothing_by_the_gpu(torch: Any) -> None:
    """Torch's attention kernels are right on any number of SMs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(2, 8, 512, 64, device="cuda", dtype=torch.float16) for _ in range(3))

    def attend() -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).cpu()

    expected = attend()
    assert all(torch.equal(found, expected) for found in in_two_partitions(attend))


def test_nccl_leaves_the_workers_context(torch: Any) -> None:
    """After a call that uses NCCL, the next call has its own context."""
    distributed = torch.distributed
    if not distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")

    def reduce() -> float:
        store = distributed.HashStore()
        distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        x = torch.ones(1024, device="cuda")
        distributed.all_reduce(x)
        return float(x.sum())

    async def main() -> None:
        async with Pool(devices=[0]) as pool, pool.partition(24) as p:
            assert await p.run(reduce) == 1024
            driver, handle = p.device.driver, p.context.handle
            assert await p.run(driver.current) == handle
            await p.run(distributed.destroy_process_group)
            assert await p.run(driver.current) == handle

    asyncio.run(main())
