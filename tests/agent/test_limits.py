"""The coordinator's waits have limits: a round, an epoch's start, a boundary."""

from dataclasses import replace

import pytest

from agent.a_term import a_term
from agent.given import a_claim, a_member, a_report, a_worker, an_epoch, stepping, wanting
from everstep_agent.coordinator import (
    boundaries,
    boundary_turn,
    due_saves,
    faults,
    gather,
    leave_in_place,
    planned_moves,
    train,
)
from everstep_agent.coordinator.breaks import find_late_regroup, find_late_start
from everstep_agent.coordinator.incidents import Cause
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.watch import Watch
from everstep_agent.peers.agent_report import State, WorkerReport
from everstep_agent.peers.epoch_level import Boundary, InPlace, Stage
from everstep_contract import levels
from everstep_contract.log import Commit
from everstep_contract.units import Mesh


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
    assert turn.number == 2, "the renewed round must get the full limit"


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
    assert late(101.0, started, other, trouble=True) is None, "no limit while the store is away"
    assert late(101.0, started, stepping(1, state=State.TRACKED)) is None


def test_survivors_that_form_no_group_restart_and_sooner_if_one_tells_that_it_failed() -> None:
    """The death that made it fail is found before, if it is reported within a second."""
    epoch = an_epoch(stage=Stage.STARTING, in_place=InPlace(former=1, applied=5, reductions=0))
    through, forms = a_worker(), a_worker(state=State.HELD)
    failed = a_worker(state=State.HELD, why="still connecting after 2 s")

    def late(waited: float, *workers: WorkerReport) -> str:
        found = find_late_regroup(epoch, workers, waited=waited, limit=10.0, limit_if_failed=1.0)
        return found.message if found else ""

    assert not late(9.9, through, forms)
    assert late(11.0, through, forms) == (
        "1 of 2 ranks could not go on in place in 11 s; all restart"
    )
    assert not late(0.9, forms, failed)
    assert late(2.1, forms, failed) == (
        "2 of 2 ranks could not go on in place in 2 s (still connecting after 2 s); all restart"
    )


async def test_a_boundary_that_nobody_confirms_is_given_up_and_said() -> None:
    term = a_term(wanting(2))
    term.change(term.state.begin_epoch(an_epoch(boundary=Boundary(step=8))))
    watch = replace(Watch.start(0.0), armed_at=100.0)
    workers = [a_worker(), a_worker()]
    assert not boundary_turn.settle(term, watch, workers, 100.0 + boundary_turn.ARM_SECONDS - 1)
    assert term.running.boundary == Boundary(step=8)
    term.take(replace(stepping(0), acked=8))
    assert not boundary_turn.settle(term, watch, workers, 100.0 + boundary_turn.ARM_SECONDS + 1)
    assert term.running.boundary is None
    assert "slot 1 did not answer" in term.state.notes[-1]


@pytest.mark.parametrize("hold", [False, True], ids=["a save", "a join"])
async def test_only_a_boundary_at_which_ranks_save_puts_off_the_next_save(hold: bool) -> None:
    """If newcomers could not join time after time, no save by the clock would be made."""
    term = a_term(wanting(2))
    term.change(term.state.begin_epoch(an_epoch(boundary=Boundary(step=8, hold=hold))))
    watch = replace(Watch.start(0.0), armed_at=100.0, dropped_at=3)
    boundary_turn.settle(term, watch, [a_worker(), a_worker()], 200.0)
    assert term.running.boundary is None
    assert (watch.save_at, watch.dropped_at) == ((0.0, 3) if hold else (200.0, None))


# --- continuing in place


def test_losses_one_after_another_do_not_put_off_saves_by_seconds() -> None:
    watch = Watch.start(0.0)
    for loss in (20.0, 40.0, 60.0):
        watch = watch.renew(loss)
    assert (watch.save_at, watch.began) == (0.0, 60.0)


@pytest.mark.parametrize(("committed", "every"), [(3, 0), (4, 0), (3, 7), (3, 50)])
async def test_a_save_that_a_loss_has_dropped_is_made_again_once_the_members_stay_the_same(
    committed: int, every: int
) -> None:
    """Not if one was committed since, or if one follows within three steps."""
    term = a_term(wanting(2), in_place=1, save_every_seconds=1000.0)
    epoch = an_epoch(stage=Stage.RUNNING, committed=committed, save_every_steps=every)
    term.change(term.state.begin_epoch(epoch))
    for report in (stepping(0), stepping(1)):
        term.take(replace(report, in_place=True))
    watch, workers = replace(Watch.start(0.0), dropped_at=3).renew(20.0), [a_worker(), a_worker()]
    boundary_turn.settle(term, watch, workers, 20.0 + due_saves.DROPPED_SECONDS - 1)
    assert term.running.boundary is None
    boundary_turn.settle(term, watch, workers, 20.0 + due_saves.DROPPED_SECONDS + 1)
    assert (term.running.boundary == Boundary(step=6)) == (committed == 3 and every != 7)


