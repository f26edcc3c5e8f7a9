"""Destroy what the pools of a process keep for later pools, for tests of leaks."""

from __future__ import annotations

import pytest

from greensched.driver.interface import Driver


def destroy_kept(driver: Driver) -> None:
    """Destroy every kept green context and stream, which nothing uses any more."""
    # The devices come from what is kept: a test that opened no pool has not initialised the driver.
    for device in {key[1] for key in driver.kept._contexts}:
        kept = [context for key, context in driver.kept._contexts.items() if key[1] == device]
        driver.kept.forget(device)
        for context in kept:
            for stream in context.streams:
                driver.destroy_stream(stream)
            driver.destroy_green(context.green)


def release_primary(driver: Driver) -> None:
    """Destroy what retains the primary context of device 0; skip the test if other code does."""
    destroy_kept(driver)
    if driver.primary_state(0)[1]:
        pytest.skip("another library of this process has made the primary context")
