from dataclasses import replace

from agent.given import a_member, an_epoch
from everstep_agent.peers.epoch_level import Stage
from everstep_agent.peers.following import (
    DOUBT_SECONDS,
    TURN_SECONDS,
    Answer,
    choose_coordinator,
    choose_witness,
    find_unreached,
    list_heirs,
)
from everstep_agent.peers.messages import Levels, Who
from everstep_contract import levels


def who(slot, **changes):
    return Who(**({"slot": slot, "attempt": 0} | changes))


def choose(me, *others, alone=10.0):
    answers = {
        f"host-{w.slot}": Answer(slot=w.slot, attempt=w.attempt, address=f"host-{w.slot}", who=w)
        for w in others
    }
    return choose_coordinator(me, f"host-{me.slot}", answers, alone_for=alone)


def test_alone_an_agent_coordinates():
    assert choose(who(3)).act


def test_who_acts_already_is_followed_wherever_its_slot_stands():
    assert choose(who(0), who(2, acting=True)).address == "host-2"


def test_of_two_that_act_the_one_of_the_newer_epoch_and_then_of_the_lower_slot_stays():
    assert (
        choose(who(0), who(1, acting=True, epoch=3), who(2, acting=True, epoch=4)).address
        == "host-2"
    )
    assert not choose(who(2, acting=True), who(1, acting=True)).act
    assert choose(who(1, acting=True), who(2, acting=True)).act


def test_the_lowest_living_slot_acts_and_the_others_wait_their_turn():
    assert choose(who(0), who(1), alone=0.0).act
    assert not choose(who(1), who(0), alone=0.0).act
    assert choose(who(1), who(0), alone=TURN_SECONDS + 0.1).act


def test_a_newcomer_lets_those_go_first_who_were_in_the_newest_epoch():
    assert not choose(who(0, epoch=0), who(1, epoch=4), alone=0.0).act
    assert choose(who(1, epoch=4), who(0, epoch=0), alone=0.0).act


def test_a_peer_that_still_follows_somebody_holds_us_back_for_a_while():
    peer = who(1, coordinator="host-9")
    assert not choose(who(0), peer, alone=1.0).act
    assert choose(who(0), peer, alone=DOUBT_SECONDS + 1.0).act


def test_who_leaves_proposes_nothing_and_stands_in_nobodys_way():
    assert not choose(who(0, candidate=False)).act
    assert choose(who(1), who(0, candidate=False), alone=0.0).act


def test_a_peer_that_cannot_be_reached_does_not_count():
    silent = {"host-0": Answer(slot=0, attempt=0, address="host-0", who=None)}
    assert choose_coordinator(who(1), "host-1", silent, alone_for=0.0).act


def test_a_newcomer_hears_of_the_newest_epoch_from_who_was_in_it():
    def witness(known, *epochs):
        answers = {
            f"host-{i}": Answer(slot=i, attempt=0, address=f"host-{i}", who=who(i, epoch=e))
            for i, e in enumerate(epochs)
        }
        answers["silent"] = Answer(slot=9, attempt=0, address="silent", who=None)
        return choose_witness(answers, known=known)

    assert witness(0, 0, 3, 2) == "host-1"
    assert witness(3, 0, 3, 2) is None
    assert witness(0) is None


def unreached(*others):
    return find_unreached(
        "host-2",
        [Answer(slot=w.slot, attempt=0, address=f"host-{w.slot}", who=w) for w in others]
        + [Answer(slot=9, attempt=0, address="host-9", who=None)],
    )


def test_the_two_lowest_slots_without_the_coordinators_come_next():
    me, epoch = levels.SlotAttempt(slot=0, attempt=0), an_epoch(4)
    published = Levels(coordinator=me, address=a_member(0).address, epoch=epoch)
    assert list_heirs(published) == [a_member(1).address, a_member(2).address]
    elsewhere = replace(published, address=a_member(2).address)
    assert list_heirs(elsewhere) == [a_member(0).address, a_member(1).address]
    over = replace(published, epoch=replace(epoch, stage=Stage.OVER))
    assert list_heirs(over) == list_heirs(replace(published, epoch=None)) == list_heirs(None) == []


def test_a_coordinator_that_others_follow_and_that_does_not_answer_is_named():
    assert unreached(who(1, coordinator="host-9")) == "host-9"
    assert unreached(who(0, acting=True), who(1, coordinator="host-0")) == "", "it answers"
    assert unreached(who(1, coordinator="host-2")) == "", "they follow this agent"
    assert unreached(who(1)) == ""
    assert unreached() == ""
