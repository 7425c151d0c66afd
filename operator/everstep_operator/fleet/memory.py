"""What a fleet pass remembers for the next one. Soft state: without it nothing is released wrongly."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from everstep_operator.quarantines import Quarantine


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMemory:
    alive: Mapping[str, Quarantine] = field(default_factory=lambda: MappingProxyType({}))
    """The last copy of every quarantine that this operator has seen, until its deletion is handled:
    these are in force, whatever the last list shows.
    """
    absent_since: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    deleted: frozenset[str] = frozenset()
    """Absent ones whose deletion a watch has reported."""
    lost: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Absent ones that were not deleted, with the reason: they are recreated, and not released
    while they are absent.
    """
    repaired_at: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """By node."""
    admitted: frozenset[str] = frozenset()
    """Faulty nodes that the cordon budget admits although no NodeQuarantine says so (yet): see
    `budget`.
    """


def with_deleted(memory: FleetMemory, quarantine: Quarantine) -> FleetMemory:
    """A watch saw it deleted: it existed until then."""
    return replace(
        memory,
        alive=MappingProxyType({quarantine.name: quarantine, **memory.alive}),
        deleted=memory.deleted | {quarantine.name},
    )


def remember(
    memory: FleetMemory, there: Mapping[str, Quarantine], absent: frozenset[str], now: float
) -> FleetMemory:
    """After a successful list. What exists again was not deleted; what is settled is dropped."""
    alive = {name: q for name, q in memory.alive.items() if name in absent} | dict(there)
    since = {name: memory.absent_since.get(name, now) for name in absent}
    lost = {name: reason for name, reason in memory.lost.items() if name in absent}
    return replace(
        memory,
        alive=MappingProxyType(alive),
        absent_since=MappingProxyType(since),
        deleted=memory.deleted & absent,
        lost=MappingProxyType(lost),
    )
