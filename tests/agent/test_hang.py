from everstep_agent.pod import hang
from everstep_contract.position import Phase, Position, Where

LIMITS = hang.Limits(step=300.0, startup=600.0)


def classify(now, *, cut=None, started=0.0, **fields):
    return hang.classify_hang(Position(**fields), started=started, cut=cut, limits=LIMITS, now=now)


def test_a_step_over_its_limit_is_a_hang_and_named():
    assert classify(299.0, scope=Where.STEP, applied=6) is None
    found = classify(301.0, scope=Where.STEP, applied=6, phase=Phase.COMPUTING)
    assert "301 s in step 7; the limit is 300 s" in found.message
    saves = classify(301.0, scope=Where.STEP, applied=6, phase=Phase.APPLIED)
    assert "301 s in step 6, after it was applied; the limit is 300 s" in saves.message


def test_a_rank_that_waits_for_others_is_never_the_culprit_while_its_group_stands():
    assert classify(10_000.0, scope=Where.STEP, waiting=True) is None


def test_after_a_cut_nobody_may_wait_long():
    assert classify(1005.0, scope=Where.STEP, waiting=True, cut=1000.0) is None
    assert classify(1030.0, scope=Where.STEP, waiting=True, cut=1000.0) is not None


def test_startup_has_a_limit_of_its_own():
    assert classify(500.0, scope=Where.STARTUP) is None
    assert classify(601.0, scope=Where.STARTUP).scope == "startup"


def test_a_scope_may_bring_its_own_limit():
    assert classify(31.0, scope=Where.PAUSE, limit_ms=30_000).scope == "pause"
    assert classify(500.0, scope=Where.PAUSE, limit_ms=600_000) is None


def test_time_before_the_start_does_not_count():
    assert classify(400.0, scope=Where.STEP, started=390.0) is None


def wait(now, *, started=0.0, **fields):
    return hang.describe_long_wait(Position(**fields), started=started, limits=LIMITS, now=now)


def test_a_rank_that_waits_as_long_as_a_hang_is_worth_a_stack():
    assert wait(299.0, scope=Where.STEP, waiting=True) is None
    assert wait(301.0, scope=Where.STEP, waiting=True, started=10.0) is None
    assert wait(301.0, scope=Where.STEP) is None
    held = {"scope": Where.STEP, "waiting": True, "applied": 6, "phase": Phase.COMPUTING}
    assert "301 s in step 7" in wait(301.0, **held)
    assert "31 s in evaluate" in wait(31.0, scope=Where.EVALUATE, waiting=True, limit_ms=30_000)


def test_time_in_which_the_whole_pod_stood_still_does_not_count():
    """A frozen container, a paused virtual machine: the ranks could not compute either."""
    at, limits = Position(scope=Where.STEP, since=100.0), hang.Limits(step=30.0, startup=600.0)

    def is_hung(now: float, stops: tuple[hang.Stop, ...]) -> bool:
        found = hang.classify_hang(at, started=0.0, cut=None, limits=limits, now=now, stops=stops)
        return found is not None

    stops = hang.note_stop((), 110.0, 110.25)
    assert stops == ()
    stops = hang.note_stop(stops, 110.25, 170.25)
    assert is_hung(170.5, ())
    assert not is_hung(170.5, stops)
    assert not is_hung(187.0, stops), "17 s, and the 2 s that count of the stop"
    assert is_hung(189.0, stops)
    later = Position(scope=Where.STEP, since=171.0)
    found = hang.classify_hang(later, started=0.0, cut=None, limits=limits, now=202.0, stops=stops)
    assert found is not None, "a scope that began after the stop"


def test_a_scope_that_began_in_a_stop_has_not_lasted_less_than_nothing():
    assert hang.count_seconds(99.0, 100.5, (hang.Stop(at=100.0, seconds=50.0),)) == 0.5
