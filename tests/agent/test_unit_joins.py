"""Unit tests: units join, leave and fall silent as a whole."""

import math
from dataclasses import replace

from agent.given import a_claim, a_member, a_report, a_worker, an_epoch, ended
from everstep_agent.coordinator import join_rules, silence_rules, transfer_rules
from everstep_agent.coordinator.hung import list_hung
from everstep_agent.peers.epoch_level import Boundary, EpochLevel
from everstep_agent.peers.places import place_members, with_newcomers
from everstep_agent.pod.worker_start import build_join, name_unit
from everstep_contract import env
from everstep_contract.units import Mesh
from everstep_contract.wire import Standing

PAIRS = Mesh(shard=2)


def pairs(*slots: int, pod: int = 1, **changes: object) -> EpochLevel:
    """An epoch of units of two ranks, with the slots in this order."""
    members = [a_member(s, lives=(1,) * pod) for s in slots]
    return an_epoch(members=place_members(members, max(1, 2 // pod)), mesh=PAIRS, **changes)


def waiting(slot: int, life: int = 3, **changes: object):
    return a_report(slot, **({"in_place": True, "fresh": (life,)} | changes))


def invite(epoch, reports, missing=2, coming=()):
    ready = join_rules.list_ready(epoch, reports)
    found = join_rules.plan_invitation(epoch, ready, missing=missing, coming=coming)
    return [(m.slot, m.lives) for m in found]


def joining(*slots: int, life: int = 3):
    return tuple(a_member(s, lives=(life,)) for s in slots)


# --- places ---------------------------------------------------------------------------------------


def test_a_unit_keeps_its_block_and_blocks_follow_their_lowest_slots():
    epoch = pairs(2, 3)
    assert [m.slot for m in with_newcomers(epoch.members, joining(0, 4), 2)] == [0, 4, 2, 3]
    mixed = pairs(0, 4, 2, 3)
    assert [m.slot for m in mixed.members] == [0, 4, 2, 3]
    assert [m.slot for m in with_newcomers(mixed.members[2:], joining(1, 5), 2)] == [1, 5, 2, 3]


# --- the invitation -------------------------------------------------------------------------------


def test_only_whole_units_are_invited():
    epoch = pairs(2, 3)
    assert invite(epoch, [waiting(0)]) == []
    assert invite(epoch, [waiting(0), waiting(1)]) == [(0, (3,)), (1, (3,))]
    assert invite(epoch, [waiting(0), waiting(1), waiting(4), waiting(5)]) == [(0, (3,)), (1, (3,))]
    assert invite(epoch, [waiting(0), waiting(1)], missing=1) == []


def test_a_slot_waits_for_its_neighbour_if_that_is_about_to_get_ready():
    epoch, ready = pairs(6, 7), [waiting(0), waiting(2)]
    assert invite(epoch, ready, coming={1, 3}) == []
    assert invite(epoch, [waiting(0), waiting(4)], coming={3}) == [(0, (3,)), (4, (3,))]
    ready += [waiting(3)]
    assert invite(epoch, ready, coming={1}) == [(2, (3,)), (3, (3,))], "neighbors come first"


def test_if_one_process_of_an_invited_unit_ends_the_other_is_invited_again_once_it_is_replaced():
    """The other process formed its groups with the one that ended."""
    epoch = pairs(2, 3, joining=joining(0, 1))
    prepares = waiting(0, fresh=())
    assert invite(epoch, [prepares, waiting(1, fresh=())]) == [(0, (3,)), (1, (3,))]
    again = waiting(1, 4, ended=ended(3))
    assert invite(epoch, [prepares, again]) == []
    renewed = replace(epoch, joining=())
    assert invite(renewed, [prepares, again]) == []
    assert invite(renewed, [waiting(0, 4, ended=ended(3)), again]) == [(0, (4,)), (1, (4,))]


def test_a_unit_is_ready_to_join_once_all_its_pods_are():
    epoch = pairs(2, 3, joining=joining(0, 1, 4, 5))
    told = [waiting(slot, prepared=(3,)) for slot in (0, 1, 4)]
    assert [m.slot for m in join_rules.list_prepared(epoch, told)] == [0, 1]


def test_a_pod_of_several_units_takes_back_the_one_that_it_lost():
    member = a_member(0, lives=(1, 1, 0, 0))
    epoch = an_epoch(members=(member,), mesh=PAIRS)
    assert invite(epoch, [waiting(0, fresh=(0, 0, 2, 2))], 0) == [(0, (0, 0, 2, 2))]
    assert invite(epoch, [waiting(0, fresh=())], 0) == []
    invited = replace(epoch, joining=(a_member(0, lives=(0, 0, 2, 2)),))
    transfers = transfer_rules.plan_transfers(invited, "k")
    assert [(t.giver, t.local) for t in transfers] == [(0, 2), (1, 3)]


def test_the_name_of_a_unit_tells_its_processes():
    epoch = pairs(2, 3, joining=joining(0, 1))
    settings = env.AgentEnv(
        job="j", job_uid="u", slot=0, attempt=0, token="t", pod_ip="", uri="", run="r", memory="",
        termination_log="", mesh=PAIRS,
    )  # fmt: skip
    starts = [build_join(settings, 0, epoch, m) for m in epoch.joining]
    assert [(s.rank, s.world, s.join) for s in starts] == [(0, 4, True), (1, 4, True)]
    assert starts[0].unit == starts[1].unit
    other = replace(epoch, joining=(epoch.joining[0], a_member(1, lives=(4,))))
    assert build_join(settings, 0, other, other.joining[0]).unit != starts[0].unit
    assert name_unit(epoch, 0) == name_unit(epoch, 1)


# --- the state, and the next epoch ----------------------------------------------------------------


def test_each_newcomer_takes_the_state_of_its_own_place():
    epoch = pairs(2, 3, 4, 5, joining=joining(0, 1, 6, 7))
    transfers = transfer_rules.plan_transfers(epoch, "k")
    assert [(t.slot, t.giver) for t in transfers] == [(0, 0), (1, 1), (6, 2), (7, 3)]
    staying = transfer_rules.plan_transfers(epoch, "k", {epoch.members[0].id, epoch.members[1].id})
    assert [t.giver for t in staying] == [2, 3, 2, 3]


def test_a_unit_of_which_one_pod_has_not_taken_the_state_does_not_join():
    epoch = pairs(2, 3, joining=joining(0, 1, 4, 5))
    taken = [m for m in epoch.joining if m.slot != 1]
    assert [m.slot for m in join_rules.choose_joining(epoch, taken, 6)] == [4, 5]
    assert join_rules.choose_joining(epoch, epoch.joining, 3) == ()
    assert join_rules.list_mates(epoch, {(1, 0, 1)}) == {(0, 0, 1), (1, 0, 1)}


def test_newcomers_begin_without_micro_batches_and_passes():
    epoch = pairs(2, 3, joining=joining(0, 1), boundary=Boundary(step=5, hold=True))
    told = {
        rank: Standing(epoch=1, applied=5, reductions=0, share=share, micro_batches=5, passes=3)
        for rank, share in enumerate((((0, 3),), ((3, 5),)))
    }
    after = join_rules.continue_epoch(epoch, epoch.joining, told, number=2, token="n")
    assert [m.slot for m in after.members] == [0, 1, 2, 3]
    place = after.in_place
    assert place is not None
    assert place.shares == ((), (), ((0, 3),), ((3, 5),))
    assert (place.passes, place.begun) == ((0, 3), ())


def test_what_a_unit_that_leaves_has_begun_goes_to_the_newcomers():
    epoch = pairs(0, 1, 2, 3, joining=joining(4, 5), boundary=Boundary(step=5, hold=True))
    epoch = replace(epoch, leaving=((0, 0, 1), (1, 0, 1)))
    shares = (((0, 2),), ((2, 3),), ((3, 4),), ((4, 5),))
    passes = (2, 2, 1, 1)
    told = {
        r: Standing(epoch=1, applied=5, reductions=0, share=shares[r], micro_batches=5, passes=passes[r])
        for r in (2, 3)
    }  # fmt: skip
    after = join_rules.continue_epoch(epoch, epoch.joining, told, number=2, token="n")
    assert [m.slot for m in after.members] == [2, 3, 4, 5]
    assert after.in_place is not None
    assert after.in_place.shares == (((0, 1), (3, 4)), ((4, 5),), ((1, 2),), ((2, 3),))
    assert after.in_place.passes == (2, 1)


# --- silence --------------------------------------------------------------------------------------


def claim_of(epoch: EpochLevel):
    return a_claim(epoch.number, members=tuple(i for m in epoch.members for i in m.ids()))


def test_the_units_that_stay_whole_must_be_able_to_claim_without_the_silent_one():
    two, three = pairs(0, 1, 2, 3), pairs(0, 1, 2, 3, 4, 5)
    last, first = two.members[3].id, two.members[0].id
    assert silence_rules.list_outvoted(two, claim_of(two), {last}, ()) == {last}
    assert silence_rules.list_outvoted(two, claim_of(two), {first}, ()) == {first}, (
        "its mate answers and is ended, so two of the three that may live go on"
    )
    unit = {m.id for m in two.members[:2]}
    assert silence_rules.list_outvoted(two, claim_of(two), unit, ()) == frozenset(), (
        "of two halves that may live, the one with the lowest slot goes on"
    )
    assert silence_rules.list_outvoted(three, claim_of(three), {first}, ()) == {first}
    both = {three.members[0].id, three.members[2].id}
    assert silence_rules.list_outvoted(three, claim_of(three), both, ()) == frozenset()


def test_the_rest_of_a_silent_members_unit_waits_for_it_in_a_way_that_looks_like_computing():
    epoch = pairs(0, 1, 2, 3)
    waits = a_worker(waiting=True, waited=1.0)
    reports = [
        (a_report(1, epoch=1, workers=(a_worker(),)), 0.1),
        (a_report(2, epoch=1, workers=(waits,)), 0.1),
        (a_report(3, epoch=1, workers=(waits,)), 0.1),
    ]
    silent = (a_report(0, epoch=1, workers=(a_worker(),)), 1.0)
    found = silence_rules.list_doubted(epoch, [silent, *reports])
    assert [m.slot for m in found] == [0]
    busy = [reports[0], (a_report(2, epoch=1, workers=(a_worker(),)), 0.1), reports[2]]
    assert silence_rules.list_doubted(epoch, [silent, *busy]) == ()
    alone = pairs(0, 1)
    assert silence_rules.list_doubted(alone, [silent, reports[0]]) == ()
    assert silence_rules.list_doubted(epoch, [(r, math.inf) for r, _ in reports]) == ()


# --- hangs ----------------------------------------------------------------------------------------


def hung(*ranks: dict[str, object], age: float = 0.1) -> list[int]:
    """Return the slots that are cut out. `age` is that of slot 1's report, in seconds."""
    reports = [
        (a_report(n, epoch=1, workers=(a_worker(**r),)), age if n == 1 else 0.1)
        for n, r in enumerate(ranks)
    ]
    return [h.slot for h in list_hung(pairs(*range(len(ranks))), reports, 1)]


OVERDUE: dict[str, object] = {"overdue": 1.2}
STOPPED: dict[str, object] = {"overdue": 1.2, "stopped": True}
WAITS: dict[str, object] = {"waiting": True}


def test_of_a_unit_that_makes_no_progress_the_rank_that_is_stopped_is_cut_out():
    assert hung(OVERDUE, STOPPED, WAITS, WAITS) == [1]
    assert hung(OVERDUE, OVERDUE, WAITS, WAITS) == [0, 1], "either of the two may hang"
    assert hung(WAITS, STOPPED, WAITS, WAITS) == [1]
    assert hung({}, STOPPED, WAITS, WAITS) == [1], "the other cannot complete alone"
    assert hung({}, OVERDUE, WAITS, WAITS) == []


def test_a_rank_that_was_stopped_while_it_waited_does_not_wait_for_its_mate():
    """Each of the two has learnt a limit of its own, and the mate's may be the shorter."""
    still = WAITS | {"stopped": True}
    assert hung(OVERDUE, still | {"overdue": 0.7}, WAITS, WAITS) == []
    assert hung(OVERDUE, still | {"overdue": 1.0}, WAITS, WAITS) == [1]


def test_a_rank_whose_mate_falls_silent_is_not_taken_for_the_one_that_hangs():
    assert hung(OVERDUE, WAITS, WAITS, WAITS) == [], "it may wait for its mate"
    late = {"overdue": 3.0}
    assert hung(late, WAITS, WAITS, WAITS) == [0], "its mate has reported since"
    assert hung(late, WAITS, WAITS, WAITS, age=0.7) == []
    assert hung(late, late, WAITS, WAITS, age=0.7) == [0, 1]
