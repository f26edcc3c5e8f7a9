"""Splitting SMs into groups: the options, the driver's calls, and the reason for a refusal.

Below CUDA 13.1 a driver makes only equal groups, and rounds their sizes up. A split here is never
rounded: on every driver each group has exactly the requested SMs, or the split is refused with the
nearest possible sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from greensched.driver.interface import Driver
from greensched.driver.kept_handles import Cut
from greensched.driver.status import from_status
from greensched.driver.types import ResourceFacts, ResourceHandle, SMGroup
from greensched.errors import CUDAError, InvalidRequest, InvalidSplit, NotSupported
from greensched.typing import Feature

#: What the structured split requires. Source: cuda.h of 13.1, and wheels of cuda-bindings.
NEEDED = "driver and bindings of CUDA 13.1"

#: CUDA_ERROR_INVALID_VALUE and CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION. Source: cuda.h.
REFUSALS = (1, 915)

#: The driver's largest `unsigned int`. For larger numbers the bindings raise or truncate.
MOST = 2**32 - 1

#: The largest sets of co-scheduled SMs: from compute capability 9.0 on, and before. Source:
#: programming guide, table 30.
LARGEST_SETS = (32, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SMResourceOptions:
    """The groups that `SMResource.split` makes. Counts are SMs; names are those of cuda.core.

    A sequence has a value for each group; a single value applies to all groups. `count` determines
    the number of groups: one, or its length.

    Attributes:
        count: SMs of a group, an even number. None: the largest possible group.
        coscheduled_sm_count: The least number of co-scheduled SMs, for thread-block clusters.
            None: the device's own number (8 from compute capability 9.0 on, else 2). `count` is a
            multiple of it. 2 allows every even count, but large clusters do not fit.
        preferred_coscheduled_sm_count: The preferred number, if possible. Needs CUDA 13.1.
        backfill: Whether to add other SMs if co-scheduled ones do not suffice. Needs CUDA 13.1.
    """

    count: int | Sequence[int | None] | None = None
    coscheduled_sm_count: int | Sequence[int | None] | None = None
    preferred_coscheduled_sm_count: int | Sequence[int | None] | None = None
    backfill: bool | Sequence[bool] = False

    @property
    def groups(self) -> tuple[SMGroup, ...]:
        """One entry for each group.

        Raises:
            InvalidRequest: A value is invalid, or a sequence differs from `count` in length.
        """
        several = _is_sequence(self.count)
        number = len(self.count) if several else 1  # type: ignore[arg-type]  # then it has a length
        if not number:
            raise InvalidRequest("count=() asks for no group: give a number of SMs for each")
        columns = []
        for field in fields(self):
            value = getattr(self, field.name)
            if _is_sequence(value) and (not several or len(value) != number):
                raise InvalidRequest(
                    f"{field.name}={value!r} has {len(value)} values, and count={self.count!r} "
                    f"asks for {number} groups: give one value for all, or one for each"
                )
            values = tuple(value) if _is_sequence(value) else (value,) * number
            read = _flag if field.name == "backfill" else _sms
            columns.append([read(field.name, value) for value in values])
        return tuple(SMGroup(*row) for row in zip(*columns, strict=True))


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _sms(name: str, value: object) -> int:
    if value is None:
        return 0
    if type(value) is not int or not 0 < value <= MOST:
        raise InvalidRequest(
            f"{name}={value!r}: give a number of SMs, more than 0 and at most {MOST}, or None"
        )
    return value


def _flag(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise InvalidRequest(f"{name}={value!r}: give True or False")
    return value


def split(driver: Driver, device: int, whole: ResourceHandle, groups: Sequence[SMGroup]) -> Cut:
    """Split SMs into groups by one call, so that they are disjoint. Does not block.

    Args:
        driver: The driver of the SMs.
        device: The ordinal of their device.
        whole: The SMs.
        groups: The groups to make.

    Raises:
        InvalidSplit: The split is not possible; says why, and the nearest sizes.
        NotSupported: Unequal groups need CUDA 13.1.
    """
    method = _split_method(driver, groups)
    try:
        return method(driver, whole, groups)
    except CUDAError as error:
        if error.status not in REFUSALS:
            raise
        facts = driver.resource_facts(whole)
        nearest = _nearest(driver, whole, groups)
        counts = tuple(group.sm_count or None for group in groups)
        has_clusters = driver.device_facts(device).compute_capability >= (9, 0)
        largest_set = LARGEST_SETS[0 if has_clusters else 1]
        why = _explain(facts, groups, largest_set, structured=method is _structured)
        raise InvalidSplit(counts, facts.sm_count, why, nearest) from error


def _split_method(driver: Driver, groups: Sequence[SMGroup]) -> Callable[..., Cut]:
    if driver.supports(Feature.STRUCTURED_SPLIT):
        return _structured
    major, minor = driver.version
    version = f"CUDA {major}.{minor}"
    first = groups[0]
    for is_wanted, what in (
        (any(group != first for group in groups), "cutting unequal groups in one split"),
        (first.backfill, "backfill"),
        (first.preferred_coscheduled_sm_count, "preferred_coscheduled_sm_count"),
    ):
        if is_wanted:
            raise NotSupported(what, NEEDED, version)
    return _by_count


def _structured(driver: Driver, whole: ResourceHandle, groups: Sequence[SMGroup]) -> Cut:
    return driver.split(whole, groups)


def _by_count(driver: Driver, whole: ResourceHandle, groups: Sequence[SMGroup]) -> Cut:
    """Make equal groups by the older split; refuse if it would round up or make fewer."""
    facts, group = driver.resource_facts(whole), groups[0]
    fine = group.coscheduled_sm_count == 2
    if group.coscheduled_sm_count not in (0, 2, facts.coscheduled_alignment):
        major, minor = driver.version
        raise NotSupported(
            f"coscheduled_sm_count={group.coscheduled_sm_count}",
            NEEDED,
            f"CUDA {major}.{minor}, which has the device's own number (None) and 2",
        )
    largest = range(facts.sm_count // 2 * 2, 0, -2) if len(groups) == 1 else ()
    for size in [group.sm_count] if group.sm_count else largest:
        try:
            cut, rest = driver.split_by_count(whole, len(groups), size, ignore_coscheduling=fine)
        except CUDAError as error:
            if error.status not in REFUSALS:
                raise
            continue
        if len(cut) == len(groups) and driver.resource_facts(cut[0]).sm_count == size:
            return cut, rest
    raise from_status(915, "a split by count")


# -- refusing ---------------------------------------------------------------------------------


def _explain(
    facts: ResourceFacts, groups: Sequence[SMGroup], largest_set: int, *, structured: bool
) -> str:
    """Return the reason for a refusal, as far as the numbers show it."""
    counts = [group.sm_count for group in groups]
    for count, group in zip(counts, groups, strict=True):
        sets, wider = group.coscheduled_sm_count, group.preferred_coscheduled_sm_count
        for size in (sets, wider):
            if size % 2 or size > largest_set:
                return f"sets of {size}: sets are even, and have {largest_set} SMs at most"
        step = sets or facts.coscheduled_alignment or 2
        fine = sets == 2  # which has its own least group
        least = step if structured or fine else max(step, facts.min_partition_size)
        if wider % step:
            return f"sets of {wider} are preferred, which is not a multiple of {step}"
        if count > facts.sm_count:
            return f"{count} are more than there are"
        if count % 2:
            return f"{count} is odd, but SMs come in pairs"
        if count % step and not group.backfill:
            return f"{count} is not a multiple of the {step} co-scheduled SMs{_hints(structured)}"
        if count and count < least:
            return f"{count} are fewer than the {least} of the smallest group"
    if sum(counts) > facts.sm_count:
        return f"together they are {sum(counts)}"
    if 0 in counts[:-1]:
        return "the largest group leaves no SM for the next ones"
    if not facts.coscheduled_alignment:
        return "this driver makes groups of other sizes only, and does not say which"
    return f"the chip does not have enough co-scheduled SMs{_hints(structured)}"


def _hints(structured: bool) -> str:
    backfill = ", or backfill=True" if structured else ""
    return f" (coscheduled_sm_count=2 gives up large clusters{backfill})"


def _nearest(driver: Driver, whole: ResourceHandle, groups: Sequence[SMGroup]) -> tuple[int, ...]:
    """Return the nearest possible sizes; fewer groups if not all fit.

    They are found by trials, because only the driver knows the chip. A split reserves nothing.
    """
    if not driver.supports(Feature.STRUCTURED_SPLIT):
        return _nearest_alike(driver, whole, groups)
    facts = driver.resource_facts(whole)
    chosen: list[SMGroup] = []
    for group in groups:
        left = facts.sm_count - sum(group.sm_count for group in chosen)
        trials = (replace(group, sm_count=size) for size in _sizes(group, facts, left))
        fitting = (
            group for group in trials if _can_split(_structured, driver, whole, [*chosen, group])
        )
        first = next(fitting, None)
        if first is None:
            break
        chosen.append(first)
    return tuple(group.sm_count for group in chosen)


def _nearest_alike(
    driver: Driver, whole: ResourceHandle, groups: Sequence[SMGroup]
) -> tuple[int, ...]:
    """Return as many groups of one size as possible, for drivers that only make equal groups."""
    facts, group = driver.resource_facts(whole), groups[0]
    for number in range(min(len(groups), facts.sm_count), 0, -1):
        for size in _sizes(group, facts, facts.sm_count // number):
            if _can_split(_by_count, driver, whole, [replace(group, sm_count=size)] * number):
                return (size,) * number
    return ()


def _sizes(group: SMGroup, facts: ResourceFacts, most: int) -> list[int]:
    """Return the sizes to try for a group, nearest to its own size first."""
    step = group.coscheduled_sm_count or facts.coscheduled_alignment or 2
    sizes = range(2 if group.backfill or step % 2 else step, most + 1, 2)
    fitting = [size for size in sizes if group.backfill or size % step == 0]
    wanted = group.sm_count or most
    return sorted(fitting, key=lambda size: (abs(size - wanted), -size))


def _can_split(
    method: Callable[..., Cut], driver: Driver, whole: ResourceHandle, groups: Sequence[SMGroup]
) -> bool:
    try:
        method(driver, whole, groups)
    except CUDAError as error:
        if error.status not in REFUSALS:
            raise
        return False
    return True
