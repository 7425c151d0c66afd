"""Derives the ranks' orders from their reports with the agent's functions; cached by arguments."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from everstep_agent.coordinator import regroup_rules, share_rules
from everstep_agent.coordinator.regroup_rules import Plan
from everstep_agent.peers.agent_report import AgentReport, State, WorkerReport
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_agent.pod.worker_start import build_regroup
from everstep_contract import wire
from everstep_contract.ranges import Ranges, list_ranges, to_ranges


class Told(NamedTuple):
    """What a rank's agent reports about it; each rank has a pod of its own."""

    number: int
    epoch: int
    dead: bool = False
    standing: wire.Standing | None = None


@lru_cache(maxsize=1 << 18)
def decide(
    epoch: int, members: tuple[int, ...], told: tuple[Told, ...], rules: "Rules"
) -> tuple[tuple[int, ...], regroup_rules.Decision | regroup_rules.Wait]:
    """The numbers of the survivors, and the decision about them."""
    standings = tuple(t._replace(standing=rules.tell(t.standing)) for t in told)
    reports = [report(t) for t in standings]
    survivors, decision = regroup_rules.decide_regroup(_level(epoch, members), reports)
    return tuple(m.slot for m in survivors), rules.plan(decision, reports)


@lru_cache(maxsize=1 << 16)
def order(
    epoch: int, members: tuple[int, ...], survivors: tuple[int, ...], plan: "Planned"
) -> tuple[wire.Regroup, ...]:
    """The order that each survivor receives."""
    former = _level(epoch, members)
    kept = [m for m in former.members if m.slot in survivors]
    following = regroup_rules.continue_epoch(
        former, kept, plan.plan, number=epoch + 1, token="token"
    )
    return tuple(build_regroup(0, following, m) for m in following.members)


class Planned:
    """A plan as part of a cache key; it is compared by its content."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._key = (
            plan.applied, plan.reductions, plan.micro_batches, tuple(sorted(plan.shares.items())),
            plan.behind, plan.vector, plan.complete_buckets, tuple(sorted(plan.passes.items())),
            tuple(sorted((r, b.share, b.passes) for r, b in plan.begun.items())),
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Planned) and self._key == other._key


class Rules:
    """The product's rules; a subclass is a variant that must fail."""

    def tell(self, standing: wire.Standing | None) -> wire.Standing | None:
        return standing

    def plan(
        self, decision: regroup_rules.Decision | regroup_rules.Wait, reports: list[AgentReport]
    ) -> regroup_rules.Decision | regroup_rules.Wait:
        return decision


PRODUCT = Rules()


class Backmost(Rules):
    """Variant: the plan uses the position of the rank that is furthest behind."""

    def plan(self, decision, reports):  # type: ignore[no-untyped-def]
        if isinstance(decision, Plan):
            told = [w.standing for r in reports for w in r.workers if w.standing is not None]
            return replace(decision, applied=min(s.applied for s in told))
        return decision


class Twice(Rules):
    """Variant: the micro-batches that a lost member leaves go to every survivor."""

    def plan(self, decision, reports):  # type: ignore[no-untyped-def]
        if isinstance(decision, Plan) and decision.shares:
            told = {r.slot: w.standing for r in reports for w in r.workers}
            held = {s: list(_held(t)) for s, t in told.items()}
            rest = set(range(decision.micro_batches)).difference(*held.values())
            return replace(decision, shares=_add(decision.shares, rest))
        return decision


class Anew(Rules):
    """Variant: all micro-batches are shared out again, whichever rank holds them."""

    def plan(self, decision, reports):  # type: ignore[no-untyped-def]
        if isinstance(decision, Plan) and decision.shares:
            nothing = dict.fromkeys(decision.shares, None)
            shared = share_rules.share_out(nothing, decision.micro_batches)
            assert isinstance(shared, share_rules.Shared)
            return replace(decision, shares=shared.shares)
        return decision


class AnyComplete(Rules):
    """Variant: buckets that are complete on one survivor are not summed again."""

    def plan(self, decision, reports):  # type: ignore[no-untyped-def]
        if isinstance(decision, Plan):
            told = [w.standing for r in reports for w in r.workers if w.standing is not None]
            return replace(decision, complete_buckets=max(s.complete_buckets for s in told))
        return decision


def _held(standing: wire.Standing | None) -> list[int]:
    return list_ranges(standing.share or ()) if standing is not None else []


def _add(shares: Mapping[int, Ranges], rest: set[int]) -> dict[int, Ranges]:
    return {rank: to_ranges({*rest, *list_ranges(share)}) for rank, share in shares.items()}


def _level(epoch: int, members: tuple[int, ...]) -> EpochLevel:
    return EpochLevel(
        number=epoch,
        token="token",
        stage=Stage.HOLD,
        members=tuple(
            EpochMember(
                slot=n, attempt=0, incarnation=1, node_rank=at, first=at, lives=(1,), address=""
            )
            for at, n in enumerate(members)
        ),
    )


def report(told: Told) -> AgentReport:
    state = State.DEAD if told.dead else State.HELD if told.standing else State.TRACKED
    worker = WorkerReport(local=0, life=1, pid=1, state=state, standing=told.standing)
    return AgentReport(
        slot=told.number, attempt=0, incarnation=1, address="", epoch=told.epoch, workers=(worker,)
    )
