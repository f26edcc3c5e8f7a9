"""Home cells: the sets of cells that a class with fixed sizes gets whenever they are free.

Captured graphs and library handles belong to an executor. A class that names its sizes returns
to a few executors, so its state can be made for all of them before traffic. The sets of
one class begin at one end of the device and contain each other; the next class begins at the other
end, so that two classes that share a device move the border between them.
"""

from __future__ import annotations

from collections.abc import Iterable

from greensched.scheduling.cells import DeviceCells

#: Sets of cells by size, preferred ones first.
HomeMasks = dict[int, tuple[int, ...]]


def home_masks(
    cells: DeviceCells, sizes: Iterable[int], cap: int, edge: int, *, downward: bool
) -> HomeMasks:
    """Choose the home cells of one class.

    Concurrent leases of the class have sets side by side, as many as its cap allows.

    Args:
        cells: The cells of the device.
        sizes: The SMs that the class names.
        cap: The most SMs that the class may hold.
        edge: The cell at which the sets begin.
        downward: Whether the sets end before that cell, instead of beginning with it.
    """
    by_size: HomeMasks = {}
    for sms in sizes:
        if sms > cells.total - cells.size:
            by_size[sms] = (cells.full_mask,)
            continue
        usual = cells.cells_for(sms)
        count, remainder = _with_remainder(cells, sms, usual)
        masks: list[int] = []
        at = edge
        while not masks or (len(masks) + 1) * sms <= cap:
            low = at - count if downward else at
            if low < 0 or low + count > cells.count:
                break
            masks.append(((1 << count) - 1) << low | remainder)
            at = low if downward else low + count
            count, remainder = usual, 0
        by_size[sms] = tuple(masks)
    return by_size


def _with_remainder(cells: DeviceCells, sms: int, usual: int) -> tuple[int, int]:
    """Return a number of cells, and the remainder's bit if it saves SMs."""
    if cells.joins and sms > cells.remainder:
        count = cells.cells_for(sms - cells.remainder)
        if cells.size * count + cells.remainder < cells.size * usual:
            return count, cells.remainder_mask
    return usual, 0
