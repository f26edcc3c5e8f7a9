"""The model against figures measured on GPUs: what is written down is what it predicts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from benchmarks.model import __main__ as command
from benchmarks.model import engine, prediction

from greensched.capacity import measured
from greensched.capacity.measured import Key, Ranking, Row

#: The bars: figures, the share of them within a quarter, and of arms in the measured order.
LEAST_ROWS, LEAST_WITHIN, LEAST_RANKED = 60, 0.90, 0.90


def row(value: float, predicted: float | None, *, arm: str = "a", high: float = 1.0) -> Row:
    """Return a figure of an arm."""
    return Row(("h200", "W0", "case", arm, "p50"), value, 1.0, high, "nowhere", predicted)


def test_nine_of_ten_figures_are_within_a_quarter() -> None:
    """Of all figures, of the engine's alone, and of those that nothing was fitted to."""
    found = measured.rows()
    of_engine = [each for each in found if each.key[1] == "engine"]
    for some in (found, of_engine, [each for each in found if not each.is_fitted]):
        assert len(some) >= LEAST_ROWS
        assert sum(each.is_within for each in some) >= LEAST_WITHIN * len(some)


def test_the_model_ranks_the_arms_of_the_engine() -> None:
    """Nine of ten pairs whose measured figures differ by more than 15 % are in that order."""
    pairs = measured.rankings([each for each in measured.rows() if each.key[1] == "engine"])
    assert pairs
    assert sum(pair.is_right for pair in pairs) >= LEAST_RANKED * len(pairs)


@pytest.mark.parametrize("workload", ["W1", "W2", "W7", "W8"])
def test_the_model_ranks_the_arms_as_the_gpus_do(workload: str) -> None:
    """Every pair of arms whose measured figures differ by more than 15 % is in that order."""
    found = [each for each in measured.rows() if each.key[1] == workload]
    assert [str(pair) for pair in measured.rankings(found) if not pair.is_right] == []


def test_the_model_chooses_the_arm_that_wins_on_the_gpu() -> None:
    """In each case of W1, W2, W7, W8 and the engine: the best one, or one within 15 % of it."""
    chosen = measured.choices()
    assert {where[1] for where in chosen} == {"W1", "W2", "W7", "W8", "engine"}
    assert [where for where, (_, _, is_as_good) in chosen.items() if not is_as_good] == []


def written(key: Key) -> float:
    """Return the prediction that is written down, also of a figure that does not count."""
    (found,) = (each.predicted for each in measured.inputs_and_rows() if each.key == key)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("gpu", "workload", "case", "arm"),
    [
        ("h100", "W1", "spin 10 ms", "priority"),
        ("h100", "W7", "copy", "split"),
        ("h100", "W8", "two small", "shared"),
    ],
)
def test_a_prediction_is_what_the_model_gives_now(
    gpu: str, workload: str, case: str, arm: str
) -> None:
    """`python -m benchmarks.model` was run after the model changed last."""
    known = {each.key for each in measured.rows()}
    for key, value in prediction.two_users(gpu, workload, case, arm):
        if key in known:
            assert written(key) == pytest.approx(value, rel=1e-3), key


def test_a_prediction_of_the_engine_is_what_the_planner_gives_now() -> None:
    """Of a fused engine, and of a split."""
    for rate, arm in ((14, "chunked 128"), (14, "split 24")):
        for key, value in engine.predict(rate, arm):
            assert written(key) == pytest.approx(value, rel=1e-3), key


def test_quick_predictions_are_what_the_model_gives_now() -> None:
    """Bandwidth by SMs, and the clock that a board's power allows."""
    known = {each.key for each in measured.rows()}
    for key, value in [*prediction.bandwidths(), *prediction.torch_model()]:
        if key in known:
            assert written(key) == pytest.approx(value, rel=1e-3), key


def test_the_command_writes_the_committed_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one workload, byte for byte; the figures of the others stay as they are."""
    committed = measured.PREDICTED.read_text()
    path = tmp_path / "predicted.csv"
    lines = committed.splitlines(keepends=True)
    path.write_text("".join(line for line in lines if ",bandwidth," not in line))
    monkeypatch.setattr(measured, "PREDICTED", path)
    command.main(["bandwidth"])
    assert path.read_text() == committed
    assert "bandwidth, 16 beside 16" in capsys.readouterr().out


def test_fitted_rows_and_inputs_exist() -> None:
    """A row that is called fitted is one; an input is not counted."""
    found = measured.rows()
    for workload, case, arm, figures in measured.FITTED:
        for figure in figures:
            assert any(
                each.key[1:3] == (workload, case)
                and each.key[3].startswith(arm)
                and each.key[4] == figure
                for each in measured.inputs_and_rows()
            ), (workload, case, arm, figure)
    assert not any(each.is_input for each in found)


def test_a_row_that_is_not_predicted_counts_as_off() -> None:
    """Nothing is left out of a share by not predicting it, and what is off says so."""
    missing, near, far = row(1.0, None), row(1.0, 1.25), row(1.0, 1.26)
    assert [each.is_within for each in (missing, near, far)] == [False, True, False]
    assert "off" in command.line(missing)
    assert "off" not in command.line(near)
    assert "off" in command.line(far)


def test_a_figure_that_was_not_measured_well_does_not_count() -> None:
    """An interval wider than a quarter says nothing about a prediction within a quarter."""
    assert row(1.0, 1.0, high=1.25).is_known
    assert not row(1.0, 1.0, high=1.26).is_known


def test_rankings_are_of_arms_that_differ() -> None:
    """Pairs within 15 % have no order; the others have that of the measurement."""
    a, b, c = row(1.0, 3.0, arm="a"), row(1.1, 2.0, arm="b"), row(2.0, 2.5, arm="c")
    pairs = measured.rankings([a, b, c])
    assert pairs == [Ranking(a, c), Ranking(b, c)]
    assert [pair.is_right for pair in pairs] == [False, True]
    assert math.isclose(pairs[0].better.value, 1.0)


def test_a_workload_that_was_not_measured_is_refused() -> None:
    """A name that no figure has is refused before anything is written, with the names there are."""
    before = measured.PREDICTED.read_bytes()
    with pytest.raises(SystemExit, match="no workload W9: give some of W1, "):
        command.main(["W9"])
    assert measured.PREDICTED.read_bytes() == before
