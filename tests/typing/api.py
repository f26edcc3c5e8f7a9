"""What type checkers see of the public API: never run, checked by mypy with the rest."""

from __future__ import annotations

from typing import assert_type

import numpy as np
import numpy.typing as npt

import greensched
from greensched import (
    ALL,
    REST,
    Buffer,
    CacheConfig,
    Context,
    ContextFlags,
    Device,
    Event,
    Graph,
    Job,
    LaunchConfig,
    Partition,
    Pool,
)
from greensched.kernels import fill


def model(x: int, *, scale: float) -> str:
    """Some blocking function of a user's."""
    return f"{x * scale}"


async def leases(pool: Pool) -> None:
    """A lease is a partition, several are a tuple, and REST and ALL are sizes."""
    async with pool.partition(16) as p:
        assert_type(p, Partition)
        assert_type(p.sm_count, int)
    async with pool.partitions(16, REST) as both:
        assert_type(both, tuple[Partition, ...])
    assert_type(pool.partition_nowait((8, 64)), Partition)
    assert_type(pool.partition(ALL, deadline=0.1), Partition)


async def jobs(p: Partition, host: npt.NDArray[np.float32]) -> None:
    """Each operation is a job of what it gives."""
    assert_type(p.upload(host), Job[Buffer])
    buffer = await p.upload(host)
    assert_type(buffer, Buffer)
    assert_type(p.launch(LaunchConfig(grid=1, block=32), fill, buffer, 1.0, 8), Job[None])
    assert_type(p.run(model, 3, scale=0.5), Job[str])
    assert_type(await p.run(model, 3, scale=0.5), str)
    bound = p.bind(LaunchConfig(grid=1, block=32), fill, buffer, 1.0, 8)
    bound()
    assert_type(bound.submit(), Job[None])
    assert_type(p.capture(model, 3, scale=0.5), Job[Graph])
    with await p.capture(model, 3, scale=0.5) as graph:
        assert_type(graph, Graph)
        assert_type(graph.launch(p), Job[None])


async def mistakes(p: Partition, pool: Pool) -> None:
    """What a checker is to refuse."""
    p.run(model, "x", scale=0.5)  # type: ignore[arg-type]
    p.run(model, 3)  # type: ignore[call-arg]
    p.capture(model, 3)  # type: ignore[call-arg]
    pool.partition("16")  # type: ignore[arg-type]


async def pools(pool: Pool) -> None:
    """The pool's own one-shot forms give what the function gives."""
    assert_type(await pool.run(model, 3, sms=8), str)
    assert_type(pool.preview(16, REST), tuple[greensched.SplitPreview, ...])
    assert_type(await pool.aclose(), greensched.CloseReport)


def contexts(device: Device, event: Event) -> None:
    """Blocks give what they are of, and what is current is a context or nothing."""
    with device as d:
        assert_type(d, Device)
    own = Context.create(device, ContextFlags.SCHED_SPIN | ContextFlags.MAP_HOST)
    with own as entered:
        assert_type(entered, Context)
    assert_type(Context.current(), Context | None)
    assert_type(own.scoped(lambda: 3), int)
    assert_type(own.device, Device)
    assert_type(own.stack_bytes, int)
    own.cache_config = CacheConfig.PREFER_L1
    assert_type(own.flags, ContextFlags)
    assert_type(own.create_stream().record(event), Event)
