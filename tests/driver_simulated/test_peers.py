"""Several devices: access to each other's memory, and the time of copies between them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from greensched.driver.simulated import PRESETS
from greensched.driver.types import ContextHandle, MemoryPoolHandle
from greensched.errors import CUDAError, DriverMisuse

from .machine import Machine

Make = Callable[..., Machine]
NBYTES = 450_000


def other(machine: Machine) -> tuple[ContextHandle, MemoryPoolHandle, int]:
    """Return device 1's primary context, a pool there, and memory of it."""
    driver = machine.driver
    context, pool, before = driver.retain_primary(1), driver.create_memory_pool(1), driver.current()
    driver.set_current(context)
    address = driver.allocate(pool, NBYTES, driver.create_stream(None))
    driver.set_current(before)
    return context, pool, address


@pytest.mark.parametrize(
    ("spec", "reaches"),
    [("h200x2", True), ("rtx4090x2", False), ("h200+h100", False), ("l40sx2", True)],
)
def test_devices_of_one_model_with_a_link_reach_each_other(
    make: Make, spec: str, reaches: bool
) -> None:
    """Peer access is mutual, between devices of one model with a link."""
    driver = make(spec).driver
    assert driver.can_access_peer(0, 1) is driver.can_access_peer(1, 0) is reaches
    assert not driver.can_access_peer(0, 0)
    with pytest.raises(CUDAError) as refused:
        driver.can_access_peer(0, 2)
    assert refused.value.status == 101


def test_a_pool_is_shared_only_where_the_hardware_can(make: Make) -> None:
    """A device without peer access is refused access to a pool."""
    machine = make("rtx4090x2")
    with pytest.raises(CUDAError) as refused:
        machine.driver.share_memory_pool(machine.pool, 1)
    assert refused.value.status == 101


def test_a_copy_between_devices_goes_over_their_link(make: Make) -> None:
    """It has an engine of its own, and the link's speed."""
    machine = make("h200x2")
    driver, stream = machine.driver, machine.stream()
    near, (far, pool, there) = driver.current(), other(machine)
    assert near is not None
    driver.share_memory_pool(pool, 0)
    here, back = (machine.device_memory(NBYTES, stream) for _ in range(2))
    driver.set_bytes(here, 7, NBYTES, stream)
    driver.copy_peer(there, far, here, near, NBYTES, stream)
    driver.copy_peer(back, near, there, far, NBYTES, stream)
    host = machine.pinned(NBYTES)
    driver.copy_to_host(host.address, back, NBYTES, stream)
    driver.synchronize_stream(stream)
    assert bytes(host.view) == b"\7" * NBYTES
    copies = [span for span in machine.spans if span.name == "peer"]
    took = round(NBYTES / PRESETS["h200"].peer_bandwidth * 1e9)
    assert [(s.device, s.nbytes, s.end - s.start) for s in copies] == [(0, NBYTES, took)] * 2


def test_a_copy_without_access_is_refused(make: Make) -> None:
    """A real driver would copy through the host, and may block."""
    machine = make("h200x2")
    driver, stream = machine.driver, machine.stream()
    near, (far, pool, there) = driver.current(), other(machine)
    assert near is not None
    here = machine.device_memory(NBYTES, stream)
    with pytest.raises(DriverMisuse, match="no access"):
        driver.copy_peer(here, near, there, far, NBYTES, stream)
    driver.share_memory_pool(pool, 0)
    with pytest.raises(DriverMisuse, match="is no memory of"):
        driver.copy_peer(here, far, there, near, NBYTES, stream)


def test_an_ordinary_copy_stays_on_its_device(make: Make) -> None:
    """A plain copy to another device's memory is refused."""
    machine = make("h200x2")
    driver, stream = machine.driver, machine.stream()
    _, pool, there = other(machine)
    driver.share_memory_pool(pool, 0)
    host = machine.pinned(64)
    for copy in (
        lambda: driver.copy_to_host(host.address, there, 64, stream),
        lambda: driver.copy_to_device(there, host.address, 64, stream),
        lambda: driver.copy(machine.device_memory(64, stream), there, 64, stream),
    ):
        with pytest.raises(DriverMisuse, match="memory of device 1"):
            copy()
