"""Splitting a device into cells, once, so that all cells are disjoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

from greensched.device import splitting
from greensched.device.device import Device
from greensched.device.resources import ContextOptions, SMResource
from greensched.driver.kept_handles import ContextKey
from greensched.errors import CUDAError, InvalidCombination
from greensched.scheduling.cells import DeviceCells


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """The result of splitting a device: equal groups of SMs, and the remainder."""

    whole: SMResource
    groups: tuple[SMResource, ...]
    remainder: SMResource | None
    cells: DeviceCells
    fine: bool = False

    def resources(self, mask: int) -> list[SMResource]:
        """Return the SMs of a set of cells."""
        cells = self.cells
        if mask & cells.full_mask == cells.full_mask:  # one grant, or several shared ones
            return [self.whole]
        chosen = [group for i, group in enumerate(self.groups) if mask >> i & 1]
        if mask & cells.remainder_mask and self.remainder is not None:
            chosen.append(self.remainder)
        return chosen

    def key(self, mask: int, balanced: bool) -> ContextKey:
        """Return the key under which the next pool finds the green context over a set of cells."""
        return self.fine, mask, balanced


def split_device(device: Device, *, fine: bool = False) -> DeviceSplit:
    """Split a device into its smallest cells, and test whether the remainder can join them.

    Args:
        fine: Whether to use the smallest possible cells, whose SMs are not co-scheduled.
    """
    whole = device.resources.sm
    if fine:
        groups, remainder = whole.split_evenly(1, fine=True)
    else:
        groups, remainder = whole.split_evenly(whole.min_partition_size)
    left = remainder.sm_count if remainder is not None else 0
    cells = DeviceCells(size=groups[0].sm_count, count=len(groups), remainder=left)
    split = DeviceSplit(whole, tuple(groups), remainder, cells, fine)
    if not _joins(device, split):
        return split
    return replace(split, cells=replace(cells, joins=True))


def _joins(device: Device, split: DeviceSplit) -> bool:
    """Test the combination. From CUDA 13.1 on, resources of unequal alignment are refused."""
    if split.remainder is None:
        return False
    mask = 1 | split.cells.remainder_mask
    options = ContextOptions(resources=split.resources(mask))
    try:
        context = device.lend_context(split.key(mask, balanced=False), options)
    except InvalidCombination:
        return False
    except CUDAError as error:
        if error.status not in splitting.REFUSALS:
            raise
        return False
    context.close()  # outside the test, because an error here is no answer to it
    return True
