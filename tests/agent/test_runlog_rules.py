from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.a_run import claim, commit, member
from everstep_agent.runlog import rules
from everstep_agent.runlog.rules import Gang, Proof
from everstep_contract.log import ChainLink, LeftOut
from work import Meter

THREE = claim(1, (0, 1, 2))
NONE = Proof()


def reason(members: list, proof: Proof = NONE, claims: list | None = None, uid: str = "uid") -> str:
    return rules.may_claim(claims or [THREE], members, proof, job_uid=uid).reason


def test_the_first_claim_needs_nobodys_word() -> None:
    assert rules.may_claim([], [member(0)], NONE, job_uid="uid").ok


def test_an_epoch_without_members_claims_nothing() -> None:
    assert not rules.may_claim([], [], NONE, job_uid="uid").ok


def test_the_same_members_may_claim_again() -> None:
    assert reason([member(0), member(1), member(2)]) == "AllProven"


def test_more_than_half_may_leave_the_rest_behind() -> None:
    assert reason([member(0), member(2)]) == "Majority"
    assert reason([member(2)]) == "Unproven"


def test_of_exactly_half_the_one_with_the_lowest_slot_goes_on() -> None:
    two = [claim(1, (0, 1))]
    assert reason([member(0)], claims=two) == "Majority"
    assert reason([member(1)], claims=two) == "Unproven"


def test_a_new_life_counts_in_no_half() -> None:
    forked = [member(0, life=1), member(1, life=1)]
    assert reason(forked) == "Unproven"


@pytest.mark.parametrize(
    "proof",
    [
        Proof(dead=frozenset({member(1), member(2)})),
        Proof(dead_agents=frozenset({(1, 0, 0), (2, 0, 3)})),
        Proof(gone=frozenset({(1, 0), (2, 0)})),
        Proof(dead=frozenset({member(1)}), gone=frozenset({(2, 1)})),
    ],
)
def test_the_dead_and_the_gone_may_be_left_out(proof: Proof) -> None:
    assert reason([member(0, life=1)], Proof(
        dead=proof.dead | {member(0)}, dead_agents=proof.dead_agents, gone=proof.gone
    )) == "AllProven"  # fmt: skip


def test_proof_of_another_life_proves_nothing() -> None:
    assert reason([member(1)], Proof(dead=frozenset({member(0, life=1), member(2)}))) == "Unproven"
    old = [claim(1, (member(0), member(1, incarnation=2)))]
    assert reason([member(2)], Proof(dead_agents=frozenset({(1, 0, 1)})), old) == "Unproven"


def test_a_successor_proves_the_end_of_the_one_before_it() -> None:
    old = claim(1, (0, 1, 2, 3))
    new = [
        member(0, life=1),
        member(1, incarnation=1),
        member(2, attempt=1),
        member(3, incarnation=1, life=0),
    ]
    assert reason(new, claims=[old]) == "AllProven"


def test_a_connection_that_is_lost_proves_nothing() -> None:
    verdict = rules.may_claim([THREE], [member(2)], NONE, job_uid="uid")
    assert "slot 0 attempt 0 rank 0" in verdict.message


def test_a_new_job_takes_the_run_over_and_the_former_one_never_takes_it_back() -> None:
    claims = [THREE, claim(2, (0,), job_uid="new")]
    assert reason([member(0)], claims=[THREE], uid="new") == "FormerJob"
    assert reason([member(0), member(1), member(2)], claims=claims, uid="uid") == "Fenced"


def test_a_claim_says_why_each_slot_is_left_out() -> None:
    proof = Proof(dead=frozenset({member(1)}))
    assert rules.build_left_out(THREE, [member(0)], proof) == (
        LeftOut(slot=1, attempt=0, why="its agent reported its end"),
        LeftOut(slot=2, attempt=0, why="left behind by the majority"),
    )


