"""Launches of a lease: checked here, and submitted at once, or left to a thread of ours.

A kernel's first use on some SMs compiles and loads it, which blocks: the lane's mover does that,
and submits whatever comes behind it until then.
"""

from __future__ import annotations

from greensched.device.launch import KernelArguments, LaunchConfig, PreparedLaunch, check_launch
from greensched.errors import GreenschedError, WouldBlock
from greensched.execution.jobs import Job
from greensched.execution.submission import Channel, order_behind
from greensched.kernels import Kernel


def launch(
    channel: Channel, config: LaunchConfig, kernel: Kernel, args: tuple[object, ...]
) -> Job[None]:
    """See `Partition.launch`."""
    try:
        plan = channel.lane.plans.get((kernel, config))
    except TypeError:  # of a kind that cannot even be looked up; refused below, by name
        plan = None
    if plan is None:
        plan = _first_plan(channel, config, kernel)
    track = channel.track
    issued = track.issued
    if plan is None or track.submitted != issued or track.first_uses:
        return _launch_later(channel, config, kernel, args)
    arguments, ticket = plan.arguments, issued + 1
    if arguments.pack(args, track, ticket):
        return channel.submit_now(plan.fire, kernel.name, ticket)
    arguments.fill(args)
    uses = tuple(arguments.buffers.values())
    arguments.buffers.clear()
    lagging, behind = channel.others(track, uses)
    if lagging:
        return _launch_later(channel, config, kernel, args)
    for buffer, write in uses:
        buffer.note(track, ticket, write=write)

    def fire() -> None:
        order_behind(track, lagging, behind)
        plan.fire()

    return channel.submit_now(fire if behind else plan.fire, kernel.name, ticket)


def prepare(channel: Channel, config: LaunchConfig, kernel: Kernel) -> Job[None]:
    """See `Partition.prepare`."""
    device = channel.lane.device
    check_launch(config, kernel, device.facts, device.driver)
    runs, holding = channel.lane.runs, channel.holding
    job: Job[None] = Job(runs, runs.issue(), f"prepare {kernel.name}", holding.failed)

    def get_ready() -> None:
        channel.lane.load(kernel)
        channel.lane.plan(kernel, config)

    holding.is_involved = True
    holding.completion.watch(runs)
    holding.crew.run(get_ready, job, holding.completion)
    return job


def packed(
    channel: Channel, config: LaunchConfig, kernel: Kernel, args: tuple[object, ...]
) -> PreparedLaunch:
    """A launch of one's own with these values, for `Partition.bind`. Raises what that does.

    Most of what is bound was bound before on these SMs, by a lease that is over: what that left is
    checked and packed already, but for the values.
    """
    lane = channel.lane
    try:
        left = lane.spare.get((kernel, config)) if kernel in lane.loaded else None
    except TypeError:  # of a kind that cannot even be looked up; refused below, by name
        left = None
    if left:
        plan = left.pop()
        plan.arguments.fill(args)
        return plan
    arguments = checked(channel, config, kernel, args)
    first = lane.plan(kernel, config)
    if first is None:
        raise WouldBlock(
            f"kernel {kernel.name!r} was not used on these SMs yet: "
            "`await p.prepare(config, kernel)` first, or give it to Pool(prepare=[...])"
        )
    return first.having(arguments)


def checked(
    channel: Channel, config: LaunchConfig, kernel: Kernel, args: tuple[object, ...]
) -> KernelArguments:
    """The arguments of a launch, packed. Raises what `Partition.launch` does."""
    device = channel.lane.device
    check_launch(config, kernel, device.facts, device.driver)
    arguments = KernelArguments(kernel, device.ordinal)
    arguments.fill(args)
    return arguments


def _launch_later(
    channel: Channel, config: LaunchConfig, kernel: Kernel, args: tuple[object, ...]
) -> Job[None]:
    """By the mover: it must be loaded first, or something else submitted first."""
    arguments = checked(channel, config, kernel, args)
    uses = tuple(arguments.buffers.values())

    def step(_: int) -> None:
        lane = channel.lane
        if kernel not in lane.loaded:
            lane.device.loader.load(kernel)  # it has its handle then; the launch does the rest
        lane.new_plan(kernel, config, arguments).fire()
        lane.loaded.add(kernel)

    return channel.submit(kernel.name, step, uses, may_block=True)


def _first_plan(channel: Channel, config: LaunchConfig, kernel: Kernel) -> PreparedLaunch | None:
    """Another geometry of a kernel that was loaded here is made ready at once.

    What the driver has against it is the job's failure, as of any launch.
    """
    device = channel.lane.device
    check_launch(config, kernel, device.facts, device.driver)
    try:
        return channel.lane.plan(kernel, config)
    except GreenschedError:
        return None
