"""One interruption is one incident with times from two clocks: the job's and the operator's."""

from dataclasses import replace

import pytest

from everstep_contract.levels import Phase, RuntimeIncident
from everstep_operator.jobs.conditions import find_condition
from everstep_operator.jobs.observed import NodeFact, Observed
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.stamps import to_fine_stamp
from everstep_operator.model_status import Incident, Mark, MovedSlot
from everstep_operator.values import NodeState
from job_builders import (
    NOW,
    a_job,
    a_left,
    a_pod,
    a_seen,
    a_slot,
    a_spec,
    a_status,
    a_verdict,
    an_observation,
)


def told(**changes: object) -> RuntimeIncident:
    incident = RuntimeIncident(
        id="lm-1", cause="WorkerDied", message="rank 1 was killed", slot=1, rank=1, step=42,
        phases=(Phase(name="detect", ms=30),),
    )  # fmt: skip
    return replace(incident, **changes)  # type: ignore[arg-type]


def incidents_after(observed: Observed, now: float = NOW) -> list[Incident]:
    return plan(observed, now).status.incidents


def again(observed: Observed, now: float) -> Observed:
    return replace(observed, job=replace(observed.job, status=plan(observed, now).status))


def test_what_the_job_tells_of_itself_is_kept_with_its_phases() -> None:
    (incident,) = incidents_after(an_observation(seen=a_seen(incidents=(told(),))))
    assert (incident.id, incident.cause, incident.open, incident.resumed_step) == (
        "lm-1",
        "WorkerDied",
        True,
        42,
    )
    assert [(p.name, p.ms) for p in incident.phases] == [("detect", 30)]


def test_a_verdict_that_explains_a_death_takes_its_incident_over() -> None:
    died = again(an_observation(seen=a_seen(running=False, incidents=(told(),))), NOW)
    convicted = replace(died, verdicts={"node-1": a_verdict("node-1", NodeState.GONE)})
    (incident,) = incidents_after(convicted, NOW + 3)
    assert (incident.id, incident.quarantine, incident.job_id) == ("lm-1", "inc-1", None)
    assert (incident.cause, incident.node) == ("NodeGone", "node-1")
    later = again(convicted, NOW + 3)
    closed = replace(
        later, seen=a_seen(running=False, incidents=(told(open=False, rung="restart"),))
    )
    (incident,) = incidents_after(closed, NOW + 4)
    assert (incident.rung, incident.open) == ("restart", True), (
        "the slot's new pod does not train yet"
    )


def test_marks_count_from_the_beginning_that_the_job_reports_after_the_operator_has_acted() -> None:
    move = Incident(
        id="pod-1", cause="PodDeleted", slot=1, attempt=1, slots=[MovedSlot(slot=1, attempt=1)],
        started_at=to_fine_stamp(NOW - 2), marks=[Mark(name="deleted", seconds=0.5)],
    )  # fmt: skip
    slots = [a_slot(0), a_slot(1, 2, incident="pod-1"), a_slot(2)]
    lost = told(
        cause="AgentLost", open=False, rung="regroup",
        phases=(Phase(name="detect", ms=9000), Phase(name="first_step", ms=1000)),
    )  # fmt: skip
    observed = an_observation(
        job=a_job(status=a_status(slots=slots, incidents=[move])),
        pods=(a_pod(0), a_pod(1, 2), a_pod(2)),
        seen=a_seen(((0, 1), (2, 1)), incidents=(lost,)),
    )
    (incident,) = incidents_after(observed)
    assert (incident.job_id, incident.started_at) == ("lm-1", to_fine_stamp(NOW - 10))
    marks = {m.name: m.seconds for m in incident.marks}
    assert (marks["deleted"], marks["resumed"]) == (8.5, 10.0)


