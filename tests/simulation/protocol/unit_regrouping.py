"""Derives the orders of the ranks of units from their reports with the agent's functions; cached by
arguments. Each rank has a pod of its own, so a unit spans two pods.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from everstep_agent.coordinator import regroup_rules, unit_losses
from everstep_agent.coordinator.regroup_rules import Plan
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_agent.pod.worker_start import build_regroup
from everstep_contract import wire
from everstep_contract.ranges import list_ranges, to_ranges
from everstep_contract.units import ONE_RANK, Mesh
from simulation.protocol.regrouping import Planned, Told, report
from simulation.protocol.world import keep, kept

Decided = regroup_rules.Decision | regroup_rules.Wait | regroup_rules.Ending


class UnitRules:
    """The product's rules; a subclass is a variant that must fail."""

    def end(self, level: EpochLevel, reports: Sequence[AgentReport]) -> tuple[int, ...]:
        return unit_losses.list_to_end(level, reports)

    def decide(
        self, level: EpochLevel, reports: Sequence[AgentReport]
    ) -> tuple[tuple[EpochMember, ...], Decided]:
        return regroup_rules.decide_regroup(level, reports)


PRODUCT = UnitRules()


class Interrupted(UnitRules):
    """Variant: all living ranks continue, whatever units they belong to."""

    def end(self, level: EpochLevel, reports: Sequence[AgentReport]) -> tuple[int, ...]:
        return ()

    def decide(
        self, level: EpochLevel, reports: Sequence[AgentReport]
    ) -> tuple[tuple[EpochMember, ...], Decided]:
        return regroup_rules.decide_regroup(replace(level, mesh=ONE_RANK), reports)


class Unlike(UnitRules):
    """Variant: the last rank of a unit gets one micro-batch fewer than its siblings."""

    def decide(
        self, level: EpochLevel, reports: Sequence[AgentReport]
    ) -> tuple[tuple[EpochMember, ...], Decided]:
        survivors, decision = super().decide(level, reports)
        if isinstance(decision, Plan) and decision.shares:
            last = max(decision.shares)
            fewer = to_ranges(list_ranges(decision.shares[last])[:-1])
            decision = replace(decision, shares={**decision.shares, last: fewer})
        return survivors, decision


@lru_cache(maxsize=1 << 18)
def decide(
    level: int, told: tuple[Told, ...], rules: UnitRules
) -> tuple[tuple[int, ...], tuple[int, ...], Decided]:
    """The ranks that are ended, the numbers of the survivors, and the decision about them."""
    published, reports = kept(level), [report(t) for t in told]
    ended = rules.end(published, reports)
    survivors, decision = rules.decide(replace(published, ended=ended), reports)
    return ended, tuple(m.slot for m in survivors), decision


def order(
    level: int, survivors: tuple[int, ...], plan: Plan
) -> tuple[int, tuple[int, ...], tuple[wire.Regroup, ...]]:
    """The next epoch's level, its members' numbers in the order of their ranks, and their orders."""
    return _order(level, survivors, Planned(plan))


@lru_cache(maxsize=1 << 16)
def _order(
    level: int, survivors: tuple[int, ...], plan: Planned
) -> tuple[int, tuple[int, ...], tuple[wire.Regroup, ...]]:
    former = kept(level)
    members = [m for m in former.members if m.slot in survivors]
    following = regroup_rules.continue_epoch(
        former, members, plan.plan, number=former.number + 1, token="token"
    )
    orders = tuple(build_regroup(0, following, m) for m in following.members)
    return keep(following), tuple(m.slot for m in following.members), orders


def first_level(ranks: int, mesh: Mesh) -> EpochLevel:
    return EpochLevel(
        number=1,
        token="token",
        stage=Stage.HOLD,
        mesh=mesh,
        members=tuple(
            EpochMember(
                slot=n, attempt=0, incarnation=1, node_rank=n, first=n, lives=(1,), address=""
            )
            for n in range(ranks)
        ),
    )
