"""Unit tests of an incident, from its cause to the first new step."""

import pytest

from agent.a_run import claim
from agent.a_term import a_term
from agent.given import an_epoch
from everstep_agent.agent_state import AgentState
from everstep_agent.coordinator import gather, rounds
from everstep_agent.coordinator.incidents import Cause, Incidents, from_levels
from everstep_agent.peers.messages import Levels
from everstep_contract import levels

DIED = Cause(name="WorkerDied", message="rank 1 died", slots=(1,), rank=1)


def opened(cause=DIED, now=1.0):
    return Incidents().open("i-1", cause, now=now)


def test_an_incident_measures_each_phase_from_the_end_of_the_last():
    known = opened(now=100.0).mark("detect", 100.25).mark("save", 101.0)
    known = known.mark("save", 999.0).mark("restart", 103.0)
    assert known.resumed
    closed = known.close()
    (ended,) = closed.levels()
    assert [(p.name, p.ms) for p in ended.phases] == [
        ("detect", 250), ("save", 750), ("restart", 2000),
    ]  # fmt: skip
    assert (ended.rung, ended.open) == ("restart", False)
    assert closed.current is None


def test_the_rung_is_the_last_one_that_was_taken():
    (ended,) = opened().take_rung("regroup").take_rung("restart").close().levels()
    assert ended.rung == "restart"
    leaves = Cause(name="Leave", message="slot 1 leaves", slots=(1,))
    (left,) = opened(leaves).take_rung("restart").close().levels()
    assert left.rung == "move"
    assert Incidents().take_rung("restart").levels() == ()


async def test_an_epoch_that_starts_anew_after_a_failed_regroup_is_a_restart():
    term = a_term(levels.Wanted())
    term.open_incident(DIED)
    term.change(term.state.with_incidents(term.state.incidents.take_rung("regroup")))
    start = rounds.Start(members=(), reason="Ready", message="all joined")
    gather._begin_epoch(term, claim(1, ()), start, None)
    assert [i.rung for i in term.state.incidents.close().levels()] == ["restart"]


def test_what_happens_during_an_incident_belongs_to_it():
    leaves = Cause(name="Leave", message="slot 1 leaves", slots=(1,))
    died = Cause(name="WorkerDied", message="rank 0 died", slots=(0,), rank=0)
    left = opened(leaves).mark("boundary", 1.5)
    (both,) = left.open("i-2", died, now=2.0).levels()
    assert (both.id, both.cause, both.slots) == ("i-1", "Leave", (1, 0))
    assert both.message == "slot 1 leaves; rank 0 died"


def test_a_better_word_replaces_a_cause_that_names_nobody_and_its_beginning_with_it():
    broken = opened(Cause(name="GroupBroken", message="rank 0: reset"), now=10.0)
    broken = broken.mark("detect", 10.1)
    assert broken.levels()[0].concerns(7)
    found = Cause(name="WorkerHung", message="rank 1 hung", slots=(1,), rank=1)
    (hung,) = broken.explain(found, since=4.0).levels()
    assert (hung.cause, hung.message, hung.slot, hung.rank) == ("WorkerHung", "rank 1 hung", 1, 1)
    assert [(p.name, p.ms) for p in hung.phases] == [("detect", 6100)]
    assert hung.concerns(1)
    assert not hung.concerns(7)


def test_the_phase_detect_begins_when_the_loss_was_noticed():
    (level,) = opened(now=10.0).detect(9.5, 10.0).levels()
    assert [(p.name, p.ms) for p in level.phases] == [("detect", 500)]


def test_steps_that_are_lost_twice_in_one_incident_add_up():
    (level,) = opened().resumes(40, 3).resumes(40, 2).levels()
    assert (level.step, level.steps_lost) == (40, 5)


def test_a_new_coordinator_goes_on_with_the_open_incident():
    open_ = levels.RuntimeIncident(id="i-2", cause="Gone", message="m")
    closed = levels.RuntimeIncident(id="i-1", cause="Gone", message="m", open=False)
    known = from_levels((closed, open_), now=5.0)
    assert known.id == "i-2"
    assert [i.id for i in known.levels()] == ["i-1", "i-2"]


