"""The part of the ledger that the newest manifest does not cover yet, and its segments. Pure.

A manifest lists the segments of its whole lineage, so an older manifest can be retired without
a gap in the proof.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from everstep_contract.ledger import LedgerEntry
from everstep_contract.manifest import LedgerSegment

MERGE_FROM = 32
MERGED_BYTES = 8 * 2**20
CHUNK_SAMPLES = 1_000_000
"""Samples in one chunk of the ledger: about 50 MB if each micro-batch has one sample, 10 MB if it has many."""


class Book:
    """Entries of steps after the newest commit, by (step, reduction)."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], LedgerEntry] = {}

    def add(self, entries: Iterable[LedgerEntry]) -> None:
        """An entry of a newer epoch replaces an older one of the same step, which is void."""
        for entry in entries:
            held = self._entries.get((entry.step, entry.reduction))
            if held is None or held.epoch <= entry.epoch:
                self._entries[entry.step, entry.reduction] = entry

    def upto(self, step: int) -> list[LedgerEntry]:
        return [e for (s, _), e in sorted(self._entries.items()) if s <= step]

    def after(self, step: int, reduction: int, count: int) -> list[LedgerEntry]:
        """At most `count` entries after that place, in order."""
        later = sorted(key for key in self._entries if key > (step, reduction))
        return [self._entries[key] for key in later[:count]]

    def replace(self, entries: Iterable[LedgerEntry]) -> None:
        """Replace all entries by those of another member: this agent has missed steps."""
        self._entries = {(e.step, e.reduction): e for e in entries}

    def committed(self, step: int) -> None:
        """A manifest covers everything up to `step`."""
        self._entries = {k: e for k, e in self._entries.items() if k[0] > step}

    def rewind(self, step: int) -> None:
        """The run continues from `step`: later entries are void."""
        self._entries = {k: e for k, e in self._entries.items() if k[0] <= step}


def split_entries(entries: Sequence[LedgerEntry]) -> list[list[LedgerEntry]]:
    """The entries of each chunk: as many complete steps as have `CHUNK_SAMPLES` together, at least one.
    `entries` sorted by step.

    A job that could not save for hours has a ledger larger than an object may be.
    """
    chunks: list[list[LedgerEntry]] = []
    room = 0
    for _, group in itertools.groupby(entries, lambda entry: entry.step):
        step = list(group)
        size = sum(len(entry.samples) for entry in step)
        if not chunks or size > room:
            chunks.append([])
            room = CHUNK_SAMPLES
        chunks[-1] += step
        room -= size
    return chunks


def build_segments(entries: Sequence[LedgerEntry], chunk: str) -> tuple[LedgerSegment, ...]:
    """One segment for each run of steps in one epoch; `entries` sorted by step."""
    segments: list[LedgerSegment] = []
    for entry in entries:
        last = segments[-1] if segments else None
        if last and last.epoch == entry.epoch and entry.step in (last.last, last.last + 1):
            segments[-1] = _until(last, entry.step)
        else:
            first = LedgerSegment(epoch=entry.epoch, first=entry.step, last=entry.step, chunk=chunk)
            segments.append(first)
    return tuple(segments)


def join_segments(
    before: Sequence[LedgerSegment], after: Sequence[LedgerSegment]
) -> tuple[LedgerSegment, ...]:
    """The lineage's segments: the parent's, then those of the new ones that go beyond it."""
    covered = before[-1].last if before else 0
    fresh = tuple(
        LedgerSegment(epoch=s.epoch, first=max(s.first, covered + 1), last=s.last, chunk=s.chunk)
        for s in after
        if s.last > covered
    )
    return (*before, *fresh)


def choose_merge(segments: Sequence[LedgerSegment], sizes: Mapping[str, int]) -> list[str]:
    """The newest chunks to merge into one, oldest first; empty while there are only a few.

    Without merging, a manifest would grow by a segment and a chunk with every save. A full chunk is
    not written again, so the amount rewritten is bounded: at most `MERGED_BYTES` for each
    `MERGE_FROM` saves.
    """
    chosen: list[str] = []
    total = 0
    for chunk in reversed(dict.fromkeys(s.chunk for s in segments)):
        total += sizes[chunk]
        if total > MERGED_BYTES:
            break
        chosen.append(chunk)
    return chosen[::-1] if len(chosen) >= MERGE_FROM else []


def replace_segments(
    segments: Sequence[LedgerSegment], gone: Collection[str], merged: Sequence[LedgerSegment]
) -> tuple[LedgerSegment, ...]:
    """The same steps, with `merged` instead of all segments in the chunks `gone`, which are the
    newest.
    """
    return (*(s for s in segments if s.chunk not in gone), *merged)


def find_gap(segments: Sequence[LedgerSegment], step: int) -> str:
    """Why these segments do not cover steps 1 … `step` exactly once; empty if they do."""
    covered = 0
    for segment in segments:
        if segment.first != covered + 1 or segment.last < segment.first:
            return f"the ledger has steps {segment.first} to {segment.last} after step {covered}"
        covered = segment.last
    if covered != step:
        return f"the ledger ends at step {covered}, the checkpoint at step {step}"
    return ""


def choose_entries(
    segments: Sequence[LedgerSegment], lines: Mapping[str, Sequence[LedgerEntry]]
) -> list[LedgerEntry]:
    """The entries that the segments name, in their order; `lines` by chunk digest."""
    return [
        entry
        for s in segments
        for entry in lines[s.chunk]
        if entry.epoch == s.epoch and s.first <= entry.step <= s.last
    ]


def _until(segment: LedgerSegment, last: int) -> LedgerSegment:
    return LedgerSegment(epoch=segment.epoch, first=segment.first, last=last, chunk=segment.chunk)
