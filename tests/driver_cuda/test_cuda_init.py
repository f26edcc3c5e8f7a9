"""The start of the real driver: what is imported when, and how an unusable driver is refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from greensched.driver.blocking import DRIVER_CALLS
from greensched.driver.cuda import errors as cuda_errors
from greensched.driver.cuda.bindings import cuda
from greensched.driver.cuda.driver import CudaDriver
from greensched.driver.interface import Driver
from greensched.typing import Feature

pytestmark = pytest.mark.standin

UNKNOWN = 12345


# -- the whole -------------------------------------------------------------------------------------


def test_every_driver_call_is_there() -> None:
    """The CUDA driver implements every driver call itself, and none stays abstract."""
    own = {name for base in CudaDriver.__mro__ if base is not Driver for name in vars(base)}
    assert not CudaDriver.__abstractmethods__
    assert own >= set(DRIVER_CALLS)


def test_importing_loads_no_wheel(python: Callable[..., str]) -> None:
    """Importing loads neither the wheel nor libcuda; opening loads no libcuda."""
    answer = python(
        """
        import sys
        import greensched.driver.cuda
        assert "cuda.bindings" not in sys.modules
        greensched.driver.cuda.open()
        print("libcuda" in open("/proc/self/maps").read())
        """
    )
    assert answer == "False"


def test_a_missing_wheel_is_reported(python: Callable[..., str]) -> None:
    """If cuda-bindings is missing or too old, open() says what to install."""
    for spoil in (
        "import sys; sys.modules['cuda.bindings'] = None",
        "import cuda.bindings.driver as d; del d.cuCtxSynchronize_v2",
    ):
        answer = python(
            f"""
            {spoil}
            import greensched.driver.cuda, greensched.errors
            try:
                greensched.driver.cuda.open()
            except greensched.errors.DriverUnavailable as error:
                print(error.problem)
            """
        )
        assert "pip install 'cuda-bindings>=13,<14'" in answer


# -- startup ---------------------------------------------------------------------------------------

REFUSED = """
    import greensched.driver.cuda, greensched.errors
    driver = greensched.driver.cuda.open()
    try:
        driver.initialise()
    except greensched.errors.DriverUnavailable as error:
        print(error.problem)
"""


@pytest.mark.fault("C13")
@pytest.mark.parametrize(
    ("variables", "way_out"),
    [
        ({"STUBCUDA_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES"),
        ({"STUBCUDA_DRIVER_VERSION": "12090"}, "CUDA 12.9, but greensched needs 13.0"),
        ({"STUBCUDA_FAIL": "cuInit:*:34"}, "the toolkit's stub"),
        ({"STUBCUDA_FAIL": "cuInit:*:802"}, "nvidia-fabricmanager"),
        ({"STUBCUDA_FAIL": "cuInit:*:803"}, "reboot"),
        ({"STUBCUDA_FAIL": "cuInit:*:804"}, "cuda-compat"),
        ({"STUBCUDA_FAIL": "cuInit:*:999"}, "nvidia-modprobe"),
        ({"STUBCUDA_FAIL": "cuInit:*:3"}, "see nvidia-smi"),
        ({"STUBCUDA_FAIL": f"cuInit:*:{UNKNOWN}"}, f"UNKNOWN_STATUS_{UNKNOWN}"),
    ],
)
def test_an_unusable_driver_is_refused_with_a_way_out(
    python: Callable[..., str], variables: dict[str, str], way_out: str
) -> None:
    """Each unusable driver is refused by one sentence with a remedy."""
    answer = python(REFUSED, **variables)
    assert way_out in answer
    assert "\n" not in answer
    assert ". " not in answer


def test_no_library_is_refused(python: Callable[..., str], tmp_path: Path) -> None:
    """A libcuda that cannot be loaded is reported with what to install."""
    (tmp_path / "libcuda.so.1").write_text("not a library")
    answer = python(REFUSED, LD_LIBRARY_PATH=str(tmp_path))
    assert answer == cuda_errors.NO_LIBRARY


def test_a_foreign_library_is_refused(python: Callable[..., str], tmp_path: Path) -> None:
    """A library without the driver's functions is refused."""
    import _ctypes

    shutil.copy(_ctypes.__file__, tmp_path / "libcuda.so.1")
    answer = python(REFUSED, LD_LIBRARY_PATH=str(tmp_path))
    assert answer == cuda_errors.NOT_A_DRIVER


def test_a_refusal_may_be_tried_again(python: Callable[..., str]) -> None:
    """A driver that becomes ready is used, and initialised once."""
    answer = python(
        """
        import ctypes
        import greensched.driver.cuda, greensched.errors
        driver = greensched.driver.cuda.open()
        try:
            driver.initialise()
        except greensched.errors.DriverUnavailable:
            for _ in range(3):
                driver.initialise()
            print(ctypes.CDLL("libcuda.so.1").stubcuda_calls(b"cuInit"), driver.device_count())
        """,
        STUBCUDA_FAIL="cuInit:1:802",
        STUBCUDA_DEVICES="2",
    )
    assert answer == "2 2"


def test_initialise_asks_for_no_more_than_the_version(
    python: Callable[..., str], tmp_path: Path
) -> None:
    """Initialising calls cuDriverGetVersion and cuInit only, and makes no context."""
    log = tmp_path / "calls"
    python(REFUSED, STUBCUDA_LOG=str(log))
    called = re.findall(r"(cu\w+) -> ", log.read_text())
    assert [name for name in called if not name.startswith("cuGetProcAddress")] == [
        "cuDriverGetVersion",
        "cuInit",
    ]


def test_per_thread_default_streams_change_nothing(python: Callable[..., str]) -> None:
    """Green streams work with the wheel's per-thread default streams."""
    answer = python(
        """
        import greensched.driver.cuda
        driver = greensched.driver.cuda.open()
        driver.initialise()
        driver.set_current(driver.retain_primary(0))
        (group,), _ = driver.split_by_count(driver.device_resource(0), 1, 8)
        green = driver.create_green(driver.describe([group]), 0)
        driver.set_current(driver.green_context(green))
        stream = driver.create_stream(green)
        pool = driver.create_memory_pool(0)
        address = driver.allocate(pool, 64, stream)
        driver.set_bytes(address, 1, 64, stream)
        driver.free(address, stream)
        driver.synchronize_stream(stream)
        print(driver.query_stream(stream))
        """,
        CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM="1",
    )
    assert answer == "True"


def test_version_and_features_are_the_drivers(driver: Driver) -> None:
    """A feature needs the driver's symbol and the wheel's function."""
    assert driver.name == "cuda"
    assert driver.needs_binary
    assert driver.version[0] == 13
    newer = driver.version >= (13, 1) and hasattr(cuda, "cuStreamGetDevResource")
    there = {feature for feature in Feature if driver.supports(feature)}
    since_13_1 = {Feature.STRUCTURED_SPLIT, Feature.WORKQUEUES}
    assert there == (set(Feature) if newer else set(Feature) - since_13_1)
