"""The Event for a container that exceeded its memory limit is written once for each end."""

from dataclasses import replace

from everstep_operator.jobs.observed import Ended, Observed, Pod
from everstep_operator.jobs.out_of_memory import REASON, ToldOutOfMemory
from job_builders import a_pod, an_observation

KILLED = Ended(exit_code=137, reason=REASON, message="", report=None)
FAILED = replace(KILLED, reason="Error")


def with_pods(*pods: Pod) -> Observed:
    return an_observation(pods=pods)


def test_an_end_is_told_once_with_its_pods_and_the_fix() -> None:
    told = ToldOutOfMemory()
    assert told.take_new(with_pods(a_pod(0), a_pod(1))) is None
    ended = with_pods(a_pod(0, ended=KILLED), a_pod(1, last_ended=KILLED, restarts=1))
    event = told.take_new(ended)
    assert event is not None
    assert (event.reason, event.warning) == ("OOMKilled", True)
    assert event.message.startswith("lm-0-1, lm-1-1: ")
    assert "raise resources.limits.memory" in event.message
    restarted = a_pod(0, last_ended=KILLED, restarts=1)
    assert told.take_new(with_pods(restarted, a_pod(1, last_ended=KILLED, restarts=1))) is None
    again = told.take_new(with_pods(restarted, a_pod(1, last_ended=KILLED, restarts=2)))
    assert again is not None
    assert again.message.startswith("lm-1-1: ")


def test_what_was_so_before_this_operator_looked_is_no_news() -> None:
    told = ToldOutOfMemory()
    assert told.take_new(with_pods(a_pod(0, last_ended=KILLED, restarts=1))) is None


def test_another_end_is_none_of_its_business() -> None:
    told = ToldOutOfMemory()
    told.take_new(with_pods(a_pod(0)))
    assert told.take_new(with_pods(a_pod(0, ended=FAILED))) is None
