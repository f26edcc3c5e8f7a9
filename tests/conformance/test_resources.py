"""SMs and work queues of a device, a context and a stream: querying, splitting, using them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

import greensched
from greensched import (
    ContextOptions,
    Device,
    InvalidRequest,
    InvalidSplit,
    LaunchConfig,
    NotSupported,
    SMResourceOptions,
    WorkqueueResourceOptions,
    launch,
)
from greensched.kernels import spin
from greensched.typing import Feature
from helpers.backend import Backend, needs


@pytest.fixture
def device(backend: Backend) -> Iterator[Device]:
    device = Device(0, driver=backend.driver())
    yield device
    device.close()


def cut(device: Device, *counts: int) -> list[greensched.SMResource]:
    """Return groups of so many SMs of one split, on any driver."""
    return device.resources.sm.split(SMResourceOptions(count=counts))[0]


def step(device: Device) -> int:
    """Return a number of SMs in which every driver splits."""
    sm = device.resources.sm
    return max(sm.min_partition_size, sm.coscheduled_alignment, 2)


# -- asking -----------------------------------------------------------------------------------


def test_a_device_says_its_sms(device: Device) -> None:
    """A device reports its SMs, minimum, alignment, flags and handle on every driver."""
    sm = device.resources.sm
    assert sm.sm_count == device.sm_count > 0
    assert 0 < sm.min_partition_size <= sm.sm_count
    assert sm.coscheduled_alignment % 2 == 0
    assert sm.flags == 0
    assert sm.handle is not None
    if device.compute_capability >= (9, 0):
        assert (sm.min_partition_size, sm.coscheduled_alignment) == (8, 8)
    else:
        assert (sm.min_partition_size, sm.coscheduled_alignment) in {(2, 2), (4, 2)}
    assert not hasattr(sm, "memory_node_id")  # of CUDA 13.4's locality domains, which are not here


def test_resources_cannot_be_constructed() -> None:
    """Resources come from a device, context, stream or split; the constructor is refused."""
    for kind in (greensched.DeviceResources, greensched.SMResource, greensched.WorkqueueResource):
        with pytest.raises(TypeError, match="driver"):
            kind()  # type: ignore[call-arg]


def test_a_device_says_its_work_queues_where_it_has_them(device: Device) -> None:
    """From 13.1 on each query returns a new configuration; before, NotSupported."""
    if not device.driver.supports(Feature.WORKQUEUES):
        with pytest.raises(NotSupported, match=r"needs .*CUDA 13\.1; this is"):
            _ = device.resources.workqueue
        return
    queue = device.resources.workqueue
    assert queue.handle is not None
    assert queue.device_id == device.ordinal
    assert queue.sharing_scope == "device_ctx"
    assert queue.concurrency_limit >= 1
    before = repr(queue)
    queue.configure(WorkqueueResourceOptions(sharing_scope=None))
    assert repr(queue) == before
    queue.configure(WorkqueueResourceOptions(sharing_scope="device_ctx"))
    assert queue.sharing_scope == "device_ctx"
    queue.configure(
        WorkqueueResourceOptions(sharing_scope="green_ctx_balanced", concurrency_limit=4)
    )
    assert (queue.sharing_scope, queue.concurrency_limit) == ("green_ctx_balanced", 4)
    queue.configure(WorkqueueResourceOptions(concurrency_limit=2))
    assert (queue.sharing_scope, queue.concurrency_limit) == ("green_ctx_balanced", 2)
    assert device.resources.workqueue.sharing_scope == "device_ctx"


@pytest.mark.parametrize(
    "options",
    [
        {"sharing_scope": "everything"},
        {"sharing_scope": ["green_ctx_balanced"]},
        {"concurrency_limit": 0},
        {"concurrency_limit": -3},
        {"concurrency_limit": True},
        {"concurrency_limit": 2**32},
    ],
)
def test_what_is_no_configuration_is_refused(options: dict[str, Any]) -> None:
    """The options refuse an unknown scope or a limit that no driver accepts."""
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*: give "):
        WorkqueueResourceOptions(**options)


def test_a_configuration_takes_options(device: Device) -> None:
    """Anything but WorkqueueResourceOptions is refused and changes nothing."""
    needs(device.driver, Feature.WORKQUEUES)
    queue = device.resources.workqueue
    before = repr(queue)
    with pytest.raises(ValueError, match="takes WorkqueueResourceOptions"):
        queue.configure("green_ctx_balanced")  # type: ignore[arg-type]
    assert repr(queue) == before


# -- what is asked of a split -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 8, "coscheduled_sm_count": (2, 2)}, "has 2 values"),
        ({"count": (8, 8), "coscheduled_sm_count": (2, 2, 2)}, "asks for 2 groups"),
        ({"count": (8, 8), "backfill": [True]}, "asks for 2 groups"),
        ({"count": -8}, "more than 0"),
        ({"count": 0}, "more than 0"),
        ({"count": 8.0}, "more than 0"),
        ({"count": True}, "more than 0"),
        ({"count": "16"}, "more than 0"),
        ({"count": ()}, "no group"),
        ({"count": 8, "backfill": 1}, "True or False"),
        ({"count": (8, -1)}, "more than 0"),
        ({"count": 2**32 + 16}, "at most 4294967295"),
        ({"count": 16, "coscheduled_sm_count": 2**32 + 8}, "at most 4294967295"),
        ({"count": 16, "preferred_coscheduled_sm_count": 2**32}, "at most 4294967295"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_split_that_says_nothing_clear_is_refused(
    device: Device, options: dict[str, Any], message: str, dry_run: bool
) -> None:
    """Sequences that do not fit the count, and invalid counts, are a ValueError."""
    with pytest.raises(ValueError, match=message) as refused:
        device.resources.sm.split(SMResourceOptions(**options), dry_run=dry_run)
    assert isinstance(refused.value, InvalidRequest)


def test_a_split_takes_options(device: Device) -> None:
    """Anything but SMResourceOptions is refused, and the error names it."""
    with pytest.raises(InvalidRequest, match=r"SMResourceOptions\(count="):
        device.resources.sm.split(16)  # type: ignore[arg-type]


def test_count_decides_how_many_groups_there_are(device: Device) -> None:
    """A number is one group, a sequence one each; the other SMs are the remainder."""
    sm, least = device.resources.sm, step(device)
    (one,), rest = sm.split(SMResourceOptions(count=least))
    assert rest is not None
    assert (one.sm_count, rest.sm_count) == (least, sm.sm_count - least)
    two, rest = sm.split(SMResourceOptions(count=[least, least], backfill=False))
    assert [group.sm_count for group in two] == [least, least]
    assert rest is not None
    assert rest.sm_count == sm.sm_count - 2 * least


def test_none_finds_the_largest_group(device: Device) -> None:
    """Without a count there is one group, the largest possible."""
    sm = device.resources.sm
    (largest,), rest = sm.split(SMResourceOptions())
    left = rest.sm_count if rest is not None else 0
    assert largest.sm_count + left == sm.sm_count
    assert left < largest.sm_count
    assert largest.sm_count >= sm.min_partition_size
    if (13, 1) <= device.driver.version < (13, 4):  # others may give every SM there is
        assert largest.sm_count % sm.coscheduled_alignment == 0
    with pytest.raises(InvalidSplit):
        sm.split(SMResourceOptions(count=sm.sm_count + 2))


def test_a_dry_run_answers_as_the_real_split(device: Device) -> None:
    """Sizes, alignment, flags, remainder and refusals are those of the split."""
    sm, least = device.resources.sm, step(device)
    asked = [
        SMResourceOptions(),
        SMResourceOptions(count=least),
        SMResourceOptions(count=(least, least)),
        SMResourceOptions(count=(least, 2 * least)),
        SMResourceOptions(count=least + 1),
        SMResourceOptions(count=least + 2),
        SMResourceOptions(count=least + 2, backfill=True),
        SMResourceOptions(count=4, coscheduled_sm_count=2),
        SMResourceOptions(count=sm.sm_count),
        SMResourceOptions(count=sm.sm_count + 2),
        SMResourceOptions(count=(None, None)),
        SMResourceOptions(count=(least,) * 1000),
    ]

    def outcome(options: SMResourceOptions, *, dry_run: bool) -> object:
        try:
            groups, rest = sm.split(options, dry_run=dry_run)
        except greensched.GreenschedError as error:
            return type(error), str(error)
        return [
            (one.sm_count, one.min_partition_size, one.coscheduled_alignment, one.flags)
            for one in (*groups, *([rest] if rest is not None else []))
        ]

    for options in asked:
        assert outcome(options, dry_run=True) == outcome(options, dry_run=False), options


def test_nothing_is_made_of_a_dry_run(device: Device) -> None:
    """Its outputs have sizes, but no context or split can be made of them."""
    (group,), rest = device.resources.sm.split(SMResourceOptions(count=step(device)), dry_run=True)
    assert "dry run" in repr(group)
    for output in (group, rest):
        assert output is not None
        with pytest.raises(ValueError, match="dry run"):
            device.create_context(ContextOptions(resources=[output]))
        with pytest.raises(ValueError, match="output of a split"):
            output.split(SMResourceOptions(count=2))


@pytest.mark.fault("B4")
def test_a_refused_split_says_why_and_what_is_nearest(device: Device) -> None:
    """The error has the request, the SMs, the reason, and sizes that are possible."""
    sm, least = device.resources.sm, step(device)
    for counts in ((sm.sm_count + 2,), (least + 1,), (least,) * 1000):
        with pytest.raises(InvalidSplit, match="cannot be cut into groups of") as refused:
            sm.split(SMResourceOptions(count=counts))
        error = refused.value
        assert (error.asked, error.sm_count) == (counts, sm.sm_count)
        assert error.why
        assert error.nearest
        groups, _ = sm.split(SMResourceOptions(count=error.nearest))
        assert tuple(group.sm_count for group in groups) == error.nearest


def test_the_output_of_a_split_is_not_split_again(device: Device) -> None:
    """It is refused, and the error says how; a context's SMs over it can be split."""
    least = step(device)
    (group,), rest = device.resources.sm.split(SMResourceOptions(count=2 * least))
    for output in (group, rest):
        assert output is not None
        with pytest.raises(InvalidRequest, match=r"resources\.sm"):
            output.split(SMResourceOptions(count=least))
    context = device.create_context(ContextOptions(resources=[group]))
    (inner,), _ = context.resources.sm.split(SMResourceOptions(count=least))
    assert inner.sm_count == least
    context.close()


