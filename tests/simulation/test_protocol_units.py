"""The search through the collectives of a step whose ranks form units of two. `README.md` describes
what it covers.
"""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from everstep_agent.coordinator.transfer_rules import plan_transfers
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Id
from everstep_agent.peers.places import with_newcomers
from everstep_contract.units import ONE_RANK, Mesh
from simulation.protocol import unit_variants
from simulation.protocol.search import Bounds, Found, search
from simulation.protocol.unit_reduction import UnitReducing, UnitStep
from simulation.protocol.unit_regrouping import Interrupted, Unlike, first_level

SECONDS = float(os.environ.get("EVERSTEP_PROTOCOL_SECONDS", "300"))
AMPLE = 3600.0
FAIR_EVERY = 500
"""Rarely, because a state in which nothing can happen any more is found without a fair run."""
MESHES = {"shard=2": {"shard": 2}, "tensor=2": {"tensor": 2}}
UNITS = pytest.mark.parametrize("mesh", MESHES)


def explore(
    step: UnitStep, *, units: int = 2, losses: int = 1, delays: int = 0, seconds: float = AMPLE
) -> Found:
    model = UnitReducing(step)
    bounds = Bounds(delays=delays, seconds=seconds, fair_every=FAIR_EVERY)
    found = search(model, model.start(2 * units, losses), bounds)
    print(f"{found.states} states, {found.moves} moves, {found.fair} fair runs: {found.broken}")
    return found


def require_exhausted(found: Found) -> None:
    assert not found.broken, "\n".join([found.broken, *found.story])
    assert found.complete
    assert found.finished > 0


@UNITS
def test_the_unit_that_stays_whole_goes_on_from_a_loss_at_any_point(mesh: str) -> None:
    require_exhausted(explore(UnitStep(**MESHES[mesh]), delays=1))


@UNITS
def test_two_of_three_units_go_on_from_a_loss_at_any_point(mesh: str) -> None:
    require_exhausted(explore(UnitStep(**MESHES[mesh]), units=3))


@pytest.mark.long
@pytest.mark.timeout(0)
@UNITS
def test_the_last_of_three_units_goes_on_from_two_losses_at_any_point(mesh: str) -> None:
    require_exhausted(explore(UnitStep(**MESHES[mesh]), units=3, losses=2))


@pytest.mark.long
@pytest.mark.timeout(0)
@UNITS
def test_two_steps_of_two_buckets_to_the_depth_that_the_time_allows(mesh: str) -> None:
    step = UnitStep(steps=2, buckets=2, **MESHES[mesh])
    found = explore(step, delays=1, seconds=SECONDS * 0.1)
    assert not found.broken, "\n".join([found.broken, *found.story])


VARIANTS = {
    "an interrupted unit is kept": (UnitStep(shard=2, units=Interrupted()), 2, "of a lost unit"),
    "siblings get different shares": (
        UnitStep(tensor=2, units=Unlike()),
        2,
        "should make the same passes",
    ),
    "a rank that has not begun ignores what its sibling began with": (
        UnitStep(tensor=2, membership=unit_variants.OwnOrder),
        2,
        "should make the same passes",
    ),
    "fillers are added to the sums": (UnitStep(shard=2, fillers_weigh=True), 2, "is taken again"),
    "a rank tells of its fillers as of what it holds": (
        UnitStep(shard=2, membership=unit_variants.FillersCount),
        3,
        "two ranks hold micro-batch",
    ),
    "the ranks of a unit make unequal numbers of passes": (
        UnitStep(shard=2, membership=unit_variants.Unequal),
        2,
        "nothing can happen any more",
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_of_the_units_fails(name: str) -> None:
    step, units, breaks = VARIANTS[name]
    assert breaks in explore(step, units=units).broken


@UNITS
def test_each_newcomer_takes_the_state_of_its_place_whoever_leaves(mesh: str) -> None:
    unit = Mesh(**MESHES[mesh])
    assert all(list(_list_other_places(e, leaving, unit)) == [] for e, leaving in _grown(unit))


@UNITS
def test_a_variant_in_which_newcomers_take_from_any_place_fails(mesh: str) -> None:
    unit = Mesh(**MESHES[mesh])
    alike = [(replace(e, mesh=ONE_RANK), leaving) for e, leaving in _grown(unit)]
    assert any(list(_list_other_places(e, leaving, unit)) for e, leaving in alike)


def _grown(mesh: Mesh) -> Iterator[tuple[EpochLevel, tuple[Id, ...]]]:
    """Epochs of one to three units that one or two new units join; with each, the members that
    leave: none, or one.
    """
    for before in (1, 2, 3):
        for new in (1, 2):
            epoch = first_level(2 * before, mesh)
            joining = first_level(2 * (before + new), mesh).members[2 * before :]
            grown = replace(epoch, joining=joining)
            for leaving in [(), *((m.id,) for m in epoch.members if before > 1)]:
                yield grown, leaving


def _list_other_places(
    epoch: EpochLevel, leaving: tuple[Id, ...], mesh: Mesh
) -> Iterator[tuple[EpochMember, int]]:
    """The newcomers that copy the state of a rank at another place than their own."""
    after = {m.slot: m for m in with_newcomers(epoch.members, epoch.joining, mesh.count_slots(1))}
    for one in plan_transfers(epoch, "key", leaving):
        if mesh.place_of(after[one.slot].first) != mesh.place_of(one.giver):
            yield after[one.slot], one.giver
