"""The protocol, explored: `README.md` beside this file says how, and what is set by which variable."""

import itertools
import os
import time

import pytest

from simulation.protocol.boundary import Arming
from simulation.protocol.chunks import Shelves
from simulation.protocol.membership import KINDS, Membership
from simulation.protocol.reduction import Reducing
from simulation.protocol.rules import Rules
from simulation.protocol.search import Bounds, Found, search, walk
from simulation.protocol.variants import VARIANTS

STATES = int(os.environ.get("EVERSTEP_PROTOCOL_STATES", "4000"))
SECONDS = float(os.environ.get("EVERSTEP_PROTOCOL_SECONDS", "1200"))
SEED = int(os.environ.get("EVERSTEP_PROTOCOL_SEED", str(time.time_ns() % 1_000_000)))
AMPLE = 3600.0
"""A quick search is bounded by states, not by a clock that runs slower on a busy machine."""
PAIRS = list(itertools.combinations_with_replacement(KINDS, 2))
ROUNDS = ((2, 0), (3, 0), (2, 1), (4, 0), (3, 1), (2, 2), (4, 1), (3, 2))
"""(slots, delays), in this order as far as the time allows."""


def show(name: str, found: Found) -> None:
    until = "exhausted" if found.complete else f"not exhausted, delays {found.delays}"
    print(
        f"{name}: {found.states} states, {found.moves} moves, depth {found.depth}, {until},"
        f" {found.fair} fair runs"
    )
    assert not found.broken, "\n".join([found.broken, *found.story])


def test_without_faults_every_order_reaches_the_end() -> None:
    model = Membership(Rules(steps=1))
    found = search(model, model.start(2, ()), Bounds(seconds=AMPLE, fair_every=1))
    show("2 slots, no fault, every order", found)
    assert found.complete
    assert found.finished > 0


@pytest.mark.parametrize("kind", KINDS)
def test_one_fault_breaks_no_invariant(kind: str) -> None:
    model = Membership(Rules(steps=2))
    found = search(model, model.start(2, (kind,)), Bounds(delays=0, states=STATES, seconds=AMPLE))
    show(f"2 slots, {kind}", found)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_of_the_protocol_fails(name: str) -> None:
    variant = VARIANTS[name]
    model = Membership(variant.rules)
    bounds = Bounds(delays=variant.delays, states=200_000, seconds=AMPLE)
    found = search(model, model.start(2, variant.faults), bounds)
    print(f"{name}: {found.broken or 'nothing broken'} ({found.states} states)")
    assert variant.breaks in found.broken, f"{found.states} states: {found.broken}"


def test_ranks_stop_at_one_armed_boundary_in_every_order() -> None:
    model = Arming()
    show("2 ranks, an armed boundary", search(model, model.start(2), Bounds(states=STATES)))


def test_a_boundary_that_is_not_armed_is_passed() -> None:
    model = Arming(armed=False)
    assert "counts" in search(model, model.start(2), Bounds(seconds=AMPLE)).broken


def test_survivors_of_a_step_apply_one_sum_in_every_order() -> None:
    model = Reducing()
    found = search(model, model.start(3), Bounds(seconds=AMPLE))
    show("3 ranks, the collectives of two steps, two deaths", found)
    assert found.complete


@pytest.mark.parametrize(
    ("variant", "breaks"),
    [
        (Reducing(vector_last=False), "has its state from another"),
        (Reducing(keyed=False), "applied sums of several epochs"),
    ],
    ids=["the vector is sent first", "the vector is not keyed by epoch"],
)
def test_a_vector_that_says_too_much_is_caught(variant: Reducing, breaks: str) -> None:
    assert breaks in search(variant, variant.start(3), Bounds(seconds=AMPLE)).broken


def test_what_is_committed_stays_readable_until_it_is_retired() -> None:
    model = Shelves()
    show("2 writers, retention", search(model, model.start(2), Bounds(states=STATES)))


def test_without_the_claim_in_their_keys_chunks_are_lost() -> None:
    model = Shelves(keyed=False)
    assert "is gone" in search(model, model.start(1), Bounds(seconds=AMPLE)).broken


def test_random_walks_with_every_fault_keep_every_invariant() -> None:
    _walk(slots=3, walks=20, seconds=AMPLE)


def test_a_claim_that_is_heard_of_too_late_is_caught_by_the_walk_that_found_it() -> None:
    """A cut, a word too early, a lost answer and a rival in one story: no search of a pair goes there."""
    broken = walk(
        (model := Membership(Rules(look_again=False))), model.start(3, KINDS[:10]), 167602,
        walks=1, seconds=AMPLE, length=150,
    ).broken  # fmt: skip
    assert "though it has read a newer claim" in broken


def _walk(*, slots: int, walks: int, seconds: float) -> None:
    model = Membership(Rules(steps=2))
    first = model.start(slots, KINDS)
    found = walk(model, first, SEED, walks=walks, seconds=seconds, length=150)
    print(f"{slots} slots, every fault: seed {SEED}, {found.walks} walks, {found.moves} moves")
    again = f"EVERSTEP_PROTOCOL_SEED={SEED} does it again"
    assert not found.broken, "\n".join([found.broken, again, *found.story])


@pytest.mark.long
@pytest.mark.timeout(0)
def test_each_pair_of_faults_breaks_no_invariant() -> None:
    """Round after round, three quarters of the time; each pair gets its share of what is left."""
    began, exhausted = time.monotonic(), dict.fromkeys(ROUNDS, 0)
    for slots, delays in ROUNDS:
        for at, pair in enumerate(PAIRS):
            left = SECONDS * 0.75 - (time.monotonic() - began)
            if left <= 0:
                break
            share = max(2.0, left / (len(PAIRS) - at) / 2)
            model = Membership(Rules(steps=2))
            bounds = Bounds(delays=delays, states=1_500_000, seconds=share)
            found = search(model, model.start(slots, pair), bounds)
            show(f"{slots} slots, {' and '.join(pair)}, {delays} delays", found)
            exhausted[slots, delays] += found.complete
    for (slots, delays), count in exhausted.items():
        print(f"{slots} slots, {delays} delays: {count} of {len(PAIRS)} pairs exhausted")
    assert exhausted[ROUNDS[0]] > 0


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("slots", [3, 4])
def test_long_walks_with_every_fault_keep_every_invariant(slots: int) -> None:
    _walk(slots=slots, walks=10**9, seconds=SECONDS * 0.08)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_every_fault_together_to_the_depth_that_the_time_allows() -> None:
    model = Membership(Rules(steps=2))
    bounds = Bounds(delays=0, states=3_000_000, seconds=SECONDS * 0.05)
    show("3 slots, every fault", search(model, model.start(3, KINDS), bounds))


@pytest.mark.long
def test_boundaries_retention_and_collectives_to_the_depth_that_the_time_allows() -> None:
    seconds = SECONDS * 0.02
    arming, shelves, reducing = Arming(), Shelves(), Reducing()
    show("3 ranks, boundary", search(arming, arming.start(3), Bounds(seconds=seconds)))
    show("4 ranks, collectives", search(reducing, reducing.start(4), Bounds(seconds=4 * seconds)))
    show("3 writers, retention", search(shelves, shelves.start(3, 2), Bounds(seconds=seconds)))
