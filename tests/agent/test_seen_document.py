from dataclasses import replace

from agent.given import a_report, an_epoch, stepping, wanting
from everstep_agent.coordinator import seen_document
from everstep_agent.peers.agent_report import State
from everstep_agent.peers.epoch_level import Stage
from everstep_contract import levels

AT = levels.CheckpointRef(epoch=1, step=8)
ME = levels.SlotAttempt(slot=0, attempt=0)


def facts(**changes):
    values = {"run": "r", "coordinator": ME, "restarts": {}, "seconds": {}, "committed": AT}
    return seen_document.Facts(**(values | changes))


def build_left(wanted, reports, epoch, known=(), coordinator=(0, 0)):
    return seen_document.build_left(wanted, reports, epoch, AT, known, coordinator=coordinator)


def left(*given, **more):
    return [(x.slot, x.attempt, x.step) for x in build_left(*given, **more)]


def test_the_jobs_step_is_the_one_that_every_member_applied():
    reports = [(stepping(0, applied=9), 0.1), (stepping(1, applied=7), 0.3)]
    seen = seen_document.build_seen(facts(), an_epoch(), reports)
    assert seen.step == 7
    assert [(m.slot, m.rank, m.step) for m in seen.members] == [(0, 0, 9), (1, 1, 7)]
    assert seen.age_ms == 300
    assert seen.running


def test_between_epochs_the_step_is_the_committed_one():
    seen = seen_document.build_seen(facts(epoch=2), None, [])
    assert (seen.step, seen.epoch) == (8, 2)


def test_once_the_script_has_reached_its_end_the_step_is_its_last():
    reports = [(stepping(0, applied=9), 0.1), (stepping(1, applied=7), 0.3)]
    seen = seen_document.build_seen(facts(final_step=9), an_epoch(), reports)
    assert (seen.step, seen.done) == (9, True)


def test_the_dead_are_no_members():
    reports = [(stepping(0), 0.0), (stepping(1, state=State.DEAD), 0.0)]
    assert [m.slot for m in seen_document.build_seen(facts(), an_epoch(), reports).members] == [0]


def test_a_slot_has_left_only_when_its_epoch_is_over():
    wanted, reports = wanting(2, leave=(1,)), [stepping(0), stepping(1)]
    assert left(wanted, reports, an_epoch()) == []
    assert left(wanted, reports, an_epoch(stage=Stage.CUT)) == []
    assert left(wanted, reports, an_epoch(stage=Stage.OVER)) == [(1, 0, 8)]


def test_a_pod_that_holds_no_state_leaves_while_the_others_train():
    spare = a_report(5)
    assert left(wanting(2, leave=(5,)), [stepping(0), stepping(1), spare], an_epoch()) == [
        (5, 0, 8)
    ]


def test_a_coordinator_that_holds_no_state_leaves_when_the_epoch_is_over():
    wanted, reports = wanting(2, leave=(5,)), [stepping(0), stepping(1), a_report(5)]
    assert left(wanted, reports, an_epoch(), coordinator=(5, 0)) == []
    assert left(wanted, reports, an_epoch(stage=Stage.OVER), coordinator=(5, 0)) == [(5, 0, 8)]
    assert left(wanted, reports, None, coordinator=(5, 0)) == [(5, 0, 8)]


def test_it_says_whether_it_was_asked_to():
    over = an_epoch(stage=Stage.OVER)
    by_wish = build_left(wanting(2, leave=(1,)), [a_report(1)], over)
    by_signal = build_left(wanting(2), [a_report(1, leaving=True)], over)
    assert [x.asked for x in (*by_wish, *by_signal)] == [True, False]


def test_a_pod_that_got_sigterm_is_as_good_as_asked():
    assert left(wanting(2), [a_report(1, leaving=True)], an_epoch(stage=Stage.OVER)) == [(1, 0, 8)]


def test_what_was_said_stays_said_until_the_slots_next_attempt_shows_up():
    known = (levels.Left(slot=1, attempt=0, epoch=1, step=8),)
    assert left(wanting(2), [], None, known) == [(1, 0, 8)]
    assert left(wanting(2), [a_report(1, attempt=1)], None, known) == []


def test_a_coordinator_hands_over_once_its_own_pod_has_left_and_there_are_others():
    over, gone = an_epoch(stage=Stage.OVER), (levels.Left(slot=0, attempt=0, epoch=1, step=8),)
    peers = wanting(1, peers=(levels.Peer(slot=1, attempt=0, address="a"),))
    assert seen_document.hands_over((0, 0), gone, wanting(2), over)
    assert seen_document.hands_over((0, 0), gone, peers, None), "a pod that has yet to join counts"
    assert not seen_document.hands_over((0, 0), gone, wanting(1), None), "there is no other pod"
    assert not seen_document.hands_over((0, 0), (), wanting(2), over)
    assert not seen_document.hands_over((1, 0), gone, wanting(2), over), (
        "it is slot 0 that has left"
    )


def test_what_every_rank_notes_is_said_once_by_the_first_rank():
    reports = [
        (replace(stepping(0), notes=("step 5: loss", "step 6: loss")), 0.0),
        (replace(stepping(1), notes=("step 4: loss", "step 5: loss")), 0.0),
    ]
    seen = seen_document.build_seen(facts(notes=("store: slow",)), an_epoch(), reports)
    assert seen.notes == ("store: slow", "step 5: loss", "step 6: loss")


def test_what_one_rank_notes_is_said_of_any_rank():
    killed = "rank 1: feed 1: data worker 7 was killed"
    reports = [(stepping(0), 0.0), (replace(stepping(1), own_notes=(killed,)), 0.0)]
    assert seen_document.build_seen(facts(), an_epoch(), reports).notes == (killed,)


def test_dropped_output_is_told_of_each_slot_in_steps_of_the_leading_digit():
    reports = [(replace(stepping(1), dropped=2499), 0.1), (replace(stepping(0), dropped=7), 0.1)]
    notes = seen_document.build_seen(facts(notes=("first",)), an_epoch(), reports).notes
    assert notes == (
        "first",
        "slot 0: dropped 7 lines or more: nobody reads the output of its pod",
        "slot 1: dropped 2,000 lines or more: nobody reads the output of its pod",
    )


def test_the_age_of_a_death_by_device_grows_with_that_of_its_report():
    death = levels.DeviceDeath(id="1.0.1.0.2", slot=1, attempt=0, message="ECC", age_ms=200)
    reports = [(replace(stepping(1), device_deaths=(death,)), 0.3)]
    seen = seen_document.build_seen(facts(), an_epoch(), reports)
    assert seen.device_deaths == (replace(death, age_ms=500),)


def test_a_pod_with_a_process_that_outlives_sigkill_is_told():
    reports = [(stepping(0), 0.1), (replace(stepping(1), stuck="rank 1 outlives SIGKILL"), 0.3)]
    seen = seen_document.build_seen(facts(), an_epoch(), reports)
    assert seen.stuck == (levels.StuckPod(slot=1, attempt=0, message="rank 1 outlives SIGKILL"),)
