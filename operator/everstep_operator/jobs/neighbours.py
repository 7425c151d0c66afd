"""Which slots form a unit with a slot, if a unit takes several pods: these pods should run close
together. Pure.

Slots that formed a complete unit in the last epoch stay together. The other slots form units by the
same rule by which the job takes pods in (`form_units`), so a lost slot's next pod is placed near
the pods with which it will train. A pod on a node that may be lost soon comes last: a spare that
may take its place is then placed near the rest of that unit.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from everstep_contract.units import form_units
from everstep_operator.jobs.observed import Observed

MOST_MATES = 32
"""How many mates a pod names at most, the nearest in its unit: a unit may have thousands of pods.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A slot's place in its unit."""

    unit: tuple[int, ...]
    """All slots of the unit, in the order of ranks."""
    place: int


def find_seats(observed: Observed) -> dict[int, Seat]:
    """Slot → its seat. A slot without enough others for a complete unit has no seat. Empty if each
    pod holds whole units.
    """
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
    """The slots near whose pods this slot's next pod should run, the nearest in the unit first.

    Args:
        nodes: slot → the node of its present pod.
        shunned: nodes that the pod excludes or avoids: a mate there would attract it to them.
    """
    near = _list_nearest(seat) if seat is not None else ()
    sound = (mate for mate in near if nodes.get(mate) not in shunned)
    return tuple(itertools.islice(sound, MOST_MATES))


def _list_nearest(seat: Seat) -> Iterator[int]:
    unit, place = seat.unit, seat.place
    for far in range(1, len(unit)):
        yield from (unit[at] for at in (place - far, place + far) if 0 <= at < len(unit))
