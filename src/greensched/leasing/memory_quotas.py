"""The memory quotas of service classes."""

from __future__ import annotations

from collections.abc import Iterable

from greensched.device.quota import MemoryQuota
from greensched.scheduling.services import ServiceClass


def update_quotas(known: dict[str, MemoryQuota], services: Iterable[ServiceClass]) -> None:
    """Set the memory quota of each class. A class whose quota was removed is still counted."""
    for service in services:
        if service.name in known:
            known[service.name].most = service.memory_bytes
        elif service.memory_bytes is not None:
            known[service.name] = MemoryQuota(service.name, service.memory_bytes)
