"""The arguments that the driver's calls pass to the bindings, which are replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from greensched.driver.cuda import memory, streams

DISABLE_TIMING, BLOCKING_SYNC = 2, 1


@pytest.mark.fault("I15")
@pytest.mark.parametrize("timing", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
def test_an_event_has_the_flags_that_were_asked(
    monkeypatch: pytest.MonkeyPatch, timing: bool, blocking: bool
) -> None:
    """Flags for blocking sync and for timing are passed on."""
    given: list[int] = []
    monkeypatch.setattr(streams, "call", lambda _, flags: given.append(flags))
    create: Any = streams.Streams.create_event
    create(None, timing=timing, blocking=blocking)
    assert given == [DISABLE_TIMING * (not timing) + BLOCKING_SYNC * blocking]


@pytest.mark.fault("I15")
def test_freed_host_memory_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping is kept only while it is registered."""
    cuda = SimpleNamespace(
        cuMemHostRegister=lambda *_: None,
        cuMemHostGetDevicePointer=lambda address, _: address,
        cuMemHostUnregister=lambda _: None,
    )
    monkeypatch.setattr(memory, "cuda", cuda)
    monkeypatch.setattr(memory, "call", lambda function, *arguments, **_: function(*arguments))
    methods: Any = memory.Memory
    host = methods.allocate_host(None, 64)
    assert host.address in memory._registered
    methods.free_host(None, host)
    assert host.address not in memory._registered


@pytest.mark.fault("I15")
@pytest.mark.parametrize(("kind", "device"), [(1, None), (2, 5)])
def test_host_memory_is_of_no_device(
    monkeypatch: pytest.MonkeyPatch, kind: int, device: int | None
) -> None:
    """Registered host memory has a device ordinal, but is not device memory."""
    answers = {memory._ATTRIBUTE_KIND: kind, memory._ATTRIBUTE_ORDINAL: 5}
    monkeypatch.setattr(memory, "call", lambda _, attribute, address: answers[attribute])
    methods: Any = memory.Memory
    assert methods.memory_device(None, 0x1000) == device
