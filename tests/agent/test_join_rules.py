"""Unit tests: which workers join a running epoch in place, and the epoch that follows."""

from dataclasses import replace

from agent.given import a_member, a_report, a_worker, an_epoch, ended
from everstep_agent.coordinator import join_rules, transfer_rules
from everstep_agent.peers.agent_report import Ended, State
from everstep_agent.peers.epoch_level import Boundary, Stage, Transfer
from everstep_agent.peers.places import place_members, with_newcomers
from everstep_contract.wire import Standing


def waiting(slot: int, **changes: object):
    """A pod whose workers wait to join."""
    return a_report(slot, **({"in_place": True, "fresh": (3,)} | changes))


def invite(epoch, reports, missing):
    ready = join_rules.list_ready(epoch, reports)
    return join_rules.plan_invitation(epoch, ready, missing=missing)


def is_ready(report, epoch):
    return join_rules.list_ready(epoch, [report]) == [report]


def joining(*slots: int, life: int = 3):
    return tuple(a_member(s, lives=(life,)) for s in slots)


def test_newcomers_are_claimed_once_all_members_have_joined_the_next_epoch():
    epoch = an_epoch(2, successor=5)
    joined = [a_report(0, joined=5), a_report(1, joined=5)]
    assert join_rules.have_joined(epoch, joined)
    assert not join_rules.have_joined(epoch, joined[:1])
    assert not join_rules.have_joined(epoch, [joined[0], a_report(1, joined=4)])


# --- who may join --------------------------------------------------------------------------------


def test_newcomers_join_only_a_running_epoch_whose_members_all_can_hold():
    able = [waiting(0), waiting(1)]
    assert join_rules.can_join(an_epoch(2), able)
    assert not join_rules.can_join(an_epoch(2), able[:1])
    assert not join_rules.can_join(an_epoch(2), [waiting(0), waiting(1, in_place=False)])
    assert not join_rules.can_join(an_epoch(2, stage=Stage.STARTING), able)
    stays = waiting(1, fixed="ranks of a sharded model restart on GPUs")
    assert not join_rules.can_join(an_epoch(2), [waiting(0), stays])


def test_a_pod_is_ready_while_it_waits_and_once_it_is_invited():
    assert is_ready(waiting(2), an_epoch(2))
    assert not is_ready(waiting(2, fresh=()), an_epoch(2))
    invited = an_epoch(2, joining=joining(2))
    assert is_ready(waiting(2, fresh=()), invited)
    assert not is_ready(waiting(2, fresh=(), ended=ended(3)), invited)


def test_a_member_is_ready_once_a_worker_waits_for_each_rank_that_it_lost():
    epoch = an_epoch(1, members=(a_member(0, lives=(1, 0, 0)),))
    assert is_ready(waiting(0, fresh=(0, 4, 2)), epoch)
    assert not is_ready(waiting(0, fresh=()), epoch)
    assert not is_ready(waiting(0, fresh=(5, 4, 2)), epoch), "its rank 0 is still in the epoch"
    assert not is_ready(waiting(0, incarnation=2, fresh=(0, 4, 2)), epoch)
    whole = an_epoch(1, members=(a_member(0, lives=(1, 1, 1)),))
    assert not is_ready(waiting(0, fresh=(0, 4, 0)), whole), "the epoch still has the dead rank"


def test_a_pod_some_of_whose_ranks_are_in_another_epoch_cannot_join():
    assert not is_ready(waiting(2, fresh=(0, 4)), an_epoch(2))


# --- the invitation ------------------------------------------------------------------------------


def test_the_lowest_slots_are_invited_each_with_its_place_in_the_next_epoch():
    epoch = an_epoch(2, members=(a_member(1, node_rank=0), a_member(4, node_rank=1)))
    found = invite(epoch, [waiting(5), waiting(0), waiting(2)], 2)
    assert [(m.slot, m.lives) for m in found] == [(0, (3,)), (2, (3,))]
    after = with_newcomers(epoch.members, found)
    assert [(m.slot, m.node_rank, m.ranks) for m in after] == [
        (0, 0, {0: 0}), (1, 1, {0: 1}), (2, 2, {0: 2}), (4, 3, {0: 3}),
    ]  # fmt: skip


