"""A device's health: what its streams, allocators and jobs raise once it is over."""

from __future__ import annotations

import pytest

from greensched import Device, DeviceLost, ForkedPool, PoolClosed
from greensched.device.allocators import PinnedAllocator
from greensched.device.health import DeviceHealth
from greensched.device.tickets import TicketMemory


def test_a_healthy_device_raises_nothing() -> None:
    """Without a failure `check` passes, and nothing is over."""
    health = DeviceHealth()
    health.check()
    assert not health.is_over


def test_the_first_failure_counts() -> None:
    """`fail` calls the listener once, before it records; later failures change nothing."""
    health, heard = DeviceHealth(), []
    first, second = OSError("first"), OSError("second")
    health.on_failure = lambda error: heard.append((error, health.is_over))
    health.fail(first)
    health.fail(second)
    assert heard == [(first, False)]
    assert health.failure is first
    with pytest.raises(DeviceLost, match="first") as caught:
        health.check()
    assert caught.value.cause is first


def test_a_listener_may_record_the_failure_itself() -> None:
    """A pool's listener records a failure for each of its devices."""
    devices = [DeviceHealth(), DeviceHealth()]
    error = OSError("first")
    devices[0].on_failure = lambda found: [device.record(found) for device in devices]
    devices[0].fail(error)
    assert [device.failure for device in devices] == [error, error]


@pytest.mark.parametrize("kind", [PoolClosed, ForkedPool])
def test_an_end_without_a_failure_says_so(kind: type[PoolClosed | ForkedPool]) -> None:
    """The end of a pool, or a fork, is no failure, and each error is a new object."""
    health = DeviceHealth()
    health.close(lambda: kind("this pool"))
    assert health.failure is None
    assert type(health.error()) is kind
    assert health.error() is not health.error()


def test_one_object_is_shared() -> None:
    """A device's contexts, streams and allocators share its health."""
    device = Device(0, driver="simulated:h200")
    words = TicketMemory(device.primary)
    stream, pinned = words.create_stream(device.primary), PinnedAllocator(device.primary)
    assert device.primary.health is stream.health is pinned.health is device.health
    for made in (stream, pinned, words, device):
        made.close()