def test_a_job_below_its_minimum_is_short_since_the_first_loss_that_made_it_so() -> None:
    watch = Watch.start(0.0)
    assert watch.short(False, 10.0) == 0.0
    assert watch.renew(20.0).short(True, 20.0) == 0.0
    watch.short(True, 20.0)
    assert watch.renew(500.0).short(True, 520.0) == 500.0
    watch.short(False, 600.0)
    assert watch.short(True, 700.0) == 0.0, "there were enough pods at 600 s"


async def test_a_save_that_is_due_does_not_wait_for_a_newcomer_that_gets_ready() -> None:
    term = a_term(wanting(3), in_place=1, save_every_seconds=30.0)
    term.change(term.state.begin_epoch(an_epoch(stage=Stage.RUNNING)))
    for report in (stepping(0), stepping(1)):
        term.take(replace(report, in_place=True))
    term.take(a_report(2, fresh=(1,), in_place=True))
    watch, workers = Watch.start(0.0), [a_worker(), a_worker()]
    boundary_turn.settle(term, watch, workers, 29.0)
    assert term.running.joining, "the newcomer is invited, but not ready"
    assert term.running.boundary is None
    boundary_turn.settle(term, watch, workers, 31.0)
    assert term.running.boundary is not None
    assert not term.running.boundary.hold


async def test_a_newcomer_is_invited_while_the_members_save_and_joins_at_the_boundary_after() -> (
    None
):
    near = Boundary(step=6, near=True, confirmed=True)
    term = a_term(wanting(3), in_place=1)
    term.change(term.state.begin_epoch(an_epoch(stage=Stage.RUNNING, boundary=near)))
    for report in (stepping(0), stepping(1)):
        term.take(replace(report, in_place=True))
    newcomer = a_report(2, fresh=(1,), in_place=True)
    term.take(newcomer)
    watch, workers = Watch.start(0.0), [a_worker(applied=6), a_worker(applied=6)]
    boundary_turn.settle(term, watch, workers, 1.0)
    assert [m.slot for m in term.running.joining] == [2]
    assert term.running.boundary == near, "not all members hold their parts of step 6"
    for report in (stepping(0), stepping(1)):
        term.take(replace(report, in_place=True, kept=(6,)))
    term.take(replace(newcomer, prepared=(1,)))
    boundary_turn.settle(term, watch, workers, 2.0)
    boundary_turn.settle(term, watch, workers, 3.0)
    assert term.running.boundary == Boundary(step=7, hold=True)


async def test_nobody_is_invited_while_ranks_stop_or_hold() -> None:
    for armed in (Boundary(step=6, stay=True), Boundary(step=6, hold=True)):
        term = a_term(wanting(3), in_place=1)
        term.change(term.state.begin_epoch(an_epoch(stage=Stage.RUNNING, boundary=armed)))
        for report in (stepping(0), stepping(1)):
            term.take(replace(report, in_place=True))
        term.take(a_report(2, fresh=(1,), in_place=True))
        boundary_turn.settle(term, Watch.start(0.0), [a_worker(), a_worker()], 1.0)
        assert term.running.joining == ()


def start_to_leave() -> tuple[Term, Watch, list[WorkerReport]]:
    """Two members step, and slot 1 has just been asked to leave."""
    term = a_term(wanting(2, leave=(1,)), in_place=1)
    term.change(term.state.begin_epoch(an_epoch(stage=Stage.RUNNING)))
    for report in (stepping(0), stepping(1)):
        term.take(replace(report, in_place=True))
    watch, workers = Watch.start(0.0), [a_worker(), a_worker()]
    boundary_turn.settle(term, watch, workers, 1.0)
    return term, watch, workers