# -- green contexts ---------------------------------------------------------------------------


def test_a_context_needs_resources(device: Device) -> None:
    """Missing or invalid options or resources raise a ValueError that says what is valid."""
    wrong: list[Any] = [
        None,
        [],
        cut(device, step(device)),
        object(),
        ContextOptions(resources=[]),
        ContextOptions(resources=None),  # type: ignore[arg-type]
        ContextOptions(resources=device.resources.sm),  # type: ignore[arg-type]
        ContextOptions(resources=[16]),  # type: ignore[list-item]
    ]
    for options in wrong:
        with pytest.raises(ValueError, match="resources"):
            device.create_context(options)
    with pytest.raises(TypeError, match="resources"):
        ContextOptions()  # type: ignore[call-arg]


def test_contexts_and_streams_say_what_they_were_given(device: Device) -> None:
    """A context and its streams report the SMs of its groups; the primary all SMs."""
    least = step(device)
    groups = cut(device, least, least, least)
    one = device.create_context(ContextOptions(resources=groups[:1]))
    two = device.create_context(ContextOptions(resources=groups[1:]))
    assert one.is_green
    assert one.handle is not None
    assert not device.primary.is_green
    for context, sms in ((one, least), (two, 2 * least)):
        assert context.resources.sm.sm_count == sms < device.sm_count
        stream = context.create_stream()
        assert stream.context is context
        assert stream.resources.sm.sm_count == sms
        with closing(stream.record()) as event:
            assert event.context is context
        assert device.driver.current() is None
        stream.close()
    assert device.primary.resources.sm.sm_count == device.sm_count
    stream = device.create_stream()
    assert stream.context is device.primary
    assert stream.resources.sm.sm_count == device.sm_count
    stream.close()
    with pytest.raises(greensched.Closed):
        _ = stream.resources
    resources = one.resources
    one.close()
    with pytest.raises(greensched.Closed):
        _ = resources.sm
    two.close()


