"""The cost of recoveries. Each interruption counts once, by its rung."""

from dataclasses import replace
from typing import Any

import pytest

from everstep_contract.levels import Phase, RuntimeIncident, Seen
from everstep_operator.jobs import recoveries, statuspatch
from everstep_operator.jobs.observed import Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.model_status import (
    Incident,
    JobStatus,
    Mark,
    MovedSlot,
    PhaseTiming,
    RecoveryTotal,
)
from everstep_operator.values import NodeState
from job_builders import NOW, a_job, a_pod, a_seen, a_status, a_verdict, an_observation

REGROUP = (("detect", 20), ("regroup", 60), ("restart", 10), ("first_step", 60))

RESUMED_EARLY = [Mark(name="resumed", seconds=0.2), Mark(name="running", seconds=9000)]


def phases(*named: tuple[str, int]) -> tuple[Phase, ...]:
    return tuple(Phase(name=name, ms=ms) for name, ms in named)


def told(number: int = 1, **changes: Any) -> RuntimeIncident:
    incident = RuntimeIncident(
        id=f"lm-{number}", cause="WorkerDied", message="rank 1 was killed", slot=1, slots=(1,), rank=1,
        step=42, rung="regroup", open=False, phases=phases(*REGROUP),
    )  # fmt: skip
    return replace(incident, **changes)


def an_entry(**changes: Any) -> Incident:
    fields: dict[str, Any] = {
        "id": "lm-1", "cause": "WorkerDied", "started_at": "2026-11-21T22:07:07.246Z", "open": False,
        "rung": "regroup", "steps_lost": 0,
        "phases": [PhaseTiming(name=name, ms=ms) for name, ms in REGROUP],
    }  # fmt: skip
    return Incident(**{**fields, **changes})


def a_move(**changes: Any) -> Incident:
    """The job has reported nothing, so only the operator's marks are known."""
    marks = [Mark(name=n, seconds=s) for n, s in (("leave", 0.1), ("left", 2.0), ("running", 9.5))]
    fields: dict[str, Any] = {
        "rung": None, "phases": [], "marks": marks, "slot": 1, "attempt": 1,
        "slots": [MovedSlot(slot=1, attempt=1, left=True)], "steps_lost": None,
    }  # fmt: skip
    return an_entry(**{**fields, **changes})


def again(observed: Observed, **changes: Any) -> Observed:
    """What the next pass observes after this pass's status was written."""
    status = plan(observed, NOW).status
    stored = JobStatus.model_validate(statuspatch.to_document(status))
    return replace(observed, job=replace(observed.job, status=stored), **changes)


def totals(status: JobStatus) -> dict[str, tuple[int, float, int]]:
    return {t.rung: (t.count, t.seconds, t.steps_lost) for t in status.recoveries}


# --- one entry --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("incident", "expected"),
    [
        (an_entry(), {"regroup": (1, 0.15, 0)}),
        (an_entry(rung="restart", steps_lost=7), {"restart": (1, 0.15, 7)}),
        (an_entry(rung="teleport"), {"other": (1, 0.15, 0)}),
        (an_entry(phases=[PhaseTiming(name="boundary", ms=900), PhaseTiming(name="restart", ms=300)]),
         {"regroup": (1, 0.3, 0)}),
        (a_move(), {"move": (1, 7.5, 0)}),
        (a_move(slots=[MovedSlot(slot=1, attempt=1)]), {"move": (1, 9.5, 0)}),
        (a_move(slots=[MovedSlot(slot=1, attempt=1)], marks=RESUMED_EARLY), {"move": (1, 0.2, 0)}),
        (a_move(marks=[Mark(name="left", seconds=1.0), *RESUMED_EARLY]), {"move": (1, 0.0, 0)}),
        (a_move(rung="move"), {}),
        (a_move(marks=[]), {}),
        (an_entry(open=True), {}),
        (an_entry(recovery_seconds=0.15), {}),
    ],
    ids=[
        "measured by the job", "steps lost", "a rung of a newer runtime", "the ranks step up to the boundary",
        "by the operator's marks, since it left", "since it began, as it did not leave in order",
        "until the others stepped, long before the slot trained again", "they never stopped",
        "a move that interrupted nothing", "nobody has measured it", "not over", "counted before",
    ],
)  # fmt: skip
def test_what_an_interruption_adds(
    incident: Incident, expected: dict[str, tuple[int, float, int]]
) -> None:
    found, told_on = recoveries.count((), [incident], a_seen())
    assert {t.rung: (t.count, t.seconds, t.steps_lost) for t in found} == expected
    if expected:
        ((_, seconds, _),) = expected.values()
        assert [i.recovery_seconds for i in told_on] == [seconds]
    else:
        assert told_on == [incident]


def test_totals_grow_and_each_duration_is_within_one_bound() -> None:
    entries = [
        an_entry(id=f"lm-{k}", phases=[PhaseTiming(name="restart", ms=ms)])
        for k, ms in enumerate((99, 100, 101, 3000, 601_000))
    ]
    before = [RecoveryTotal(rung="regroup", count=1, seconds=0.5, within={"0.5": 1})]
    (found,), _ = recoveries.count(before, entries, a_seen())
    assert (found.count, found.seconds) == (6, 604.8)
    assert found.within == {"0.1": 2, "0.2": 1, "0.5": 1, "5.0": 1, "+Inf": 1}
    assert sum(found.within.values()) == found.count


