"""NodeQuarantines that no longer exist: released, recreated, or left for now.

Only an intended deletion releases a node; any number may be deleted at once. A deletion is
intended if a watch reported it (or only a few objects vanished from a fresh list) while their
CRD stayed unchanged. Deleting a CRD deletes its objects one by one, with ordinary events: so
the CRD must accept new objects, and must be older than the absent object.

Everything else is a loss: many objects that vanish without events (etcd restored to an older
state), a replaced CRD, a mark whose object this operator never saw. What was lost is recreated,
so that it can be deleted again.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from everstep_operator.evidence import Evidence, Finding, is_known, still_applies
from everstep_operator.fleet.memory import FleetMemory, remember, with_deleted
from everstep_operator.fleet.observed import Definition, Observed, Policy
from everstep_operator.nodes import NodeFacts
from everstep_operator.quarantines import Quarantine, binds, from_mark, is_full
from everstep_operator.roster import Roster, list_marks
from everstep_operator.values import NodeState

REASON_RELEASED = "NodeReleased"
LOST_MANY = "ManyQuarantinesLost"
LOST_DEFINITION = "DefinitionReplaced"
LOST_UNSEEN = "DeletionNotObserved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    release: tuple[str, ...] = ()
    put_back: tuple[Quarantine, ...] = ()
    waiting: frozenset[str] = frozenset()
    """Absent, and not yet handled."""
    waiting_nodes: frozenset[str] = frozenset()
    """Their nodes, and those of objects that cannot be read: unchanged for now."""
    memory: FleetMemory


def find_absent(
    roster: Roster, listed: Iterable[Quarantine], unread: Collection[str], memory: FleetMemory
) -> frozenset[str]:
    """Names that a mark or the memory contains and the list does not. An object that exists and
    cannot be read (`unread`) is not absent.
    """
    there = {q.name for q in listed if not q.deleting} | set(unread)
    marked = {mark.quarantine for _, mark in list_marks(roster)}
    open_ = {name for name, q in memory.alive.items() if not _is_settled(q, roster.nodes)}
    return frozenset((marked | open_) - there)


def _is_settled(quarantine: Quarantine, nodes: Mapping[str, NodeFacts]) -> bool:
    """Whether nothing is left to do: the node is gone, is another machine, or has recorded the
    evidence as answered.
    """
    node = nodes.get(quarantine.node)
    if node is None or not binds(quarantine, node):
        return True
    if node.mark is not None and node.mark.quarantine == quarantine.name:
        return False
    return all(
        is_known(one, node.answered) or not still_applies(one, machine=node.machine, boot=node.boot)
        for one in quarantine.evidence
    )


def decide_losses(observed: Observed, memory: FleetMemory, policy: Policy, now: float) -> Losses:
    there = {q.name: q for q in observed.quarantines or () if not q.deleting}
    unread = observed.unread
    for quarantine in observed.quarantines or ():
        if quarantine.deleting:  # someone deleted it, and a finalizer still holds it
            memory = with_deleted(memory, quarantine)
    absent = find_absent(observed.roster, there.values(), unread, memory)
    memory = remember(memory, there, absent, unread, now)
    memory = _note_lost(memory, observed.definition, policy, now)
    creatable = observed.definition.creatable
    return Losses(
        release=_choose_released(memory, observed.definition, policy, now) if creatable else (),
        put_back=_choose_put_back(observed.roster, memory) if creatable else (),
        waiting=absent,
        waiting_nodes=_list_nodes(absent, observed.roster, memory) | set(unread.values()),
        memory=memory,
    )


def _list_nodes(absent: frozenset[str], roster: Roster, memory: FleetMemory) -> frozenset[str]:
    known = {memory.alive[name].node for name in absent if name in memory.alive}
    return frozenset(known | {n.name for n, m in list_marks(roster) if m.quarantine in absent})


def _note_lost(
    memory: FleetMemory, definition: Definition, policy: Policy, now: float
) -> FleetMemory:
    """Record the lost objects. Each stays lost until it is back: while many are recreated one by
    one, the remaining ones must not count as deleted.
    """
    if not definition.creatable:
        return memory
    lost = dict(memory.lost)
    for name in _ripe(memory, policy.settle_seconds, now):
        if _is_older(memory.alive[name], definition):
            lost.setdefault(name, LOST_DEFINITION)
    silent = _silent(memory, definition) - lost.keys()
    if len(silent) > policy.many_lost:
        ripe = set(_ripe(memory, policy.loss_seconds, now))
        lost |= dict.fromkeys(silent & ripe, LOST_MANY)
    return replace(memory, lost=MappingProxyType(lost))


def _is_older(quarantine: Quarantine, definition: Definition) -> bool:
    return definition.created_at is not None and quarantine.created_at < definition.created_at


def _ripe(memory: FleetMemory, seconds: float, now: float) -> list[str]:
    """Quarantines that this operator has seen, and that have been absent for this long."""
    return [n for n, at in memory.absent_since.items() if n in memory.alive and now - at >= seconds]


def _silent(memory: FleetMemory, definition: Definition) -> set[str]:
    """Absent quarantines whose deletion no watch reported. If the CRD cannot be read, no report
    counts, because the CRD may have been deleted.
    """
    told = memory.deleted.keys() if definition.created_at is not None else set[str]()
    return {name for name in memory.absent_since if name in memory.alive} - told


def _choose_released(
    memory: FleetMemory, definition: Definition, policy: Policy, now: float
) -> tuple[str, ...]:
    ripe = set(_ripe(memory, policy.settle_seconds, now)) - memory.lost.keys()
    silent = _silent(memory, definition) - memory.lost.keys()
    return tuple(sorted(ripe - silent if len(silent) > policy.many_lost else ripe))


def _choose_put_back(roster: Roster, memory: FleetMemory) -> tuple[Quarantine, ...]:
    found = [
        replace(memory.alive[name], put_back=reason, uid="", version="", state="", status=None)
        for name, reason in memory.lost.items()
    ]
    for node, mark in list_marks(roster):
        if mark.quarantine in memory.absent_since and mark.quarantine not in memory.alive:
            found.append(replace(from_mark(node, mark), put_back=LOST_UNSEEN))
    return tuple(sorted(found, key=lambda q: q.name))


def build_probe(now: float) -> Quarantine:
    """An object for a dry run: it only tests whether one could be created."""
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


def choose_nodes(name: str, roster: Roster, memory: FleetMemory) -> tuple[NodeFacts, ...]:
    """The nodes that this quarantine's release must change: those with its mark, and the node for
    which it was written, if the answer is not recorded there yet.
    """
    found = {node.name: node for node, mark in list_marks(roster) if mark.quarantine == name}
    held = memory.alive[name]
    if not _is_settled(held, roster.nodes):
        found[held.node] = roster.nodes[held.node]
    return tuple(found.values())


def choose_answered(
    name: str, memory: FleetMemory, node: NodeFacts, finding: Finding
) -> tuple[Evidence, ...]:
    """What the release of this quarantine answers: its evidence, in its newest form. A quarantine
    that is full of evidence of this boot may lack some: then whatever convicted the node before the
    deletion is answered.
    """
    known: list[Evidence] = list(memory.alive[name].evidence) if name in memory.alive else []
    full = is_full(known, node)
    if node.mark is not None and node.mark.quarantine == name:
        known += node.mark.evidence
    keys, deleted_at = {one.key for one in known}, memory.absent_since.get(name, 0.0)
    shown = [
        claim.evidence
        for claim in finding.claims
        if claim.evidence.key in keys
        or (full and claim.convicts and claim.evidence.first_seen < deleted_at)
    ]
    return (*known, *shown)
