"""Whether each feed delivered its samples in order, none lost, none repeated. Pure.

Two records are compared. The ledger names the samples of each step; its numbers were reduced
together with the gradients. The feeds' records name the positions from which each step should have
taken its samples. Consecutive positions form passes over the dataset, and one pass contains each
sample once. So a sample that occurs twice in a pass was repeated, and one that is missing from a
complete pass was lost. This is true of any permutation, so the permutation is not computed here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep_contract.feed import FeedRecord, Order, Segment
from everstep_contract.ledger import LedgerEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One step that drew from a feed; all loops over the feed in that step share it."""

    step: int
    samples: tuple[int, ...]


def find_feed_problems(
    entries: Sequence[LedgerEntry], records: Mapping[str, FeedRecord] | None
) -> list[str]:
    """Lost and repeated samples and changes of the order, the first of each kind for each feed.

    Args:
        entries: of the whole lineage, in order of step.
        records: of the newest checkpoint; None: its writer recorded no feeds.
    """
    draws = _list_draws(entries)
    problems = []
    if unnamed := draws.pop("", None):
        problems.append(
            f"steps {unnamed[0].step} to {unnamed[-1].step} were written by a version "
            "that did not record feeds: lost or repeated samples in them cannot be detected"
        )
    known = records or {}
    for name in sorted({*draws, *known}):
        record = known.get(name)
        if record is None:
            problems.append(f"feed {name}: the ledger has it, the checkpoint has no record of it")
        else:
            problems += _find_problems(f"feed {name}", record, draws.get(name, []), bool(unnamed))
    return problems


def list_feed_notes(records: Mapping[str, FeedRecord] | None) -> list[str]:
    """Edits that changed no sample, feeds that started late, and feeds whose order cannot be
    proved.
    """
    notes = []
    for name, record in sorted((records or {}).items()):
        if record.segments[0].step > 1:
            notes.append(f"feed {name} starts at step {record.segments[0].step}")
        if record.last.order.length is None:
            notes.append(
                f"feed {name} can only be iterated: positions are proved, not which sample "
                "was there"
            )
        for before, now in zip(record.segments, record.segments[1:], strict=False):
            notes += [f"feed {name}, step {now.step}: {edit}" for edit in _list_edits(before, now)]
    return notes


def _list_edits(before: Segment, now: Segment) -> Iterator[str]:
    for what in ("global_batch", "micro_batch"):
        old, new = getattr(before, what), getattr(now, what)
        if old != new:
            yield f"{what} was {old}, is {new}"


def _list_draws(entries: Sequence[LedgerEntry]) -> dict[str, list[Draw]]:
    """The draws of each feed; a second loop over the feed in a step adds none."""
    draws: dict[str, list[Draw]] = {}
    for entry in entries:
        mine = draws.setdefault(entry.feed, [])
        if not mine or mine[-1].step != entry.step:
            mine.append(Draw(step=entry.step, samples=entry.samples))
    return draws


def _find_problems(
    feed: str, record: FeedRecord, draws: Sequence[Draw], late: bool
) -> Iterator[str]:
    """`late`: the ledger does not name the feed of earlier steps, which is reported separately."""
    at = 0
    before: Segment | None = None
    passes = Passes(feed)
    for segment in record.segments:
        mine = draws[at : at + segment.draws]
        at += segment.draws
        if problem := _mismatch(segment, mine):
            yield f"{feed}: {problem}"
            return
        if segment.change:
            yield f"{feed}: the order changed at step {segment.step}: {segment.change}{passes.left()}"
        elif before is None and segment.sample and not late:
            yield f"{feed} starts at step {segment.step} with sample {segment.sample}, not 0"
        elif before is not None and segment.sample != before.next_sample:
            yield (
                f"{feed}: step {segment.step} goes on with sample {segment.sample}, but "
                f"{before.next_sample} came next"
            )
        passes.add(segment, mine)
        before = segment
    if at < len(draws):
        yield f"{feed}: step {draws[at].step} drew from it, but the checkpoint has no record of that"
    yield from passes.problems()


def _mismatch(segment: Segment, draws: Sequence[Draw]) -> str:
    if len(draws) < segment.draws:
        return f"{segment.draws} steps from step {segment.step} on drew from it, the ledger has {len(draws)}"
    if draws[0].step != segment.step:
        return f"step {segment.step} drew from it first, in the ledger step {draws[0].step}"
    odd = next((d for d in draws if len(d.samples) != segment.global_batch), None)
    if odd:
        return f"step {odd.step} used {len(odd.samples)} samples, global_batch is {segment.global_batch}"
    return ""


class Passes:
    """Counts the samples of a feed, pass by pass."""

    def __init__(self, feed: str) -> None:
        self._feed = feed
        self._order: Order | None = None
        self._place = 0
        self._began = 0
        """Position at which counting of this pass started. A pass that was not counted from its
        start is never reported as incomplete.
        """
        self._seen: dict[int, int] = {}
        """Sample → step, in the current pass."""
        self._repeated = self._lost = self._odd = ""
        self._times = 0

    def add(self, segment: Segment, draws: Sequence[Draw]) -> None:
        order = replace(segment.order, seed=0, fingerprint=None)
        if segment.change or order != self._order or segment.sample != self._place:
            self._order, self._place, self._began = order, segment.sample, segment.sample
            self._seen = {}
        for draw in draws:
            for sample in draw.samples:
                self._count(sample, draw.step)

    def left(self) -> str:
        """How far the current pass has come."""
        length = self._order.length if self._order else None
        return f", after {len(self._seen)} of {length} samples of a pass" if length else ""

    def problems(self) -> list[str]:
        found = [self._odd, self._lost]
        if self._times:
            more = f" (and {self._times - 1} more)" if self._times > 1 else ""
            found.insert(0, f"{self._repeated}{more}")
        return [f"{self._feed}: {problem}" for problem in found if problem]

    def _count(self, sample: int, step: int) -> None:
        length = self._order.length if self._order else None
        place, self._place = self._place, self._place + 1
        if length is None:
            if sample != place:
                self._odd = self._odd or f"step {step} used position {sample} instead of {place}"
            return
        if sample in self._seen:
            self._times += 1
            self._repeated = self._repeated or (
                f"sample {sample} was used twice in one pass over the data, at steps {self._seen[sample]} and {step}"
            )
        elif not 0 <= sample < length:
            self._odd = self._odd or f"step {step} used sample {sample} of {length}"
        self._seen.setdefault(sample, step)
        if self._place % length == 0:
            self._end_pass(length, step)

    def _end_pass(self, length: int, step: int) -> None:
        whole = self._began <= self._place - length
        missing = length - len(self._seen)
        if whole and missing and not self._lost:
            first = next(i for i in range(length) if i not in self._seen)
            self._lost = (
                f"a pass over the data ended at step {step} without {missing} of {length} samples; the first of them "
                f"is {first}"
            )
        self._seen = {}
