"""Unit tests: which units a loss takes, which of their ranks are ended, and who continues."""

from dataclasses import replace

import pytest

from agent.given import a_member, a_report, a_worker, an_epoch, wanting
from everstep_agent.coordinator import breaks, regroup_rules, unit_losses
from everstep_agent.coordinator.regroup_rules import Ending, Impossible, Plan, Wait
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import EpochLevel, Saver, Stage
from everstep_agent.peers.places import place_members
from everstep_contract.units import Mesh
from everstep_contract.wire import Standing

PAIRS = Mesh(shard=2)


def an_epoch_of(pod: int, pods: int, **changes: object) -> EpochLevel:
    """`pods` pods of `pod` ranks each, two ranks per unit."""
    members = place_members(a_member(s, lives=(1,) * pod) for s in range(pods))
    return an_epoch(members=members, mesh=PAIRS, stage=Stage.HOLD, **changes)


def a_pod(slot: int, *workers: object) -> AgentReport:
    """`workers` has, by local rank, a standing, DEAD, or None for a worker that has reported nothing."""
    told = []
    for local, found in enumerate(workers):
        held = isinstance(found, Standing)
        state = State.DEAD if found is DEAD else State.HELD if held else State.TRACKED
        told.append(a_worker(local=local, state=state, standing=found if held else None))
    return a_report(slot, epoch=1, fresh=(), in_place=True, workers=tuple(told))


DEAD = object()
HERE = Standing(epoch=1, applied=5, reductions=0)
LOST = replace(HERE, unit_lost=True)


def decide(epoch, reports, lost=()):
    survivors, found = regroup_rules.decide_regroup(epoch, reports, lost)
    return [(m.slot, m.lives) for m in survivors], found


def test_the_rest_of_a_lost_unit_is_ended_and_need_not_tell_how_far_it_is():
    epoch, reports = an_epoch_of(1, 4), [a_pod(0, None), a_pod(1, DEAD), a_pod(2, HERE)]
    assert unit_losses.list_to_end(epoch, reports) == (0,)
    assert decide(epoch, reports) == ([], Wait(message="slot 3 has not reported"))
    reports.append(a_pod(3, HERE))
    assert decide(epoch, reports) == ([], Ending(ranks=(0,)))
    reports[0] = a_pod(0, DEAD)
    survivors, plan = decide(epoch, reports)
    assert survivors == [(2, (1,)), (3, (1,))]
    assert isinstance(plan, Plan)


def test_so_it_is_in_pods_of_two_and_of_four():
    pods, one = an_epoch_of(2, 2), an_epoch_of(4, 1)
    assert unit_losses.list_to_end(pods, [a_pod(0, HERE, DEAD), a_pod(1, HERE, HERE)]) == (0,)
    survivors, _ = decide(pods, [a_pod(0, DEAD, DEAD), a_pod(1, HERE, HERE)])
    assert survivors == [(1, (1, 1))]
    assert unit_losses.list_to_end(one, [a_pod(0, HERE, HERE, DEAD, HERE)]) == (3,)
    survivors, _ = decide(one, [a_pod(0, HERE, HERE, DEAD, DEAD)])
    assert survivors == [(0, (1, 1, 0, 0))]


def test_a_pod_that_is_lost_takes_the_units_of_all_its_ranks():
    epoch, reports = an_epoch_of(1, 4), [a_pod(1, HERE), a_pod(2, HERE), a_pod(3, HERE)]
    lost = {epoch.members[0].id}
    assert unit_losses.list_to_end(epoch, reports, lost) == (1,)
    assert unit_losses.list_to_end(epoch, reports) == (), "a silent pod is not lost"
    reports[0] = a_pod(1, DEAD)
    survivors, _ = decide(epoch, reports, lost)
    assert [slot for slot, _ in survivors] == [2, 3]


def test_if_no_unit_is_whole_nobody_is_ended_and_all_restart():
    epoch = an_epoch_of(1, 4)
    reports = [a_pod(0, HERE), a_pod(1, DEAD), a_pod(2, DEAD), a_pod(3, HERE)]
    assert unit_losses.list_to_end(epoch, reports) == ()
    assert decide(epoch, reports) == ([], Impossible(reason="no unit is whole"))
    both = [a_pod(0, DEAD), a_pod(1, DEAD), a_pod(2, HERE), a_pod(3, HERE)]
    assert isinstance(decide(epoch, both)[1], Plan), "the dead are of one unit"