def test_the_events_of_an_explained_death_bear_its_id_and_name_the_quarantine() -> None:
    died = again(an_observation(seen=a_seen(running=False, incidents=(told(),))), NOW)
    convicted = replace(died, verdicts={"node-1": a_verdict("node-1", NodeState.GONE)})
    planned = plan(convicted, NOW + 3)
    raised = next(e for e in planned.events if e.reason == "NodeGone" and "attempt 2" in e.message)
    assert raised.message.endswith("[lm-1, quarantine inc-1]")
    marked = replace(convicted, job=replace(convicted.job, status=planned.status))
    cordoned = a_verdict("node-1", NodeState.GONE, marks={"signal": NOW + 1, "cordon": NOW + 4})
    (incident,) = incidents_after(replace(marked, verdicts={"node-1": cordoned}), NOW + 5)
    assert {m.name: m.seconds for m in incident.marks}["cordon"] > 3
    wanted = plan(marked, NOW + 5).wanted
    assert wanted is not None
    assert wanted.incident == "lm-1"


def test_a_death_that_was_mended_before_the_verdict_came_bears_its_quarantine() -> None:
    mended = told(open=False, rung="restart")
    seen = a_seen(incidents=(mended,), restarts={"WorkerDied": 1})
    before = again(an_observation(seen=seen), NOW)
    convicted = replace(before, verdicts={"node-1": a_verdict("node-1", NodeState.GONE)})
    died, moved = incidents_after(convicted, NOW + 30)
    assert (died.id, died.cause, died.quarantine, died.open) == (
        "lm-1",
        "WorkerDied",
        "inc-1",
        False,
    )
    assert (moved.cause, moved.id, moved.quarantine) == ("NodeGone", "inc-1", "inc-1")
    again_dead = told(id="lm-2")
    twice = replace(convicted, seen=a_seen(running=False, incidents=(mended, again_dead)))
    died, moved = incidents_after(twice, NOW + 30)
    assert (died.quarantine, moved.id, moved.quarantine) == ("inc-1", "lm-2", "inc-1")
    died, moved = incidents_after(convicted, NOW + 600)
    assert (died.quarantine, moved.quarantine) == (None, "inc-1"), (
        "a death ten minutes later is another fault"
    )


def test_a_death_that_is_heard_of_after_the_verdict_bears_its_quarantine_too() -> None:
    gone = {"node-1": a_verdict("node-1", NodeState.GONE)}
    convicted = replace(again(an_observation(seen=a_seen()), NOW), verdicts=gone)
    moved = replace(convicted.job, status=plan(convicted, NOW + 2).status)
    late = a_seen(incidents=(told(open=False, rung="restart"),))
    moved_first, died = incidents_after(replace(convicted, job=moved, seen=late), NOW + 3)
    assert (moved_first.cause, moved_first.open) == ("NodeGone", True)
    assert (died.cause, died.quarantine) == ("WorkerDied", moved_first.quarantine)
    elsewhere = a_seen(incidents=(told(slot=2, open=False),))
    assert (
        incidents_after(replace(convicted, job=moved, seen=elsewhere), NOW + 3)[1].quarantine
        is None
    )


@pytest.mark.parametrize("state", [NodeState.LEAVING, NodeState.GONE])
def test_a_move_bears_the_verdict_of_the_operator_that_wrote_the_quarantine(
    state: NodeState,
) -> None:
    """The former operator moved the slot because of inc-1, and ended before it had written the NodeQuarantine."""
    mended = told(open=False, rung="regroup")
    first = a_verdict("node-1", state, marks={"signal": NOW, "verdict": NOW + 1})
    seen = a_seen(((0, 1), (2, 1)), incidents=(mended,))
    moved = again(an_observation(verdicts={"node-1": first}, seen=seen), NOW + 1)
    assert [i.quarantine for i in moved.job.status.incidents] == ["inc-1", "inc-1"]
    marks = {"signal": NOW + 20, "verdict": NOW + 20, "cordon": NOW + 21}
    second = replace(first, incident="inc-2", quarantined=True, marks=marks)
    seen = replace(seen, left=(a_left(1),))
    judged = again(replace(moved, verdicts={"node-1": second}, seen=seen), NOW + 22)
    incidents = judged.job.status.incidents
    assert [i.quarantine for i in incidents] == ["inc-2", "inc-2"]
    assert "cordon" in {m.name for i in incidents for m in i.marks}
    assert judged.job.status.restarts is not None
    assert judged.job.status.restarts.total == 1
    third = replace(second, incident="inc-3")
    later = again(replace(judged, verdicts={"node-1": third}), NOW + 23).job.status.incidents
    assert {i.quarantine for i in later} == {"inc-2"}, "a node that was cordoned has another fault"


