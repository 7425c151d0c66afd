"""A fleet of nodes, the faults found on them, and passes with a fake clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep_operator import kube
from everstep_operator.evidence import MISSING, Claim, Evidence, Finding, is_known
from everstep_operator.fleet import apply
from everstep_operator.fleet.actions import Action, Tell
from everstep_operator.fleet.budget import Budget
from everstep_operator.fleet.memory import FleetMemory, with_deleted, with_refused
from everstep_operator.fleet.observed import (
    Definition,
    Findings,
    Observed,
    Policy,
    shows_more,
    tells,
)
from everstep_operator.fleet.observing import plan_observing
from everstep_operator.fleet.plan import Plan, plan
from everstep_operator.health.verdicts import build_held, choose_verdicts
from everstep_operator.nodes import NodeFacts
from everstep_operator.quarantines import rename_evidence, to_quarantine
from everstep_operator.roster import build_roster
from everstep_operator.values import NodeState, NodeVerdict
from toy_cluster import ToyCluster

START = 1_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of a GPU, as the rules find it."""

    node: str
    gpu: str = "GPU-a"
    kind: str = "xid"
    code: int = 64
    at: float = START
    state: NodeState = NodeState.LEAVING
    appeared: bool = True


@dataclass(slots=True)
class Fleet:
    cluster: ToyCluster = field(default_factory=ToyCluster)
    faults: list[Fault] = field(default_factory=list)
    policy: Policy = field(default_factory=lambda: Policy(budget=Budget(number=2)))
    now: float = START + 1
    memory: FleetMemory = field(default_factory=FleetMemory)
    creatable: bool = True
    gpus: Mapping[str, frozenset[str]] = field(default_factory=dict)
    silences: Mapping[str, str] = field(default_factory=dict)
    observe_only: bool = False
    healed: set[tuple[str, str, str]] = field(default_factory=set)
    """(node, GPU, kind) that the exporter shows to be without a fault again."""

    def __post_init__(self) -> None:
        self.cluster.clock = lambda: self.now

    def break_(self, node: str, **changes: object) -> "Fleet":
        self.faults.append(Fault(node=node, **changes))  # type: ignore[arg-type]
        return self

    def heal(self, node: str) -> "Fleet":
        self.healed |= {(f.node, f.gpu, f.kind) for f in self.faults if f.node == node}
        return self.hide(node)

    def hide(self, node: str) -> "Fleet":
        """The exporter no longer shows the faults, but does not show either that they are over."""
        self.faults = [fault for fault in self.faults if fault.node != node]
        return self

    def restart(self) -> "Fleet":
        """Restart the operator, which then knows only what is in the cluster."""
        self.memory = FleetMemory()
        self.faults = [
            Fault(node=f.node, gpu=f.gpu, kind=f.kind, code=f.code, at=self.now, state=f.state, appeared=False)
            for f in self.faults
        ]  # fmt: skip
        return self

    def observe(self) -> Observed:
        nodes = self.cluster.nodes()
        found = {name: self._finding(node) for name, node in nodes.items()}
        served = self.cluster.crd != "missing"
        return Observed(
            roster=build_roster(nodes),
            quarantines=rename_evidence(self.cluster.quarantines(), nodes) if served else None,
            unreadable="" if served else "Gone: not found",
            definition=Definition(
                creatable=self.cluster.crd == "served", created_at=self.cluster.crd_created_at
            ),
            findings=Findings(
                by_node=found,
                telling=[name for name, finding in found.items() if tells(finding)],
                unlisted=[name for name, f in found.items() if shows_more(f, nodes[name])],
            ),
        )

    def verdicts(self) -> dict[str, NodeVerdict]:
        """The verdicts that the next pass publishes to the jobs."""
        return self._publish(self.plan().memory)

    def verdicts_at_once(self) -> dict[str, NodeVerdict]:
        """The verdicts that are published before the next pass, for instance because a rank has died."""
        return self._publish(self.memory)

    def _publish(self, memory: FleetMemory) -> dict[str, NodeVerdict]:
        observed, held = self.observe(), build_held(memory)
        return choose_verdicts(observed.roster, observed.findings, held, self.now)

    def states(self) -> dict[str, str]:
        return {name: verdict.state.value for name, verdict in self.verdicts().items()}

    def plan(self) -> Plan:
        decide = plan_observing if self.observe_only else plan
        return decide(self.observe(), self.memory, self.policy, self.now)

    async def step(self, *, only: int | None = None) -> list[Action]:
        """Run one pass; with `only`, carry out only so many of its actions."""
        planned = self.plan()
        self.memory = planned.memory
        actions = list(planned.actions)[:only]
        outcome = await apply.apply_plan(self.cluster, actions, self.now)
        self.memory = with_refused(self.memory, outcome.refused, self.now)
        return actions

    async def settle(self, seconds: float = 3.0, *, pace: float = 0.5) -> "Fleet":
        """Run passes for `seconds`, at each moment until nothing is left to do."""
        end = self.now + seconds
        while self.now < end:
            for _ in range(20):
                if all(isinstance(action, Tell) for action in await self.step()):
                    break
            else:
                raise AssertionError(f"the passes do not end: {self.plan().actions}")
            self.now += pace
        return self

    async def delete(self, *names: str, observed: bool = True) -> "Fleet":
        """Delete quarantines, by default all. If `observed`, the watch reports it; else the watch was cut."""
        for name in names or [q.name for q in self.cluster.quarantines()]:
            gone = to_quarantine(self.cluster.remove(kube.QUARANTINES, name))
            if observed:
                self.memory = with_deleted(self.memory, gone)
        return await self.settle()

    def _finding(self, node: NodeFacts) -> Finding:
        claims = [_claim(fault, node) for fault in self.faults if fault.node == node.name]
        kept = [claim for claim in claims if not is_known(claim.evidence, node.answered)]
        kept.sort(key=lambda claim: (claim.evidence.first_seen, claim.evidence.identity))
        silent = self.silences.get(node.name, "")
        return Finding(
            node=node.name,
            claims=tuple(kept),
            present=self.gpus.get(node.name, frozenset()),
            clear=self._clear(node.name),
            silent=silent,
            silent_reason="ExporterSilent" if silent else "",
        )

    def _clear(self, node: str) -> frozenset[tuple[str, str]]:
        faulty = {(f.gpu, f.kind) for f in self.faults if f.node == node}
        return frozenset((gpu, kind) for name, gpu, kind in self.healed if name == node) - faulty


def _claim(fault: Fault, node: NodeFacts) -> Claim:
    evidence = Evidence(
        machine=node.machine,
        gpu=fault.gpu,
        kind=fault.kind,
        code=fault.code if fault.kind == "xid" else 0,
        first_seen=fault.at,
        boot="" if fault.kind == "row-remap-failure" else node.boot,
        appeared=fault.appeared,
    )
    return Claim(
        evidence=evidence,
        state=fault.state,
        reason="GpuMissing" if fault.kind == MISSING else "GpuFatalXid",
        message=f"{fault.gpu} is at fault ({fault.kind} {fault.code})",
    )
