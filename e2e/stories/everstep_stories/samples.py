"""Checks that all samples were used, each once per pass over the data. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from everstep_contract.ledger import LedgerEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The result of checking a ledger, which should hold the steps 1, 2, 3, …"""

    steps: int
    gaps: tuple[int, ...]
    """Steps that are missing or occur twice."""
    lost: int
    repeated: int

    @property
    def exact(self) -> bool:
        return not (self.gaps or self.lost or self.repeated)


def build_account(entries: Sequence[LedgerEntry], *, dataset: int, batch: int) -> Account:
    """Check a run that passes repeatedly over `dataset` samples and uses `batch` of them per step.

    Each complete pass must use every sample once. In the last, incomplete pass only samples that
    were used more than once are errors.
    """
    steps = Counter(e.step for e in entries)
    last = max(steps, default=0)
    used = Counter(sample for e in entries for sample in e.samples)
    whole, rest = divmod(last * batch, dataset)
    missing = sum(max(0, whole - used[sample]) for sample in range(dataset))
    surplus = sum(max(0, n - whole - bool(rest)) for n in used.values())
    odd = sum(abs(count - 1) for e in entries for count in e.counts)
    return Account(
        steps=last,
        gaps=tuple(s for s in range(1, last + 1) if steps[s] != 1),
        lost=max(missing, last * batch - used.total()),
        repeated=max(surplus, used.total() - last * batch, odd),
    )
