"""On real GPUs: our blocks nest with torch's and CuPy's, and the runtime API sees what is current.

One GPU will do; where there are two, each level of a nest is on the other one than the level
around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from itertools import permutations
from typing import Any

import pytest

from greensched import Context, ContextOptions, Device, SMResourceOptions

pytestmark = pytest.mark.gpu

Block = AbstractContextManager[object]

#: t: `torch.cuda.device`, c: `cupy.cuda.Device`, d: `greensched.Device`, g: a green context.
ORDERS = sorted(
    "".join(order)
    for kinds in ("tcdg", "ttdd", "ccdd", "ttgg", "ccgg")
    for order in set(permutations(kinds))
)


@pytest.fixture
def torch() -> Any:
    """Torch, with the first device current."""
    torch = pytest.importorskip("torch", reason="torch is not on this machine")
    torch.cuda.set_device(0)
    torch.ones(1, device="cuda")
    return torch


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="CuPy is not on this machine")


@pytest.fixture
def devices(torch: Any) -> Iterator[list[Device]]:
    """Two devices, or the only one twice."""
    with ExitStack() as stack:
        ordinals = range(min(2, torch.cuda.device_count()))
        found = [stack.enter_context(closing(Device(ordinal))) for ordinal in ordinals]
        yield [found[0], found[-1]]
        found[0].driver.set_current(None)  # torch leaves a context current, which stays open


@pytest.fixture
def greens(devices: list[Device]) -> list[Context]:
    """A green context of each device; they end with it."""
    options = SMResourceOptions(count=16)
    made = {
        device: device.create_context(
            ContextOptions(resources=device.resources.sm.split(options)[0])
        )
        for device in set(devices)
    }
    return [made[device] for device in devices]


def test_the_runtime_sees_a_block(torch: Any, devices: list[Device]) -> None:
    """Inside `with Device(1)` torch's device is 1, and after it what it was, also by exception."""
    last = devices[1]
    with last:
        assert torch.cuda.current_device() == last.ordinal
        assert torch.ones(4, device="cuda").device.index == last.ordinal
    assert torch.cuda.current_device() == 0
    with pytest.raises(KeyError), last:
        raise KeyError
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_nest_in_every_order(
    torch: Any, cupy: Any, devices: list[Device], greens: list[Context], order: str
) -> None:
    """Each level sees its own device, and then the one around it.

    Ours leave current exactly what they found. Torch and CuPy know devices only: inside a green
    context they may leave the device's primary context current, until that block of ours ends.
    """
    kinds: dict[str, Callable[[int], Block]] = {
        "t": lambda which: torch.cuda.device(devices[which].ordinal),
        "c": lambda which: cupy.cuda.Device(devices[which].ordinal),
        "d": lambda which: devices[which],
        "g": lambda which: greens[which],
    }

    def check(ordinal: int) -> None:
        current = Context.current()
        assert current is not None
        assert current.device_id == ordinal
        assert torch.cuda.current_device() == ordinal
        assert cupy.cuda.runtime.getDevice() == ordinal

    def nest(level: int, around: int) -> None:
        if level == len(order):
            return
        here, kind = 1 - around, order[level]
        before = devices[0].driver.current()
        with kinds[kind](here):
            check(devices[here].ordinal)
            if kind == "g":
                assert greens[here].is_current
            nest(level + 1, here)
            check(devices[here].ordinal)
        check(devices[around].ordinal)
        if kind in "dg":
            assert devices[0].driver.current() == before

    nest(0, 0)


@pytest.mark.parametrize("kind", ["device", "green"])
def test_torch_and_cupy_compute_inside_a_block(
    torch: Any, cupy: Any, devices: list[Device], greens: list[Context], kind: str
) -> None:
    """What they compute while a context of ours is current is right."""
    block: Block = devices[1] if kind == "device" else greens[1]
    with block:
        assert float((torch.arange(1000.0, device="cuda") * 2).sum()) == 999000.0
        assert float((cupy.arange(1000.0) * 2).sum()) == 999000.0
    assert torch.cuda.current_device() == 0
