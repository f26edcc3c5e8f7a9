"""`python -m greensched.capacity.validation [WORKLOAD ...]`: predict measured figures again.

Writes `predicted.csv` next to `measured.csv`, in the same order, and prints every row. Figures of
workloads that are not named stay as they are. Without a name, published figures follow; the
whole run takes about five minutes of a core.
"""

from __future__ import annotations

import csv
import sys

from greensched.capacity.validation import checks, lines, measured, prediction


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
    sys.stdout.write("\n".join(measured.table()) + "\n")
    if not workloads:
        sys.stdout.write("\n".join(["", *lines(checks())]) + "\n")


def _show(what: str) -> None:
    sys.stderr.write(what + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
