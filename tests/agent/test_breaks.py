from dataclasses import replace

import pytest

from agent.given import a_report, an_epoch, ended, stepping, wanting
from everstep_agent.coordinator import breaks
from everstep_agent.peers.agent_report import BrokenCheckpoint, FailureReport, State
from everstep_contract import levels, log
from everstep_contract.sums import Sums


def find(*reports, wanted=None, idle=0.0, age=0.1, epoch=None, hang=300.0):
    return breaks.find_break(
        epoch or an_epoch(), [(r, age) for r in reports], wanted or wanting(2), idle=idle, hang=hang
    )


def test_an_epoch_whose_members_all_step_is_whole():
    assert find(stepping(0), stepping(1)) is None


def test_a_worker_with_an_exit_status_breaks_it():
    found = find(stepping(0), stepping(1, state=State.DEAD, why="killed by signal 9", dead_ms=40))
    assert (found.cause, found.rank, found.dead_ms) == ("WorkerDied", 1, 40)
    assert found.certain


def test_the_end_of_a_worker_whose_pod_was_let_go_is_no_death():
    epoch = an_epoch(leaving=((1, 0, 1),))
    found = find(stepping(0), stepping(1, state=State.DEAD), epoch=epoch)
    assert (found.cause, found.slots, found.message) == ("Leave", (1,), "slot 1 has left")
    lost = find(stepping(0, state=State.DEAD), stepping(1, state=State.DEAD), epoch=epoch)
    assert lost.cause == "WorkerDied", "a member that did not leave has died"


def test_a_hung_worker_that_was_killed_is_named_as_hung():
    found = find(stepping(0), stepping(1, state=State.DEAD, hung=True, why="hung: 300 s in step 6"))
    assert found.cause == "WorkerHung"


def test_a_hung_rank_is_named_with_its_node_and_the_sum_that_the_others_wait_in():
    wait = Sums(step=6, reduction=0, buckets=2, joined=3, complete=1)
    own = replace(wait, joined=1)
    why = "hung: no progress for 0.4 s in step 6, computing"
    dead = stepping(1, state=State.DEAD, hung=True, cause="NoProgress", why=why, sums=own)
    peers = tuple(levels.Peer(slot=n, attempt=0, address="", node=f"gpu-{n}") for n in range(2))
    found = find(stepping(0, waiting=True, sums=wait), dead, wanted=wanting(2, peers=peers))
    assert found.message == (
        f"rank 1 (slot 1 on node gpu-1) {why}; it missed bucket 2 of 2 in reduction 0 of step 6, "
        "in which the others wait"
    )


def test_the_sum_that_a_rank_missed_is_known_although_the_others_have_left_it_before_its_death_is_reported():
    missed = "it missed the vector in reduction 0 of step 6, in which the others wait"
    why = "hung: no progress for 0.4 s in step 6"
    dead = stepping(1, state=State.DEAD, hung=True, missed=missed, why=why)
    found = find(stepping(0, state=State.HELD), dead)
    assert found.message == f"rank 1 (slot 1) {why}; {missed}"


def test_a_worker_that_outlives_its_kill_breaks_the_epoch_though_it_is_not_dead():
    found = find(stepping(0), stepping(1, hung=True, stuck="outlives SIGKILL for 30 s (pid 7)"))
    assert (found.cause, found.slot, found.certain) == ("ProcessStuck", 1, True)
    assert "rank 1 (slot 1) outlives SIGKILL" in found.message


def test_a_collective_that_failed_is_explained_by_a_death():
    failure = FailureReport(cause="NetworkFailed", message="RuntimeError: gloo/transport/tcp")
    broken = stepping(0, state=State.FAILED, failed=failure)
    alone = find(broken, stepping(1))
    assert (alone.cause, alone.certain) == ("NetworkFailed", False)
    both = find(broken, stepping(1, state=State.DEAD, cause="WorkerCrashed", fault="SIGSEGV"))
    assert (both.cause, both.fault) == ("WorkerCrashed", "SIGSEGV")


def test_an_error_of_the_user_outranks_the_deaths_that_follow_from_it():
    failure = FailureReport(cause="UserError", message="ValueError: no")
    found = find(stepping(0, state=State.DEAD), stepping(1, state=State.FAILED, failed=failure))
    assert (found.cause, found.rank) == ("UserError", 1)


