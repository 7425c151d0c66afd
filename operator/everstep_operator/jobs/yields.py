"""Yields: silent pods that the job may leave out before the operator gives up their nodes. Pure.

Nothing proves that a silent pod is dead, so its attempt must not rise while it may still take steps
that no other pod knows of. The run log decides: the operator allows the job to leave the pod out
(`wanted.yields`), the job claims an epoch without it if it can, and reports the claim
(`seen.yielded`). From then on the pod's steps no longer count, and its slot's attempt may rise.

Two observers must agree on the silence: the node's lease, and the other pods of the job. A job that
takes steps needs no yield: a silent pod either takes part in its steps or is not a member any more.
"""

from collections.abc import Iterator, Sequence

from everstep_contract.levels import SlotAttempt, Yield
from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.model_status import SlotStatus


def decide_yields(observed: Observed, records: Sequence[SlotStatus]) -> tuple[Yield, ...]:
    """The yields for `wanted`. A yield that the job has used stays until the slot's attempt has
    risen.
    """
    if not observed.silent_nodes or observed.seen is None:
        return ()
    return tuple(_list_yields(observed, records))


def _list_yields(observed: Observed, records: Sequence[SlotStatus]) -> Iterator[Yield]:
    seen = observed.seen
    assert seen is not None
    used = {(y.slot, y.attempt): y for y in seen.yielded}
    for record in records:
        place = record.slot, record.attempt
        pod = observed.pod_of(*place)
        if pod is None or not is_node_silent(observed, pod.node):
            continue
        if place in used:
            yield used[place]
        elif is_awaited(observed, *place):
            yield Yield(slot=record.slot, attempt=record.attempt, epoch=seen.epoch)


def is_awaited(observed: Observed, slot: int, attempt: int) -> bool:
    """Whether the job's other pods receive nothing from this member of the last epoch, and take no
    steps.
    """
    seen = observed.seen
    if seen is None or seen.running or not seen.epoch:
        return False
    return SlotAttempt(slot=slot, attempt=attempt) in seen.silent


def is_node_silent(observed: Observed, node: str) -> bool:
    """Whether the node has been silent for at least `recovery.replaceAfterSeconds`."""
    spec, seconds = observed.job.spec, observed.silent_nodes.get(node)
    return spec is not None and seconds is not None and seconds >= spec.recovery.replace_seconds


def describe_left_out(observed: Observed, pod: Pod) -> str:
    """Why this pod on a silent node may be replaced; empty if it may not, because the newest claim
    is not known to leave it out.
    """
    spec, seen = observed.job.spec, observed.seen
    if spec is None or seen is None or not is_node_silent(observed, pod.node):
        return ""
    used = any((y.slot, y.attempt) == (pod.slot, pod.attempt) for y in seen.yielded)
    # An epoch that leaves out a silent member is claimed before it steps.
    steps_on = observed.running and not observed.is_member(pod.slot, pod.attempt)
    if not used and not steps_on:
        return ""
    return (
        f"node {pod.node} has renewed no lease for more than {spec.recovery.replace_seconds} s "
        f"(recovery.replaceAfterSeconds), and the job goes on without slot {pod.slot}"
    )


def has_silent_node(observed: Observed, records: Sequence[SlotStatus]) -> bool:
    """Whether a pod of a current attempt is on a node that is silent, for however long."""
    if not observed.silent_nodes:
        return False
    pods = (observed.pod_of(r.slot, r.attempt) for r in records)
    return any(pod is not None and pod.node in observed.silent_nodes for pod in pods)
