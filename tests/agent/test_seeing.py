from dataclasses import replace

from agent.given import a_report, an_epoch, stepping, wanting
from everstep_agent import incidents, seeing
from everstep_agent.messages import Stage, State
from everstep_contract import levels

AT = levels.CheckpointRef(epoch=1, step=8)
ME = levels.SlotAttempt(slot=0, attempt=0)


def facts(**changes):
    values = {"run": "r", "coordinator": ME, "restarts": {}, "seconds": {}, "committed": AT}
    return seeing.Facts(**(values | changes))


def build_left(wanted, reports, epoch, known=(), coordinator=(0, 0)):
    return seeing.build_left(wanted, reports, epoch, AT, known, coordinator=coordinator)


def left(*given, **more):
    return [(x.slot, x.attempt, x.step) for x in build_left(*given, **more)]


def test_the_jobs_step_is_the_one_that_every_member_applied():
    reports = [(stepping(0, applied=9), 0.1), (stepping(1, applied=7), 0.3)]
    seen = seeing.build_seen(facts(), an_epoch(), reports)
    assert seen.step == 7
    assert [(m.slot, m.rank, m.step) for m in seen.members] == [(0, 0, 9), (1, 1, 7)]
    assert seen.age_ms == 300
    assert seen.running


def test_between_epochs_the_step_is_the_committed_one():
    seen = seeing.build_seen(facts(epoch=2), None, [])
    assert (seen.step, seen.epoch) == (8, 2)


def test_the_dead_are_no_members():
    reports = [(stepping(0), 0.0), (stepping(1, state=State.DEAD), 0.0)]
    assert [m.slot for m in seeing.build_seen(facts(), an_epoch(), reports).members] == [0]


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
    assert seeing.hands_over((0, 0), gone, wanting(2), over)
    assert seeing.hands_over((0, 0), gone, peers, None), "one that has yet to join counts"
    assert not seeing.hands_over((0, 0), gone, wanting(1), None), "nobody else is there"
    assert not seeing.hands_over((0, 0), (), wanting(2), over)
    assert not seeing.hands_over((1, 0), gone, wanting(2), over), "another slot has left"


def test_an_incident_measures_each_phase_from_the_end_of_the_last():
    book = incidents.Book()
    book.open("i-1", "WorkerDied", "rank 1 died", now=100.0, slots=(1,), rank=1)
    book.mark("detect", 100.25)
    book.mark("save", 101.0)
    book.mark("save", 999.0)
    book.mark("restart", 103.0)
    assert book.resumed
    ended = book.close()
    assert ended is not None
    assert [(p.name, p.ms) for p in ended.phases] == [
        ("detect", 250), ("save", 750), ("restart", 2000),
    ]  # fmt: skip
    assert (ended.rung, ended.open) == ("restart", False)
    assert book.levels() == (ended,)


def test_what_happens_during_an_incident_belongs_to_it():
    book = incidents.Book()
    book.open("i-1", "Leave", "slot 1 leaves", now=1.0, slots=(1,))
    both = book.open("i-2", "WorkerDied", "rank 0 died", now=2.0, slots=(0,), rank=0).level
    assert (both.id, both.cause, both.slots) == ("i-1", "Leave", (1, 0))
    assert both.message == "slot 1 leaves; rank 0 died"


def test_a_better_word_replaces_a_cause_that_names_nobody_and_its_beginning_with_it():
    book = incidents.Book()
    broken = book.open("i-1", "GroupBroken", "rank 0: reset", now=10.0, slots=()).mark(
        "detect", 10.1
    )
    assert broken.level.concerns(7)
    hung = broken.begin(4.0).explain("WorkerHung", "rank 1 hung", (1,), 1).level
    assert (hung.cause, hung.message, hung.slot, hung.rank) == ("WorkerHung", "rank 1 hung", 1, 1)
    assert [(p.name, p.ms) for p in hung.phases] == [("detect", 6100)]
    assert hung.concerns(1)
    assert not hung.concerns(7)


def test_steps_that_are_lost_twice_in_one_incident_add_up():
    book = incidents.Book()
    opened = book.open("i-1", "WorkerDied", "rank 1 died", now=1.0, slots=(1,), rank=1)
    level = opened.resumes(40, 3).resumes(40, 2).level
    assert (level.step, level.steps_lost) == (40, 5)


def test_a_new_coordinator_goes_on_with_the_open_incident():
    open_ = levels.RuntimeIncident(id="i-2", cause="Gone", message="m")
    closed = levels.RuntimeIncident(id="i-1", cause="Gone", message="m", open=False)
    book = incidents.from_levels((closed, open_), now=5.0)
    assert book.id == "i-2"
    assert [i.id for i in book.levels()] == ["i-1", "i-2"]


def test_what_every_rank_notes_is_said_once_by_the_first_rank():
    reports = [
        (replace(stepping(0), notes=("step 5: loss", "step 6: loss")), 0.0),
        (replace(stepping(1), notes=("step 4: loss", "step 5: loss")), 0.0),
    ]
    seen = seeing.build_seen(facts(notes=("store: slow",)), an_epoch(), reports)
    assert seen.notes == ("store: slow", "step 5: loss", "step 6: loss")
