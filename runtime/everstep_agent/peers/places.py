"""Which rank each worker of an epoch has: ranks follow the order of slots, and of local ranks in a pod.
Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from everstep_agent.peers.messages import EpochMember


def place_members(members: Iterable[EpochMember]) -> tuple[EpochMember, ...]:
    """These pods in the order of their slots, each with its place."""
    placed: list[EpochMember] = []
    first = 0
    for number, member in enumerate(sorted(members, key=lambda m: m.slot)):
        placed.append(replace(member, node_rank=number, first=first))
        first += len(member.ranks)
    return tuple(placed)


def with_newcomers(
    members: Sequence[EpochMember], joining: Sequence[EpochMember]
) -> tuple[EpochMember, ...]:
    """The members of the next epoch. `joining`: other pods, and workers for the ranks that a member
    lost.
    """
    found = {m.id: m for m in members}
    for new in joining:
        held = found.get(new.id)
        if held is None:
            found[new.id] = new
        else:
            lives = tuple(a or b for a, b in zip(held.lives, new.lives, strict=True))
            found[new.id] = replace(held, lives=lives)
    return place_members(found.values())
