"""Builders of values for the tests of the agent's decisions."""

from everstep_agent.coordinator.postmortem import Rank
from everstep_agent.peers.agent_report import AgentReport, Ended, State, WorkerReport
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_contract import levels, log
from everstep_contract.position import Phase


def a_report(slot: int, **changes: object) -> AgentReport:
    values: dict[str, object] = {
        "slot": slot,
        "attempt": 0,
        "incarnation": 1,
        "address": f"host-{slot}:7070",
        "joined": 1,
        "fresh": (1,),
    }
    return AgentReport(**(values | changes))  # type: ignore[arg-type]


def a_worker(**changes: object) -> WorkerReport:
    values: dict[str, object] = {
        "local": 0,
        "life": 1,
        "pid": 100,
        "state": State.TRACKED,
        "applied": 5,
    }
    return WorkerReport(**(values | changes))  # type: ignore[arg-type]


def a_member(slot: int, **changes: object) -> EpochMember:
    values: dict[str, object] = {
        "slot": slot,
        "attempt": 0,
        "incarnation": 1,
        "node_rank": slot,
        "lives": (1,),
        "address": f"host-{slot}:7070",
    }
    values |= changes
    first = values["node_rank"] * len(values["lives"])  # type: ignore[operator,arg-type]
    return EpochMember(**({"first": first} | values))  # type: ignore[arg-type]


def an_epoch(count: int = 2, **changes: object) -> EpochLevel:
    values: dict[str, object] = {
        "number": 1,
        "token": "t",
        "stage": Stage.RUNNING,
        "members": tuple(a_member(s) for s in range(count)),
    }
    return EpochLevel(**(values | changes))  # type: ignore[arg-type]


def stepping(slot: int, **changes: object) -> AgentReport:
    """An agent whose worker trains in epoch 1."""
    return a_report(slot, epoch=1, fresh=(), workers=(a_worker(**changes),))


def wanting(count: int, **changes: object) -> levels.Wanted:
    values: dict[str, object] = {
        "min_workers": count,
        "want_workers": count,
        "max_workers": count,
    }
    return levels.Wanted(**(values | changes))  # type: ignore[arg-type]


def a_claim(epoch: int = 1, **changes: object) -> log.Claim:
    values: dict[str, object] = {
        "epoch": epoch,
        "token": f"token-{epoch}",
        "members": (log.MemberId(slot=0, attempt=0, incarnation=1, rank=0, life=1),),
        "coordinator": "",
        "job_uid": "uid",
        "job": "ns/job",
    }
    return log.Claim(**(values | changes))  # type: ignore[arg-type]


def a_rank(rank: int, applied: int = 5, **changes: object) -> Rank:
    values: dict[str, object] = {
        "rank": rank,
        "slot": rank,
        "alive": True,
        "reachable": True,
        "applied": applied,
        "parked": True,
        "sound": True,
        "phase": Phase.APPLIED,
    }
    return Rank(**(values | changes))  # type: ignore[arg-type]


def ended(life: int) -> tuple[Ended, ...]:
    return (Ended(local=0, life=life),)
