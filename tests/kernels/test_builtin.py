"""The built-in kernels' references against naive ones in float64, and their costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from greensched import kernels
from greensched.kernels import Kernel
from greensched.typing import Cost, DeviceFacts, LaunchFacts

from .builtin import BUILTIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Launch = Callable[..., LaunchFacts]

RANDOM = np.random.default_rng(20_250_101)


def floats(*shape: int) -> NDArray[np.float32]:
    return RANDOM.standard_normal(shape, np.float32)


def typed(kernel: Kernel, arguments: tuple[Any, ...]) -> list[Any]:
    """Return the arguments as a driver passes them: scalars as numpy scalars."""
    return [
        value if parameter.pointer else np.dtype(parameter.dtype).type(value)
        for parameter, value in zip(kernel.parameters, arguments, strict=True)
    ]


def run(kernel: Kernel, launch: LaunchFacts, *arguments: Any) -> None:
    assert kernel.spec.reference is not None
    kernel.spec.reference(launch, *typed(kernel, arguments))


def cost(kernel: Kernel, launch: LaunchFacts, *arguments: Any) -> Cost:
    assert kernel.spec.cost is not None
    return kernel.spec.cost(launch, *typed(kernel, arguments))


@pytest.fixture(scope="session")
def launch(facts: DeviceFacts) -> Launch:
    """Make the facts of a launch of so many blocks of so many threads on some SMs."""

    def make(
        blocks: int = 1024, threads: int = 256, sms: int = 132, shared: int = 0
    ) -> LaunchFacts:
        return LaunchFacts((blocks, 1, 1), (threads, 1, 1), shared, facts, tuple(range(sms)))

    return make


def alone_ns(cost: Cost, launch: LaunchFacts) -> float:
    """Return the time that `Cost` gives for a kernel alone on its SMs of an H200."""
    usable = launch.grid[0] if cost.sms is None else cost.sms
    return cost.fixed_ns + max(
        cost.sm_ns / min(len(launch.sms), usable), cost.dram_bytes / 4.8e12 * 1e9
    )


@pytest.mark.parametrize("kernel", BUILTIN, ids=lambda kernel: kernel.name)
def test_a_built_in_kernel_is_complete(kernel: Kernel) -> None:
    """Each is exported under its name and has a reference and a cost, so it can be simulated."""
    assert getattr(kernels, kernel.name) is kernel
    assert kernel.name in kernels.__all__
    assert kernel.spec.reference is not None
    assert kernel.spec.cost is not None


# -- arrays -----------------------------------------------------------------------------------


def test_fill(launch: Launch) -> None:
    """`fill` sets the first n items and no others."""
    out = floats(12)
    rest = out[10:].copy()
    run(kernels.fill, launch(), out, 2.5, 10)
    assert (out[:10] == 2.5).all()
    assert (out[10:] == rest).all()


def test_saxpy(launch: Launch) -> None:
    """`saxpy` sets y to a * x + y for the first n items, and does not change x."""
    x, y = floats(12), floats(12)
    before, expected = x.copy(), y.astype(np.float64)
    expected[:10] += 2.5 * x[:10].astype(np.float64)
    run(kernels.saxpy, launch(), 2.5, x, y, 10)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    assert (x == before).all()


def test_reduce_sum(launch: Launch) -> None:
    """`reduce_sum` adds the sum of the first n items to out[0] and changes nothing else."""
    x, out = floats(100_003), np.array([5, 7], np.float32)
    run(kernels.reduce_sum, launch(), x, out, 100_000)
    np.testing.assert_allclose(out, [5 + x[:100_000].sum(dtype=np.float64), 7], rtol=1e-4)


def test_nothing_to_do(launch: Launch) -> None:
    """With n = 0 nothing is changed, and the cost is 0."""
    x, y = floats(3), floats(3)
    expected = y.copy()
    run(kernels.saxpy, launch(), 2, x, y, 0)
    run(kernels.fill, launch(), y, 2, 0)
    run(kernels.reduce_sum, launch(), x, y, 0)
    assert (y == expected).all()
    assert alone_ns(cost(kernels.saxpy, launch(), 2, x, y, 0), launch()) == 0


# -- blur -------------------------------------------------------------------------------------


def naive_blur(image: NDArray[np.float32], sigma: float) -> NDArray[np.float64]:
    """Return a weighted sum over a square of pixels, with clamped edges."""
    radius = min(int(np.ceil(np.float32(3) * np.float32(sigma))), 64) if sigma > 0 else 0
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (offsets / float(np.float32(sigma))) ** 2) if radius else np.ones(1)
    weights /= weights.sum()
    rows, columns = (np.arange(size) for size in image.shape[:2])
    result = np.zeros(image.shape)
    for dy, down in zip(offsets, weights, strict=True):
        for dx, across in zip(offsets, weights, strict=True):
            y = np.clip(rows + dy, 0, image.shape[0] - 1)
            x = np.clip(columns + dx, 0, image.shape[1] - 1)
            result += down * across * image[y][:, x]
    return result


@pytest.mark.parametrize(
    ("shape", "sigma"),
    [
        ((64, 64, 1), 5.0),
        ((150, 70, 1), 3.3),
        ((70, 150, 3), 1.0),
        ((1, 9, 2), 2.0),
        ((9, 1, 1), 0.1),
        ((5, 40, 1), 30.0),
        ((20, 20, 2), 0.0),
        ((20, 20, 1), -1.0),
        ((20, 20, 1), 1e-20),
        ((6, 7, 1), 1e30),
        ((20, 20, 1), float("nan")),
        ((0, 5, 1), 2.0),
    ],
)
def test_gaussian_blur(launch: Launch, shape: tuple[int, int, int], sigma: float) -> None:
    """The separable reference is the two-dimensional definition, whatever the image's shape."""
    image, size = floats(*shape), np.prod(shape)
    result = floats(int(size) + 3)
    rest = result[size:].copy()
    run(kernels.gaussian_blur, launch(), image.ravel(), result, *shape, sigma)
    np.testing.assert_allclose(result[:size].reshape(shape), naive_blur(image, sigma), atol=1e-4)
    assert (result[size:] == rest).all()


