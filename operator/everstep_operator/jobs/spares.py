"""What status reports about a job's spares. Pure."""

from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.jobs.stamps import to_seconds
from everstep_operator.model_status import SparesStatus


def build_spares(observed: Observed) -> SparesStatus | None:
    """None: the job has no spares, and none is wanted. No label marks a pod as a spare: it may
    become a member within a second, and the operator has no right to change pods.
    """
    spec, seen = observed.job.spec, observed.seen
    if spec is None or spec.suspend:
        return None
    if seen is None and observed.job.status.spares is not None:
        return observed.job.status.spares
    told = seen.spares if seen is not None and observed.running else ()
    ready = sorted({s.slot for s in told})
    desired = observed.spares_wanted
    if not (ready or desired or spec.workers.spares):
        return None
    return SparesStatus(
        ready=len(ready),
        desired=desired,
        slots=ready[:64],
        message=_describe(observed, ready)[:1024] or None,
    )


def count_seconds(observed: Observed, now: float) -> int | None:
    """Seconds for which spares have held a node, added up over pods. None: the job has had no
    spares.

    Pods that hold a node now, and held it when status was last written, count from then on. Whole
    seconds, like those of `observedAt`, so that nothing counts twice.
    """
    old, spares = observed.job.status, observed.slots.spares
    known = {(r.slot, r.pod_uid, r.node) for r in old.slots}
    held = sum(
        p.slot in spares and (p.slot, p.uid, p.node) in known and bool(p.node) and not p.over
        for p in observed.pods
    )
    if not held:
        return old.spare_seconds
    since = to_seconds(old.observed_at)
    passed = max(0, int(now) - int(since)) if since is not None else 0
    return (old.spare_seconds or 0) + held * passed


def _describe(observed: Observed, ready: list[int]) -> str:
    spec = observed.job.spec
    assert spec is not None
    if observed.lent:
        return "given back, because pods of other jobs wait for room"
    if len(ready) >= observed.spares_wanted:
        early = observed.spares_wanted > spec.workers.spares
        return "one more, because a node of the job is suspect" if early else ""
    if observed.spare_refusal is not None:
        return observed.spare_refusal.message
    pods = [p for p in observed.pods if p.slot in observed.slots.spares]
    return next(filter(None, map(_why_not_ready, pods)), "")


def _why_not_ready(pod: Pod) -> str:
    if not pod.node and pod.scheduling:
        return f"pod {pod.name}: {pod.scheduling}"
    return f"pod {pod.name}: {pod.waiting}" if pod.waiting else ""
