"""Which members are silent, and what follows."""

import asyncio
from dataclasses import replace

import pytest

from agent.given import a_claim, a_member, a_report, a_worker, an_epoch, stepping, wanting
from everstep_agent.coordinator import silence, silence_rules
from everstep_agent.coordinator.silence import Silence
from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import EpochLevel, InPlace, Stage
from everstep_contract import levels, log

WAITS = {"waiting": True, "waited": 0.6}
WAITS_BRIEFLY = {"waiting": True, "waited": 0.1}
COMPUTES: dict[str, object] = {}
NEVER = 99.0


def doubted(*ranks: tuple[dict[str, object], float], **changes: object) -> list[int]:
    """Return the slots of the members that are asked. `ranks` come with the age of their agents' reports."""
    reports = [(stepping(n, **of), age) for n, (of, age) in enumerate(ranks) if age < NEVER]
    return [m.slot for m in silence_rules.list_doubted(an_epoch(len(ranks), **changes), reports)]


def test_a_member_is_asked_once_the_others_have_waited_for_long_and_it_says_nothing():
    assert doubted((WAITS, 0.1), (WAITS, 0.2), (COMPUTES, 0.7)) == [2]
    assert doubted((WAITS, 0.1), (WAITS, 0.2), (COMPUTES, 0.3)) == []


def test_nobody_is_asked_while_another_rank_computes():
    assert doubted((WAITS, 0.1), (COMPUTES, 0.2), (COMPUTES, 9.0)) == []


def test_without_a_learnt_limit_a_member_is_asked_after_a_longer_silence():
    assert doubted((WAITS_BRIEFLY, 0.1), (COMPUTES, 1.9)) == []
    assert doubted((WAITS_BRIEFLY, 0.1), (COMPUTES, 2.1)) == [1]


def test_a_dead_rank_of_a_pod_that_speaks_waits_for_nothing_else():
    assert doubted(({"state": State.DEAD}, 0.1), (WAITS, 0.1), (COMPUTES, 0.7)) == [2]


def test_ranks_that_hold_for_newcomers_wait_for_a_member_that_says_nothing():
    holds = {"state": State.HELD}
    assert doubted((holds, 0.1), (holds, 0.2), (holds, 2.1)) == [2]
    assert doubted((holds, 0.1), (holds, 0.2), (holds, 1.9)) == []
    assert doubted((holds, 0.1), (COMPUTES, 0.2), (holds, 2.1)) == []


def test_of_an_epoch_that_holds_whoever_says_nothing_is_asked():
    ranks = ((COMPUTES, 0.1), (COMPUTES, 0.7), (COMPUTES, NEVER))
    assert doubted(*ranks, stage=Stage.HOLD) == [1, 2]
    forms = {"stage": Stage.STARTING, "in_place": InPlace(former=1, applied=5, reductions=5)}
    assert doubted(*ranks, **forms) == [1, 2]
    assert doubted(*ranks, stage=Stage.STARTING) == [], "new processes may take long to start"


def claim_of(of: EpochLevel, **changes: object) -> log.Claim:
    return a_claim(members=tuple(i for m in of.members for i in m.ids()), **changes)


def outvoted(
    epoch: EpochLevel,
    newest: log.Claim | None,
    silent: list[int],
    lost: tuple[int, ...] = (),
    dead: tuple[int, ...] = (),
    proven: tuple[int, ...] = (),
) -> list[int]:
    """`lost`: slots of pods that are lost, `proven`: those whose ends are proven; `dead`: slots of
    living pods whose ranks are dead.
    """
    ids = {m.slot: m.id for m in epoch.members}
    ended = (a_worker(state=State.DEAD),)
    reports = [a_report(s, epoch=epoch.number, workers=ended) for s in dead]
    found = silence_rules.list_outvoted(
        epoch, newest, [ids[s] for s in silent], [ids[s] for s in lost], reports,
        [i for m in epoch.members if m.slot in proven for i in m.ids()],
    )  # fmt: skip
    return sorted(slot for slot, _, _ in found)


def test_a_majority_of_the_newest_claim_goes_on_without_the_rest():
    epoch = an_epoch(4)
    newest = claim_of(epoch)
    assert outvoted(epoch, newest, [0]) == [0]
    assert outvoted(epoch, newest, [2, 3]) == [2, 3], "the half with the lowest slot wins"
    assert outvoted(epoch, newest, [0, 1]) == []
    assert outvoted(epoch, newest, [3], lost=(1,)) == [3]
    assert outvoted(epoch, newest, [3], lost=(0,)) == [], "a lost member may be alive"
    assert outvoted(epoch, newest, [3], lost=(0,), proven=(0,)) == [3]