def test_a_blur_keeps_what_is_even(launch: Launch) -> None:
    """A uniform image is unchanged, at its edges too."""
    image, result = np.full(300 * 20, 3.0, np.float32), np.zeros(300 * 20, np.float32)
    run(kernels.gaussian_blur, launch(), image, result, 300, 20, 1, 7.0)
    np.testing.assert_allclose(result, 3.0, rtol=1e-5)


# -- matmul -----------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.parametrize(("m", "n", "k"), [(33, 65, 17), (1, 1, 1), (8, 4, 0)])
def test_matmul(launch: Launch, m: int, n: int, k: int, passes: int) -> None:
    """`matmul` gives the product multiplied by the number of passes, and writes nothing beyond."""
    a, b, c = floats(m * k), floats(k * n), floats(m * n + 2)
    rest = c[m * n :].copy()
    run(kernels.matmul, launch(), a, b, c, m, n, k, passes)
    product = a.reshape(m, k).astype(np.float64) @ b.reshape(k, n).astype(np.float64)
    np.testing.assert_allclose(c[: m * n].reshape(m, n), passes * product, rtol=1e-4, atol=1e-4)
    assert (c[m * n :] == rest).all()


def test_matmul_leaves_its_operands(launch: Launch) -> None:
    """`matmul` only reads a and b."""
    a, b, c = floats(12), floats(12), floats(9)
    before = a.copy(), b.copy()
    run(kernels.matmul, launch(), a, b, c, 3, 3, 4, 2)
    assert (a == before[0]).all()
    assert (b == before[1]).all()


# -- probes -----------------------------------------------------------------------------------


def test_smids_sees_the_launchs_sms(launch: Launch, facts: DeviceFacts) -> None:
    """The bit of each of the launch's SMs is set, and earlier bits stay."""
    sms = (0, 5, 31, 32, 131)
    seen = np.zeros(6, np.uint32)
    seen[0] = 2
    run(kernels.smids, LaunchFacts((264, 1, 1), (1024, 1, 1), 0, facts, sms), seen, 1000)
    bits = {32 * word + bit for word in range(6) for bit in range(32) if seen[word] >> bit & 1}
    assert bits == {1, *sms}


def test_smids_sees_no_more_sms_than_blocks(launch: Launch) -> None:
    """Three blocks run on three SMs."""
    seen = np.zeros(5, np.uint32)
    run(kernels.smids, launch(blocks=3), seen, 1000)
    assert seen.tolist() == [0b111, 0, 0, 0, 0]


def test_spin_and_latch_touch_nothing(launch: Launch) -> None:
    """Spin has no effect, and latch only reads its word."""
    word = np.array([7], np.uint32)
    run(kernels.spin, launch(), 1000)
    run(kernels.latch, launch(), word, 0)
    assert word.tolist() == [7]


