"""SM resources of a simulated device, and the driver's rules for splitting and combining them.

The rules, as observed on an H200 under CUDA 13.0 (docs/measurements/h200-580, `splits`, `disjoint`,
`nested_split`) and, for other versions, from section 2 of driver-facts:

* A group of one co-scheduled set lies in one GPC, so an H200 has 15 groups of 8 SMs, and 12 SMs
  remain.
* A larger group takes the SMs of one GPC after another, so there are total / size groups; 32 SMs
  from such a split can be split again into only three sets of 8.
* A request for every SM gets every SM, even if that is not a multiple (132, `resources.txt`).
* Every split starts from the same first SMs, so independent splits overlap.
* A group or a remainder cannot be split again; the resource of a context can.
* A descriptor takes several resources. Under 13.0, as measured (`combine`), these may be outputs of
  several splits, documented or not. From 13.1 on they are outputs of one split and of equal
  alignment, and a work-queue configuration, which may stand alone; from 13.4 on also of equal
  flags.
* A descriptor contains every SM of its resources once, but counts an SM of two resources twice.

The structured split (CUDA 13.1) was not measured on a GPU. Its documentation (cuda.h, 13.1 to 13.5)
says: groups of different sizes, from left to right, without rounding; each of whole co-scheduled
sets, which here lie in one GPC; with backfill, of at least one such set and any other SMs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count, zip_longest
from typing import Literal

from greensched.driver.simulated.device_models import MEASURED, DeviceModel
from greensched.driver.status import from_status
from greensched.driver.types import ResourceFacts, SMGroup, WorkqueueFacts
from greensched.errors import CUDAError
from greensched.typing import SharingScope

Version = tuple[int, int]
_split_ids = count(1)

#: The default of CUDA_DEVICE_MAX_CONNECTIONS. Source: programming guide, environment variables.
CONNECTIONS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """Some SMs of a device, as a bit mask of SM ids, and their origin.

    `sm_count` is the number that the driver reports; 0 means as many as the mask has.
    """

    device: int
    mask: int
    origin: Literal["device", "context", "green", "group", "remainder"]
    minimum: int
    alignment: int
    split: int = 0
    owner: object = None
    sm_count: int = 0
    flags: int = 0

    def facts(self, version: Version) -> ResourceFacts:
        """Return the fields of the driver's struct.

        The measured driver reports neither minimum nor alignment for a split's outputs, only for
        contexts made of them (docs/measurements/h200-580/resources.txt).
        """
        is_output = self.origin in ("group", "remainder")
        reported = (0, 0) if version == MEASURED and is_output else (self.minimum, self.alignment)
        return ResourceFacts(self.sm_count or self.mask.bit_count(), *reported, self.flags)


@dataclass(frozen=True, slots=True, eq=False)
class Workqueue:
    """A work-queue configuration of a device or context. It has no effect on time or order."""

    device: int
    owner: object = None
    sharing_scope: SharingScope = "device_ctx"
    concurrency_limit: int = CONNECTIONS

    @property
    def facts(self) -> WorkqueueFacts:
        """The fields of the driver's struct."""
        return WorkqueueFacts(self.sharing_scope, self.concurrency_limit)


@dataclass(frozen=True, slots=True, eq=False)
class Descriptor:
    """The resources for a green context. The driver has no call that frees a descriptor."""

    device: int
    mask: int
    sm_count: int
    #: The (least group, alignment) of its resources.
    grain: tuple[int, int]
    owner: object = None
    workqueue: Workqueue | None = None


def granularity(compute_capability: tuple[int, int]) -> tuple[int, int]:
    """Return a device resource's (least group, alignment). Source: programming guide, table 30."""
    if compute_capability >= (9, 0):
        return 8, 8
    return (4, 2) if compute_capability >= (8, 0) else (2, 2)


def whole_device(model: DeviceModel, device: int, owner: object = None) -> Resource:
    """Return every SM of a device."""
    least, alignment = granularity(model.compute_capability)
    every = (1 << model.sm_count) - 1
    return Resource(device, every, "device", least, alignment, owner=owner)


