"""The attempts of a job's slots. A new attempt is counted before the operator acts on it, pods are
recorded in status while they exist, and pods of former attempts are deleted.
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
    """Count first: this plan raises attempts and restarts in status, and the pass ends."""
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
    """Record what must be known about a pod once it has vanished, and since when its slot has been
    asked to leave.
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
    # Of thousands of slots, few change in one pass, and a copy costs more than all decisions about
    # a slot.
    same = all(getattr(record, name) == value for name, value in noted.items())
    return record if same else record.model_copy(update=noted)


def _open_incident(observed: Observed, record: SlotStatus) -> str | None:
    """The incident that moves the slot, until the slot trains again, is a spare, or no longer has
    to leave.
    """
    trained = observed.whole or observed.is_member(record.slot, record.attempt)
    trains = observed.running and trained
    return None if trains or record.leaving_since else record.incident


def plan_former(observed: Observed, records: Sequence[SlotStatus]) -> tuple[Action, ...]:
    """Delete pods of former attempts. They are fenced, and `wanted.gone` has reported them to the
    job.
    """
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
                name=pod.name,
                uid=pod.uid,
                slot=pod.slot,
                reason="FormerAttempt",
                message=why,
                urgent=record.incident is not None,
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
