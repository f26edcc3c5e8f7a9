"""`pool.verify()`: what it sees and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from greensched import Pool, VerificationFailed
from greensched.driver import simulated
from greensched.driver.simulated import PRESETS
from greensched.kernels import smids
from greensched.leasing.verification import Verification


def verified(gpcs: tuple[int, ...]) -> Verification:
    """Verify a simulated device with these GPCs."""

    async def main() -> Verification:
        driver = simulated.open([replace(PRESETS["h200"], gpcs=gpcs)])
        async with Pool(driver=driver) as pool:
            return await pool.verify()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("gpcs", "seen"),
    [
        ((8,), [(8,)]),
        ((8, 8), [(8, 8), (8, 8)]),
        ((8, 8, 4), [(8, 8), (8, 12)]),
        ((12,), [(8,), (8, 4)]),
    ],
)
def test_every_device_can_be_verified(gpcs: tuple[int, ...], seen: list[Any]) -> None:
    """Single cells, several cells and the remainder are seen apart."""
    found = verified(gpcs).seen
    assert [tuple(len(sms) for sms in sets) for _, sets in found] == seen


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        (lambda sms: sms[:-1], "but ran on 7"),
        (lambda sms: (*sms, 63), "but ran on 9"),
        (lambda sms: (), "but ran on 0"),
        (lambda sms: range(len(sms)), "partitions of device 0 share SMs"),
    ],
    ids=["fewer", "more", "none", "shared"],
)
def test_what_ran_elsewhere_is_not_verified(
    claims: Callable[[tuple[int, ...]], Iterable[int]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel on more, fewer or other SMs than its partition's is reported."""

    def claim(launch: Any, seen: Any, _ns: Any) -> None:
        for sm in claims(launch.sms):
            seen[sm // 32] |= seen.dtype.type(1 << sm % 32)

    monkeypatch.setattr(smids.spec, "reference", claim)
    with pytest.raises(VerificationFailed, match=said):
        verified((8, 8))
