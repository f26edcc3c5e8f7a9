"""What the pools of a process keep for later pools, for tests that judge what is left."""

from __future__ import annotations

from greensched.driver.interface import Driver


def destroy_kept(driver: Driver) -> None:
    """Destroy every kept green context and stream, which nothing uses any more."""
    for device in range(driver.device_count()):
        kept = [context for key, context in driver.kept._contexts.items() if key[1] == device]
        driver.kept.forget(device)
        for context in kept:
            for stream in context.streams:
                driver.destroy_stream(stream)
            driver.destroy_green(context.green)