@pytest.mark.parametrize("id", ["lm-1", "inc-1"])
def test_it_waits_for_what_the_job_has_still_to_tell(id: str) -> None:
    """The operator sees all slots filled before the ranks take their first step."""
    early = a_seen(incidents=(told(open=True, rung="", phases=phases(("detect", 30))),))
    entry = a_move(id=id, job_id="lm-1" if id == "inc-1" else None)
    assert recoveries.count((), [entry], early) == ([], [entry])
    assert recoveries.count((), [entry], None) == ([], [entry]), "no agent has reported yet"


# --- through the passes: once -----------------------------------------------------------------------------


def test_a_recovery_is_counted_once_whoever_looks_again() -> None:
    seen = a_seen(incidents=(told(open=True, rung=""),))
    observed = again(an_observation(seen=seen))
    assert totals(observed.job.status) == {}
    over = replace(observed, seen=a_seen(incidents=(told(),)))
    for _ in range(3):
        over = again(over)
        assert totals(over.job.status) == {"regroup": (1, 0.15, 0)}
        assert over.job.status.incidents[0].recovery_seconds == 0.15


def test_two_replicas_that_see_the_same_write_the_same() -> None:
    """The later write fails with a conflict. Even without that, nothing would count twice."""
    observed = an_observation(seen=a_seen(incidents=(told(),)))
    assert plan(observed, NOW).status.recoveries == plan(observed, NOW + 5).status.recoveries


def test_a_mended_death_that_a_later_verdict_takes_over_is_not_counted_again() -> None:
    lost = told(cause="AgentLost")
    mended = again(an_observation(seen=a_seen(incidents=(lost,))))
    assert totals(mended.job.status) == {"regroup": (1, 0.15, 0)}
    gone = {"node-1": a_verdict("node-1", NodeState.GONE)}
    moving = again(replace(mended, verdicts=gone))
    (moved,) = moving.job.status.incidents
    assert (moved.cause, moved.open, moved.recovery_seconds) == ("NodeGone", True, 0.15)
    filled = replace(
        moving,
        pods=(a_pod(0), a_pod(1, 2), a_pod(2)),
        seen=a_seen(((0, 1), (1, 2), (2, 1)), incidents=(lost,)),
        verdicts={},
    )
    ended = again(filled)
    assert [i.open for i in ended.job.status.incidents] == [False]
    assert totals(again(ended).job.status) == {"regroup": (1, 0.15, 0)}


def test_entries_that_are_too_old_to_be_kept_stay_counted() -> None:
    observed = an_observation(seen=a_seen())
    for number in range(1, 31):
        known = tuple(told(k, cause="NoProgress") for k in range(max(1, number - 9), number + 1))
        observed = again(replace(observed, seen=a_seen(incidents=known)))
    assert totals(observed.job.status) == {"regroup": (30, 4.5, 0)}
    assert len(observed.job.status.incidents) == 10


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (a_seen(done=True, incidents=(told(),)), {"regroup": (1, 0.15, 0)}),
        (a_seen(done=True, incidents=(told(open=True, rung=""),)), {}),
    ],
    ids=["recovered before the end", "ended by the end of the job"],
)
def test_the_end_of_a_job_is_no_recovery(
    seen: Seen, expected: dict[str, tuple[int, float, int]]
) -> None:
    ended = again(an_observation(seen=seen))
    assert ended.job.status.state == "Complete"
    assert totals(again(ended).job.status) == expected


def test_an_operator_that_is_new_to_a_job_counts_what_status_still_knows() -> None:
    """So far the job had an operator that keeps no totals."""
    entries = [an_entry(id=f"lm-{k}") for k in range(3)]
    known = tuple(told(k) for k in range(3))
    job = a_job(status=a_status(incidents=entries))
    observed = again(an_observation(job=job, seen=a_seen(incidents=known)))
    assert totals(observed.job.status) == {"regroup": (3, 0.45, 0)}


def test_totals_are_written_with_the_entries_that_they_count() -> None:
    before = again(an_observation(seen=a_seen(incidents=(told(open=True, rung=""),))))
    document = statuspatch.to_document(before.job.status) | {"observedAt": "1970-01-12T13:46:40Z"}
    status = plan(replace(before, seen=a_seen(incidents=(told(),))), NOW).status
    patch = statuspatch.decide_patch(document, status, NOW, figures_seconds=10.0)
    assert [t["rung"] for t in patch["recoveries"]] == ["regroup"]
    assert [i["recoverySeconds"] for i in patch["incidents"]] == [0.15]


# --- where the seconds went -------------------------------------------------------------------------------


def test_the_time_ledger_is_told_with_the_other_figures_and_kept() -> None:
    spent = {"step": 98.44, "data": 1.0, "x" * 40: 1.0}
    observed = again(an_observation(seen=a_seen(seconds=spent)))
    assert observed.job.status.seconds == {"data": 1.0, "step": 98.4}
    silent = again(replace(observed, seen=a_seen(seconds={})))
    assert silent.job.status.seconds == {"data": 1.0, "step": 98.4}


def test_seconds_that_only_pass_are_no_reason_to_write() -> None:
    observed = again(an_observation(seen=a_seen(seconds={"idle": 10.0})))
    stored = statuspatch.to_document(observed.job.status) | {"observedAt": "1970-01-12T13:46:40Z"}
    later = plan(replace(observed, seen=a_seen(seconds={"idle": 90.0})), NOW + 80).status
    assert later.seconds == {"idle": 90.0}
    assert statuspatch.decide_patch(stored, later, NOW + 80, figures_seconds=10.0) == {}