def split_by_count(
    model: DeviceModel, source: Resource, groups: int | None, minimum: int, *, fine: bool
) -> tuple[list[Resource], Resource | None]:
    """Make equal groups of at least `minimum` SMs; return them and the remainder."""
    _refuse_output(source)
    least, alignment = (2, 2) if fine else (source.minimum, source.alignment)
    size = -(-max(minimum, least) // alignment) * alignment
    if minimum == source.mask.bit_count():
        size = minimum
    possible = _groups(model, source.mask, size, whole_sets=size == alignment and not fine)
    masks = possible if groups is None else possible[: max(0, groups)]
    if not masks or minimum > source.mask.bit_count():
        raise _refused(f"no group of {size} SMs fits")
    cut = [(mask, least, alignment, 0) for mask in masks]
    return _made(source, cut, alignment)


def split(
    model: DeviceModel, source: Resource, groups: Sequence[SMGroup], version: Version
) -> tuple[list[Resource], Resource | None]:
    """Make the requested groups, from left to right; return them and the remainder."""
    _refuse_output(source)
    left, cut = source.mask, []
    for group in groups:
        own = group.coscheduled_sm_count or granularity(model.compute_capability)[1]
        _check_group(model, group, own, source.mask.bit_count())
        mask = _structured(model, left, group, own, version)
        left &= ~mask
        cut.append((mask, min(own, source.minimum), own, int(group.backfill)))
    return _made(source, cut, source.alignment)


def _refuse_output(source: Resource) -> None:
    if source.origin in ("group", "remainder"):
        raise _refused("the output of a split cannot be split again: make a context of it first")


def _check_group(model: DeviceModel, group: SMGroup, own: int, total: int) -> None:
    """Check one group before its SMs are chosen."""
    sms = group.sm_count
    # The largest set. Source: cuda.h, CU_DEV_SM_RESOURCE_GROUP_PARAMS.
    largest = 32 if model.compute_capability >= (9, 0) else 2
    if own % 2 or own > largest or group.preferred_coscheduled_sm_count > largest:
        raise _refused(f"co-scheduled sets have an even number of SMs, {largest} at most")
    if group.preferred_coscheduled_sm_count % own:
        raise _refused(f"the preferred sets are no multiple of {own}")
    if sms and not (2 <= sms <= total and sms % 2 == 0 and sms >= own):
        raise _refused(f"{sms} is no even number of SMs from {max(2, own)} to {total}")
    if sms % own and not group.backfill:
        raise _refused(f"{sms} is no multiple of the {own} that are co-scheduled")


def _structured(model: DeviceModel, left: int, group: SMGroup, own: int, version: Version) -> int:
    """Choose the SMs of one group of a structured split from the remaining ones."""
    sets = _sets(model, left, own)
    # From 13.4 on, a group without a size or constraints may have every SM.
    free = version >= (13, 4) and not group.sm_count and not group.coscheduled_sm_count
    largest = left.bit_count() if group.backfill or free else own * len(sets)
    wanted = group.sm_count or largest
    if not sets or wanted > largest:
        raise _refused(f"{len(sets)} sets of {own} co-scheduled SMs are left for a group")
    mask = 0
    for size in (group.preferred_coscheduled_sm_count or own, own):
        whole = _sets(model, left & ~mask, size)
        mask |= _union(whole[: (wanted - mask.bit_count()) // size])
    others = [1 << sm for sm in range(model.sm_count) if (left & ~mask) >> sm & 1]
    return mask | _union(others[: wanted - mask.bit_count()])


def _sets(model: DeviceModel, mask: int, size: int) -> list[int]:
    """Return all whole sets of `size` SMs in one GPC."""
    gpcs = [[sm for sm in gpc if mask >> sm & 1] for gpc in model.sms_of_gpcs()]
    return list(chain.from_iterable(_chunks(gpc, size) for gpc in gpcs))


def _made(
    source: Resource, cut: Sequence[tuple[int, int, int, int]], alignment: int
) -> tuple[list[Resource], Resource | None]:
    """Make the outputs of one split from (SMs, least group, alignment, flags) of each."""
    ident, device, owner = next(_split_ids), source.device, source.owner
    groups = [
        Resource(device, mask, "group", low, step, ident, owner, flags=flags)
        for mask, low, step, flags in cut
    ]
    rest = source.mask & ~_union([mask for mask, *_ in cut])
    if not rest:
        return groups, None
    # A remainder that is not a whole number of sets has lost the groups' alignment.
    whole = rest.bit_count() % alignment == 0
    low, step = (alignment, alignment) if whole else (2, 2)
    return groups, Resource(device, rest, "remainder", low, step, ident, owner)


def combine(
    resources: Sequence[Resource | Workqueue],
    version: Version,
    whole: Callable[[int], Resource],
) -> Descriptor:
    """Combine several resources in one descriptor, if the driver allows it."""
    first = resources[0]
    if any(r.device != first.device for r in resources):
        raise _refused("resources of several devices")
    queues = [r for r in resources if isinstance(r, Workqueue)]
    if len(queues) > 1:
        raise _refused("more than one work-queue configuration")
    parts = [r for r in resources if isinstance(r, Resource)] or [whole(first.device)]
    _check_parts(parts, version)
    masks = [r.mask for r in parts]
    # An SM of two resources counts twice, up to the device's SMs (measured: `alignment`).
    reported = min(sum(mask.bit_count() for mask in masks), whole(first.device).mask.bit_count())
    grain = min(r.minimum for r in parts), min(r.alignment for r in parts)
    queue = queues[0] if queues else None
    return Descriptor(first.device, _union(masks), reported, grain, first.owner, queue)


def _check_parts(parts: Sequence[Resource], version: Version) -> None:
    """Check that SM resources may be in one descriptor."""
    first = parts[0]
    if len(parts) == 1:
        return
    splits = {r.split for r in parts}
    if version != MEASURED and (0 in splits or len(splits) > 1):
        raise _refused("only outputs of one split call can be combined")
    if version >= (13, 1) and any(r.alignment != first.alignment for r in parts):
        raise _refused("resources of different alignment")
    if version >= (13, 4) and any(r.flags != first.flags for r in parts):
        raise _refused("resources of different flags")


def _groups(model: DeviceModel, mask: int, size: int, *, whole_sets: bool) -> list[int]:
    """Return all possible groups of `size` SMs, in the order in which a split uses them."""
    gpcs = [[sm for sm in gpc if mask >> sm & 1] for gpc in model.sms_of_gpcs()]
    if whole_sets:  # one set of each GPC, then another of each
        rows = zip_longest(*(_chunks(gpc, size) for gpc in gpcs), fillvalue=0)
        return [group for group in chain.from_iterable(rows) if group]
    return _chunks(list(chain.from_iterable(gpcs)), size)


def _chunks(sms: Sequence[int], size: int) -> list[int]:
    """Return masks of `size` SMs each, without the remaining SMs."""
    starts = range(0, len(sms) - size + 1, size)
    return [_union([1 << sm for sm in sms[i : i + size]]) for i in starts]


def _union(masks: Sequence[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def _refused(why: str) -> CUDAError:
    return from_status(915, "SM resource", detail=why)
