"""The operator's complete level document for the agents."""

from collections.abc import Sequence

from everstep_contract import names
from everstep_contract.levels import DeadAgent, JobSettings, Peer, SlotAttempt, Stop, Wanted
from everstep_contract.report import Cause
from everstep_operator.jobs.membership import Leave
from everstep_operator.jobs.observed import Ended, Observed, Pod
from everstep_operator.jobs.yields import decide_yields
from everstep_operator.model import JobSpec
from everstep_operator.model_status import SlotStatus

FIRST_INCARNATION = 1
"""Agents count the starts of their container from 1; the kubelet counts restarts from 0."""


def build_wanted(
    observed: Observed,
    records: Sequence[SlotStatus],
    leaving: Sequence[Leave] = (),
    stop: Stop = Stop.NONE,
) -> Wanted:
    """The sender fills in `revision`."""
    spec = observed.job.spec
    assert spec is not None
    current = _current(observed, records)
    asked = [d for d in leaving if not d.hold]
    return Wanted(
        generation=observed.job.generation,
        min_workers=spec.workers.least,
        want_workers=spec.workers.replicas,
        max_workers=spec.workers.most,
        peers=tuple(_peer(pod, observed) for pod in current if pod.ip and not pod.over),
        leave=tuple(sorted({d.slot for d in asked})),
        leave_reason=asked[0].message if asked else "",
        hold=tuple(sorted({d.slot for d in leaving if d.hold})),
        dead=tuple(d for pod in observed.pods for d in _dead(pod)),
        gone=tuple(
            SlotAttempt(slot=r.slot, attempt=r.attempt - 1) for r in records if r.attempt > 1
        ),
        yields=decide_yields(observed, records),
        watched=_watched(observed, current),
        judged=_judged(observed),
        stop=stop,
        save_every_steps=spec.checkpoint.every_steps or 0,
        save_every_seconds=spec.checkpoint.save_seconds,
        settings=build_settings(spec),
        pin=spec.checkpoint.pin or "",
        incident=_choose_incident(observed, leaving),
    )


def build_settings(spec: JobSpec) -> JobSettings:
    """The settings that an edit of the spec changes in running pods."""
    recovery, guard = spec.recovery, spec.guard
    return JobSettings(
        hang_seconds=float(recovery.hang_seconds),
        startup_seconds=float(recovery.startup_seconds),
        drain_seconds=float(recovery.drain_timeout_seconds),
        gang_seconds=float(recovery.gang_seconds),
        keep=spec.checkpoint.keep,
        guard_factor=float(guard.factor),
        guard_action=guard.action.value,
        in_place=recovery.in_place,
        on_loss=recovery.on_loss.value,
        below_min_seconds=float(recovery.below_min_seconds),
        max_redo_seconds=float(recovery.max_redo_seconds),
    )


def _current(observed: Observed, records: Sequence[SlotStatus]) -> list[Pod]:
    pods = (observed.pod_of(r.slot, r.attempt) for r in records)
    return [pod for pod in pods if pod is not None]


def _peer(pod: Pod, observed: Observed) -> Peer:
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    node = observed.nodes.get(pod.node)
    return Peer(
        slot=pod.slot,
        attempt=pod.attempt,
        address=f"{host}:{names.AGENT_PORT}",
        node=pod.node,
        rack=node.rack if node is not None else "",
    )


def _dead(pod: Pod) -> tuple[DeadAgent, ...]:
    """The newest container run that the kubelet reports as ended; earlier runs ended before it.

    If its exit report names a process that survives SIGKILL, the container's end does not prove
    that the process has ended. Then the other pods continue only once the slot has a new attempt.
    """
    ended = None if pod.ended is None or _holds_stuck(pod.ended) else pod.ended
    lives = pod.restarts + (1 if ended is not None else 0)
    if not lives:
        return ()
    incarnation, last = FIRST_INCARNATION + lives - 1, ended or pod.last_ended
    reason = f"{last.reason or 'ended'}, exit status {last.exit_code}" if last is not None else ""
    return (DeadAgent(slot=pod.slot, attempt=pod.attempt, incarnation=incarnation, reason=reason),)


def _holds_stuck(ended: Ended) -> bool:
    return ended.report is not None and ended.report.cause is Cause.PROCESS_STUCK


def _watched(observed: Observed, current: Sequence[Pod]) -> tuple[int, ...]:
    return tuple(sorted({pod.slot for pod in current if pod.node in observed.judged_ages}))


def _judged(observed: Observed) -> tuple[str, ...]:
    """Ids of the deaths by device that happened before the newest exporter page on which their node
    was judged.

    Both ages are durations up to now, so the clocks of two hosts are not compared.
    """
    found = []
    for death in observed.seen.device_deaths if observed.seen else ():
        pod = observed.pod_of(death.slot, death.attempt)
        age = observed.judged_ages.get(pod.node) if pod is not None else None
        if age is not None and age < observed.seen_age + death.age_ms / 1000:
            found.append(death.id)
    return tuple(found)


def _choose_incident(observed: Observed, leaving: Sequence[Leave]) -> str:
    """A spare that leaves interrupts nothing."""
    moved = [d.incident for d in leaving if not d.spare]
    return moved[0] if moved else _open_incident(observed)


def _open_incident(observed: Observed) -> str:
    found = [i.id for i in observed.job.status.incidents if i.open and i.attempt is not None]
    return found[-1] if found else ""