async def test_a_member_that_leaves_saves_first_and_then_its_workers_end() -> None:
    term, watch, workers = start_to_leave()
    assert term.running.boundary == Boundary(step=6), "all save there, and nobody stays"
    assert [(i.cause, i.slots) for i in term.state.incidents.levels()] == [("Leave", (1,))]
    saved = Commit(epoch=1, token="t", step=6, manifest="m", digest="d")
    term.change(term.state.disarm().commit(saved))
    boundary_turn.settle(term, watch, workers, 2.0)
    assert term.running.leaving == ((1, 0, 1),)
    assert term.running.boundary is None


async def test_a_member_leaves_after_an_evaluation_during_which_all_would_restart() -> None:
    term, watch, workers = start_to_leave()
    saved = Commit(epoch=1, token="t", step=6, manifest="m", digest="d")
    term.change(term.state.disarm().commit(saved))
    evaluates = [replace(workers[0], scope=levels.Scope.EVALUATE), workers[1]]
    boundary_turn.settle(term, watch, evaluates, 2.0)
    assert term.running.leaving == ()
    boundary_turn.settle(term, watch, workers, 3.0)
    assert term.running.leaving == ((1, 0, 1),)


@pytest.mark.parametrize("is_over", [False, True], ids=["in an evaluation", "after the last step"])
async def test_a_member_waits_no_longer_than_for_its_save_for_what_a_loss_would_repeat(
    is_over: bool,
) -> None:
    """After the last step the rest of the script runs. Another pod is ready, but no boundary follows."""
    term, watch, workers = start_to_leave()
    saved = Commit(epoch=1, token="t", step=6, manifest="m", digest="d")
    term.change(term.state.disarm().commit(saved))
    evaluates = [replace(w, scope=levels.Scope.EVALUATE) for w in workers]
    if is_over:
        evaluates = workers
        for report in (stepping(0), stepping(1)):
            term.take(replace(report, in_place=True, until=5))
        term.take(a_report(2, fresh=(1,), in_place=True, prepared=(1,)))
        boundary_turn.settle(term, watch, evaluates, 2.0)
    boundary_turn.settle(term, watch, evaluates, 0.9 + term.settings.drain_seconds)
    assert term.running.leaving == ()
    boundary_turn.settle(term, watch, evaluates, 1.0 + term.settings.drain_seconds)
    assert term.running.leaving == ((1, 0, 1),)


async def test_a_member_whose_save_cannot_be_committed_leaves_without_it() -> None:
    term, watch, workers = start_to_leave()
    term.change(term.state.disarm())
    for now in (2.0, 5.0):
        boundary_turn.settle(term, watch, workers, now)
        assert term.running.boundary is None, "saves do not follow each other at once"
    boundary_turn.settle(term, watch, workers, 7.0)
    assert term.running.boundary == Boundary(step=6)
    term.change(term.state.disarm())
    boundary_turn.settle(term, watch, workers, 1.0 + term.settings.drain_seconds)
    assert term.running.leaving == ((1, 0, 1),)
    assert "slot 1 leaves without a checkpoint" in term.state.notes[-1]


async def test_a_leave_that_is_withdrawn_before_its_save_leaves_no_open_incident() -> None:
    """Otherwise the next loss, perhaps days later, would be reported as this one."""
    term, watch, workers = start_to_leave()
    term.want(wanting(2))
    term.change(term.state.disarm())
    boundary_turn.settle(term, watch, workers, 2.0)
    assert term.state.incidents.current is None
    (closed,) = term.state.incidents.levels()
    assert (closed.cause, closed.open, closed.steps_lost) == ("Leave", False, 0)
    assert "withdrawn" in closed.message
    assert term.running.incident == ""
    term.open_incident(Cause(name="WorkerDied", message="killed", slots=(0,)))
    assert term.state.incidents.levels()[-1].cause == "WorkerDied"


async def test_a_leave_that_the_end_of_the_training_precedes_is_over_with_the_job() -> None:
    """Its incident would stay open in the status of the completed job."""
    term, _, _ = start_to_leave()
    claim = a_claim(1, token=term.running.token)
    await term.run_log.append(claim)
    await train._finish(term, 6)
    assert term.state.final_step == 6
    assert [(i.cause, i.open) for i in term.state.incidents.levels()] == [("Leave", False)]


async def test_if_all_members_are_to_leave_none_does_so_where_others_join() -> None:
    """There would be nobody left to hand the state over."""
    term = a_term(wanting(2, leave=(1,)), in_place=1)
    joining = (a_member(2, node_rank=1),)
    term.change(term.state.begin_epoch(an_epoch(stage=Stage.RUNNING, joining=joining)))
    watch = replace(Watch.start(0.0), may_leave_at=1.0)
    assert leave_in_place.list_free_to_leave(term, watch) == ((1, 0, 1),)
    term.want(wanting(2, leave=(0, 1)))
    assert leave_in_place.list_free_to_leave(term, watch) == ()