def test_a_pod_that_may_be_left_out_is_only_while_that_claim_is_the_newest() -> None:
    both, rest = [member(0), member(1)], [member(1)]
    proof = rules.Proof(yields=frozenset({(0, 0, 1)}))
    assert rules.may_claim([claim(1, both)], rest, proof, job_uid="uid").reason == "AllProven"
    later = [claim(1, both), claim(2, both)]
    assert rules.may_claim(later, rest, proof, job_uid="uid").reason == "Unproven"
    of_another = rules.Proof(yields=frozenset({(0, 1, 1)}))
    assert rules.may_claim([claim(1, both)], rest, of_another, job_uid="uid").reason == "Unproven"


def test_more_than_half_of_those_that_may_live_may_leave_the_rest_behind() -> None:
    four, dead = [claim(1, (0, 1, 2, 3))], Proof(dead=frozenset({member(1)}))
    assert reason([member(2), member(3)], dead, four) == "Majority"
    assert reason([member(3)], dead, four) == "Unproven"
    declared = Proof(gone=frozenset({(1, 0)}))
    assert reason([member(2), member(3)], declared, four) == "Unproven", "slot 1 may be alive"
    newer = [member(2), member(3), member(1, attempt=1)]
    assert reason(newer, NONE, four) == "Unproven", "so may the former attempt of slot 1"
    again = [member(2), member(3), member(1, incarnation=1)]
    assert reason(again, NONE, four) == "Majority"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), st.data())
def test_two_groups_that_know_of_different_deaths_never_both_claim_by_majority(
    slots: list[int], data: st.DataObject
) -> None:
    newest, ids = claim(1, [member(s) for s in slots]), [member(s) for s in slots]
    dead = data.draw(st.sets(st.sampled_from(ids)))
    living = [m for m in ids if m not in dead]
    one = data.draw(st.sets(st.sampled_from(living))) if living else set()
    known = [data.draw(st.sets(st.sampled_from(sorted(dead)))) if dead else set() for _ in "12"]
    sides = (one, {*living} - one)
    both = [rules.holds_majority(newest, s, k) for s, k in zip(sides, known, strict=True)]
    assert sum(both) <= 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), st.data())
def test_two_epochs_without_a_common_member_never_both_claim_by_majority(
    slots: list[int], data: st.DataObject
) -> None:
    newest = claim(1, [member(s) for s in slots])
    one = data.draw(st.sets(st.sampled_from(slots)))
    other = set(slots) - one
    both = [rules.holds_majority(newest, [member(s) for s in side]) for side in (one, other)]
    assert sum(both) == 1


# --- append, lineage, fencing


def test_only_the_newest_claims_writers_append() -> None:
    assert rules.may_append(commit(1, 5), claim(1)).ok
    late = rules.may_append(commit(1, 5), claim(2))
    assert (late.ok, late.reason) == (False, "NewerClaim")
    assert rules.may_append(commit(1, 5), None).reason == "NoClaim"
    assert rules.may_append(claim(2), claim(1)).ok


def test_a_chain_grows_by_the_commit_that_it_resumes_from() -> None:
    first = claim(1)
    second = claim(2, resume=commit(1, 10), before=[first])
    third = claim(3, resume=commit(2, 25), before=[first, second])
    assert third.chain == (ChainLink(epoch=1, last_step=10), ChainLink(epoch=2, last_step=25))
    from_start = claim(4, before=[first, second, third])
    assert from_start.chain == ()
    back = claim(5, resume=commit(1, 7), before=[first, second, third])
    assert back.chain == (ChainLink(epoch=1, last_step=7),)


def test_what_lies_beyond_a_link_is_not_on_the_chain() -> None:
    chain = (ChainLink(epoch=1, last_step=10), ChainLink(epoch=3, last_step=20))
    assert rules.on_chain(1, 10, chain)
    assert not rules.on_chain(1, 11, chain)
    assert not rules.on_chain(2, 5, chain)


def test_a_gang_goes_on_until_a_newer_claim_names_none_of_it() -> None:
    gang = Gang(epoch=1, job_uid="uid", pods=frozenset({(0, 0), (1, 0)}))
    assert rules.fenced(None, gang).reason == "Newest"
    assert rules.fenced(claim(1), gang).reason == "Newest"
    assert rules.fenced(claim(2, (1, 2)), gang).reason == "Named"
    later = rules.fenced(claim(2, (member(0, attempt=1), member(2))), gang)
    assert (later.ok, later.reason) == (False, "Fenced")


