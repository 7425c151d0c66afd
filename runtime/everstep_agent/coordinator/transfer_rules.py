"""How newcomers get the state: which member sends it to which newcomer, which newcomers hold it,
and which are no longer waited for. Pure.

A transfer may take as long as the state needs, provided that it makes progress.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from everstep_agent.coordinator.join_rules import is_invited
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Id, Transfer
from everstep_agent.peers.places import with_newcomers

STILL_SECONDS = 15.0
"""How long a newcomer may receive nothing; a message has at most 16 MiB (`everstep/transfer.py`)."""
LOADED_BYTES = 2**27
"""A newcomer loads at least this many bytes per second of the state that it has received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    received: int
    """Bytes of the state."""
    since: float
    """When a report first gave this number."""


def plan_transfers(
    epoch: EpochLevel, key: str, leaving: Collection[Id] = (), *, failed: int = 0
) -> tuple[Transfer, ...]:
    """Each newcomer copies the state from one staying rank that has the same place. No rank sends
    twice before all staying ranks of its place have sent once.

    Args:
        failed: the largest number of failed joins in a row of any newcomer. After the first, the same
            rank sends again: if its state changed meanwhile, it waits at the boundary now. Each further
            failure may be the sender's fault, and moves the first sender on by one.
    """
    mesh = epoch.mesh
    staying = [r for m in epoch.members if m.id not in leaving for r in m.ranks.values()]
    givers = {
        p: _cycle([r for r in staying if mesh.place_of(r) == p], max(0, failed - 1))
        for p in range(mesh.unit)
    }
    expected = {m.id: m for m in with_newcomers(epoch.members, epoch.joining, epoch.slots_together)}
    takers = [(m, local) for m in epoch.joining for local in m.ranks]
    return tuple(
        Transfer(
            giver=next(givers[mesh.place_of(expected[m.id].ranks[local])]),
            slot=m.slot,
            local=local,
            key=f"{key}-{number}",
        )
        for number, (m, local) in enumerate(takers)
    )


def _cycle(ranks: Sequence[int], start: int) -> Iterator[int]:
    """The ranks in turn, without end, from that place on."""
    return itertools.islice(itertools.cycle(ranks), start, None)


def list_taken(
    joining: Sequence[EpochMember], reports: Iterable[AgentReport], step: int
) -> tuple[EpochMember, ...]:
    """The newcomers that hold the state of this step."""
    taken = {r.id: (r.prepared, r.taken) for r in reports}
    return tuple(m for m in joining if taken.get(m.id) == (m.lives, step))


def find_lost(joining: Sequence[EpochMember], reports: Iterable[AgentReport]) -> dict[Id, str]:
    """The newcomers that cannot join any more, each with the reason.

    Args:
        reports: the newest of each agent that is not silent.
    """
    by_id = {r.id: r for r in reports}
    told = {m.id: _why_lost(m, joining, by_id) for m in joining}
    return {id: why for id, why in told.items() if why}


def _why_lost(
    newcomer: EpochMember, joining: Sequence[EpochMember], by_id: Mapping[Id, AgentReport]
) -> str:
    report, slot = by_id.get(newcomer.id), newcomer.slot
    if report is not None:
        return "" if is_invited(report, joining) else f"a worker of slot {slot} has ended"
    if any(id[0] == slot and id > newcomer.id for id in by_id):
        return f"the container of slot {slot} was started again"
    return f"slot {slot} has stopped reporting"


def note_progress(
    former: Mapping[Id, Progress],
    joining: Sequence[EpochMember],
    reports: Iterable[AgentReport],
    now: float,
) -> dict[Id, Progress]:
    """How far each newcomer is by now."""
    received = {r.id: r.received for r in reports}
    found = {}
    for m in joining:
        told = Progress(received=received.get(m.id, 0), since=now)
        before = former.get(m.id)
        found[m.id] = before if before and before.received == told.received else told
    return found


def find_still(
    joining: Sequence[EpochMember],
    reports: Iterable[AgentReport],
    progress: Mapping[Id, Progress],
    now: float,
) -> dict[Id, str]:
    """The newcomers that have received nothing for too long, each with the reason."""
    expected = {r.id: r.expected for r in reports}
    found = {}
    for m in joining:
        so_far, whole = progress[m.id], expected.get(m.id, 0)
        if now - so_far.since > _limit(so_far.received, whole):
            of = f" of {_mib(whole)}" if whole else ""
            found[m.id] = (
                f"slot {m.slot} has {_mib(so_far.received)}{of} MiB of the state, and no more "
                f"since {now - so_far.since:.0f} s"
            )
    return found


def _limit(received: int, expected: int) -> float:
    """How long a newcomer may receive nothing. Once all has arrived, it also needs time to load it."""
    loads = expected > 0 and received >= expected
    return STILL_SECONDS + (expected / LOADED_BYTES if loads else 0.0)


def _mib(count: int) -> int:
    return round(count / 2**20)