def test_a_group_that_broke_by_itself_is_no_proof():
    found = find(stepping(0, state=State.PARKED, why="connection reset"), stepping(1))
    assert found.cause == "GroupBroken"
    assert not found.certain


def test_a_proof_outranks_a_suspicion():
    parked = stepping(0, state=State.PARKED, why="connection reset")
    assert find(parked, stepping(1, state=State.DEAD)).cause == "WorkerDied"


def test_a_rank_that_stays_at_a_boundary_breaks_nothing():
    assert find(stepping(0, state=State.PARKED, why=""), stepping(1)) is None


def test_the_operators_word_and_terminated_containers_end_the_epoch():
    gone = wanting(2, gone=(levels.SlotAttempt(slot=1, attempt=0),))
    assert find(stepping(0), stepping(1), wanted=gone).cause == "Gone"
    dead = wanting(2, dead=(levels.DeadAgent(slot=1, attempt=0, incarnation=1),))
    assert find(stepping(0), stepping(1), wanted=dead).cause == "AgentLost"


def test_why_a_container_ended_is_told_in_the_kubelets_words():
    killed = levels.DeadAgent(slot=1, attempt=0, incarnation=1, reason="OOMKilled, exit status 137")
    found = find(stepping(0), stepping(1), wanted=wanting(2, dead=(killed,)))
    assert found.message.endswith("terminated (OOMKilled, exit status 137)")
    next_life = wanting(2, dead=(replace(killed, incarnation=2),))
    assert find(stepping(0), stepping(1), wanted=next_life).message.endswith("terminated")


def test_a_newer_life_of_the_agent_proves_the_end_of_the_last():
    assert find(stepping(0), stepping(1), a_report(1, incarnation=2)).cause == "AgentLost"
    assert find(stepping(0), stepping(1), a_report(1, attempt=1)).cause == "AgentLost"


def test_silence_is_suspected_only_when_the_step_stands_still_too():
    assert find(stepping(0), stepping(1), age=60.0, idle=1.0) is None
    found = find(stepping(0), stepping(1), age=60.0, idle=30.0)
    assert found.cause == "AgentLost"
    assert not found.certain


def test_a_slow_step_of_agents_that_report_is_no_break():
    assert find(stepping(0), stepping(1), age=0.1, idle=200.0) is None


def test_a_group_in_which_all_wait_for_all_is_stuck_after_a_while():
    both = (stepping(0, waiting=True), stepping(1, waiting=True))
    assert find(*both, idle=100.0) is None
    assert find(*both, idle=451.0).cause == "GroupStuck"


@pytest.mark.parametrize("state", [State.PARKED, State.FINISHED])
def test_a_rank_left_in_a_step_that_the_others_have_taken_is_stuck_after_a_while(state):
    through = stepping(0, applied=7, state=state)
    behind = stepping(1, applied=6, waiting=True)
    assert find(through, behind, idle=100.0) is None
    assert find(through, behind, idle=451.0).cause == "GroupStuck"


@pytest.mark.parametrize("state", [State.PARKED, State.FINISHED])
def test_a_rank_that_has_taken_the_last_step_may_wait_for_room_as_long_as_it_takes(state):
    waits = stepping(1, applied=7, waiting=True)
    assert find(stepping(0, applied=7, state=state), waits, idle=9000.0) is None
    assert (
        find(stepping(0, applied=7, state=state), stepping(1, applied=7, state=state), idle=9000.0)
        is None
    )


def test_a_life_that_ended_before_it_began_breaks_the_epoch():
    never = a_report(1, epoch=0, ended=ended(1))
    assert find(stepping(0), never).cause == "WorkerDied"


def test_a_checkpoint_that_cannot_be_restored_is_named():
    commit = log.Commit(epoch=1, token="t", step=5, manifest="m", digest="d")
    broken = a_report(1, epoch=0, broken=BrokenCheckpoint(manifest="m", message="chunk is gone"))
    found = find(a_report(0, epoch=0), broken, epoch=an_epoch(commit=commit))
    assert found.cause == "CheckpointBroken"
    assert "chunk is gone" in found.message


