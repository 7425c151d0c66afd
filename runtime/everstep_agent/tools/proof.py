"""What a ledger proves about a run, and what it does not. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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


def find_problems(entries: Sequence[LedgerEntry], steps: int) -> list[str]:
    """What the ledger does not prove, the first problem of each kind."""
    return [
        problem
        for problem in (
            _once_each(entries, steps),
            _contributed_once(entries),
            _one_sample_list(entries),
        )
        if problem
    ]


def _once_each(entries: Sequence[LedgerEntry], steps: int) -> str:
    seen = Counter((e.step, e.reduction) for e in entries)
    twice = next(((s, n) for (s, _), n in sorted(seen.items()) if n > 1), None)
    if twice:
        return f"step {twice[0]} is {twice[1]} times in the ledger"
    present = {e.step for e in entries}
    missing = next((s for s in range(1, steps + 1) if s not in present), None)
    return f"step {missing} is missing from the ledger" if missing else ""


def _contributed_once(entries: Sequence[LedgerEntry]) -> str:
    for entry in entries:
        for index, count in enumerate(entry.counts):
            if count != 1:
                return f"step {entry.step}: micro-batch {index} came from {count} ranks, not 1"
    return ""


def _one_sample_list(entries: Sequence[LedgerEntry]) -> str:
    """All loops over one feed in one step (two optimizers) must use the same samples."""
    first: dict[tuple[int, str], LedgerEntry] = {}
    for entry in entries:
        held = first.setdefault((entry.step, entry.feed), entry)
        if held.samples != entry.samples:
            return (
                f"step {entry.step}: its loops over feed {entry.feed or '?'} saw different samples"
            )
    return ""


def build_epochs(
    manifest: Manifest, entries: Sequence[LedgerEntry], claims: Sequence[Claim]
) -> tuple[Segment, ...]:
    causes = {c.epoch: c.cause for c in claims}
    rows: dict[int, Segment] = {}
    drawn: dict[int, dict[tuple[int, str], int]] = {}
    """Epoch → (step, feed) → samples; a second loop over a feed in a step uses the same ones."""
    for e in entries:
        drawn.setdefault(e.epoch, {})[e.step, e.feed] = len(e.samples)
    samples = {epoch: sum(used.values()) for epoch, used in drawn.items()}
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
