"""Which slots should have a pod, and which of these are spares. Pure.

A job has `replicas` pods that train, and `spares` pods that wait to take the place of a lost one. A
spare that has taken a place keeps it, and the lost slot's next pod becomes the spare. So no slot is
a spare by its number, and no pod moves back.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from everstep_contract.levels import Member

GIVEN_UP = frozenset({"ScaledDown", "SpareGivenBack", "Suspended", "GangIncomplete"})
"""Causes of attempts that follow no loss. A job that continues later does so in its lowest slots."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    training: frozenset[int] = frozenset()
    """Slots that train or should train: `replicas` of them."""
    spares: frozenset[int] = frozenset()

    @cached_property
    def wanted(self) -> frozenset[int]:
        return self.training | self.spares


def choose_slots(
    known: Collection[int],
    members: Sequence[int],
    holding: Sequence[int],
    awaited: Sequence[int] = (),
    *,
    replicas: int,
    spares: int,
) -> Slots:
    """Choose members first, then other slots that have a pod, then those whose next pod is awaited, then the
    lowest free numbers.

    Args:
        known: all slots that were ever used.
        members: slots that train, in the order in which to keep them. If there are more than
            `replicas`, the last ones are given up, even if spares are wanted: a member cannot
            become a spare.
        holding: slots that have a pod, in the order in which to keep them.
        awaited: slots that have lost their pod: another number would be no replacement, but a slot
            of its own without the incident and the failed nodes.
    """
    count = replicas + spares
    every = frozenset(range(count))
    usual = len(members) <= replicas and every.issuperset(known)
    if usual and not spares:
        return Slots(training=every)
    inside, taken = frozenset(members), frozenset((*members, *holding, *awaited))
    others = (slot for slot in dict.fromkeys((*holding, *awaited)) if slot not in inside)
    free = (slot for slot in itertools.count() if slot not in taken)
    order = list(itertools.islice(itertools.chain(members[:replicas], others, free), count))
    return Slots(training=frozenset(order[:replicas]), spares=frozenset(order[replicas:]))


def list_units(members: Iterable[Member], ranks: int) -> list[tuple[int, ...]]:
    """The slots of each unit of the job's last epoch, in the order of ranks. A unit that is only a
    part of a pod has that pod's slot.

    Args:
        ranks: number of ranks in a unit.
    """
    found: dict[int, dict[int, None]] = {}
    for member in members:
        found.setdefault(member.rank // ranks, {})[member.slot] = None
    return [tuple(slots) for slots in found.values()]


def order_members(
    units: Iterable[Sequence[int]], inside: frozenset[int], leaving: frozenset[int], together: int
) -> tuple[int, ...]:
    """The slots of `inside`, in the order in which to keep them: complete units first, then units
    that have lost a slot or are about to lose one. Each group is sorted by the units' lowest slots.

    Args:
        units: from `list_units`.
        together: number of slots in a complete unit.
    """

    def rank(unit: Sequence[int]) -> tuple[bool, int]:
        there = inside.issuperset(unit) and len(unit) == together
        return not (there and leaving.isdisjoint(unit)), min(unit)

    ordered = (slot for unit in sorted(units, key=rank) for slot in unit)
    return tuple(dict.fromkeys(slot for slot in ordered if slot in inside))
