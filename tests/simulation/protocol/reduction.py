"""Model of the collectives of a step, and of the survivors that continue the step when a rank dies
at any point.

`everstep.membership` decides which reductions are complete for a rank, what it reports, and what it
does with its orders. `regroup_rules` decides what follows from all reports (`survivors.py`,
`regrouping.py`). Modelled here are the order of a rank's own calls (`everstep.loop`), the
collectives, and deaths.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from everstep.membership import Membership
from everstep_agent.coordinator import regroup_rules
from everstep_contract import wire
from everstep_contract.ranges import to_ranges
from simulation.protocol import one_sum, survivors
from simulation.protocol.ranks import (
    APPLYING,
    BETWEEN,
    LOOP,
    NOBODY,
    OUT,
    PAST,
    VECTOR,
    Gang,
    Rank,
)
from simulation.protocol.regrouping import PRODUCT, Planned, Rules, Told, decide, order
from simulation.protocol.rules import Move
from simulation.protocol.survivors import MICRO_BATCHES, Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is explored: the product, or a variant."""

    steps: int = 2
    loops: int = 1
    """Loops in each step."""
    micro_batches: int = MICRO_BATCHES
    buckets: int = 1
    vector_last: bool = True
    keyed: bool = True
    """A vector belongs to the epoch in which it was given."""
    membership: type[Membership] = Membership
    promises: bool = True
    """A rank also reports what it will still compute."""
    rescue_waits: bool = True
    """A rank that is held does not accept a vector that was handed to it."""
    mark_waits: bool = True
    """A rank that is held does not name the epoch of its step yet."""
    rules: Rules = PRODUCT

    @property
    def order(self) -> list[int | str]:
        buckets: list[int | str] = [*range(self.buckets)]
        buckets.insert(self.buckets if self.vector_last else 0, VECTOR)
        return buckets