def test_the_last_incident_is_told_as_a_story_and_announced_once() -> None:
    verdict = a_verdict("node-1", NodeState.GONE, marks={"signal": NOW - 2, "verdict": NOW - 1})
    raised = again(an_observation(verdicts={"node-1": verdict}), NOW)
    mended = told(id="inc-1", open=False, rung="restart", steps_lost=0)
    back = replace(
        raised,
        pods=(a_pod(0), a_pod(1, 2, node="node-3"), a_pod(2)),
        seen=a_seen(((0, 1), (1, 2), (2, 1)), epoch=2, incidents=(mended,)),
    )
    planned = plan(back, NOW + 7)
    (recovering,) = [c for c in planned.status.conditions if c.type == "Recovering"]
    assert recovering.status == "False"
    for word in (
        "NodeGone (slot 1)", verdict.message, "all ranks restarted from a checkpoint, from step 42, 0 steps lost",
        "signal after 0.0 s", "verdict after 1.0 s", "running after 9.0 s",
        "the job measured detect 0.03 s", "[inc-1]",
    ):  # fmt: skip
        assert word in recovering.message
    (announced,) = [e for e in planned.events if e.reason == "Recovered"]
    assert recovering.message == f"last: {announced.message}"
    after = again(back, NOW + 7)
    assert not [e for e in plan(after, NOW + 8).events if e.reason == "Recovered"]


def test_a_death_mended_in_place_and_the_move_that_follows_are_told_as_one_fault() -> None:
    mended = told(open=False, rung="regroup", steps_lost=0)
    before = again(an_observation(seen=a_seen(incidents=(mended,))), NOW)
    verdicts = {"node-1": a_verdict("node-1", NodeState.GONE)}
    raised = again(replace(before, verdicts=verdicts), NOW + 3)
    joined = told(id="inc-1", open=False, rung="regroup", steps_lost=0)
    back = replace(
        raised,
        pods=(a_pod(0), a_pod(1, 2, node="node-3"), a_pod(2)),
        seen=a_seen(((0, 1), (1, 2), (2, 1)), epoch=2, incidents=(mended, joined)),
    )
    planned = plan(back, NOW + 9)
    (announced,) = [e for e in planned.events if e.reason == "Recovered"]
    assert announced.incident == "inc-1"
    death, move = announced.message.split("; then ")
    assert "WorkerDied (slot 1)" in death
    assert "the others continued in place" in death
    assert "[lm-1]" in death
    assert "NodeGone (slot 1)" in move
    assert "[inc-1]" in move
    assert planned.status.restarts is not None
    assert planned.status.restarts.total == 1


def test_a_move_after_the_job_went_on_without_the_slot_interrupts_nothing() -> None:
    mended = told(open=False, rung="regroup", steps_lost=0)
    before = again(an_observation(seen=a_seen(((0, 1), (2, 1)), incidents=(mended,))), NOW)
    verdicts = {"node-1": a_verdict("node-1", NodeState.GONE)}
    raised = again(replace(before, verdicts=verdicts), NOW + 3)
    pods = (a_pod(0), a_pod(1, 2, node="node-3"), a_pod(2))
    seen = a_seen(((0, 1), (1, 2), (2, 1)), epoch=3, incidents=(mended,))
    died, moved = incidents_after(replace(raised, pods=pods, seen=seen), NOW + 9)
    assert (died.steps_lost, moved.steps_lost, moved.rung, moved.open) == (0, 0, "move", False)
    unlinked = replace(seen, incidents=())
    forgot = replace(raised, job=replace(raised.job, status=a_status(
        incidents=[i for i in raised.job.status.incidents if i.slots]
    )))  # fmt: skip
    (alone,) = incidents_after(replace(forgot, pods=pods, seen=unlinked), NOW + 9)
    assert alone.steps_lost is None, "nobody knows whether the job lost steps"


