"""Model of an armed boundary: how ranks that keep stepping come to stop at the same step.

The coordinator's part is the runtime's own code (`boundaries.arm`, `advance`). Modelled here are
the agent's part (arm first, look at the worker's step second) and the worker's (ask at the armed
step).
"""

from collections.abc import Iterator
from typing import NamedTuple

from everstep_agent.coordinator import boundaries
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import Boundary, EpochMember
from simulation.protocol.rules import Move

LAST = 6
"""The run's last step. Each raise moves the boundary further, but there are too few raises to reach
this step.
"""


class Rank(NamedTuple):
    applied: int = 0
    page: int = 0
    """The boundary that its agent has written to the position page."""
    acked: int = 0
    heard: int = 0
    """The boundary in the newest level that its agent has received."""
    asks: bool = False
    stopped: bool = False
    told: tuple[int, int, int] = (0, 0, 0)
    """What the coordinator last heard about it: (applied, acked, passed)."""


class Stop(NamedTuple):
    ranks: tuple[Rank, ...]
    boundary: int = 0
    confirmed: bool = False
    raises: int = 0


class Arming:
    """`armed` False: a variant in which a boundary counts as soon as it is announced."""

    def __init__(self, *, armed: bool = True) -> None:
        self.armed = armed

    def start(self, ranks: int) -> Stop:
        return Stop(ranks=(Rank(),) * ranks)

    def events(self, world: Stop) -> list[Move]:
        return []

    def is_done(self, world: Stop) -> bool:
        return all(r.stopped or r.applied == LAST for r in world.ranks)

    def moves(self, world: Stop) -> list[Move]:
        found = list(self._arm(world))
        for i in range(len(world.ranks)):
            found += self._of_rank(world, i)
        return found

    def check(self, before: Stop, move: Move) -> str:
        after: Stop = move.after
        passed = [r.applied for r in after.ranks if r.applied > after.boundary]
        if after.confirmed and passed:
            return f"boundary {after.boundary} counts, and a rank is at step {passed[0]}"
        if len({r.applied for r in after.ranks if r.stopped}) > 1:
            return "ranks have stopped at different steps"
        return ""

    def _arm(self, world: Stop) -> Iterator[Move]:
        if world.confirmed:
            return
        if not world.boundary:
            step = boundaries.arm((r.told[0] for r in world.ranks), stay=True).step
            armed = world._replace(boundary=step, confirmed=not self.armed)
            yield Move("arms", "coordinator", step, armed)
            return
        members = [_member(i) for i in range(len(world.ranks))]
        reports = [_report(i, r) for i, r in enumerate(world.ranks)]
        now = Boundary(step=world.boundary, stay=True)
        moved = boundaries.advance(now, members, reports, raises=world.raises)
        if moved.step != now.step:
            raised = world._replace(boundary=moved.step, raises=world.raises + 1)
            yield Move("raises it", "coordinator", moved.step, raised)
        elif moved.confirmed:
            yield Move("confirms", "coordinator", None, world._replace(confirmed=True))

    def _of_rank(self, world: Stop, i: int) -> Iterator[Move]:
        rank = world.ranks[i]
        if rank.heard != world.boundary:
            page = rank._replace(heard=world.boundary, page=world.boundary)
            acked = page.heard if rank.applied < page.heard else rank.acked
            yield Move("is told", i, world.boundary, _with(world, i, page._replace(acked=acked)))
        passed = rank.applied if rank.heard and rank.heard != rank.acked else 0
        says = rank.applied, rank.acked, passed
        if rank.told != says:
            yield Move("is heard", i, None, _with(world, i, rank._replace(told=says)))
        if rank.asks:
            yield from _answer(world, i, rank)
        elif not rank.stopped and rank.applied < LAST and _may_step(world, rank):
            applied = rank._replace(applied=rank.applied + 1)
            asks = applied._replace(asks=applied.page == applied.applied)
            yield Move("applies a step", i, None, _with(world, i, asks))


def _answer(world: Stop, i: int, rank: Rank) -> Iterator[Move]:
    """The agent answers from the newest level that it has received."""
    if rank.heard != rank.applied:
        yield Move("goes on", i, None, _with(world, i, rank._replace(asks=False)))
    elif world.confirmed and world.boundary == rank.applied:
        stopped = rank._replace(asks=False, stopped=True)
        yield Move("stops", i, None, _with(world, i, stopped))


def _may_step(world: Stop, rank: Rank) -> bool:
    """Whether every rank takes part in the step, or has already applied it."""
    return all(
        r.applied > rank.applied or (r.applied == rank.applied and not r.asks and not r.stopped)
        for r in world.ranks
    )


def _with(world: Stop, i: int, rank: Rank) -> Stop:
    return world._replace(ranks=(*world.ranks[:i], rank, *world.ranks[i + 1 :]))


def _member(i: int) -> EpochMember:
    return EpochMember(
        slot=i, attempt=1, incarnation=1, node_rank=i, first=i, lives=(1,), address=""
    )


def _report(i: int, rank: Rank) -> AgentReport:
    _, acked, passed = rank.told
    return AgentReport(slot=i, attempt=1, incarnation=1, address="", acked=acked, passed=passed)