def test_the_time_between_two_coordinators_counts_as_part_of_the_present_phase():
    detected = opened(now=1.0).detect(1.0, 2.0)
    (heir,) = from_levels(detected.levels(), now=9.0, since=2.5).mark("regroup", 10.0).levels()
    assert [(p.name, p.ms) for p in heir.phases] == [("detect", 1000), ("regroup", 7500)]
    running = detected.mark("regroup", 3.0).mark("restart", 4.0)
    (heir,) = from_levels(running.levels(), now=9.0, since=4.5).mark("first_step", 9.1).levels()
    assert heir.phases[-1].ms == 100, "the ranks may have stepped before the heir looked"


def test_an_agent_notes_when_it_hears_of_a_new_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("everstep_agent.agent_state.time.monotonic", lambda: now)
    state, incidents, heard = AgentState(), opened(now=1.0), []
    changed = incidents.mark("detect", 1.0)
    for now, found in ((5.0, incidents), (6.0, incidents), (7.0, changed)):  # noqa: B007
        seen = levels.Seen(incidents=found.levels())
        pod = levels.SlotAttempt(slot=0, attempt=1)
        state.take_published(Levels(coordinator=pod, address="host-0:7070", seen=seen))
        heard.append(state.phase_since)
    assert heard == [5.0, 5.0, 7.0]


def test_a_loss_before_anybody_has_stopped_for_a_planned_change_is_an_incident_of_its_own():
    leaves = Cause(name="Leave", message="slot 3 leaves", slots=(3,))
    died = Cause(name="WorkerDied", message="rank 1 was killed", slots=(1,), rank=1)
    lost = Incidents().open("inc-1", leaves, now=1.0).open("lm-1", died, now=2.0)
    assert [(i.id, i.cause, i.slots) for i in lost.levels()] == [("lm-1", "WorkerDied", (1,))]
    again = lost.take_rung("regroup").close().open("inc-1", leaves, now=9.0)
    assert [(i.id, i.cause) for i in again.levels()] == [("lm-1", "WorkerDied"), ("inc-1", "Leave")]
    own = Cause(name="AgentLost", message="pod 3 is gone", slots=(3,))
    (same,) = Incidents().open("inc-1", leaves, now=1.0).open("lm-1", own, now=2.0).levels()
    assert (same.id, same.cause) == ("inc-1", "Leave")
    stopped = Incidents().open("inc-1", leaves, now=1.0).mark("boundary", 2.0)
    assert [i.cause for i in stopped.open("lm-1", died, now=3.0).levels()] == ["Leave"]


@pytest.mark.parametrize(
    ("cause", "members", "id"),
    [
        pytest.param(DIED, 2, "", id="another slot's rank dies"),
        pytest.param(DIED, 3, "", id="before the lost slot has left the epoch"),
        pytest.param(Cause(name="Gone", message="", slots=(2,)), 3, "inc-1", id="the lost slot"),
        pytest.param(Cause(name="GroupBroken", message=""), 3, "inc-1", id="nobody is named"),
        pytest.param(Cause(name="Leave", message="", slots=(1,)), 2, "inc-1", id="a plan"),
    ],
)
async def test_a_loss_while_the_operator_still_moves_another_slot_is_an_incident_of_its_own(
    cause: Cause, members: int, id: str
) -> None:
    """That slot's next pod may wait for a node for hours."""
    gone = (levels.SlotAttempt(slot=2, attempt=0),)
    term = a_term(levels.Wanted(incident="inc-1", gone=gone))
    term.change(term.state.begin_epoch(an_epoch(members)))
    term.open_incident(cause)
    found = term.state.incidents.id
    assert found == id if id else found.startswith("job-")


async def test_a_slot_that_is_to_leave_and_dies_is_the_operators_incident() -> None:
    term = a_term(levels.Wanted(incident="inc-1", leave=(1,)))
    term.change(term.state.begin_epoch(an_epoch(2)))
    term.open_incident(DIED)
    assert term.state.incidents.id == "inc-1"


async def test_a_job_that_begins_again_continues_the_operators_incident() -> None:
    term = a_term(levels.Wanted(incident="inc-1"))
    term.open_incident(Cause(name="Replaced", message="all pods were replaced"))
    assert term.state.incidents.id == "inc-1"
