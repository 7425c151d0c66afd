"""Workers die before they are in an epoch: after a few in a row the container is restarted."""

import io
from typing import Any

from everstep_agent import logline
from everstep_agent.identity import Identity
from everstep_agent.peers.agent_report import FailureReport
from everstep_agent.pod import faults
from everstep_agent.pod.deaths import EARLY_DEATHS, Deaths
from everstep_agent.pod.worker import Worker
from everstep_contract import report


def deaths() -> Deaths:
    me = Identity(slot=0, attempt=0, incarnation=1, address="host-0:7070")
    return Deaths(me, logline.Log(io.StringIO()))


def killed() -> Worker:
    page: Any = None
    worker = Worker(local=0, life=1, pid=7, page=page, page_path="", spawned_at=0.0)
    worker.status = 9
    worker.death = faults.Death(cause=report.Cause.WORKER_DIED)
    return worker


def test_so_many_in_a_row_end_the_container():
    found = deaths()
    tries = [found.died_early(killed()) for _ in range(EARLY_DEATHS)]
    assert tries == [True] * (EARLY_DEATHS - 1) + [False]
    assert found.fatal is not None
    assert f"{EARLY_DEATHS} workers in a row ended before they could join" in found.fatal.message


def test_those_of_a_long_life_do_not_add_up():
    found = deaths()
    for _ in range(5):
        assert all(found.died_early(killed()) for _ in range(EARLY_DEATHS - 1))
        found.entered_epoch()
    assert found.fatal is None


def failed() -> Worker:
    worker = killed()
    worker.failed = FailureReport(cause=report.Cause.SCRIPT_ERROR.value, message="no such mount")
    worker.death = faults.Death(cause=report.Cause.SCRIPT_ERROR)
    return worker


def test_a_script_that_fails_before_anything_is_trained_ends_the_job():
    found = deaths()
    assert not found.died_early(failed())
    assert found.failure is not None
    assert found.fatal is None


def test_a_script_that_fails_in_one_pod_of_a_job_that_trains_is_tried_again_and_ends_no_job():
    """Its data may not be mounted there, or the network was away for a moment."""
    found = deaths()
    tries = [found.died_early(failed(), trained=True) for _ in range(EARLY_DEATHS)]
    assert tries == [True] * (EARLY_DEATHS - 1) + [False]
    assert found.failure is None
    assert found.fatal is not None
    assert report.Cause(found.fatal.cause) not in report.FOR_GOOD
    assert "no such mount" in found.fatal.message
