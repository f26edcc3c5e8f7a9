"""SM resources of a simulated device, and the driver's rules for cutting and combining them.

The rules, as an H200 answered under CUDA 13.0 (docs/measurements/h200-580, `splits`, `disjoint`,
`nested_split`) and, for other versions, as driver-facts has them in section 2:

* A group of one co-scheduled set lies in one GPC: so there are 15 of 8 SMs, and 12 left over.
* A larger group takes the SMs of one GPC after the other, so there are total / size of them; of
  32 SMs cut so only three sets of 8 can be cut again.
* Every split starts from the same first SMs: two independent ones overlap.
* A group or a remainder cannot be split again; the resource of a context can.
* 12.4: one resource to a descriptor. 12.5: several outputs of the *same* split. 13.0, as seen
  (`combine`): of several splits too, documented or not. 13.1: of one, and of equal alignment.
* A descriptor has every SM of its resources once, and counts one in two of them twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count, zip_longest
from typing import Literal

from greensched.driver.simulated.presets import MEASURED, DeviceModel
from greensched.errors import CUDAError, from_status
from greensched.typing import ResourceFacts

Version = tuple[int, int]
_split_ids = count(1)


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """Some SMs of a device, as a bit mask of SM ids, and where they came from.

    `sm_count` is what the driver says they are; 0 is as many as there are.
    """

    device: int
    mask: int
    origin: Literal["device", "context", "green", "group", "remainder"]
    minimum: int
    alignment: int
    split: int = 0
    owner: object = None
    sm_count: int = 0

    def facts(self, version: Version) -> ResourceFacts:
        """What the driver's struct says; the last two fields are declared since 13.0."""
        said = (self.minimum, self.alignment) if version >= (13, 0) else (0, 0)
        return ResourceFacts(self.sm_count or self.mask.bit_count(), *said)


@dataclass(frozen=True, slots=True, eq=False)
class Descriptor:
    """What a green context is made of; the driver has no way to end one."""

    device: int
    mask: int
    sm_count: int
    owner: object = None


def granularity(compute_capability: tuple[int, int]) -> tuple[int, int]:
    """(least group, alignment) of a device resource. Source: programming guide, table 30."""
    if compute_capability >= (9, 0):
        return 8, 8
    return (4, 2) if compute_capability >= (8, 0) else (2, 2)


def whole_device(model: DeviceModel, device: int, owner: object = None) -> Resource:
    """Every SM of a device."""
    least, alignment = granularity(model.compute_capability)
    every = (1 << model.sm_count) - 1
    return Resource(device, every, "device", least, alignment, owner=owner)


def split_by_count(
    model: DeviceModel, source: Resource, groups: int | None, minimum: int, *, fine: bool
) -> tuple[list[Resource], Resource | None]:
    """Equal groups of at least `minimum` SMs, and what is left over."""
    if source.origin in ("group", "remainder"):
        raise _refused("the output of a split cannot be split again: make a context of it first")
    least, alignment = (2, 2) if fine else (source.minimum, source.alignment)
    size = -(-max(minimum, least) // alignment) * alignment
    possible = _groups(model, source.mask, size, whole_sets=size == alignment and not fine)
    masks = possible if groups is None else possible[: max(0, groups)]
    if not masks or minimum > source.mask.bit_count():
        raise _refused(f"no group of {size} SMs fits")
    ident = next(_split_ids)
    rest = source.mask & ~_union(masks)
    device, owner = source.device, source.owner
    cut = [Resource(device, mask, "group", least, alignment, ident, owner) for mask in masks]
    if not rest:
        return cut, None
    # A remainder that is no whole number of sets has lost the alignment of the groups.
    left = alignment if rest.bit_count() % alignment == 0 else 2
    return cut, Resource(device, rest, "remainder", left, left, ident, owner)


def combine(resources: Sequence[Resource], version: Version, *, several: bool) -> Descriptor:
    """One descriptor of several resources, where the driver allows it."""
    first = resources[0]
    if len(resources) > 1:
        if not several:
            raise _refused("this driver takes one resource to a descriptor (12.5 takes several)")
        if any(r.device != first.device for r in resources):
            raise _refused("resources of several devices")
        splits = {r.split for r in resources}
        if 0 in splits or (len(splits) > 1 and version != MEASURED):
            raise _refused("only outputs of one split call can be combined")
        if version >= (13, 1) and any(r.alignment != first.alignment for r in resources):
            raise _refused("resources of different alignment")
    masks = [r.mask for r in resources]
    said = sum(mask.bit_count() for mask in masks)
    return Descriptor(first.device, _union(masks), said, first.owner)


def _groups(model: DeviceModel, mask: int, size: int, *, whole_sets: bool) -> list[int]:
    """Every group of `size` SMs there can be, in the order in which they are given out."""
    gpcs = [[sm for sm in gpc if mask >> sm & 1] for gpc in model.sms_of_gpcs()]
    if whole_sets:  # one of each GPC, then another of each
        rows = zip_longest(*(_chunks(gpc, size) for gpc in gpcs), fillvalue=0)
        return [group for group in chain.from_iterable(rows) if group]
    return _chunks(list(chain.from_iterable(gpcs)), size)


def _chunks(sms: Sequence[int], size: int) -> list[int]:
    """Masks of `size` SMs each; what is left over is in none."""
    starts = range(0, len(sms) - size + 1, size)
    return [_union([1 << sm for sm in sms[i : i + size]]) for i in starts]


def _union(masks: Sequence[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def _refused(why: str) -> CUDAError:
    return from_status(915, "SM resource", detail=why)
