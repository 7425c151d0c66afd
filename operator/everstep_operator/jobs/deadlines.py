"""When a job that waits for room gets its next pass if nothing happens. Pure.

The pods of such a job find no node, or a quota keeps them out, and the job has not begun its first
epoch. It may wait for days, and there may be thousands of such jobs. What it waits for wakes it:
its pods, its spec, a verdict on a node that its pods exclude, the readiness of a node that it
holds, or another job. Otherwise only time changes anything: each limit in the table of waits in the
operator's `README.md` that may apply to such a job has a line here. A pass between two of these
limits would find nothing to do.
"""

import math
from collections.abc import Iterator

from everstep_operator.jobs import failures, gang, membership, starts, waiting
from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.jobs.stamps import to_seconds

MARGIN_SECONDS = 0.5
"""Added to each limit, because a limit is exceeded only after it, not exactly at it."""
UNHEARD_SECONDS = 10.0
"""Between two passes of a job whose agents have fallen silent: no event reports that they answer
again.
"""


def waits_for_room(observed: Observed, now: float) -> bool:
    """Whether the job has had no epoch yet, and a pod of it has no node or is refused by the API
    server.
    """
    status, seen = observed.job.status, observed.seen
    if status.epoch or (seen is not None and seen.epoch):
        return False
    current = {r.slot: r.attempt for r in status.slots}
    unplaced = any(not p.node and p.attempt == current.get(p.slot) for p in observed.pods)
    return unplaced or waiting.is_held_back(observed, now)


def find_next(observed: Observed, now: float) -> float | None:
    """Seconds until the job's next limit; None: only an event can change anything."""
    moments = (*_of_job(observed, now), *_of_pods(observed, now))
    return min(
        (m + MARGIN_SECONDS - now for m in moments if m + MARGIN_SECONDS > now), default=None
    )


def _of_job(observed: Observed, now: float) -> Iterator[float]:
    job, spec = observed.job, observed.job.spec
    assert spec is not None
    if (deadline := failures.find_deadline(job, now)) is not None:
        yield deadline
    if observed.refusal is not None:
        yield observed.refusal.at + waiting.refused_seconds(observed.refusal)
    for record in job.status.slots:
        for failure in record.start_failures:
            yield (to_seconds(failure.at) or 0.0) + starts.FORGET_SECONDS
        if (since := to_seconds(record.leaving_since)) is not None:
            seen = observed.leaving_for.get((record.slot, record.attempt), math.inf)
            yield max(since, now - seen) + spec.recovery.drain_timeout_seconds
    if gang.is_short(observed) and (since := waiting.find_since(observed)) is not None:
        yield max(since, now - observed.short_for) + spec.recovery.gang_seconds


def _of_pods(observed: Observed, now: float) -> Iterator[float]:
    records = {r.slot: r for r in membership.build_records(observed)}
    shared = starts.list_shared(observed.job.status.slots, now)
    for pod in observed.pods:
        record = records[pod.slot]
        if pod.attempt != record.attempt:
            continue
        if pod.node:
            yield from _of_placed(observed, pod, now)
        elif pod.avoids & starts.find_failed(shared, record, now):
            pause = starts.build_unplaced_pause(record, now)
            yield now + pause - observed.unplaced_for.get(pod.uid, 0.0)
        if pod.refused_by_node or pod.misconfigured:
            yield pod.created_at + starts.build_refused_pause(record, now)


def _of_placed(observed: Observed, pod: Pod, now: float) -> Iterator[float]:
    spec, node = observed.job.spec, observed.nodes.get(pod.node)
    assert spec is not None
    if node is not None and (lost_for := observed.lost_for(node)) is not None:
        yield now + spec.recovery.node_lost_seconds - lost_for
    if pod.deleting_until is not None:
        yield max(pod.deleting_until, now + pod.grace - observed.deleting_for.get(pod.uid, 0.0))
    if pod.ended is not None:
        yield pod.ended.finished_at + membership.FENCED_SECONDS
    if pod.uid in observed.starting_for:
        yield now + spec.recovery.startup_seconds - observed.starting_for[pod.uid]
    if pod.uid in observed.suspected_for:
        yield now + membership.HOLD_SECONDS - observed.suspected_for[pod.uid]
    if pod.running_since is not None and pod.uid not in observed.callers:
        yield from _of_silent(observed, pod, now)


def _of_silent(observed: Observed, pod: Pod, now: float) -> Iterator[float]:
    """Limits of a pod whose container runs and whose agent has not answered."""
    spec, asked = observed.job.spec, observed.asked_for.get(pod.uid, 0.0)
    assert spec is not None
    assert pod.running_since is not None
    limit = spec.recovery.startup_seconds
    yield max(pod.running_since + limit, now + limit - asked)
    yield now + min(failures.CALL_SECONDS, limit) - asked
    if observed.seen is not None and not observed.fresh:
        yield now + UNHEARD_SECONDS