def test_a_rank_that_is_dead_in_a_pod_that_speaks_is_on_neither_side():
    epoch = an_epoch(4)
    newest = claim_of(epoch)
    assert outvoted(epoch, newest, [0], dead=(2,)) == [0], "two of the three that may live"
    assert outvoted(epoch, newest, [0], dead=(2, 3)) == [], "one of two, and the other is lower"
    assert outvoted(epoch, newest, [3], dead=(1, 2)) == [3], "the half with the lowest slot wins"


def test_nobody_is_outvoted_after_another_claim():
    epoch = an_epoch(3)
    assert outvoted(epoch, claim_of(epoch, epoch=2), [2]) == []
    assert outvoted(epoch, None, [2]) == []


YIELD = levels.Yield(slot=1, attempt=0, epoch=1)


def test_the_operators_word_about_a_silent_pod_counts_until_the_next_claim():
    epoch, wanted = an_epoch(2), wanting(2, yields=(YIELD,))
    silent = [(a_report(0), 0.1), (a_report(1), 5.0)]
    (given,) = yields = silence_rules.list_yields(wanted, silent, listened=60.0)
    assert given == YIELD
    assert silence_rules.list_yielded(epoch, yields, claim_of(epoch)) == {epoch.members[1].id}
    assert silence_rules.list_yielded(epoch, yields, claim_of(epoch, epoch=2)) == frozenset()


def test_a_pod_that_speaks_is_not_left_out():
    wanted = wanting(2, yields=(YIELD,))
    assert silence_rules.list_yields(wanted, [(a_report(1), 0.5)], listened=60.0) == ()


def test_a_new_coordinator_first_listens_for_pods_that_may_be_left_out():
    wanted = wanting(2, yields=(YIELD,))
    assert silence_rules.list_yields(wanted, [], listened=0.5) == ()
    assert silence_rules.list_yields(wanted, [], listened=silence_rules.SILENT_SECONDS) == (YIELD,)


def test_the_operator_hears_which_of_its_words_were_used():
    wanted, epoch = wanting(2, yields=(YIELD,)), an_epoch(2)
    rest = an_epoch(1)
    after = claim_of(rest, epoch=2)
    assert silence_rules.list_left_out(wanted, after, after.job_uid) == (YIELD,)
    named = claim_of(epoch, epoch=2)
    assert silence_rules.list_left_out(wanted, named, named.job_uid) == ()
    assert silence_rules.list_left_out(wanted, claim_of(epoch), after.job_uid) == ()
    assert silence_rules.list_left_out(wanted, after, "another job") == ()


# --- asking


def report_of(slot: int, address: str) -> AgentReport:
    return replace(stepping(slot), address=address)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "ASK_SECONDS", 0.01)


NOWHERE = "127.0.0.1:1"
"""No process listens there."""


async def test_who_does_not_answer_is_silent_until_it_reports(brief: None):
    told = asyncio.Event()
    asked = Silence("token", told.set)
    member = a_member(1, address=NOWHERE)
    asked.doubt([member], 0.0)
    await asyncio.wait_for(told.wait(), 30)
    assert asked.unanswered == {member.id}
    asked.doubt([], 1.0)
    assert asked.unanswered == frozenset()
    await asked.close()


async def test_who_was_just_found_not_to_answer_is_not_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(silence, "ASK_SECONDS", 600.0)
    told = asyncio.Event()
    asked = Silence("token", told.set, presumed=[NOWHERE])
    asked.doubt([a_member(1, address=NOWHERE)], 0.0)
    await asyncio.wait_for(told.wait(), 30)
    await asked.close()


async def test_a_member_that_was_left_out_and_lives_makes_the_job_ask_more_often(brief: None):
    told = asyncio.Event()
    asked = Silence("token", told.set)
    member = a_member(1, address=NOWHERE)
    asked.doubt([member], 0.0)
    await asyncio.wait_for(told.wait(), 30)
    asked.leave_out([member.id])
    assert asked.attempts(1.0) == silence.ATTEMPTS
    asked.hear(report_of(1, NOWHERE), 2.0)
    assert asked.attempts(3.0) == 2 * silence.ATTEMPTS
    await asked.close()
