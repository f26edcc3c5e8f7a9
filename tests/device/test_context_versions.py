"""Contexts work the same at every version of the driver."""

from __future__ import annotations

from contextlib import closing

import pytest

import greensched
from greensched import Context, ContextFlags, ContextOptions, Device, SMResourceOptions
from greensched.driver import simulated
from greensched.driver.simulated import VERSIONS


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: "{}.{}".format(*version))
def test_contexts_at_every_version(version: tuple[int, int]) -> None:
    """Blocks, the stack, flags, limits and refusals are the same at every version."""
    driver = simulated.open("h200x2@{}.{}".format(*version))
    driver.initialise()
    devices = [Device(ordinal, driver=driver) for ordinal in (0, 1)]
    groups = [d.resources.sm.split(SMResourceOptions(count=16))[0][:1] for d in devices]
    greens = [
        d.create_context(ContextOptions(resources=group))
        for d, group in zip(devices, groups, strict=True)
    ]
    own = Context.create(devices[1], ContextFlags.SCHED_BLOCKING_SYNC)
    assert own.flags & ContextFlags.SCHED_BLOCKING_SYNC
    for outer in (*devices, *greens, own):
        for inner in (*devices, *greens, own):
            with outer, inner, outer:
                own.push()
                assert Context.current(driver) is own
                own.pop()
                entered = outer.primary if isinstance(outer, Device) else outer
                assert Context.current(driver) is entered
    assert driver.current() is None
    own.stack_bytes = 1 << 16
    assert (own.stack_bytes, greens[1].stack_bytes) == (1 << 16, devices[1].primary.stack_bytes)
    event, foreign = own.create_event(), greens[1].create_event()
    with closing(own.create_stream()) as stream, pytest.raises(greensched.WrongContext):
        stream.record(foreign)
    for context in (own, *greens):
        context.close()
    for dead in (event, foreign):
        with pytest.raises(greensched.Closed, match="context is gone"):
            dead.sync()
    for device in devices:
        device.close()
    assert not driver.live()
