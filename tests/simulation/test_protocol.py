"""The searches through the protocol. `README.md` explains them and their variables."""

import os
import random
import time

import pytest

from simulation.protocol import survivors
from simulation.protocol.boundary import Arming
from simulation.protocol.chunks import Shelves
from simulation.protocol.membership import KINDS, Membership
from simulation.protocol.reduction import Reducing, Step
from simulation.protocol.regrouping import Anew, AnyComplete, Backmost, Twice
from simulation.protocol.rules import Rules
from simulation.protocol.search import Bounds, Found, search, walk
from simulation.protocol.variants import VARIANTS

STATES = int(os.environ.get("EVERSTEP_PROTOCOL_STATES", "4000"))
SECONDS = float(os.environ.get("EVERSTEP_PROTOCOL_SECONDS", "300"))
SEED = int(os.environ.get("EVERSTEP_PROTOCOL_SEED", str(time.time_ns() % 1_000_000)))
AMPLE = 3600.0
"""Quick searches are bounded by states, not by time, because a busy machine would visit fewer
states in the same time.
"""
LADDER = {
    "all restart": {},
    "in place": {"in_place": True},
    "in place, with newcomers": {"in_place": True, "newcomers": True},
}
LOSSES = pytest.mark.parametrize("losses", LADDER)
"""What follows a loss."""


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


def test_the_one_move_that_the_last_layer_builds_is_the_first_of_all() -> None:
    """Checked on random walks, with a fault of every kind."""
    model = Membership(Rules(steps=1))
    chance, looked = random.Random(1), 0
    for _ in range(12):
        world = model.start(3, KINDS)
        for _ in range(60):
            moves = model.moves(world)
            assert model.first_move(world) == (moves[0] if moves else None)
            looked += 1
            choices = [*moves, *(model.events(world) if chance.random() < 0.2 else ())]
            if not choices or model.is_done(world):
                break
            world = chance.choice(choices).after
    assert looked > 200


@LOSSES
@pytest.mark.parametrize("kind", KINDS)
def test_one_fault_breaks_no_invariant(kind: str, losses: str) -> None:
    model = Membership(Rules(steps=2, **LADDER[losses]))
    found = search(model, model.start(2, (kind,)), Bounds(delays=0, states=STATES, seconds=AMPLE))
    show(f"2 slots, {kind}", found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_leaves_while_its_replacement_joins_and_a_fault_strikes(kind: str) -> None:
    model = Membership(Rules(steps=2, in_place=True, newcomers=True))
    first = model.start(2, ("leave", kind), spares=1)
    found = search(model, first, Bounds(delays=0, states=STATES // 2, seconds=AMPLE))
    show(f"2 slots and a spare, leave, {kind}", found)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] * (v.delays > 1)) for n, v in VARIANTS.items()],
)
def test_a_variant_of_the_protocol_fails(name: str) -> None:
    variant = VARIANTS[name]
    model = Membership(variant.rules)
    first = model.start(2, variant.faults, variant.spares)
    if variant.walks:
        walked = walk(model, first, 1, walks=variant.walks, seconds=AMPLE, length=120)
        broken, effort = walked.broken, f"{walked.walks} walks"
    else:
        found = search(model, first, Bounds(delays=variant.delays, states=200_000, seconds=AMPLE))
        broken, effort = found.broken, f"{found.states} states"
    print(f"{name}: {broken or 'nothing broken'} ({effort})")
    assert variant.breaks in broken, f"{effort}: {broken}"


def test_ranks_stop_at_one_armed_boundary_in_every_order() -> None:
    model = Arming()
    show("2 ranks, an armed boundary", search(model, model.start(2), Bounds(states=STATES)))


def test_a_boundary_that_is_not_armed_is_passed() -> None:
    model = Arming(armed=False)
    assert "counts" in search(model, model.start(2), Bounds(seconds=AMPLE)).broken


@pytest.mark.parametrize(
    "step", [Step(), Step(steps=1, buckets=2)], ids=["two steps", "two buckets"]
)
def test_survivors_go_on_in_place_from_every_order(step: Step) -> None:
    model = Reducing(step)
    found = search(model, model.start(3), Bounds(seconds=AMPLE))
    show("3 ranks, two deaths, every order", found)
    assert found.complete


