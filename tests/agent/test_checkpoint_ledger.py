from pathlib import Path

import pytest

from agent.a_run import ARun, entry, read_alone
from everstep_agent.checkpoint import ledger
from everstep_agent.checkpoint.ledger import (
    Book,
    build_segments,
    choose_entries,
    choose_merge,
    find_gap,
    join_segments,
    replace_segments,
    split_entries,
)
from everstep_agent.checkpoint.manifests import fetch_manifest
from everstep_agent.checkpoint.retention import Retention
from everstep_agent.storage import open_store
from everstep_agent.tools import verify
from everstep_contract import codec
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


@pytest.mark.parametrize(
    ("samples", "chunks"),
    [
        pytest.param(100, [[1, 2, 2, 3]], id="all in one"),
        pytest.param(9, [[1], [2, 2], [3]], id="a step is not divided"),
        pytest.param(12, [[1, 2, 2], [3]], id="full"),
        pytest.param(1, [[1], [2, 2], [3]], id="a step is larger than a chunk"),
    ],
)
def test_a_long_ledger_is_divided_between_steps(
    samples: int, chunks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each entry here has 4 samples."""
    monkeypatch.setattr(ledger, "CHUNK_SAMPLES", samples)
    entries = [entry(1), entry(2), entry(2, reduction=1), entry(3)]
    found = split_entries(entries)
    assert [[e.step for e in chunk] for chunk in found] == chunks
    assert [e for chunk in found for e in chunk] == entries
    assert split_entries([]) == []


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


def test_chunks_are_merged_when_they_are_many_and_full_ones_stay() -> None:
    small = [segment(n, n, chunk=f"c{n}") for n in range(1, 33)]
    sizes = {f"c{n}": 100 for n in range(33)} | {"full": ledger.MERGED_BYTES}
    assert choose_merge(small[:31], sizes) == []
    assert choose_merge(small, sizes) == [f"c{n}" for n in range(1, 33)]
    assert choose_merge([segment(0, 0, chunk="full"), *small], sizes) == [s.chunk for s in small]
    assert choose_merge([], {}) == []


def test_merged_segments_stand_where_those_of_their_chunks_stood() -> None:
    before = [segment(1, 4), segment(5, 6, chunk="d"), segment(7, 7, epoch=2, chunk="e")]
    merged = [segment(5, 6, chunk="m"), segment(7, 7, epoch=2, chunk="m")]
    after = replace_segments(before, {"d", "e"}, merged)
    assert after == (segment(1, 4), *merged)
    assert find_gap(after, 7) == ""


async def test_a_manifest_does_not_grow_with_the_number_of_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MERGE_FROM", 8)
    store = open_store("memory://", "", {})
    run, sizes = ARun(store, tmp_path / "staged"), []
    await run.claim(1)
    keeper = Retention(store, run.log, keep=2)
    for step in range(1, 31):
        if step == 20:
            await run.claim(2, resume=run.log.commits[-1])
        newest = await run.save(step, since=step - 1)
        assert await keeper.check(newest, read_alone(store)) == ""
        await keeper.retire(newest.token)
        manifest = await fetch_manifest(store, newest)
        sizes.append(len(codec.dumps(manifest)))
        assert len(manifest.ledger) <= 10
        assert find_gap(manifest.ledger, step) == ""
    assert max(sizes[15:]) < 1.2 * max(sizes[:15])
    found = await verify.verify_run(store, entries=True)
    assert found.ok, found.problems
    assert [(e.step, e.epoch) for e in found.entries] == [
        (s, 1 if s < 20 else 2) for s in range(1, 31)
    ]
    assert len(await store.list("chunks")) < 25
