"""Simulated devices for tests."""

from __future__ import annotations

from greensched.driver.simulated.device_models import HOPPER_SHARED, DeviceModel

#: The device that tests simulate by default: five cells of 8 SMs, and 6 SMs more. A pool opens it
#: in a third of an H200's time.
DEVICE = DeviceModel(
    name="test",
    compute_capability=(9, 0),
    gpcs=(16, 16, 14),
    memory_bytes=80 * 10**9,
    dram_bandwidth=4e12,
    l2_bytes=60 * 2**20,
    max_shared_bytes=HOPPER_SHARED,
    peer_bandwidth=450e9,
)

#: A device so small that its whole menu is three executors: so every call can fail in turn.
SMALL_DEVICE = DeviceModel(
    name="small",
    compute_capability=(9, 0),
    gpcs=(8, 8),
    memory_bytes=2**30,
    dram_bandwidth=1e12,
    l2_bytes=2**20,
)
