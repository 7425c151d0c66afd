"""Which rank each worker of an epoch has. Pure.

If each rank is a unit, ranks follow the order of slots, and within a pod the order of local ranks.
A unit that spans several pods is a block of pods. The block stays together and in order for as long
as its processes live, because the unit's groups last as long, and no process may change its place
in them. Blocks follow the order of their lowest slots.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from everstep_agent.peers.epoch_level import EpochMember


def place_members(members: Iterable[EpochMember], together: int = 1) -> tuple[EpochMember, ...]:
    """These pods, each with its place.

    Args:
        together: this many consecutive pods form a block.
    """
    listed = list(members)
    blocks = [listed[at : at + together] for at in range(0, len(listed), together)]
    blocks.sort(key=lambda block: min(m.slot for m in block))
    return place_in_order(m for block in blocks for m in block)


def place_in_order(members: Iterable[EpochMember]) -> tuple[EpochMember, ...]:
    """These pods in this order, each with its place."""
    placed: list[EpochMember] = []
    first = 0
    for number, member in enumerate(members):
        placed.append(replace(member, node_rank=number, first=first))
        first += len(member.ranks)
    return tuple(placed)


def with_newcomers(
    members: Sequence[EpochMember], joining: Sequence[EpochMember], together: int = 1
) -> tuple[EpochMember, ...]:
    """The members of the next epoch.

    Args:
        members: in the order of their ranks.
        joining: other pods, in whole blocks, and workers for the ranks that a member lost.
        together: as in `place_members`.
    """
    found = {m.id: m for m in members}
    for new in joining:
        held = found.get(new.id)
        if held is None:
            found[new.id] = new
        else:
            lives = tuple(a or b for a, b in zip(held.lives, new.lives, strict=True))
            found[new.id] = replace(held, lives=lives)
    return place_members(found.values(), together)
