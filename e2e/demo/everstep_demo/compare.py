"""Compares the ledgers of the disturbed and the undisturbed run. Pure."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from everstep_contract.ledger import LedgerEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    steps: int
    samples: int
    samples_lost: int
    """Samples of the undisturbed run that the disturbed one never used."""
    samples_repeated: int
    """Samples that the disturbed run used more often than the undisturbed one."""
    same_order: bool
    """Whether each step used the same samples in the same order."""
    max_abs_loss_difference: float
    first_difference: int | None
    """First step whose samples or losses differ."""

    @property
    def equal(self) -> bool:
        return self.same_order and self.max_abs_loss_difference == 0.0 and self.samples_lost == 0


def compare(run: Sequence[LedgerEntry], reference: Sequence[LedgerEntry]) -> Comparison:
    """Both must be ordered by step. A step that is missing in one of them counts as different."""
    used = Counter(sample for entry in run for sample in entry.samples)
    wanted = Counter(sample for entry in reference for sample in entry.samples)
    pairs = list(itertools.zip_longest(run, reference))
    differing = [
        (theirs or ours).step
        for ours, theirs in pairs
        if ours is None or theirs is None or not _alike(ours, theirs)
    ]
    return Comparison(
        steps=len({entry.step for entry in run}),
        samples=used.total(),
        samples_lost=(wanted - used).total(),
        samples_repeated=(used - wanted).total(),
        same_order=all(a and b and _place(a) == _place(b) for a, b in pairs),
        max_abs_loss_difference=max(
            (_gap(a, b) if a and b else float("inf") for a, b in pairs), default=float("inf")
        ),
        first_difference=differing[0] if differing else None,
    )


def _place(entry: LedgerEntry) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return entry.step, entry.reduction, entry.samples, entry.counts


def _alike(ours: LedgerEntry, theirs: LedgerEntry) -> bool:
    return _place(ours) == _place(theirs) and _gap(ours, theirs) == 0.0


def _gap(ours: LedgerEntry, theirs: LedgerEntry) -> float:
    """Largest difference between the losses; infinite if one step has more losses."""
    if len(ours.losses) != len(theirs.losses):
        return float("inf")
    pairs = zip((ours.loss, *ours.losses), (theirs.loss, *theirs.losses), strict=True)
    return max(abs(a - b) for a, b in pairs)
