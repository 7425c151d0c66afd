"""All nodes as facts, updated node by node, so that an event about one node does not cost a scan of
the others.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from everstep_operator.nodes import Mark, NodeFacts, to_facts
from everstep_operator.world import Mirror


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Views of `LiveRoster`'s content: a pass must finish with them before the next refresh."""

    nodes: Mapping[str, NodeFacts]
    """By name."""
    marked: Collection[str]
    """Nodes with Everstep's mark."""
    stale: Collection[str] = ()
    """Nodes with a mark of the machine that had their name before."""
    gpu_nodes: int


def build_roster(nodes: Mapping[str, NodeFacts]) -> Roster:
    return Roster(
        nodes=nodes,
        marked=[node.name for node in nodes.values() if node.mark is not None],
        stale=[node.name for node in nodes.values() if node.stale is not None],
        gpu_nodes=sum(node.has_gpus for node in nodes.values()),
    )


def list_marks(roster: Roster) -> Iterator[tuple[NodeFacts, Mark]]:
    for name in sorted(roster.marked):
        node = roster.nodes[name]
        if node.mark is not None:
            yield node, node.mark


class LiveRoster:
    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._changed = mirror.follow()
        self._nodes: dict[str, NodeFacts] = {}
        self._marked: set[str] = set()
        self._stale: set[str] = set()
        self._with_gpus: set[str] = set()
        self.now = self._view()

    def refresh(self) -> frozenset[str]:
        """Read the nodes that have changed since the last call; return their names, including those
        of deleted nodes.
        """
        changed = frozenset(self._changed)
        self._changed.clear()
        for name in changed:
            self._read(name)
        self.now = self._view()
        return changed

    def _view(self) -> Roster:
        return Roster(
            nodes=self._nodes,
            marked=self._marked,
            stale=self._stale,
            gpu_nodes=len(self._with_gpus),
        )

    def _read(self, name: str) -> None:
        self._marked.discard(name)
        self._stale.discard(name)
        self._with_gpus.discard(name)
        found = self._mirror.get(name)
        if found is None:
            self._nodes.pop(name, None)
            return
        facts = self._nodes[name] = to_facts(found)
        if facts.mark is not None:
            self._marked.add(name)
        if facts.stale is not None:
            self._stale.add(name)
        if facts.has_gpus:
            self._with_gpus.add(name)