def test_members_that_lost_ranks_are_invited_beside_the_pods_that_are_missing():
    broken = a_member(0, lives=(1, 0, 1))
    epoch = an_epoch(members=place_members((broken, a_member(1, lives=(1, 1, 1)))))
    reports = [waiting(0, fresh=(0, 4, 0)), waiting(2, fresh=(7, 7, 7))]
    assert [m.lives for m in invite(epoch, reports, 0)] == [(0, 4, 0)]
    found = invite(epoch, reports, 1)
    assert [(m.slot, m.lives) for m in found] == [(0, (0, 4, 0)), (2, (7, 7, 7))]
    assert [t.local for t in transfer_rules.plan_transfers(replace(epoch, joining=found), "k")] == [
        1, 0, 1, 2,
    ]  # fmt: skip
    assert [m.ranks for m in epoch.members] == [{0: 0, 2: 1}, {0: 2, 1: 3, 2: 4}]
    after = with_newcomers(epoch.members, found)
    assert [m.lives for m in after] == [(1, 4, 1), (1, 1, 1), (7, 7, 7)]
    assert [m.ranks[0] for m in after] == [0, 3, 6]


def test_nobody_is_invited_who_is_not_ready_or_cannot():
    assert invite(an_epoch(2), [waiting(2, fresh=()), waiting(3, in_place=False)], 2) == ()
    assert invite(an_epoch(2), [waiting(2)], 0) == ()


def test_who_is_invited_stays_so_with_the_workers_that_were_meant():
    epoch = an_epoch(2, joining=joining(2))
    found = invite(epoch, [waiting(2, fresh=())], 1)
    assert [m.lives for m in found] == [(3,)]


def test_an_invited_spare_gives_way_to_no_pod_of_a_lower_slot_that_is_ready_later():
    """Its workers may have got ready for minutes. The next attempt of a lost pod then is the spare."""
    epoch = an_epoch(2, joining=joining(5))
    found = invite(epoch, [waiting(5, fresh=()), waiting(2, fresh=(7,))], 1)
    assert [m.slot for m in found] == [5]
    found = invite(epoch, [waiting(5, fresh=()), waiting(2, fresh=(7,))], 2)
    assert [m.slot for m in found] == [2, 5]


def test_a_late_newcomer_holds_no_place_until_enough_others_are_ready():
    epoch = an_epoch(2)
    late = invite(epoch, [waiting(2)], 1)
    epoch = replace(epoch, joining=late)
    reports = [waiting(2, fresh=()), waiting(3), waiting(4)]

    def slots(missing: int) -> list[int]:
        ready = join_rules.list_ready(epoch, reports)
        found = join_rules.plan_invitation(epoch, ready, missing=missing, late=late)
        return [m.slot for m in found]

    assert (slots(0), slots(1), slots(2)) == ([], [2, 3], [2, 3, 4])
    epoch = replace(epoch, joining=(*late, *invite(epoch, reports[1:], 2)))
    reports = [waiting(2, fresh=()), waiting(3, fresh=()), waiting(4, fresh=(), prepared=(3,))]
    assert (slots(1), slots(2)) == ([4], [2, 3, 4])


def test_who_was_invited_and_has_lost_its_workers_is_invited_anew_with_the_next():
    epoch = an_epoch(2, joining=joining(2))
    assert invite(epoch, [waiting(2, fresh=(), ended=ended(3))], 1) == ()
    found = invite(epoch, [waiting(2, fresh=(4,), ended=ended(3))], 1)
    assert [m.lives for m in found] == [(4,)]