@pytest.mark.parametrize("known", ["before", "after"])
def test_a_lost_pod_is_one_incident_however_soon_the_job_went_on_without_it(known: str) -> None:
    lost = told(cause="AgentLost", open=False, rung="regroup", steps_lost=0)
    seen = a_seen(((0, 1), (2, 1)), epoch=2, incidents=(lost,))
    before = an_observation(seen=seen if known == "before" else a_seen())
    deleted = replace(again(before, NOW), pods=(a_pod(0), a_pod(2)))
    raised = again(replace(deleted, seen=seen), NOW + 1)
    (one,) = raised.job.status.incidents
    assert (one.cause, one.rung, one.steps_lost, one.open) == ("PodDeleted", "regroup", 0, True)
    assert one.job_id == "lm-1"
    assert raised.job.status.restarts is not None
    assert raised.job.status.restarts.by_cause == {"PodDeleted": 1}


@pytest.mark.parametrize("is_open", [True, False])
def test_nodes_lost_at_once_are_a_fault_each_and_one_interruption(is_open: bool) -> None:
    both = told(cause="AgentLost", slot=1, slots=(1, 2), open=is_open, rung="regroup", phases=(
        Phase(name="detect", ms=30), Phase(name="first_step", ms=70),
    ))  # fmt: skip
    seen = a_seen(((0, 1),), epoch=2, running=not is_open, incidents=(both,))
    before = again(an_observation(seen=seen), NOW)
    gone = {n: a_verdict(n, NodeState.GONE, incident=n) for n in ("node-1", "node-2")}
    raised = again(replace(before, verdicts=gone), NOW + 1)
    pods = (a_pod(0), a_pod(1, 2, node="node-3"), a_pod(2, 2, node="node-4"))
    mended = replace(seen, running=True, incidents=(replace(both, open=False),))
    whole = replace(mended, epoch=3, members=a_seen(((0, 1), (1, 2), (2, 2))).members)
    after = again(replace(raised, pods=pods, seen=whole), NOW + 9).job.status
    found = {i.node: i for i in after.incidents if i.slots}
    assert {n: (i.open, i.steps_lost) for n, i in found.items()} == {
        "node-1": (False, 0),
        "node-2": (False, 0),
    }
    assert [(t.rung, t.count, t.seconds) for t in after.recoveries] == [("regroup", 1, 0.1)]
    assert after.restarts is not None
    assert after.restarts.by_cause == {"NodeGone": 2}


def test_a_loss_whose_slot_is_known_late_belongs_to_the_move_of_that_slot() -> None:
    """Regression: the next coordinator noticed the loss of the former one before it knew which pod that
    was, and the cost of the move was never reported.
    """
    verdicts = {"node-1": a_verdict("node-1", NodeState.GONE)}
    raised = again(an_observation(seen=a_seen(), verdicts=verdicts), NOW)
    unknown = told(cause="CoordinatorLost", message="its coordinator is gone", slot=None, rank=None)
    noticed = again(replace(raised, seen=a_seen(((0, 1), (2, 1)), incidents=(unknown,))), NOW + 1)
    lost = told(cause="Gone", open=False, rung="regroup", steps_lost=0)
    ended = again(replace(noticed, seen=a_seen(((0, 1), (2, 1)), incidents=(lost,))), NOW + 2)
    (one,) = ended.job.status.incidents
    assert (one.cause, one.steps_lost, one.job_id) == ("NodeGone", 0, "lm-1")
    assert ended.job.status.restarts is not None
    assert ended.job.status.restarts.total == 1


def lost_node(**changes: object) -> Observed:
    """The group broke and nobody knows which rank caused it. node-2 has not been Ready for 61 s."""
    broken = told(cause="GroupBroken", message="rank 0: a peer is gone", slot=None, rank=None)
    nodes = {f"node-{s}": NodeFact(name=f"node-{s}") for s in range(3)}
    nodes["node-2"] = NodeFact(name="node-2", not_ready_for=61.0, why="no heartbeat")
    seen = a_seen(running=False, incidents=(replace(broken, steps_lost=2),))
    return an_observation(seen=seen, nodes=nodes, **changes)


