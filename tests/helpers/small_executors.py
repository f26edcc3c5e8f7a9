"""A menu of lanes so short that a lease of another size lacks one."""

from __future__ import annotations

import pytest

from greensched.scheduling.cells import DeviceCells


def one_cell_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools make lanes over each cell, over all but one, and over everything; no others."""

    def menu(cells: DeviceCells, _: int) -> list[int]:
        each = [1 << number for number in range(cells.count)]
        most = [cells.complement(mask) for mask in each]
        return [cells.every, *each, *(mask for mask in most if cells.possible(mask))]

    monkeypatch.setattr(DeviceCells, "menu", menu)
