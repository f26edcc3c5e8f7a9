"""What a request would get on each idle device, and why impossible requests are impossible."""

from __future__ import annotations

from dataclasses import dataclass

from greensched import driver as drivers
from greensched.device.device import Device
from greensched.driver.interface import Driver
from greensched.leasing.device_split import split_device
from greensched.scheduling.cells import DeviceCells, SizeRange, parse_sizes
from greensched.typing import REST, Size


@dataclass(frozen=True, slots=True)
class SplitPreview:
    """What a request for several partitions would get on an idle device, or why it gets nothing.

    Attributes:
        device: The device's ordinal.
        name: The device's name.
        sms: The device's SMs.
        granted: The SMs of each part, in order; empty if the request is impossible here.
        left: SMs that belong to no part.
        why: Why it is impossible, or "".
        nearest: If it is impossible, the nearest possible request: the SMs of each part, and
            fewer parts if not all of them fit.
    """

    device: int
    name: str
    sms: int
    granted: tuple[int, ...]
    left: int
    why: str = ""
    nearest: tuple[int, ...] = ()

    @property
    def is_possible(self) -> bool:
        """Whether the device can ever grant the request."""
        return bool(self.granted)

    def __str__(self) -> str:
        where = f"device {self.device} ({self.name}, {self.sms} SMs)"
        if self.is_possible:
            return f"{where}: {_listed(self.granted)} SMs; {self.left} unused"
        return f"{where}: impossible: {self.why}; the nearest is {_listed(self.nearest) or 'none'}"


def preview(device: Device, cells: DeviceCells, sizes: tuple[Size, ...]) -> SplitPreview:
    """Preview a request for several partitions on a device with this split. Pure.

    Raises:
        InvalidSize, InvalidRequest: The sizes are invalid on any device.
    """
    parts = parse_sizes(sizes)
    granted = tuple(cells.sm_count(mask) for mask in cells.fit_all(cells.full_mask, parts))
    nearest = () if granted else cells.nearest(cells.full_mask, parts)
    return SplitPreview(
        device=device.ordinal,
        name=device.name,
        sms=cells.total,
        granted=granted,
        left=cells.total - sum(granted),
        why="" if granted else _why(cells, parts),
        nearest=nearest,
    )


def preview_devices(
    driver: str | Driver | None, sizes: tuple[Size, ...], *, fine: bool = False
) -> tuple[SplitPreview, ...]:
    """Preview a request on each device of a driver, without a pool.

    Opens and splits each device as a pool would, makes no executor, and closes it again. Blocks.

    Raises:
        DriverUnavailable, NotSupported: No pool can be opened here; says what is needed.
        InvalidSize, InvalidRequest: As for `preview`.
    """
    parse_sizes(sizes)
    machine = drivers.open(driver)
    machine.initialise()
    return tuple(
        _preview_device(machine, i, sizes, fine=fine) for i in range(machine.device_count())
    )


def _preview_device(
    machine: Driver, ordinal: int, sizes: tuple[Size, ...], *, fine: bool
) -> SplitPreview:
    device = Device(ordinal, driver=machine)
    try:
        return preview(device, split_device(device, fine=fine).cells, sizes)
    finally:
        device.close()


def _why(cells: DeviceCells, parts: tuple[SizeRange, ...]) -> str:
    needed = sum(-(-part.least // cells.size) for part in parts)
    numbered = [part.least for part in parts if part.named is None]
    over = ""
    if cells.remainder:
        joining = "can join them" if cells.joins else "can only be a part alone"
        over = f", and a remainder of {cells.remainder} SMs that {joining}"
    text = f"{_listed(numbered)} SMs take {needed} cells of {cells.size}, "
    if REST in [part.named for part in parts] and needed <= cells.count:
        return f"{text}all there are, and leave none for REST"
    return f"{text}but the device has {cells.count}{over}"


def _listed(numbers: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, numbers))