def test_a_lost_node_is_the_incident_that_the_job_has_lived_through_since() -> None:
    before = again(an_observation(seen=lost_node().seen), NOW)
    (incident,) = incidents_after(replace(lost_node(), job=before.job), NOW + 60)
    assert (incident.id, incident.cause, incident.slot) == ("lm-1", "NodeLost", 2)
    assert (incident.steps_lost, incident.resumed_step) == (2, 42)
    assert incident.phases


def test_two_slots_on_a_lost_node_share_the_jobs_incident() -> None:
    pods = (a_pod(0), a_pod(1, node="node-2"), a_pod(2))
    found = incidents_after(lost_node(pods=pods), NOW)
    (incident,) = found
    assert (incident.id, [m.slot for m in incident.slots]) == ("lm-1", [1, 2])
    assert incident.steps_lost == 2


def test_another_slots_loss_stays_an_incident_of_its_own() -> None:
    told_of_1 = a_seen(running=False, incidents=(told(slots=(1,)),))
    found = incidents_after(replace(lost_node(), seen=told_of_1), NOW)
    assert [(i.id, i.slot) for i in found] == [("nodelost-2-1", 2), ("lm-1", 1)]


def test_a_slot_that_was_scaled_away_leaves_no_open_incident() -> None:
    fewer = an_observation(job=a_job(a_spec(replicas=2), status=a_status()))
    asked = again(fewer, NOW)
    left = again(replace(asked, seen=a_seen(running=False, left=(a_left(2),))), NOW + 1)
    runs = replace(left, pods=(a_pod(0), a_pod(1)), seen=a_seen(((0, 1), (1, 1)), epoch=2))
    (incident,) = incidents_after(runs, NOW + 9)
    assert (incident.cause, incident.open) == ("ScaledDown", False)


def test_a_slot_on_a_lost_node_is_given_up_although_it_is_no_longer_wanted() -> None:
    """Nobody is there who could leave, and the others may need its end to go on."""
    away = NodeFact(name="node-1", not_ready_for=61.0, why="no heartbeat")
    fewer = a_job(a_spec(replicas=1, recovery={"onLoss": "Wait"}), status=a_status(2))
    seen = a_seen((), running=False, incidents=(told(cause="AgentLost"),))
    observed = an_observation(
        job=fewer, pods=(a_pod(0), a_pod(1)), seen=seen,
        nodes={"node-0": NodeFact(name="node-0"), "node-1": away},
    )  # fmt: skip
    counted = again(observed, NOW)
    assert [r.attempt for r in counted.job.status.slots] == [1, 2]
    wanted = plan(counted, NOW + 1).wanted
    assert wanted is not None
    assert [(g.slot, g.attempt) for g in wanted.gone] == [(1, 1)]


def test_the_marks_tell_when_each_phase_was_seen_and_never_move() -> None:
    verdict = a_verdict("node-1", NodeState.LEAVING, marks={"signal": NOW - 2, "verdict": NOW - 1})
    asked = again(an_observation(verdicts={"node-1": verdict}), NOW)
    left = again(replace(asked, seen=a_seen(running=False, left=(a_left(1),))), NOW + 4)
    moved = replace(
        left,
        pods=(a_pod(0), a_pod(1, 2, node="node-4"), a_pod(2)),
        seen=a_seen(((0, 1), (1, 2), (2, 1)), epoch=2),
    )
    (incident,) = incidents_after(moved, NOW + 20)
    marks = {m.name: m.seconds for m in incident.marks}
    assert marks == {
        "signal": 0, "verdict": 1, "leave": 2, "commit": 6, "left": 6, "deleted": 22, "created": 22, "running": 22,
    }  # fmt: skip
    assert not incident.open
    assert (incident.rung, incident.steps_lost) == ("move", 0), "the slot left in order"


def test_only_the_last_ten_are_kept() -> None:
    many = tuple(told(id=f"lm-{n}", open=False, slot=None) for n in range(12))
    observed = an_observation(seen=a_seen(incidents=many))
    found = incidents_after(observed)
    assert [i.id for i in found] == [f"lm-{n}" for n in range(2, 12)]
    assert incidents_after(again(observed, NOW), NOW + 1) == found, "a dropped incident came back"


