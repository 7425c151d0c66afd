"""Failures that name their device, and processes that SIGKILL does not end."""

from dataclasses import replace

import pytest

from everstep_contract import levels
from everstep_contract.report import CODE_OR_DATA, FOR_GOOD, OF_THE_POD, Cause
from everstep_operator.jobs.budgets import BUDGETS
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.restarts import FREE
from everstep_operator.jobs.wanted import build_wanted
from job_builders import NOW, a_pod, a_seen, a_slot, an_end, an_observation

DEATH = levels.DeviceDeath(id="1.1.1.0.2", slot=1, attempt=1, message="ECC error", age_ms=4000)


def wanted(**changes: object) -> levels.Wanted:
    told = plan(an_observation(seen=a_seen(device_deaths=(DEATH,)), **changes), NOW).wanted
    assert told is not None
    return told


def test_where_nobody_watches_the_gpus_nothing_is_waited_for() -> None:
    told = wanted()
    assert (told.watched, told.judged) == ((), ())


@pytest.mark.parametrize(
    ("page", "heard", "judged"),
    [(5.0, 0.0, ()), (3.0, 0.0, ("1.1.1.0.2",)), (5.0, 2.0, ("1.1.1.0.2",)), (6.5, 2.0, ())],
)
def test_a_death_is_judged_by_a_page_that_was_sampled_later(
    page: float, heard: float, judged: tuple[str, ...]
) -> None:
    """`page` is the age of the page. `heard` seconds ago the job reported a death that was then 4 s
    old.
    """
    told = wanted(judged_ages={"node-1": page, "node-0": 0.0}, seen_age=heard)
    assert told.watched == (0, 1)
    assert told.judged == judged


def test_a_death_in_a_pod_that_is_no_more_is_not_judged() -> None:
    pods = (a_pod(0), a_pod(2))
    observed = an_observation(seen=a_seen(device_deaths=(DEATH,)), pods=pods)
    told = plan(replace(observed, judged_ages={"node-1": 0.0}), NOW).wanted
    assert told is None or told.judged == ()


def stuck_by_its_own_word() -> Observed:
    told = levels.StuckPod(slot=1, attempt=1, message="rank 1 (pid 7) outlives SIGKILL")
    return an_observation(seen=a_seen(stuck=(told,)))


def stuck_by_its_report() -> Observed:
    ended = an_end(Cause.PROCESS_STUCK, "rank 1 (pid 7) outlives SIGKILL")
    pods = (a_pod(0), a_pod(1, ended=ended, phase="Succeeded"), a_pod(2))
    return an_observation(pods=pods)


@pytest.mark.parametrize("observed", [stuck_by_its_own_word(), stuck_by_its_report()])
def test_a_pod_with_a_process_that_outlives_sigkill_is_replaced(observed: Observed) -> None:
    planned = plan(observed, NOW)
    assert planned.counts
    (record,) = [r for r in planned.status.slots if r.slot == 1]
    assert (record.attempt, record.cause) == (2, "ProcessStuck")
    assert "outlives SIGKILL" in str(planned.events)


def test_the_end_of_its_container_is_no_proof_that_the_process_has_ended() -> None:
    record = [a_slot(s) for s in range(3)]
    assert build_wanted(stuck_by_its_report(), record).dead == ()
    killed = a_pod(1, ended=an_end(code=137), phase="Failed")
    ended = an_observation(pods=(a_pod(0), killed, a_pod(2)))
    (dead,) = build_wanted(ended, record).dead
    assert (dead.slot, dead.attempt, dead.incarnation) == (1, 1, 1)
    assert dead.reason == "Error, exit status 137"


def test_an_old_word_of_a_stuck_pod_does_not_replace_the_next_one() -> None:
    told = levels.StuckPod(slot=1, attempt=0, message="rank 1 (pid 7) outlives SIGKILL")
    assert not plan(an_observation(seen=a_seen(stuck=(told,))), NOW).counts


def test_every_interruption_that_a_restart_can_mend_has_a_budget_or_is_free() -> None:
    budgeted = frozenset[str]().union(*BUDGETS.values())
    mended = {c.value for c in Cause if c not in FOR_GOOD} | {c.value for c in CODE_OR_DATA}
    assert mended | {Cause.PROCESS_STUCK.value} <= budgeted | FREE
    assert Cause.PROCESS_STUCK in OF_THE_POD
