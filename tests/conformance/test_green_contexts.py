"""Green contexts in use, below a pool: kernels, streams and events of theirs, what is current.

Much of it is what cuda.core's own tests ask of green contexts: tests/behaviours.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest

import greensched
from greensched import (
    Context,
    ContextOptions,
    Device,
    InvalidSplit,
    LaunchConfig,
    NotSupported,
    PinnedBuffer,
    SMResourceOptions,
    Stream,
    WorkqueueResourceOptions,
    launch,
)
from greensched.driver.types import ContextHandle, GreenHandle, HostMemory, StreamHandle
from greensched.kernels import fill
from greensched.typing import Feature
from helpers.backend import Backend, needs, opened

N = 1000
CONFIG = LaunchConfig(grid=8, block=64)


def step(device: Device) -> int:
    """Return a number of SMs in which every driver splits."""
    sm = device.resources.sm
    return max(sm.min_partition_size, sm.coscheduled_alignment, 2)


@contextmanager
def greens(device: Device, number: int) -> Iterator[list[Context]]:
    """Yield green contexts over groups of one split."""
    groups, _ = device.resources.sm.split(SMResourceOptions(count=(step(device),) * number))
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(device.create_context(ContextOptions(resources=[group]))))
            for group in groups
        ]


class Mapped:
    """Memory that a kernel writes and the host reads, without a pool."""

    is_closed = False

    def __init__(self, device: Device) -> None:
        self.device = device
        self.device_id = device.ordinal
        self.health = device.health
        with device:
            self.host: HostMemory = device.driver.allocate_host(4 * N)
        self.buffer = PinnedBuffer(self, self.host, (N,), np.dtype(np.float32))

    def give_back(self, host: HostMemory, _uses: object) -> None:
        with self.device:
            self.device.driver.free_host(host)

    def close(self) -> None:
        self.buffer.close()


# -- kernels ----------------------------------------------------------------------------------


@pytest.mark.runs_device_code
def test_a_kernel_of_a_green_context_does_its_work(backend: Backend) -> None:
    """A kernel on its stream writes the right values, and nothing becomes current for it."""
    with opened(backend) as (device,):
        with (
            greens(device, 1) as (green,),
            closing(Mapped(device)) as memory,
            closing(green.create_stream()) as stream,
        ):
            launch(stream, CONFIG, fill, memory.buffer, 42.0, N)
            assert device.driver.current() is None
            stream.sync()
            assert set(memory.buffer.array.tolist()) == {42.0}


@pytest.mark.runs_device_code
def test_two_contexts_run_kernels_of_their_own(backend: Backend) -> None:
    """Two green contexts fill two buffers concurrently, each with its own value."""
    with opened(backend) as (device,), ExitStack() as stack:
        contexts = stack.enter_context(greens(device, 2))
        memory = [stack.enter_context(closing(Mapped(device))) for _ in contexts]
        streams = [stack.enter_context(closing(c.create_stream())) for c in contexts]
        for value, stream, out in zip((10.0, 20.0), streams, memory, strict=True):
            launch(stream, CONFIG, fill, out.buffer, value, N)
        for value, stream, out in zip((10.0, 20.0), streams, memory, strict=True):
            stream.sync()
            assert set(out.buffer.array.tolist()) == {value}


@pytest.mark.runs_device_code
def test_a_context_with_work_queues_of_its_own_runs_kernels(backend: Backend) -> None:
    """A context with SMs and balanced work queues runs kernels."""
    with opened(backend) as (device,):
        needs(device.driver, Feature.WORKQUEUES)
        queue = device.resources.workqueue
        queue.configure(
            WorkqueueResourceOptions(sharing_scope="green_ctx_balanced", concurrency_limit=4)
        )
        (largest,), _ = device.resources.sm.split(SMResourceOptions(count=None))
        options = ContextOptions(resources=[largest, queue])
        with (
            closing(device.create_context(options)) as green,
            closing(Mapped(device)) as memory,
            closing(green.create_stream()) as stream,
        ):
            assert green.is_green
            launch(stream, CONFIG, fill, memory.buffer, 99.0, N)
            stream.sync()
            assert set(memory.buffer.array.tolist()) == {99.0}


# -- whose is what ----------------------------------------------------------------------------


def test_two_contexts_have_no_more_than_the_device(backend: Backend) -> None:
    """Two contexts over one split have fewer SMs together than the device."""
    with opened(backend) as (device,), greens(device, 2) as contexts:
        counts = [context.resources.sm.sm_count for context in contexts]
        assert counts == [step(device)] * 2
        assert sum(counts) <= device.resources.sm.sm_count


def test_an_event_recorded_on_a_green_stream_is_of_its_context(backend: Backend) -> None:
    """The event names its context, is refused in others, and ends with it."""
    with opened(backend) as (device,), closing(Context.create(device)) as own:
        with greens(device, 1) as (green,), closing(own.create_stream()) as other:
            stream = green.create_stream()
            event, kept = stream.record(), stream.record()
            assert event.context is stream.context is green
            assert event.context.is_green
            with ThreadPoolExecutor(1) as threads:  # the main thread's calls are judged as a loop's
                threads.submit(event.sync).result(10)
            with pytest.raises(greensched.WrongContext):
                other.wait(event)
            event.close()
            green.close()
            with pytest.raises(greensched.Closed, match="context is gone"):
                kept.sync()
            kept.close()
            stream.close()


def test_a_context_set_current_and_replaced_is_found_again(backend: Backend) -> None:
    """The driver's current context is returned as the same object each time."""
    with opened(backend) as (device,), greens(device, 1) as (green,):
        driver = device.driver
        device.set_current()
        before = Context.current(driver)
        assert before is device.primary
        for _ in range(2):
            green.set_current()
            assert Context.current(driver) is green
            with pytest.raises(greensched.InvalidRequest, match="current on this thread"):
                green.close()
            before.set_current()
            assert Context.current(driver) is before
            assert not green.is_current
        before.pop()


