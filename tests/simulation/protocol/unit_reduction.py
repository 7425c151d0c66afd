"""Model of the collectives of a step whose ranks form units of two: the ranks of a unit make each
pass together, and sums are made between units. At any point a rank may die, or a unit's collectives
may fail; the units that stay whole continue.

As in `reduction.py`, each rank's `Membership` is the product's. The ranks' reports go through
`unit_losses`, `regroup_rules` and `build_regroup` (`unit_regrouping.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from everstep.unit import Over, list_sums
from everstep_agent.coordinator import regroup_rules
from everstep_contract.units import Mesh
from simulation.protocol import unit_sums
from simulation.protocol.ranks import APPLYING, BETWEEN, Gang, Rank
from simulation.protocol.reduction import Reducing, Step, die, with_rank
from simulation.protocol.regrouping import Told
from simulation.protocol.rules import Move
from simulation.protocol.unit_regrouping import PRODUCT, UnitRules, decide, first_level, order
from simulation.protocol.world import keep, kept

MEASURING, LOST = "measuring", "lost"
"""Where the main thread is, in addition to the places in `ranks.py`: it has the sums, and waits for
its unit to measure their norm; a collective within its unit has failed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStep(Step):
    """Three micro-batches: with `shard` 2 one rank of the second unit begins with a filler."""

    steps: int = 1
    micro_batches: int = 3
    shard: int = 1
    tensor: int = 1
    units: UnitRules = PRODUCT
    fillers_weigh: bool = False
    """A variant: a filler is added to the sums."""
    breaks: bool = True
    """A unit's collectives may fail although no rank has died."""

    @property
    def mesh(self) -> Mesh:
        return Mesh(shard=self.shard, tensor=self.tensor)