def test_a_quiet_pass_changes_no_incident() -> None:
    first = again(an_observation(seen=a_seen(incidents=(told(open=False),))), NOW)
    assert incidents_after(first, NOW + 60) == first.job.status.incidents


def a_short_death(number: int, slot: int) -> RuntimeIncident:
    phases = (Phase(name="regroup", ms=200),)
    return told(id=f"lm-{number}", slot=slot, open=False, rung="regroup", phases=phases)


def test_a_fault_is_not_counted_again_once_its_first_incident_is_dropped() -> None:
    """A death recovered in place and the move that follows are one fault, with one charge."""
    members, deaths = [(0, 1), (2, 1)], [a_short_death(1, slot=1)]
    observed = again(an_observation(seen=a_seen(members, incidents=tuple(deaths))), NOW)
    gone = a_verdict("node-1", NodeState.GONE, marks={"signal": NOW, "verdict": NOW + 1})
    observed = again(replace(observed, verdicts={"node-1": gone}), NOW + 1)
    pods = (a_pod(0), a_pod(1, 2, node="node-4", running_since=NOW + 5), a_pod(2))
    members = [(0, 1), (1, 2), (2, 1)]
    observed = replace(observed, pods=pods, seen=a_seen(members, incidents=tuple(deaths)))
    observed = again(observed, NOW + 10)
    assert observed.job.status.restarts.by_cause == {"NodeGone": 1}
    for number in range(2, 24):
        deaths = [*deaths, a_short_death(number, slot=0)][-10:]
        observed = replace(observed, seen=a_seen(members, incidents=tuple(deaths)))
        observed = again(observed, NOW + 86400.0 * number)
    assert observed.job.status.restarts.by_cause == {"NodeGone": 1, "WorkerDied": 22}
    assert len(observed.job.status.incidents) == 10


def test_all_deaths_before_a_verdict_are_part_of_its_fault() -> None:
    """The operator is away, so a rank on a bad GPU dies more often than incidents are kept."""
    deaths: list[RuntimeIncident] = []
    observed = an_observation(seen=a_seen())
    for number in range(14):
        deaths = [*deaths, a_short_death(number, slot=1)][-10:]
        observed = replace(observed, seen=a_seen(incidents=tuple(deaths)))
        observed = again(observed, NOW + 3.0 * number)
    assert observed.job.status.restarts.by_cause == {"WorkerDied": 14}
    later = again(observed, NOW + 600)
    assert len(later.job.status.incidents) == 10, "no verdict came"
    gone = a_verdict("node-1", NodeState.GONE, marks={"signal": NOW, "verdict": NOW + 42})
    convicted = again(replace(observed, verdicts={"node-1": gone}), NOW + 43)
    pods = (a_pod(0), a_pod(1, 2, node="node-4", running_since=NOW + 45), a_pod(2))
    members = a_seen([(0, 1), (1, 2), (2, 1)], incidents=tuple(deaths))
    moved = again(replace(convicted, pods=pods, seen=members), NOW + 50)
    assert moved.job.status.restarts.by_cause == {"NodeGone": 1}
    assert moved.job.status.restarts.joined == 13