def test_what_is_made_on_a_device_is_made_there(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams, events and work queues belong to their device, whatever is current."""
    with opened(backend, "h200x2", devices=2) as (here, there):
        driver, made = here.driver, list[object]()
        create_stream, create_event = driver.create_stream, driver.create_event

        def stream_made(green: GreenHandle | None, priority: int) -> StreamHandle:
            made.append(driver.current())
            return create_stream(green, priority)

        def event_made(*, timing: bool, blocking: bool) -> object:
            made.append(driver.current())
            return create_event(timing=timing, blocking=blocking)

        monkeypatch.setattr(driver, "create_stream", stream_made)
        monkeypatch.setattr(driver, "create_event", event_made)
        primary: ContextHandle = there.primary.handle
        with here:
            stream: Stream = there.create_stream()
            with closing(stream), closing(stream.record()), closing(there.primary.create_event()):
                assert stream.context.device_id == 1
            assert here.primary.is_current
        assert made == [primary] * 3
        assert driver.context_device(primary) == 1
        if driver.supports(Feature.WORKQUEUES):
            assert [device.resources.workqueue.device_id for device in (here, there)] == [0, 1]


# -- cutting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["t4", "a100", "l40s", "h200", "rtx5090"])
def test_every_kind_of_device_says_how_it_is_cut(backend: Backend, spec: str) -> None:
    """Its minimum and alignment are even, above 0, and those of its splits."""
    with opened(backend, spec) as (device,):
        sm = device.resources.sm
        for number in (sm.min_partition_size, sm.coscheduled_alignment):
            assert number >= 2
            assert number % 2 == 0
        groups, _ = sm.split(SMResourceOptions(count=step(device)))
        assert [group.sm_count for group in groups] == [step(device)]
        assert sm.min_partition_size <= step(device)
        if device.compute_capability < (9, 0):
            assert sm.coscheduled_alignment == 2


@pytest.mark.fault("B4")
def test_backfill_allows_what_is_refused_without(backend: Backend) -> None:
    """From 13.1 on, backfill gives groups that whole co-scheduled sets do not."""
    with opened(backend) as (device,):
        sm = device.resources.sm
        if not device.driver.supports(Feature.STRUCTURED_SPLIT):
            with pytest.raises(NotSupported, match=r"backfill needs .*CUDA 13\.1; this is CUDA 1"):
                sm.split(SMResourceOptions(count=(10, 10), backfill=True))
            return
        half = sm.sm_count // 4 * 2
        asked = (half, half)
        with pytest.raises(InvalidSplit):
            sm.split(SMResourceOptions(count=asked))
        for dry_run in (True, False):
            groups, rest = sm.split(SMResourceOptions(count=asked, backfill=True), dry_run=dry_run)
            assert tuple(group.sm_count for group in groups) == asked
            assert (rest.sm_count if rest is not None else 0) == sm.sm_count - 2 * half


def test_a_dry_run_with_counts_is_answered(backend: Backend) -> None:
    """A dry run takes explicit counts, and a refusal says why."""
    with opened(backend) as (device,):
        sm, least = device.resources.sm, step(device)
        for count in (least, (least, least), (least,) * 4):
            (groups, rest), (real, left) = (
                sm.split(SMResourceOptions(count=count), dry_run=dry_run)
                for dry_run in (True, False)
            )
            assert [g.sm_count for g in groups] == [g.sm_count for g in real]
            assert rest is not None
            assert left is not None
            assert rest.sm_count == left.sm_count
        for dry_run in (True, False):
            with pytest.raises(InvalidSplit) as refused:
                sm.split(SMResourceOptions(count=least + 1), dry_run=dry_run)
            assert refused.value.why
            assert refused.value.nearest
