"""Conversion of micro-batch indices to ranges, and back."""

from everstep_contract.ranges import list_ranges, to_ranges


def test_ranges_are_as_few_as_can_be_and_lead_back() -> None:
    assert to_ranges([5, 0, 1, 2, 7]) == ((0, 3), (5, 6), (7, 8))
    assert to_ranges([]) == ()
    assert list_ranges(((0, 3), (5, 6))) == [0, 1, 2, 5]