def test_another_container_of_an_invited_slot_was_not_invited():
    epoch = an_epoch(2, joining=joining(2))
    assert invite(epoch, [waiting(2, incarnation=2, fresh=())], 1) == ()


# --- getting ready -------------------------------------------------------------------------------


def test_newcomers_are_prepared_once_all_of_them_are():
    invited = joining(2, 3)
    both = [waiting(2, prepared=(3,)), waiting(3, prepared=(3,))]
    assert join_rules.are_prepared(invited, both)
    assert not join_rules.are_prepared(invited, both[:1])
    assert not join_rules.are_prepared(invited, [both[0], waiting(3, prepared=(2,))])
    assert not join_rules.are_prepared((), both)


def at_boundary(**changes: object):
    values = {"state": State.HELD, "standing": Standing(epoch=1, applied=8, reductions=0)}
    return a_worker(**(values | changes))


def test_the_members_are_held_once_each_has_told_its_standing_at_the_boundary():
    epoch = an_epoch(2, boundary=Boundary(step=8, hold=True))
    both = [at_boundary(), at_boundary()]
    assert join_rules.are_held(epoch, both)
    assert not join_rules.are_held(epoch, both[:1])
    assert not join_rules.are_held(epoch, [both[0], at_boundary(standing=None)])
    assert not join_rules.are_held(epoch, [both[0], at_boundary(state=State.TRACKED)])
    failed = Standing(epoch=1, applied=7, reductions=0)
    assert not join_rules.are_held(epoch, [both[0], at_boundary(standing=failed)])
    assert not join_rules.are_held(an_epoch(2), both)
    assert not join_rules.are_held(an_epoch(2, boundary=Boundary(step=8)), both)


# --- continue_epoch ------------------------------------------------------------------------------


def standing(**changes: object) -> Standing:
    return Standing(**({"epoch": 1, "applied": 8, "reductions": 3} | changes))


def go_on(epoch, newcomers, *standings: Standing):
    told = dict(enumerate(standings or (standing(), standing())))
    return join_rules.continue_epoch(epoch, newcomers, told, number=5, token="new")


def test_members_and_newcomers_go_on_together_in_the_order_of_their_slots():
    epoch = an_epoch(
        2, members=(a_member(1, node_rank=0), a_member(3, node_rank=1)),
        joining=joining(0, 2), boundary=Boundary(step=8, hold=True),
        transfers=(Transfer(giver=0, slot=0, local=0, key="k"),),
    )  # fmt: skip
    after = go_on(epoch, epoch.joining)
    assert (after.number, after.token, after.stage) == (5, "new", Stage.STARTING)
    assert [(m.slot, m.node_rank) for m in after.members] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert (after.joining, after.transfers, after.boundary) == ((), (), None)
    place = after.in_place
    assert place is not None
    assert (place.former, place.applied, place.reductions, place.shares) == (1, 8, 3, ())
    assert after.resume == 8


def test_without_the_newcomers_the_members_go_on_alone():
    after = go_on(an_epoch(2, joining=joining(2)), ())
    assert [m.slot for m in after.members] == [0, 1]
    assert after.joining == ()


def test_members_keep_what_they_have_begun_and_a_newcomer_has_no_part_of_that_step():
    epoch = an_epoch(2, members=(a_member(1, node_rank=0), a_member(3, node_rank=1)))
    begun = [standing(share=((0, 3),), micro_batches=5), standing(share=((3, 5),), micro_batches=5)]
    place = go_on(epoch, joining(0, 2), *begun).in_place
    assert (place.micro_batches, place.shares) == (5, ((), ((0, 3),), (), ((3, 5),)))
    alone = go_on(epoch, (), *begun).in_place
    assert alone.shares == (((0, 3),), ((3, 5),))


def test_what_a_member_that_waits_at_the_boundary_has_not_begun_is_shared_with_the_newcomers():
    begun = standing(share=((0, 2),), micro_batches=4)
    place = go_on(an_epoch(2), joining(2), begun, standing()).in_place
    assert place.shares == (((0, 2),), ((2, 3),), ((3, 4),))