def test_many_deaths_before_verdicts_push_out_no_part_of_a_fault() -> None:
    """A fault that lost its charged entry would be counted again."""
    spec = a_spec(recovery={"restartBudgets": {"worker": 1000}})
    observed = an_observation(job=a_job(spec, status=a_status()))
    deaths = list[RuntimeIncident]()
    members, pods = [(0, 1), (1, 1), (2, 1)], [a_pod(0), a_pod(1), a_pod(2)]
    for slot in range(3):
        now = NOW + 200.0 * slot
        for number in range(30):
            deaths = [*deaths, a_short_death(100 * slot + number, slot=slot)][-10:]
            seen = a_seen(members, incidents=tuple(deaths))
            observed = again(replace(observed, seen=seen), now + number)
        lost = a_verdict(f"node-{slot}", NodeState.GONE, incident=f"inc-{slot}")
        lost = replace(lost, marks={"signal": now, "verdict": now + 30})
        observed = replace(observed, verdicts={**observed.verdicts, lost.node: lost})
        observed = again(observed, now + 31)
        members[slot] = slot, 2
        pods[slot] = a_pod(slot, 2, node=f"spare-{slot}", running_since=now + 33)
        seen = a_seen(members, incidents=tuple(deaths))
        observed = again(replace(observed, pods=tuple(pods), seen=seen), now + 35)
        counted = observed.job.status.restarts
        # Kept until the verdict: 20 that were counted, and the newest one.
        assert counted.by_cause == {"NodeGone": slot + 1, "WorkerDied": 9 * (slot + 1)}
        assert len(observed.job.status.incidents) <= 64
    assert again(observed, NOW + 700).job.status.restarts == counted


def test_the_end_of_a_move_is_announced_however_many_faults_came_since_it_began() -> None:
    """The slot's next pod finds no node for a long time, and the others train without it."""
    away = NodeFact(name="node-1", not_ready_for=61.0, why="no heartbeat")
    nodes = {f"node-{s}": NodeFact(name=f"node-{s}") for s in range(9)} | {"node-1": away}
    observed = again(an_observation(nodes=nodes, seen=a_seen(running=False)), NOW)
    waits = a_pod(1, 2, node="", running_since=None, phase="Pending")
    observed, deaths = replace(observed, pods=(a_pod(0), waits, a_pod(2))), list[RuntimeIncident]()
    for number in range(1, 13):
        deaths = [*deaths, a_short_death(number, slot=0)][-10:]
        seen = a_seen([(0, 1), (2, 1)], incidents=tuple(deaths))
        observed = again(replace(observed, seen=seen), NOW + 600 * number)
    trains = replace(observed.seen or a_seen(), members=a_seen([(0, 1), (1, 2), (2, 1)]).members)
    pods = (a_pod(0), a_pod(1, 2, node="node-4"), a_pod(2))
    events = plan(replace(observed, pods=pods, seen=trains), NOW + 9000).events
    assert [e.incident for e in events if e.reason == "Recovered"] == ["nodelost-1-1"]


def test_an_incident_that_no_agent_knows_any_more_is_closed_once_the_job_trains() -> None:
    """A later death of the same slot is another one."""
    observed = again(an_observation(seen=a_seen(running=False, incidents=(told(),))), NOW)
    waits = again(replace(observed, seen=a_seen(running=False)), NOW + 10)
    assert waits.job.status.incidents[0].open
    trains = again(replace(waits, seen=a_seen()), NOW + 20)
    assert not trains.job.status.incidents[0].open
    later = told(id="lm-2", cause="WorkerHung")
    hung = again(replace(trains, seen=a_seen(running=False, incidents=(later,))), NOW + 86400)
    assert [i.id for i in hung.job.status.incidents] == ["lm-1", "lm-2"]
    assert hung.job.status.restarts.by_cause == {"WorkerDied": 1, "WorkerHung": 1}


def test_a_suspension_ends_the_interruption_and_its_hours_are_no_recovery() -> None:
    away = NodeFact(name="node-1", not_ready_for=61.0, why="no heartbeat")
    nodes = {f"node-{s}": NodeFact(name=f"node-{s}") for s in range(9)}
    lost = an_observation(nodes={**nodes, "node-1": away}, seen=a_seen(running=False))
    lost = again(again(lost, NOW), NOW + 1)
    assert lost.job.status.incidents[0].open
    suspended = replace(lost.job, spec=a_job(a_spec(suspend=True)).spec, generation=2)
    observed = replace(lost, job=suspended, pods=(), seen=None)
    for seconds in (20, 21, 3600):
        assert "Recovered" not in {e.reason for e in plan(observed, NOW + seconds).events}
        observed = again(observed, NOW + seconds)
    (recovering,) = [c for c in observed.job.status.conditions if c.type == "Recovering"]
    assert "it ended before the job had recovered" in recovering.message
    assert observed.job.status.state == "Suspended"
    assert not any(i.open for i in observed.job.status.incidents)
    assert not any(r.incident for r in observed.job.status.slots)
    resumed = replace(observed.job, spec=a_job().spec, generation=3)
    held = [(r.slot, r.attempt) for r in observed.job.status.slots]
    pods = tuple(a_pod(s, a, node=f"node-{3 + s}") for s, a in held)
    observed = replace(observed, job=resumed, pods=pods, nodes=nodes, seen=a_seen(held))
    for seconds in (3610, 3611):
        observed = again(observed, NOW + seconds)
    assert sum(t.seconds for t in observed.job.status.recoveries) < 60