@pytest.mark.parametrize(
    ("blocks", "threads", "sms", "shared", "rounds"),
    [
        (1, 32, 132, 0, 1),
        (132 * 8, 256, 132, 0, 1),
        (132 * 8 + 1, 256, 132, 0, 2),
        (8 * 32, 32, 8, 0, 1),  # 32 blocks an SM, however small they are
        (8 * 32 + 1, 32, 8, 0, 2),
        (8, 1024, 2, 0, 2),
        (8, 32, 2, 200_000, 4),  # shared memory for one block an SM
    ],
)
def test_blocks_that_wait_do_so_together(
    launch: Launch, blocks: int, threads: int, sms: int, shared: int, rounds: int
) -> None:
    """`spin` and `smids` take their time once for each wave of blocks."""
    facts = launch(blocks, threads, sms, shared)
    assert alone_ns(cost(kernels.spin, facts, 1000), facts) == rounds * 1000
    seen = np.zeros(5, np.uint32)
    assert alone_ns(cost(kernels.smids, facts, seen, 1000), facts) == rounds * 1000


def test_a_latch_ends_with_its_word(launch: Launch) -> None:
    """Its cost reads the word at each call."""
    word = np.zeros(4, np.uint32)
    until = cost(kernels.latch, launch(), word, 0).until
    assert until is not None
    assert not until()
    word[0] = 3
    assert until()


# -- costs ------------------------------------------------------------------------------------


@pytest.fixture
def works() -> dict[str, tuple[Kernel, tuple[Any, ...]]]:
    """Return a large piece of work for each computing kernel."""
    x = np.broadcast_to(np.float32(0), (1 << 24,))
    return {
        "fill": (kernels.fill, (x, 1.0, 1 << 24)),
        "saxpy": (kernels.saxpy, (1.0, x, x, 1 << 24)),
        "reduce_sum": (kernels.reduce_sum, (x, x, 1 << 24)),
        "gaussian_blur": (kernels.gaussian_blur, (x, x, 1024, 1024, 1, 5.0)),
        "matmul": (kernels.matmul, (x, x, x, 2048, 2048, 2048, 3)),
    }


def test_more_sms_are_never_slower(
    launch: Launch, works: dict[str, tuple[Kernel, tuple[Any, ...]]]
) -> None:
    """Every kernel takes less time on 32 SMs than on 8, and no more on 132 than on 64."""
    for kernel, arguments in works.values():
        times = {}
        for sms in (8, 32, 64, 132):
            facts = launch(blocks=4096, sms=sms)
            times[sms] = alone_ns(cost(kernel, facts, *arguments), facts)
        assert times[8] > times[32] > times[64] >= times[132] > 0


def test_memory_and_arithmetic_bound(
    launch: Launch, works: dict[str, tuple[Kernel, tuple[Any, ...]]]
) -> None:
    """On all SMs `saxpy` is bound by memory, and `matmul` by arithmetic."""
    facts = launch(blocks=4096)
    kernel, arguments = works["saxpy"]
    assert alone_ns(cost(kernel, facts, *arguments), facts) == pytest.approx(12 * 2**24 / 4800)
    kernel, arguments = works["matmul"]
    peak = 3 * 2 * 2048**3 / 67e3  # at the data sheet's 67 TFLOP/s, in nanoseconds
    assert peak < alone_ns(cost(kernel, facts, *arguments), facts) < 10 * peak


def test_few_blocks_use_few_sms(launch: Launch) -> None:
    """A kernel uses no more SMs than it has blocks or work for."""
    x = floats(1)
    assert cost(kernels.saxpy, launch(blocks=4), 1.0, x, x, 1 << 20).sms == 4
    assert cost(kernels.saxpy, launch(blocks=400, threads=256), 1.0, x, x, 512).sms == 2
    assert cost(kernels.matmul, launch(blocks=400), x, x, x, 64, 33, 1000, 1).sms == 4
    assert cost(kernels.gaussian_blur, launch(blocks=400), x, x, 16, 16, 3, 1.0).sms == 3


def test_costs_touch_nothing(launch: Launch) -> None:
    """A cost does not change its arguments."""
    x, y, seen = floats(64), floats(64), np.zeros(8, np.uint32)
    for array in (x, y, seen):
        array.flags.writeable = False
    facts = launch()
    cost(kernels.fill, facts, y, 1.0, 64)
    cost(kernels.saxpy, facts, 1.0, x, y, 64)
    cost(kernels.reduce_sum, facts, x, y, 64)
    cost(kernels.gaussian_blur, facts, x, y, 8, 8, 1, 2.0)
    cost(kernels.matmul, facts, x, x, y, 8, 8, 8, 1)
    cost(kernels.smids, facts, seen, 5)
    cost(kernels.latch, facts, seen, 5)


def test_a_blurs_cost_grows_with_its_taps(launch: Launch) -> None:
    """The GPU sums directly, so twice the radius is four times the work."""
    x = floats(1)
    facts = launch()
    narrow = cost(kernels.gaussian_blur, facts, x, x, 1000, 1000, 1, 4.0).sm_ns
    wide = cost(kernels.gaussian_blur, facts, x, x, 1000, 1000, 1, 8.0).sm_ns
    assert wide / narrow == pytest.approx((49 / 25) ** 2)
