"""Launches of a lease: checked here, then submitted at once or by the submit thread.

A kernel's first use on a set of SMs compiles and loads it, which blocks. So the submit thread does
that, and also submits all work that follows meanwhile.
"""

from __future__ import annotations

from greensched.device.arguments import KernelArguments
from greensched.device.launch import LaunchConfig, PreparedLaunch, check_launch
from greensched.errors import GreenschedError, WouldBlock
from greensched.execution.jobs import Job
from greensched.execution.lease import Lease
from greensched.kernels import Kernel


def launch(
    lease: Lease, config: LaunchConfig, kernel: Kernel, args: tuple[object, ...]
) -> Job[None]:
    """See `Partition.launch`."""
    lease.check_ready()
    executor = lease.executor
    try:
        prepared = executor.cache.launches.get((kernel, config.key))
    except (AttributeError, TypeError):  # not a configuration or not a kernel: refused below
        prepared = None
    if prepared is None:
        prepared = _prepare_first(lease, config, kernel)
    stream = executor.launch_stream
    issued = stream.issued
    if prepared is None or stream.submitted != issued or stream.first_uses:
        return _launch_deferred(lease, config, kernel, args)
    arguments, ticket = prepared.arguments, issued + 1
    if arguments.pack(args, stream, ticket):
        return lease.submit_now(prepared.launch, kernel.name, ticket)
    arguments.fill(args)
    uses = tuple(arguments.buffers.values())
    arguments.buffers.clear()
    dependencies = lease.dependencies(stream, uses)
    if dependencies.unsubmitted:
        return _launch_deferred(lease, config, kernel, args)
    for buffer, write in uses:
        buffer.record_use(stream, ticket, write=write)
    if not dependencies.streams:
        return lease.submit_now(prepared.launch, kernel.name, ticket)

    def launch_in_order() -> None:
        dependencies.order_before(stream)
        prepared.launch()

    return lease.submit_now(launch_in_order, kernel.name, ticket)


def prepare(lease: Lease, config: LaunchConfig, kernel: Kernel) -> Job[None]:
    """See `Partition.prepare`."""
    executor = lease.executor
    check_launch(config, kernel, executor.device.facts, executor.driver)
    stream = executor.call_stream
    job: Job[None] = Job(stream, stream.issue(), f"prepare {kernel.name}", lease)

    abandonment = lease.abandonment

    def load() -> None:
        executor.cache.load(kernel, abandonment)
        executor.cache.get(kernel, config)

    lease.reusable = False
    lease.poller.watch(stream)
    executor.calls.submit(load, job, lease.poller)
    if lease.recorder.notes_jobs:
        lease.record(job)
    return job


def prepare_bound(
    lease: Lease, config: LaunchConfig, kernel: Kernel, args: tuple[object, ...]
) -> PreparedLaunch:
    """Prepare a launch with its own arguments, for `Partition.bind`, whose errors it raises.

    An earlier lease of these SMs may have left a launch of the same kind, which only needs values.
    """
    cache = lease.executor.cache
    try:
        spare = cache.spare.get((kernel, config.key)) if kernel in cache.loaded else None
    except (AttributeError, TypeError):  # not a configuration or not a kernel: refused below
        spare = None
    if spare:
        prepared = spare.pop()
        prepared.arguments.fill(args)
        return prepared
    arguments = pack_arguments(lease, config, kernel, args)
    first = cache.get(kernel, config)
    if first is None:
        raise WouldBlock(
            f"kernel {kernel.name!r} was not used on these SMs yet: "
            "`await p.prepare(config, kernel)` first, or give it to Pool(prepare=[...])"
        )
    return first.with_arguments(arguments)


def pack_arguments(
    lease: Lease, config: LaunchConfig, kernel: Kernel, args: tuple[object, ...]
) -> KernelArguments:
    """Check a launch and pack its arguments. Errors are those of `Partition.launch`."""
    device = lease.executor.device
    check_launch(config, kernel, device.facts, device.driver)
    arguments = KernelArguments(kernel, device.ordinal)
    arguments.fill(args)
    return arguments


def _launch_deferred(
    lease: Lease, config: LaunchConfig, kernel: Kernel, args: tuple[object, ...]
) -> Job[None]:
    """Launch from the submit thread, because the kernel or earlier work must come first."""
    arguments = pack_arguments(lease, config, kernel, args)
    uses = tuple(arguments.buffers.values())
    cache, loader = lease.executor.cache, lease.executor.device.loader
    abandonment = None if kernel in cache.loaded else lease.abandonment

    def step(_: int) -> None:
        if kernel not in cache.loaded:
            loader.load(kernel, abandonment)  # gives the kernel its handle for the launch below
        cache.create(kernel, config, arguments).launch()
        cache.loaded.add(kernel)

    return lease.submit(kernel.name, step, uses, may_block=True)


def _prepare_first(lease: Lease, config: LaunchConfig, kernel: Kernel) -> PreparedLaunch | None:
    """Prepare a new geometry of a kernel that is loaded here; None if it is not loaded.

    A refusal by the driver is not raised here, but fails the job, as for any launch.
    """
    executor = lease.executor
    check_launch(config, kernel, executor.device.facts, executor.driver)
    try:
        return executor.cache.get(kernel, config)
    except GreenschedError:
        return None
