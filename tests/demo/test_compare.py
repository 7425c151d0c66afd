from dataclasses import replace

from everstep_contract.ledger import LedgerEntry
from everstep_demo.compare import compare
from everstep_demo.report import build_report, build_table, find_problems
from everstep_demo.steplog import Logs
from everstep_demo.story import (
    ACTS,
    COMMITTED,
    CORDONED,
    FIRST_STEP,
    FULL_SIZE,
    MOVED,
    Incident,
    Measured,
)


def an_entry(step: int, *, epoch: int = 1, loss: float = 0.5) -> LedgerEntry:
    samples = (4 * step, 4 * step + 1, 4 * step + 2, 4 * step + 3)
    return LedgerEntry(
        epoch=epoch,
        step=step,
        samples=samples,
        counts=(1, 1),
        weights=(2.0, 2.0),
        losses=(loss, loss),
        loss=loss,
    )


CLEAN = Logs(recomputed=(), missing=(), other_losses=())
REFERENCE = [an_entry(step) for step in range(1, 6)]


def an_incident(**changes: object) -> Incident:
    incident = Incident(
        act=ACTS[0],
        node="node-2",
        moved_to="node-4",
        reached={CORDONED: 1.5, COMMITTED: 2.25, FIRST_STEP: 14.0, MOVED: 15.0, FULL_SIZE: 16.5},
        resumed_from=60,
        steps_lost=0,
    )
    return replace(incident, **changes)


def measured(**changes: object) -> Measured:
    story = Measured(
        incidents=(an_incident(),),
        quarantined_nodes=("node-2",),
        goodput=0.61,
        completed=True,
        seconds=120.0,
        logs=CLEAN,
        tensors=14,
    )
    return replace(story, **changes)


def test_runs_that_differ_only_in_their_epochs_are_equal() -> None:
    run = [replace(entry, epoch=7) for entry in REFERENCE]
    compared = compare(run, REFERENCE)
    assert compared.equal
    assert compared.steps == 5
    assert compared.samples == 20


def test_the_last_bit_of_one_loss_counts() -> None:
    run = [*REFERENCE[:3], an_entry(4, loss=0.5 + 2**-53), REFERENCE[4]]
    compared = compare(run, REFERENCE)
    assert compared.max_abs_loss_difference == 2**-53
    assert compared.first_difference == 4
    assert not compared.equal


def test_a_missing_step_loses_its_samples() -> None:
    compared = compare(REFERENCE[:4], REFERENCE)
    assert compared.samples_lost == 4
    assert compared.samples_repeated == 0
    assert not compared.equal


def test_a_step_taken_twice_repeats_its_samples() -> None:
    compared = compare([*REFERENCE[:3], REFERENCE[2], *REFERENCE[3:]], REFERENCE)
    assert compared.samples_repeated == 4
    assert not compared.equal


def test_two_empty_ledgers_prove_nothing() -> None:
    assert "the ledger is empty" in find_problems(measured(), compare([], []))


def test_all_is_right_only_if_nothing_was_lost() -> None:
    equal = compare(REFERENCE, REFERENCE)
    assert build_report(measured(), equal)["ok"]
    assert not build_report(measured(completed=False), equal)["ok"]
    assert not build_report(measured(incidents=(an_incident(steps_lost=2),)), equal)["ok"]
    assert not build_report(measured(incidents=(an_incident(steps_lost=None),)), equal)["ok"]
    assert not build_report(measured(logs=replace(CLEAN, recomputed=(61,))), equal)["ok"]
    assert not build_report(measured(logs=replace(CLEAN, missing=(61,))), equal)["ok"]
    assert not build_report(measured(logs=replace(CLEAN, other_losses=(61,))), equal)["ok"]
    assert not build_report(measured(tensor_differences=("model.w: other values",)), equal)["ok"]
    assert not build_report(measured(tensors=0), equal)["ok"]
    assert not build_report(measured(quarantined_nodes=()), equal)["ok"]
    assert not build_report(measured(quarantined_nodes=("node-2", "node-3")), equal)["ok"]
    assert not build_report(measured(), compare(REFERENCE[:4], REFERENCE))["ok"]
    assert not build_report(measured(problems=("the lab broke",)), equal)["ok"]


def test_the_report_has_the_promised_keys() -> None:
    report = build_report(measured(), compare(REFERENCE, REFERENCE))
    assert {
        "incidents", "steps_lost", "samples_lost", "samples_repeated", "steps_recomputed",
        "max_abs_loss_difference", "quarantined_nodes", "goodput", "ok",
    } <= report.keys()  # fmt: skip
    assert {
        "fault", "fault_to_cordon_s", "fault_to_committed_s", "fault_to_first_new_step_s",
        "fault_to_full_size_s", "longest_pause_of_the_others_s", "usual_step_s",
        "usual_step_of_the_others_s",
    } <= report["incidents"][0].keys()  # fmt: skip


def test_the_table_says_what_was_not_reached() -> None:
    report = build_report(
        measured(incidents=(an_incident(reached={}),)), compare(REFERENCE, REFERENCE)
    )
    assert "not reached" in build_table(report)


def test_the_table_says_how_long_the_others_paused() -> None:
    paused = an_incident(others_pause=0.452, usual_pause=0.21)
    for shrunk, shown in ((None, "0.21 s\n"), (0.312, "0.21 s, 0.31 s with one worker less\n")):
        incident = replace(paused, shrunk_pause=shrunk)
        report = build_report(measured(incidents=(incident,)), compare(REFERENCE, REFERENCE))
        assert f"0.45 s between two steps; a step takes {shown}" in build_table(report)
    assert "unknown" in build_table(build_report(measured(), compare(REFERENCE, REFERENCE)))


def test_a_worker_that_dies_saves_nothing_and_one_that_leaves_must() -> None:
    leaves, dies = ACTS
    reached = {CORDONED: 1.5, FIRST_STEP: 2.0, MOVED: 5.0, FULL_SIZE: 8.0}
    assert an_incident(act=dies, reached=reached).missed == []
    assert an_incident(act=leaves, reached=reached).missed == [COMMITTED]
    assert an_incident().missed == []
