"""A fleet of nodes, what is found on them, and passes with a fake clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep_operator import kube
from everstep_operator.evidence import Claim, Evidence, Finding, Kind, is_known
from everstep_operator.fleet import apply, release
from everstep_operator.fleet.actions import Action
from everstep_operator.fleet.observing import plan_observing
from everstep_operator.fleet.plan import Plan, plan
from everstep_operator.fleet.view import Budget, Observed, Policy
from everstep_operator.nodes import NodeFacts
from everstep_operator.values import NodeState
from toy_cluster import ToyCluster

START = 1_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What stands on a GPU, as the rules would find it."""

    node: str
    gpu: str = "GPU-a"
    kind: Kind = Kind.XID
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
    memory: release.FleetMemory = field(default_factory=release.FleetMemory)
    creatable: bool = True
    gpus: Mapping[str, frozenset[str]] = field(default_factory=dict)
    silences: Mapping[str, str] = field(default_factory=dict)
    observe_only: bool = False

    def break_(self, node: str, **changes: object) -> "Fleet":
        self.faults.append(Fault(node=node, **changes))  # type: ignore[arg-type]
        return self

    def heal(self, node: str) -> "Fleet":
        self.faults = [fault for fault in self.faults if fault.node != node]
        return self

    def restart(self) -> "Fleet":
        """The operator comes back with nothing but what it finds standing there."""
        self.memory = release.FleetMemory()
        self.faults = [
            Fault(node=f.node, gpu=f.gpu, kind=f.kind, code=f.code, at=self.now, state=f.state, appeared=False)
            for f in self.faults
        ]  # fmt: skip
        return self

    def observe(self) -> Observed:
        nodes = self.cluster.nodes()
        served = self.cluster.crd != "missing"
        return Observed(
            nodes=nodes,
            quarantines=self.cluster.quarantines() if served else None,
            unreadable="" if served else "Gone: not found",
            creatable=self.cluster.crd == "served",
            findings={name: self._finding(node) for name, node in nodes.items()},
        )

    def plan(self) -> Plan:
        decide = plan_observing if self.observe_only else plan
        return decide(self.observe(), self.memory, self.policy, self.now)

    async def step(self, *, only: int | None = None) -> list[Action]:
        """One pass; `only` that many actions of it are done."""
        planned = self.plan()
        self.memory = planned.memory
        actions = list(planned.actions)[:only]
        await apply.apply_plan(self.cluster, actions, self.now)
        return actions

    async def settle(self, seconds: float = 3.0, *, pace: float = 0.5) -> "Fleet":
        """Passes until nothing is left to do, and some more time."""
        end = self.now + seconds
        while self.now < end:
            for _ in range(20):
                if not await self.step():
                    break
            else:
                raise AssertionError(f"does not come to rest: {self.plan().actions}")
            self.now += pace
        return self

    async def delete(self, *names: str) -> "Fleet":
        for name in names or [q.name for q in self.cluster.quarantines()]:
            self.cluster.remove(kube.QUARANTINES, name)
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
            silent=silent,
            silent_reason="ExporterSilent" if silent else "",
        )


def _claim(fault: Fault, node: NodeFacts) -> Claim:
    evidence = Evidence(
        machine=node.machine,
        gpu=fault.gpu,
        kind=fault.kind,
        code=fault.code if fault.kind is Kind.XID else 0,
        first_seen=fault.at,
        boot="" if fault.kind.outlives_boot else node.boot,
        appeared=fault.appeared,
    )
    return Claim(
        evidence=evidence,
        state=fault.state,
        reason="GpuMissing" if fault.kind is Kind.MISSING else "GpuFatalXid",
        message=f"{fault.gpu} is at fault ({fault.kind.value} {fault.code})",
    )
