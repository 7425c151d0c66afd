from agent.a_run import entry
from everstep_agent.checkpoint.ledger import (
    Book,
    build_segments,
    choose_entries,
    find_gap,
    join_segments,
)
from everstep_contract.manifest import LedgerSegment


def segment(first: int, last: int, epoch: int = 1, chunk: str = "c") -> LedgerSegment:
    return LedgerSegment(epoch=epoch, first=first, last=last, chunk=chunk)


def test_the_book_keeps_what_no_manifest_covers() -> None:
    book = Book()
    book.add([entry(1), entry(2), entry(3)])
    book.committed(1)
    assert [e.step for e in book.upto(2)] == [2]
    book.rewind(2)
    assert [e.step for e in book.upto(9)] == [2]


def test_a_step_taken_again_in_a_newer_epoch_replaces_the_void_one() -> None:
    book = Book()
    book.add([entry(1), entry(2)])
    book.add([entry(2, epoch=3)])
    book.add([entry(2, epoch=2)])
    assert [(e.step, e.epoch) for e in book.upto(9)] == [(1, 1), (2, 3)]


def test_two_reductions_of_a_step_are_two_entries() -> None:
    book = Book()
    book.add([entry(1, reduction=1), entry(1)])
    assert [e.reduction for e in book.upto(1)] == [0, 1]
    assert build_segments(book.upto(1), "c") == (segment(1, 1),)


def test_segments_break_where_the_epoch_changes() -> None:
    lines = [entry(1), entry(2), entry(3, epoch=2)]
    assert build_segments(lines, "c") == (segment(1, 2), segment(3, 3, epoch=2))


def test_the_parents_segments_come_first_and_nothing_stands_twice() -> None:
    joined = join_segments([segment(1, 4)], [segment(2, 3, chunk="d"), segment(4, 7, chunk="d")])
    assert joined == (segment(1, 4), segment(5, 7, chunk="d"))


def test_gaps_are_named() -> None:
    assert find_gap([segment(1, 4), segment(5, 6)], 6) == ""
    assert find_gap([segment(1, 4), segment(6, 6)], 6) == "the ledger has steps 6 to 6 after step 4"
    assert find_gap([segment(1, 4)], 6) == "the ledger ends at step 4, the checkpoint at step 6"
    assert find_gap([], 0) == ""


def test_only_what_a_segment_names_is_taken_from_its_chunk() -> None:
    lines = {"c": [entry(1), entry(2), entry(2, epoch=2), entry(3, epoch=2)]}
    segments = [segment(1, 1), segment(2, 3, epoch=2)]
    assert [(e.epoch, e.step) for e in choose_entries(segments, lines)] == [(1, 1), (2, 2), (2, 3)]
