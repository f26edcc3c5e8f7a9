"""`python -m benchmarks.model [WORKLOAD ...]`: predict measured figures again.

Writes `predicted.csv` in `src/greensched/capacity`, in the order of `measured.csv`, and prints
every row. Figures of workloads that are not named stay as they are. Without a name, published
figures follow; the whole run takes about five minutes of a core.
"""

from __future__ import annotations

import csv
import sys

from benchmarks.model import checks, lines, prediction
from greensched.capacity import measured
from greensched.capacity.measured import Ranking, Row

#: Why a group of rows, by the first word of the arm, is predicted badly.
REASONS = {
    ("engine", "streams"): "a step waits less for kernels of a prompt than modelled",
    ("engine", "priority"): "a step waits less for kernels of a prompt than modelled",
    ("engine", "chunked"): "near saturation a pass that is 5 % shorter halves the wait",
    ("engine", "split"): "near saturation a prompt that is 5 % longer doubles the wait",
    ("torch", "streams"): "more of a pass fits beside the last wave of each product than modelled",
    ("W2", "streams"): "overloaded: what waits grows with the slice, whose length is inferred",
}


def main(workloads: list[str]) -> None:
    """Write the predictions, and print the table.

    Raises:
        SystemExit: A workload was not measured; nothing is written.
    """
    known = {row.key[1] for row in measured.inputs_and_rows()}
    if unknown := set(workloads) - known:
        sys.exit(
            f"no workload {', '.join(sorted(unknown))}: give some of {', '.join(sorted(known))}"
        )
    before = {
        row.key: row.predicted
        for row in measured.inputs_and_rows()
        if row.predicted is not None and workloads and row.key[1] not in workloads
    }
    found = before | dict(prediction.predict(workloads, _show))
    keys = [row.key for row in measured.inputs_and_rows() if row.key in found]
    with measured.PREDICTED.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*measured.KEYS, "value"])
        writer.writerows([*key, f"{found[key]:.5g}"] for key in keys)
    measured.rows.cache_clear()
    measured.inputs_and_rows.cache_clear()
    sys.stdout.write("\n".join(table()) + "\n")
    if not workloads:
        sys.stdout.write("\n".join(["", *lines(checks())]) + "\n")


def table() -> list[str]:
    """Return the summary, every row, and every pair of arms in the wrong order."""
    found = measured.rows()
    titles = f"{'figure':58} {'measured':>10} {'predicted':>10}"
    wrong = [_wrong(pair) for pair in measured.rankings(found) if not pair.is_right]
    return [*measured.summary(), "", titles, *map(line, found), "", "in the wrong order:", *wrong]


def line(row: Row) -> str:
    """Format one figure; what is off by more than a quarter says so, and why if that is known."""
    name = ", ".join(row.key)
    found = "-" if row.predicted is None else f"{row.predicted:.4g}"
    marks = " (fitted)" if row.is_fitted else ""
    reason = REASONS.get((row.key[1], row.key[3].split(" ")[0]), "")
    if not row.is_within:
        marks += f"  off{': ' + reason if reason else ''}"
    return f"{name:58} {row.value:10.4g} {found:>10}{marks}"


def _wrong(pair: Ranking) -> str:
    gpu, workload, case, arm, figure = pair.better.key
    return f"{gpu}, {workload}, {case}, {figure}: {arm} measured better than {pair.worse.key[3]}"


def _show(what: str) -> None:
    sys.stderr.write(what + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
