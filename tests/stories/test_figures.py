"""The final table and the order of the stories."""

from pathlib import Path

import pytest

from everstep_stories import order
from everstep_stories.figures import Outcome, build_phases, build_table

STORIES = Path(__file__).parents[2] / "e2e" / "stories"


def test_the_table_names_what_was_not_measured_with_a_dash() -> None:
    table = build_table(
        [
            Outcome(
                story="pod_deleted", seconds=31.4, first_step=9.87, steps_lost=0, samples_lost=0
            ),
            Outcome(story="install", seconds=40, ended="FAILED"),
        ]
    ).splitlines()
    assert table[0].split("  ")[0] == "story"
    assert table[1].split() == ["pod", "deleted", "ok", "9.9", "s", "0", "0", "31", "s"]
    assert table[2].split() == ["install", "FAILED", "–", "–", "–", "40", "s"]


def test_phases_are_one_line_and_none_are_none() -> None:
    outcome = Outcome(story="a_b", phases=[("commit", 1.26), ("moved", 7.0)])
    assert build_phases(outcome) == "a b: commit 1.3 s, moved 7.0 s"
    assert build_phases(Outcome(story="a")) == ""


def test_every_story_has_one_place_and_every_place_a_story() -> None:
    stories = order.CORE + order.FURTHER
    files = {p.stem.removeprefix("test_") for p in STORIES.glob("test_*.py")}
    assert len(stories) == len(set(stories))
    assert set(stories) == files


def test_a_story_without_a_place_is_named() -> None:
    with pytest.raises(LookupError, match=r"test_new\.py"):
        order.place_of("new")
