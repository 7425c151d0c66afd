"""Which slots form a unit with a slot, where a unit takes several pods: its pods are to run close together. Pure.

Slots that form a whole unit of the last epoch stay together. The others form units by the rule by which the job takes
pods in (`form_units`), so a lost slot's next pod goes to the pods with which it will train. A pod on a node that may be
lost soon comes last: if a spare can take its place, that belongs to the rest of the unit.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from everstep_contract.units import form_units
from everstep_operator.jobs.observed import Observed

MOST_MATES = 32
"""A pod names no more mates than these, the nearest in its unit: a unit may have thousands of pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A slot's place in its unit."""

    unit: tuple[int, ...]
    """All its slots, in the order of ranks."""
    place: int


def find_seats(observed: Observed) -> dict[int, Seat]:
    """By slot; one that lacks others for a whole unit has none. Empty where a pod holds whole units."""
    together, wanted = observed.together, observed.slots.wanted
    if together == 1:
        return {}
    sound = wanted - {pod.slot for pod in observed.doubted}
    kept = [unit for unit in observed.units if len(unit) == together and sound.issuperset(unit)]
    new = form_units(sound.difference(*kept), together)
    rest = form_units(wanted.difference(*kept, *new), together)
    return {
        slot: Seat(unit=unit, place=place)
        for unit in (*kept, *new, *rest)
        for place, slot in enumerate(unit)
    }


def choose_mates(
    seat: Seat | None, nodes: Mapping[int, str], shunned: Collection[str]
) -> tuple[int, ...]:
    """The slots beside which this slot's next pod is to run, the nearest in the unit first.

    Args:
        nodes: slot → the node of its present pod.
        shunned: nodes that the pod is to keep away from: a mate there would draw it to them.
    """
    near = _list_nearest(seat) if seat is not None else ()
    sound = (mate for mate in near if nodes.get(mate) not in shunned)
    return tuple(itertools.islice(sound, MOST_MATES))


def _list_nearest(seat: Seat) -> Iterator[int]:
    unit, place = seat.unit, seat.place
    for far in range(1, len(unit)):
        yield from (unit[at] for at in (place - far, place + far) if 0 <= at < len(unit))
