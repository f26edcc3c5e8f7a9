"""Run random programs of three to six classes under every policy, and count what went wrong.

    python -m tests.scheduling.fuzz --programs 1000
    python -m tests.scheduling.fuzz --seed 402 --policy sized     # one program again

Each is compared with the same work on fixed partitions, first in, first out. Counted are:

- *locked*: requests wait at the end, and nothing will happen any more;
- *free*: a request waits although the scheduler grants it when asked once more;
- *overdue*: a request waited longer than its bound in its turn;
- *starved*: a request waited longer than 0.3 s and twice as long as any on fixed partitions, and
  longer than its bound while those of smaller rank left it its SMs;
- *below*: of the highest class with a target more than 2 %, and more than one request, fewer were
  in time than on fixed partitions; *tied*, if another class has its priority.

The bound is the ageing, and one interval between checkpoints of each class. A request is in its
turn while the device has its SMs beyond what reserves keep from it, what leases of smaller rank
hold, and what the requests before it need. Other time does not count: no scheduler that keeps to
the order of the policy can serve a class while higher ones use the device, or under `deadline` a
late request before those that may be in time. Nor does time count for which the device is kept for
an aged request that still waits for leases of smaller rank with a known end: these do not give way,
and an aged request would wait for ever if others took what it waits for.

For *starved*, requests of its own rank do not count, so that it is found if a lower lease keeps
what a whole class waits for. Both waits are of one request: behind many of its own class one
exceeds its bound, and while higher classes use the device another exceeds 0.3 s, without a fault.

None is locked or free of the 12,000 programs from 400000 on, to which nothing was fitted. Counted
under `fifo`, `fair`, `deadline` and `sized` are:

| overdue    | starved    | below          | tied          |
|------------|------------|----------------|---------------|
| 3, 1, 1, 1 | 0, 0, 0, 1 | 23, 22, 23, 14 | 12, 17, 4, 12 |

What is left:

- 403702: a lease that gave way is served by arrival, so it waits for each late request that arrived
  before;
- 400261, 406180, 408348: it waits for two leases of one class, which each have a turn by arrival;
- 405732: late requests take their minimum of 2 SMs, reach no checkpoint for 98 ms, and leave too
  little for the next request;
- 322974: a lease of the request's own class seems to have SMs to give back and reaches no
  checkpoint, so that leases without an end of its rank do not give way.

In all 23 below under `fifo`, and 8 of the 14 under `sized`, the highest class asks for a new lease
of one size for each of several pieces, and each late request of it would be in time without its
waits between pieces.

It exits with 1 on all but *below* and *tied*.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import defaultdict
from itertools import groupby
from operator import itemgetter

from greensched.scheduling.class_state import ClassState
from greensched.scheduling.policy import POLICIES, Fair, Fifo
from greensched.scheduling.requests import Request

from .programs import Execution, Locked, Outcome, Program, Task, draw, partitions, run

#: Seconds of waiting that no program is called starved for.
PATIENCE = 0.3
#: Seeds printed of each kind.
SHOWN = 8


class WaitsForFree(Exception):
    """A request waits that the scheduler grants when asked once more."""


class Waits:
    """Called after each event: asks again, and adds up for how long requests wait in their turn.

    Attributes:
        by_rank: For each request, the seconds for which those of smaller rank left it its SMs.
        in_turn: The same, if those of its rank that precede it count with them, while the device is
            not kept for an aged request that waits for the known end of leases.
        total: For each request, the seconds of its wait.
        bound: The ageing, and for each class one interval between checkpoints.
    """

    def __init__(self) -> None:
        self.by_rank = defaultdict[tuple[Task, float], float](float)
        self.in_turn = defaultdict[tuple[Task, float], float](float)
        self.total = defaultdict[tuple[Task, float], float](float)
        self.bound = math.inf
        self._since = 0.0
        self._counted: list[tuple[defaultdict[tuple[Task, float], float], Task]] = []

    def __call__(self, execution: Execution) -> None:
        """Count the time since the last event.

        Raises:
            WaitsForFree: A request waits that is granted when asked once more.
        """
        for waits, task in self._counted:
            waits[task, task.asked] += execution.now - self._since
        self._since, self._counted = execution.now, []
        if not execution.waiting:
            return
        again = execution.scheduler.dispatcher.dispatch(execution.now)
        if again:
            raise WaitsForFree(f"{again} waited")
        self.bound = execution.policy.ageing + execution.intervals
        ranked = sorted((rank_of(execution.policy, x.request), x.request.order, x)
                        for x in execution.waiting)  # fmt: skip
        wanted, is_kept = 0, is_kept_for_aged(execution)
        for rank, group in groupby(ranked, key=itemgetter(0)):
            tasks = [task for _, _, task in group]
            before = wanted
            total = sum(task.request.fewest for task in tasks)
            for task in tasks:
                self._counted.append((self.total, task))
                fewest = task.request.fewest
                left = left_to(execution, task.request, rank)
                if left - before >= fewest:
                    self._counted.append((self.by_rank, task))
                # `fair` serves classes of one rank by their shares, not by arrival.
                earlier = before + total - fewest if isinstance(execution.policy, Fair) else wanted
                if left - earlier >= fewest and not is_kept:
                    self._counted.append((self.in_turn, task))
                wanted += fewest


def rank_of(policy: Fifo, request: Request) -> tuple[float, ...]:
    """Return the rank of a request. Under `fair` a late one keeps the rank of its class."""
    if isinstance(policy, Fair):
        return (-request.class_state.priority,)
    return policy.rank(request)


def is_kept_for_aged(execution: Execution) -> bool:
    """Say whether the device is kept for a request that waits for the known end of leases.

    These are of smaller rank. Others give way to it at their next checkpoint.
    """
    reservation = execution.scheduler.queue.reservation
    if reservation is None:
        return False
    request, allocator = reservation.request, execution.scheduler.allocator
    rank, cells = rank_of(execution.policy, request), allocator.devices[0]
    count, _ = allocator.reservations[0].available_for(cells.count, request, request.fewest)
    kept = sum(
        grant.sms
        for grant in allocator.grants[0]
        if rank_of(execution.policy, grant.request) < rank and grant.will_end(execution.now)
    )
    return count * cells.size + cells.remainder - kept < request.fewest


def left_to(execution: Execution, request: Request, rank: tuple[float, ...]) -> int:
    """Return the SMs that reserves, and leases of smaller rank, leave to a waiting request."""
    allocator = execution.scheduler.allocator
    cells, reservations = allocator.devices[0], allocator.reservations[0]
    count, _ = reservations.available_for(cells.count, request, request.fewest)
    left = count * cells.size + cells.remainder
    behind = defaultdict[ClassState, int](int)
    for grant in allocator.grants[0]:
        if rank_of(execution.policy, grant.request) < rank:
            left -= grant.sms
        elif grant.class_state is not request.class_state:
            behind[grant.class_state] += grant.sms
    return left - sum(min(n, state.reserve_cells * cells.size) for state, n in behind.items())


def faults(program: Program, policy: str, base: dict[str, Outcome]) -> list[str]:
    """Run a program under a policy, and return what went wrong."""
    waits = Waits()
    try:
        outcomes = run(program, policy, check=waits)
    except WaitsForFree:
        return ["free"]
    except Locked:
        return ["locked"]
    except Exception as error:
        error.add_note(f"seed {program.seed}, policy {policy}")
        raise
    found = []
    patience = max(PATIENCE, 2 * max(one.longest_wait for one in base.values()))
    if any(x > waits.bound and waits.total[key] > patience for key, x in waits.by_rank.items()):
        found.append("starved")
    if max(waits.in_turn.values(), default=0.0) > waits.bound:
        found.append("overdue")
    if program.highest is not None:
        name = program.highest.rules.name
        less = base[name].in_time - outcomes[name].in_time
        if less > max(1.0, 0.02 * base[name].requests):
            equal = [
                x for x in program.traffic if x.rules.priority >= program.highest.rules.priority
            ]
            found.append("below" if len(equal) == 1 else "tied")
    return found


def main(argv: list[str]) -> int:
    """Run the programs and print the counts; return 1 if any but *below* and *tied* is found."""
    parser = argparse.ArgumentParser(prog="python -m tests.scheduling.fuzz")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--policy", choices=sorted(POLICIES), help="run one program of one policy")
    args = parser.parse_args(argv)
    if args.policy:
        program = draw(args.seed)
        base, outcomes = partitions(program), run(program, args.policy, check=Waits())
        for one in program.traffic:
            name = one.rules.name
            print(
                one, f"  {args.policy}: {outcomes[name]}", f"  partitions: {base[name]}", sep="\n"
            )
        return 0
    seeds, began = defaultdict[tuple[str, str], list[int]](list), time.time()
    for seed in range(args.seed, args.seed + args.programs):
        program = draw(seed)
        base = partitions(program)
        for policy in POLICIES:
            for fault in faults(program, policy, base):
                seeds[policy, fault].append(seed)
    rate = args.programs / (time.time() - began)
    print(f"{args.programs} programs from seed {args.seed} under {len(POLICIES)} policies: "
          f"{rate:.0f} programs/s")  # fmt: skip
    for (policy, fault), some in sorted(seeds.items()):
        print(f"  {policy} {fault}: {len(some)}, seeds {some[:SHOWN]}")
    return int(any(fault not in {"below", "tied"} for _, fault in seeds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
