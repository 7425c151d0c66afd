"""Unit tests of the conclusion of a run on one machine."""

import pytest

from everstep_agent.local.conclusion import Conclusion, conclude
from everstep_contract.report import Cause, ExitReport


def end(
    *reports: ExitReport,
    committed: int = 10,
    interrupted: bool = False,
    given_up: ExitReport | None = None,
) -> Conclusion:
    return conclude(
        reports, run="train", committed=committed, interrupted=interrupted, given_up=given_up
    )


def a_report(cause: Cause, message: str = "…") -> ExitReport:
    return ExitReport(cause=cause, message=message)


def test_done_outranks_what_any_single_agent_says():
    found = end(a_report(Cause.AGENT), a_report(Cause.STORE), a_report(Cause.DONE, "trained"))
    assert found == Conclusion(status=0, said="done: trained")


def test_a_stop_by_hand_says_how_to_go_on():
    stopped = a_report(Cause.STOPPED, "stopped at step 7")
    assert end(stopped, interrupted=True) == Conclusion(
        status=130, said="stopped at step 7; resume with the same command (run 'train')"
    )
    assert end(stopped).status == 0


def test_a_failed_job_names_the_cause_and_the_step_that_is_safe():
    found = end(a_report(Cause.LEFT), a_report(Cause.NOT_FINITE, "step 15: the loss is nan"))
    assert found.status == 1
    assert found.complaint == "LossNotFinite: step 15: the loss is nan"
    assert found.said.endswith("run the same command again to resume from step 10 (run 'train')")


def test_why_the_launcher_gave_up_outranks_the_reports_of_the_agents_that_it_then_kills():
    lost = a_report(Cause.AGENT, "2 agents were lost and no new step was taken")
    found = end(lost, a_report(Cause.WORKER_DIED, "killed"), given_up=lost)
    assert found.complaint == "2 agents were lost and no new step was taken"
    assert end(a_report(Cause.DONE, "trained"), given_up=lost).status == 0


@pytest.mark.parametrize("cause", [Cause.SCRIPT_ERROR, Cause.STORE])
def test_a_job_that_never_saved_is_offered_nothing_to_go_on_from(cause: Cause):
    assert end(a_report(cause), committed=0).said == ""


def test_a_run_that_was_taken_over_is_not_told_to_take_it_back():
    found = end(a_report(Cause.FENCED, "job local/train (a1) has taken the run over"))
    assert found.complaint == "job local/train (a1) has taken the run over"
    assert found.said == "this one has stopped; the same command would take run 'train' over again"


def test_agents_that_were_killed_after_an_interrupt_are_no_failure():
    killed = a_report(Cause.AGENT, "killed by signal 9 (SIGKILL)")
    for found in (end(killed, interrupted=True), end(interrupted=True)):
        assert (found.status, found.complaint) == (130, "")
        assert found.said == "run the same command again to resume from step 10 (run 'train')"


def test_agents_that_were_all_killed():
    found = end(committed=0)
    assert (found.status, found.complaint) == (1, "every agent was killed")
    assert (
        found.said
        == "run the same command again to resume from the start: nothing was saved (run 'train')"
    )
