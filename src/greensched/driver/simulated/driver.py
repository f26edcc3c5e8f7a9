"""The simulated driver, assembled from its components, which share one machine."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from greensched.driver.simulated.captures import Captures
from greensched.driver.simulated.contexts import Contexts
from greensched.driver.simulated.device_models import MEASURED, DeviceModel
from greensched.driver.simulated.faults import Fault
from greensched.driver.simulated.machine import Machine
from greensched.driver.simulated.memory import Memory
from greensched.driver.simulated.modules import Modules, check_cost
from greensched.driver.simulated.real_clock import RealClock
from greensched.driver.simulated.resources import Resources
from greensched.driver.simulated.streams import Streams, address_of
from greensched.driver.simulated.timeline import DriverClock, Span
from greensched.driver.types import GreenHandle, Mailbox
from greensched.typing import Cost, DeviceFacts, Feature

#: The driver that each library thread belongs to.
_threads = threading.local()


def current_driver() -> SimulatedDriver | None:
    """Return the simulated driver that this thread belongs to, or None."""
    return getattr(_threads, "driver", None)


class SimulatedDriver(Contexts, Resources, Streams, Captures, Memory, Modules):
    """A driver in memory. `simulated.open` makes it, and documents the arguments."""

    name: ClassVar[str] = "simulated"
    needs_binary: ClassVar[bool] = False

    def __init__(
        self,
        devices: Iterable[DeviceModel],
        *,
        version: tuple[int, int] = MEASURED,
        clock: DriverClock | None = None,
        faults: Iterable[Fault] = (),
        without: Iterable[Feature] = (),
        strict_events: bool | None = None,
    ) -> None:
        super().__init__()
        self.clock = clock or RealClock()
        self.machine = machine = Machine(
            devices,
            version=version,
            clock=self.clock,
            faults=faults,
            without=without,
            strict_events=version != MEASURED if strict_events is None else strict_events,
        )
        self.devices, self.script = machine.devices, machine.script
        self.new_event_loop = self.clock.new_event_loop
        if self.clock.virtual:
            self.spin_budget = 0.0

    # -- the host's side -----------------------------------------------------------------------

    def time(self) -> float:
        return self.clock.now() / 1e9

    def create_mailbox(self) -> Mailbox[Any]:
        """Make a queue to a library thread. Under virtual time a waiting reader is idle."""
        return self.clock.create_mailbox()

    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Start a library thread. Under virtual time it takes turns with the other threads."""

        def body() -> None:
            _threads.driver = self
            target()

        return self.clock.start_thread(body, name)

    def subscribe(self, look: Callable[[], None]) -> Callable[[], None] | None:
        """Have the virtual clock call `look`; a real clock never does."""
        return self.clock.subscribe(look)

    def close(self) -> None:
        """End the clock's work for this driver, so that queued work never runs. Idempotent."""
        self.machine.close()

    # -- for tests and traces --------------------------------------------------------------------

    address_of = staticmethod(address_of)

    def on_span(self, listener: Callable[[Span], None] | None) -> None:
        """Call `listener` with each operation at its end. It must return quickly."""
        self.machine.timeline.on_span = listener

    def live(self) -> Counter[str]:
        """Return how many objects of each kind exist on all devices, for leak checks.

        Handles that are kept for the next pool do not count: green contexts, their streams, and a
        primary context that only these use.
        """
        alive = self.machine.live()
        for device, users in self.machine.primary_users.items():
            kept = self.kept.count(device)
            if users and users == kept["green context"]:
                alive["primary"] -= 1
            alive -= kept
        return +alive

    def occupy(self, name: str, cost: Cost) -> None:
        """Block for work on the SMs of the current context, after the present work there."""
        check_cost(name, cost)
        green = self.machine.current.green
        stream = self.create_stream(None if green is None else GreenHandle(green))
        try:
            self._occupy(stream, name, cost)
            self.synchronize_stream(stream)
        finally:
            self.destroy_stream(stream)

    # -- process and devices -------------------------------------------------------------------

    @property
    def version(self) -> tuple[int, int]:
        return self.machine.version

    def supports(self, feature: Feature) -> bool:
        return self.machine.supports(feature)

    def initialise(self) -> None:
        self.machine.initialised = True

    def device_count(self) -> int:
        return len(self.machine.devices)

    def device_facts(self, device: int) -> DeviceFacts:
        return self.machine.device(device).model.facts(device)
