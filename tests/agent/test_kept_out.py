"""Unit tests: workers that the newest claim names but that are still in the epoch before it."""

from dataclasses import replace

import pytest

from agent.given import a_claim, a_report, a_worker, an_epoch, wanting
from everstep_agent.coordinator import kept_out, rounds
from everstep_agent.coordinator.breaks import find_break
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import InPlace, Stage
from everstep_agent.peers.messages import Levels
from everstep_agent.pod.worker_report import find_unheard_of
from everstep_agent.runlog import rules as runlog_rules
from everstep_contract import levels, log

EPOCH = an_epoch(3)
IDS = tuple(i for m in EPOCH.members for i in m.ids())
FIRST = a_claim(1, members=IDS)
SECOND = a_claim(2, members=IDS[1:], chain=(log.ChainLink(epoch=1, last_step=5),))
NEXT = replace(
    EPOCH, number=2, members=EPOCH.members[1:], in_place=InPlace(former=1, applied=5, reductions=5)
)


def outside(slot: int = 1, **changes: object) -> AgentReport:
    values = {"epoch": 1, "fresh": (), "joined": 3, "workers": (a_worker(state=State.HELD),)}
    return a_report(slot, **(values | {"held": EPOCH} | changes))


def inside(slot: int = 2, state: State = State.HELD, **changes: object) -> AgentReport:
    workers = (a_worker(state=state),)
    return a_report(slot, **({"epoch": 2, "fresh": (), "workers": workers} | changes))


@pytest.mark.parametrize(
    "report",
    [
        outside(0),
        outside(workers=(a_worker(state=State.DEAD),)),
        outside(workers=(a_worker(life=2),)),
        outside(incarnation=2),
        outside(epoch=0, workers=()),
        inside(1),
    ],
    ids=["not named", "dead", "another life", "another incarnation", "in no epoch", "inside"],
)
def test_who_is_not_kept_out(report: AgentReport) -> None:
    assert kept_out.list_kept_out([report], SECOND) == []


def test_workers_that_the_claim_names_and_that_did_not_enter_it_are_kept_out() -> None:
    assert kept_out.list_kept_out([outside(), inside()], SECOND) == [outside()]
    assert kept_out.list_kept_out([outside()], FIRST) == [], "this claim continues no epoch"


@pytest.mark.parametrize(
    ("reports", "may"),
    [
        ([outside()], False),
        ([outside(), outside(2, joined=2)], True),
        ([outside(), outside(2, joined=2, workers=(a_worker(state=State.PARKED),))], False),
        ([outside(), inside()], False),
    ],
    ids=["joined a later one", "not yet inside", "cut", "inside"],
)
def test_who_may_still_enter_the_claimed_epoch(reports: list[AgentReport], may: bool) -> None:
    assert kept_out.may_enter(reports, SECOND) is may


def test_their_epoch_is_recovered_once_nobody_lives_in_the_claimed_one() -> None:
    assert rounds.find_unheard([outside()], NEXT, SECOND) == EPOCH
    assert rounds.find_unheard([outside()], None, SECOND) == EPOCH
    assert rounds.find_unheard([outside(), inside()], NEXT, SECOND) is None
    assert rounds.find_unheard([outside(), inside(state=State.DEAD)], NEXT, SECOND) == EPOCH
    assert rounds.find_unheard([outside()], EPOCH, SECOND) is None, "recovery has begun"


def test_the_job_does_not_stop_before_they_are_heard() -> None:
    def waits(known: int, *reports: AgentReport) -> frozenset[tuple[int, int]]:
        return rounds.list_unheard(SECOND, known, reports, wanting(3), job_uid="uid")

    over = inside(state=State.DEAD, cut=2)
    assert waits(2, outside(), over) == {(1, 0)}
    assert waits(0, outside(), over) == {(1, 0)}
    assert waits(1, outside(), over) == frozenset(), "their epoch was recovered already"


def test_an_agent_that_holds_nothing_of_the_epoch_that_never_began_is_not_ahead() -> None:
    dead = inside(state=State.DEAD)
    assert not rounds.is_behind([dead, outside()], EPOCH, SECOND)
    assert rounds.is_behind([inside()], EPOCH, SECOND)
    stood = SECOND.chain[-1].last_step
    assert not rounds.is_behind([replace(dead, staged=stood)], EPOCH, SECOND), (
        "it saved the step, then ended"
    )
    saved = a_worker(state=State.DEAD, whole=stood)
    assert not rounds.is_behind([replace(dead, workers=(saved,))], EPOCH, SECOND)
    assert rounds.is_behind([replace(dead, staged=stood + 1)], EPOCH, SECOND)
    further = replace(saved, whole=stood + 1)
    assert rounds.is_behind([replace(dead, workers=(further,))], EPOCH, SECOND)
    assert rounds.is_behind([dead], EPOCH, FIRST)
    assert rounds.is_behind([dead], None, SECOND)
    assert not rounds.is_behind([outside()], EPOCH, SECOND)


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (outside(), "joined round 3 and will not start"),
        (outside(joined=2, workers=(a_worker(state=State.PARKED),)), "was cut by another"),
    ],
    ids=["has joined another epoch", "was cut"],
)
def test_the_claimed_epoch_does_not_wait_for_them(report: AgentReport, says: str) -> None:
    found = find_break(NEXT, [(report, 0.0), (inside(), 0.0)], wanting(3), idle=0.0, hang=300.0)
    assert found is not None
    assert found.cause == "GroupBroken"
    assert says in found.message


def test_a_survivor_that_has_yet_to_enter_breaks_nothing() -> None:
    yet = (outside(joined=2), 0.0)
    assert (
        find_break(
            NEXT, [yet, (inside(state=State.TRACKED), 0.0)], wanting(3), idle=0.0, hang=300.0
        )
        is None
    )


def test_the_log_ends_no_worker_that_its_newest_claim_names() -> None:
    assert runlog_rules.oldest_living([]) == 0
    assert runlog_rules.oldest_living([FIRST]) == 1
    assert runlog_rules.oldest_living([FIRST, SECOND]) == 1
    restarted = replace(SECOND, members=tuple(replace(i, life=2) for i in IDS))
    assert runlog_rules.oldest_living([FIRST, restarted]) == 2
    another_job = replace(SECOND, job_uid="another")
    assert runlog_rules.oldest_living([FIRST, another_job]) == 2


def test_an_agent_tells_of_the_epoch_that_its_kept_out_workers_are_in() -> None:
    published = Levels(
        coordinator=levels.SlotAttempt(slot=0, attempt=0), address="host-0:7070", epoch=NEXT
    )
    assert find_unheard_of(EPOCH, published, kept_out=True) == EPOCH
    assert find_unheard_of(EPOCH, published, kept_out=False) is None
    over = replace(EPOCH, stage=Stage.OVER)
    assert find_unheard_of(over, published, kept_out=True) is None


def test_the_place_of_a_pod_in_an_epoch_that_continues_its_own() -> None:
    assert NEXT.place_after(1, (1, 0, 1)) == NEXT.members[0]
    assert NEXT.place_after(1, (0, 0, 1)) is None
    assert NEXT.place_after(3, (1, 0, 1)) is None
    assert EPOCH.place_after(0, (1, 0, 1)) is None, "this epoch continues no other"
