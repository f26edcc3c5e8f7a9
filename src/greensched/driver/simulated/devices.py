"""The machine's devices."""

from __future__ import annotations

from greensched.driver.simulated.machine import Component
from greensched.typing import DeviceFacts


class Devices(Component):
    """Driver calls for the process and its devices."""

    def initialise(self) -> None:
        """Make the driver usable."""
        self.machine.initialised = True

    def device_count(self) -> int:
        """Return how many devices the machine has."""
        return len(self.machine.devices)

    def device_facts(self, device: int) -> DeviceFacts:
        """Return the facts of a device."""
        return self.machine.device(device).model.facts(device)
