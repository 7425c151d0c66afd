"""Each fault's signature, column by column, from the table that the lab follows."""

import random

import pytest

from everstep_lab.scenario import (
    AddToGpu,
    Course,
    Effect,
    HangRank,
    KillRank,
    Scenario,
    SetExporter,
    SetOnGpu,
    ShowXid,
    build_course,
)


def course(code: int, seed: int = 0) -> Course:
    return build_course(code, random.Random(seed))


def effects(code: int, seed: int = 0) -> list[Effect]:
    return [timed.effect for timed in course(code, seed).effects]


def flags(code: int) -> dict[str, int | bool]:
    merged: dict[str, int | bool] = {}
    for effect in effects(code):
        if isinstance(effect, SetOnGpu):
            merged.update(effect.values)
    return merged


def codes_shown(code: int) -> list[int]:
    return [effect.code for effect in effects(code) if isinstance(effect, ShowXid)]


def test_79_kills_the_rank_within_a_second_and_its_series_vanish_without_an_xid() -> None:
    assert codes_shown(79) == []
    assert flags(79)["present"] is False
    kill = next(t for t in course(79).effects if isinstance(t.effect, KillRank))
    assert 0 < kill.at < 1
    assert kill.effect.lasting  # type: ignore[union-attr]


def test_64_shows_a_failed_remap_and_leaves_the_rank_alone() -> None:
    assert codes_shown(64) == [64]
    assert flags(64)["remap_failure"] == 1
    assert not any(isinstance(effect, KillRank | HangRank) for effect in effects(64))


def test_31_is_the_programs_fault_and_leaves_device_and_later_ranks_alone() -> None:
    assert codes_shown(31) == [31, 45]
    assert "device_healthy" not in flags(31)
    assert KillRank() in effects(31)


def test_94_leaves_a_pending_remap_and_45_on_the_gauge() -> None:
    assert codes_shown(94)[-1] == 45
    assert flags(94)["remap_pending"] == 1
    assert AddToGpu(counters={"remapped_uncorrectable": 1}) in effects(94)


@pytest.mark.parametrize("code", [48, 95])
def test_a_double_bit_error_counts_once_volatile_and_once_for_life(code: int) -> None:
    assert AddToGpu(counters={"dbe_volatile": 1, "dbe_aggregate": 1}) in effects(code)
    assert KillRank(lasting=True) in effects(code)


def test_119_hangs_the_rank_then_freezes_the_exporter_then_breaks_it() -> None:
    modes = [effect.mode for effect in effects(119) if isinstance(effect, SetExporter)]
    assert modes == ["frozen", "http500"]
    assert HangRank() in effects(119)


def test_about_half_of_the_ranks_die_of_74() -> None:
    died = sum(KillRank() in effects(74, seed) for seed in range(200))
    assert 60 < died < 140


def test_the_device_plugin_marks_the_device_unhealthy_unless_it_ignores_the_code() -> None:
    assert flags(62)["device_healthy"] is False
    assert "device_healthy" not in flags(43)


def test_the_same_seed_plays_the_same_courses() -> None:
    first, second = Scenario(seed=7), Scenario(seed=7)
    faults = (79, 74, 31, 74, 94)
    assert [first.plan_xid(c) for c in faults] == [second.plan_xid(c) for c in faults]


@pytest.mark.parametrize("code", [0, -1, 4711])
def test_a_code_that_no_driver_reports_is_refused_with_the_range(code: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 185"):
        course(code)
