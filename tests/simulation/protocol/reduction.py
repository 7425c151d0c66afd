"""The collectives of a step, explored: what a rank that holds the vector may say of the others.

Ahead of the runtime, whose every epoch resumes from a commit: here survivors regroup in place by the rule of
`decide`, so that what rests on the order of the collectives, and on the epoch in a vector's name, can break. Shares are
the runtime's (`shares.share`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from everstep.shares import share
from simulation.protocol.rules import Move

STEPS, BATCHES = 2, 4
BUCKETS = 2
VECTOR = "vector"


class Rank(NamedTuple):
    number: int
    share: frozenset[int] = frozenset()
    """Micro-batches that it takes in this step."""
    held: frozenset[int] = frozenset()
    """Those in its accumulators."""
    done: int = 0
    """Collectives of this step that are complete here: one thread, one after the other."""
    sums: tuple[int, ...] = (0,) * BUCKETS
    """Epoch of the sum in each bucket of the reduced copy."""
    vector: int = 0
    """Epoch of the vector that it holds."""
    applied: tuple[tuple[int, ...], ...] = ()
    """Of each step, the sums that it was applied with."""
    cut: bool = False
    copied: bool = False
    """It has its state from another: a survivor that was taken for a newcomer."""

    @property
    def has_sent(self) -> bool:
        return self.share <= self.held

    @property
    def step(self) -> int:
        return len(self.applied)


class Gang(NamedTuple):
    ranks: tuple[Rank, ...]
    dead: tuple[Rank, ...] = ()
    """Members of this epoch, as they stood."""
    epoch: int = 1
    deaths: int = 2
    mail: frozenset[tuple[int, int]] = frozenset()
    """(step, epoch) of vectors that are on their way to who coordinates; their senders may be dead."""
    heard: frozenset[tuple[int, int]] = frozenset()


class Reducing:
    """`vector_last` False: a variant that sends it before the buckets; `keyed` False: one in which a vector is that of
    its step, whatever the epoch.
    """

    def __init__(self, *, vector_last: bool = True, keyed: bool = True) -> None:
        order: list[int | str] = [*range(BUCKETS)]
        order.insert(BUCKETS if vector_last else 0, VECTOR)
        self.order, self.keyed = order, keyed

    def start(self, ranks: int) -> Gang:
        return Gang(ranks=_shared([Rank(n) for n in range(ranks)]))

    def events(self, world: Gang) -> list[Move]:
        if not world.deaths or len(world.ranks) == 1:
            return []
        return [Move("dies", r.number, None, _die(world, r)) for r in world.ranks]

    def is_done(self, world: Gang) -> bool:
        return all(r.step == STEPS for r in world.ranks)

    def moves(self, world: Gang) -> list[Move]:
        found = [m for rank in world.ranks for m in self._of_rank(world, rank)]
        for vector in sorted(world.mail):
            heard = world._replace(mail=world.mail - {vector}, heard=world.heard | {vector})
            found.append(Move("is heard of, the vector", None, vector, heard))
        if all(r.cut and r.done < len(self.order) for r in world.ranks):
            regrouped = decide(world, keyed=self.keyed)
            found.append(Move("is regrouped as epoch", None, regrouped.epoch, regrouped))
        return found

    def check(self, before: Gang, move: Move) -> str:
        after: Gang = move.after
        taken = sorted(b for r in (*after.ranks, *after.dead) for b in r.share)
        if taken != list(range(BATCHES)) and all(
            r.step == after.ranks[0].step for r in after.ranks + after.dead
        ):
            return f"micro-batches {taken} are in one sum"
        return _one_sum(after.ranks)

    def _of_rank(self, world: Gang, rank: Rank) -> Iterator[Move]:
        if rank.step == STEPS:
            if world.dead and not rank.cut:
                yield Move("is cut", rank.number, None, _with(world, rank._replace(cut=True)))
            return
        if rank.done == len(self.order):
            yield Move("applies", rank.number, rank.sums, _with(world, _applied(world, rank)))
            return
        if rank.cut:
            return
        if world.dead:
            yield Move("is cut", rank.number, None, _with(world, rank._replace(cut=True)))
        if not rank.has_sent:
            sent = rank._replace(held=rank.share)
            yield Move("computes", rank.number, None, _with(world, sent))
        elif all(_has_begun(r, rank.step, rank.done) for r in world.ranks + world.dead):
            yield self._complete(world, rank)

    def _complete(self, world: Gang, rank: Rank) -> Move:
        what, mail = self.order[rank.done], world.mail
        after = rank._replace(done=rank.done + 1)
        if isinstance(what, int):
            after = after._replace(sums=(*rank.sums[:what], world.epoch, *rank.sums[what + 1 :]))
        else:
            after = after._replace(vector=world.epoch)
            mail |= {(rank.step, world.epoch)}
        return Move("holds", rank.number, what, _with(world._replace(mail=mail), after))


def decide(world: Gang, *, keyed: bool = True) -> Gang:
    """The next epoch, of all who live. If one of them holds the vector of the step, all who hold the copy of the same
    epoch apply it, and who does not is a newcomer; otherwise all take the step again: each keeps what its accumulators
    hold, and the rest is shared out.
    """
    step = min(r.step for r in world.ranks)
    late = [r for r in world.ranks if r.step == step]
    known = any(r.step > step or r.vector == world.epoch for r in world.ranks)
    if not keyed:
        known = known or any(s == step for s, _ in world.heard)
    fresh = world._replace(epoch=world.epoch + 1, dead=())
    if not known or step == STEPS:
        return fresh._replace(
            ranks=_shared([r._replace(done=0, vector=0, cut=False) for r in world.ranks])
        )
    holders = [r for r in late if (set(r.sums) == {world.epoch} if keyed else 0 not in r.sums)]
    ahead = [r for r in world.ranks if r.step > step] + [_applied(world, r) for r in holders]
    model = ahead[0].applied if ahead else ()
    lost = [r._replace(applied=model, copied=True) for r in late if r not in holders]
    ranks = sorted([*ahead, *lost], key=lambda r: r.number)
    return fresh._replace(ranks=_shared([r._replace(done=0, vector=0, cut=False) for r in ranks]))


def _shared(ranks: Sequence[Rank]) -> tuple[Rank, ...]:
    """Each keeps what it holds; the rest is shared out."""
    rest = sorted(set(range(BATCHES)).difference(*(r.held for r in ranks)))
    shares = (share(at, len(ranks), len(rest)) for at in range(len(ranks)))
    return tuple(
        r._replace(share=r.held | {rest[i] for i in s}) for r, s in zip(ranks, shares, strict=True)
    )


def _applied(world: Gang, rank: Rank) -> Rank:
    members = sorted(r.number for r in world.ranks + world.dead)
    mine = frozenset(share(members.index(rank.number), len(members), BATCHES))
    return rank._replace(
        applied=(*rank.applied, rank.sums), share=mine, held=frozenset(), done=0, vector=0, sums=(0,) * BUCKETS
    )  # fmt: skip


def _has_begun(rank: Rank, step: int, at: int) -> bool:
    """Its part of this collective is on its way, also if it has died since."""
    return rank.step > step or (rank.step == step and rank.has_sent and rank.done >= at)


def _die(world: Gang, rank: Rank) -> Gang:
    ranks = tuple(r for r in world.ranks if r != rank)
    return world._replace(ranks=ranks, dead=(*world.dead, rank), deaths=world.deaths - 1)


def _with(world: Gang, rank: Rank) -> Gang:
    return world._replace(ranks=tuple(rank if r.number == rank.number else r for r in world.ranks))


def _one_sum(ranks: Sequence[Rank]) -> str:
    """All who live applied the same sum, and none a mixture."""
    for rank in ranks:
        if rank.copied:
            return f"rank {rank.number} lived, and has its state from another"
        mixed = [sums for sums in rank.applied if len(set(sums)) > 1]
        if mixed:
            return f"rank {rank.number} applied sums of several epochs: {mixed[0]}"
        for other in ranks:
            short = min(rank.step, other.step)
            if rank.applied[:short] != other.applied[:short]:
                return f"ranks {rank.number} and {other.number} applied different sums"
    return ""
