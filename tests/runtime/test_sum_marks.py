"""What the worker's page shows of the sums of a reduction."""

from pathlib import Path

import pytest

from everstep.sum_marks import SumMarks
from everstep_contract.position import Position, PositionPage
from everstep_contract.sums import Sums


def sums(joined: int, complete: int = 0) -> Sums:
    return Sums(step=71, reduction=1, buckets=3, joined=joined, complete=complete)


@pytest.fixture
def page(tmp_path: Path) -> PositionPage:
    return PositionPage(str(tmp_path / "page"), create=True)


AT = Position(applied=70, reduction=1)


def test_what_a_rank_has_launched_and_completed_stands_on_its_page(page: PositionPage) -> None:
    marks = SumMarks(page)
    assert page.read_sums(AT) is None
    marks.begin(3)
    assert page.read_sums(AT) == sums(0)
    marks.join(4)
    marks.complete(marks.round, 2)
    assert page.read_sums(AT) == sums(4, 2)
    marks.end()
    assert page.read_sums(AT) is None


def test_what_completes_late_in_a_group_that_was_left_does_not_count(page: PositionPage) -> None:
    marks = SumMarks(page)
    marks.begin(3)
    left = marks.round
    marks.begin(3)
    marks.complete(left, 2)
    assert page.read_sums(AT) == sums(0)
