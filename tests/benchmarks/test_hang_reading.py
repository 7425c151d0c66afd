from everstep_hang.reading import read_cuts

STALLED = 'everstep event=no_progress slot=1 message="hung: no progress for 0.4 s in step 9"'


def test_cuts_by_a_learnt_limit_are_told_from_other_losses():
    killed = 'everstep event=worker_ended slot=2 message="killed by signal 9 (SIGKILL)"'
    ended = 'everstep event=worker_ended slot=1 message="hung: no progress for 0.4 s in step 9"'
    stuck = 'everstep event=epoch_holds slot=0 cause=GroupStuck message="all 4 ranks wait in bucket 1 of 1"'
    found = read_cuts(["everstep event=worker_runs slot=0", f"  {STALLED}", ended, stuck, killed])
    assert found.learnt == (STALLED,)
    assert found.stuck == (stuck,)
    assert found.other == (killed,)