def test_a_gang_of_a_former_job_is_fenced_and_told_by_whom() -> None:
    gang = Gang(epoch=1, job_uid="uid", pods=frozenset({(0, 0)}))
    verdict = rules.fenced(claim(2, (0,), job_uid="new"), gang)
    assert (verdict.ok, verdict.reason) == (False, "Fenced")
    assert "default/job (new)" in verdict.message


def test_a_pod_is_over_when_the_newest_claim_has_its_successor_or_calls_it_gone() -> None:
    members = (member(0), member(1, attempt=1))
    newest = replace(claim(2, members), left_out=a_left_out("declared gone"))
    assert rules.why_pod_is_over(newest, "uid", 0, 0) == ""
    assert "attempt 1 of slot 1" in rules.why_pod_is_over(newest, "uid", 1, 0)
    assert "declared gone" in rules.why_pod_is_over(newest, "uid", 2, 0)
    assert rules.why_pod_is_over(newest, "uid", 2, 1) == "", "the next attempt may join"
    assert rules.why_pod_is_over(newest, "other", 1, 0) == "", "the claim is another job's"
    assert rules.why_pod_is_over(None, "uid", 1, 0) == ""
    ended = replace(claim(2), left_out=a_left_out("its agent reported its end"))
    assert rules.why_pod_is_over(ended, "uid", 2, 0) == "", "the pod's next worker may join"


def a_left_out(why: str) -> tuple[LeftOut, ...]:
    return (LeftOut(slot=2, attempt=0, why=why),)


def test_a_claim_that_is_heard_of_late_begins_nothing_once_a_newer_one_stands() -> None:
    mine, newer = claim(1, (0, 1)), claim(2, (0,))
    assert rules.why_overtaken(mine, mine) == ""
    assert "epoch 2 was claimed before this coordinator learned" in rules.why_overtaken(mine, newer)


def test_live_state_behind_the_newest_commit_may_not_be_continued() -> None:
    """Regression: a coordinator that had stood still continued its own epoch behind a checkpoint that
    another one had committed meanwhile. That checkpoint became void.
    """
    chain = (ChainLink(epoch=1, last_step=10), ChainLink(epoch=2, last_step=15))
    assert "step 16 (epoch 2) is ahead" in rules.why_behind(commit(2, 16), chain)
    assert rules.why_behind(commit(2, 15), chain) == ""
    assert rules.why_behind(commit(1, 10), chain) == ""
    assert rules.why_behind(None, chain) == ""


def test_a_claim_that_never_began_is_found_by_the_epoch_that_it_continues() -> None:
    first = claim(1, (0, 1))
    second = replace(claim(2, (0,)), chain=(ChainLink(epoch=1, last_step=3),))
    assert rules.find_successor(second, 1, first.members, second.job_uid) == second
    assert rules.find_successor(second, 3, first.members, second.job_uid) is None
    assert rules.find_successor(second, 1, first.members, "another job") is None
    assert rules.find_successor(first, 1, first.members, first.job_uid) is None
    newcomer = replace(second, members=claim(2, (0, 7)).members)
    assert rules.find_successor(newcomer, 1, first.members, second.job_uid) == newcomer
    stranger = replace(second, members=claim(2, (7,)).members)
    assert rules.find_successor(stranger, 1, first.members, second.job_uid) is None


@pytest.mark.parametrize("judge", ["may_claim", "build_left_out"])
def test_a_claim_is_judged_in_as_many_steps_as_it_has_members(judge: str) -> None:
    """With half of the members dead, each member must be looked up, not compared with every proof."""

    def work(size: int) -> int:
        old, new = claim(1, range(size)), [member(s) for s in range(size // 2)]
        dead = frozenset((s, 0, 1) for s in range(size // 2, size))
        with Meter("everstep_agent") as meter:
            if judge == "may_claim":
                rules.may_claim([old], new, Proof(dead_agents=dead), job_uid="uid")
            else:
                rules.build_left_out(old, new, Proof(dead_agents=dead))
        return meter.done

    assert work(400) < 11 * work(40)
