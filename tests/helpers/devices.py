"""Simulated devices for tests."""

from __future__ import annotations

from greensched.driver.simulated.device_models import DeviceModel

#: A device so small that its whole menu is three executors: so every call can fail in turn.
SMALL_DEVICE = DeviceModel(
    name="small",
    compute_capability=(9, 0),
    gpcs=(8, 8),
    memory_bytes=2**30,
    dram_bandwidth=1e12,
    l2_bytes=2**20,
)
