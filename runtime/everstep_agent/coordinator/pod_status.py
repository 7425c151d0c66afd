"""What the operator reports about the job's pods: terminated containers, pods declared gone,
current attempts. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from everstep_agent.peers.epoch_level import EpochMember
from everstep_contract import levels

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodStatus:
    """The pods' status according to `Wanted`. Indexed once, so that a question about a pod takes
    one look-up.
    """

    current: Mapping[int, int]
    """Slot → newest attempt according to the operator."""
    gone: Mapping[int, int]
    """Slot → newest attempt that is declared gone; this covers all earlier attempts."""
    dead: Mapping[tuple[int, int], levels.DeadAgent]
    """(slot, attempt) → the newest container that terminated."""
    nodes: Mapping[tuple[int, int], str]
    """(slot, attempt) → the node of the pod."""

    def describe_slot(self, member: EpochMember) -> str:
        """The member's slot, and its node if that is known."""
        node = self.nodes.get((member.slot, member.attempt), "")
        return f"slot {member.slot} on node {node}" if node else f"slot {member.slot}"

    def is_gone(self, slot: int, attempt: int) -> bool:
        return self.gone.get(slot, -1) >= attempt

    def is_dead(self, slot: int, attempt: int, incarnation: int) -> bool:
        newest = self.dead.get((slot, attempt))
        return newest is not None and newest.incarnation >= incarnation

    def why_dead(self, slot: int, attempt: int, incarnation: int) -> str:
        """The reason that the kubelet gave; empty if it is not known."""
        newest = self.dead.get((slot, attempt))
        return newest.reason if newest is not None and newest.incarnation == incarnation else ""

    def is_replaced(self, slot: int, attempt: int) -> bool:
        """Whether a newer attempt of the slot is current."""
        return self.current.get(slot, -1) > attempt

    def list_over(self, members: Iterable[EpochMember]) -> frozenset[tuple[int, int]]:
        """(slot, attempt) of members that no longer hold state, by proof or by decision."""
        return frozenset(
            (m.slot, m.attempt)
            for m in members
            if self.is_gone(m.slot, m.attempt)
            or self.is_replaced(m.slot, m.attempt)
            or self.is_dead(m.slot, m.attempt, m.incarnation)
        )


def read_pod_status(wanted: levels.Wanted) -> PodStatus:
    return PodStatus(
        current=_newest((p.slot, p.attempt) for p in wanted.peers),
        gone=_newest((g.slot, g.attempt) for g in wanted.gone),
        nodes={(p.slot, p.attempt): p.node for p in wanted.peers},
        dead={(d.slot, d.attempt): d for d in sorted(wanted.dead, key=lambda d: d.incarnation)},
    )


def _newest(pairs: Iterable[tuple[K, int]]) -> Mapping[K, int]:
    found: dict[K, int] = {}
    for key, number in pairs:
        found[key] = max(number, found.get(key, -1))
    return found
