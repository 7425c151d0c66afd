"""The attempts of a job's slots: counted before the action, recorded while their pod exists,
removed when over.
"""

from collections.abc import Sequence

from everstep_operator.jobs import conditions, membership, waiting
from everstep_operator.jobs.actions import Action, DeletePod, Plan
from everstep_operator.jobs.membership import Decision, Leave, Raise
from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.model_status import SlotStatus


def plan_count(
    observed: Observed, records: Sequence[SlotStatus], decisions: Sequence[Decision], now: float
) -> Plan:
    """Count first: attempts and restarts rise, and the pass ends."""
    raises = {d.slot: d for d in decisions if isinstance(d, Raise)}
    raised = [
        membership.apply_raise(r, raises[r.slot], now) if r.slot in raises else r for r in records
    ]
    story = waiting.build_job_story(observed, raised, decisions, now)
    status = conditions.build_status(observed, raised, decisions, story, now)
    return Plan(
        status=status,
        counts=True,
        events=conditions.build_events(observed.job.status, status, decisions),
    )


def note_pods(
    observed: Observed,
    records: Sequence[SlotStatus],
    decisions: Sequence[Decision],
    now: float,
) -> list[SlotStatus]:
    """Records what must be known of a pod after it has vanished, and since when it has been asked
    to leave.
    """
    leaves = {d.slot: d for d in reversed(decisions) if isinstance(d, Leave) and not d.hold}
    return [_note_pod(observed, r, leaves.get(r.slot), now) for r in records]


def _note_pod(
    observed: Observed, record: SlotStatus, leave: Leave | None, now: float
) -> SlotStatus:
    pod = observed.pod_of(record.slot, record.attempt)
    noted = {
        "pod_uid": pod.uid if pod else record.pod_uid,
        "node": (pod.node if pod else None) or record.node,
        "leaving_since": (record.leaving_since or to_stamp(now)) if leave else None,
        "incident": leave.incident
        if leave and not leave.spare
        else _open_incident(observed, record),
    }
    # Of thousands of slots few change in one pass, and a copy costs more than all that is decided of a slot.
    same = all(getattr(record, name) == value for name, value in noted.items())
    return record if same else record.model_copy(update=noted)


def _open_incident(observed: Observed, record: SlotStatus) -> str | None:
    """The open incident moves the slot until it trains again, or is a spare, or need not leave any
    more.
    """
    trained = observed.whole or observed.is_member(record.slot, record.attempt)
    trains = observed.running and trained
    return None if trains or record.leaving_since else record.incident


def plan_former(observed: Observed, records: Sequence[SlotStatus]) -> tuple[Action, ...]:
    """Deletes pods of attempts that are over: fenced, reported as gone to the job, and now deleted."""
    current = {r.slot: r for r in records}
    found: list[Action] = []
    for pod in observed.pods:
        record = current.get(pod.slot)
        if record is not None and pod.attempt < record.attempt:
            found += _delete_former(observed, pod, record)
    return tuple(found)


def _delete_former(observed: Observed, pod: Pod, record: SlotStatus) -> list[Action]:
    why = f"slot {pod.slot} is at attempt {record.attempt}: {record.cause or 'replaced'}"
    if not pod.deleting:
        return [
            DeletePod(
                name=pod.name, uid=pod.uid, slot=pod.slot, reason="FormerAttempt", message=why
            )
        ]
    spec, node = observed.job.spec, observed.nodes.get(pod.node)
    lost = node is None or node.not_ready_for is not None
    if spec is None or not spec.recovery.force_delete or not lost:
        return []
    return [
        DeletePod(
            name=pod.name,
            uid=pod.uid,
            slot=pod.slot,
            reason="ForceDelete",
            message=why,
            force=True,
        )
    ]