REGROUPS = {
    "the vector is sent first": (Step(vector_last=False), "lacks the sums"),
    "a reduction that completes after the standing was told counts": (
        Step(membership=survivors.LateReduction),
        "told that it has not",
    ),
    "a vector is taken after the standing was told": (
        Step(membership=survivors.LateRescue, rescue_waits=False),
        "told that it has not",
    ),
    "a rank that is held names the epoch of its step": (
        Step(membership=survivors.EarlyMark, mark_waits=False),
        "is of epoch",
    ),
    "the position is that of who is furthest behind": (Step(rules=Backmost()), "is of epoch"),
    "the share of a dead rank is given to two": (Step(rules=Twice()), "is taken again"),
    "all micro-batches are shared out anew": (Step(rules=Anew()), "is taken again"),
    "a rank tells only what it holds": (Step(promises=False), "is taken again"),
    "a bucket that is complete on one rank is not summed again": (
        Step(steps=1, rules=AnyComplete()),
        "not summed",
    ),
    "a bucket counts as complete although its buffer is filled again": (
        Step(steps=1, buckets=2, membership=survivors.count_with(survivors.Overcounted)),
        "not summed",
    ),
    "a complete bucket counts for the next reduction": (
        Step(membership=survivors.count_with(survivors.NeverOver)),
        "not summed",
    ),
}


@pytest.mark.parametrize("name", REGROUPS)
def test_a_variant_of_the_regroup_fails(name: str) -> None:
    step, breaks = REGROUPS[name]
    model = Reducing(step)
    found = search(model, model.start(3), Bounds(seconds=AMPLE))
    print(f"{name}: {found.broken or 'nothing broken'} ({found.states} states)")
    assert breaks in found.broken


def test_a_vector_that_is_not_keyed_by_its_epoch_is_caught() -> None:
    """The variant fails only with two survivors after the second death, so with four ranks."""
    model = Reducing(Step(keyed=False))
    found = search(model, model.start(4), Bounds(delays=0, seconds=AMPLE))
    print(f"{found.broken or 'nothing broken'} ({found.states} states)")
    assert "newer than their vector" in found.broken


def test_what_is_committed_stays_readable_until_it_is_retired() -> None:
    model = Shelves()
    show("2 writers, retention", search(model, model.start(2), Bounds(states=STATES)))


def test_without_the_claim_in_their_keys_chunks_are_lost() -> None:
    model = Shelves(keyed=False)
    assert "is gone" in search(model, model.start(1), Bounds(seconds=AMPLE)).broken


@LOSSES
def test_random_walks_with_every_fault_keep_every_invariant(losses: str) -> None:
    _walk(slots=3, walks=20, seconds=AMPLE, losses=losses)


def test_a_claim_that_is_heard_of_too_late_is_caught_by_the_walk_that_found_it() -> None:
    """The story needs a cut, a pod declared gone too early, a lost answer and a rival. No search of
    a pair of faults reaches it.
    """
    broken = walk(
        (model := Membership(Rules(look_again=False))), model.start(3, KINDS[:10]), 167602,
        walks=1, seconds=AMPLE, length=150,
    ).broken  # fmt: skip
    assert "though it has read a newer claim" in broken


def _walk(*, slots: int, walks: int, seconds: float, losses: str) -> None:
    model = Membership(Rules(steps=2, **LADDER[losses]))
    first = model.start(slots, KINDS)
    found = walk(model, first, SEED, walks=walks, seconds=seconds, length=150)
    print(f"{slots} slots, every fault: seed {SEED}, {found.walks} walks, {found.moves} moves")
    again = f"EVERSTEP_PROTOCOL_SEED={SEED} does it again"
    assert not found.broken, "\n".join([found.broken, again, *found.story])


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("slots", [3, 4])
@LOSSES
def test_long_walks_with_every_fault_keep_every_invariant(slots: int, losses: str) -> None:
    _walk(slots=slots, walks=10**9, seconds=SECONDS * 0.1, losses=losses)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_every_fault_together_to_the_depth_that_the_time_allows() -> None:
    model = Membership(Rules(steps=2))
    bounds = Bounds(delays=0, states=3_000_000, seconds=SECONDS * 0.15)
    show("3 slots, every fault", search(model, model.start(3, KINDS), bounds))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_boundaries_and_retention_to_the_depth_that_the_time_allows() -> None:
    seconds = SECONDS * 0.04
    arming, shelves = Arming(), Shelves()
    show("3 ranks, boundary", search(arming, arming.start(3), Bounds(seconds=seconds)))
    show("3 writers, retention", search(shelves, shelves.start(3, 2), Bounds(seconds=seconds)))


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("ranks", "deaths", "step", "delays"),
    [
        (3, 2, Step(steps=1, loops=2), None),
        (4, 3, Step(), 0),
        (4, 2, Step(), 1),
        (4, 2, Step(buckets=2), 0),
    ],
    ids=["3 ranks, two loops", "4 ranks, three deaths", "4 ranks, a delay", "4 ranks, two buckets"],
)
def test_survivors_of_more_ranks_and_loops_go_on_in_place(
    ranks: int, deaths: int, step: Step, delays: int | None
) -> None:
    model = Reducing(step)
    bounds = Bounds(delays=delays, states=3_000_000, seconds=SECONDS * 0.3)
    found = search(model, model.start(ranks, deaths), bounds)
    show(f"{ranks} ranks, {deaths} deaths", found)
    assert found.complete or delays
