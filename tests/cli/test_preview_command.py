"""`greensched plan`: the devices of a machine, what each would give, and why not."""

from __future__ import annotations

import json

import pytest

from greensched import InvalidSize, NotSupported, Pool
from greensched.cli import main as cli
from greensched.driver import simulated
from greensched.leasing import preview
from greensched.typing import REST


def test_each_device_has_its_own_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """An H200 and an L40S are cut differently; versions differ in what the remainder joins."""
    assert cli.main(["plan", "16", "16", "rest", "--driver", "simulated:h200+l40s@13.1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "device 0 (Simulated H200, 132 SMs): 16, 16, 88 SMs; 12 unused",
        "device 1 (Simulated L40S, 142 SMs): 16, 16, 110 SMs; 0 unused",
    ]
    assert cli.main(["plan", "16", "16", "REST", "--driver", "simulated:h200@13.0"]) == 0
    assert "16, 16, 100 SMs; 0 unused" in capsys.readouterr().out


def test_sizes_are_written_as_in_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    """A pair has a colon, ALL is a word, and the JSON has everything."""
    arguments = ["--driver", "simulated:h200@13.1", "--json"]
    assert cli.main(["plan", "8:64", "8", *arguments]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["granted"] == [64, 8]
    assert cli.main(["plan", "all", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)[0]["granted"] == [132]
    assert cli.main(["plan", "2", "--granularity", "fine", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)[0]["granted"] == [2]


def test_what_no_device_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    """It exits with 1, says why and what comes nearest."""
    assert cli.main(["plan", "64", "64", "--driver", "simulated:h200@13.1"]) == 1
    said = capsys.readouterr().out
    assert "impossible: 64, 64 SMs take 16 cells of 8, but the device has 15, and a rem" in said
    assert "the nearest is 56, 64" in said
    assert cli.main(["plan", "128", "rest", "--driver", "simulated:h100+h200x2@13.1"]) == 1
    assert cli.main(["plan", "120", "rest", "--driver", "simulated:h200@13.1"]) == 0
    assert cli.main(["plan", "40", "rest", "--driver", "simulated:t4@13.1"]) == 1
    assert "leave none for REST" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["some", "16:x", "", "1.5", ":", "0", "8:4", "0:4"])
def test_a_word_that_is_not_a_size_is_refused(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal says what a size looks like."""
    assert cli.main(["plan", word]) == 2
    assert "is not a size: give a number of SMs (16)" in capsys.readouterr().err


def test_what_a_driver_lacks_is_said() -> None:
    """A pool that needs a newer driver is refused."""

    async def main() -> None:
        pool = Pool(driver="simulated:h200@13.0", workqueues="balanced")
        with pytest.raises(NotSupported, match=r"needs .*CUDA 13\.1; this is"):
            await pool.open()
        await pool.aclose()

    import asyncio

    asyncio.run(main())


def test_a_survey_leaves_nothing_open() -> None:
    """It opens and closes each device, also where the sizes can never be right."""
    driver = simulated.open("h200x2@13.1")
    assert [plan.granted for plan in preview.preview_devices(driver, (16, REST))] == [(16, 104)] * 2
    with pytest.raises(InvalidSize):
        preview.preview_devices(driver, (0,))
    assert not driver.live()
    driver.close()
