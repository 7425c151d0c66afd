"""What a ledger proves about a run, and what it does not. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep_agent.tools.number_set import NumberSet
from everstep_contract.ledger import LedgerEntry
from everstep_contract.log import Claim
from everstep_contract.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A row of the table: what one epoch contributed to the run."""

    epoch: int
    first: int
    last: int
    cause: str
    samples: int


class Steps:
    """Takes the entries of a run one after the other, in order of step, and keeps none of them: a long
    run's ledger does not fit into memory.
    """

    def __init__(self) -> None:
        self.samples: Counter[int] = Counter()
        """Epoch → samples; a second loop over a feed in a step uses the same ones."""
        self._present = NumberSet()
        self._seen: defaultdict[int, NumberSet] = defaultdict(NumberSet)
        """Reduction → steps."""
        self._twice: Counter[tuple[int, int]] = Counter()
        """(step, reduction) that occurs more than once → how often it occurs again."""
        self._step = (0, 0)
        self._drawn: dict[str, tuple[int, ...]] = {}
        """Feed → samples, in the current step."""
        self._uncounted = self._differs = ""

    def add(self, entry: LedgerEntry) -> None:
        self._present.add(entry.step)
        if not self._seen[entry.reduction].add(entry.step):
            self._twice[entry.step, entry.reduction] += 1
        self._uncounted = self._uncounted or _find_uncounted(entry)
        if (entry.epoch, entry.step) != self._step:
            self._step, self._drawn = (entry.epoch, entry.step), {}
        if entry.feed not in self._drawn:
            self._drawn[entry.feed] = entry.samples
            self.samples[entry.epoch] += len(entry.samples)
        elif self._drawn[entry.feed] != entry.samples:
            self._differs = self._differs or (
                f"step {entry.step}: its loops over feed {entry.feed or '?'} saw different samples"
            )

    def problems(self, steps: int) -> list[str]:
        """What the ledger does not prove, the first problem of each kind."""
        found = (self._once_each(steps), self._uncounted, self._differs)
        return [problem for problem in found if problem]

    def _once_each(self, steps: int) -> str:
        if self._twice:
            (step, _), again = min(self._twice.items())
            return f"step {step} is {again + 1} times in the ledger"
        missing = next((s for s in range(1, steps + 1) if s not in self._present), None)
        return f"step {missing} is missing from the ledger" if missing else ""


def _find_uncounted(entry: LedgerEntry) -> str:
    for index, count in enumerate(entry.counts):
        if count != 1:
            return f"step {entry.step}: micro-batch {index} came from {count} ranks, not 1"
    return ""


def build_epochs(
    manifest: Manifest, samples: Mapping[int, int], claims: Sequence[Claim]
) -> tuple[Segment, ...]:
    """`samples`: of each epoch."""
    causes = {c.epoch: c.cause for c in claims}
    rows: dict[int, Segment] = {}
    for s in manifest.ledger:
        held = rows.get(s.epoch)
        rows[s.epoch] = Segment(
            epoch=s.epoch,
            first=held.first if held else s.first,
            last=s.last,
            cause=causes.get(s.epoch, ""),
            samples=samples.get(s.epoch, 0),
        )
    return tuple(rows.values())
