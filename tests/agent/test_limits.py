"""The coordinator's waits have limits: a round, an epoch's start, a boundary."""

from dataclasses import replace

from agent.a_term import a_term
from agent.given import a_report, a_worker, an_epoch, stepping, wanting
from everstep_agent.coordinator import boundaries, boundary_turn, gather
from everstep_agent.coordinator.breaks import find_late_start
from everstep_agent.peers.messages import Boundary, Stage, State
from everstep_contract import levels


async def test_a_round_that_does_not_start_is_burnt_and_another_is_opened() -> None:
    term = a_term(wanting(2), startup_seconds=600.0)
    term.take(a_report(0, joined=1))
    turn = gather.Round(number=1, opened=term.now(), numbered_at=term.now() - 599)
    gather._renew(term, turn)
    assert (turn.number, term.state.burnt) == (1, 0)
    turn.numbered_at -= 2
    gather._renew(term, turn)
    assert (turn.number, term.state.round, term.state.burnt) == (2, 2, 1)
    gather._renew(term, turn)
    assert turn.number == 2, "the next one has the whole limit"


def late(waited: float, *reports, trouble: bool = False):
    epoch = an_epoch(stage=Stage.STARTING)
    return find_late_start(epoch, reports, waited=waited, limit=100.0, trouble=trouble)


def test_an_epoch_that_does_not_start_is_broken_and_names_who_has_not_begun() -> None:
    started, other = stepping(0, state=State.TRACKED), a_report(1, joined=1)
    assert late(99.0, started, other) is None
    found = late(101.0, started, other)
    assert found is not None
    assert (found.cause, found.certain) == ("GroupBroken", False)
    assert "slot 1 has not started epoch 1 in 101 s" in found.message
    assert late(101.0, started, other, trouble=True) is None, "a store that is away is waited for"
    assert late(101.0, started, stepping(1, state=State.TRACKED)) is None


async def test_a_boundary_that_nobody_confirms_is_given_up_and_said() -> None:
    term = a_term(wanting(2))
    term.change(term.state.begin_epoch(an_epoch(boundary=Boundary(step=8))))
    watch = boundary_turn.Watch(save_at=0.0, moved_at=0.0, armed_at=100.0)
    workers = [a_worker(), a_worker()]
    assert not boundary_turn.settle(term, watch, workers, 100.0 + boundary_turn.ARM_SECONDS - 1)
    assert term.running.boundary == Boundary(step=8)
    term.take(replace(stepping(0), acked=8))
    assert not boundary_turn.settle(term, watch, workers, 100.0 + boundary_turn.ARM_SECONDS + 1)
    assert term.running.boundary is None
    assert "slot 1 did not answer" in term.state.notes[-1]


# --- one fault, one way back


def grows(eligible: int, waited: float, want: int = 4) -> str:
    wanted, members = wanting(want), an_epoch(2).members
    return boundaries.why_stay(
        wanted, members, [], eligible, coordinator=(0, 0, 1), waited=waited, gang=300.0
    )


def test_a_job_that_lost_two_slots_at_once_grows_once() -> None:
    assert grows(eligible=1, waited=0.0) == "", "the other slot's pod may be on its way"
    assert grows(eligible=2, waited=0.0) == "Grow"
    assert grows(eligible=1, waited=300.0) == "Grow"
    assert grows(eligible=0, waited=300.0) == ""


async def test_slots_that_are_lost_one_after_the_other_in_one_recovery_are_one_incident() -> None:
    term = a_term(wanting(3))
    for slot in (1, 2):
        name = f"slot {slot} (attempt 0) was declared gone"
        cause = boundary_turn.Cause(name="Gone", message=name, slots=(slot,))
        term.want(replace(term.wanted, incident=f"inc-{slot}"))
        term.open_incident(cause)
    (one,) = term.state.incidents.levels()
    assert (one.id, one.cause, one.slots) == ("inc-1", "Gone", (1, 2))
    assert isinstance(one, levels.RuntimeIncident)
