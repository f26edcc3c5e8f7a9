"""The CUDA driver, assembled from its parts."""

from __future__ import annotations

from typing import ClassVar

from greensched.driver.cuda import init
from greensched.driver.cuda.contexts import Contexts
from greensched.driver.cuda.devices import Devices
from greensched.driver.cuda.memory import Memory
from greensched.driver.cuda.modules import Modules
from greensched.driver.cuda.resources import Resources
from greensched.driver.cuda.streams import Streams
from greensched.typing import Feature


class CudaDriver(Devices, Contexts, Resources, Streams, Memory, Modules):
    """CUDA through `cuda.bindings`. All objects are equal, because CUDA belongs to the process.

    Nothing here handles fork: in a forked child every driver call fails with NOT_INITIALIZED at
    best, and the packages above refuse earlier.
    """

    name: ClassVar[str] = "cuda"
    needs_binary: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._features: dict[Feature, bool] = {}
        self._version: tuple[int, int] | None = None
        self._initialised = False

    def initialise(self) -> None:
        """Call `cuDriverGetVersion`, then `cuInit`. After a failure it can be called again."""
        if not self._initialised:
            init.initialise()
            self._initialised = True

    @property
    def version(self) -> tuple[int, int]:
        """The newest CUDA version that the driver supports. Needs no `initialise`."""
        if self._version is None:
            number = init.driver_version()
            self._version = (number // 1000, number % 1000 // 10)
        return self._version

    def supports(self, feature: Feature) -> bool:
        """Say whether driver and wheel both have a feature. Needs no `initialise`."""
        known = self._features.get(feature)
        if known is None:
            known = self._features[feature] = init.has_feature(feature)
        return known
