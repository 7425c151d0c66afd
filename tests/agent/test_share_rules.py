"""Unit tests: who computes what in the current reduction after a unit is lost."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from agent.given import a_member, an_epoch
from everstep.membership import Membership
from everstep_agent.coordinator import regroup_rules, share_rules
from everstep_agent.coordinator.regroup_rules import AskVector, Plan
from everstep_agent.coordinator.share_rules import Begun, Shared
from everstep_agent.peers.epoch_level import EpochLevel
from everstep_agent.peers.places import place_members
from everstep_agent.pod.worker_start import build_regroup
from everstep_contract.ranges import list_ranges, to_ranges
from everstep_contract.units import Mesh
from simulation.protocol.survivors import act, first

SHARD, TENSOR, BOTH = Mesh(shard=2), Mesh(tensor=2), Mesh(shard=2, tensor=2)


def share_out(held, micro_batches):
    """Share out among units of one rank."""
    shared = share_rules.share_out({r: Begun.of(s) for r, s in held.items()}, micro_batches)
    assert isinstance(shared, Shared)
    assert (shared.passes, shared.begun) == ({}, {})
    return shared.shares


def test_what_a_lost_rank_leaves_goes_in_runs_to_those_that_have_least():
    assert share_out({0: ((0, 4),), 2: ((8, 12),)}, 12) == {0: ((0, 6),), 2: ((6, 12),)}


def test_a_rank_that_has_not_begun_takes_more_than_one_that_has():
    assert share_out({0: ((0, 4),), 1: None}, 8) == {0: ((0, 4),), 1: ((4, 8),)}


def test_a_rank_keeps_a_share_that_is_larger_than_the_others():
    assert share_out({0: ((0, 9),), 1: ()}, 10) == {0: ((0, 9),), 1: ((9, 10),)}


@pytest.mark.parametrize("micro_batches", [1, 4, 6])
def test_each_micro_batch_once_survivors_keep_theirs_and_the_largest_share_is_smallest(
    micro_batches,
):
    """For every way in which two or three ranks can hold the micro-batches or leave some to nobody."""
    for ranks in (2, 3):
        for owners in itertools.product(range(-1, ranks), repeat=micro_batches):
            have = [[i for i, o in enumerate(owners) if o == r] for r in range(ranks)]
            shares = share_out({r: to_ranges(have[r]) for r in range(ranks)}, micro_batches)
            shares = {r: list_ranges(s) for r, s in shares.items()}
            assert sorted(i for s in shares.values() for i in s) == list(range(micro_batches))
            assert all(set(have[r]) <= set(shares[r]) for r in range(ranks))
            least = max(-(-micro_batches // ranks), *(len(h) for h in have))
            assert max(len(s) for s in shares.values()) == least


# --- units: by value ------------------------------------------------------------------------------


def test_fillers_that_a_rank_has_begun_count_as_passes():
    begun = {
        0: Begun(share=((0, 1),), passes=2),
        1: Begun(share=((1, 3),), passes=2),
        4: None,
        5: None,
    }
    shared = share_rules.share_out(begun, 6, SHARD)
    assert isinstance(shared, Shared)
    assert shared.shares == {0: ((0, 1),), 1: ((1, 3),), 4: ((3, 5),), 5: ((5, 6),)}
    assert shared.passes == {0: 2, 2: 2}, "by unit; the rest must add no pass"


def test_ranks_that_compute_the_same_get_the_same_and_the_late_one_begins_as_the_other_did():
    begun = {0: Begun.of(((0, 2),), 3), 1: None, 4: None, 5: None}
    shared = share_rules.share_out(begun, 8, TENSOR)
    assert isinstance(shared, Shared)
    assert shared.shares == {0: ((0, 4),), 1: ((0, 4),), 4: ((4, 8),), 5: ((4, 8),)}
    assert shared.passes == {0: 5, 2: 4}
    assert shared.begun == {1: Begun(share=((0, 2),), passes=3)}


def test_ranks_that_should_compute_the_same_and_do_not_cannot_go_on():
    begun = {0: Begun.of(((0, 2),)), 1: Begun.of(((0, 3),))}
    found = share_rules.share_out(begun, 4, TENSOR)
    assert found == "ranks 0 and 1 should compute the same micro-batches, and do not"


# --- units: all ways ------------------------------------------------------------------------------


class Job:
    """Units in pods of one rank each. The runtime's own `Membership` acts for each rank."""

    def __init__(self, mesh: Mesh, units: int, micro_batches: int) -> None:
        world = units * mesh.unit
        members = place_members(a_member(slot) for slot in range(world))
        self.level: EpochLevel = an_epoch(members=members, mesh=mesh)
        self.mesh, self.micro_batches = mesh, micro_batches
        self.ranks = [
            first(rank, world)._replace(shard=mesh.shard, tensor=mesh.tensor)
            for rank in range(world)
        ]

    def begin(self, which: Iterable[bool]) -> None:
        """Let the ranks in `which` begin the next loop, unless they are in one."""
        for rank, begins in enumerate(which):
            if begins and self.ranks[rank].begun is None and self.ranks[rank].rescue is None:
                self.act(rank, "begin", self.micro_batches)

    def complete(self, which: Iterable[bool]) -> None:
        """Let the ranks in `which` complete the current reduction."""
        for rank, completes in enumerate(which):
            if completes:
                self.act(rank, "complete", self.level.number, (7.0,))

    def take_vectors(self, which: Iterable[bool]) -> None:
        for rank, takes in enumerate(which):
            if takes:
                self.act(rank, "take_rescue")

    def lose(self, unit: int) -> None:
        """Lose this unit; the others continue."""
        lost = self.mesh.list_unit_of(unit * self.mesh.unit)
        staying = [r for r in range(len(self.ranks)) if r not in lost]
        plan = self.plan(staying)
        members = [self.level.members[r] for r in staying]
        self.level = regroup_rules.continue_epoch(
            self.level, members, plan, number=self.level.number + 1, token="t"
        )
        former = [self.ranks[r] for r in staying]
        self.ranks = [*former]
        for rank, member in enumerate(self.level.members):
            frame = build_regroup(0, self.level, member)
            self.act(rank, "regroup", frame)
            begun = None if frame.vector else former[rank].begun
            assert begun is None or (self.ranks[rank].begun or ())[: len(begun)] == begun

    def plan(self, staying: Iterable[int]) -> Plan:
        number = self.level.number
        told = {rank: self.act(rank, "hold", number) for rank in staying}
        plan = regroup_rules.plan_regroup(told, self.mesh)
        if isinstance(plan, AskVector):
            told[plan.rank] = self.act(plan.rank, "give_vector", number)
            plan = regroup_rules.plan_regroup(told, self.mesh)
        assert isinstance(plan, Plan)
        return plan

    def act(self, rank: int, name: str, *args: object) -> Any:
        """Let the rank act; return the first frame that it sends."""
        done = act(Membership, self.ranks[rank], name, *args)
        self.ranks[rank] = done.kept
        return next(iter(done.sent), None)

    def check(self) -> None:
        """Assert that each micro-batch is computed once, in lockstep."""
        self.take_vectors([True] * len(self.ranks))
        self.begin([True] * len(self.ranks))
        done: list[int] = []
        orders = [rank.begun or () for rank in self.ranks]
        for rank, order in enumerate(orders):
            mates = self.mesh.list_unit_of(rank)
            assert all(len(orders[m]) == len(order) for m in mates)
            index = self.mesh.data_index(rank)
            assert all(orders[m] == order for m in mates if self.mesh.data_index(m) == index)
            if self.mesh.counts(rank):
                done += real(order)
        assert sorted(done) == list(range(self.micro_batches))


