"""Objects that represent device state can be neither copied nor pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import anyio
import pytest

import greensched
from greensched import LaunchConfig, Pool
from greensched.kernels import spin

ONE = LaunchConfig(grid=1, block=1)


def current() -> greensched.Stream:
    return greensched.current_call().stream


@pytest.mark.fault("D18")
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_objects_of_a_device_are_not_copied(how: Callable[[object], object]) -> None:
    """Each is refused with an alternative, and works and closes as before."""

    async def main() -> None:
        async with Pool(driver="simulated:h20", prepare=[spin]) as pool, pool.partition(8) as p:
            bound, buffer = p.bind(ONE, spin, 1000), await p.empty(4)
            graph = await p.capture(lambda: greensched.launch(current(), ONE, spin, 1000))
            objects = [pool, p, pool.partition(8), pool.partitions(8, 8), pool.sync]
            objects += [p.launch(ONE, spin, 1000), bound, bound.submit(), buffer, graph]
            objects += [pool.devices[0], pool.devices[0].primary, p.context, p.stream]
            for one in objects:
                with pytest.raises(greensched.NotCopyable, match="open a pool in the other") as no:
                    how(one)
                assert isinstance(no.value, TypeError)
                assert no.value.kind == type(one).__name__
            buffer.close()
            await p.launch(ONE, spin, 1000)
        with pytest.raises(greensched.NotCopyable):
            how(p)

    anyio.run(main)
