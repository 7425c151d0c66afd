from everstep_hang.reading import read_cuts

STALLED = 'everstep event=no_progress slot=1 message="hung: no progress for 0.4 s in step 9"'


def test_cuts_by_a_learnt_limit_are_told_from_other_losses():
    killed = 'everstep event=worker_ended slot=2 message="killed by signal 9 (SIGKILL)"'
    ended = 'everstep event=worker_ended slot=1 message="hung: no progress for 0.4 s in step 9"'
    found = read_cuts(["everstep event=worker_runs slot=0", f"  {STALLED}", ended, killed])
    assert found.learnt == (STALLED,)
    assert found.other == (killed,)
