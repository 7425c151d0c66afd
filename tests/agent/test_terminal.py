import io

from everstep_agent import logline
from everstep_agent.local import terminal
from everstep_contract import levels

AT = levels.CheckpointRef(epoch=1, step=50, bytes=12_300_000)


def test_a_log_line_reads_back_as_it_was_said():
    out = io.StringIO()
    logline.Log(out, slot=1).say("worker_ended", pid=7, message='it said "no" = x', empty="")
    assert logline.parse_line(out.getvalue()) == (
        "worker_ended",
        {"slot": "1", "pid": "7", "message": 'it said "no" = x'},
    )


def test_a_line_of_somebody_else_is_not_taken_for_ours():
    assert logline.parse_line("loss 0.3 everstep event=x") is None


def test_a_start_a_checkpoint_and_a_note_are_shown_once():
    first = levels.Seen(run="r", epoch=1)
    later = levels.Seen(run="r", epoch=1, committed=AT, notes=("gradient norm 31 at step 12",))
    assert terminal.describe_changes(levels.Seen(run="r"), first) == ["epoch 1: starts at step 0"]
    assert terminal.describe_changes(first, later) == [
        "checkpoint: step 50 committed (12.3 MB)",
        "note: gradient norm 31 at step 12",
    ]
    assert terminal.describe_changes(later, later) == []


def test_the_checkpoints_of_a_job_that_has_taken_the_run_over_are_not_shown():
    after = levels.Seen(run="r", committed=AT, fenced="job local/r (a1) has taken the run over")
    assert terminal.describe_changes(levels.Seen(run="r"), after) == []


def test_what_an_end_without_a_save_costs():
    assert terminal.describe_lost(levels.Seen()) == "no step was taken yet"
    assert terminal.describe_lost(levels.Seen(step=7)) == "all steps are lost"
    assert (
        terminal.describe_lost(levels.Seen(step=70, committed=AT)) == "the steps after 50 are lost"
    )


def test_an_epoch_that_has_committed_before_it_is_seen_did_not_resume_from_that():
    def begins(before: levels.CheckpointRef | None, epoch: int) -> str:
        now = levels.CheckpointRef(epoch=epoch, step=70)
        after = levels.Seen(run="r", epoch=epoch, committed=now)
        return terminal.describe_changes(levels.Seen(run="r", committed=before), after)[0]

    assert begins(None, 1) == "epoch 1: starts at step 0"
    assert begins(AT, 2) == "epoch 2: resumes from step 50"
    assert begins(None, 3) == "epoch 3: trains"


def test_an_epoch_that_goes_on_in_place_is_told_from_one_that_resumes():
    first = levels.Seen(run="r", epoch=1, committed=AT)
    in_place = levels.Seen(run="r", epoch=2, committed=AT, in_place=True)
    resumed = levels.Seen(run="r", epoch=2, committed=AT)
    assert terminal.describe_changes(first, in_place) == ["epoch 2: continues without a restart"]
    assert terminal.describe_changes(first, resumed) == ["epoch 2: resumes from step 50"]


def test_an_incident_is_shown_when_it_begins_and_with_its_phases_when_it_ends():
    open_ = levels.RuntimeIncident(id="i", cause="WorkerDied", message="rank 1 killed")
    closed = levels.RuntimeIncident(
        id="i", cause="WorkerDied", message="rank 1 killed", step=12, open=False,
        phases=(levels.Phase(name="first_step", ms=1500),),
    )  # fmt: skip
    quiet, lost = levels.Seen(run="r"), levels.Seen(run="r", incidents=(open_,))
    assert terminal.describe_changes(quiet, lost) == ["interrupted: rank 1 killed (WorkerDied)"]
    (line,) = terminal.describe_changes(lost, levels.Seen(run="r", incidents=(closed,)))
    assert line == "recovered in 1.50 s from step 12, steps lost: 0 (first step 1.50)"


def test_a_store_that_is_away_is_said_once_until_it_is_back():
    away = [
        levels.Seen(storage_error=levels.StorageError(kind="Unreachable", message=f"cannot {verb}"))
        for verb in ("write a", "read b")
    ]
    assert terminal.describe_changes(levels.Seen(), away[0]) == ["store: cannot write a"]
    assert terminal.describe_changes(*away) == []
    assert terminal.describe_changes(away[1], levels.Seen()) == ["store: available again"]


def test_a_slot_that_leaves_is_not_said_to_be_lost():
    leaves = levels.RuntimeIncident(id="i", cause="Leave", message="slot 2 leaves")
    left = levels.RuntimeIncident(
        id="i", cause="Leave", message="slot 2 leaves", step=7, open=False
    )
    before, after = levels.Seen(incidents=(leaves,)), levels.Seen(incidents=(left,))
    assert terminal.describe_changes(levels.Seen(), before) == ["leave: slot 2 leaves"]
    (line,) = terminal.describe_changes(before, after)
    assert line.startswith("moved in 0.00 s from step 7, steps lost: 0")


def test_the_pid_of_every_rank_is_shown_so_that_it_can_be_killed_by_hand():
    line = terminal.describe_event("worker_runs", {"rank": "2", "pid": "4711"})
    assert line == "rank 2 runs as pid 4711"
    assert terminal.describe_event("uploaded", {}) is None


def test_bytes_read_well():
    assert [terminal.format_bytes(n) for n in (7, 1500, 12_300_000, 5 * 10**9)] == [
        "7 B", "1.5 kB", "12.3 MB", "5.0 GB",
    ]  # fmt: skip


def test_a_start_that_takes_longer_than_two_seconds_is_explained():
    assert not terminal.is_start_slow(1.0, levels.Seen())
    assert terminal.is_start_slow(3.0, levels.Seen())
    assert not terminal.is_start_slow(3.0, levels.Seen(epoch=1))
