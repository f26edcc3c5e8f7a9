"""The machine's devices."""

from __future__ import annotations

from greensched.driver.simulated.machine import Component
from greensched.typing import DeviceFacts


class Devices(Component):
    """Driver calls for the process and its devices."""

    def initialise(self) -> None:
        self.machine.initialised = True

    def device_count(self) -> int:
        return len(self.machine.devices)

    def device_facts(self, device: int) -> DeviceFacts:
        return self.machine.device(device).model.facts(device)
