"""What a fleet pass remembers for the next one. It is soft state: if it is lost, no node is
released wrongly.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from everstep_operator.fleet.actions import Action, ActionKey, key_of
from everstep_operator.quarantines import Quarantine

REFUSED_SECONDS = 30.0
"""How long an action that the API server refused is not tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMemory:
    alive: Mapping[str, Quarantine] = field(default_factory=lambda: MappingProxyType({}))
    """The last copy of every quarantine that this operator has seen, until its deletion has been
    handled. These are in force, whatever the last list shows.
    """
    absent_since: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    deleted: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Quarantines whose deletion a watch has reported → their UID. The last list may still show them."""
    lost: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Absent quarantines that were not deleted → why they were lost. They are recreated, and their
    nodes are not released in the meantime.
    """
    repaired_at: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Node → when its mark was last repaired."""
    admitted: frozenset[str] = frozenset()
    """Faulty nodes that the cordon budget admits although no NodeQuarantine says so (yet): see
    `budget`.
    """
    weighed: frozenset[str] = frozenset()
    """Faulty nodes that the last pass has weighed against the cordon budget."""
    convicted: frozenset[str] = frozenset()
    """Nodes that this process has found at fault at some time."""
    refused: Mapping[ActionKey, float] = field(default_factory=lambda: MappingProxyType({}))
    """Actions that the API server refused → until when they are not tried again."""

    def may_try(self, action: Action, now: float) -> bool:
        left = self.refused.get(key_of(action), now) - now
        return not 0 < left <= REFUSED_SECONDS  # the clock may be set back


def with_refused(memory: FleetMemory, keys: Collection[ActionKey], now: float) -> FleetMemory:
    known = {key: until for key, until in memory.refused.items() if until > now}
    new = dict.fromkeys(keys, now + REFUSED_SECONDS)
    return replace(memory, refused=MappingProxyType({**known, **new}))


def with_deleted(memory: FleetMemory, quarantine: Quarantine) -> FleetMemory:
    """Record that a watch saw the quarantine deleted: it existed until then."""
    return replace(
        memory,
        alive=MappingProxyType({quarantine.name: quarantine, **memory.alive}),
        deleted=MappingProxyType({**memory.deleted, quarantine.name: quarantine.uid}),
    )


def remember(
    memory: FleetMemory,
    there: Mapping[str, Quarantine],
    absent: frozenset[str],
    unread: Collection[str],
    now: float,
) -> FleetMemory:
    """Update the memory after a successful list. What exists again, with another UID, counts as not
    deleted; with the same UID, the list is older than the deletion. What is settled is dropped. Of
    an object that cannot be read, the last copy stays in force.
    """
    held = {n: q for n, q in memory.alive.items() if n in absent or n in unread}
    alive = held | dict(there)
    since = {name: memory.absent_since.get(name, now) for name in absent}
    lost = {name: reason for name, reason in memory.lost.items() if name in absent}
    deleted = {
        name: uid
        for name, uid in memory.deleted.items()
        if name in absent or (name in there and there[name].uid == uid)
    }
    return replace(
        memory,
        alive=MappingProxyType(alive),
        absent_since=MappingProxyType(since),
        deleted=MappingProxyType(deleted),
        lost=MappingProxyType(lost),
    )
