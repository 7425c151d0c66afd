"""Which pod's memory holds the copies of which pod's saves. Pure: all pods compute the same result
from the members, so nobody has to assign it.
"""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from everstep_agent.peers.epoch_level import EpochMember
from everstep_contract.levels import Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlace:
    slot: int
    address: str
    node: str
    rack: str = ""
    """Empty: not known."""


def choose_partners(pods: Iterable[PodPlace]) -> dict[int, PodPlace]:
    """Slot → the pod that holds its copy: in another rack if there are several racks, on another
    node otherwise. If all pods are on one node, no slot has a partner. Each pod holds one copy,
    unless more than half of the pods are in one place: then the others hold equally many of theirs.
    """
    order = sorted(pods, key=lambda p: (p.rack, p.node, p.slot))
    racks = {p.rack for p in order}
    places = [p.rack if len(racks) > 1 and "" not in racks else p.node for p in order]
    # Pods of one place are neighbours in this order, so a shift by the size of the largest place
    # leads every pod out of its own place, except those that the largest place has too many of.
    largest, turn = max(Counter(places).items(), key=lambda item: item[1], default=("", 0))
    outside = itertools.cycle(p for p, place in zip(order, places, strict=True) if place != largest)
    found = {}
    for at, pod in enumerate(order):
        ahead = (at + turn) % len(order)
        partner = order[ahead] if places[ahead] != places[at] else next(outside, None)
        if partner is not None:
            found[pod.slot] = partner
    return found


def list_places(members: Iterable[EpochMember], peers: Iterable[Peer]) -> list[PodPlace]:
    """`peers`: as the operator lists them. A pod for which it names no node counts as a node of its
    own.
    """
    known = {(p.slot, p.attempt): p for p in peers}
    found = []
    for member in members:
        peer = known.get((member.slot, member.attempt))
        node, rack = (peer.node, peer.rack) if peer else ("", "")
        own = node or f"slot {member.slot}"
        found.append(PodPlace(slot=member.slot, address=member.address, node=own, rack=rack))
    return found