def test_a_unit_is_lost_by_the_word_of_a_rank_once_a_death_had_time_to_be_told():
    epoch = an_epoch_of(1, 4)
    reports = [a_pod(0, LOST), a_pod(1, HERE), a_pod(2, HERE), a_pod(3, HERE)]
    assert unit_losses.list_to_end(epoch, reports, by_word=False) == ()
    assert unit_losses.list_to_end(epoch, reports) == (0, 1)
    assert decide(epoch, reports) == ([], Ending(ranks=(0, 1)))
    survivors, _ = decide(epoch, [a_pod(0, DEAD), a_pod(1, DEAD), *reports[2:]])
    assert [slot for slot, _ in survivors] == [2, 3]


def test_ranks_that_were_ended_once_stay_named():
    epoch = an_epoch_of(1, 4, ended=(0,))
    reports = [a_pod(0, DEAD), a_pod(1, DEAD), a_pod(2, HERE), a_pod(3, HERE)]
    assert unit_losses.list_to_end(epoch, reports) == (0,)


def test_members_that_leave_end_by_themselves():
    epoch = an_epoch_of(1, 4)
    leaving = replace(epoch, leaving=(epoch.members[0].id, epoch.members[1].id))
    reports = [a_pod(0, HERE), a_pod(1, DEAD), a_pod(2, HERE), a_pod(3, HERE)]
    assert unit_losses.list_to_end(leaving, reports) == ()
    assert decide(leaving, reports)[1] == Wait(message="slot 0 has not left yet")
    assert unit_losses.with_mates(epoch, [epoch.members[3].id]) == ((2, 0, 1), (3, 0, 1))


def test_a_unit_that_is_lost_without_a_death_comes_back_only_where_steps_were_completed():
    epoch = an_epoch_of(1, 4, ended=(0, 1))
    rest = epoch.members[2:]
    stepped = Plan(applied=epoch.resume + 1, reductions=0)
    assert not regroup_rules.why_not_again(epoch, rest, stepped)
    none = Plan(applied=epoch.resume, reductions=0)
    assert "completed no step" in regroup_rules.why_not_again(epoch, rest, none)
    assert not regroup_rules.why_not_again(epoch, rest, none, certain=True)
    assert not regroup_rules.why_not_again(replace(epoch, ended=(0,)), rest, none), "rank 1 died"


def test_the_next_epoch_names_nobody_to_end():
    epoch = an_epoch_of(1, 4, ended=(0,))
    plan = Plan(
        applied=6, reductions=0, micro_batches=4, passes={1: 3}, shares={2: ((0, 1),), 3: ((1, 4),)}
    )
    after = regroup_rules.continue_epoch(epoch, epoch.members[2:], plan, number=2, token="t")
    assert after.ended == ()
    assert after.in_place is not None
    assert after.in_place.passes == (3,)
    assert [m.first for m in after.members] == [0, 1]


def test_the_unit_that_holds_its_step_saves_it_beside_the_wait():
    epoch = an_epoch_of(1, 4)
    reports = [a_pod(0, HERE), a_pod(2, HERE), a_pod(3, HERE)]
    assert regroup_rules.choose_keeper(epoch, reports, set()) == Saver(rank=2, step=5)
    assert regroup_rules.choose_keeper(epoch, reports, {3}) is None
    apart = [a_pod(2, HERE), a_pod(3, replace(HERE, applied=6))]
    assert regroup_rules.choose_keeper(epoch, apart, set()) is None


# --- breaks ---------------------------------------------------------------------------------------


def list_causes(epoch, reports):
    found = breaks.list_breaks(epoch, [(r, 0.0) for r in reports], wanting(4), idle=0.0, hang=60.0)
    return [(b.cause, b.rank, b.certain) for b in found]


def test_a_rank_that_was_ended_is_no_cause_and_one_that_died_itself_is():
    epoch = an_epoch_of(1, 4, ended=(0, 1))
    ended = a_pod(0, DEAD)
    died = a_report(1, epoch=1, workers=(a_worker(state=State.DEAD, cause="WorkerDied"),))
    rest = [a_pod(2, HERE), a_pod(3, HERE)]
    assert list_causes(epoch, [ended, died, *rest]) == [("WorkerDied", 1, True)]
    assert list_causes(replace(epoch, ended=()), [ended, *rest])[0] == ("WorkerDied", 0, True)


@pytest.mark.parametrize("stage", [Stage.RUNNING, Stage.STARTING])
def test_a_collective_that_fails_within_a_unit_breaks_the_epoch(stage: Stage):
    epoch = replace(an_epoch_of(1, 4), stage=stage)
    reports = [a_pod(0, LOST), *(a_pod(s, None) for s in (1, 2, 3))]
    assert list_causes(epoch, reports) == [("GroupBroken", None, False)]
