"""Unit tests: who sends the state to which newcomer, and how long the coordinator waits for a newcomer."""

import pytest

from agent.given import a_member, a_report, an_epoch, ended
from everstep_agent.coordinator import transfer_rules
from everstep_agent.coordinator.transfer_rules import LOADED_BYTES, STILL_SECONDS
from everstep_agent.peers.epoch_level import Transfer

MIB = 2**20


def waiting(slot: int, **changes: object):
    """A pod whose workers receive the state."""
    return a_report(slot, **({"in_place": True, "fresh": ()} | changes))


def joining(*slots: int):
    return tuple(a_member(s, lives=(3,)) for s in slots)


def test_no_member_gives_twice_before_all_have_given_once():
    epoch = an_epoch(2, joining=joining(2, 3, 4))
    transfers = transfer_rules.plan_transfers(epoch, "k")
    assert [(t.giver, t.slot, t.local) for t in transfers] == [(0, 2, 0), (1, 3, 0), (0, 4, 0)]
    assert len({t.key for t in transfers}) == 3


def test_who_leaves_gives_nothing():
    epoch = an_epoch(3, joining=joining(3, 4, 5))
    transfers = transfer_rules.plan_transfers(epoch, "k", {epoch.members[1].id})
    assert [t.giver for t in transfers] == [0, 2, 0]


def test_after_a_second_failed_join_another_rank_gives():
    """After the first, the same rank waits at the boundary if its state changed meanwhile."""
    epoch = an_epoch(3, joining=joining(3))
    givers = [transfer_rules.plan_transfers(epoch, "k", failed=n)[0].giver for n in range(4)]
    assert givers == [0, 0, 1, 2]


def test_each_worker_of_a_newcomer_takes_by_itself():
    epoch = an_epoch(1, joining=(a_member(1, lives=(3, 4)),))
    assert transfer_rules.plan_transfers(epoch, "k") == (
        Transfer(giver=0, slot=1, local=0, key="k-0"),
        Transfer(giver=0, slot=1, local=1, key="k-1"),
    )


def test_the_state_is_taken_once_the_meant_workers_hold_that_of_the_boundary():
    invited = joining(2, 3)
    holds = waiting(2, prepared=(3,), taken=8)
    assert transfer_rules.list_taken(invited, [holds, waiting(3)], 8) == invited[:1]
    for report in (
        waiting(2, prepared=(3,)),
        waiting(2, prepared=(3,), taken=7),
        waiting(2, prepared=(4,), taken=8),
        waiting(4, prepared=(3,), taken=8),
    ):
        assert transfer_rules.list_taken(invited, [report], 8) == ()


@pytest.mark.parametrize(
    ("reports", "why"),
    [
        ([], "slot 2 has stopped reporting"),
        ([waiting(2, ended=ended(3))], "a worker of slot 2 has ended"),
        ([waiting(2, incarnation=2)], "the container of slot 2 was started again"),
    ],
    ids=["silent", "its worker ended", "a newer container"],
)
def test_a_newcomer_that_is_lost_is_named_with_the_reason(reports, why):
    found = transfer_rules.find_lost(joining(2, 3), [*reports, waiting(3)])
    assert found == {(2, 0, 1): why}


def test_a_newcomer_that_is_there_is_not_lost():
    assert transfer_rules.find_lost(joining(2), [waiting(2, ended=ended(2))]) == {}


def follow(*told: tuple[float, int], expected: int = 900 * MIB):
    """The reasons at the end, after slot 2 has reported these (time, MiB received)."""
    progress: dict = {}
    for now, received in told:
        reports = [waiting(2, received=received * MIB, expected=expected)]
        progress = transfer_rules.note_progress(progress, joining(2), reports, now)
    return list(transfer_rules.find_still(joining(2), reports, progress, now).values())


def test_a_transfer_that_moves_may_take_as_long_as_it_needs():
    assert follow(*((STILL_SECONDS * n, n) for n in range(500))) == []


def test_a_transfer_that_stands_still_is_given_up():
    assert follow((0.0, 5), (STILL_SECONDS, 5)) == []
    assert follow((0.0, 5), (STILL_SECONDS + 1, 5)) == [
        "slot 2 has 5 of 900 MiB of the state, and no more since 16 s"
    ]
    assert follow((0.0, 5), (STILL_SECONDS, 6), (STILL_SECONDS + 1, 6)) == []


def test_a_newcomer_that_receives_nothing_at_all_is_given_up():
    told = follow((0.0, 0), (STILL_SECONDS + 1, 0), expected=0)
    assert told == ["slot 2 has 0 MiB of the state, and no more since 16 s"]


def test_what_has_arrived_is_loaded_and_that_takes_time_by_its_size():
    whole = 40 * LOADED_BYTES
    arrived = (0.0, whole // MIB)
    assert follow(arrived, (STILL_SECONDS + 40, arrived[1]), expected=whole) == []
    assert follow(arrived, (STILL_SECONDS + 41, arrived[1]), expected=whole) != []
