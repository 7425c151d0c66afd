"""Whether each feed delivered its samples in order, none lost, none repeated. Pure.

Two records are compared. The ledger names the samples of each step; its numbers were reduced
together with the gradients. The feeds' records name the positions from which each step should have
taken its samples. Consecutive positions form passes over the dataset, and one pass contains each
sample once. So a sample that occurs twice in a pass was repeated, and one that is missing from a
complete pass was lost. This is true of any permutation, so the permutation is not computed here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep_agent.tools.number_set import NumberSet
from everstep_contract.feed import FeedRecord, Order, Segment
from everstep_contract.ledger import LedgerEntry


class Feeds:
    """Takes the entries of the whole lineage one after the other, in order of step, and keeps none of
    them. All loops over a feed in one step share one draw.

    Args:
        records: of the newest checkpoint; None: its writer recorded no feeds.
    """

    def __init__(self, records: Mapping[str, FeedRecord] | None) -> None:
        self._known = {name: _Feed(f"feed {name}", r) for name, r in (records or {}).items()}
        self._drew: dict[str, int] = {}
        """Feed → the step of its last draw."""
        self._unnamed = 0
        """The first step whose feed has no name; 0: there is none."""

    def add(self, entry: LedgerEntry) -> None:
        if self._drew.get(entry.feed) == entry.step:
            return
        self._drew[entry.feed] = entry.step
        if not entry.feed:
            self._unnamed = self._unnamed or entry.step
        elif entry.feed in self._known:
            self._known[entry.feed].add(entry.step, entry.samples)

    def find_repeats(self) -> "Repeats | None":
        """What must be asked of the same entries once more, before `problems`; None: nothing."""
        found = {name: r for name, feed in self._known.items() if (r := feed.find_repeat())}
        return Repeats(found) if found else None

    def problems(self) -> list[str]:
        """Lost and repeated samples and changes of the order, the first of each kind for each feed."""
        problems = []
        if self._unnamed:
            problems.append(
                f"steps {self._unnamed} to {self._drew['']} were written by a version "
                "that did not record feeds: lost or repeated samples in them cannot be detected"
            )
        for name in sorted({*self._drew, *self._known} - {""}):
            if name in self._known:
                problems += self._known[name].problems(late=bool(self._unnamed))
            else:
                problems.append(
                    f"feed {name}: the ledger has it, the checkpoint has no record of it"
                )
        return problems


@dataclass(slots=True, kw_only=True)
class Repeat:
    """A sample that was used twice in one pass."""

    sample: int
    since: int
    """The step in which the pass began."""
    skip: int
    """Samples of that step that belong to the pass before."""
    first: int = 0
    """The step that used it first; 0: not known yet."""


class Repeats:
    """Finds the first use of each repeated sample, by walking over the entries again."""

    def __init__(self, repeats: Mapping[str, Repeat]) -> None:
        self._repeats = repeats
        self._drew: dict[str, int] = {}
        """Feed → the step of its last draw."""

    def add(self, entry: LedgerEntry) -> None:
        again = self._drew.get(entry.feed) == entry.step
        self._drew[entry.feed] = entry.step
        repeat = self._repeats.get(entry.feed)
        if again or repeat is None or repeat.first or entry.step < repeat.since:
            return
        skip = repeat.skip if entry.step == repeat.since else 0
        if repeat.sample in entry.samples[skip:]:
            repeat.first = entry.step


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


class _Feed:
    """One feed: its draws, compared with its record."""

    def __init__(self, feed: str, record: FeedRecord) -> None:
        self._feed, self._segments = feed, record.segments
        self._at = self._taken = 0
        """The current segment, and how many draws of it were taken."""
        self._passes = Passes(feed)
        self._start = ""
        """Why the feed does not start with its first sample."""
        self._said = self._wrong = ""
        """What the beginning of the current segment shows; why its draws do not match it."""
        self._found: list[str] = []
        self._extra = 0
        """The first step that the record does not cover; 0: there is none."""

    def add(self, step: int, samples: Sequence[int]) -> None:
        if self._at == len(self._segments):
            self._extra = self._extra or step
            return
        segment = self._segments[self._at]
        if self._taken == segment.draws:  # and they do not match
            return
        if not self._taken:
            self._begin(segment, step)
        if len(samples) != segment.global_batch and not self._wrong:
            self._wrong = (
                f"step {step} used {len(samples)} samples, global_batch is {segment.global_batch}"
            )
        if not self._wrong:
            self._passes.add(step, samples)
        self._taken += 1
        if self._taken == segment.draws and not self._wrong:
            self._found += [self._said] if self._said else []
            self._at, self._taken = self._at + 1, 0

    def _begin(self, segment: Segment, step: int) -> None:
        before = self._segments[self._at - 1] if self._at else None
        self._said = ""
        if segment.change:
            what = f"{segment.change}{self._passes.left()}"
            self._said = f"{self._feed}: the order changed at step {segment.step}: {what}"
        elif before is None and segment.sample:
            self._start = (
                f"{self._feed} starts at step {segment.step} with sample {segment.sample}, not 0"
            )
        elif before is not None and segment.sample != before.next_sample:
            self._said = (
                f"{self._feed}: step {segment.step} goes on with sample {segment.sample}, but "
                f"{before.next_sample} came next"
            )
        if step != segment.step:
            self._wrong = f"step {segment.step} drew from it first, in the ledger step {step}"
        self._passes.begin(segment, step)

    def find_repeat(self) -> Repeat | None:
        return None if self._find_mismatch() else self._passes.repeat

    def problems(self, *, late: bool) -> Iterator[str]:
        """`late`: the ledger does not name the feed of earlier steps, which is reported separately."""
        if self._start and self._at and not late:
            yield self._start
        yield from self._found
        if mismatch := self._find_mismatch():
            yield f"{self._feed}: {mismatch}"
            return
        if self._extra:
            yield (
                f"{self._feed}: step {self._extra} drew from it, but the checkpoint has no record of that"
            )
        yield from self._passes.problems()

    def _find_mismatch(self) -> str:
        if self._at == len(self._segments):
            return ""
        segment = self._segments[self._at]
        if self._taken < segment.draws:
            return f"{segment.draws} steps from step {segment.step} on drew from it, the ledger has {self._taken}"
        return self._wrong


class Passes:
    """Counts the samples of a feed, pass by pass."""

    def __init__(self, feed: str) -> None:
        self.repeat: Repeat | None = None
        """The first sample that was used twice."""
        self._feed = feed
        self._order: Order | None = None
        self._place = 0
        self._began = 0
        """Position at which counting of this pass started. A pass that was not counted from its
        start is never reported as incomplete.
        """
        self._since = (0, 0)
        """The step in which it started, and how many of the step's samples precede it."""
        self._seen = NumberSet()
        """The samples of the current pass."""
        self._lost = self._odd = ""
        self._again = self._times = 0
        """The step of the first repeat, and how many there are."""

    def begin(self, segment: Segment, step: int) -> None:
        """The next draws belong to this segment; `step`: the first of them."""
        order = replace(segment.order, seed=0, fingerprint=None)
        if segment.change or order != self._order or segment.sample != self._place:
            self._order, self._place, self._began = order, segment.sample, segment.sample
            self._seen, self._since = NumberSet(), (step, 0)

    def add(self, step: int, samples: Sequence[int]) -> None:
        length = self._order.length if self._order else None
        for index, sample in enumerate(samples):
            place, self._place = self._place, self._place + 1
            if length is not None:
                self._count(sample, step, length)
                if self._place % length == 0:
                    self._end_pass(length, step, index + 1)
            elif sample != place:
                self._odd = self._odd or f"step {step} used position {sample} instead of {place}"

    def left(self) -> str:
        """How far the current pass has come."""
        length = self._order.length if self._order else None
        return f", after {len(self._seen)} of {length} samples of a pass" if length else ""

    def problems(self) -> list[str]:
        found = [self._odd, self._lost]
        if self.repeat:
            more = f" (and {self._times - 1} more)" if self._times > 1 else ""
            found.insert(
                0,
                f"sample {self.repeat.sample} was used twice in one pass over the data, at steps {self.repeat.first} "
                f"and {self._again}{more}",
            )
        return [f"{self._feed}: {problem}" for problem in found if problem]

    def _count(self, sample: int, step: int, length: int) -> None:
        if not self._seen.add(sample):
            self._times += 1
            if self.repeat is None:
                since, skip = self._since
                self.repeat, self._again = Repeat(sample=sample, since=since, skip=skip), step
        elif not 0 <= sample < length:
            self._odd = self._odd or f"step {step} used sample {sample} of {length}"

    def _end_pass(self, length: int, step: int, used: int) -> None:
        """`used`: how many samples of the step belong to it."""
        whole = self._began <= self._place - length
        missing = length - len(self._seen)
        if whole and missing and not self._lost:
            first = next(i for i in range(length) if i not in self._seen)
            self._lost = (
                f"a pass over the data ended at step {step} without {missing} of {length} samples; the first of them "
                f"is {first}"
            )
        self._seen, self._since = NumberSet(), (step, used)