def test_a_worker_that_replaces_a_lost_rank_of_a_member_is_a_newcomer():
    epoch = an_epoch(1, members=(a_member(0, lives=(0, 1)),))
    begun = standing(share=((0, 2),), micro_batches=2)
    after = go_on(epoch, (a_member(0, lives=(4, 0)),), begun)
    assert after.members[0].lives == (4, 1)
    assert after.in_place.shares == ((), ((0, 2),))


# --- members leave at the boundary at which others join ------------------------------------------


def leave(epoch, *slots: int):
    return replace(epoch, leaving=tuple(m.id for m in epoch.members if m.slot in slots))


def test_who_leaves_is_not_in_the_next_epoch_and_its_part_of_the_step_goes_to_a_newcomer():
    begun = {
        1: standing(share=((2, 4),), micro_batches=6),
        2: standing(share=((4, 6),), micro_batches=6),
    }
    epoch = leave(an_epoch(3, joining=joining(5)), 0)
    after = join_rules.continue_epoch(epoch, epoch.joining, begun, number=5, token="new")
    assert [(m.slot, m.first) for m in after.members] == [(1, 0), (2, 1), (5, 2)]
    assert after.in_place.shares == (((2, 4),), ((4, 6),), ((0, 2),))
    assert after.leaving == ()


def test_if_nobody_joins_its_part_goes_to_those_who_stay():
    begun = {0: standing(share=((0, 2),), micro_batches=4)}
    after = join_rules.continue_epoch(
        leave(an_epoch(2, joining=joining(5)), 1), (), begun, number=5, token="new"
    )
    assert [m.slot for m in after.members] == [0]
    assert after.in_place.shares == (((0, 4),),)


def test_a_newcomer_joins_only_where_there_is_room():
    epoch = leave(an_epoch(3), 1)
    assert [m.slot for m in join_rules.choose_joining(epoch, joining(5, 6), 3)] == [5]
    assert join_rules.choose_joining(an_epoch(3), joining(5), 3) == (), "nobody leaves: no room"
    broken = an_epoch(2, members=(a_member(0, lives=(1, 0)), a_member(1, lives=(1, 1))))
    back = a_member(0, lives=(0, 4))
    assert join_rules.choose_joining(broken, (back, *joining(5)), 2) == (back,)


def test_only_those_who_stay_have_to_join_the_next_epoch():
    epoch = leave(an_epoch(2, successor=5), 1)
    assert join_rules.have_joined(epoch, [a_report(0, joined=5), a_report(1, joined=1)])
    assert not join_rules.have_joined(epoch, [a_report(0, joined=1), a_report(1, joined=5)])


def test_a_member_has_left_once_all_its_workers_have_ended_or_its_pod_is_lost():
    epoch = leave(an_epoch(members=(a_member(0), a_member(1, lives=(2, 0, 1)))), 1)
    both = (Ended(local=0, life=2), Ended(local=1, life=7), Ended(local=2, life=1))
    assert join_rules.have_left(epoch, [a_report(1, ended=both)])
    assert not join_rules.have_left(epoch, [a_report(1, ended=both[:2])])
    assert not join_rules.have_left(epoch, [a_report(1, ended=ended(1))])
    assert not join_rules.have_left(epoch, [])
    assert join_rules.have_left(epoch, [], lost={(1, 0, 1)})
    assert join_rules.have_left(an_epoch(2), [])


def test_standings_are_listed_by_rank():
    epoch = an_epoch(2)
    reports = [
        a_report(1, epoch=1, workers=(at_boundary(standing=standing(applied=9)),)),
        a_report(0, epoch=1, workers=(at_boundary(standing=standing()),)),
    ]
    found = join_rules.list_standings(epoch, reports)
    assert {rank: told.applied for rank, told in found.items()} == {0: 8, 1: 9}
