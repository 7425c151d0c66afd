"""What a coordinator may conclude if no agent reports the newest epoch of the run log."""

from agent.given import a_report, an_epoch, stepping, wanting
from everstep_agent.coordinator import rounds
from everstep_agent.peers.agent_report import State
from everstep_contract import levels, log

CLAIM = log.Claim(
    epoch=1,
    token="t",
    members=tuple(log.MemberId(slot=s, attempt=0, incarnation=1, rank=0, life=1) for s in range(2)),
    coordinator="host-0:7070",
    job_uid="uid-1",
    job="ns/job",
)


def unheard(*reports, wanted=None, known=0, uid="uid-1"):
    return rounds.list_unheard(CLAIM, known, reports, wanted or wanting(2), job_uid=uid)


def test_who_has_not_spoken_may_hold_everything():
    assert unheard() == {(0, 0), (1, 0)}
    assert unheard(known=1) == frozenset()
    assert unheard(uid="uid-2") == frozenset()


def test_whose_workers_are_over_holds_nothing():
    assert unheard(a_report(0, cut=1), stepping(1)) == {(1, 0)}
    assert unheard(a_report(0, cut=1), stepping(1, state=State.DEAD)) == frozenset()


def test_what_somebody_said_before_the_claim_tells_nothing_of_its_epoch():
    assert unheard(a_report(0), a_report(1, joined=1)) == {(0, 0), (1, 0)}
    assert unheard(a_report(0, joined=2), a_report(1, joined=2)) == frozenset(), (
        "both have joined another epoch"
    )


def test_the_gone_and_those_that_were_started_again_hold_nothing():
    gone = wanting(2, gone=(levels.SlotAttempt(slot=0, attempt=0),))
    assert unheard(a_report(1, incarnation=2), wanted=gone) == frozenset()


def test_an_epoch_is_adopted_only_if_its_claim_is_the_newest():
    held = a_report(1, held=an_epoch(token="t"))
    assert rounds.find_unheard([held], None, CLAIM) == held.held
    assert rounds.find_unheard([held], an_epoch(), CLAIM) is None
    assert rounds.find_unheard([a_report(1, held=an_epoch(token="x"))], None, CLAIM) is None


def test_who_comes_over_to_us_has_spoken_anew():
    waits = unheard(a_report(0))
    assert waits == {(0, 0), (1, 0)}
    before = rounds.list_reported(waits, [a_report(0), a_report(2)])
    assert before == {((0, 0, 1), 0)}, "slot 2 is no member of the claim"
    assert rounds.list_reported(waits, [stepping(0), a_report(2)]) != before
    assert rounds.list_reported(waits, [a_report(0), stepping(1)]) != before


def begin(mine=None, incident="", uid="uid-1", claim=CLAIM):
    wanted = wanting(2, incident=incident)
    return rounds.decide_beginning(claim, mine, wanted, job_uid=uid).cause


def test_why_nobody_has_heard_of_the_epoch_in_the_log():
    assert begin(claim=None) == "Start"
    assert begin(uid="uid-2") == "Start"
    assert begin() == "Start", "as after a suspension"
    assert begin(incident="inc-1") == "Replaced"
    assert begin(a_report(0, former_epoch=1, former_step=9), incident="inc-1") == "AgentLost"


def test_why_every_agent_was_restarted_is_told_in_the_kubelets_words():
    dead = [
        levels.DeadAgent(slot=s, attempt=0, incarnation=1, reason="OOMKilled, exit status 137")
        for s in (0, 1)
    ]
    mine = a_report(0, former_epoch=1, former_step=9)
    begun = rounds.decide_beginning(CLAIM, mine, wanting(2, dead=tuple(dead)), job_uid="uid-1")
    assert begun.message == "every agent of epoch 1 was restarted (OOMKilled, exit status 137)"


def test_what_ended_containers_had_applied_is_counted():
    reports = [a_report(0, former_epoch=1, former_step=9), a_report(1, former_epoch=0)]
    assert rounds.count_lost(reports, 1, 4) == 5
    assert rounds.count_lost(reports, 2, 4) == 0