@pytest.mark.parametrize(
    "changes",
    [{"in_place": 0}, {"in_place": 1, "on_loss": "Wait"}],
    ids=["all restart", "all wait"],
)
async def test_where_all_restart_a_member_leaves_at_a_boundary(changes: dict[str, object]) -> None:
    term = a_term(wanting(2, leave=(1,)), **changes)
    term.change(term.state.begin_epoch(an_epoch(stage=Stage.RUNNING)))
    for report in (stepping(0), stepping(1)):
        term.take(replace(report, in_place=True))
    boundary_turn.settle(term, Watch.start(0.0), [a_worker(), a_worker()], 1.0)
    assert term.running.boundary == Boundary(step=6, stay=True)


async def test_the_coordinator_s_own_pod_leaves_as_others_do_and_then_hands_over() -> None:
    term = a_term(wanting(2, leave=(0,)), in_place=1)
    term.change(term.state.begin_epoch(an_epoch(stage=Stage.RUNNING)))
    for report in (stepping(0), stepping(1)):
        term.take(replace(report, in_place=True))
    boundary_turn.settle(term, Watch.start(0.0), [a_worker(), a_worker()], 1.0)
    assert term.running.boundary == Boundary(step=6), "all save there, and nobody stays"
    saved = Commit(epoch=1, token="t", step=6, manifest="m", digest="d")
    term.change(term.state.disarm().commit(saved))
    watch = Watch.start(0.0)
    watch.leave_at = 6
    boundary_turn.settle(term, watch, [a_worker(), a_worker()], 2.0)
    assert term.running.leaving == ((0, 0, 1),)
    term.note_left()
    assert not term.hands_over, "the coordinator's own worker is still a member"
    without = an_epoch(stage=Stage.RUNNING, number=2, members=(a_member(1),))
    over = term.state.incidents.close()
    term.change(term.state.with_incidents(over).begin_epoch(without))
    boundary_turn.settle(term, Watch.start(0.0), [a_worker()], 3.0)
    assert term.running.boundary is None, "handing over needs no boundary"
    term.note_left()
    assert term.hands_over
    term.hand_over()
    assert faults.may_go_on(term.board.levels)


# --- one fault, one recovery


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
        cause = Cause(name="Gone", message=name, slots=(slot,))
        term.want(replace(term.wanted, incident=f"inc-{slot}"))
        term.open_incident(cause)
    (one,) = term.state.incidents.levels()
    assert (one.id, one.cause, one.slots) == ("inc-1", "Gone", (1, 2))
    assert isinstance(one, levels.RuntimeIncident)


@pytest.mark.parametrize(
    ("stop", "fixed", "unit", "cut"),
    [
        pytest.param(levels.Stop.NONE, "", 1, [1], id="it trains"),
        pytest.param(levels.Stop.NONE, "its script uses job.mesh", 1, [], id="all would restart"),
        pytest.param(levels.Stop.SUSPEND, "", 1, [1], id="it stops, and the other one can save"),
        pytest.param(levels.Stop.SUSPEND, "", 2, [], id="it stops, and nobody else can save"),
    ],
)
async def test_a_rank_that_hangs_is_cut_out_if_the_others_can_do_without_it(
    stop: levels.Stop, fixed: str, unit: int, cut: list[int]
) -> None:
    term = a_term(wanting(2, stop=stop), in_place=1)
    term.change(term.state.begin_epoch(an_epoch(2, mesh=Mesh(shard=unit))))
    for report in (stepping(0, waiting=True), stepping(1, overdue=1.2)):
        term.take(replace(report, in_place=True, fixed=fixed))
    train._cut_out(term, term.now())
    assert [hung.slot for hung in term.running.hung] == cut


async def test_a_planned_move_names_only_slots_that_interrupt_something() -> None:
    """Slot 1 is a spare by now."""
    term = a_term(wanting(2, leave=(1, 2), leave_reason="XID 64"), in_place=1)
    members = (a_member(0), a_member(2, node_rank=1))
    term.change(term.state.begin_epoch(an_epoch(members=members)))
    move = planned_moves.build_move(term, "Leave", [])
    assert move is not None
    assert (move.cause.slots, move.cause.message) == ((2,), "slot 2 leaves: XID 64")