def test_a_context_has_the_work_queues_it_was_given(device: Device) -> None:
    """SMs with a configuration, or the configuration alone over every SM."""
    needs(device.driver, Feature.WORKQUEUES)
    queue, second = device.resources.workqueue, device.resources.workqueue
    queue.configure(
        WorkqueueResourceOptions(sharing_scope="green_ctx_balanced", concurrency_limit=2)
    )
    groups = cut(device, step(device))
    for resources, sms in (([*groups, queue], step(device)), ([queue], device.sm_count)):
        context = device.create_context(ContextOptions(resources=resources))
        stream = context.create_stream()
        for found in (context.resources, stream.resources):
            assert found.workqueue.sharing_scope == "green_ctx_balanced"
            assert found.workqueue.concurrency_limit == 2
            assert found.sm.sm_count == sms
        launch(stream, LaunchConfig(grid=1, block=1), spin, 1000)
        with ThreadPoolExecutor(1) as threads:  # the main thread's calls are judged as a loop's
            threads.submit(stream.sync).result(10)
        stream.close()
        context.close()
    with pytest.raises(ValueError, match="at most"):
        device.create_context(ContextOptions(resources=[*groups, queue, second]))


def test_streams_of_a_green_context_are_non_blocking(device: Device) -> None:
    """A blocking one is a ValueError; use Device.create_stream for the primary's."""
    context = device.create_context(ContextOptions(resources=cut(device, step(device))))
    with pytest.raises(ValueError, match="always non-blocking"):
        context.create_stream(nonblocking=False)
    with pytest.raises(ValueError, match=r"Device\.create_stream"):
        device.primary.create_stream()
    for wrong in (2**31, -(2**31) - 1, 1.5, True, None):
        for maker in (context, device):
            with pytest.raises(InvalidRequest, match="priority="):
                maker.create_stream(priority=wrong)  # type: ignore[arg-type]
    least, greatest = 0, -1
    for priority in (least, greatest):
        context.create_stream(priority=priority).close()
    context.close()


def test_unsplit_sms_are_combined_with_nothing(device: Device) -> None:
    """The whole device beside one of its groups is refused with the reason."""
    with pytest.raises(greensched.InvalidCombination, match="unsplit"):
        device.create_context(
            ContextOptions(resources=[*cut(device, step(device)), device.resources.sm])
        )
