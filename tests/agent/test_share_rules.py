"""Unit tests: who computes what of a reduction that is under way when a unit is lost."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from agent.given import a_member, an_epoch
from everstep.shares import plan_fillers, plan_share
from everstep_agent.coordinator import regroup_rules, share_rules
from everstep_agent.coordinator.regroup_rules import Impossible, Plan
from everstep_agent.coordinator.share_rules import Begun, Shared
from everstep_agent.peers.messages import EpochLevel
from everstep_agent.peers.places import place_members
from everstep_agent.pod.worker_start import build_regroup
from everstep_contract import wire
from everstep_contract.ranges import list_ranges, to_ranges
from everstep_contract.units import Mesh

SHARD, TENSOR, BOTH = Mesh(shard=2), Mesh(tensor=2), Mesh(shard=2, tensor=2)


def share_out(held, micro_batches):
    """Single ranks."""
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
    """For every way in which two or three ranks can hold some of the micro-batches."""
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
    assert shared.passes == {0: 2, 2: 2}, "by unit: the rest goes where no pass is added"


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


def test_who_has_yet_to_begin_in_two_stages_gets_no_third_one():
    """Its sibling has computed (0, 2) and then (4, 5), in this order."""
    told = {1: Begun(share=((0, 2),), passes=2)}
    begun = {0: Begun.of(((0, 2), (4, 5))), 1: None, 2: None, 3: None}
    shared = share_rules.share_out(begun, 8, TENSOR, told)
    assert isinstance(shared, Shared)
    assert shared.shares[1] == ((0, 2), (4, 5))
    assert shared.begun == told
    alone = {r: b for r, b in begun.items() if r < 2}
    assert share_rules.share_out(alone, 8, TENSOR, told) == (
        "rank 1 has yet to begin what it was given before"
    )


# --- units: all ways ------------------------------------------------------------------------------


@dataclass
class Rank:
    """Does what a worker does with its share: `order` is what it computes, pass by pass; None: a filler."""

    rank: int
    order: list[int | None] | None = None
    told: wire.Regroup | None = None
    former: list[int] = field(default_factory=list)

    def begin(self, mesh: Mesh, world: int, micro_batches: int) -> None:
        told = self.told
        if self.order is not None:
            return
        if told is None or told.share is None:
            shares = mesh.count_shares(world)
            mine = plan_share(mesh.data_index(self.rank), shares, micro_batches)
            first = plan_share(
                mesh.data_index(mesh.list_unit_of(self.rank).start), shares, micro_batches
            )
            self.order = [*mine, *[None] * len(plan_fillers(mine, len(first)))]
            return
        self.order = []
        if told.begun is not None:
            self.add(list_ranges(told.begun), told.begun_passes)
        self.add(list_ranges(told.share), told.passes)

    def add(self, share: Iterable[int], passes: int) -> None:
        assert self.order is not None
        self.order += [i for i in sorted(share) if i not in self.order]
        self.order += [None] * (passes - len(self.order))

    def take(self, frame: wire.Regroup) -> None:
        self.rank, self.told = frame.rank, frame
        if self.order is not None:
            held = [i for i in self.order if i is not None]
            assert {*held} <= {*list_ranges(frame.share or ())}, "what it holds, it keeps"
            self.add(list_ranges(frame.share or ()), frame.passes)

    def stand(self, epoch: int, micro_batches: int) -> wire.Standing:
        if self.order is None:
            return wire.Standing(epoch=epoch, applied=5, reductions=0)
        return wire.Standing(
            epoch=epoch,
            applied=5,
            reductions=0,
            share=to_ranges(i for i in self.order if i is not None),
            micro_batches=micro_batches,
            passes=len(self.order),
        )


class Job:
    """Units in pods of one rank each."""

    def __init__(self, mesh: Mesh, units: int, micro_batches: int) -> None:
        world = units * mesh.unit
        members = place_members(a_member(slot) for slot in range(world))
        self.level: EpochLevel = an_epoch(members=members, mesh=mesh)
        self.mesh, self.micro_batches = mesh, micro_batches
        self.ranks = [Rank(rank) for rank in range(world)]

    def begin(self, which: Iterable[bool]) -> None:
        for rank in itertools.compress(self.ranks, which):
            rank.begin(self.mesh, len(self.ranks), self.micro_batches)

    def lose(self, unit: int) -> Plan | Impossible:
        """The others go on, if they can."""
        number = self.level.number
        staying = [r for r in self.ranks if self.mesh.unit_of(r.rank) != unit]
        plan = regroup_rules.plan_regroup(
            {r.rank: r.stand(number, self.micro_batches) for r in staying},
            self.mesh,
            self.level.in_place,
        )
        assert isinstance(plan, Plan | Impossible)
        if isinstance(plan, Impossible):
            return plan
        members = [self.level.members[r.rank] for r in staying]
        self.level = regroup_rules.continue_epoch(
            self.level, members, plan, number=number + 1, token="t"
        )
        for rank, member in zip(staying, self.level.members, strict=True):
            rank.take(build_regroup(0, self.level, member))
        self.ranks = staying
        return plan

    def check(self) -> None:
        """Each micro-batch once, in lockstep."""
        self.begin([True] * len(self.ranks))
        done: list[int] = []
        for rank in self.ranks:
            mates = [self.ranks[r] for r in self.mesh.list_unit_of(rank.rank)]
            assert rank.order is not None
            assert all(m.order is not None and len(m.order) == len(rank.order) for m in mates)
            alike = self.mesh.data_index(rank.rank)
            assert all(
                m.order == rank.order for m in mates if self.mesh.data_index(m.rank) == alike
            )
            if self.mesh.counts(rank.rank):
                done += [i for i in rank.order if i is not None]
        assert sorted(done) == list(range(self.micro_batches))


def all_ways(count: int) -> Iterable[tuple[bool, ...]]:
    return itertools.product((False, True), repeat=count)


@pytest.mark.parametrize("mesh", [SHARD, TENSOR, BOTH], ids=str)
@pytest.mark.parametrize("micro_batches", [3, 5])
def test_after_one_loss_each_micro_batch_is_computed_once_in_lockstep(mesh: Mesh, micro_batches):
    for begun, lost in itertools.product(all_ways(2 * mesh.unit), range(2)):
        job = Job(mesh, 2, micro_batches)
        job.begin(begun)
        assert isinstance(job.lose(lost), Plan)
        job.check()


@pytest.mark.parametrize("mesh", [SHARD, TENSOR], ids=str)
def test_so_it_is_after_a_second_loss_before_all_have_begun(mesh: Mesh):
    refused = 0
    for begun, later, lost_later in itertools.product(all_ways(6), all_ways(4), range(2)):
        job = Job(mesh, 3, 7)
        job.begin(begun)
        assert isinstance(job.lose(1), Plan)
        job.begin(later)
        second = job.lose(lost_later)
        if isinstance(second, Plan):
            job.check()
        else:
            refused += 1
            assert "has yet to begin" in second.reason
            assert not all(r.order for r in job.ranks)
    assert (refused > 0) == (mesh == TENSOR)


def test_the_largest_number_of_passes_is_the_smallest_that_there_is():
    """For every way in which two units of two can have begun."""
    for begun in all_ways(4):
        job = Job(SHARD, 3, 9)
        job.begin((*begun, False, False))
        before = [len(r.order or ()) for r in job.ranks[:4]]
        held = [len([i for i in r.order or () if i is not None]) for r in job.ranks[:4]]
        job.lose(2)
        job.check()
        after = max(len(r.order or ()) for r in job.ranks)
        fits = (
            n for n in itertools.count(max(before)) if sum(n - p for p in before) >= 9 - sum(held)
        )
        assert after == next(fits)


def test_a_level_for_single_ranks_is_as_before():
    level = an_epoch(2)
    plan = Plan(applied=5, reductions=0, micro_batches=4, shares={0: ((0, 2),), 1: ((2, 4),)})
    after = regroup_rules.continue_epoch(level, level.members, plan, number=2, token="t")
    assert after.in_place is not None
    assert (after.in_place.passes, after.in_place.begun, after.in_place.begun_passes) == (
        (),
        {},
        {},
    )
    frame = build_regroup(0, after, after.members[1])
    assert (frame.passes, frame.begun, frame.begun_passes) == (0, None, 0)
    assert replace(after, in_place=None).resume == 0
