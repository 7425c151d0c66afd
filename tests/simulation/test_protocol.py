"""The protocol, explored: every order of events for two slots and one fault of each kind, to a bound.

`EVERSTEP_PROTOCOL_STATES` raises the bound for a long run; pairs of faults and three slots are for that.
Found by it, each now a variant that must fail: a newcomer that coordinates and does not know of the epoch;
a worker ended for a round whose coordinator had never heard of its epoch; a report from before an epoch
began that was taken for "it never began".
"""

import os

import pytest

from simulation.protocol.moves import Rules, start_world
from simulation.protocol.search import search

STATES = int(os.environ.get("EVERSTEP_PROTOCOL_STATES", "4000"))
KINDS = ("worker", "agent", "node", "gone", "link", "duel", "answer")
SECONDS = 600.0


@pytest.mark.parametrize("kind", KINDS)
def test_one_fault_breaks_no_invariant(kind: str) -> None:
    found = search(start_world(2, (kind,)), Rules(steps=1), states=STATES, seconds=SECONDS)
    print(f"{kind}: {found.states} states, depth {found.depth}, complete {found.complete}")
    assert not found.broken, "\n".join([found.broken, *found.story])
    assert not found.stuck, "\n".join(["the end is out of reach after:", *found.stuck])


def test_without_faults_every_order_reaches_the_end() -> None:
    found = search(start_world(2, ()), Rules(steps=1), states=100_000, seconds=SECONDS)
    assert found.complete
    assert not found.broken, "\n".join([found.broken, *found.story])
    assert not found.stuck, "\n".join(found.stuck)
    assert found.finished > 0


VARIANTS = {
    "append without create-only": (Rules(steps=1, create_only=False), ("link",)),
    "a newcomer that knows of no epoch ends whoever still holds one": (
        Rules(steps=1, catch_up=False, know_before_ending=False),
        ("node",),
    ),
    "a restarted agent counts as the old one": (Rules(steps=1, lives_count=False), ("agent",)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_of_the_protocol_fails(name: str) -> None:
    rules, faults = VARIANTS[name]
    found = search(start_world(2, faults), rules, states=200_000, seconds=SECONDS)
    assert found.broken or found.stuck, f"{found.states} states, none broken"
