"""A pod gets SIGTERM, and its notice ends before its save is committed or the armed boundary is over: it leaves."""

from dataclasses import replace

import pytest

from agent.a_term import a_term
from agent.given import a_report, a_worker, an_epoch, stepping, wanting
from agent.test_limits import start_to_leave
from everstep_agent.coordinator import boundary_turn, join, leave_in_place
from everstep_agent.coordinator.awake_clock import AwakeClock
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.watch import Watch
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import Boundary, Stage
from everstep_contract.log import Commit

LATE = leave_in_place.LEAVE_SECONDS


def told(left: float, slot: int = 1) -> AgentReport:
    """The report of an agent whose notice ends in so many seconds."""
    return replace(stepping(slot), in_place=True, leaving=True, notice=left)


async def test_a_pod_leaves_before_its_notice_ends_although_its_save_cannot_be_committed() -> None:
    """However long before the leave began the notice did, as in another epoch or another coordinator's term."""
    term, watch, workers = start_to_leave()
    term.change(term.state.disarm())
    term.take(told(LATE + 0.5))
    boundary_turn.settle(term, watch, workers, 1.1)
    assert term.running.leaving == ()
    term.take(told(LATE))
    boundary_turn.settle(term, watch, workers, 1.2)
    assert term.running.leaving == ((1, 0, 1),)
    assert "committed until 2 s before the end of the pod's grace period" in term.state.notes[-1]


async def test_a_notice_runs_on_after_the_report_that_tells_of_it() -> None:
    term, clock = a_term(wanting(2), in_place=1), [100.0]
    term.clock = AwakeClock(lambda: clock[0])
    term.take(told(LATE + 1.5))
    clock[0] += 1.4
    assert not leave_in_place.is_notice_over(term, [(1, 0, 1)])
    clock[0] += 0.2
    assert leave_in_place.is_notice_over(term, [(1, 0, 1)])
    assert not leave_in_place.is_notice_over(term, [(0, 0, 1)]), "that is another pod's notice"


def step_towards(boundary: Boundary, *reports: AgentReport, **settings: object) -> Term:
    """Two members step, and a boundary is armed before slot 1 gets SIGTERM."""
    term = a_term(wanting(2), **({"in_place": 1} | settings))
    term.change(term.state.begin_epoch(an_epoch(stage=Stage.RUNNING, boundary=boundary)))
    term.take(replace(stepping(0), in_place=True))
    for report in reports:
        term.take(report)
    return term


def turn(term: Term, watch: Watch) -> None:
    boundary_turn.settle(term, watch, [a_worker(), a_worker()], 1.0)


@pytest.mark.parametrize(
    "armed",
    [
        Boundary(step=8, confirmed=True),
        Boundary(step=8),
        Boundary(step=8, near=True, confirmed=True),
        Boundary(step=8, hold=True, confirmed=True),
    ],
    ids=["a save", "not confirmed", "a near save", "a join"],
)
async def test_a_pod_leaves_beside_an_armed_boundary_once_its_notice_is_over(
    armed: Boundary,
) -> None:
    """Steps may take longer than the notice: the pod would end before the boundary is over, and be lost."""
    term, watch = step_towards(armed, told(LATE + 0.5)), Watch.start(0.0)
    turn(term, watch)
    assert (term.running.leaving, term.running.boundary) == ((), armed)
    term.take(told(LATE))
    turn(term, watch)
    turn(term, watch)
    assert term.running.leaving == ((1, 0, 1),)
    assert term.running.boundary == armed, "ranks may already have stopped at it"
    assert [(i.cause, i.slots) for i in term.state.incidents.levels()] == [("Leave", (1,))]
    (note,) = term.state.notes
    assert "slot 1 leaves without a checkpoint" in note


async def test_a_boundary_at_which_the_epoch_ends_is_waited_for() -> None:
    armed = Boundary(step=8, stay=True, confirmed=True)
    term = step_towards(armed, told(0.0))
    turn(term, Watch.start(0.0))
    assert (term.running.leaving, term.running.boundary) == ((), armed)


@pytest.mark.parametrize(
    ("slots", "settings"),
    [((0, 1), {}), ((1,), {"in_place": 0}), ((1,), {"on_loss": "Wait"})],
    ids=["all leave", "all restart", "all wait"],
)
async def test_nobody_leaves_beside_a_boundary_if_no_others_continue(
    slots: tuple[int, ...], settings: dict[str, object]
) -> None:
    armed = Boundary(step=8, confirmed=True)
    term = step_towards(armed, *(told(0.0, slot) for slot in slots), **settings)
    turn(term, Watch.start(0.0))
    assert (term.running.leaving, term.running.boundary) == ((), armed)


@pytest.mark.parametrize("is_over", [False, True], ids=["time is left", "the notice is over"])
async def test_a_pod_whose_notice_is_over_waits_for_no_boundary_at_which_its_replacement_joins(
    is_over: bool,
) -> None:
    term, watch, workers = start_to_leave()
    term.change(term.state.disarm())
    term.take(told(LATE + 10))
    term.take(a_report(2, fresh=(1,), in_place=True, prepared=(1,)))
    boundary_turn.settle(term, watch, workers, 2.0)
    assert term.running.joining, "another pod is invited to its place"
    saved = Commit(epoch=1, token="t", step=6, manifest="m", digest="d")
    term.change(term.state.commit(saved))
    term.take(told(LATE if is_over else LATE + 9))
    boundary_turn.settle(term, watch, workers, 3.0)
    boundary = term.running.boundary
    assert (boundary is not None and boundary.hold) == (not is_over)
    assert bool(term.running.leaving) == is_over


async def test_nobody_holds_for_newcomers_after_the_notice_of_a_leaving_pod_is_over() -> None:
    term = step_towards(Boundary(step=5, hold=True, confirmed=True), told(LATE + 0.5))
    assert not join._is_called_away(term, [(1, 0, 1)])
    term.take(told(LATE))
    assert join._is_called_away(term, [(1, 0, 1)])
