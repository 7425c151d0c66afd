"""Unit tests of the table and the plot of `make bench-storm`."""

from pathlib import Path

import pytest

from everstep_storm import plot
from everstep_storm.faults import CALM, DEATHS, MIXED
from everstep_storm.table import HEAD, Row, build_table, find_goodput


def a_run(system: str, mix: str, samples: int, **changes: object) -> Row:
    row: Row = {
        "system": system, "mix": mix, "problem": "", "proves": system == "everstep", "verify": "",
        "seconds": 10.0, "samples": samples, "steps": samples // 4, "steps_again": 0,
        "samples_lost": 0, "samples_repeated": 0, "pauses": [0.2, 0.4], "probed": 0,
        "states": {"100": "a"}, "progress": [0, 1], "struck": [
            {"kind": "death", "pid": 5, "after": 3.0}, {"kind": "death", "pid": 6, "after": 5.0},
        ],
    }  # fmt: skip
    return row | changes


def cells(rows: list[Row], mix: str = DEATHS) -> list[dict[str, str]]:
    lines = build_table(rows, mix).splitlines()[2:]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(HEAD, own, strict=True)) for own in found]


CALM_RUNS = [a_run("everstep", CALM, 400, struck=[]), a_run("torchft tight", CALM, 800, struck=[])]


def test_goodput_is_relative_to_the_own_undisturbed_run_and_to_the_fastest() -> None:
    ours, peer = cells(
        [*CALM_RUNS, a_run("torchft tight", DEATHS, 400), a_run("everstep", DEATHS, 390)]
    )
    assert (ours["goodput"], ours["of the fastest"]) == ("97.5%", "48.8%")
    assert (peer["goodput"], peer["of the fastest"]) == ("50.0%", "50.0%")
    assert ours["end"] == "verified, state equal at all steps that both runs logged (1)"


def test_the_rate_of_the_quiet_seconds_needs_no_other_run() -> None:
    (row,) = cells([a_run("everstep", DEATHS, 390, quiet_samples_per_second=40.0)])
    assert (row["goodput"], row["of quiet seconds"]) == ("", "97.5%")
    (earlier,) = cells([a_run("everstep", DEATHS, 390)])
    assert earlier["of quiet seconds"] == ""


def test_runs_of_other_lengths_are_compared_by_their_rates() -> None:
    calm = a_run("everstep", CALM, 100, seconds=2.5)
    assert find_goodput(a_run("everstep", DEATHS, 390), calm) == pytest.approx(0.975)


def test_a_state_that_differs_and_a_run_that_verify_refuses_are_named() -> None:
    (row,) = cells([*CALM_RUNS, a_run("everstep", DEATHS, 390, states={"100": "b"}, verify="no")])
    assert row["end"] == "refused by `everstep verify`, state differs from step 100"


def test_a_fault_after_which_nothing_came_and_one_that_met_nobody_are_shown() -> None:
    struck = [{"kind": "death", "pid": 5, "after": 3.0}, {"kind": "hang", "pid": 0, "after": 5.0}]
    (row,) = cells([*CALM_RUNS, a_run("everstep", DEATHS, 90, struck=struck, pauses=[None])])
    assert (row["faults"], row["longest, s"]) == ("1 death, 1 met no rank", "1 never")


def test_a_system_that_cannot_take_part_says_why() -> None:
    head = {"system": "nvrx ft_launcher", "mix": MIXED, "problem": "no node", "proves": False}
    (line,) = build_table([*CALM_RUNS, head], MIXED).splitlines()[2:]
    assert line.startswith("| nvrx ft_launcher |")
    assert line.endswith("| no node |")


def test_the_picture_has_a_panel_for_each_mix(tmp_path: Path) -> None:
    runs = [a_run("everstep", DEATHS, 390), a_run("torchft tight", MIXED, 100)]
    plot.draw(tmp_path / "storm.png", [*CALM_RUNS, *runs])
    assert (tmp_path / "storm.png").read_bytes().startswith(b"\x89PNG")


def test_two_peers_have_colors_that_differ() -> None:
    colors = plot.choose_colors(["everstep", "torchft as it comes", "torchft tight"])
    assert len(set(colors.values())) == 3
