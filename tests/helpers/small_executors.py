"""Pools with few executors: few prebuilt ones, and few of other shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from greensched import Pool
from greensched.scheduling.cells import DeviceCells


def one_cell_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prebuild executors over each cell, over all but one, and over everything; no others."""

    def menu(cells: DeviceCells, _: int) -> list[int]:
        each = [1 << number for number in range(cells.count)]
        most = [cells.complement(mask) for mask in each]
        return [cells.full_mask, *each, *(mask for mask in most if cells.possible(mask))]

    monkeypatch.setattr(DeviceCells, "menu", menu)


def at_most(pool: Pool, executors: int) -> Pool:
    """Limit the executors of each device of a pool that is not open yet."""
    pool._lifecycle.options = replace(pool._lifecycle.options, max_executors=executors)
    return pool
