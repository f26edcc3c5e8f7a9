"""On real GPUs: blocks of devices nest with torch's, and the runtime API sees what is current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import permutations
from typing import Any

import pytest

from greensched import Context, Device

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch() -> Any:
    """Torch with two devices, of which the first is current."""
    torch = pytest.importorskip("torch", reason="torch is not on this machine")
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    torch.cuda.set_device(0)
    torch.ones(1, device="cuda")
    return torch


@pytest.fixture
def devices() -> Iterator[list[Device]]:
    """Two devices."""
    with ExitStack() as stack:
        found = [stack.enter_context(closing(Device(ordinal))) for ordinal in (0, 1)]
        yield found
        found[0].driver.set_current(None)  # torch leaves a context current, which stays open


def test_the_runtime_sees_a_block(torch: Any, devices: list[Device]) -> None:
    """Inside `with Device(1)` torch's device is 1, and after it what it was, also by exception."""
    with devices[1]:
        assert torch.cuda.current_device() == 1
        assert torch.ones(4, device="cuda").device.index == 1
    assert torch.cuda.current_device() == 0
    with pytest.raises(KeyError), devices[1]:
        raise KeyError
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("order", sorted(set(permutations("ttgg"))))
def test_blocks_of_torch_and_ours_nest(torch: Any, devices: list[Device], order: str) -> None:
    """In every order, alternating devices: each level sees its own, and then the one around it."""

    def nest(level: int, around: int) -> None:
        if level == len(order):
            return
        here = 1 - around
        block = devices[here] if order[level] == "g" else torch.cuda.device(here)
        with block:
            assert torch.cuda.current_device() == here
            current = Context.current()
            assert current is not None
            assert current.device_ordinal == here
            nest(level + 1, here)
            assert torch.cuda.current_device() == here
        assert torch.cuda.current_device() == around

    nest(0, torch.cuda.current_device())
