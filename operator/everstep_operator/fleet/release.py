"""Quarantines whose object is not there any more: released, put back, or left alone.

Only a deletion that we observed releases: the object was seen alive by this operator, is absent
from a good list for a while, and its kind can still be created (while a CRD is being deleted it
cannot). A mark whose object we never saw is put back, so that it can be deleted again; and if many
lose their object at once, somebody lost a CRD or a backup, not a fault: nothing is released.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from everstep_operator.evidence import Evidence, Finding, is_known, still_applies
from everstep_operator.nodes import Mark, NodeFacts
from everstep_operator.quarantines import Quarantine, binds
from everstep_operator.values import NodeState

REASON_RELEASED = "NodeReleased"
REASON_RESTORED = "QuarantineRestored"
REASON_MANY = "ManyQuarantinesLost"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMemory:
    """Soft: with none of it nothing is released that should not be."""

    alive: Mapping[str, Quarantine] = field(default_factory=lambda: MappingProxyType({}))
    """Last copy of every quarantine that this operator has seen, until its deletion is dealt
    with: these stand, whatever the last list says."""
    absent_since: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    refused: frozenset[str] = frozenset()
    """Lost together with many others: not released while they are absent."""
    repaired_at: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """By node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    release: tuple[str, ...] = ()
    restore: tuple[Quarantine, ...] = ()
    waiting: frozenset[str] = frozenset()
    """Absent, and not yet decided: leave their nodes as they are."""
    many: int = 0
    memory: FleetMemory


def find_absent(
    nodes: Mapping[str, NodeFacts], listed: Iterable[Quarantine], memory: FleetMemory
) -> frozenset[str]:
    """Names that a mark or our memory tells of, and the list does not."""
    there = {q.name for q in listed if not q.deleting}
    marked = {node.mark.quarantine for node in nodes.values() if node.mark is not None}
    open_ = {name for name, q in memory.alive.items() if not _is_settled(q, nodes)}
    return frozenset((marked | open_) - there)


def _is_settled(quarantine: Quarantine, nodes: Mapping[str, NodeFacts]) -> bool:
    """Nothing of it is left to do: its node is gone or another machine, or has the answer on it."""
    node = nodes.get(quarantine.node)
    if node is None or not binds(quarantine, node):
        return True
    if node.mark is not None and node.mark.quarantine == quarantine.name:
        return False
    return all(
        is_known(one, node.answered) or not still_applies(one, machine=node.machine, boot=node.boot)
        for one in quarantine.evidence
    )


def decide_losses(
    nodes: Mapping[str, NodeFacts],
    listed: Iterable[Quarantine],
    memory: FleetMemory,
    *,
    creatable: bool,
    many: int,
    settle_seconds: float,
    now: float,
) -> Losses:
    listed = tuple(listed)
    absent = find_absent(nodes, listed, memory)
    memory = _remember(memory, listed, absent, now)
    if len(absent) > many:
        memory = _refuse(memory, nodes, absent)
    seen = (absent & set(memory.alive)) - memory.refused
    ripe = {n for n in seen if creatable and now - memory.absent_since[n] >= settle_seconds}
    unseen = absent - seen
    restore = [_from_mark(node) for node in nodes.values() if _names(node, unseen)]
    return Losses(
        release=tuple(sorted(ripe)),
        restore=tuple(sorted(restore, key=lambda q: q.name)) if creatable else (),
        waiting=absent,
        many=len(absent) if len(absent) > many else 0,
        memory=memory,
    )


def _remember(
    memory: FleetMemory, listed: tuple[Quarantine, ...], absent: frozenset[str], now: float
) -> FleetMemory:
    there = {q.name: q for q in listed if not q.deleting}
    alive = {n: q for n, q in memory.alive.items() if n in absent} | there
    since = {n: memory.absent_since.get(n, now) for n in absent}
    return replace(
        memory,
        alive=MappingProxyType(alive),
        absent_since=MappingProxyType(since),
        refused=memory.refused & absent,
    )


def _refuse(
    memory: FleetMemory, nodes: Mapping[str, NodeFacts], absent: frozenset[str]
) -> FleetMemory:
    """Those that marked no node are forgotten: if what they told of still holds, it is found
    again."""
    marked = {node.mark.quarantine for node in nodes.values() if node.mark is not None}
    alive = {n: q for n, q in memory.alive.items() if n not in absent or n in marked}
    return replace(
        memory, alive=MappingProxyType(alive), refused=memory.refused | (absent & marked)
    )


def _names(node: NodeFacts, unseen: frozenset[str]) -> bool:
    return node.mark is not None and node.mark.quarantine in unseen


def _from_mark(node: NodeFacts) -> Quarantine:
    mark = node.mark
    assert mark is not None
    return Quarantine(
        name=mark.quarantine,
        node=node.name,
        machine=node.machine,
        incident=mark.incident,
        verdict=NodeState.GONE if mark.verdict == NodeState.GONE.value else NodeState.LEAVING,
        reason=mark.reason or REASON_RESTORED,
        message=mark.message or f"node {node.name}: put back from the node's annotation",
        cordon=True,
        decided_at=mark.decided_at or mark.at,
        evidence=mark.evidence,
    )


def with_deleted(memory: FleetMemory, quarantine: Quarantine) -> FleetMemory:
    """A watch saw it deleted: it was alive."""
    if quarantine.name in memory.alive:
        return memory
    return replace(memory, alive=MappingProxyType({**memory.alive, quarantine.name: quarantine}))


def build_probe(now: float) -> Quarantine:
    """An object that is never stored: whether it could be is the question."""
    return Quarantine(
        name="everstep-probe",
        node="none",
        machine="none",
        incident="none",
        verdict=NodeState.LEAVING,
        reason="Probe",
        message="never stored",
        cordon=False,
        decided_at=now,
        evidence=(),
    )


def choose_nodes(
    name: str, nodes: Mapping[str, NodeFacts], memory: FleetMemory
) -> tuple[NodeFacts, ...]:
    """Those that bear its mark, and the one that it was written for if the answer is still missing
    there."""
    found = {n.name: n for n in nodes.values() if n.mark and n.mark.quarantine == name}
    held = memory.alive[name]
    if not _is_settled(held, nodes):
        found[held.node] = nodes[held.node]
    return tuple(found.values())


def choose_answered(
    name: str, memory: FleetMemory, mark: Mark | None, finding: Finding
) -> tuple[Evidence, ...]:
    """What the release of this quarantine answers: its evidence, in the newest form in which it
    shows."""
    known: list[Evidence] = list(memory.alive[name].evidence) if name in memory.alive else []
    if mark is not None and mark.quarantine == name:
        known += mark.evidence
    keys = {one.key for one in known}
    shown = [claim.evidence for claim in finding.claims if claim.evidence.key in keys]
    return (*known, *shown)
