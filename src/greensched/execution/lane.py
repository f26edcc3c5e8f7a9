"""Lanes: a green context over a set of cells, with its streams, tickets and staging.

Made once, cached and reused. A lane has two tracks: launches and copies go to one, blocking
callables have the other. Its green context is made current by its worker thread alone (a green
context may be current on one thread at a time), so everything that needs it current (streams,
events) is made at its birth, before anybody else knows it. A third track, for copies
beside the launches, is on the primary context, and made when first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from greensched._cleanup import run_all
from greensched.context import Context
from greensched.device.device import Device
from greensched.device.launch import KernelArguments, LaunchConfig, PreparedLaunch, check_limits
from greensched.device.resources import (
    ContextOptions,
    SMResource,
    WorkqueueResource,
    max_cluster_size,
)
from greensched.device.staging import ChunkedCopier, StagingPool
from greensched.device.streams import EventTicketedStream, TicketedStream
from greensched.device.tickets import TicketMemory
from greensched.kernels import Kernel

#: Jobs in flight on a track at most, so that no launch ever blocks: a driver's launch queue is
#: seen to hold about 1,000 (docs/completion.md), and a job is up to three entries.
DEPTH = 256
#: Launches made ready that a lane keeps; beyond, it starts anew.
PLANS = 256
#: Of bound launches that are over, of each kind: more are rarely bound at once in one lease.
SPARE = 8


class Lane:
    """A partition as it exists on the device, whoever leases it.

    Args:
        device: where.
        resources: the SMs, outputs of one split, and a work-queue configuration, if any.
        mask: its cells, as planning counts them.
        words: where its tickets are written.
        staging: what its large copies are lent.

    It is made on a thread of ours: that blocks.
    """

    def __init__(
        self,
        device: Device,
        resources: Sequence[SMResource | WorkqueueResource],
        mask: int,
        words: TicketMemory,
        staging: StagingPool,
    ) -> None:
        self.device = device
        self.mask = mask
        self._words = words
        self._staging = staging
        self.context: Context = device.create_context(ContextOptions(resources=resources))
        try:
            sms = self.context.resources.sm
            self.sm_count = sms.sm_count
            #: Blocks of the largest thread-block cluster; 1: no clusters.
            self.max_cluster_size = max_cluster_size(device.compute_capability, sms)
            #: Launches and copies.
            self.launches = words.create_track(self.context)
            #: Blocking callables.
            self.runs = words.create_track(self.context)
            #: The whole green context's work, when a lease ends that used it beyond its tracks.
            self.whole = self.context.create_event()
            #: Of the chunks; kept here, so that they outlive their context where it ends at once.
            self._first = self.context.create_event()
            self._second = self.context.create_event()
            self.chunks = ChunkedCopier(self.launches, (self._first, self._second), staging)
            #: Copies beside the launches, and their chunks; made when first needed.
            self.copies: TicketedStream | None = None
            self.beside: ChunkedCopier | None = None
        except BaseException:
            self.context.close()  # and with it whatever was made
            raise
        #: Launches made ready, by kernel and geometry; their values are set at each launch.
        self.plans: dict[tuple[Kernel, LaunchConfig], PreparedLaunch] = {}
        #: Those of bound launches that are over, for the next that binds the same.
        self.spare: dict[tuple[Kernel, LaunchConfig], list[PreparedLaunch]] = {}
        #: Kernels that were loaded for these SMs, or launched on them: no launch blocks any more.
        self.loaded: set[Kernel] = set()
        #: Jobs in flight on a track at most.
        self.depth = min(DEPTH, EventTicketedStream.DEPTH - 1) if self.uses_events else DEPTH

    @property
    def uses_events(self) -> bool:
        """Whether its tickets are events, because its driver's streams cannot write words."""
        return isinstance(self.launches, EventTicketedStream)

    @property
    def tracks(self) -> tuple[TicketedStream, ...]:
        """All of them."""
        both = self.launches, self.runs
        return both if self.copies is None else (*both, self.copies)

    @property
    def is_idle(self) -> bool:
        """Whether every ticket issued is reached."""
        return all(track.is_idle for track in self.tracks)

    def new_copies(self) -> TicketedStream:
        """A track for copies beside the launches; whoever asked publishes it. Blocks.

        Its stream is the primary's: a copy engine moves the bytes, and no SM.
        """
        primary = self.device.primary
        with ExitStack() as undo:
            track = self._words.create_track(primary)
            undo.callback(track.close)
            first = primary.create_event()
            undo.callback(first.close)
            second = primary.create_event()
            undo.pop_all()
        self.beside = ChunkedCopier(track, (first, second), self._staging)
        return track

    def load(self, kernel: Kernel) -> None:
        """Compiles and loads a kernel for these SMs, whose context must be current. Blocks."""
        self.device.loader.load(kernel)
        self.loaded.add(kernel)

    def plan(self, kernel: Kernel, config: LaunchConfig) -> PreparedLaunch | None:
        """A launch made ready, and kept; None: the kernel was never loaded here. Never blocks.

        Raises:
            InvalidLaunch, CUDAError: the kernel cannot be launched so.
        """
        plan = self.plans.get((kernel, config))
        if plan is None and kernel in self.loaded:
            plan = self.new_plan(kernel, config, KernelArguments(kernel, self.device.ordinal))
            if len(self.plans) >= PLANS:
                self.plans.clear()
            self.plans[kernel, config] = plan
        return plan

    def keep(self, plan: PreparedLaunch) -> None:
        """A bound launch is over: its plan is for the next; of each kind a few are kept."""
        left = self.spare.get(plan.kind)
        if left is None:
            if len(self.spare) >= PLANS:
                self.spare.clear()
            left = self.spare[plan.kind] = []
        if len(left) < SPARE:
            plan.arguments.buffers.clear()  # it keeps nobody's memory
            left.append(plan)

    def new_plan(
        self, kernel: Kernel, config: LaunchConfig, arguments: KernelArguments
    ) -> PreparedLaunch:
        """A launch of a kernel that has its handle, with arguments of its own. Never blocks."""
        handle = self.device.loader.loaded(kernel)
        assert handle is not None
        check_limits(kernel, handle, config, self.device.facts, self.device.driver)
        return PreparedLaunch(self.launches.stream, config, kernel, handle, arguments)

    def fail(self, fault: BaseException) -> None:
        """After a device fault, or the end of the pool over it, no ticket is waited for."""
        for track in self.tracks:
            track.fault = fault
            track.pass_lagging()

    def close(self) -> None:
        """Ends everything in order; its work is done. Blocks.

        Raises:
            CUDAError: what the driver answered; everything was tried all the same.
        """
        run_all(
            (
                self.chunks.close,
                *(() if self.beside is None else (self.beside.close,)),
                self.whole.close,
                *(track.close for track in self.tracks),
                self.context.close,
            )
        )

    def __repr__(self) -> str:
        return f"<Lane: {self.sm_count} SMs of device {self.device.ordinal}, cells {self.mask:b}>"