class Reducing:
    def __init__(self, step: Step | None = None) -> None:
        self.step = step or Step()
        self.order = self.step.order
        self.total = self.step.steps * self.step.loops
        self.kind = self.step.membership

    def start(self, ranks: int, deaths: int = 2) -> Gang:
        return Gang(
            ranks=tuple(Rank(n, survivors.first(n, ranks)) for n in range(ranks)),
            members=(tuple(range(ranks)),),
            deaths=deaths,
        )

    def events(self, world: Gang) -> list[Move]:
        if not world.deaths or len(world.ranks) == 1:
            return []
        return [Move("dies", r.number, None, die(world, r)) for r in world.ranks]

    def is_done(self, world: Gang) -> bool:
        return bool(world.stuck) or all(r.steps == self.step.steps for r in world.ranks)

    def moves(self, world: Gang) -> list[Move]:
        found = [m for rank in world.ranks for m in self._of_socket(world, rank)]
        found += self._coordinate(world)
        found += [m for rank in world.ranks for m in self._of_main(world, rank)]
        return found

    def _act(self, rank: Rank, name: str, *args: Any) -> tuple[Rank, Any]:
        """Make a call on the rank's `Membership`; a standing that it sends becomes the rank's
        report.
        """
        done = survivors.act(self.kind, rank.kept, name, *args)
        told = next((f for f in done.sent if isinstance(f, wire.Standing)), rank.told)
        return rank._replace(kept=done.kept, told=told), done.result

    def _is_cut(self, world: Gang, epoch: int) -> bool:
        """Whether a member of the epoch is dead."""
        members = world.members[epoch - 1]
        return any(d.number in members for d in world.dead)

    # --- the thread of the agent's socket ----------------------------------------------------

    def _of_socket(self, world: Gang, rank: Rank) -> Iterator[Move]:
        kept = rank.kept
        if not kept.held and self._is_cut(world, kept.epoch):
            held, _ = self._act(rank, "hold", kept.epoch)
            yield Move("is held", rank.number, None, with_rank(world, held))
        for number, frame in world.orders:
            if number == rank.number:
                yield Move("goes on in epoch", number, frame.epoch, self._enter(world, rank, frame))

    def _enter(self, world: Gang, rank: Rank, frame: wire.Regroup) -> Gang:
        entered, _ = self._act(rank, "regroup", frame)
        orders = tuple(o for o in world.orders if o != (rank.number, frame))
        after = with_rank(world, entered._replace(told=None))._replace(orders=orders)
        return _form(after, frame)

    # --- the coordinator ---------------------------------------------------------------------

    def _coordinate(self, world: Gang) -> Iterator[Move]:
        epoch = len(world.members)
        if world.orders or not self._is_cut(world, epoch):
            return
        members = world.members[-1]
        dead = {d.number for d in world.dead}
        told = [
            Told(r.number, r.kept.epoch, standing=self._last_told(world, r)) for r in world.ranks
        ]
        told += [Told(n, epoch, dead=True) for n in sorted(dead.intersection(members))]
        known, decision = decide(epoch, members, tuple(told), self.step.rules)
        match decision:
            case regroup_rules.AskVector(rank=rank):
                yield from self._ask(world, members[rank], epoch)
            case regroup_rules.Plan():
                orders = order(epoch, members, known, Planned(decision))
                after = world._replace(
                    members=(*world.members, known),
                    orders=tuple(zip(known, orders, strict=True)),
                    given=() if self.step.keyed else world.given,
                )
                yield Move("is planned, epoch", None, epoch + 1, after)
            case regroup_rules.Impossible(reason=reason):
                yield Move("cannot go on in place", None, None, world._replace(stuck=reason))

    def _ask(self, world: Gang, number: int, epoch: int) -> Iterator[Move]:
        rank = next(r for r in world.ranks if r.number == number)
        sent = survivors.act(self.kind, rank.kept, "give_vector", epoch).sent
        given = tuple((number, epoch, frame.vector) for frame in sent)
        if given:
            yield Move("gives its vector", number, None, world._replace(given=given))

    def _last_told(self, world: Gang, rank: Rank) -> wire.Standing | None:
        standing = _told(rank, self.step)
        return standing and replace(standing, vector=self._given(world, rank))

    def _given(self, world: Gang, rank: Rank) -> str:
        """The vector that the rank gave in its epoch, if any. The agent forgets the standing of a
        former epoch (`WorkerSet.continue_in`).
        """
        for number, epoch, value in world.given:
            if number == rank.number and (epoch == rank.kept.epoch or not self.step.keyed):
                return value
        return ""

    # --- the main thread ---------------------------------------------------------------------

    def _of_main(self, world: Gang, rank: Rank) -> Iterator[Move]:
        kept = rank.kept
        if rank.at == BETWEEN and rank.reduced < self.total and not kept.held:
            begun, share = self._act(rank, "begin", self.step.micro_batches)
            begun = begun._replace(at=LOOP, todo=share, sums=(0,) * self.step.buckets)
            yield Move("begins", rank.number, None, with_rank(world, begun))
        elif rank.at == LOOP and not rank.sent:
            yield from self._compute(world, rank)
        elif rank.at == LOOP and rank.done < len(self._list_collectives(rank)):
            yield from self._reduce(world, rank)
        elif rank.at == LOOP:
            yield self._end(world, rank)
        elif rank.at == OUT and not kept.held:
            yield Move(
                "hears of the regroup", rank.number, None, with_rank(world, rank._replace(at=PAST))
            )
        elif rank.at == PAST and self._may_take(kept):
            yield self._come_out(world, rank)
        elif rank.at == APPLYING and not (self.step.mark_waits and kept.held):
            marked, epoch = self._act(rank, "mark_applied", rank.steps + 1)
            marked = marked._replace(at=BETWEEN, steps=rank.steps + 1, attributed=epoch)
            yield Move("has applied its step", rank.number, None, with_rank(world, marked))

    def _may_take(self, kept: Kept) -> bool:
        return kept.rescue is None or not kept.held or not self.step.rescue_waits

    def _compute(self, world: Gang, rank: Rank) -> Iterator[Move]:
        kept = rank.kept
        if rank.todo or kept.more:
            rank, more = self._act(rank, "take_more")
            rank = rank._replace(todo=(), held=rank.held.union(rank.todo, more))
            computed = self._launch(rank, "group_now")
            yield Move("computes", rank.number, None, with_rank(world, computed))
        else:
            yield from self._wait(world, rank)

    def _wait(self, world: Gang, rank: Rank) -> Iterator[Move]:
        """What the rank does once it has computed its share."""
        kept = rank.kept
        if kept.rescue is not None and self._may_take(kept):
            yield self._come_out(world, rank)
        elif kept.group and not kept.held:
            launched = self._launch(rank, "wait_group")
            yield Move("sends", rank.number, None, with_rank(world, launched))

    def _launch(self, rank: Rank, name: str) -> Rank:
        """Launch the sums if the call returns a group: the buffers are filled anew."""
        after, group = self._act(rank, name)
        if group is None:
            return after
        first = after.kept.of_group
        sums = (*rank.sums[:first], *(0 for _ in rank.sums[first:]))
        return after._replace(sent=group.epoch, first=first, sums=sums)

    def _list_collectives(self, rank: Rank) -> list[int | str]:
        return [one for one in self.order if isinstance(one, str) or one >= rank.first]

    def _reduce(self, world: Gang, rank: Rank) -> Iterator[Move]:
        members = self._list_summing(world, rank)
        everyone = [r for r in world.ranks + world.dead if r.number in members]
        if all(_has_begun(r, rank) for r in everyone):
            what, sums, reduced = self._list_collectives(rank)[rank.done], rank.sums, rank
            if isinstance(what, int):
                sums = (*sums[:what], rank.sent, *sums[what + 1 :])
                here = what + 1 - rank.first
                reduced, _ = self._act(rank, "count_complete", rank.sent, here)
            reduced = reduced._replace(done=rank.done + 1, sums=sums)
            yield Move("holds the sum of", rank.number, what, with_rank(world, reduced))
        if self._is_cut(world, rank.sent):
            failed, _ = self._act(rank, "fail", rank.sent)
            failed = failed._replace(at=OUT)
            yield Move("has a collective fail", rank.number, None, with_rank(world, failed))

    def _list_summing(self, world: Gang, rank: Rank) -> tuple[int, ...]:
        """The ranks that take part in the collective that the rank waits for."""
        return world.members[rank.sent - 1]

    def _end(self, world: Gang, rank: Rank) -> Move:
        value = (rank.sent, rank.reduced)
        after, counts = self._act(rank, "complete", rank.sent, value)
        after = self._deliver(after, value) if counts else after._replace(at=OUT)
        kind = "has the reduction" if counts else "has a reduction that does not count"
        return Move(kind, rank.number, rank.reduced, with_rank(world, after))

    def _come_out(self, world: Gang, rank: Rank) -> Move:
        """After the regroup: the rank receives the vector, or repeats the reduction."""
        after, value = self._act(rank, "take_rescue")
        if value is None:
            again = after._replace(at=LOOP, sent=0, done=0, first=0)
            return Move("takes again", rank.number, rank.reduced, with_rank(world, again))
        if 0 in rank.sums:
            lacks = after._replace(lacks=True)
            return Move("is handed a vector", rank.number, None, with_rank(world, lacks))
        after = self._deliver(after, (int(value[0]), int(value[1])))
        return Move("is handed a vector", rank.number, None, with_rank(world, after))

    def _deliver(self, rank: Rank, vector: tuple[int, int]) -> Rank:
        ends = (rank.reduced + 1) % self.step.loops == 0
        return rank._replace(
            at=APPLYING if ends else BETWEEN, todo=(), held=frozenset(), sent=0, done=0, first=0, sums=(),
            reduced=rank.reduced + 1, last=(*rank.sums, *vector),
        )  # fmt: skip

    def check(self, before: Gang, move: Move) -> str:
        return one_sum.check(before, move)


