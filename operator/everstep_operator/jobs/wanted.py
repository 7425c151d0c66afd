"""The level document for the agents: what the operator wants at this moment, whole, every time."""

from collections.abc import Sequence

from everstep_contract import names
from everstep_contract.levels import DeadAgent, Peer, SlotAttempt, Stop, Wanted
from everstep_operator.jobs.membership import Leave
from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.model_status import SlotStatus

FIRST_INCARNATION = 1
"""Agents count the lives of their container from here; the kubelet counts restarts from 0."""


def build_wanted(
    observed: Observed,
    records: Sequence[SlotStatus],
    leaving: Sequence[Leave] = (),
    stop: Stop = Stop.NONE,
) -> Wanted:
    """`revision` is filled in by whoever sends it."""
    spec = observed.job.spec
    assert spec is not None
    current = _current(observed, records)
    asked = [d for d in leaving if not d.hold]
    return Wanted(
        generation=observed.job.generation,
        min_workers=spec.workers.least,
        want_workers=spec.workers.replicas,
        max_workers=spec.workers.most,
        peers=tuple(_peer(pod) for pod in current if pod.ip and not pod.over),
        leave=tuple(sorted({d.slot for d in asked})),
        leave_reason=asked[0].message if asked else "",
        hold=tuple(sorted({d.slot for d in leaving if d.hold})),
        dead=tuple(d for pod in observed.pods for d in _dead(pod)),
        gone=tuple(
            SlotAttempt(slot=r.slot, attempt=r.attempt - 1) for r in records if r.attempt > 1
        ),
        stop=stop,
        save_every_steps=spec.checkpoint.every_steps or 0,
        save_every_seconds=spec.checkpoint.save_seconds,
        incident=leaving[0].incident if leaving else _open_incident(observed),
    )


def _current(observed: Observed, records: Sequence[SlotStatus]) -> list[Pod]:
    pods = (observed.pod_of(r.slot, r.attempt) for r in records)
    return [pod for pod in pods if pod is not None]


def _peer(pod: Pod) -> Peer:
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    return Peer(slot=pod.slot, attempt=pod.attempt, address=f"{host}:{names.AGENT_PORT}")


def _dead(pod: Pod) -> tuple[DeadAgent, ...]:
    """The newest life that the kubelet says has ended; the earlier ones ended before it."""
    lives = pod.restarts + (1 if pod.ended else 0)
    if not lives:
        return ()
    incarnation = FIRST_INCARNATION + lives - 1
    return (DeadAgent(slot=pod.slot, attempt=pod.attempt, incarnation=incarnation),)


def _open_incident(observed: Observed) -> str:
    found = [i.id for i in observed.job.status.incidents if i.open and i.attempt is not None]
    return found[-1] if found else ""
