"""Which writes of the undisturbed plays become cases."""

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from crash.cases import choose_write
from crash.lane import NotReached
from crash.plan import Case, Clean, Write, build_cases, list_certain, list_writes, merge
from crash.shape import Shape


def a_shape(state: str = "Running") -> Shape:
    return Shape(**{f.name: state if f.name == "state" else () for f in fields(Shape)})


def a_play(titles: Sequence[str], state: str = "Running") -> Clean:
    return Clean(shape=a_shape(state), writes=list_writes(titles), seconds=1.0)


def test_a_write_that_one_play_lacks_is_no_case_and_of_an_unsteady_title_only_the_first() -> None:
    plays = [a_play(["a", "b", "b", "c", "c", "d"]), a_play(["a", "b", "b", "b", "c", "c"])]
    found = [(w.title, w.occurrence) for w in merge("s", plays).writes]
    assert found == [("a", 1), ("b", 1), ("c", 1), ("c", 2)]


def test_plays_that_end_differently_are_an_error_with_the_difference() -> None:
    with pytest.raises(NotReached, match="state: Failed instead of Running"):
        merge("s", [a_play(["a"]), a_play(["a"], "Failed")])


def test_each_write_has_a_case_at_each_moment_and_the_certain_ones_come_once_in_a_play() -> None:
    cases = build_cases({"s": a_play(["a", "b", "b"])}, seed=1)
    assert len({case.name for case in cases}) == 9
    assert {c.write.title for c in list_certain(cases) if c.write} == {"a"}
    assert build_cases({"s": a_play(["a", "b", "b"])}, seed=1) == cases
    assert list_certain([Case(scenario="s", write=None, moment="before")]) == []


def test_a_repetition_that_does_not_come_is_struck_where_the_write_came_last() -> None:
    fourth = Write(title="a", occurrence=4)
    assert choose_write(fourth, [["a", "b"]]) == fourth
    assert choose_write(fourth, [["a", "a", "a"], ["a", "b", "a"]]) == replace(fourth, occurrence=2)
    assert choose_write(Write(title="a", occurrence=1), [["b"], ["b"]]) == Write(
        title="a", occurrence=1
    )
    assert choose_write(None, []) is None