def real(passes: Iterable[int] | None) -> list[int]:
    return [i for i in passes or () if i >= 0]


def all_ways(count: int) -> Iterable[tuple[bool, ...]]:
    return itertools.product((False, True), repeat=count)


@pytest.mark.parametrize("mesh", [SHARD, TENSOR, BOTH], ids=str)
@pytest.mark.parametrize("micro_batches", [3, 5])
def test_after_one_loss_each_micro_batch_is_computed_once_in_lockstep(mesh: Mesh, micro_batches):
    for begun, lost in itertools.product(all_ways(2 * mesh.unit), range(2)):
        job = Job(mesh, 2, micro_batches)
        job.begin(begun)
        job.lose(lost)
        job.check()


@pytest.mark.parametrize("mesh", [SHARD, TENSOR], ids=str)
def test_so_it_is_after_a_second_loss_before_all_have_begun(mesh: Mesh):
    for begun, later, lost_later in itertools.product(all_ways(6), all_ways(4), range(2)):
        job = Job(mesh, 3, 7)
        job.begin(begun)
        job.lose(1)
        job.begin(later)
        job.lose(lost_later)
        job.check()


def test_so_it_is_while_some_have_yet_to_take_the_vector_of_the_reduction_before():
    """Two losses in a row, in which a rank has begun the next reduction and its sibling lacks the vector."""
    for complete, begun in itertools.product(all_ways(3), repeat=2):
        for taken, later in itertools.product(all_ways(2), repeat=2):
            job = Job(TENSOR, 3, 7)
            job.begin([True] * 6)
            job.complete((False, False, complete[0], *complete))
            job.begin((False, False, begun[0], *begun))
            job.lose(0)
            job.take_vectors((False, False, *taken))
            job.begin((False, False, *later))
            job.lose(0)
            job.check()


def test_the_largest_number_of_passes_is_the_smallest_that_there_is():
    """For every way in which two units of two can have begun."""
    for begun in all_ways(4):
        job = Job(SHARD, 3, 9)
        job.begin((*begun, False, False))
        before = [len(r.begun or ()) for r in job.ranks[:4]]
        held = [len(real(r.begun)) for r in job.ranks[:4]]
        job.lose(2)
        job.check()
        after = max(len(r.begun or ()) for r in job.ranks)
        fits = (
            n for n in itertools.count(max(before)) if sum(n - p for p in before) >= 9 - sum(held)
        )
        assert after == next(fits)


def test_a_level_for_single_ranks_is_as_before():
    level = an_epoch(2)
    plan = Plan(applied=5, reductions=0, micro_batches=4, shares={0: ((0, 2),), 1: ((2, 4),)})
    after = regroup_rules.continue_epoch(level, level.members, plan, number=2, token="t")
    assert after.in_place is not None
    assert (after.in_place.passes, after.in_place.begun) == ((), ())
    frame = build_regroup(0, after, after.members[1])
    assert (frame.passes, frame.begun, frame.begun_passes) == (0, None, 0)
    assert replace(after, in_place=None).resume == 0
