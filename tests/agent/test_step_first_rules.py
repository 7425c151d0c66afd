"""Unit tests: whether the survivors of a loss may step before their claim is in the log."""

from dataclasses import replace

import pytest

from agent.given import a_claim, a_report, a_worker, an_epoch, ended, wanting
from everstep_agent.coordinator import rounds, step_first_rules
from everstep_agent.coordinator.step_first_rules import Shrink
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import EpochLevel
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog.log_index import LogIndex
from everstep_contract import log

EPOCH = an_epoch(3, successor=2, successor_token="next")
IDS = tuple(i for m in EPOCH.members for i in m.ids())
FIRST = a_claim(1, members=IDS, token=EPOCH.token)


def survivor(slot: int, **changes: object) -> AgentReport:
    values = {
        "epoch": 1, "fresh": (), "joined": 2, "joined_token": "next",
        "workers": (a_worker(state=State.HELD),),
    }  # fmt: skip
    return a_report(slot, **(values | changes))


def dead(slot: int, **changes: object) -> AgentReport:
    workers = (a_worker(state=State.DEAD),)
    return survivor(slot, **({"workers": workers, "ended": ended(1)} | changes))


def why(
    *reports: AgentReport,
    epoch: EpochLevel = EPOCH,
    lost: tuple[int, ...] = (),
    survivors: tuple[int, ...] = (0, 1),
    claims: tuple[log.Claim, ...] = (FIRST,),
) -> str:
    shrink = Shrink(
        epoch=epoch,
        survivors=[m for m in epoch.members if m.slot in survivors],
        reports=reports or (survivor(0), survivor(1), dead(2)),
        lost=frozenset(m.id for m in epoch.members if m.slot in lost),
    )
    return step_first_rules.why_claim_first(shrink, LogIndex(claims), job_uid="uid")


def test_the_survivors_of_a_death_that_its_agent_reported_step_first() -> None:
    assert why() == ""


def test_whose_pod_is_lost_may_have_written_more_than_is_known() -> None:
    assert "the pod of slot 2 is lost" in why(lost=(2,))


def test_who_is_left_out_has_ended_by_the_word_of_its_own_agent() -> None:
    assert "slot 2 did not report" in why(survivor(0), survivor(1), dead(2, ended=()))
    another = dead(2, incarnation=2)
    assert "slot 2 did not report" in why(survivor(0), survivor(1), another)


def test_a_survivor_that_has_joined_another_epoch_may_be_claimed_already() -> None:
    later = replace(EPOCH, successor=3)
    assert "another epoch after 1" in why(epoch=later)


@pytest.mark.parametrize("token", ["", "of another coordinator"])
def test_a_survivor_is_promised_by_the_token(token: str) -> None:
    assert "slot 1 has not joined" in why(survivor(0), survivor(1, joined_token=token), dead(2))


def test_a_cut_by_another_coordinator_may_have_saved_more() -> None:
    assert "has cut the epoch in slot 2" in why(survivor(0), survivor(1), dead(2, cut=1))


def test_a_newer_claim_that_was_read_forbids_it() -> None:
    assert "not the newest" in why(claims=(FIRST, a_claim(2, members=IDS)))


def test_an_unclaimed_epoch_is_continued_if_its_claim_can_still_follow() -> None:
    second = a_claim(2, members=IDS, chain=(log.ChainLink(epoch=1, last_step=5),), token="t2")
    epoch = replace(EPOCH, number=2, token="t2", successor=3, unclaimed=(second,))
    told = [replace(r, epoch=2, joined=3) for r in (survivor(0), survivor(1), dead(2))]
    assert why(*told, epoch=epoch) == ""
    assert why(*told, epoch=epoch, claims=(FIRST, second)) == "", "its claim is in the log now"
    rival = a_claim(2, members=IDS, token="rival")
    assert "continues epoch 1" in why(*told, epoch=epoch, claims=(FIRST, rival))


# --- the claim that follows ------------------------------------------------------------------------


def test_a_claim_follows_only_the_one_that_it_continues() -> None:
    second = a_claim(2, chain=(log.ChainLink(epoch=1, last_step=5),))
    assert runlog_rules.why_not_behind(second, FIRST) == ""
    assert "epoch 3 of job uid" in runlog_rules.why_not_behind(second, a_claim(3))
    assert "of job new" in runlog_rules.why_not_behind(second, replace(FIRST, job_uid="new"))
    assert runlog_rules.why_not_behind(second, None)


def test_newcomers_never_step_first() -> None:
    more = (*IDS, replace(IDS[0], slot=3))
    verdict = runlog_rules.may_step_first([FIRST], 1, more, (), job_uid="uid")
    assert (verdict.ok, verdict.reason) == (False, "Newcomer")
    again = replace(IDS[2], life=2)
    verdict = runlog_rules.may_step_first([FIRST], 1, (*IDS[:2], again), IDS[2:], job_uid="uid")
    assert (verdict.ok, verdict.reason) == (False, "Newcomer")


def test_an_epoch_that_steps_first_is_adopted_and_waited_for() -> None:
    """The coordinator knows neither the epoch's claim nor its level."""
    second = a_claim(2, members=IDS, chain=(log.ChainLink(epoch=1, last_step=5),))
    level = an_epoch(3, number=2, token="t2", unclaimed=(second,))
    steps = a_report(1, epoch=2, fresh=(), workers=(a_worker(),), held=level)
    assert rounds.find_unheard([steps], EPOCH, FIRST) == level
    assert rounds.find_unheard([steps], EPOCH, a_claim(5)) is None
    known = rounds.list_unheard(FIRST, 1, [steps], wanting(3), job_uid="uid")
    assert known == {(1, 0)}
    assert rounds.list_unheard(FIRST, 2, [steps], wanting(3), job_uid="uid") == frozenset()
