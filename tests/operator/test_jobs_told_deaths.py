"""Each death is reported to `health` once, and the record of deaths does not grow."""

from dataclasses import replace
from typing import Any

from everstep_contract.levels import RuntimeIncident
from everstep_operator.jobs.deaths import REMEMBERED, ToldDeaths
from everstep_operator.jobs.observed import Observed
from job_builders import a_pod, a_seen, an_end, an_observation


def with_pod(**changes: Any) -> Observed:
    return an_observation(pods=(a_pod(0, **changes),), seen=None)


def with_incidents(first: int, last: int) -> Observed:
    found = tuple(
        RuntimeIncident(id=f"i-{n}", cause="WorkerDied", message="m", slot=0)
        for n in range(first, last)
    )
    return an_observation(seen=a_seen(incidents=found))


def test_what_was_so_at_the_first_look_is_no_news_and_each_later_death_is_told_once() -> None:
    told = ToldDeaths()
    assert told.take_new(with_pod(restarts=3)) == []
    assert told.take_new(with_pod(restarts=4)) == ["node-0"]
    assert told.take_new(with_pod(restarts=4)) == []
    assert told.take_new(with_pod(phase="Succeeded", ended=an_end())) == []


def test_an_incident_that_is_not_told_for_a_moment_is_not_told_again() -> None:
    """A new coordinator does not know of the incident until it has read the run log."""
    told = ToldDeaths()
    told.take_new(with_incidents(0, 0))
    assert told.take_new(with_incidents(0, 2)) == ["node-0", "node-0"]
    told.take_new(replace(with_incidents(0, 0), seen=None))
    assert told.take_new(with_incidents(0, 2)) == []


def test_a_job_of_any_age_costs_the_same_memory() -> None:
    told = ToldDeaths()
    for life in range(3 * REMEMBERED):
        seen = with_incidents(life, life + 5).seen
        told.take_new(replace(with_pod(uid=f"uid-{life}", restarts=life), seen=seen))
    assert len(told._of_pods) == 1
    assert told._of_incidents is not None
    assert len(told._of_incidents) <= REMEMBERED
