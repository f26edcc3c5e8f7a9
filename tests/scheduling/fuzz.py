"""Run random programs of three to six classes under every policy, and count what went wrong.

    python -m tests.scheduling.fuzz --programs 1000
    python -m tests.scheduling.fuzz --seed 402 --policy sized     # one program again

Each is compared with the same work on fixed partitions, first in, first out. Counted are:

- *locked*: requests wait at the end, and nothing will happen any more;
- *free*: a request waits although the scheduler grants it when asked once more;
- *starved*: a request waited longer than 0.3 s and twice as long as any on fixed partitions;
- *below*: of the highest class with a target more than 2 %, and more than one request, fewer were
  in time than on fixed partitions; *tied*, if another class has its priority.

None is locked. Others remain, here counted under `fifo`, `fair`, `deadline` and `sized`:

| programs       | starved    | below      | tied       |
|----------------|------------|------------|------------|
| 0 to 999       | 0, 0, 0, 0 | 1, 1, 1, 0 | 4, 2, 2, 1 |
| 50000 to 50924 | 0, 0, 1, 0 | 2, 2, 2, 3 | 2, 2, 1, 2 |

Programs up to 49999 were used while the scheduler was changed, later ones seldom. The seeds that
remain are: starved under `deadline` 50673; below under `sized` 50432, 50684 and 50766, under the
others 346, 50741 and 50919; tied 162, 391, 530, 568, 50611, 50638 and 50913. In 346 leases of one
class give way to each other, so that all of them are late; where they did not, others would be.

Of 60,100 further programs (from 100000 and from 150000 on), to which nothing was fitted, 56, 60, 82
and 19 are starved, 114, 117, 116 and 92 below, 85, 92, 40 and 53 tied, and 12, 9, 10 and 0 free:
under `fifo` for example 105832 and 107150.

It exits with 1 on all but *below* and *tied*.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict

from greensched.scheduling.policy import POLICIES

from .programs import Execution, Locked, Outcome, Program, draw, partitions, run

#: Seconds of waiting that no program is called starved for.
PATIENCE = 0.3
#: Seeds printed of each kind.
SHOWN = 8


class WaitsForFree(Exception):
    """A request waits that the scheduler grants when asked once more."""


def ask_again(execution: Execution) -> None:
    """Raise `WaitsForFree` if a request waits that is granted when asked once more."""
    if execution.waiting:
        again = execution.scheduler.dispatcher.dispatch(execution.now)
        if again:
            raise WaitsForFree(f"{again} waited")


def faults(program: Program, policy: str, base: dict[str, Outcome]) -> list[str]:
    """Run a program under a policy, and return what went wrong."""
    try:
        outcomes = run(program, policy, check=ask_again)
    except WaitsForFree:
        return ["free"]
    except Locked:
        return ["locked"]
    except Exception as error:
        error.add_note(f"seed {program.seed}, policy {policy}")
        raise
    found = []
    waits = [max(one.longest_wait for one in each.values()) for each in (outcomes, base)]
    if waits[0] > max(PATIENCE, 2 * waits[1]):
        found.append("starved")
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
    """Run the programs and print the counts; return 1 if any was locked, free or starved."""
    parser = argparse.ArgumentParser(prog="python -m tests.scheduling.fuzz")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--policy", choices=sorted(POLICIES), help="run one program of one policy")
    args = parser.parse_args(argv)
    if args.policy:
        program = draw(args.seed)
        base, outcomes = partitions(program), run(program, args.policy, check=ask_again)
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