def _told(rank: Rank, step: Step) -> wire.Standing | None:
    if step.promises or rank.told is None or rank.told.share is None:
        return rank.told
    return replace(rank.told, share=to_ranges(rank.held))


def _has_begun(other: Rank, rank: Rank) -> bool:
    """Whether the other rank's part of the collective that `rank` waits for is on its way, even if
    the other has died since.
    """
    if other.reduced != rank.reduced:
        return other.reduced > rank.reduced
    return other.sent == rank.sent and other.done >= rank.done


def _form(world: Gang, frame: wire.Regroup) -> Gang:
    """The group exists once every member has entered the epoch and is alive."""
    epoch, complete = frame.epoch, frame.complete_buckets
    members = world.members[epoch - 1]
    here = {r.number for r in world.ranks if r.kept.epoch == epoch}
    if len(here) == len(world.ranks):  # what the dead sent in former epochs no longer matters
        dead = tuple(d if d.sent == epoch else Rank(d.number, NOBODY) for d in world.dead)
        world = world._replace(dead=dead)
    if not here.issuperset(members):
        return world
    return world._replace(
        ranks=tuple(
            r._replace(kept=r.kept._replace(group=epoch, newest=epoch, of_group=complete))
            for r in world.ranks
        )
    )


def die(world: Gang, rank: Rank) -> Gang:
    return world._replace(
        ranks=tuple(r for r in world.ranks if r != rank),
        dead=(*world.dead, rank._replace(told=None)),
        orders=tuple(o for o in world.orders if o[0] != rank.number),
        deaths=world.deaths - 1,
    )


def with_rank(world: Gang, rank: Rank) -> Gang:
    return world._replace(ranks=tuple(rank if r.number == rank.number else r for r in world.ranks))