def sized(observed: Observed, replicas: int) -> Observed:
    """The job of this size, which has heard of it."""
    job = a_job(a_spec(replicas=replicas), status=observed.job.status)
    return replace(observed, job=job, verdicts={})


def marks_of(observed: Observed) -> list[tuple[str, bool, list[str]]]:
    return [(i.id, i.open, [m.name for m in i.marks]) for i in observed.job.status.incidents]


def leaving(cause: str) -> Observed:
    """Slot 2 was asked to leave."""
    if cause == "ScaledDown":
        return again(sized(an_observation(), 2), NOW)
    convicted = {"node-2": a_verdict("node-2", NodeState.LEAVING)}
    return again(an_observation(verdicts=convicted), NOW)


@pytest.mark.parametrize(
    ("cause", "name"), [("ScaledDown", "scaleddown-2-1"), ("NodeLeaving", "inc-1")]
)
def test_a_request_to_leave_that_is_withdrawn_ends_its_incident(cause: str, name: str) -> None:
    asked = leaving(cause)
    assert marks_of(asked) == [(name, True, ["leave"])]
    stays = sized(asked, 3)
    events = []
    for at in (1, 2, 3):
        planned = plan(stays, NOW + at)
        events += [e.reason for e in planned.events]
        stays = again(stays, NOW + at)
    assert marks_of(stays) == [(name, False, ["leave", "withdrawn"])]
    assert planned.wanted is not None
    assert planned.wanted.incident == ""
    assert "Recovered" not in events, "nothing was interrupted"
    assert planned.status.restarts is not None
    assert planned.status.restarts.total == 0
    recovering = find_condition(planned.status, "Recovering")
    assert recovering is not None
    assert "withdrawn before anything had moved" in recovering.message


def test_a_slot_that_has_to_leave_after_all_continues_its_incident() -> None:
    stays = again(again(sized(leaving("ScaledDown"), 3), NOW + 1), NOW + 2)
    smaller = again(sized(stays, 2), NOW + 3)
    assert marks_of(smaller) == [("scaleddown-2-1", True, ["leave"])]
    left = replace(smaller, seen=a_seen(((0, 1), (1, 1)), epoch=2, left=(a_left(2),)))
    gone = replace(again(left, NOW + 4), pods=left.pods[:2])
    ((_, open_, marks),) = marks_of(again(gone, NOW + 5))
    assert not open_
    assert marks[-1] == "running"


def test_an_incident_ends_once_those_of_its_slots_that_still_have_to_leave_have_left() -> None:
    smaller = again(sized(an_observation(), 1), NOW)
    two = again(sized(smaller, 2), NOW + 1)
    assert [r.leaving_since is not None for r in two.job.status.slots] == [False, False, True]
    left = replace(two, seen=a_seen(((0, 1), (1, 1)), epoch=2, left=(a_left(2),)))
    gone = replace(again(left, NOW + 2), pods=left.pods[:2])
    ((_, open_, marks),) = marks_of(again(gone, NOW + 3))
    assert not open_
    assert marks[-1] == "running"


def test_the_next_fault_of_a_node_that_was_released_is_another_incident() -> None:
    released = again(again(sized(leaving("NodeLeaving"), 3), NOW + 1), NOW + 2)
    verdict = a_verdict("node-2", NodeState.LEAVING, incident="inc-2")
    convicted = replace(released, verdicts={"node-2": verdict})
    assert [i.id for i in incidents_after(convicted, NOW + 900) if i.open] == ["inc-2"]
