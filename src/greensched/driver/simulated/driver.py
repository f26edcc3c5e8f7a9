"""The simulated driver: its driver calls, composed of components that share one machine."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from greensched.driver.blocking import DRIVER_CALLS
from greensched.driver.interface import Driver
from greensched.driver.simulated.captures import Captures
from greensched.driver.simulated.context_stack import ContextStack
from greensched.driver.simulated.contexts import Contexts
from greensched.driver.simulated.device_models import MEASURED, DeviceModel
from greensched.driver.simulated.devices import Devices
from greensched.driver.simulated.events import Events
from greensched.driver.simulated.faults import Fault
from greensched.driver.simulated.machine import Component, DriverClock, Machine
from greensched.driver.simulated.memory import Memory
from greensched.driver.simulated.modules import Modules, check_cost
from greensched.driver.simulated.real_clock import RealClock
from greensched.driver.simulated.resources import Resources
from greensched.driver.simulated.streams import Streams, address_of
from greensched.driver.simulated.timeline import Span
from greensched.driver.types import GreenHandle, Mailbox, StreamHandle
from greensched.typing import Cost, Feature

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=Component)

#: The driver that each library thread belongs to.
_threads = threading.local()


def current_driver() -> SimulatedDriver | None:
    """Return the simulated driver that this thread belongs to, or None."""
    return getattr(_threads, "driver", None)


def driver_call(
    method: Callable[Concatenate[C, P], T],
) -> Callable[Concatenate[SimulatedDriver, P], T]:
    """Turn a component's method into a driver call: the machine's checks, then the method."""
    name, owner = method.__name__, method.__qualname__.partition(".")[0]
    traits = DRIVER_CALLS[name]

    @functools.wraps(method)
    def call(self: SimulatedDriver, *args: P.args, **kwargs: P.kwargs) -> Any:
        self.machine.check_call(name, traits)
        return method(self._components[owner], *args, **kwargs)

    call.__doc__ = method.__doc__ or getattr(Driver, name).__doc__
    return call  # type: ignore[return-value]  # wraps() is typed by the method it wraps


class SimulatedDriver(Driver):
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
        contexts, events = Contexts(machine), Events(machine)
        self._streams = Streams(machine, contexts, events)
        self._modules = Modules(machine)
        components = (
            *(Devices(machine), contexts, ContextStack(machine), Resources(machine, contexts)),
            *(self._streams, events, Captures(machine), Memory(machine), self._modules),
        )
        self._components: dict[str, Any] = {type(part).__name__: part for part in components}

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

    def report_reference_errors(
        self, stream: StreamHandle, report: Callable[[Exception], None] | None
    ) -> None:
        """Report failures of references on a stream, instead of raising them at its next wait."""
        self._streams.report_reference_errors(stream, report)

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
            self._modules.occupy(stream, name, cost)
            self.synchronize_stream(stream)
        finally:
            self.destroy_stream(stream)

    # -- process and devices -------------------------------------------------------------------

    @property
    def version(self) -> tuple[int, int]:
        return self.machine.version

    def supports(self, feature: Feature) -> bool:
        """Say whether this version has a feature that `without` does not exclude."""
        return self.machine.supports(feature)

    # -- driver calls ----------------------------------------------------------------------------

    initialise = driver_call(Devices.initialise)
    device_count = driver_call(Devices.device_count)
    device_facts = driver_call(Devices.device_facts)

    retain_primary = driver_call(Contexts.retain_primary)
    release_primary = driver_call(Contexts.release_primary)
    primary_state = driver_call(Contexts.primary_state)
    set_primary_flags = driver_call(Contexts.set_primary_flags)
    create_context = driver_call(Contexts.create_context)
    destroy_context = driver_call(Contexts.destroy_context)
    context_device = driver_call(Contexts.context_device)
    context_flags = driver_call(Contexts.context_flags)
    limit = driver_call(Contexts.limit)
    set_limit = driver_call(Contexts.set_limit)
    cache_config = driver_call(Contexts.cache_config)
    set_cache_config = driver_call(Contexts.set_cache_config)
    synchronize_context = driver_call(Contexts.synchronize_context)
    priority_range = driver_call(Contexts.priority_range)

    current = driver_call(ContextStack.current)
    set_current = driver_call(ContextStack.set_current)
    push_current = driver_call(ContextStack.push_current)
    pop_current = driver_call(ContextStack.pop_current)

    device_resource = driver_call(Resources.device_resource)
    context_resource = driver_call(Resources.context_resource)
    resource_facts = driver_call(Resources.resource_facts)
    split_by_count = driver_call(Resources.split_by_count)
    split = driver_call(Resources.split)
    device_workqueue = driver_call(Resources.device_workqueue)
    context_workqueue = driver_call(Resources.context_workqueue)
    workqueue_facts = driver_call(Resources.workqueue_facts)
    configure_workqueue = driver_call(Resources.configure_workqueue)
    describe = driver_call(Resources.describe)
    create_green = driver_call(Resources.create_green)
    destroy_green = driver_call(Resources.destroy_green)
    green_context = driver_call(Resources.green_context)

    create_stream = driver_call(Streams.create_stream)
    destroy_stream = driver_call(Streams.destroy_stream)
    stream_address = driver_call(Streams.stream_address)
    foreign_stream = driver_call(Streams.foreign_stream)
    query_stream = driver_call(Streams.query_stream)
    synchronize_stream = driver_call(Streams.synchronize_stream)
    wait_event = driver_call(Streams.wait_event)
    bind_mark = driver_call(Streams.bind_mark)
    wait_value = driver_call(Streams.wait_value)

    create_event = driver_call(Events.create_event)
    destroy_event = driver_call(Events.destroy_event)
    record_event = driver_call(Events.record_event)
    record_green = driver_call(Events.record_green)
    query_event = driver_call(Events.query_event)
    synchronize_event = driver_call(Events.synchronize_event)
    elapsed = driver_call(Events.elapsed)

    begin_capture = driver_call(Captures.begin_capture)
    end_capture = driver_call(Captures.end_capture)
    is_capturing = driver_call(Captures.is_capturing)
    exchange_capture_mode = driver_call(Captures.exchange_capture_mode)
    node_count = driver_call(Captures.node_count)
    instantiate_graph = driver_call(Captures.instantiate_graph)
    launch_graph = driver_call(Captures.launch_graph)
    destroy_executable = driver_call(Captures.destroy_executable)
    destroy_graph = driver_call(Captures.destroy_graph)

    create_memory_pool = driver_call(Memory.create_memory_pool)
    destroy_memory_pool = driver_call(Memory.destroy_memory_pool)
    can_access_peer = driver_call(Memory.can_access_peer)
    share_memory_pool = driver_call(Memory.share_memory_pool)
    reserved_bytes = driver_call(Memory.reserved_bytes)
    allocate = driver_call(Memory.allocate)
    free = driver_call(Memory.free)
    allocate_host = driver_call(Memory.allocate_host)
    free_host = driver_call(Memory.free_host)
    memory_info = driver_call(Memory.memory_info)
    memory_device = driver_call(Memory.memory_device)
    copy_to_device = driver_call(Memory.copy_to_device)
    copy_to_host = driver_call(Memory.copy_to_host)
    copy = driver_call(Memory.copy)
    copy_peer = driver_call(Memory.copy_peer)
    set_bytes = driver_call(Memory.set_bytes)

    load_code = driver_call(Modules.load_code)
    unload_code = driver_call(Modules.unload_code)
    get_kernel = driver_call(Modules.get_kernel)
    load_kernel = driver_call(Modules.load_kernel)
    kernel_layout = driver_call(Modules.kernel_layout)
    kernel_limits = driver_call(Modules.kernel_limits)
    allow_shared = driver_call(Modules.allow_shared)
    bind_launch = driver_call(Modules.bind_launch)