class UnitReducing(Reducing):
    step: UnitStep

    def __init__(self, step: UnitStep) -> None:
        super().__init__(step)
        self.mesh = step.mesh

    def start(self, ranks: int, deaths: int = 1) -> Gang:
        gang = super().start(ranks, deaths)
        meshed = (
            r._replace(kept=r.kept._replace(shard=self.mesh.shard, tensor=self.mesh.tensor))
            for r in gang.ranks
        )
        return gang._replace(ranks=tuple(meshed), level=keep(first_level(ranks, self.mesh)))

    def events(self, world: Gang) -> list[Move]:
        found = super().events(world)
        units = {self._unit(r) for r in world.ranks} - world.broken if found else set()
        for unit in sorted(units) if self.step.breaks else ():
            after = world._replace(broken=world.broken | {unit}, deaths=world.deaths - 1)
            found.append(Move("has its collectives fail, unit", None, unit, after))
        return found

    def moves(self, world: Gang) -> list[Move]:
        found = [*super().moves(world), *self._end_lost(world)]
        if found or self.is_done(world):
            return found
        return [Move("stands still", None, None, world._replace(still=True))]

    def is_done(self, world: Gang) -> bool:
        return world.still or super().is_done(world)

    def check(self, before: Gang, move: Move) -> str:
        return unit_sums.check(before, move, self.mesh, self.step.micro_batches)

    def _unit(self, rank: Rank) -> int:
        """A process keeps its place in its unit, so the unit is the same in each epoch."""
        return self.mesh.unit_of(rank.number)

    def _is_cut(self, world: Gang, epoch: int) -> bool:
        members = world.members[epoch - 1]
        told = (r.told for r in world.ranks if r.number in members and r.kept.epoch == epoch)
        return super()._is_cut(world, epoch) or any(t and t.unit_lost for t in told)

    # --- the coordinator, and the agents that end ranks --------------------------------------

    def _coordinate(self, world: Gang) -> Iterator[Move]:
        level, members = kept(world.level), world.members[-1]
        if world.orders or not self._is_cut(world, level.number):
            return
        told = [
            Told(r.number, r.kept.epoch, standing=self._last_told(world, r)) for r in world.ranks
        ]
        dead = sorted({d.number for d in world.dead}.intersection(members))
        told += [Told(n, level.number, dead=True) for n in dead]
        ended, known, decision = decide(world.level, tuple(told), self.step.units)
        if ended != level.ended:
            named = world._replace(level=keep(replace(level, ended=ended)))
            yield Move("has ranks ended", None, tuple(members[r] for r in ended), named)
            return
        match decision:
            case regroup_rules.AskVector(rank=rank):
                yield from self._ask(world, members[rank], level.number)
            case regroup_rules.Plan():
                yield self._go_on(world, known, decision)
            case regroup_rules.Impossible(reason=reason):
                yield Move("cannot go on in place", None, None, world._replace(stuck=reason))

    def _go_on(self, world: Gang, known: tuple[int, ...], plan: regroup_rules.Plan) -> Move:
        following, members, orders = order(world.level, known, plan)
        after = world._replace(
            level=following,
            members=(*world.members, members),
            orders=tuple(zip(members, orders, strict=True)),
        )
        return Move("is planned, epoch", None, len(after.members), after)

    def _end_lost(self, world: Gang) -> Iterator[Move]:
        members = world.members[-1]
        named = {members[r] for r in kept(world.level).ended}
        for rank in world.ranks:
            if rank.number in named:
                ended = die(world, rank)._replace(deaths=world.deaths)
                yield Move("is ended", rank.number, None, ended)

    # --- the main thread ---------------------------------------------------------------------

    def _of_main(self, world: Gang, rank: Rank) -> Iterator[Move]:
        if rank.at != MEASURING:
            yield from super()._of_main(world, rank)
            return
        ends = (rank.reduced % self.step.loops) == 0
        measured = rank._replace(at=APPLYING if ends else BETWEEN)
        yield from self._with_unit(world, rank, (rank.reduced, 0), "has the norm", measured)

    def _compute(self, world: Gang, rank: Rank) -> Iterator[Move]:
        if rank.inside:
            at = (rank.reduced, len(rank.passes) + 1)
            yield from self._with_unit(world, rank, at, "has made its pass", self._end_pass(rank))
            return
        if rank.todo or rank.kept.more:
            rank, more = self._act(rank, "take_more")
            entered = rank._replace(todo=(*rank.todo, *more), inside=True)
            yield Move("begins its pass", rank.number, entered.todo[0], with_rank(world, entered))
            return
        yield from self._wait(world, rank)

    def _end_pass(self, rank: Rank) -> Rank:
        made, *todo = rank.todo
        index = ~made if made < 0 and self.step.fillers_weigh else made
        held = rank.held if index < 0 else rank.held | {index}
        rank = rank._replace(passes=(*rank.passes, made), todo=tuple(todo), held=held, inside=False)
        if todo:
            return rank
        return self._launch(rank, "group_now")

    def _with_unit(
        self, world: Gang, rank: Rank, place: tuple[int, int], kind: str, after: Rank
    ) -> Iterator[Move]:
        """A collective within the unit. It may be complete for one rank and fail for another."""
        unit = self._unit(rank)
        mates = [r for r in world.ranks if self._unit(r) == unit]
        dead = [r for r in world.dead if self._unit(r) == unit]
        if all(_place(r) >= place for r in mates + dead):
            yield Move(kind, rank.number, None, with_rank(world, after))
        if dead or unit in world.broken:
            lost, _ = self._act(rank, "lose_unit", "a rank of its unit is lost")
            failed = with_rank(world, lost._replace(at=LOST))
            yield Move("has a collective of its unit fail", rank.number, None, failed)

    def _list_summing(self, world: Gang, rank: Rank) -> tuple[int, ...]:
        members = world.members[rank.sent - 1]
        over = Over.REPLICAS if isinstance(self._list_collectives(rank)[rank.done], int) else None
        ranks = list_sums(self.mesh, members.index(rank.number), len(members))[over]
        return tuple(members[r] for r in ranks)

    def _deliver(self, rank: Rank, vector: tuple[int, int]) -> Rank:
        return super()._deliver(rank, vector)._replace(at=MEASURING, passes=())


def _place(rank: Rank) -> tuple[int, int]:
    """(reduction, number of passes of it that the rank has begun)."""
    return rank.reduced, len(rank.passes) + rank.inside
