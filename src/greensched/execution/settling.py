"""Waiting for a lease's work: for room, until nothing is left, and until it is over.

A room of its own, because what awaits is Python in a compiled build, too.
"""

from __future__ import annotations

from greensched.execution.lease import Lease


async def wait_for_room(holding: Lease) -> None:
    """Waits until a bound launch can be submitted, or never will be."""
    launches = holding.crew.lane.launches
    while not holding.make_room() and launches.fault is None:
        await holding.next_room()


async def settle(holding: Lease) -> None:
    """Waits until nothing of the lease runs or is queued, also what comes meanwhile.

    A cancellation changes nothing.
    """
    lane, launches = holding.crew.lane, holding.crew.lane.launches
    while launches.fault is None:
        holding.mark_unmarked()
        for track in lane.tracks:
            last = track.issued
            while not (track.reached(last) or track.fault is not None):
                await holding.completion.wait(track, last)
        last = launches.issued
        if holding.is_exposed:
            await holding.whole_so_far()
            last += 1
        if not holding.unmarked and last == launches.issued and lane.is_idle:
            return


async def wait_until_over(holding: Lease) -> None:
    """Waits for `over`. A cancellation leaves it as it is: it comes all the same."""
    while not holding.is_over:
        await holding.next_over()
