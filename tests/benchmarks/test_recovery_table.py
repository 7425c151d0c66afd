"""Unit tests of the tables that `make bench-recovery` prints."""

from everstep_recovery.table import (
    OURS_SHARDED,
    build_fault_table,
    build_short_table,
    build_split_table,
    build_table,
    find_p95,
    split_by_shard,
)


def test_the_table_says_what_did_not_come() -> None:
    cell = {"settings": "", "ranks": 4, "fault": "SIGKILL"}
    head = {**cell, "problem": "", "limit": 120.0, "seconds_to_full_size": 9.0}
    zero = {"steps_lost": 0, "samples_lost": 0, "samples_repeated": 0}
    rows = [
        {
            **head,
            **zero,
            "system": "everstep",
            "settings": "in place",
            "run": 0,
            "seconds_to_next_step": 2.0,
        },
        {**head, **zero, "system": "other", "run": 0, "seconds_to_next_step": 4.0},
        {**head, **zero, "system": "other", "run": 1, "seconds_to_next_step": None},
        {**cell, "system": "third", "run": 0, "problem": "no module"},
    ]
    table = build_table(rows)
    assert "| other | 2 | 4; 1 not within 120 s | 4 | 9 | 0 | 0 | 0 | 2.00 |" in table
    assert "| third | 1 | 1 did not start |" in table
    assert build_short_table(rows).splitlines()[2:] == [
        "| everstep in place | 2 | 9 | 0 | 0 |",
        "| other | 4; 1 not within 120 s | 9 | 0 | 0 |",
    ]


def test_systems_that_shard_the_model_are_compared_with_each_other() -> None:
    cell = {"problem": "", "limit": 120.0, "seconds_to_full_size": 4.0, "samples_lost": 0}
    cell |= {"steps_lost": 0, "samples_repeated": 0, "fault": "SIGKILL"}
    rows = [
        {**cell, "system": system, "settings": settings, "seconds_to_next_step": seconds}
        for system, settings, seconds in (
            ("everstep", "in place", 1.0),
            ("everstep", "in place, shard=2", 2.0),
            ("torchft", "HSDP tight", 6.0),
        )
    ]
    whole, sharded = split_by_shard(rows)
    assert whole == rows[:1]
    assert [
        line.split(" | ")[-1] for line in build_table(sharded, OURS_SHARDED).splitlines()[2:]
    ] == [
        "1.00 |",
        "3.00 |",
    ]


def test_p95_is_the_smallest_value_that_95_percent_do_not_exceed() -> None:
    assert find_p95([3.0]) == 3.0
    assert find_p95([float(n) for n in range(20)]) == 18.0
    assert find_p95([float(n) for n in range(21)]) == 19.0


def test_the_parts_of_the_next_step_are_shown_with_how_many_runs_keep_to_the_rule() -> None:
    cell = {"system": "everstep", "settings": "in place", "ranks": 2}
    splits = [
        {"step": 0.1, "rest": 0.05, "passes_again": 2, "again": 0.04, "beyond": beyond}
        for beyond in (0.02, 0.03, 0.09)
    ]
    rows = [{**cell, "split": split} for split in splits]
    rows += [{**cell, "split": None}, {**cell, "system": "other", "split": splits[0]}]
    assert build_split_table(rows).splitlines()[2:] == [
        "| everstep in place | 2 | 3 | 100 | 50 | 40 | 30 / 90 / 90 | 2 of 3 |"
    ]
    assert build_split_table(rows[3:]) == ""


def test_a_group_that_cannot_return_to_its_full_size_says_why() -> None:
    cell = {"system": "torchft", "settings": "tight", "problem": "", "limit": 120.0}
    row = {**cell, "seconds_to_next_step": 0.3, "seconds_to_full_size": None}
    stopped = build_table([{**row, "fault": "SIGSTOP"}])
    killed = build_table([{**row, "fault": "SIGKILL"}])
    assert "never: only a process that has ended is replaced" in stopped
    assert "1 not within 120 s" in killed


def test_all_faults_stand_side_by_side() -> None:
    cell = {"settings": "", "problem": "", "limit": 120.0}
    rows = [
        {
            **cell,
            "system": system,
            "fault": fault,
            "seconds_to_next_step": step,
            "seconds_to_full_size": full,
        }
        for system, fault, step, full in (
            ("late", "SIGKILL", 8.0, 9.0),
            ("fast", "SIGSTOP", 0.4, 0.9),
            ("fast", "SIGKILL", 0.1, 0.5),
            ("never", "SIGKILL", None, None),
            ("never", "SIGKILL", None, None),
            ("never", "SIGKILL", 5.0, None),
        )
    ]
    assert build_fault_table(rows).splitlines() == [
        "| next step / full size, s | SIGKILL | SIGSTOP |",
        "| --- | --- | --- |",
        "| fast | 0.1 / 0.5 | 0.4 / 0.9 |",
        "| late | 8 / 9 |  |",
        "| never | – / – |  |",
    ]
