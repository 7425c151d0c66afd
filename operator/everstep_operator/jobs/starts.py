"""Pods that did not start: which nodes their slot's next pods exclude, and how long the next
attempt waits. Pure.

Invariant: a failure moves the slot to another node, and never blocks a job permanently. A node on
which a pod failed is excluded for an hour at most, and for less if the pod finds no other: such a
node is better than none. The waits double, so that neither a bad node nor a bad template is retried
in a tight loop.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.jobs.stamps import to_seconds, to_stamp
from everstep_operator.model_status import SlotStatus, StartFailure

CAUSES = frozenset({"PodNotStarted", "PodRefusedByNode"})
FORGET_SECONDS = 3600.0
"""How long a failure to start counts."""
KEPT = 8
REFUSED_SECONDS = 10.0
"""Wait after a first rejection by a kubelet (a GPU may take seconds to become free), or by the pod's
agent. Doubles with each failure.
"""
LONGEST_REFUSED_SECONDS = 300.0
UNPLACED_SECONDS = 60.0
"""How long a pending pod excludes the nodes on which its slot failed. Doubles with each failure."""
LONGEST_UNPLACED_SECONDS = 600.0
STEADY_SECONDS = 60.0
"""How long a pod must be up to count as started: a crash-looping container is up for moments."""
SLOTS_AGAINST_A_NODE = 2
OF_THE_TEMPLATE = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "RegistryUnavailable",
        "CreateContainerConfigError",
    }
)
"""Kubelet reasons for a missing image, ConfigMap or Secret: another node would report the same."""


def is_up(observed: Observed, pod: Pod) -> bool:
    """Whether its container runs and its agent has answered. A member of a job that trains is up in
    any case.
    """
    if observed.running and observed.is_member(pod.slot, pod.attempt):
        return True
    called = pod.uid in observed.callers or observed.is_member(pod.slot, pod.attempt)
    return pod.running_since is not None and called


def describe_late(observed: Observed, pod: Pod) -> str:
    """Why a pod counts as not started; empty if it is up, or has time left.

    A running container whose agent does not answer is replaced only while other agents of the job
    answer: if none does, the operator's network may be at fault.
    """
    spec, node = observed.job.spec, observed.nodes.get(pod.node)
    if spec is None or not pod.node or is_up(observed, pod):
        return ""
    limit = spec.recovery.startup_seconds
    if observed.starting_for.get(pod.uid, 0.0) <= limit or node is None:
        return ""
    if node.not_ready_for is not None:
        return ""
    if pod.running_since is not None:
        asked = observed.asked_for.get(pod.uid, 0.0)
        return "its agent does not answer" if observed.fresh and asked > limit else ""
    words = (pod.waiting, pod.waiting_message)
    return ": ".join(w for w in words if w) or "its container is being created"


def choose_reason(pod: Pod) -> str:
    """Why the pod failed to start, in one word, for the slot's record."""
    if pod.refused_by_node:
        return pod.reason or "Refused"
    found = pod.ended.report if pod.ended is not None else None
    if found is not None and (pod.misconfigured or pod.failed_alone):
        return found.cause.value
    return pod.waiting or ("AgentSilent" if pod.running_since is not None else "ContainerCreating")


def note_failure(record: SlotStatus, node: str, reason: str, now: float) -> list[StartFailure]:
    failure = StartFailure(node=node, at=to_stamp(now), reason=reason[:64])
    return [*_recent(record, now), failure][-KEPT:]


def _recent(record: SlotStatus, now: float) -> list[StartFailure]:
    """The failures of the last hour. One in the future (the clock was set back) counts, too, unless
    it is more than an hour off.
    """
    ages = ((f, now - (to_seconds(f.at) or 0.0)) for f in record.start_failures)
    return [failure for failure, age in ages if abs(age) < FORGET_SECONDS]


def _against_nodes(record: SlotStatus, now: float) -> Iterator[str]:
    return (f.node for f in _recent(record, now) if f.reason not in OF_THE_TEMPLATE)


def count_by_node(records: Sequence[SlotStatus], now: float) -> Mapping[str, int]:
    """Node → number of slots whose pods recently failed to start there for reasons that may be the
    node's.
    """
    slots: dict[str, set[int]] = {}
    for record in records:
        for node in _against_nodes(record, now) if record.start_failures else ():
            slots.setdefault(node, set()).add(record.slot)
    return {node: len(found) for node, found in sorted(slots.items())}


def list_shared(records: Sequence[SlotStatus], now: float) -> tuple[str, ...]:
    """Nodes on which pods of several slots failed, so that no pod of the job should start there.
    Those with the most slots come first.
    """
    counted = count_by_node(records, now).items()
    found = [(-slots, node) for node, slots in counted if slots >= SLOTS_AGAINST_A_NODE]
    return tuple(node for _, node in sorted(found))


def find_own(record: SlotStatus, now: float) -> frozenset[str]:
    return frozenset(f.node for f in _recent(record, now)) if record.start_failures else frozenset()


def find_failed(shared: Collection[str], record: SlotStatus, now: float) -> frozenset[str]:
    """Nodes that the slot's next pod excludes: those on which its own pods failed, and the shared
    ones (`list_shared`).
    """
    return find_own(record, now) | frozenset(shared)


def build_refused_pause(record: SlotStatus, now: float) -> float:
    """Seconds from the creation of a pod that failed at once to the next attempt."""
    return float(min(REFUSED_SECONDS * 2 ** len(_recent(record, now)), LONGEST_REFUSED_SECONDS))


def build_unplaced_pause(record: SlotStatus, now: float) -> float:
    """Seconds that a pod may stay pending before it may use the nodes on which its slot failed."""
    failures = len(_recent(record, now)) if record.start_failures else 1
    return float(min(UNPLACED_SECONDS * 2 ** (failures - 1), LONGEST_UNPLACED_SECONDS))
