"""The count of samples, checked on runs with known faults."""

from collections.abc import Sequence

from everstep_contract.ledger import LedgerEntry
from everstep_stories.samples import build_account

DATASET, BATCH = 8, 4


def entry(step: int, samples: Sequence[int], counts: tuple[int, ...] = (1, 1)) -> LedgerEntry:
    return LedgerEntry(
        epoch=1, step=step, samples=tuple(samples), counts=counts, weights=(2.0, 2.0),
        losses=(1.0, 1.0), loss=1.0,
    )  # fmt: skip


def run(steps: int) -> list[LedgerEntry]:
    """A run without faults. Two steps are one pass over the dataset."""
    return [entry(s, range(4) if s % 2 else range(4, 8)) for s in range(1, steps + 1)]


def test_a_run_without_a_gap_is_exact_also_in_the_middle_of_a_pass() -> None:
    for steps in range(1, 8):
        account = build_account(run(steps), dataset=DATASET, batch=BATCH)
        assert account.exact
        assert account.steps == steps


def test_a_step_that_is_missing_is_a_gap_and_loses_its_samples() -> None:
    account = build_account([e for e in run(4) if e.step != 2], dataset=DATASET, batch=BATCH)
    assert account.gaps == (2,)
    assert account.lost == 4


def test_a_step_that_was_taken_twice_repeats_its_samples() -> None:
    account = build_account([*run(4), entry(4, range(4, 8))], dataset=DATASET, batch=BATCH)
    assert account.gaps == (4,)
    assert account.repeated == 4
    assert not account.exact


def test_a_wrong_sample_in_place_of_another_is_one_lost_and_one_repeated() -> None:
    account = build_account(
        [entry(1, range(4)), entry(2, (4, 5, 6, 0))], dataset=DATASET, batch=BATCH
    )
    assert (account.lost, account.repeated) == (1, 1)


def test_a_micro_batch_that_two_ranks_contributed_is_not_exact() -> None:
    account = build_account([entry(1, range(4), counts=(1, 2))], dataset=DATASET, batch=BATCH)
    assert not account.exact


def test_an_empty_ledger_has_no_steps() -> None:
    assert build_account([], dataset=DATASET, batch=BATCH).steps == 0
