"""Which nodes a slot's next pod excludes, which it uses only if there is no other, and when a
pending pod is replaced. Pure.

A pod's affinity cannot be changed: only a new pod can use a node that the present one excludes by
name. So only a verdict, silence or a failed start excludes a node; after a suspicion, pods only
prefer other nodes.
"""

import heapq
import itertools
from collections.abc import Collection, Iterable, Sequence

from everstep_operator.affinity import avoided_by
from everstep_operator.jobs import budgets, starts
from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.model_status import SlotStatus
from everstep_operator.values import NodeState, NodeVerdict

RESCHEDULED = "Rescheduled"
"""Cause of an attempt that replaces a pod that excluded too many nodes."""


NAMED_NODES = 32
"""How many nodes a pod excludes by name at most, and how many it only avoids: each is a field of
its own in the pod, which the scheduler evaluates for each node. A cordon keeps pods away by itself,
so nodes without one come first.
"""


def is_left(verdict: NodeVerdict | None) -> bool:
    """Whether jobs have to leave the node. A suspicion is not enough to exclude it from a pod that
    may be pending for long.
    """
    return verdict is not None and verdict.state in (NodeState.LEAVING, NodeState.GONE)


def nodes_left(observed: Observed) -> tuple[str, ...]:
    """Nodes that jobs have to leave, the most important first, and then silent nodes: until
    Kubernetes taints a silent node, the scheduler considers it healthy. The shortest silence comes
    first, because after a long one the node has its taint.
    """
    left = _choose_named(verdict for verdict in observed.verdicts.values() if is_left(verdict))
    silent = observed.silent_nodes
    return *left, *heapq.nsmallest(NAMED_NODES, silent, key=lambda node: (silent[node], node))


def nodes_suspected(observed: Observed) -> tuple[str, ...]:
    verdicts = observed.verdicts.values()
    return _choose_named(v for v in verdicts if v.state is NodeState.SUSPECT)


def _choose_named(verdicts: Iterable[NodeVerdict]) -> tuple[str, ...]:
    return tuple(v.node for v in heapq.nsmallest(NAMED_NODES, verdicts, key=_rank))


def _bound(*kinds: Iterable[str]) -> frozenset[str]:
    """The first `NAMED_NODES` of them, each once."""
    return frozenset(itertools.islice(dict.fromkeys(itertools.chain(*kinds)), NAMED_NODES))


def _rank(verdict: NodeVerdict) -> tuple[bool, bool, float, str]:
    """Sort key: nodes without a cordon first, then those beyond the cordon budget, then those with
    the newest verdict.
    """
    marks = verdict.marks
    return "cordon" in marks, not verdict.over_budget, -marks.get("verdict", 0.0), verdict.node


def nodes_to_avoid(
    left: Sequence[str], shared: Sequence[str], record: SlotStatus, now: float
) -> frozenset[str]:
    """Nodes that the slot's next pod excludes. `left` comes from `nodes_left`, `shared` from
    `starts.list_shared`; they are the same for all slots of a job.

    The slot's own failures come first: they are few, and the scheduler would choose the same node
    again.
    """
    if record.cause == RESCHEDULED:
        return _bound(left)
    return _bound(sorted(starts.find_own(record, now)), left, shared)


def nodes_to_shun(
    suspected: Sequence[str], shared: Sequence[str], record: SlotStatus, now: float
) -> frozenset[str]:
    """Nodes that the slot's next pod uses only if there is no other: those on which pods failed to
    start, the one that this slot had to leave (an operator that counted the attempt may have died
    before it marked the node), and suspect nodes (`nodes_suspected`).
    """
    former = record.former_node if budgets.is_node_cause(record.cause) else None
    own = sorted(starts.find_own(record, now))
    return _bound(own, [former] if former else (), shared, suspected)


def _is_avoided(observed: Observed, node: str) -> bool:
    fact = observed.nodes.get(node)
    away = fact is not None and fact.not_ready_for is not None
    return away or node in observed.silent_nodes or is_left(observed.verdicts.get(node))


def find_freed(
    observed: Observed, shared: Collection[str], record: SlotStatus, pod: Pod, now: float
) -> frozenset[str]:
    """Existing nodes that a pending pod excludes although there is no (or no longer enough) evidence
    against them.
    """
    if not pod.avoids or not pod.scheduling or pod.over or pod.deleting:
        return frozenset()
    users = avoided_by(observed.job.raw_template.get("spec") or {})
    named = pod.avoids - users - observed.absent_nodes
    found = frozenset(n for n in named if not _is_avoided(observed, n))
    if observed.unplaced_for.get(pod.uid, 0.0) <= starts.build_unplaced_pause(record, now):
        found -= starts.find_failed(shared, record, now)
    return found
