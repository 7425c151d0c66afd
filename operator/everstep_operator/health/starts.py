"""Pods that fail to start, of any job, as a signal about their node. Pure except for its memory.

The signal makes the node suspect and nothing more: a kubelet, a disk, a network or the pods
themselves may be at fault. A job that fails on many nodes is evidence about itself, not about
them. The record is kept in the jobs' statuses, and reported again after a restart.
"""

from collections.abc import Mapping

from everstep_operator.world import Key

REASON_STARTS = "PodsFailToStart"
SLOTS_AGAINST_A_NODE = 2
NODES_AGAINST_A_JOB = 3
"""A job whose pods fail on more nodes than this is ignored."""


class StartFailures:
    def __init__(self) -> None:
        self._by_job: dict[Key, Mapping[str, int]] = {}

    def note(self, job: Key, nodes: Mapping[str, int]) -> bool:
        """Replaces the job's record; returns whether it changed."""
        before = self._by_job.get(job, {})
        if nodes:
            self._by_job[job] = dict(nodes)
        else:
            self._by_job.pop(job, None)
        return before != nodes

    def count(self) -> dict[str, int]:
        """Node → slots, for nodes with enough failures."""
        slots: dict[str, int] = {}
        for nodes in self._by_job.values():
            for node, count in nodes.items() if len(nodes) <= NODES_AGAINST_A_JOB else ():
                slots[node] = slots.get(node, 0) + count
        return {node: count for node, count in slots.items() if count >= SLOTS_AGAINST_A_NODE}
