"""Unit tests: how the survivors of a loss continue in the same step."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from agent.given import a_member, a_report, a_worker, an_epoch, ended, stepping
from everstep_agent.coordinator import regroup_rules
from everstep_agent.coordinator.members import list_lost, list_never_entered
from everstep_agent.coordinator.regroup_rules import AskVector, Impossible, Plan, Wait
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import Boundary, EpochMember, InPlace, Stage
from everstep_agent.peers.places import place_members
from everstep_agent.pod.worker_start import build_regroup
from everstep_contract.log import Commit
from everstep_contract.wire import Standing


def standing(applied: int = 5, reductions: int = 0, share=None, **changes: object) -> Standing:
    count = 12 if share is not None else 0
    values = {
        "epoch": 1,
        "applied": applied,
        "reductions": reductions,
        "share": share,
        "micro_batches": count,
    }
    return Standing(**(values | changes))  # type: ignore[arg-type]


def held(slot: int, **changes: object) -> AgentReport:
    """The report of a pod with one rank that has sent its standing."""
    worker = a_worker(state=State.HELD, standing=standing(**changes))
    return a_report(slot, epoch=1, fresh=(), in_place=True, workers=(worker,))


def dead(slot: int) -> AgentReport:
    return a_report(slot, epoch=1, fresh=(), in_place=True, workers=(a_worker(state=State.DEAD),))


def indices(ranges) -> list[int]:
    return [i for first, last in ranges for i in range(first, last)]


# --- plan_regroup --------------------------------------------------------------------------------


def test_nobody_has_begun_the_next_reduction():
    plan = regroup_rules.plan_regroup({0: standing(), 2: standing()})
    assert plan == Plan(applied=5, reductions=0)


def test_the_position_is_that_of_the_rank_that_has_applied_most():
    plan = regroup_rules.plan_regroup({0: standing(5, 1), 1: standing(6, 1)})
    assert plan == Plan(applied=6, reductions=1)


def test_survivors_in_the_loop_and_before_it_share_the_next_reduction():
    plan = regroup_rules.plan_regroup({0: standing(share=((0, 4),)), 1: standing(), 3: standing()})
    assert isinstance(plan, Plan)
    assert plan.micro_batches == 12
    assert plan.shares == {0: ((0, 4),), 1: ((4, 8),), 3: ((8, 12),)}


def test_a_rank_without_the_last_vector_is_behind_and_somebody_is_asked_for_it():
    told = {0: standing(reductions=2), 1: standing(reductions=3), 2: standing(reductions=3)}
    assert regroup_rules.plan_regroup(told) == AskVector(rank=1)
    told[1] = standing(reductions=3, vector="abc")
    plan = regroup_rules.plan_regroup(told)
    assert plan == Plan(applied=5, reductions=3, behind=frozenset({0}), vector="abc")


def test_a_rank_that_is_behind_keeps_no_share_of_the_reduction_that_is_complete():
    told = {
        0: standing(reductions=0, share=((0, 6),)),
        1: standing(reductions=1, share=((0, 4),), vector="abc"),
    }
    plan = regroup_rules.plan_regroup(told)
    assert isinstance(plan, Plan)
    assert plan.behind == {0}
    assert plan.shares == {0: ((4, 10),), 1: ((0, 4), (10, 12))}


def test_a_vector_that_nobody_needs_is_not_sent():
    plan = regroup_rules.plan_regroup({0: standing(vector="abc"), 1: standing()})
    assert isinstance(plan, Plan)
    assert plan.vector == ""


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({}, "no rank is left"),
        ({1: standing(problem="its script is in job.pause")}, "rank 1: its script is in job.pause"),
        ({0: standing(reductions=0), 1: standing(reductions=2)}, "more than one reduction behind"),
        (
            {0: standing(share=((0, 4),)), 1: standing(share=((3, 6),))},
            "two ranks hold micro-batch 3",
        ),
    ],
)
def test_standings_that_do_not_go_together_are_refused(told, reason):
    decision = regroup_rules.plan_regroup(told)
    assert isinstance(decision, Impossible)
    assert reason in decision.reason


# --- decide_regroup ------------------------------------------------------------------------------


def test_a_newcomer_that_died_before_its_agent_entered_the_epoch_is_not_waited_for():
    begun = InPlace(former=2, applied=5, reductions=0)
    epoch = an_epoch(3, number=3, in_place=begun)
    others = [replace(held(slot), epoch=3) for slot in (0, 1)]
    newcomer = a_report(2, epoch=0, fresh=(), ended=ended(1))
    told = [*others, newcomer]
    assert list_never_entered(epoch, told) == {(2, 0, 1)}
    survivors, decision = regroup_rules.decide_regroup(epoch, told, list_never_entered(epoch, told))
    assert isinstance(decision, Plan)
    assert [m.slot for m in survivors] == [0, 1]
    not_yet = [replace(newcomer, ended=()), replace(newcomer, epoch=2), replace(newcomer, epoch=3)]
    assert not any(list_never_entered(epoch, [report]) for report in not_yet)
    assert not list_never_entered(replace(epoch, in_place=None), told)


def test_a_step_that_a_lost_rank_had_counted_stays_in_the_epoch_in_which_it_was_counted():
    """Its survivors have the sums of this step, and have yet to count it."""
    begun = InPlace(former=2, applied=6, reductions=1)
    epoch = an_epoch(3, number=3, in_place=begun)
    told = [dead(0), held(1), held(2)]
    _, plan = regroup_rules.decide_regroup(epoch, [replace(r, epoch=3) for r in told])
    assert isinstance(plan, Plan)
    assert plan.applied == 6


def decide(reports, *, count=3, lost=()):
    return regroup_rules.decide_regroup(an_epoch(count), reports, lost)


def test_the_survivors_go_on_once_all_have_told_how_far_they_are():
    survivors, plan = decide([held(0), dead(1), held(2)])
    assert [m.slot for m in survivors] == [0, 2]
    assert plan == Plan(applied=5, reductions=0)


def test_a_pod_that_is_lost_need_not_answer():
    survivors, plan = decide([held(0), held(2)], lost={(1, 0, 1)})
    assert [m.slot for m in survivors] == [0, 2]
    assert isinstance(plan, Plan)


def test_a_member_is_lost_by_a_newer_container_or_by_the_operator():
    epoch = an_epoch(3)
    newer = [a_report(1, incarnation=2), a_report(2, attempt=1, incarnation=5)]
    assert list_lost(epoch, newer, ()) == {(1, 0, 1)}
    assert list_lost(epoch, newer, {(2, 0)}) == {(1, 0, 1), (2, 0, 1)}
    assert list_lost(epoch, [], {(2, 1)}) == frozenset()


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([held(0), dead(1)], "slot 2 has not reported"),
        ([held(0), dead(1), a_report(2, epoch=0)], "slot 2 has not reported"),
        (
            [held(0), dead(1), a_report(2, incarnation=2, epoch=1, workers=(a_worker(),))],
            "slot 2 has not reported",
        ),
        (
            [held(0), dead(1), a_report(2, epoch=1, workers=(a_worker(),))],
            "slot 2 has not told how far it is",
        ),
    ],
    ids=["silent", "of another epoch", "a newer container", "not held yet"],
)
def test_it_waits_for_a_member_that_has_not_answered(reports, message):
    assert decide(reports) == ((), Wait(message=message))


def test_no_survivor_counts_before_it_has_joined_the_next_epoch_or_after_it_joined_a_later_one():
    """Regression: a coordinator that had been cut off claimed an epoch with a worker that by then
    trained in another coordinator's epoch.
    """
    asked = an_epoch(2, stage=Stage.HOLD, successor=7)
    joined = [replace(held(0), joined=7), held(1)]
    _, decision = regroup_rules.decide_regroup(asked, joined)
    assert decision == Wait(message="slot 1 has not joined epoch 7")
    later = [replace(held(0), joined=7), replace(held(1), joined=8)]
    assert isinstance(regroup_rules.decide_regroup(asked, later)[1], Wait)
    all_joined = [replace(held(n), joined=7) for n in (0, 1)]
    assert isinstance(regroup_rules.decide_regroup(asked, all_joined)[1], Plan)


class Counted(tuple[EpochMember, ...]):
    """Members; `walks` is how often somebody has gone through them."""

    walks = 0

    def __iter__(self) -> Iterator[EpochMember]:
        Counted.walks += 1
        return super().__iter__()


def test_the_members_are_not_gone_through_once_for_each_of_them():
    """With 1,000 pods that took 0.3 s for each of two questions of every turn after a loss."""
    epoch = an_epoch(50, successor=2, successor_token="mine")
    epoch = replace(epoch, members=Counted(epoch.members))
    told = [replace(held(m.slot), joined=2, joined_token="mine") for m in epoch.members]
    Counted.walks = 0
    assert regroup_rules.choose_successor(epoch, 1, told, 0) == 2
    _, plan = regroup_rules.decide_regroup(epoch, told)
    assert isinstance(plan, Plan)
    assert Counted.walks < 20


def test_the_next_epoch_knows_the_newest_commit_whoever_made_it():
    """Regression: a coordinator retried forever to save a step that another one had committed."""
    epoch = an_epoch(2, committed=4)
    commit = Commit(epoch=1, token="t", step=9, manifest="m", digest="d")
    assert regroup_rules.note_commit(epoch, commit).committed == 9
    assert regroup_rules.note_commit(epoch, replace(commit, step=3)).committed == 4
    assert regroup_rules.note_commit(epoch, None).committed == 4


def test_a_pod_that_is_asked_to_leave_is_no_survivor_though_it_answers():
    epoch = an_epoch(3, leaving=((2, 0, 1),))
    reports = [held(0), held(1), held(2)]
    waits = Wait(message="slot 2 has not left yet")
    assert regroup_rules.decide_regroup(epoch, reports) == ((), waits)
    survivors, decision = regroup_rules.decide_regroup(epoch, [held(0), held(1), dead(2)])
    assert ([m.slot for m in survivors], type(decision)) == ([0, 1], Plan)


def test_a_pod_that_lost_some_of_its_ranks_goes_on_with_the_others():
    pods = place_members([a_member(s, lives=(1, 1, 1)) for s in (0, 1, 2)])
    epoch = an_epoch(members=pods)
    shares = {(0, 0): ((0, 2),), (0, 2): ((4, 5),), (1, 1): ((8, 9),)}
    reports = [
        a_report(s, epoch=1, in_place=True, workers=tuple(
            a_worker(local=n, state=State.HELD, standing=standing(share=shares[s, n]))
            if (s, n) in shares else a_worker(local=n, state=State.DEAD) for n in range(3)
        )) for s in (0, 1, 2)
    ]  # fmt: skip
    survivors, plan = regroup_rules.decide_regroup(epoch, reports)
    assert [(m.slot, m.lives) for m in survivors] == [(0, (1, 0, 1)), (1, (0, 1, 0))]
    assert isinstance(plan, Plan)
    assert sorted(plan.shares) == [0, 2, 4], "the plan must use the ranks of the former epoch"
    after = regroup_rules.continue_epoch(epoch, survivors, plan, number=2, token="n")
    assert after.world == 3
    assert [m.ranks for m in after.members] == [{0: 0, 2: 1}, {1: 2}]
    assert after.in_place is not None
    assert after.in_place.shares == (plan.shares[0], plan.shares[2], plan.shares[4])
    assert [i.rank for m in after.members for i in m.ids()] == [0, 2, 1], "the log has local ranks"


def test_ranks_of_larger_pods_are_counted_through():
    epoch = an_epoch(2, members=(a_member(0, lives=(1, 1)), a_member(1, lives=(1, 1))))
    gone = tuple(a_worker(local=n, state=State.DEAD) for n in range(2))
    here = tuple(
        a_worker(local=n, state=State.HELD, standing=standing(share=((4 + 2 * n, 6 + 2 * n),)))
        for n in range(2)
    )
    reports = [a_report(0, epoch=1, workers=gone), a_report(1, epoch=1, workers=here)]
    _, plan = regroup_rules.decide_regroup(epoch, reports)
    assert isinstance(plan, Plan)
    assert {r: len(indices(s)) for r, s in plan.shares.items()} == {2: 6, 3: 6}


def test_a_rank_that_told_its_standing_and_died_since_counts_as_lost():
    died = a_worker(state=State.DEAD, standing=standing(applied=9))
    survivors, plan = decide([held(0), dead(1), a_report(2, epoch=1, workers=(died,))])
    assert [m.slot for m in survivors] == [0]
    assert plan == Plan(applied=5, reductions=0)


def test_if_nobody_is_left_all_restart():
    _, decision = decide([dead(0), dead(1), dead(2)])
    assert decision == Impossible(reason="no rank is left")


def test_of_survivors_that_stand_apart_one_is_asked():
    _, decision = decide([held(0, reductions=1), dead(1), held(2)])
    assert decision == AskVector(rank=0)


# --- continue_epoch ------------------------------------------------------------------------------


def test_a_group_that_broke_without_a_death_is_formed_anew_if_it_has_completed_a_step():
    epoch = an_epoch(3)
    plan = Plan(applied=epoch.resume + 1, reductions=0)
    assert not regroup_rules.why_not_again(epoch, epoch.members, plan)
    none = Plan(applied=epoch.resume, reductions=0)
    assert "completed no step" in regroup_rules.why_not_again(epoch, epoch.members, none)
    assert not regroup_rules.why_not_again(epoch, epoch.members[:2], none), "a member is lost"


def test_the_next_epoch_gives_the_survivors_new_ranks_and_their_shares_in_that_order():
    former = an_epoch(4, stage=Stage.HOLD, asked=2, cause="WorkerDied", boundary=Boundary(step=9))
    survivors = [m for m in former.members if m.slot in (1, 2, 3)]
    shares = {1: ((0, 2),), 2: ((2, 4),), 3: ((4, 6),)}
    plan = Plan(
        applied=7,
        reductions=1,
        micro_batches=6,
        shares=shares,
        behind=frozenset({1, 3}),
        vector="abc",
    )
    epoch = regroup_rules.continue_epoch(former, survivors, plan, number=5, token="new")
    assert (epoch.number, epoch.token, epoch.stage) == (5, "new", Stage.STARTING)
    assert [(m.slot, m.node_rank, m.lives) for m in epoch.members] == [
        (1, 0, (1,)), (2, 1, (1,)), (3, 2, (1,)),
    ]  # fmt: skip
    assert (epoch.boundary, epoch.asked, epoch.cause, epoch.resume) == (None, None, "", 7)
    place = epoch.in_place
    assert place is not None
    assert (place.former, place.applied, place.reductions, place.micro_batches) == (1, 7, 1, 6)
    assert place.shares == (((0, 2),), ((2, 4),), ((4, 6),))
    assert (place.behind, place.vector) == ((0, 2), "abc")


def test_the_next_epoch_knows_its_ranks_endpoints_if_all_have_one():
    former = an_epoch(3)
    told = {1: standing(endpoint="reinit b"), 2: standing(endpoint="reinit c")}
    plan = regroup_rules.plan_regroup(told)
    assert isinstance(plan, Plan)
    epoch = regroup_rules.continue_epoch(former, former.members[1:], plan, number=2, token="t")
    assert epoch.in_place is not None
    assert epoch.in_place.endpoints == ("reinit b", "reinit c")
    one_lacks_it = regroup_rules.plan_regroup({**told, 2: standing()})
    assert isinstance(one_lacks_it, Plan)
    assert one_lacks_it.endpoints == {}


def test_without_a_begun_reduction_no_shares_are_sent():
    former = an_epoch(2)
    plan = Plan(applied=7, reductions=1)
    epoch = regroup_rules.continue_epoch(former, former.members[1:], plan, number=2, token="t")
    assert epoch.in_place is not None
    assert epoch.in_place.shares == ()


# --- why_not_in_place ----------------------------------------------------------------------------


def why(epoch=None, *, failure=False, reports=None, lost=()):
    reports = reports if reports is not None else [held(0), dead(1)]
    return regroup_rules.why_not_in_place(
        epoch or an_epoch(2), reports, "WorkerDied", failure=failure, lost=lost
    )


def test_a_running_epoch_whose_members_all_can_goes_on_in_place():
    assert why() == ""


def test_so_does_one_whose_other_members_are_lost_with_their_pods():
    assert why(reports=[held(0)], lost={(1, 0, 1)}) == ""


@pytest.mark.parametrize(
    ("reason", "asked"),
    [
        ("the script failed", {"failure": True}),
        ("has not started yet", {"epoch": an_epoch(2, stage=Stage.STARTING)}),
        ("a member cannot", {"reports": [held(0), a_report(1, epoch=1)]}),
        ("a member cannot", {"reports": [held(0)]}),
        ("about to stop", {"epoch": an_epoch(2, boundary=Boundary(step=9, stay=True))}),
    ],
)
def test_why_a_loss_restarts_the_epoch(reason, asked):
    assert reason in why(asked.pop("epoch", None), **asked)


# --- the state that is held ---


def keeper(*reports: AgentReport, failed=(), **changes: object):
    found = regroup_rules.choose_keeper(an_epoch(3, **changes), reports, failed)
    return found and (found.rank, found.step)


def test_the_lowest_of_the_ranks_that_are_furthest_saves_what_they_hold():
    ahead = [held(1, applied=6), held(2, applied=6)]
    assert keeper(*ahead, held(0, applied=5)) == (1, 6)
    assert keeper(*ahead, failed={1}) == (2, 6)


def test_nobody_saves_what_is_committed_or_before_it_has_told_how_far_it_is():
    assert keeper(held(1)) == (1, 5)
    assert keeper(held(1), committed=5) is None
    assert keeper(stepping(1)) is None
    assert keeper(dead(1)) is None


def test_buckets_that_are_complete_on_all_survivors_are_not_summed_again():
    former = an_epoch(3)
    told = {
        1: standing(share=((4, 8),), complete_buckets=3),
        2: standing(share=((8, 12),), complete_buckets=2),
    }
    plan = regroup_rules.plan_regroup(told)
    assert isinstance(plan, Plan)
    epoch = regroup_rules.continue_epoch(former, former.members[1:], plan, number=2, token="t")
    orders = [build_regroup(0, epoch, m) for m in epoch.members]
    assert [order.complete_buckets for order in orders] == [2, 2]


def test_nothing_of_the_next_reduction_is_complete_if_a_rank_lacks_the_vector_of_the_last():
    told = {
        0: standing(reductions=1, vector="abc", complete_buckets=0),
        1: standing(share=((4, 8),), complete_buckets=3),
    }
    plan = regroup_rules.plan_regroup(told)
    assert isinstance(plan, Plan)
    assert plan.complete_buckets == 0