def test_all_that_were_lost_at_once_are_named():
    dead = {"state": State.DEAD, "why": "killed by signal 9"}
    found = find(stepping(0, **dead), stepping(1), stepping(2, **dead), epoch=an_epoch(3))
    assert (found.rank, found.slots) == (0, (0, 2))
    assert found.text == ("rank 0 (slot 0) killed by signal 9; rank 2 (slot 2) killed by signal 9")


def test_what_a_second_look_finds_is_named_besides_and_once():
    dead = stepping(1, state=State.DEAD, why="killed by signal 9")
    first = find(stepping(0), dead)
    both = (stepping(0, state=State.DEAD, why="killed by signal 11"), dead)
    known = breaks.list_breaks(
        an_epoch(), [(r, 0.1) for r in both], wanting(2), idle=0.0, hang=300.0
    )
    again = breaks.explain(breaks.explain(first, known), known)
    assert (again.cause, again.rank, again.slots) == ("WorkerDied", 1, (1, 0))
    assert again.text.endswith("killed by signal 9; rank 0 (slot 0) killed by signal 11")


def test_an_error_of_the_script_on_every_rank_is_one_error():
    failure = FailureReport(cause="UserError", message="ValueError: no")
    both = [stepping(s, state=State.FAILED, failed=failure) for s in (0, 1)]
    assert find(*both).others == ()


def test_a_group_that_a_silent_node_broke_names_the_node():
    parked = stepping(0, state=State.PARKED, why="connection reset")
    broken = find(parked, stepping(1))
    assert broken.slot is None
    reports = [(parked, 0.1), (stepping(1), 9.0)]
    known = breaks.list_breaks(an_epoch(), reports, wanting(2), idle=8.5, hang=300.0)
    found = breaks.explain(broken, known)
    assert (found.cause, found.slots, found.certain) == ("AgentLost", (1,), False)
    assert "slot 1 (attempt 0) has been silent for 9.0 s" in found.text


def silent(*ages: float, outvoted: tuple[int, ...] = ()) -> list[breaks.Break]:
    """Return the breaks found if the last reports of the agents are this old, in seconds."""
    reports = [(stepping(n), age) for n, age in enumerate(ages)]
    epoch = an_epoch(len(ages))
    left_out = [epoch.members[n].id for n in outvoted]
    return breaks.list_breaks(
        epoch, reports, wanting(len(ages)), idle=max(ages), hang=300.0, outvoted=left_out
    )


@pytest.mark.parametrize("outvoted", [(), (3, 4)], ids=["half of the job", "a minority"])
def test_all_nodes_that_fall_silent_at_once_are_named(outvoted: tuple[int, ...]):
    known = silent(0.1, 0.1, 0.2, 9.0, 9.5, outvoted=outvoted)
    found = breaks.with_others(known[0], known)
    assert (found.cause, found.slots) == ("AgentLost", (3, 4))
    assert "slot 3 (attempt 0) has been silent for 9.0 s" in found.text
    assert "slot 4 (attempt 0) has been silent for 9.5 s" in found.text


def test_a_node_that_is_found_silent_a_moment_after_another_is_named_besides_and_once():
    first = silent(0.1, 0.1, 0.2, 1.1, 1.1, outvoted=(3,))[0]
    known = silent(0.1, 0.1, 0.2, 1.5, 1.5, outvoted=(3, 4))
    again = breaks.explain(first, known)
    assert again.slots == (3, 4)
    assert again.text.startswith(first.text), "the incident's message is extended, not replaced"
    later = silent(0.1, 0.1, 0.2, 2.5, 2.5, outvoted=(3, 4))
    assert breaks.explain(again, later) == again, "only the ages changed, so the text stays"


def test_a_node_that_is_found_silent_later_is_named_besides_and_once():
    def look(*ages: float) -> list[breaks.Break]:
        reports = [(stepping(slot), age) for slot, age in enumerate(ages)]
        return breaks.list_breaks(an_epoch(3), reports, wanting(3), idle=20.0, hang=300.0)

    (first,) = look(0.1, 20.0, 1.0)
    both = breaks.explain(first, look(0.1, 21.0, 19.0))
    assert both.slots == (1, 2)
    assert breaks.explain(both, look(0.1, 22.0, 20.0)) == both


def test_who_has_joined_a_later_round_will_not_begin_the_epoch():
    late = a_report(1, joined=2)
    found = find(stepping(0), late)
    assert found is not None
    assert found.cause == "GroupBroken"
    assert "joined round 2" in found.message
